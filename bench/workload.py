"""What the variants work on: parameters, gradients and optimizer states, shared by all of them.

Sharing keeps the comparison fair (the same memory, the same pages) and lets every variant fit on a small machine: our
states have torch's names and shapes, so several optimizers can hold the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import accumfused as af
from bench import exact
from bench.exact import ADAMW, MAX_GRAD_NORM
from bench.shapes import Shapes

CPU = torch.device("cpu")
Sets = Sequence[Sequence[Tensor]]  # gradients of several micro-batches
STEPS = 10.0  # that the optimizers have made before
_PATTERN = (1 << 20) + 7  # random numbers, repeated: drawing 500M of them would take longer than the benchmark


def random_tensors(
    shapes: Shapes, scale: float, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> list[Tensor]:
    """Normally distributed tensors of a standard deviation of `scale`."""
    pattern = torch.randn(_PATTERN, device=device).mul_(scale).to(dtype)
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    for piece in (piece for tensor in tensors for piece in tensor.view(-1).split(_PATTERN)):
        piece.copy_(pattern[: len(piece)])
    return tensors


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Counts an optimizer's states on this process, numbers left out."""
    states = (value for entries in optimizer.state.values() for value in entries.values())
    return sum(_bytes(value) for value in states if isinstance(value, Tensor) and value.numel() > 1)


def _bytes(tensor: Tensor) -> int:
    """Counts the parts of subclasses, too."""
    if hasattr(tensor, "__tensor_flatten__"):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return sum(_bytes(part) for part in parts if isinstance(part, Tensor))
    return tensor.nbytes


class Workload:
    """Parameters with gradients and AdamW's states, on a device."""

    def __init__(self, shapes: Shapes, device: torch.device = CPU) -> None:
        self.shapes = shapes
        self.device = device
        self.params = [torch.nn.Parameter(tensor) for tensor in self.random(0.02)]
        self.grads = self.random(1e-3)
        self.count = sum(param.numel() for param in self.params)
        # No second moment is far below its first one: the updates stay about as large as lr.
        self.states = [
            {"step": torch.tensor(STEPS, device=device), "exp_avg": first, "exp_avg_sq": second.square_().add_(1e-6)}
            for first, second in zip(self.random(1e-3), self.random(1e-3), strict=True)
        ]
        self._own_steps: list[Tensor] = []  # on the host, of optimizers that read them there

    def random(self, scale: float = 1e-3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Tensors of the parameters' shapes."""
        return random_tensors(self.shapes, scale, dtype, self.device)

    def stock(self, *, fused: bool = False, foreach: bool = False, capturable: bool = False) -> torch.optim.AdamW:
        """torch's AdamW over the parameters, with the shared states."""
        optimizer = torch.optim.AdamW(self.params, fused=fused, foreach=foreach, capturable=capturable, **ADAMW)
        states = self.states
        if not fused and not capturable and self.device.type != "cpu":  # torch keeps these counts on the host
            states = [{**state, "step": torch.tensor(STEPS)} for state in states]
            self._own_steps += [state["step"] for state in states]
        optimizer.state.update(zip(self.params, states, strict=True))
        return optimizer

    def ours(self, backend: str = "auto") -> af.AdamW:
        """accumfused's AdamW over the parameters, with the shared states."""
        optimizer = af.AdamW(self.params, max_grad_norm=MAX_GRAD_NORM, backend=backend, **ADAMW)
        optimizer.state.update(zip(self.params, self.states, strict=True))
        return optimizer

    def set_grads(self, grads: Sequence[Tensor] | None = None) -> None:
        """Makes these tensors (by default `self.grads`) the parameters' gradients; nothing is copied."""
        for param, grad in zip(self.params, self.grads if grads is None else grads, strict=True):
            param.grad = grad

    @contextmanager
    def put_back(self, sets: Sets | None = None) -> Iterator[dict[int, Tensor]]:
        """Puts parameters, states and these gradients (by default `self.grads`) back in the end.

        Yields:
            A tensor's id -> a copy of what it held.
        """
        sets = [self.grads] if sets is None else sets
        states = [tensor for state in self.states for tensor in state.values()]
        kept = [*self.params, *states, *self._own_steps, *(grad for one_set in sets for grad in one_set)]
        with torch.no_grad():
            saved = {id(tensor): tensor.clone() for tensor in kept}
            try:
                yield saved
            finally:  # also after somebody else's optimizer that fails half-way
                for device in {tensor.device for tensor in kept}:
                    there = [tensor for tensor in kept if tensor.device == device]
                    torch._foreach_copy_(there, [saved[id(tensor)] for tensor in there])

    def error(self, run: Callable[[], Any], sets: Sets | None = None, scale: float = 1.0) -> float:
        """The largest error of a parameter after this step, against the same step in fp64; all is put back.

        Args:
            run: one whole step from the workload's beginning, with the gradients that it takes in place.
            sets: the micro-batches' gradients, of which the step takes the sum; by default `self.grads` alone.
            scale: what the step multiplies gradients by before it clips them.

        Raises:
            WrongError: the step did nothing, or something else.
        """
        sets = [self.grads] if sets is None else sets
        firsts, seconds = ([state[name] for state in self.states] for name in ("exp_avg", "exp_avg_sq"))
        errors = []
        with self.put_back(sets) as saved:
            run()
            grads = [[saved[id(grad)] for grad in one_set] for one_set in sets]
            factor = exact.coefficient(grads, scale)
            before = [[saved[id(tensor)] for tensor in tensors] for tensors in (self.params, firsts, seconds)]
            pieces = exact.pieces(self.params, firsts, *before, *grads)
            for found, found_first, param, first, second, *several in pieces:
                grad = exact.total(several).mul_(factor)
                moments = exact.Moments(first.double(), second.double(), int(STEPS))
                wrong = exact.stepped(param.double(), moments(grad)) - found
                compared = (wrong, moments.moments[0] - found_first, found - param, grad)
                errors.append(torch.stack([each.abs().max().double() for each in compared]))  # NaN if there is one
        error, moment_error, moved, largest_grad = torch.stack(errors).amax(0).tolist()
        allowed = exact.MOMENT_TOLERANCE
        allowed += (1 - exact.BETAS[0]) * largest_grad * exact.COEFFICIENT_TOLERANCE[self.device.type]
        if not moved > 0:
            raise exact.WrongError("the step did nothing", float(error))
        if not error <= exact.PARAM_TOLERANCE:  # nor NaN
            raise exact.WrongError(f"a parameter is {error:.1e} off", float(error))
        if not moment_error <= allowed:
            raise exact.WrongError(f"a first moment is {moment_error:.1e} off, more than {allowed:.1e}", float(error))
        return float(error)
