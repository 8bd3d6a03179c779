"""Checkpoints of parameters that lie in one way, loaded where they lie in another: by one of 1, 2 or 4 processes.

Gradients are the same everywhere and no norm is taken, so all ways of training give the same bits.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from compare import assert_close
from spread import ADAMW, Net, adamw, differing, everything_whole, loss_of, mesh_over, placed, sharded, take_steps
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import accumfused as af
from accumfused.formats.shards import local

FORMATS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "split16": (torch.bfloat16, {}),
    "8bit": (torch.bfloat16, {"state_dtype": "8bit", "state_dtype_min_numel": 500}),
}
FULL = states.StateDictOptions(full_state_dict=True)


def build(way: str, form: str) -> tuple[Any, af.AdamW]:
    torch.manual_seed(1)
    dtype, settings = FORMATS[form]
    model: Any = nn.Sequential(nn.Linear(256, 8), nn.Linear(8, 4), nn.Linear(4, 3)).to(dtype)
    if way in ("columns", "rows"):  # tensor parallelism within fully_shard: cut in two dimensions
        cuts = [ColwiseParallel, RowwiseParallel] if way == "columns" else [RowwiseParallel, ColwiseParallel]
        mesh = mesh_over(dist.get_world_size() // 2, 2)
        for layer, cut in zip(model, cuts, strict=False):
            parallelize_module(layer, mesh["b"], cut())
        sharded(model, mesh["a"])
    elif way in ("fully_shard", "hsdp"):
        sharded(model, mesh_over(2, 2) if way == "hsdp" else None)
    elif way == "replicated":
        distribute_module(model, mesh_over())
    group = {"process_group": dist.group.WORLD} if way == "process_group" else {}
    return model, af.AdamW(model.parameters(), **ADAMW, rounding_seed=3, **settings, **group)


def goes_on(optimizer: Any, form: str) -> list[str]:
    """In a worker: what is not as after two steps of one process, or after two more."""
    _, plain = build("plain", form)
    take_steps(range(2), plain)
    wrong = differing(optimizer, plain)
    take_steps(range(2, 4), plain, optimizer)
    return wrong + differing(optimizer, plain)


# ---- torch.distributed.checkpoint ------------------------------------------------------------------------------------


def save(path: Path, way: str, form: str) -> None:
    model, optimizer = build(way, form)
    take_steps(range(2), optimizer)
    dcp.save(dict(zip("mo", states.get_state_dict(model, optimizer), strict=True)), checkpoint_id=path)


def load(path: Path, way: str, form: str) -> list[str]:
    model, optimizer = build(way, form)
    weights, values = states.get_state_dict(model, optimizer)
    dcp.load({"m": weights, "o": values}, checkpoint_id=path)
    states.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=values)
    return goes_on(optimizer, form)


@pytest.mark.pairwise(
    saved=((4, "fully_shard"), (4, "hsdp"), (2, "process_group"), (1, "plain")),
    loaded=((2, "fully_shard"), (2, "process_group"), (4, "hsdp"), (1, "plain")), form=tuple(FORMATS),
)  # fmt: skip
def test_other_processes_go_on_with_what_was_saved(
    saved: tuple[int, str], loaded: tuple[int, str], form: str, tmp_path: Path
) -> None:
    processes.run(saved[0], save, tmp_path, saved[1], form)
    assert processes.agreed(loaded[0], load, tmp_path, loaded[1], form) == []


# ---- without it ------------------------------------------------------------------------------------------------------


def whole_states(model: Any, optimizer: Any, other: Any, fresh: Any, form: str) -> None:
    """Those of one process."""
    plain_model, plain = build("plain", form)
    take_steps(range(2), plain)
    other.load_state_dict({name: placed(v, other.state_dict()[name]) for name, v in plain_model.state_dict().items()})
    fresh.load_state_dict(copy.deepcopy(plain.state_dict()))


def through_a_file(model: Any, optimizer: Any, other: Any, fresh: Any, form: str) -> None:
    """Each process its own."""
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    for each, saved in zip((other, fresh), torch.load(file, weights_only=False), strict=True):
        each.load_state_dict(saved)


def gathered(model: Any, optimizer: Any, other: Any, fresh: Any, form: str) -> None:
    whole = states.get_optimizer_state_dict(model, optimizer, options=FULL)
    assert not any(isinstance(value, DTensor) for entries in whole["state"].values() for value in entries.values())
    other.load_state_dict(model.state_dict())
    states.set_optimizer_state_dict(other, fresh, copy.deepcopy(whole), options=FULL)


def take(route: str, way: str, form: str) -> list[str]:
    (model, optimizer), (other, fresh) = build(way, form), build(way, form)
    take_steps(range(2), optimizer)
    globals()[route](model, optimizer, other, fresh, form)
    wrong = goes_on(fresh, form)
    for param, entries in fresh.state.items():
        for value in (value for value in entries.values() if value.dim()):
            assert isinstance(value, DTensor) == isinstance(param, DTensor)
            is_lean = local(value).untyped_storage().nbytes() == local(value).nbytes
            assert is_lean or route == "gathered", "the whole lives on"  # there it is torch's
    return wrong


ROUTES: list[Callable[..., None]] = [whole_states, through_a_file, gathered]
WAYS = ((2, "fully_shard"), (2, "process_group"), (2, "replicated"), (4, "columns"), (4, "rows"))


@pytest.mark.pairwise(route=ROUTES, way=WAYS, form=tuple(FORMATS))
def test_training_goes_on_in_another_optimizer(route: Any, way: tuple[int, str], form: str) -> None:
    if form == "8bit" and way[0] == 4:
        form = "split16"  # blocks are cut
    if form != "fp32" and route is gathered:
        form = "fp32"  # gloo gathers no int16
    assert processes.agreed(way[0], take, route.__name__, way[1], form) == []


def loaded_from_8_bits() -> list[list[str]]:
    """In a worker: the names in each parameter's state, after a step in another format."""
    (_, plain), (_, optimizer) = build("plain", "8bit"), build("fully_shard", "split16")
    take_steps(range(2), plain)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    take_steps(range(1), optimizer)
    return [sorted(entries) for entries in optimizer.state.values()]


def test_parts_keep_nothing_of_the_format_in_which_they_came() -> None:
    names = processes.agreed(2, loaded_from_8_bits)
    assert names == [["exp_avg", "exp_avg_sq", "master_remainder", "step"]] * 6


# ---- open windows ----------------------------------------------------------------------------------------------------


def half_a_window(model: Any, optimizer: Any, parts: range) -> None:
    for part in parts:
        rows = ((3, 5, 1), (1, 4, 9))[dist.get_rank()][part]
        optimizer.backward(loss_of(model, rows, 10 * part + dist.get_rank()), weight=rows)


def resume(path: Path, steps_before: int) -> list[tuple[Any, ...]]:
    """In a worker: norms and parameters of a window, and of one that was saved when two thirds of it were there."""
    built = [(model := sharded(Net()), adamw(model, max_grad_norm=0.1)) for _ in range(2)]
    (model, optimizer), (other, fresh) = built
    take_steps(range(steps_before), optimizer)
    half_a_window(model, optimizer, range(2))
    saved = states.get_optimizer_state_dict(model, optimizer)
    assert isinstance(saved["state"]["first.weight"]["grad_accumulator"], DTensor)
    dcp.save({"model": model.state_dict(), "optimizer": saved}, checkpoint_id=path)
    half_a_window(other, fresh, range(1))  # what is loaded needs a place
    place = {"model": other.state_dict(), "optimizer": states.get_optimizer_state_dict(other, fresh)}
    dcp.load(place, checkpoint_id=path)
    fresh.zero_grad()
    other.load_state_dict(place["model"])
    states.set_optimizer_state_dict(other, fresh, place["optimizer"])
    start = everything_whole(fresh)
    for each_model, each in built:
        half_a_window(each_model, each, range(2, 3))
        each.step()
    assert not torch.equal(everything_whole(fresh)["param 0"], start["param 0"])
    return [(each.grad_norm, everything_whole(each)) for _, each in built]


@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_open_window_of_parts_goes_on(steps_before: int, tmp_path: Path) -> None:
    (norm, truth), (resumed_norm, found) = processes.agreed(2, resume, tmp_path, steps_before)
    assert_close(resumed_norm, norm, "norm")
    for name, value in truth.items():
        assert_close(found[name], value, "window", name)


# ---- weights of one process, and means over several ------------------------------------------------------------------

SLOPES, WEIGHTS = ((1.0, 3.0), (5.0, 7.0)), ((2.0, 6.0), (4.0, 8.0))  # by rank and micro-batch


def linear() -> nn.Linear:
    layer = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def saved_by_all() -> dict[str, Any]:
    """In a worker: the checkpoint of an open window whose gradients are means over processes."""
    layer, rank = sharded(linear(), mesh_over()), dist.get_rank()
    optimizer = af.SGD(layer.parameters(), lr=1.0)
    for slope, weight in zip(SLOPES[rank], WEIGHTS[rank], strict=True):
        optimizer.backward(layer(torch.full((1, 4), slope)).sum(), weight=weight)
    return states.get_optimizer_state_dict(layer, optimizer, options=FULL)


def finished_by_all(saved: dict[str, Any]) -> Tensor:
    """In a worker: a window that one process began, and whose gradients are means over processes now."""
    layer = linear()
    optimizer = af.SGD(layer.parameters(), lr=1.0, grads_are_reduced=True)
    optimizer.load_state_dict(saved)
    optimizer.backward(layer(torch.full((1, 4), 7.0)).sum(), weight=8.0)
    optimizer.step()
    return layer.weight.detach()


def test_one_process_divides_a_window_of_several_by_the_weights_of_all() -> None:
    layer = linear()
    optimizer = af.SGD(layer.parameters(), lr=1.0)
    saved: Any = processes.run(2, saved_by_all)[0]
    states.set_optimizer_state_dict(layer, optimizer, saved)
    optimizer.step()
    both = [(s, w) for ss, ws in zip(SLOPES, WEIGHTS, strict=True) for s, w in zip(ss, ws, strict=True)]
    mean = sum(slope * weight for slope, weight in both) / sum(weight for _, weight in both)
    torch.testing.assert_close(layer.weight.detach(), torch.full((1, 4), -mean))


def test_a_window_of_one_process_goes_on_among_several() -> None:
    layer = linear()
    optimizer: Any = af.SGD(layer.parameters(), lr=1.0)
    for slope, weight in ((1.0, 3.0), (2.0, 5.0)):
        optimizer.backward(layer(torch.full((1, 4), slope)).sum(), weight=weight)
    found = processes.agreed(2, finished_by_all, optimizer.state_dict())
    torch.testing.assert_close(found, torch.full((1, 4), -(1.0 * 3.0 + 2.0 * 5.0 + 7.0 * 8.0) / (3.0 + 5.0 + 8.0)))
