"""`python -m bench.numerics.sums`: a window's sums of bf16 gradients in fp32, in bf16 as here, and as torch's p.grad.

Relative error of the sum against fp64, and that along the true sum: a bias, of which a mean over elements leaves little
else. Then a small GPT, trained in bf16 with windows of 64 micro-batches in each of the three ways. --quick shows that
it runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import accumfused as af
from bench.numerics.weights import study
from bench.tables import Row

ELEMENTS, COUNTS, RATIOS = 200_000, (4, 16, 64, 512), (0.03, 0.3, 3.0)
BF16 = torch.bfloat16
WAYS: dict[str, dict[str, Any] | None] = {
    "fp32 sums": {}, "bf16 sums": {"sum_dtype": BF16}, "torch's bf16 p.grad": None,
}  # fmt: skip


def gradients(count: int, ratio: float, elements: int = ELEMENTS) -> Iterator[Tensor]:
    """Yields bf16 [elements], the same in every run: Gaussian noise around means of their own.

    Args:
        ratio: of the standard deviation of the means to that of the noise.
    """
    generator = torch.Generator().manual_seed(count)
    means = ratio * torch.randn(elements, generator=generator)
    for _ in range(count):
        yield (means + torch.randn(elements, generator=generator)).to(BF16)


@functools.cache
def errors(way: str, count: int, ratio: float, elements: int = ELEMENTS, backend: str = "auto") -> tuple[float, float]:
    """Adds up a window; returns the relative error of its sum, and the part of the true sum that it has too much."""
    param, settings = torch.nn.Parameter(torch.zeros(elements, dtype=BF16)), WAYS[way]
    truth = torch.zeros(elements, dtype=torch.float64)
    optimizer = None if settings is None else af.SGD([param], lr=1.0, backend=backend, rounding_seed=0, **settings)
    for grad in gradients(count, ratio, elements):
        truth += grad
        if optimizer is None:
            torch.autograd.backward([param], [grad])
        else:
            param.grad = grad
            optimizer.accumulate()
    found = param.grad if optimizer is None else optimizer._engine.window.sums[0]
    assert found is not None
    error = found.double() - truth
    return float(error.norm() / truth.norm()), float(error @ truth / (truth @ truth))


def train(way: str, windows: int, micro_batches: int = 64) -> list[float]:
    """Trains a GPT of 22,000 bf16 parameters on Python's help texts; returns the mean loss of each window."""
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    from text_data import collate, paragraphs
    from text_model import GPT

    torch.manual_seed(0)
    samples, model = paragraphs(32), GPT(context=32, width=32, depth=1, heads=2).bfloat16()
    settings = WAYS[way] or {}
    optimizer = af.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0, rounding_seed=0, **settings)
    generator, losses = torch.Generator().manual_seed(0), list[float]()
    for _ in range(windows):
        total = 0.0
        for _ in range(micro_batches):
            drawn = torch.randint(len(samples), (2,), generator=generator).tolist()
            loss = model.loss(collate([samples[index] for index in drawn])) / micro_batches
            loss.backward()
            total += float(loss.detach())
            if way != "torch's bf16 p.grad":
                optimizer.accumulate()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def main() -> None:
    quick = sys.argv[1:] == ["--quick"]
    elements, counts, windows = (1 << 12, COUNTS[:2], 2) if quick else (ELEMENTS, COUNTS, 60)

    def cells(show: Callable[[float, float], str]) -> Callable[[str], Row]:
        def row(way: str) -> Row:
            found = {(k, ratio): errors(way, k, ratio, elements) for k in counts for ratio in RATIOS}
            return {f"K = {k}, {ratio:g}": show(*cell) for (k, ratio), cell in found.items()}

        return row

    title = "of sums of K bf16 gradients, by the ratio of signal to noise"
    study(f"Relative error {title}", WAYS, cells(lambda error, _: f"{error:.1e}"))
    study(f"Bias {title}", WAYS, cells(lambda _, along: f"{along:+.0e}"))

    def losses(way: str) -> Row:
        found = train(way, windows)
        return {f"windows {n - 9} to {n}": f"{sum(found[n - 10 : n]) / 10:.4f}" for n in range(20, windows + 1, 20)}

    study(f"Mean loss of a GPT in bf16, windows of 64 micro-batches, {windows} windows", WAYS, losses)


if __name__ == "__main__":
    main()
