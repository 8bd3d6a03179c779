"""`python -m bench.numerics.moments`: the updates of moments in few bits, ours and other packages', against fp64.

--quick makes few steps, which show that it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import accumfused as af
from bench.exact import BETAS, EPS, Moments
from bench.numerics.weights import study
from bench.peers import other
from bench.tables import Row

KINDS = ("normal", "log-normal 1", "log-normal 2", "log-normal 3", "Student t(3)", "sparse rows")
STEPS = 300
_ROW = 64  # elements that are zero together where gradients are sparse
_LR = 1e-3

Step = Callable[[Tensor], Tensor]  # gradients, a row for each kind -> updates over lr, fp64, in the same shape


def gradients(elements: int, count: int) -> Iterator[Tensor]:
    """Yields fp32 [len(KINDS), elements]: the same in every run.

    The log-normal ones are normal noise around a mean of its own, times a scale of each element whose logarithm has
    that standard deviation; of sparse rows, one in 50 has a gradient in a step.
    """
    generator = torch.Generator().manual_seed(1)

    def normal() -> Tensor:
        return torch.randn(elements, generator=generator)

    scales = [(sigma * normal()).exp() for sigma in (0, 1, 2, 3)]
    means = [0.3 * normal() for _ in scales]
    for _ in range(count):
        spread = [scale * (mean + normal()) for scale, mean in zip(scales, means, strict=True)]
        chi_squared = sum(normal().square() for _ in range(3))
        alive = torch.rand(elements // _ROW, generator=generator) < 0.02
        yield torch.stack([*spread, normal() / (chi_squared / 3).sqrt(), normal() * alive.repeat_interleave(_ROW)])


ours = partial(af.AdamW, rounding_seed=0, state_dtype_min_numel=0)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fp32 states": partial(ours, state_dtype=torch.float32),
    "bf16 states": partial(ours, state_dtype=torch.bfloat16),
    "8-bit states": partial(ours, state_dtype="8bit"),
    "torch.optim.AdamW, bf16": torch.optim.AdamW,
    "torchao 8-bit states": other("torchao.optim", "AdamW8bit"),
    "bitsandbytes 8-bit states": other("bitsandbytes.optim", "AdamW8bit"),
}


def stepping(name: str, count: int, elements: int) -> Step:
    """Returns a step of an optimizer over parameters that are put back to zero before it: they show its update."""
    dtype = torch.bfloat16 if name.endswith("bf16") else torch.float32
    params = [torch.nn.Parameter(torch.zeros(elements, dtype=dtype)) for _ in range(count)]
    optimizer = OPTIMIZERS[name]([{"params": params, "lr": _LR}], betas=BETAS, eps=EPS, weight_decay=0.0)

    def step(grads: Tensor) -> Tensor:
        for param, grad in zip(params, grads, strict=True):
            param.detach().zero_()
            param.grad = grad.to(dtype)
        optimizer.step()
        return torch.stack([param.detach().double() for param in params]) / -_LR

    return step


def updates(name: str, elements: int = 1 << 14, count: int = STEPS) -> list[dict[str, float]]:
    """Returns a row for each kind of gradient: how an optimizer's updates differ from those of moments in fp64.

    `largest` is the largest |update| over the exact one's largest; `error` the root mean square of the updates' errors
    over that of the exact updates, in the second half of the steps.
    """
    dtype = torch.bfloat16 if name.endswith("bf16") else torch.float32
    step = stepping(name, len(KINDS), elements)
    exact = Moments()
    largest, exact_largest, squares, exact_squares = (torch.zeros(len(KINDS), dtype=torch.double) for _ in range(4))
    for number, grads in enumerate(gradients(elements, count), 1):
        found, right = step(grads), exact(grads.to(dtype))
        largest = torch.maximum(largest, found.abs().amax(1))
        exact_largest = torch.maximum(exact_largest, right.abs().amax(1))
        if number > count // 2:
            squares += (found - right).square().mean(1)
            exact_squares += right.square().mean(1)
    rows = zip((largest / exact_largest).tolist(), (squares / exact_squares).sqrt().tolist(), strict=True)
    return [{"largest": ratio, "error": error} for ratio, error in rows]


def main() -> None:
    count = 20 if sys.argv[1:] == ["--quick"] else STEPS

    def row(name: str) -> Row:
        texts = [f"{row['largest']:.3g}x {100 * row['error']:.3g}%" for row in updates(name, count=count)]
        return dict(zip(KINDS, texts, strict=True))

    study("Updates from stored moments: largest |update| over the exact one's; error of updates", OPTIMIZERS, row)


if __name__ == "__main__":
    main()
