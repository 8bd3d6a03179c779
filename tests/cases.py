"""Every rule with every option, one row each: a new optimizer needs one new row, and no new test.

Large learning rates, small betas and weight decay that is not zero, so that an error of any kind shows in a few steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

import accumfused as af
from accumfused import _native
from accumfused.backends.cpu import CpuBackend
from accumfused.backends.reference import ReferenceBackend


@dataclass(frozen=True)
class Case:
    """One rule with one set of options."""

    name: str
    optimizer: type[af.FusedOptimizer]
    torch_class: type[torch.optim.Optimizer] | None  # the torch optimizer of the same name
    oracle: Callable[..., Tensor]  # its formula in float64
    options: dict[str, Any]

    def make(self, params: Iterable[Tensor], backend: Any = "auto", **settings: Any) -> af.FusedOptimizer:
        """The optimizer. Args: backend: a backend's name, or a backend object; settings: max_grad_norm, nonfinite."""
        name = backend if isinstance(backend, str) else "auto"
        optimizer = self.optimizer(params, **self.options, backend=name, **settings)
        if not isinstance(backend, str):
            optimizer._runtime.backend = backend
        return optimizer


def _case(name: str, optimizer: Any, torch_class: Any, truth: Callable[..., Tensor], **options: Any) -> Case:
    return Case(name, optimizer, torch_class, truth, options)


SGD = (af.SGD, torch.optim.SGD, oracle.sgd)
ADAM = (af.Adam, torch.optim.Adam, oracle.adam)
ADAMW = (af.AdamW, torch.optim.AdamW, oracle.adamw)
LION = (af.Lion, None, oracle.lion)

CASES = (
    _case("sgd", *SGD, lr=0.3),
    _case("sgd_weight_decay", *SGD, lr=0.3, weight_decay=0.2),
    _case("sgd_maximize", *SGD, lr=0.3, weight_decay=0.2, maximize=True),
    _case("sgd_momentum", *SGD, lr=0.3, momentum=0.6, weight_decay=0.2),
    _case("sgd_dampening", *SGD, lr=0.3, momentum=0.6, dampening=0.4, weight_decay=0.2),
    _case("sgd_nesterov", *SGD, lr=0.3, momentum=0.6, nesterov=True, weight_decay=0.2),
    _case("sgd_momentum_maximize", *SGD, lr=0.3, momentum=0.6, dampening=0.4, weight_decay=0.2, maximize=True),
    _case("adam", *ADAM, lr=0.1, betas=(0.5, 0.7), eps=1e-3),
    _case("adam_weight_decay", *ADAM, lr=0.1, betas=(0.5, 0.7), weight_decay=0.3),
    _case("adam_amsgrad", *ADAM, lr=0.1, betas=(0.5, 0.7), weight_decay=0.3, amsgrad=True),
    _case("adam_maximize", *ADAM, lr=0.1, betas=(0.5, 0.7), weight_decay=0.3, maximize=True),
    _case("adam_decoupled", *ADAM, lr=0.1, betas=(0.5, 0.7), weight_decay=0.4, decoupled_weight_decay=True),
    _case("adamw", *ADAMW, lr=0.1, betas=(0.5, 0.7), weight_decay=0.4),
    _case("adamw_no_decay", *ADAMW, lr=0.1, betas=(0.5, 0.7), weight_decay=0.0, eps=1e-3),
    _case("adamw_amsgrad", *ADAMW, lr=0.1, betas=(0.5, 0.7), weight_decay=0.4, amsgrad=True),
    _case("adamw_maximize", *ADAMW, lr=0.1, betas=(0.5, 0.7), weight_decay=0.4, amsgrad=True, maximize=True),
    _case("lion", *LION, lr=0.05, betas=(0.6, 0.8)),
    _case("lion_weight_decay", *LION, lr=0.05, betas=(0.6, 0.8), weight_decay=0.5),
    _case("lion_maximize", *LION, lr=0.05, betas=(0.6, 0.8), weight_decay=0.5, maximize=True),
)

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


ADAMW_CASE = case_named("adamw")  # where a test needs one optimizer and any will do

# One rounding of fp32 is 6e-8 of the number that it hits.
TOLERANCES = {
    # Some ten roundings an element and step, over at most eight steps; an update is a difference of numbers around 1,
    # and where the moments' terms cancel only the absolute error is bounded.
    "fp64 oracle": {"rtol": 5e-6, "atol": 2e-6},
    # Both sides round in fp32, in different orders.
    "torch.optim": {"rtol": 1e-5, "atol": 4e-6},
    # A sum of squares in fp32: 32 rows in sequence, then ten halvings, so some 40 roundings at the very most.
    "norm": {"rtol": 2e-6, "atol": 0.0},
    # A sum of micro-batches in fp32: one multiplication and one addition each.
    "window": {"rtol": 2e-6, "atol": 1e-6},
    # Two ways through the same small model in fp32: autograd sums a batch in another order than its parts.
    "model": {"rtol": 2e-5, "atol": 2e-6},
}


def assert_close(actual: Tensor, expected: Tensor, tolerance: str, what: str = "") -> None:
    """Compares in float64 within one row of TOLERANCES."""
    torch.testing.assert_close(
        actual.detach().cpu().double(), expected.detach().cpu().double(), **TOLERANCES[tolerance],
        msg=lambda text: f"{what} against {tolerance}: {text}",
    )  # fmt: skip


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers, so that zeros of different sign differ; every NaN is one NaN (which one is not
    specified).
    """
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
        tensor = tensor.detach().contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
    return tensor.detach().cpu()


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    assert actual.shape == expected.shape, f"{what}: {actual.shape} {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} {expected.dtype}"
    differ = bits(actual) != bits(expected)
    assert not differ.any(), (
        f"{what}: {int(differ.sum())} of {differ.numel()} differ, first "
        f"{actual[differ].flatten()[0].item()!r} against {expected[differ].flatten()[0].item()!r}"
    )


def random_params(shapes: Iterable[tuple[int, ...]], seed: int = 0) -> list[Tensor]:
    return [values.requires_grad_() for values in _random(shapes, seed)]


def random_grads(params: Iterable[Tensor], seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [values.to(dtype) for values in _random([p.shape for p in params], 1000 + seed)]


def _random(shapes: Iterable[tuple[int, ...]], seed: int) -> list[Tensor]:
    """The same numbers on every device: drawn on the CPU, and moved to torch's default device."""
    generator, device = torch.Generator().manual_seed(seed), torch.get_default_device()
    return [torch.randn(shape, generator=generator, device="cpu").to(device) for shape in shapes]


def set_grads(params: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    """Puts copies of the gradients where autograd would (in 16 bits too)."""
    for param, grad in zip(params, grads, strict=True):
        if grad is not None and grad.dtype != param.dtype:
            param.grad_dtype = grad.dtype
        param.grad = None if grad is None else grad.clone()


def everything(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of all parameters, states and step counts, by name."""
    found = {}
    for index, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        found[f"param {index}"] = param.detach().clone()
        for name, value in optimizer.state.get(param, {}).items():
            found[f"{name} {index}"] = value.detach().clone()
    return found


def all_backends() -> list[Any]:
    """The reference, and the native kernels of every instruction set that this machine runs."""
    native = [] if _native._C is None else [CpuBackend(name) for name in _native._C.instruction_sets()]
    return [ReferenceBackend(), *native]
