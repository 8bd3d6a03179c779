"""Processes whose parameters or settings become different: all refuse, none hangs, and nothing is written."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import processes
import pytest
import torch
import torch.distributed as dist
from compare import differences, params_of, snapshot
from spread import Net, adamw, loss_of, mesh_over, sharded
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accumfused as af
from accumfused.distributed import exchange

READS_AT_ONCE = exchange.reads_at_once


@contextlib.contextmanager
def reading(at_once: bool) -> Iterator[None]:
    """With `at_once` False the host reads nothing before the next window, as beside a GPU."""
    small = mock.patch.object(exchange, "BUNDLED_BYTES", 64)  # some sums travel together, some alone
    with small, mock.patch.object(exchange, "reads_at_once", READS_AT_ONCE if at_once else lambda device: False):
        yield


def made(**settings: Any) -> tuple[Net, af.AdamW]:
    model = Net()
    optimizer = adamw(model, max_grad_norm=1.0, process_group=dist.group.WORLD, **settings)
    model.never.requires_grad_(False)
    return model, optimizer


def a_window(model: Net, optimizer: af.AdamW, *, last: bool = False, uses_all: bool = True) -> None:
    for index in range(2):
        loss_of(model, 3, 10 * index + dist.get_rank(), uses_all).backward()
        optimizer.accumulate(weight=3, last=last and index == 1)
    optimizer.step()


def add_a_group(model: Net, optimizer: af.AdamW) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})


def add_many(model: Net, optimizer: af.AdamW) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2)) for _ in range(1200)]})


def remove_one(model: Net, optimizer: af.AdamW) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]


def turn(model: Net, optimizer: af.AdamW) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][::-1]


def freeze(model: Net, optimizer: af.AdamW) -> None:
    model.second.requires_grad_(False)


def unfreeze(model: Net, optimizer: af.AdamW) -> None:
    model.never.requires_grad_(True)


def freeze_with_a_gradient(model: Net, optimizer: af.AdamW) -> None:
    model.never.weight.grad = torch.ones_like(model.never.weight)


def change_the_limit(model: Net, optimizer: af.AdamW) -> None:
    optimizer.max_grad_norm = 2.0


def change_a_groups_limit(model: Net, optimizer: af.AdamW) -> None:
    optimizer.param_groups[0]["max_grad_norm"] = 2.0


def change_what_travels(model: Net, optimizer: af.AdamW) -> None:
    optimizer._engine.settings.reduce_dtype = torch.bfloat16


def load_another_seed(model: Net, optimizer: af.AdamW) -> None:
    _, other = made(state_dtype=torch.bfloat16, state_dtype_min_numel=0, rounding_seed=5)
    for param in params_of(other):
        param.grad = torch.ones_like(param)
    other._engine.settings.process_group = None
    with mock.patch.object(exchange, "has_processes", return_value=False):
        other.step()
    optimizer.load_state_dict(other.state_dict())


CHANGES = {
    change.__name__: change
    for change in (
        add_a_group, add_many, remove_one, turn, freeze, unfreeze, freeze_with_a_gradient, change_the_limit,
        change_a_groups_limit, change_what_travels, load_another_seed,
    )
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {}, "drop": {"nonfinite": "drop"}, "noise": {"noise_scale": True}, "bf16": {"reduce_dtype": torch.bfloat16}
}  # fmt: skip
NOISY = {"state_dtype": torch.bfloat16, "state_dtype_min_numel": 0}


def written(optimizer: af.AdamW) -> list[Any]:
    """Parameters, and the states of those that have been stepped."""
    states = [entry for entry in optimizer.state.values() if entry and entry["step"] > 0]
    return [p.tolist() for p in params_of(optimizer)] + [[v.tolist() for v in entry.values()] for entry in states]


def change_one(name: str, at_once: bool, last: bool, uses_all: bool, kind: str) -> list[Any]:
    """In a worker: rank 1 changes after the first window; what each later window says, and whether it writes."""
    told: list[Any] = []
    with reading(at_once):
        model, optimizer = made(**SETTINGS[kind], **(NOISY if name == "load_another_seed" else {}))
        a_window(model, optimizer)
        if dist.get_rank() == 1:
            CHANGES[name](model, optimizer)
        for _ in range(3):
            before = written(optimizer)
            try:
                a_window(model, optimizer, last=last, uses_all=uses_all)
                error = ""
            except ValueError as raised:
                error = str(raised)
            told.append(("processes" in error, written(optimizer) != before))
            optimizer.zero_grad()
    return told


# What differs is found in one place, whenever the host reads it; these differ in what is left over, or travels.
READ_LATER = ("add_many", "turn", "freeze_with_a_gradient", "change_the_limit", "load_another_seed")


@pytest.mark.parametrize(
    ("name", "at_once"),
    [
        pytest.param(name, at_once, marks=pytest.mark.full if not at_once and name not in READ_LATER else [])
        for name in CHANGES
        for at_once in (True, False)
    ],
)
def test_a_change_in_one_process_is_refused_by_all(name: str, at_once: bool) -> None:
    last, uses_all = name == "freeze", name != "turn"
    first = [] if at_once else [(False, False)]  # all skip, and raise in the next window
    expected = [*first, *[(True, False)] * 3][:3]
    if name == "freeze_with_a_gradient":  # which the window's end has dropped: so far, and no further
        expected = [*first, (True, False), (False, True), (False, True)][:3]  # all raise once
    assert processes.run(2, change_one, name, at_once, last, uses_all, "plain") == [expected] * 2


@pytest.mark.pairwise(kind=[*SETTINGS][1:], name=["add_a_group", "freeze"], last=[True, False])
def test_whatever_else_travels(name: str, kind: str, last: bool) -> None:
    found = processes.run(2, change_one, name, False, last, not last, kind)
    assert found == [[(False, False), (True, False), (True, False)]] * 2


def change_two(at_once: bool) -> list[Any]:
    """In a worker: each of three ranks changes otherwise, or not; then all become alike, and train again."""
    told: list[Any] = []
    with reading(at_once):
        model, optimizer = made()
        a_window(model, optimizer)
        kept = optimizer.param_groups[0]["params"]
        [add_many, freeze, lambda *_: None][dist.get_rank()](model, optimizer)
        for attempt in range(4):
            if attempt == 2:
                optimizer.param_groups[:] = [{**optimizer.param_groups[0], "params": kept}]
                model.second.requires_grad_(True)
            try:
                a_window(model, optimizer)
                told.append("skipped" if bool(optimizer.step_was_skipped) else "stepped")
            except ValueError:
                told.append("refused")
            optimizer.zero_grad()
        told.append([p.tolist() for p in model.parameters()])
    return told


@pytest.mark.parametrize("at_once", [True, False])
def test_processes_that_become_alike_again_go_on(at_once: bool) -> None:
    *words, _ = processes.agreed(3, change_two, at_once)
    assert words == ["refused" if at_once else "skipped", "refused", "stepped", "stepped"]


def change_all(name: str, at_once: bool) -> list[Any]:
    """In a worker: all change alike; an undisturbed optimizer that was made so does the same."""
    with reading(at_once):
        model, optimizer = made()
        a_window(model, optimizer)
        CHANGES[name](model, optimizer)
        twin, groups = copy.deepcopy((model, [group["params"] for group in optimizer.param_groups]))
        given = {"max_grad_norm": optimizer.max_grad_norm, "process_group": dist.group.WORLD}
        other = af.AdamW([{"params": params} for params in groups], **given)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        added = [param for each in (optimizer, other) for group in each.param_groups[1:] for param in group["params"]]
        for param in added:
            param.grad = torch.full_like(param, 1.0 + dist.get_rank())
        for each, of in ((model, optimizer), (twin, other)):
            a_window(each, of)
        assert all(torch.equal(p, q) for p, q in zip(params_of(optimizer), params_of(other), strict=True))
        return [p.tolist() for p in params_of(optimizer)]


IN_ALL = ("add_a_group", "add_many", "freeze", "unfreeze", "change_the_limit")


@pytest.mark.parametrize(
    ("name", "at_once"),
    [
        pytest.param(name, at_once, marks=[] if number % 2 == at_once else pytest.mark.full)  # in turn
        for number, name in enumerate(IN_ALL)
        for at_once in (True, False)
    ],
)
def test_a_change_in_all_processes_is_a_change(name: str, at_once: bool) -> None:
    processes.agreed(2, change_all, name, at_once)


def change_a_part(at_once: bool, shape: tuple[int, ...]) -> list[Any]:
    """In a worker: rank 1 of a mesh gets another limit; what each window of sharded parameters says."""
    told: list[Any] = []
    with reading(at_once):
        model = sharded(Net(), mesh_over(*shape))
        optimizer = adamw(model, max_grad_norm=1.0)
        for attempt in range(4):
            if attempt in (1, 3):
                optimizer.max_grad_norm = 2.0 if attempt == 1 and dist.get_rank() == 1 else 1.0
            try:
                optimizer.backward(loss_of(model, 3, dist.get_rank()), weight=3)
                optimizer.step()
                told.append("skipped" if bool(optimizer.step_was_skipped) else "stepped")
            except ValueError as error:
                told.append("refused" if "give the optimizers" in str(error) else str(error))
            optimizer.zero_grad()
    return told


@pytest.mark.parametrize(("size", "shape"), [(2, (2,)), (4, (2, 2))])
@pytest.mark.parametrize("at_once", [True, False])
def test_processes_of_a_mesh_compare_themselves_in_windows(size: int, shape: tuple[int, ...], at_once: bool) -> None:
    words = processes.agreed(size, change_a_part, at_once, shape)
    assert words == ["stepped", "refused" if at_once else "skipped", "refused", "stepped"]


# ---- DistributedDataParallel's own ways ----------------------------------------------------------------------------


def train_unused(ways: str, leaves_out: tuple[int, ...]) -> list[Any]:
    """In a worker: micro-batches of an attached DDP, some of which leave a layer out, in no_sync() or not."""
    ddp = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = adamw(ddp.module, max_grad_norm=1.0)
    af.attach_ddp(ddp, optimizer)
    for _ in range(2):
        for index in range(3):
            quiet = ways == "all" or (ways == "usual" and index < 2)
            with ddp.no_sync() if quiet else contextlib.nullcontext():
                loss_of(ddp, 3, index + dist.get_rank(), index not in leaves_out).backward()
            optimizer.accumulate(weight=3)
        optimizer.step()
    return [p.tolist() for p in ddp.parameters()]


@pytest.mark.parametrize(
    "leaves_out", [(2,), (0, 1), (0, 1, 2), *(pytest.param(each, marks=pytest.mark.full) for each in ((1,), (1, 2)))]
)
def test_a_layer_may_be_left_out_under_the_usual_no_sync(leaves_out: tuple[int, ...]) -> None:
    quiet = processes.agreed(2, train_unused, "all", leaves_out)
    for ways in ("usual", "none"):
        assert processes.agreed(2, train_unused, ways, leaves_out) == quiet


def join(call: str, attached: bool) -> str:
    """In a worker: the first call within join()."""
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = af.SGD(ddp.parameters(), lr=0.1, **({} if attached else {"process_group": dist.group.WORLD}))
    if attached:
        af.attach_ddp(ddp, optimizer)
    before = snapshot(optimizer)
    with ddp.join():
        ddp(torch.ones(2, 3)).sum().backward()
        with pytest.raises(RuntimeError) as raised:
            getattr(optimizer, call)()
        message = str(raised.value)
    changed = [each for each in differences(before, snapshot(optimizer)) if not each.startswith("grad")]
    return message if not changed else str(changed)


@pytest.mark.parametrize("call", ["accumulate", "step"])
@pytest.mark.parametrize("attached", [True, False])
def test_join_is_refused_at_the_first_call(call: str, attached: bool) -> None:
    with contextlib.closing(processes.Pool(2)) as pool:  # an aborted join() leaves its processes out of step
        assert all("leave join() out" in message for message in pool.run(join, call, attached))


def forget_to_reduce(wraps_first: bool, call: str, quiet: int) -> list[str]:
    """In a worker: what micro-batches say where one is in no_sync(), and a reference is computed without autograd."""
    model = nn.Linear(3, 2)
    given: dict[str, Any] = {"lr": 0.1, "grads_are_reduced": True}
    ddp = DistributedDataParallel(model) if wraps_first else None
    optimizer = af.SGD(model.parameters(), **given)
    ddp = ddp or DistributedDataParallel(model)
    told = []
    for index in range(3):
        with ddp.no_sync() if index == quiet else contextlib.nullcontext():
            loss = ddp(torch.ones(2, 3)).sum()
            with torch.no_grad():
                ddp(torch.ones(2, 3))
            if call == "accumulate":
                loss.backward()
            else:
                with contextlib.suppress(RuntimeError):
                    optimizer.backward(loss)
                    told.append("taken")
        if call == "accumulate":
            try:
                optimizer.accumulate()
                told.append("taken")
            except RuntimeError as error:
                told.append("refused" if "leave no_sync() out" in str(error) else str(error))
                optimizer.zero_grad()
    return told


@pytest.mark.parametrize("wraps_first", [True, False])
def test_gradients_that_nobody_reduced_are_refused(wraps_first: bool) -> None:
    for quiet in (1, 2) if not wraps_first else (0, 1, 2):  # DDP is found at the first micro-batch at the latest
        expected = ["refused" if index == quiet else "taken" for index in range(3)]
        assert processes.agreed(2, forget_to_reduce, wraps_first, "accumulate", quiet) == expected
        assert processes.agreed(2, forget_to_reduce, wraps_first, "backward", quiet) == ["taken"] * 2


def never_sync(weight: float | None) -> list[str]:
    """In a worker: the warnings of two windows in which fully_shard keeps all gradients."""
    model = sharded(Net())
    optimizer = adamw(model)
    model.set_requires_gradient_sync(False)
    with mock.patch("accumfused.core.habits.warn") as told:
        for _ in range(2):
            for index in range(2):
                optimizer.backward(loss_of(model, 3, index), weight=weight)
            optimizer.step()
    return [str(call.args[0]) for call in told.call_args_list]


@pytest.mark.parametrize("weight", [3.0, None])
def test_a_window_without_any_gradient_warns_once(weight: float | None) -> None:
    (warning,) = processes.agreed(2, never_sync, weight)
    assert "no gradient has come in a window of 2 micro-batches" in warning
