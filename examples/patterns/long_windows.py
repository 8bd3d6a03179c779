"""Pattern: windows of many micro-batches.

Pitfall: autograd sums in the gradients' dtype. In bf16 a sum of N gradients loses what is smaller than 1/256 of it:
from some hundred micro-batches on, whole gradients.
Remedy: the sums here are fp32, whatever the gradients. The rest is the gradients' own rounding, which averages out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import accumfused as af

ELEMENTS = 4096
LENGTHS = (4, 64, 1024, 4096)


def gradients(count: int) -> Tensor:
    """[count, elements] of fp32 numbers: a mean of 1, and noise of the same size."""
    return 1 + torch.randn(count, ELEMENTS, generator=torch.Generator().manual_seed(0))


def autograd(grads: Tensor, dtype: torch.dtype) -> Tensor:
    param = nn.Parameter(torch.zeros(ELEMENTS, dtype=dtype))
    for grad in grads:
        (param * grad.to(dtype)).sum().backward()
    assert param.grad is not None
    return param.grad


def here(grads: Tensor, dtype: torch.dtype) -> Tensor:
    param = nn.Parameter(torch.zeros(ELEMENTS, dtype=dtype))
    optimizer = af.SGD([param], lr=1.0)
    for grad in grads[:-1]:
        (param * grad.to(dtype)).sum().backward()
        optimizer.accumulate()
    (param * grads[-1].to(dtype)).sum().backward()
    optimizer.accumulate(last=True)
    assert param.grad is not None
    return param.grad


def main(lengths: Sequence[int] = LENGTHS) -> dict[str, float]:
    found = {}
    ways = {"autograd": autograd, "here": here}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for length in lengths:
            grads = gradients(length)
            truth = grads.to(dtype).double().sum(0)
            for way, loop in ways.items():
                off = (loop(grads, dtype).double() - truth).norm() / truth.norm()
                found[f"{way}, {name}, N = {length}"] = float(off)
    for name in ("fp32", "bf16"):
        numbers = {way: [found[f"{way}, {name}, N = {length}"] for length in lengths] for way in ways}
        said = [f"{way} {', '.join(f'{number:.1e}' for number in each)}" for way, each in numbers.items()]
        print(f"{name} gradients, N = {', '.join(map(str, lengths))}: sums off by", "; ".join(said))
    return found


if __name__ == "__main__":
    main()
