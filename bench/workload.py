"""What the variants work on: parameters, gradients and optimizer states, shared by all of them.

Sharing keeps the comparison fair (the same memory, the same pages) and lets every variant fit on a small machine: our
states have torch's names and shapes, so several optimizers can hold the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import accumfused as af
from bench.shapes import Shapes

LR, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-4, 0.1, 1.0
_PATTERN = (1 << 20) + 7  # random numbers, repeated: drawing 500M of them would take longer than the benchmark


def random_tensors(shapes: Shapes, scale: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Normally distributed tensors of a standard deviation of `scale`."""
    pattern = torch.randn(_PATTERN).mul_(scale).to(dtype)
    tensors = [torch.empty(shape, dtype=dtype) for shape in shapes]
    for tensor in tensors:
        fill(tensor, pattern)
    return tensors


def fill(tensor: Tensor, pattern: Tensor) -> None:
    """Repeats the pattern over a contiguous tensor."""
    flat = tensor.view(-1)
    for start in range(0, len(flat), len(pattern)):
        piece = flat[start : start + len(pattern)]
        piece.copy_(pattern[: len(piece)])


class Workload:
    """Parameters with gradients and AdamW's states."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.params = [torch.nn.Parameter(tensor) for tensor in random_tensors(shapes, 0.02)]
        self.grads = random_tensors(shapes, 1e-3)
        self.count = sum(param.numel() for param in self.params)
        # No second moment is far below its first one: the updates stay about as large as lr.
        moments = zip(random_tensors(shapes, 1e-3), random_tensors(shapes, 1e-3), strict=True)
        self.states = [
            {"step": torch.tensor(10.0), "exp_avg": first, "exp_avg_sq": second.square_().add_(1e-6)}
            for first, second in moments
        ]

    def stock(self, *, fused: bool = False, foreach: bool = False) -> torch.optim.AdamW:
        """torch's AdamW over the parameters, with the shared states."""
        optimizer = torch.optim.AdamW(self.params, lr=LR, weight_decay=WEIGHT_DECAY, fused=fused, foreach=foreach)
        optimizer.state.update(zip(self.params, self.states, strict=True))
        return optimizer

    def ours(self) -> af.AdamW:
        """accumfused's AdamW over the parameters, with the shared states."""
        optimizer = af.AdamW(self.params, lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM)
        optimizer.state.update(zip(self.params, self.states, strict=True))
        return optimizer

    def set_grads(self, grads: Sequence[Tensor] | None = None) -> None:
        """Makes these tensors (by default `self.grads`) the parameters' gradients; nothing is copied."""
        for param, grad in zip(self.params, self.grads if grads is None else grads, strict=True):
            param.grad = grad

    def difference(self, one: Callable[[], Any], other: Callable[[], Any], grads: Sequence[Sequence[Tensor]]) -> float:
        """The largest |difference| of the parameters after `one` and after `other`, both from what there is now.

        Everything, the gradients that they may rewrite included, is put back before `other` and after it.
        """
        kept = [*self.params, *(tensor for state in self.states for tensor in state.values())]
        kept += [grad for one_set in grads for grad in one_set]
        with torch.no_grad():
            before = [tensor.clone() for tensor in kept]
            one()
            results = [param.clone() for param in self.params]
            torch._foreach_copy_(kept, before)
            other()
            largest = max(
                (float((a - b).abs().max()) for a, b in zip(results, self.params, strict=True) if a.numel()),
                default=0.0,
            )
            moved = any(not torch.equal(a, b) for a, b in zip(results, before, strict=False))
            torch._foreach_copy_(kept, before)
        assert moved, "the step did nothing"
        return largest
