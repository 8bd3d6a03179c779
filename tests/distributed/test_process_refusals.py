"""What each process refuses before anything is written, and a process whose others are lost."""

from __future__ import annotations

import contextlib
import copy
import datetime
import itertools
import os
import re
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import processes
import pytest
import torch
import torch.distributed as dist
from compare import differences, params_of, snapshot
from spread import Net, adamw, loss_of, mesh_over, sharded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import accumfused as af
from accumfused.loop import linears

Refused = tuple[Any, Callable[[], Any]]  # an optimizer, and the call


def layers(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(n, m) for n, m in itertools.pairwise(sizes or (7, 5, 3))])


def stepped(params: Any = None, **settings: Any) -> af.AdamW:
    """An optimizer with gradients, and with states by a step on those that nobody reduces."""
    params = list(layers().parameters() if params is None else params)
    first, optimizer = af.AdamW(params, lr=0.1), af.AdamW(params, lr=0.1, **settings)
    for param in params:
        param.grad = torch.ones_like(param)
    first.step()
    optimizer.load_state_dict(first.state_dict())
    return optimizer


def grouped(params: Any = None, **settings: Any) -> af.AdamW:
    return stepped(params, process_group=dist.group.WORLD, **settings)


def opened(optimizer: Any) -> Any:
    return optimizer.accumulate() or optimizer


def call(optimizer: Any, name: str, *args: Any, **given: Any) -> Refused:
    return optimizer, lambda: getattr(optimizer, name)(*args, **given)


def make(**settings: Any) -> Refused:
    return (optimizer := stepped()), lambda: af.AdamW(params_of(optimizer), **settings)


def backward(model: Any, optimizer: Any) -> Refused:
    optimizer.zero_grad()
    loss = model(torch.ones(2, 7)).sum()
    return optimizer, lambda: optimizer.backward(loss)


def another(*sizes: int, last: bool = False, turned: bool = False) -> Refused:
    """Rank 1 has a model of these sizes, or its parameters in another order."""
    params = list(layers(*(sizes if dist.get_rank() == 1 else ())).parameters())
    optimizer = grouped(params[::-1] if turned and dist.get_rank() == 1 else params)
    return call(optimizer, "accumulate", last=True) if last else call(opened(optimizer), "step")


def fsdp(**settings: Any) -> Refused:
    """A step of FullyShardedDataParallel's shards."""
    wrapped = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = af.AdamW(wrapped.parameters(), **settings)
    for param in wrapped.parameters():
        param.grad = torch.ones_like(param)
    return call(optimizer, "step")


def attach(make: Callable[..., Any], *what: Any, **given: Any) -> Refused:
    """Args: make: the optimizer of the wrapped parameters; what: is given in place of the DDP and that."""
    wrapped = DistributedDataParallel(layers())
    optimizer = make(list(wrapped.parameters()))
    return optimizer, lambda: af.attach_ddp(*(what or (wrapped, optimizer)), **given)


def attach_twice() -> Refused:
    wrapped = DistributedDataParallel(layers())
    af.attach_ddp(wrapped, optimizer := stepped(wrapped.parameters()))
    return optimizer, lambda: af.attach_ddp(wrapped, optimizer)


def of_this_process(params: Any) -> af.AdamW:
    return stepped(params, process_group=dist.new_group([dist.get_rank()], use_local_synchronization=True))


def stock_scaler(optimizer: Any) -> Refused:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    return optimizer, lambda: scaler.step(optimizer)


def released(syncs_forward: bool) -> Refused:
    """Gradients are released, and forward or backward is outside no_sync()."""
    wrapped = DistributedDataParallel(layers())
    af.attach_ddp(wrapped, optimizer := stepped(wrapped.parameters()))
    optimizer.zero_grad()
    af.release_gradients(optimizer, bucket_bytes=1)
    with contextlib.nullcontext() if syncs_forward else wrapped.no_sync():
        loss = wrapped(torch.ones(1, 7)).sum()

    def run() -> None:
        with wrapped.no_sync() if syncs_forward else contextlib.nullcontext():
            loss.backward()

    return optimizer, run


fuse_linears = mock.patch.object(linears, "SMALLEST", 1)(af.fuse_linears)


def fuse_without_a_group() -> Refused:
    return (optimizer := stepped((model := layers()).parameters())), lambda: fuse_linears(model, optimizer)


def added_in_sync() -> Refused:
    """Linear layers add to the sums, and a backward is outside no_sync(); what it leaves behind is dropped."""
    wrapped = DistributedDataParallel(layers())
    af.attach_ddp(wrapped, optimizer := stepped(wrapped.parameters()))
    fuse_linears(wrapped, optimizer)
    with pytest.raises(RuntimeError, match=QUIET):
        wrapped(torch.ones(1, 7)).sum().backward()
    optimizer.zero_grad()
    with wrapped.no_sync():
        wrapped(torch.ones(1, 7)).sum().backward()
    optimizer.accumulate()
    return optimizer, lambda: wrapped(torch.ones(1, 7)).sum().backward()


def measured(weight: float | None = None, syncs: bool = True, **settings: Any) -> Refused:
    """The noise scale, of parts or as these settings say, would be wrong."""
    model: Any = layers() if settings else sharded(Net())
    optimizer = adamw(model, noise_scale=True, **settings)
    if not settings:
        model.set_requires_gradient_sync(syncs)
    loss = model(torch.ones(2, 7)).sum()
    return optimizer, lambda: optimizer.backward(loss, weight)


def measured_by_one() -> Refused:
    optimizer = adamw(model := layers(), noise_scale=dist.get_rank() == 0, process_group=dist.group.WORLD)
    model(torch.ones(2, 7)).sum().backward()
    return call(opened(optimizer), "step")


def release(optimizer: Any) -> Refused:
    return optimizer, lambda: af.release_gradients(optimizer)


def parts(**settings: Any) -> Any:
    """An optimizer of parameters that are spread, with states and gradients."""
    model = sharded(Net())
    first, optimizer = adamw(model), adamw(model, **settings)
    loss_of(model, 4, dist.get_rank()).backward()
    first.step()
    optimizer.load_state_dict(first.state_dict())
    return optimizer


def batch_of(optimizer: Any, model: Callable[[Any], Any] = torch.sum) -> Refused:
    optimizer.zero_grad()
    return optimizer, lambda: af.accumulate_batch(optimizer, torch.ones(2, 7), model, weight="samples")


def static_batch() -> Refused:
    wrapped = DistributedDataParallel(layers(), static_graph=True)
    af.attach_ddp(wrapped, optimizer := stepped(wrapped.parameters()))
    return batch_of(optimizer, wrapped)


def unusable(mesh: Any, *placements: Any) -> Refused:
    """The step of a DTensor on such a mesh, or placed so."""
    param, grad = (DTensor.from_local(torch.ones(2, 3), mesh, placements, run_check=False) for _ in range(2))
    optimizer = af.AdamW([nn.Parameter(param)], lr=0.1)
    params_of(optimizer)[0].grad = grad
    return call(optimizer, "step")


def of_another_placement() -> Refused:
    states = parts().state_dict()
    optimizer = af.AdamW([nn.Parameter(p.redistribute(placements=[Replicate()])) for p in params_of(parts())], lr=0.1)
    optimizer.load_state_dict(states)
    for param in params_of(optimizer):
        param.grad = torch.ones_like(param)
    return call(optimizer, "step")


SPLIT8: dict[str, Any] = {"master_weights": "split8"}
FOLDS = ("another seed",)  # step() has folded what lay in p.grad before it asks the others
NO_GROUP, HELD, QUIET = "attach_ddp.*grads_are_reduced", "this process's own part of the sums", r"in ddp.no_sync\(\)"
REFUSED: dict[str, tuple[Callable[[], Refused], type[Exception], str]] = {
    "accumulate() without a group": (lambda: call(stepped(), "accumulate"), RuntimeError, NO_GROUP),
    "backward() without one": (lambda: backward(m := layers(), stepped(m.parameters())), RuntimeError, NO_GROUP),
    "a copy": (lambda: call(copy.deepcopy(grouped()), "accumulate"), RuntimeError, "give the optimizer process_group="),
    "other shapes, open": (lambda: another(7, 4, 3), ValueError, "the same parameters"),
    "other shapes, last": (lambda: another(7, 4, 3, last=True), ValueError, "parameter 0 is .*process 1"),
    "more of them": (lambda: another(7, 5, 3, 2), ValueError, "number of parameters is 6 in process 1"),
    "fewer, last": (lambda: another(7, 5, last=True), ValueError, "number of parameters is 2 in process 1"),
    "another order": (lambda: another(7, 5, 3, turned=True), ValueError, "the same parameters"),
    "another seed": (
        lambda: call(grouped(layers().bfloat16().parameters(), **SPLIT8, rounding_seed=dist.get_rank()), "step"),
        ValueError, "parameter 0 is .* in process 1 .*rounding_seed too",
    ),
    "FSDP1": (fsdp, RuntimeError, "which is not supported: .*; use fully_shard"),
    "FSDP1 and a process group": (  # which would reduce too
        lambda: fsdp(process_group=dist.group.WORLD), RuntimeError, "which is not supported: .*; use fully_shard",
    ),
    "attach twice": (attach_twice, RuntimeError, "can only be called once"),
    "attach, no DDP": (lambda: attach(stepped, layers(), 0), TypeError, "takes a DistributedDataParallel first"),
    "attach, no optimizer": (lambda: attach(stepped, DistributedDataParallel(layers())), TypeError, "got none"),
    "attach, torch's optimizer": (
        lambda: attach(stepped, m := DistributedDataParallel(layers()), torch.optim.AdamW(m.parameters())), TypeError,
        r"got AdamW; .*accumfused.fuse\(\)",
    ),
    "attach, another group": (lambda: attach(of_this_process), ValueError, r"on \[0, 1\]; give both the same process"),
    "attach, one is missing": (
        lambda: attach(lambda params: stepped(params[1:])), ValueError, r"has the parameter '0.weight' \(1 are missing",
    ),
    "attach, open window": (lambda: attach(lambda params: opened(grouped(params))), RuntimeError, r"before attach_ddp"),
    "attach, fp16": (lambda: attach(stepped, reduce_dtype=torch.float16), ValueError, "reduce_dtype must be .*bf"),
    "attach, reduced": (lambda: attach(lambda p: stepped(p, grads_are_reduced=True)), ValueError, "leave it out"),
    "stock scaler, open": (lambda: stock_scaler(opened(grouped())), RuntimeError, "close it with accumulate"),
    "stock scaler, p.grad": (lambda: stock_scaler(grouped()), RuntimeError, "not added up over the"),
    "no group to reduce in": (lambda: make(reduce_dtype=torch.bfloat16), ValueError, "give one"),
    "fp16": (lambda: make(process_group=dist.group.WORLD, reduce_dtype=torch.float16), ValueError, "got torch.float16"),
    "reduced, and a group": (
        lambda: make(process_group=dist.group.WORLD, grads_are_reduced=True), ValueError, "leave the process group",
    ),
    "a name as a group": (lambda: make(process_group="world"), TypeError, "ProcessGroup .*got str"),
    "another's group": (
        lambda: make(process_group=[dist.new_group([rank]) for rank in range(2)][1 - dist.get_rank()]), TypeError,
        "got a group that this process is not in",
    ),
    "state_dict(), open": (lambda: call(opened(grouped()), "state_dict"), RuntimeError, HELD),
    "deepcopy, open": (lambda: ((o := opened(grouped())), lambda: copy.deepcopy(o)), RuntimeError, HELD),
    "a window of all": (
        lambda: call(grouped(), "load_state_dict", opened(stepped(grads_are_reduced=True)).state_dict()), ValueError,
        "open window, which is the sum of all processes",
    ),
    "a weight, reduced": (
        lambda: call(stepped(grads_are_reduced=True), "accumulate", 3.0), RuntimeError, "a weight would come too late",
    ),
    "released, forward in sync": (lambda: released(True), RuntimeError, QUIET),
    "released, backward in sync": (lambda: released(False), RuntimeError, QUIET),
    "linears without a group": (
        fuse_without_a_group, RuntimeError,
        r"more than one process and no process_group.* do not call release_gradients\(\) or fuse_linears\(\)",
    ),
    "linears, in sync": (added_in_sync, RuntimeError, r"run forward and backward within ddp.no_sync\(\)"),
    "release without a group": (lambda: release(stepped()), RuntimeError, r"no process_group.*attach_ddp\(ddp, opt"),
    "release, reduced": (lambda: release(stepped(grads_are_reduced=True)), RuntimeError, "no process_group, so some"),
    "release of parts": (lambda: release(parts()), RuntimeError, "DTensor: fully_shard"),
    "a weight of parts": (lambda: call(parts(), "accumulate", 3.0), RuntimeError, "call optimizer.backward"),
    "parts, step()": (lambda: call(parts(process_group=dist.group.WORLD), "step"), RuntimeError, "leave process_group"),
    "parts, backward()": (
        lambda: backward(m := sharded(Net()), adamw(m, process_group=dist.group.WORLD)), RuntimeError, "leave process_",
    ),
    "parts of a state for a whole": (
        lambda: call(stepped(), "load_state_dict", parts().state_dict()), ValueError, "a part of a state, spread over",
    ),
    "states of another placement": (of_another_placement, RuntimeError, "load checkpoints by torch.distributed"),
    "a mesh without groups": (  # in an order of its own: torch takes an equal mesh of an earlier test for it
        lambda: unusable(DeviceMesh("cpu", torch.tensor([1, 0]), _init_backend=False), Shard(0)), RuntimeError,
        "has no process groups",
    ),
    "noise, a weight, reduced": (
        lambda: measured(3.0, grads_are_reduced=True), RuntimeError, "leave the weights out",
    ),
    "noise, a weight of parts": (lambda: measured(3.0), RuntimeError, "leave the weights out"),
    "noise, sums of parts": (lambda: measured(syncs=False), RuntimeError, "delivers them in a sum"),
    "noise of one process": (measured_by_one, ValueError, "noise_scale is False in process 1"),
    "a batch, no group": (lambda: batch_of(stepped()), RuntimeError, "wait for ever .*; call accumfused.attach_ddp"),
    "a batch, no DDP": (lambda: batch_of(grouped()), RuntimeError, "wait for ever .*; call accumfused.attach_ddp"),
    "a batch, reduced": (lambda: batch_of(stepped(grads_are_reduced=True)), RuntimeError, "wait for ever"),
    "a batch, static graph": (static_batch, RuntimeError, "leave static_graph out"),
    "a batch of parts": (lambda: batch_of(parts()), RuntimeError, "wait for ever"),
    "a pending sum": (lambda: unusable(mesh_over(2, 1), Replicate(), Partial()), RuntimeError, "a sum that is pending"),
}  # fmt: skip


def refuse(name: str) -> tuple[str, str, list[str]]:
    """In a worker: the error, and what has changed of all that an optimizer writes."""
    optimizer, run = REFUSED[name][0]()
    before, error = snapshot(optimizer), None
    try:
        run()
    except Exception as raised:
        error = raised
    changed = differences(before, snapshot(optimizer))
    optimizer.zero_grad()
    return type(error).__name__, str(error), changed


@pytest.mark.parametrize("name", REFUSED)
def test_each_process_refuses_and_writes_nothing(name: str) -> None:
    for kind, message, changed in processes.run(2, refuse, name):
        assert kind == REFUSED[name][1].__name__, message
        assert re.search(REFUSED[name][2], message), message
        folded = ("grad", "accumulator", "unit", "total", "factors", "micro-batches") if name in FOLDS else ()
        assert [each for each in changed if not each.startswith(folded)] == []


def lose(how: str) -> list[Any]:
    """In a worker: two windows, in the second of which rank 1 is lost; rank 0 says what each step has changed."""
    optimizer, told = stepped(process_group=(group := dist.new_group())), []
    for index in range(2):
        optimizer.accumulate(3)
        if index == 1 and dist.get_rank() == 1:
            threading.Event().wait() if how == "never comes" else os._exit(0)  # until it is killed
        if index == 1:
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=0.2), group)  # noqa: SLF001  # torch's
        before = snapshot(optimizer)
        with contextlib.nullcontext() if index == 0 else pytest.raises(RuntimeError):
            optimizer.step()
        changed = differences(before, snapshot(optimizer))
        told.append(any(name.startswith(("param", "state")) for name in changed))
        for param in params_of(optimizer):
            param.grad = torch.ones_like(param)
    return told


@pytest.mark.parametrize("how", ["dies", "never comes"])
def test_a_step_whose_other_process_is_lost_fails_and_writes_nothing(how: str) -> None:
    with contextlib.closing(processes.Pool(2)) as pool:
        assert pool.run(lose, how, ranks=[0]) == [[True, False]]
