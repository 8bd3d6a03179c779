"""What an optimizer can write, bit for bit: for the tests that say that a call wrote nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import inside
import pytest
import torch
from torch import Tensor

import accumfused as af
from accumfused.formats.shards import local

Snapshot = dict[str, Any]
Errors = type[Exception] | tuple[type[Exception], ...]


def snapshot(optimizer: torch.optim.Optimizer) -> Snapshot:
    """All that a step or a fold may write: what is stored, gradients, open window, skips, norms and noise so far."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found: Snapshot = {f"param {i}": param for i, param in enumerate(params)}
    found |= {f"grad {i}": param.grad for i, param in enumerate(params)}
    for i, param in enumerate(params):
        found |= {f"state {i} {name}": value for name, value in optimizer.state.get(param, {}).items()}
    found |= inside.open_window(optimizer)
    if isinstance(optimizer, af.FusedOptimizer):
        found["history"] = optimizer.engine.clipping.history
        found["noise"] = None if optimizer.engine.noise is None else optimizer.engine.noise.means
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


def trained(params: Iterable[Tensor], backend: str, **settings: Any) -> af.AdamW:
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
        return value
    kind = (value.dtype, value.device, tuple(value.shape))
    if value.device.type == "meta":
        return kind
    dense = value.detach().cpu().to_dense().resolve_neg()
    dense = dense.new_empty(dense.shape).copy_(dense).reshape(-1)  # contiguous() leaves strides where nothing is
    return (*kind, dense.view(torch.uint8).numpy().tobytes())
