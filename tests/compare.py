"""How two optimizers are compared, bit for bit or within a row of TOLERANCES, and what a refused call must not write.

`assert_close` and `assert_same_bits` compare tensors. `everything` copies what an optimizer holds. `train` gives two
optimizers the same gradients; `assert_same` and `assert_like` compare them. `refused` and `writes_nothing` compare all
that an optimizer can write before and after a block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import inside
import pytest
import torch
from table import random_grads, set_grads
from torch import Tensor

import accumfused as af
from accumfused.formats.shards import local
from accumfused.optimizers.schedule_free import SUMS

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
    # Of a whole matrix: |error| / |matrix|. Fifteen products of bf16 matrices, where each number is rounded by up to
    # 2^-9, and a b of -4.8 multiplies a Gram matrix's error. torch's own Muon errs by 0.011 to 0.025 for Gaussian ones.
    "bf16 Newton-Schulz": {"rtol": 0.0, "atol": 0.03},
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
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        tensor = tensor.detach().contiguous().view(integers[tensor.itemsize])
    return tensor.detach().cpu()


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    assert actual.shape == expected.shape, f"{what}: {actual.shape} {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} {expected.dtype}"
    differ = bits(actual) != bits(expected)
    assert not differ.any(), (
        f"{what}: {int(differ.sum())} of {differ.numel()} differ, first "
        f"{actual[differ].flatten()[0].item()!r} against {expected[differ].flatten()[0].item()!r}"
    )


def assert_all_same_bits(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, and tensors of the same bits under them."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_same_bits(actual[name], value, name)


def everything(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of all parameters, states and step counts, and of what groups count, by name: codes by their state's."""
    found = {}
    for index, group in enumerate(optimizer.param_groups):
        found |= {f"{name} of group {index}": group[name].clone() for name in SUMS if name in group}
    for index, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        found[f"param {index}"] = param.detach().clone()
        for name, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor):
                found[f"{name.removesuffix('_8bit')} {index}"] = value.detach().clone()
    return found


def params_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def train(*optimizers: torch.optim.Optimizer, steps: int = 3, seed: int = 0) -> None:
    """The same random gradients for all; every step moves something."""
    for step in range(steps):
        for optimizer in optimizers:
            params = [param for param in params_of(optimizer) if param.requires_grad]
            before = params[0].detach().clone()
            grads = random_grads(params, 10 * seed + step)
            set_grads(params, [grad.to(param.device) for grad, param in zip(grads, params, strict=True)])
            optimizer.step()
            assert not torch.equal(params[0], before)


def assert_same(ours: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """The same parameters and states, bit for bit."""
    found, expected = everything(ours), everything(other)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert_same_bits(found[name], value, name)


def assert_like(peer: torch.optim.Optimizer, ours: torch.optim.Optimizer, what: object = "") -> None:
    """The peer's parameters and states up to roundings, in fp32 tensors of its shapes; ours may also count steps."""
    for param, truth in zip(params_of(ours), params_of(peer), strict=True):
        assert_close(param, truth, "torch.optim", f"{what}: parameter")
        mine = ours.state.get(param, {})
        theirs = {name: value for name, value in peer.state.get(truth, {}).items() if value is not None}
        assert mine.keys() | {"step"} == theirs.keys() | {"step"}
        for name, value in mine.items():
            shape = torch.Size() if name == "step" else param.shape
            assert (value.dtype, value.device, value.shape) == (torch.float32, param.device, shape)
            if name in theirs:
                assert_close(value, torch.as_tensor(theirs[name]), "torch.optim", f"{what}: {name}")


Snapshot = dict[str, Any]
Errors = type[Exception] | tuple[type[Exception], ...]


def snapshot(optimizer: torch.optim.Optimizer) -> Snapshot:
    """All that a step or a fold may write: what is stored, gradients, open window, skips, norms and noise so far."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found: Snapshot = {f"param {i}": param for i, param in enumerate(params)}
    found |= {f"grad {i}": param.grad for i, param in enumerate(params)}
    for i, group in enumerate(optimizer.param_groups):
        found |= {f"group {i} {name}": group[name] for name in SUMS if name in group}
    for i, param in enumerate(params):
        found |= {f"state {i} {name}": value for name, value in optimizer.state.get(param, {}).items()}
    found |= inside.open_window(optimizer)
    if isinstance(optimizer, af.FusedOptimizer):
        found |= inside.memories(optimizer)
    if hasattr(optimizer, "skipped_steps"):
        found["skipped steps"] = int(optimizer.skipped_steps)
    return {name: _bits(value) for name, value in found.items()}


def differences(before: Snapshot, after: Snapshot) -> list[str]:
    """The names of what is not the same."""
    return [name for name in sorted({*before, *after}) if before.get(name, "nothing") != after.get(name, "nothing")]


@contextlib.contextmanager
def writes_nothing(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Everything the optimizer could write is the same after the block."""
    before = snapshot(optimizer)
    yield
    assert differences(before, snapshot(optimizer)) == []


@contextlib.contextmanager
def refused(optimizer: torch.optim.Optimizer, error: Errors, remedy: str) -> Iterator[None]:
    """The block raises this error, whose text matches this, and writes nothing."""
    with writes_nothing(optimizer), pytest.raises(error, match=remedy):
        yield


def stepped(params: Iterable[Tensor], backend: str, **settings: Any) -> af.AdamW:
    """An optimizer that has made a step, so that there is a state that must not change."""
    params = list(params)
    optimizer = af.AdamW(params, lr=0.1, weight_decay=0.1, backend=backend, **settings)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _bits(value: Any) -> Any:
    value = local(value)  # of what is spread over processes, the part here
    if not isinstance(value, Tensor):
        return repr(value)  # a NaN is the same as another one
    kind = (value.dtype, value.device, tuple(value.shape))
    if value.device.type == "meta":
        return kind
    dense = value.detach().cpu().to_dense().resolve_neg()
    dense = dense.new_empty(dense.shape).copy_(dense).reshape(-1)  # contiguous() leaves strides where nothing is
    return (*kind, dense.view(torch.uint8).numpy().tobytes())
