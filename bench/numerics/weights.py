"""`python -m bench.numerics.weights`: steps far below a 16-bit weight's resolution, against the same steps in fp64.

2000 tiny steps of every format, ours and other packages', and 2000 steps of weight decay alone. It takes some minutes,
with --quick seconds, which show that it runs. The figures are the same on every machine, up to what other packages draw
and compile.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import accumfused as af
from bench.exact import Moments, master
from bench.peers import gap, other, quiet
from bench.tables import Row, Table, show

BF16, FP32 = torch.bfloat16, torch.float32
STEPS, LR = 2000, 1e-7
# Of weights, half to one and a half of it -> how many times the elements: random steps of large ones are rarer.
SIZES = {0.02: 1, 1.0: 8}
DECAY = {"lr": 1e-3, "weight_decay": 0.1}
# Updates vary from step to step, so that no rounding error repeats itself 2000 times, fp32's own included; no first
# moment and a short second one, so that even states in bf16, as some packages keep them, do not disturb the figures.
OPTIONS: dict[str, Any] = {"betas": (0.0, 0.9), "eps": 1e-8, "weight_decay": 0.0}

_PERIOD = 1 << 13  # elements with gradients of their own; then they repeat
_FEWEST = 1 << 14  # elements: what exact masters need


@dataclass(frozen=True)
class Contender:
    """One way to keep weights, and the optimizer that does it.

    Args:
        make: AdamW over parameter groups that carry their lr, with its options (betas, eps, weight_decay).
        bytes_per_parameter: of the weight and what belongs to it, without moments and gradient.
        weight: the weight that the optimizer remembers, fp64: more than the parameter shows, where it keeps more.
        elements: that a statistic of it needs.
    """

    dtype: torch.dtype
    make: Callable[..., torch.optim.Optimizer]
    bytes_per_parameter: float = 2.0
    weight: Callable[[torch.optim.Optimizer, Tensor], Tensor] = master
    elements: int = _FEWEST
    grad_dtype: torch.dtype = BF16


def ours(dtype: torch.dtype, bytes_per_parameter: float, elements: int = _FEWEST, **settings: Any) -> Contender:
    make = partial(af.AdamW, rounding_seed=0, **settings)
    return Contender(dtype, make, bytes_per_parameter, elements=elements)


def _heavyball(groups: Any, **options: Any) -> torch.optim.Optimizer:
    importlib.import_module("heavyball.utils").compile_mode = "default"  # its own default tries many kernels first
    return other("heavyball", "AdamW", param_ecc="bf16+8")(groups, **options)


def _optimi_weight(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    return param.detach().double() + optimizer.state[param]["kahan_comp"].double()


def _heavyball_weight(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    """Parameter plus correction, in units of half an ulp / 127."""
    utils: Any = importlib.import_module("heavyball.utils")
    correction = next(iter(optimizer.state[param].values()))["param::ecc"]
    return utils._ULPState(correction, utils._ULPState._SMAX[correction.dtype]).decode(param.detach()).double()


_RANDOM = 1 << 16  # elements of packages that draw random numbers: they take some 100 ns for each
_KAHAN = other("optimi", "AdamW", lr=1e-3, triton=False, foreach=False)
_TORCHAO = other("torchao.optim", "_AdamW", bf16_stochastic_round=True)
CONTENDERS = {
    "fp32": ours(FP32, 4),
    "bf16 + split16": ours(BF16, 4, master_weights="split16"),
    "bf16 + split8": ours(BF16, 3, 1 << 18, master_weights="split8"),
    "bf16 stochastic": ours(BF16, 2, 1 << 20, master_weights=None),
    "torch.optim.AdamW, bf16": Contender(BF16, torch.optim.AdamW),
    "optimi Kahan": Contender(BF16, _KAHAN, 4, _optimi_weight),
    "heavyball bf16+8": Contender(BF16, _heavyball, 3, _heavyball_weight, _RANDOM),
    "torchao stochastic": Contender(BF16, _TORCHAO, elements=_RANDOM),
}


def weights(size: float, elements: int) -> Tensor:
    """Returns bf16 numbers, in fp32, so that every format begins at the same place."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(elements, generator=generator).mul_(size).add_(size / 2)
    sign = torch.randint(0, 2, (elements,), generator=generator).mul_(2).sub_(1)
    return (spread * sign).to(BF16).float()


def gradients(count: int) -> Iterator[Tensor]:
    """Yields bf16, shape [_PERIOD]: normal around 1, times a scale of each element: updates go one way in sum."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.rand(_PERIOD, generator=generator).mul_(3).exp_().mul_(1e-3)
    for _ in range(count):
        yield torch.randn(_PERIOD, generator=generator).add_(1).mul_(scale).to(BF16)


def exact_updates(count: int) -> Tensor:
    """Returns the sum of AdamW's updates per unit of lr, fp64, shape [_PERIOD]."""
    step, total = Moments(betas=OPTIONS["betas"], eps=OPTIONS["eps"]), torch.zeros(_PERIOD, dtype=torch.double)
    for grad in gradients(count):
        total -= step(grad)
    return total


def follow(contender: Contender, cells: Sequence[tuple[float, float, int]], count: int) -> list[dict[str, float]]:
    """Takes so many steps from weights of each cell (size, lr, elements), and says how far they moved.

    Returns:
        A row a cell: `bias` is the mean displacement over that in fp64, minus 1, and `bias_error` its statistical
        error; `error` is the root mean square of an element's error over that of its displacement.
    """
    params = [_parameter(contender, weights(size, elements)) for size, _, elements in cells]
    starts = [param.detach().clone().double() for param in params]
    groups = [{"params": [param], "lr": lr} for param, (_, lr, _) in zip(params, cells, strict=True)]
    optimizer = contender.make(groups, **OPTIONS)
    grads = [torch.empty_like(param, dtype=contender.grad_dtype) for param in params]
    for grad in gradients(count):
        for param, own in zip(params, grads, strict=True):
            own.view(-1, _PERIOD).copy_(grad)
            param.grad = own  # heavyball takes it away
        optimizer.step()
    updates, rows = exact_updates(count), []
    for (_, lr, _), start, param in zip(cells, starts, params, strict=True):
        exact = lr * updates
        errors = (contender.weight(optimizer, param) - start).view(-1, _PERIOD) - exact
        rows.append({
            "bias": float(errors.mean() / exact.mean()),
            "bias_error": float(errors.std() / math.sqrt(errors.numel()) / exact.mean().abs()),
            "error": float(errors.square().mean().sqrt() / exact.square().mean().sqrt()),
        })  # fmt: skip
    return rows


def decay(contender: Contender, count: int = STEPS) -> tuple[float, float]:
    """Applies weight decay alone. Returns what is left of the weights, and what should be left."""
    param = _parameter(contender, weights(0.02, _FEWEST))
    start = param.detach().clone().double()
    lr, weight_decay = DECAY.values()
    optimizer = contender.make([{"params": [param], "lr": lr}], betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay)
    grad = torch.zeros_like(param, dtype=contender.grad_dtype)
    for _ in range(count):
        param.grad = grad
        optimizer.step()
    end = contender.weight(optimizer, param)
    return float((end * start).sum() / start.square().sum()), (1 - lr * weight_decay) ** count


def _parameter(contender: Contender, values: Tensor) -> torch.nn.Parameter:
    param = torch.nn.Parameter(values.to(contender.dtype))
    if contender.dtype != contender.grad_dtype:
        param.grad_dtype = contender.grad_dtype
    return param


def study(title: str, names: Iterable[str], row: Callable[[str], Row]) -> None:
    """Prints a table with the row of each name, or with the reason why it has none."""
    from rich.console import Console

    table = Table(title)
    for name in names:
        try:
            with quiet():
                table.rows.append({"name": name, **row(name)})
        except Exception as error:  # of somebody else's package, and of any kind
            table.rows.append(gap(name, error))
    show(table, Console(width=200))


def main() -> None:
    quick = sys.argv[1:] == ["--quick"]
    count = 20 if quick else STEPS

    def row(name: str) -> Row:
        contender = CONTENDERS[name]
        more = {size: 1 if contender.elements == _FEWEST else times for size, times in SIZES.items()}
        cells = [(size, LR, _PERIOD if quick else times * contender.elements) for size, times in more.items()]
        rows, (left, exact) = follow(contender, cells, count), decay(contender, count)
        found: Row = {"bytes": contender.bytes_per_parameter}
        for size, cell in zip(SIZES, rows, strict=True):
            bias, luck, error = (100 * cell[key] for key in ("bias", "bias_error", "error"))
            found |= {f"near {size:g}: bias": f"{bias:+.4f} ± {luck:.4f}", f"near {size:g}: error": f"{error:.3g}"}
        return found | {"left by weight decay alone": f"{left:.5f}", "in fp64": f"{exact:.5f}"}

    study(f"Bias of the displacement after {count} steps of lr {LR:g}, and an element's error, in %", CONTENDERS, row)


if __name__ == "__main__":
    main()
