"""What processes with a group refuse, each of them and before anything is written, and one whose others are lost."""

from __future__ import annotations

import copy
import datetime
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from compare import everything
from snapshot import differences, snapshot
from table import random_params, set_grads
from test_ddp import SHAPES, gradients
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel

import accumfused as af

# ---- refusals ------------------------------------------------------------------------------------------------------


def model_of(sizes: tuple[int, ...] = (7, 5, 3)) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[Linear(n, m) for n, m in itertools.pairwise(sizes)])


def stepped(params: Any, **settings: Any) -> af.AdamW:
    """An optimizer with states, by a step on gradients that nobody reduces, then in processes."""
    optimizer = af.AdamW(params, lr=0.1)
    fill(optimizer)
    optimizer.step()
    optimizer.zero_grad()
    own = optimizer.state_dict()
    optimizer = af.AdamW([p for group in optimizer.param_groups for p in group["params"]], lr=0.1, **settings)
    optimizer.load_state_dict(own)
    fill(optimizer)
    return optimizer


def fill(optimizer: torch.optim.Optimizer) -> None:
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        param.grad = torch.ones_like(param)


def no_group() -> Any:
    optimizer = stepped(model_of().parameters())
    return optimizer, optimizer.accumulate


def no_group_backward() -> Any:
    model = model_of()
    optimizer = stepped(model.parameters())
    optimizer.zero_grad()
    loss = model(torch.ones(2, 7)).sum()
    return optimizer, lambda: optimizer.backward(loss)


def disagreeing(sizes: tuple[int, ...], last: bool, turned: bool = False) -> Any:
    """Rank 1 has a model of these sizes, or its parameters in another order."""
    model = model_of(sizes if dist.get_rank() == 1 else (7, 5, 3))
    params = list(model.parameters())
    optimizer = stepped(params[::-1] if turned and dist.get_rank() == 1 else params, process_group=dist.group.WORLD)
    if not last:
        optimizer.accumulate()
    return optimizer, (lambda: optimizer.accumulate(last=True)) if last else optimizer.step


def ddp_reduces(hook: Any = None, attaches: bool = False) -> Any:
    """A process group, and a DDP that reduces too; also one with a hook, that attach_ddp has refused."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = DistributedDataParallel(model_of())
    optimizer = stepped(wrapped.parameters(), process_group=dist.group.WORLD)
    if hook:
        wrapped.register_comm_hook(None, fp16_compress_hook)
        with pytest.raises(RuntimeError, match="can only be called once"):
            af.attach_ddp(wrapped, optimizer)
    call: Callable[[], Any] = optimizer.step
    if attaches:
        call = lambda: af.attach_ddp(wrapped, optimizer)  # noqa: E731
    optimizer.wrapped = wrapped  # type: ignore[attr-defined]  # alive while it steps
    return optimizer, call


def attach_twice() -> Any:
    wrapped = DistributedDataParallel(model_of())
    optimizer = stepped(wrapped.parameters())
    af.attach_ddp(wrapped, optimizer)
    return optimizer, lambda: af.attach_ddp(wrapped, optimizer)


def attach(**given: Any) -> Any:
    """attach_ddp of something that it does not take."""
    wrapped, what = DistributedDataParallel(model_of()), given.pop("what", "")
    params = list(wrapped.parameters())
    settings = (
        {"process_group": dist.new_group([dist.get_rank()], use_local_synchronization=True)} if what == "group" else {}
    )
    optimizer = stepped(params[1:] if what == "missing" else params, **settings, **given.pop("settings", {}))
    if what == "open":
        optimizer = stepped(params, process_group=dist.group.WORLD)
        optimizer.accumulate()
    module: Any = wrapped.module if what == "module" else wrapped
    other: Any = torch.optim.AdamW(params) if what == "optimizer" else optimizer
    return optimizer, lambda: af.attach_ddp(module, other, **given)


def stock_scaler(phase: str, unscales: bool) -> Any:
    """A stock GradScaler before the gradients are added up."""
    model = model_of()
    optimizer = stepped(model.parameters(), process_group=dist.group.WORLD)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    if phase == "open":
        optimizer.accumulate()
    return optimizer, lambda: (scaler.unscale_ if unscales else scaler.step)(optimizer)


def settings(cls: Any = None, **given: Any) -> Any:
    optimizer = stepped(model_of().parameters())
    groups = dict.fromkeys(given.pop("groups", ()), dist.group.WORLD)
    return optimizer, lambda: af.AdamW(optimizer.param_groups[0]["params"], **groups, **given)


def another_group() -> Any:
    """A group that this process is not in."""
    optimizer = stepped(model_of().parameters())
    groups = [dist.new_group([rank]) for rank in range(2)]
    return optimizer, lambda: af.AdamW(model_of().parameters(), process_group=groups[1 - dist.get_rank()])


def carried(by: Callable[[Any], Any]) -> Any:
    optimizer = stepped(model_of().parameters(), process_group=dist.group.WORLD)
    optimizer.accumulate()
    return optimizer, lambda: by(optimizer)


def copied() -> Any:
    """A copy knows no group, and says so."""
    optimizer = copy.deepcopy(stepped(model_of().parameters(), process_group=dist.group.WORLD))
    assert optimizer._settings.process_group is None
    return optimizer, optimizer.accumulate


def resumed(optimizer: Any) -> Any:
    return optimizer.state_dict()


G = ("process_group",)
REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = {
    "accumulate() without a group": (no_group, {}, RuntimeError, "attach_ddp|grads_are_reduced"),
    "backward() without a group": (no_group_backward, {}, RuntimeError, "attach_ddp|grads_are_reduced"),
    "a copy": (copied, {}, RuntimeError, "give the optimizer process_group="),
    "other shapes, open": (disagreeing, {"sizes": (7, 4, 3), "last": False}, ValueError, "the same parameters"),
    "other shapes, last": (disagreeing, {"sizes": (7, 4, 3), "last": True}, ValueError, "parameter 0 is .*process 1"),
    "more of them": (disagreeing, {"sizes": (7, 5, 3, 2), "last": False}, ValueError, "process 1 .* has 6 parameters"),
    "fewer, last": (disagreeing, {"sizes": (7, 5), "last": True}, ValueError, "process 1 .* has 2 parameters"),
    "another order": (
        disagreeing,
        {"sizes": (7, 5, 3), "last": False, "turned": True},
        ValueError,
        "the same parameters",
    ),
    "a DDP that reduces too": (ddp_reduces, {}, RuntimeError, r"call accumfused.attach_ddp\(ddp, optimizer\)"),
    "a DDP with another hook": (ddp_reduces, {"hook": True}, RuntimeError, "reduces their gradients too"),
    "attach_ddp, another hook": (
        ddp_reduces,
        {"hook": True, "attaches": True},
        RuntimeError,
        "can only be called once",
    ),
    "attach_ddp twice": (attach_twice, {}, RuntimeError, "can only be called once"),
    "attach_ddp, no DDP": (attach, {"what": "module"}, TypeError, "takes a DistributedDataParallel first, got Seq"),
    "attach_ddp, torch's optimizer": (attach, {"what": "optimizer"}, TypeError, r"got AdamW; .*accumfused.fuse\(\)"),
    "attach_ddp, another group": (attach, {"what": "group"}, ValueError, r"on \[0, 1\]; give both the same process"),
    "attach_ddp, one is missing": (
        attach,
        {"what": "missing"},
        ValueError,
        r"has the parameter '0.weight' \(1 are missing",
    ),
    "attach_ddp, open window": (
        attach,
        {"what": "open"},
        RuntimeError,
        r"call step\(\) or zero_grad\(\) before attach",
    ),
    "attach_ddp, fp16": (attach, {"reduce_dtype": torch.float16}, ValueError, "reduce_dtype must be .*bfloat16"),
    "attach_ddp, reduced already": (attach, {"settings": {"grads_are_reduced": True}}, ValueError, "leave it out"),
    "stock scaler, open": (
        stock_scaler,
        {"phase": "open", "unscales": False},
        RuntimeError,
        "close it with accumulate",
    ),
    "stock scaler, p.grad": (stock_scaler, {"phase": "idle", "unscales": False}, RuntimeError, "not added up over the"),
    "no group to reduce in": (settings, {"reduce_dtype": torch.bfloat16}, ValueError, "give one"),
    "fp16": (settings, {"groups": G, "reduce_dtype": torch.float16}, ValueError, "must be .*got torch.float16"),
    "reduced, and a group": (settings, {"groups": G, "grads_are_reduced": True}, ValueError, "leave the process group"),
    "a name as a group": (settings, {"process_group": "world"}, TypeError, "ProcessGroup .*got str"),
    "another's group": (another_group, {}, TypeError, "got a group that this process is not in"),
    "state_dict(), open": (carried, {"by": resumed}, RuntimeError, "this process's own part of the sums"),
    "deepcopy, open": (carried, {"by": copy.deepcopy}, RuntimeError, "this process's own part of the sums"),
}


def refuse(names: list[str]) -> list[Any]:
    """In a worker: for each, the error and what has changed of parameters and states."""
    told = []
    for name in names:
        make, given, *_ = REFUSED[name]
        optimizer, call = make(**given)
        before = snapshot(optimizer)
        try:
            call()
            told.append((None, "", []))
        except Exception as error:
            changed = differences(before, snapshot(optimizer))
            told.append((type(error), str(error), [n for n in changed if n.startswith(("param", "state", "skipped"))]))
        optimizer.zero_grad()
    return told


def test_each_process_refuses_and_writes_nothing() -> None:
    answers = processes.run(2, refuse, list(REFUSED))
    for index, (name, (_, _, error, text)) in enumerate(REFUSED.items()):
        for rank, told in enumerate(answers):
            kind, message, changed = told[index]
            assert kind is error, f"{name}, rank {rank}: {kind} {message}"
            assert re.search(text, message), f"{name}, rank {rank}: {message}"
            assert changed == [], f"{name}, rank {rank}"


# ---- a process that is lost ----------------------------------------------------------------------------------------


def lose(store: str, rank: int, how: str) -> None:
    """In a process of its own: two windows, in the second of which rank 1 is lost; rank 0 says what has changed."""
    limit = datetime.timedelta(seconds=4)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=limit)
    params = random_params(SHAPES)
    optimizer = af.AdamW(params, lr=0.1, process_group=dist.group.WORLD)
    for index in range(2):
        set_grads(params, gradients(rank, index))
        optimizer.accumulate(3)
        before = everything(optimizer)
        if index == 1 and rank == 1:
            if how == "never comes":
                sys.stdin.read()  # until the other has given up
            os._exit(0)
        try:
            optimizer.step()
        except RuntimeError as error:
            after = everything(optimizer)
            same = all(torch.equal(value, before[name]) for name, value in after.items())
            print("refused", index, same and before.keys() == after.keys(), len(after), str(error)[:60])
    os._exit(0)  # without waiting for the other


@pytest.mark.parametrize("how", ["dies", "never comes"])
def test_a_step_whose_other_process_is_lost_fails_and_writes_nothing(tmp_path: Path, how: str) -> None:
    workers = []
    for rank in range(2):
        call = f"test_ddp_refused.lose({str(tmp_path / 'store')!r}, {rank}, {how!r})"
        code = f"import sys; sys.path[:] = {sys.path}; import test_ddp_refused; {call}"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        workers.append(subprocess.Popen([sys.executable, "-c", code], text=True, **pipes))
    told = workers[0].communicate(timeout=100)[0]
    workers[1].communicate(timeout=100)
    assert "refused 1 True 16 " in told, told
