"""A training loop in words: two parameters, their optimizer, and a verb for each call that a loop makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import Linear, ModuleList, Parameter, ParameterList

import accumfused as af
from accumfused.loop import linears

Verb = Callable[["Loop"], Any]


class Loop:
    """Two parameters of 8, of which a `backward` and a `step` make 7.5 and 7."""

    def __init__(
        self, backend: str, words: str = "", *, bucket: int | None = None, fuses: bool = False, scaler: Any = None,
        **options: Any,
    ) -> None:  # fmt: skip
        """Makes the optimizer, and runs the words.

        Args:
            bucket: gradients are released in buckets of so many bytes.
            fuses: the parameters are weights of linear layers, which add their gradients to the accumulators.
            options: of af.SGD.
        """
        self.layers = ModuleList(Linear(4, 1, bias=False) for _ in range(2 * fuses))
        self.params: list[Any] = [Parameter(torch.full((1, 4), 8.0)) for _ in range(2)]
        for layer, param in zip(self.layers, self.params, strict=False):
            layer.weight = param
        self.optimizer = af.SGD(self.params, lr=0.5, backend=backend, **options)
        self.release: Any = None if bucket is None else af.release_gradients(self.optimizer, bucket)
        if fuses:
            with mock.patch.object(linears, "SMALLEST", 1):
                self.release = af.fuse_linears(self.layers, self.optimizer)
        self.scaler, self.saved = scaler, self.optimizer.state_dict()
        self.run(words)

    def run(self, words: str) -> Loop:
        for word in words.split():
            VERBS[word](self)
        return self

    def loss(self, slope: float = 1.0) -> Tensor:
        return torch.stack([((row + 1) * slope * self.output(row)).sum() for row in range(2)]).sum()

    def output(self, row: int) -> Tensor:
        """A tensor whose sum is that of a parameter: the parameter, or what its layer makes of ones."""
        return self.layers[row](torch.ones(1, 4)) if self.layers else self.params[row]

    def exchange(self) -> None:
        """The gradients of the two parameters."""
        first, second = self.params
        first.grad, second.grad = second.grad, first.grad

    def values(self) -> list[float]:
        return [value for param in self.params for value in param.detach().unique().tolist()]


class Fails(torch.autograd.Function):
    """The identity, whose backward runs out of memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise MemoryError("there is no more")


def _fail(it: Loop) -> None:
    try:
        (Fails.apply(it.output(0)) * it.output(1)).sum().backward()  # the second parameter's gradient comes first
    except MemoryError:
        return
    raise AssertionError("backward() did not fail")


VERBS: dict[str, Verb] = {
    "backward": lambda it: it.loss().backward(),
    "nan": lambda it: it.loss(torch.nan).backward(),
    "fail": _fail,
    "accumulate": lambda it: it.optimizer.accumulate(),
    "weighted": lambda it: it.optimizer.accumulate(3),
    "close": lambda it: it.optimizer.accumulate(last=True),
    "own_backward": lambda it: it.optimizer.backward(it.loss()),
    "own_weighted": lambda it: it.optimizer.backward(it.loss(), 3),
    "own_empty": lambda it: it.optimizer.backward(it.loss(torch.nan), 0),
    "step": lambda it: it.optimizer.step(),
    "zero_grad": lambda it: it.optimizer.zero_grad(),
    "model_zero": lambda it: ParameterList(it.params).zero_grad(),
    "zero_fill": lambda it: it.optimizer.zero_grad(set_to_none=False),
    "state_dict": lambda it: it.optimizer.state_dict(),
    "load": lambda it: it.optimizer.load_state_dict(it.saved),
    "read_full": lambda it: it.optimizer.full_precision_state_dict(ParameterList(it.params)),
    "load_full": lambda it: it.optimizer.load_full_precision_state_dict(
        ParameterList(it.params), {str(row): torch.ones(1, 4) for row in range(2)}
    ),
    "take_out": lambda it: it.optimizer.param_groups[0]["params"].pop(),
    "exchange": lambda it: it.exchange(),
    "release": lambda it: setattr(it, "release", af.release_gradients(it.optimizer)),
    "remove": lambda it: it.release.remove(),
    "scale": lambda it: it.scaler.scale(it.loss()).backward(),
    "overflow": lambda it: it.scaler.scale(it.loss(torch.inf)).backward(),
    "unscale_": lambda it: it.scaler.unscale_(it.optimizer),
    "scaler_step": lambda it: it.scaler.step(it.optimizer),
    "update": lambda it: it.scaler.update(),
}
