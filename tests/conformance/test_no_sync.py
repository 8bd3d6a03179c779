"""Nothing on the way of a training step asks a device for a value: the host never waits.

On a CPU a waiting call costs nothing and changes nothing, so the calls themselves are watched: every one that reads a
tensor's value goes through one of a few operators.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import accumfused as af

aten: Any = torch.ops.aten
READS = {
    aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default,
    aten.masked_select.default,
}  # fmt: skip


# tensor[i] = 2.0 wraps the number in a tensor of the CPU.
LITERALS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}


class NoReads(TorchDispatchMode):
    """Refuses to read a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self._literals: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in READS, f"{func} waits for the device"
        result = func(*args, **(kwargs or {}))
        if func in LITERALS:
            self._literals.append(result)
        copies_one = func is aten.copy_.default and any(args[1] is literal for literal in self._literals)
        assert not copies_one, "a number that is assigned to an element goes through the CPU's memory, and waits"
        return result


def one_tensor(value: float) -> torch.Tensor:
    return torch.tensor(value)


WEIGHTS: dict[str, tuple[Any, ...]] = {
    "sums": (None, None, None),
    "numbers": (3.0, 0.0, 2.0),
    "tensors": (one_tensor(3.0), one_tensor(0.0), one_tensor(2.0)),
    "one tensor": (one_tensor(3.0),),
}


@pytest.fixture
def optimizer(emulate_cuda: None) -> af.AdamW:
    params = [torch.randn(n).requires_grad_() for n in (5, 70)]
    found = af.AdamW(params, lr=torch.tensor(0.1), max_grad_norm=1.0, backend="cuda")
    for p in params:
        p.grad = torch.ones_like(p)
    found.step()  # makes states
    found.zero_grad()
    return found


def windows(optimizer: af.AdamW, weights: tuple[Any, ...], *, last: bool, in_loss: bool) -> Callable[[], None]:
    params = optimizer.param_groups[0]["params"]

    def run() -> None:
        for index, weight in enumerate(weights):
            loss = sum((p * p).sum() for p in params)
            closes = last and index == len(weights) - 1
            if in_loss:
                optimizer.backward(loss, weight, last=closes)
            else:
                loss.backward()
                optimizer.accumulate(weight, last=closes)
        optimizer.grad_scale = one_tensor(2.0)
        optimizer.found_inf = one_tensor(0.0)
        optimizer.step(normalizer=one_tensor(4.0))
        del optimizer.grad_scale, optimizer.found_inf

    return run


@pytest.mark.parametrize("in_loss", [False, True], ids=["after backward", "in the loss"])
@pytest.mark.parametrize("last", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_a_window_reads_no_value(weights: tuple[Any, ...], last: bool, in_loss: bool, optimizer: af.AdamW) -> None:
    with NoReads():
        windows(optimizer, weights, last=last, in_loss=in_loss)()
    assert int(optimizer.skipped_steps) == 0


def test_steps_from_p_grad_read_no_value(optimizer: af.AdamW) -> None:
    with NoReads():
        for _ in range(3):
            for p in optimizer.param_groups[0]["params"]:
                p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.zero_grad()


def test_the_watch_sees_a_read(optimizer: af.AdamW) -> None:
    with NoReads(), pytest.raises(AssertionError, match="waits for the device"):
        float(optimizer.skipped_steps)


@pytest.mark.parametrize("last", [False, True], ids=["open", "closed"])
def test_neither_clipping_together_nor_saving_reads_a_value(emulate_cuda: None, last: bool) -> None:
    params = [torch.randn(n).requires_grad_() for n in (5, 70)]
    optimizers = [af.AdamW([p], capturable=True, backend="cuda") for p in params]
    af.clip_together(optimizers, 1.0)
    for step in range(3):
        for weight in (2.0, one_tensor(3.0)):
            for p, optimizer in zip(params, optimizers, strict=True):
                p.grad = torch.ones_like(p)
                with NoReads():
                    optimizer.accumulate(weight, last=last and isinstance(weight, torch.Tensor))
        before = params[0].detach().clone()
        for optimizer in optimizers:
            if step:
                with NoReads():
                    optimizer.state_dict()
                    optimizer.step()
            else:
                optimizer.step()
        assert not torch.equal(params[0], before)
        for optimizer in optimizers:
            optimizer.zero_grad()


def test_the_gpus_watch_ends_with_its_block_and_its_warning_is_no_error(
    never_waits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's call warns once in a process, after it has set the mode."""
    modes, warned = ["default"], []

    def set_sync_debug_mode(mode: str) -> None:
        modes.append(mode)
        if not warned:
            warned.append(mode)
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_sync_debug_mode)
    with never_waits():
        pass
    assert modes == ["default", "error", "default"]
    with pytest.raises(ValueError, match="in the block"), never_waits():
        raise ValueError("in the block")
    assert modes[-2:] == ["error", "default"]

    def set_then_fail(mode: str) -> None:
        modes.append(mode)
        if mode == "error":
            raise RuntimeError("once set")

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_then_fail)
    with pytest.raises(RuntimeError, match="once set"), never_waits():
        pass
    assert modes[-2:] == ["error", "default"]


def test_other_warnings_are_errors_while_the_gpu_is_watched(never_waits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    with never_waits(), pytest.raises(UserWarning, match="prototype"):
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
