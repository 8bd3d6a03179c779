"""torch.distributed.checkpoint: what 4 processes have saved, spread in any way, 2 or 1 load, spread in another.

Gradients are the same everywhere and no norm is taken, so all ways of training give the same bits.
"""

from __future__ import annotations

import copy
import io
import tempfile
import warnings
from pathlib import Path
from typing import Any

import processes
import pytest
import sharded_models as models
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from compare import assert_close, assert_same_bits
from sharded_models import ADAMW, everything_whole, mesh_over, params_of, sharded
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import accumfused as af
from accumfused.plan import Plan

CHECKS = check = models.Checks(__name__)
FORMATS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "split16": (torch.bfloat16, {}),
    "int8": (torch.bfloat16, {"state_dtype": "int8", "state_dtype_min_numel": 500}),
}
SAVED = [  # by 4 processes
    *((way, "split16") for way in ("fully_shard", "hsdp", "process_group")),
    *(("fully_shard", "fp32"), ("fully_shard", "int8")),
]
LOADED = [(2, "fully_shard"), (2, "process_group"), (1, "plain")]
HAS_NOISE_OF_PARTS = "origins" in Plan.__dataclass_fields__ or hasattr(Plan, "origins")


def build(way: str, form: str) -> tuple[Any, af.AdamW]:
    torch.manual_seed(1)
    dtype, settings = FORMATS[form]
    model: Any = nn.Sequential(nn.Linear(256, 6), nn.Linear(6, 5)).to(dtype)
    if way in ("fully_shard", "hsdp"):
        sharded(model, mesh_over(2, 2) if way == "hsdp" else mesh_over())
    group = {way: dist.group.WORLD} if way.endswith("_group") else {}
    return model, af.AdamW(model.parameters(), **ADAMW, rounding_seed=3, **settings, **group)


def give_gradients(optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params_of(optimizer):
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        given: Any = param
        placed = isinstance(given, DTensor)
        param.grad = distribute_tensor(grad, given.device_mesh, given.placements) if placed else grad


def take_steps(optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        give_gradients(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()


def save(model: Any, optimizer: Any, path: Path) -> None:
    weights, values = states.get_state_dict(model, optimizer)
    assert "exp_avg" in values["state"]["0.weight"]
    dcp.save({"model": weights, "optimizer": values}, checkpoint_id=path)


def load(model: Any, optimizer: Any, path: Path) -> None:
    weights, values = states.get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": values}, checkpoint_id=path)
    states.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=values)


def save_all(folder: Path) -> None:
    for way, form in SAVED:
        model, optimizer = build(way, form)
        take_steps(optimizer, range(2))
        save(model, optimizer, folder / f"{way}-{form}")
        values = everything_whole(optimizer)
        if dist.get_rank() == 0:
            torch.save(values, folder / f"{way}-{form}.pt")


def load_all(folder: Path, ways: list[str]) -> dict[tuple[str, ...], str]:
    """What is not as it was saved, or after two more steps not as it would be without the stop."""
    found = {}
    for before, form in SAVED:
        for way in ways:
            model, optimizer = build(way, form)
            load(model, optimizer, folder / f"{before}-{form}")
            wrong = differing(optimizer, torch.load(folder / f"{before}-{form}.pt"), "loaded")
            if HAS_NOISE_OF_PARTS or form != "int8":
                take_steps(optimizer, range(2, 4))
                wrong += differing(optimizer, torch.load(folder / f"{form}.pt"), "went on")
            found[before, way, form] = ", ".join(wrong)
    return found


def differing(optimizer: Any, truth: dict[str, Tensor], what: str) -> list[str]:
    values = everything_whole(optimizer)
    names = [name for name in sorted({*values, *truth}) if name not in values or name not in truth]
    names += [name for name in values if name in truth and not torch.equal(values[name], truth[name])]
    return [f"{what}: {name}" for name in names]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], list[str]]:
    """What each process that loads has found, by its way of saving, of loading, and format."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for form in FORMATS:
        _, optimizer = build("plain", form)
        starts = [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]
        take_steps(optimizer, range(4))
        params = [param for group in optimizer.param_groups for param in group["params"]]
        assert not any(torch.equal(param, start) for param, start in zip(params, starts, strict=True))
        torch.save(everything_whole(optimizer), folder / f"{form}.pt")
    processes.run(4, save_all, folder)
    by_rank = processes.run(2, load_all, folder, [way for size, way in LOADED if size == 2])
    with warnings.catch_warnings(action="ignore"):  # torch says that it takes this for a single process
        alone = load_all(folder, ["plain"])
    return {key: [found[key] for found in by_rank] for key in by_rank[0]} | {key: [alone[key]] for key in alone}


@pytest.mark.parametrize("way", [way for _, way in LOADED])
@pytest.mark.parametrize(("before", "form"), SAVED)
def test_training_goes_on_as_it_would_have(before: str, form: str, way: str, loaded: Any) -> None:
    assert not any(loaded[before, way, form]), loaded[before, way, form]


# ---- within one run --------------------------------------------------------------------------------------------------


@check(2)
def a_whole_state_is_loaded_into_parts() -> None:
    for way in ("fully_shard",):
        for form in FORMATS:
            _, plain = build("plain", form)
            take_steps(plain, range(2))
            _, optimizer = build(way, form)
            with torch.no_grad():
                for param, twin in zip(params_of(optimizer), params_of(plain), strict=True):
                    given: Any = param
                    is_cut = isinstance(given, DTensor)
                    param.copy_(distribute_tensor(twin, given.device_mesh, given.placements) if is_cut else twin)
            optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
            assert differing(optimizer, everything_whole(plain), f"{way}, {form}") == []
            take_steps(optimizer, range(2, 4))
            for name, value in optimizer.state[params_of(optimizer)[0]].items():
                assert isinstance(value, DTensor) == (value.dim() > 0), (way, form, name)
                if value.dim():
                    part = value._local_tensor
                    assert part.untyped_storage().nbytes() == part.nbytes, (way, form, name)
            if form != "int8" or HAS_NOISE_OF_PARTS:
                take_steps(plain, range(2, 4))
                assert differing(optimizer, everything_whole(plain), f"{way}, {form}") == []


@check(4)
def a_whole_state_is_loaded_into_parts_of_two_dimensions() -> None:
    mesh = mesh_over(2, 2)
    for cuts in ([ColwiseParallel, RowwiseParallel], [RowwiseParallel, ColwiseParallel]):
        torch.manual_seed(1)
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).bfloat16()
        plain = af.AdamW(copy.deepcopy(model).parameters(), **ADAMW)
        take_steps(plain, range(2))
        for layer, cut in zip(model, cuts, strict=True):
            parallelize_module(layer, mesh["b"], cut())
        optimizer = af.AdamW(sharded(model, mesh["a"]).parameters(), **ADAMW)
        with torch.no_grad():
            for param, twin in zip(params_of(optimizer), params_of(plain), strict=True):
                given: Any = param
                param.copy_(distribute_tensor(twin, given.device_mesh, given.placements))
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        for each in (plain, optimizer):
            take_steps(each, range(2, 4))
        assert differing(optimizer, everything_whole(plain), str(cuts)) == []


@check(2)
def a_gathered_state_dict_is_that_of_one_process() -> None:
    _, plain = build("plain", "fp32")
    model, optimizer = build("fully_shard", "fp32")
    for each in (plain, optimizer):
        take_steps(each, range(2))
    gathered = states.get_optimizer_state_dict(model, optimizer, options=states.StateDictOptions(full_state_dict=True))
    for index, (name, _) in enumerate(model.named_parameters()):
        for key, value in plain.state_dict()["state"][index].items():
            assert_same_bits(gathered["state"][name][key], value, f"{name} {key}")
    other, fresh = build("fully_shard", "fp32")
    other.load_state_dict(model.state_dict())
    options = states.StateDictOptions(full_state_dict=True)
    states.set_optimizer_state_dict(other, fresh, copy.deepcopy(gathered), options=options)
    for each in (plain, fresh):
        take_steps(each, range(2, 4))
    assert differing(fresh, everything_whole(plain), "fresh") == []


@check(2)
def a_ranks_own_state_dict_goes_through_a_file() -> None:
    for way in ("fully_shard", "process_group"):
        for form in FORMATS:
            model, optimizer = build(way, form)
            take_steps(optimizer, range(2))
            file = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict()], file)
            file.seek(0)
            other, fresh = build(way, form)
            for each, saved in zip((other, fresh), torch.load(file, weights_only=False), strict=True):
                each.load_state_dict(saved)
            for each in (optimizer, fresh):
                take_steps(each, range(2, 4))
            assert differing(fresh, everything_whole(optimizer), f"{way}, {form}") == []


def half_a_window(model: Any, optimizer: Any, parts: range) -> None:
    for part in parts:
        count = ((3, 5, 1), (1, 0, 9))[dist.get_rank()][part]
        optimizer.backward(models.loss_of(model, 7, part, dist.get_rank(), count), weight=count)


@check(2)
def an_open_window_goes_on() -> None:
    for before_first_step in (True, False):
        built = []
        for _ in range(2):
            model = sharded(models.small_model())
            built.append((model, af.AdamW(model.parameters(), **ADAMW, max_grad_norm=0.1)))
        (model, optimizer), (other, fresh) = built
        if not before_first_step:
            take_steps(optimizer, range(2))
        half_a_window(model, optimizer, range(2))
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        saved = states.get_optimizer_state_dict(model, optimizer)
        assert isinstance(saved["state"]["0.weight"]["grad_accumulator"], DTensor)
        dcp.save({"model": model.state_dict(), "optimizer": saved}, checkpoint_id=folder[0])
        half_a_window(other, fresh, range(1))  # what is loaded needs a place
        place = {"model": other.state_dict(), "optimizer": states.get_optimizer_state_dict(other, fresh)}
        dcp.load(place, checkpoint_id=folder[0])
        fresh.zero_grad()
        other.load_state_dict(place["model"])
        states.set_optimizer_state_dict(other, fresh, place["optimizer"])
        for each_model, each in built:
            half_a_window(each_model, each, range(2, 3))
            each.step()
        assert optimizer.grad_norm is not None
        assert_close(fresh.grad_norm, optimizer.grad_norm, "norm")
        for name, value in everything_whole(optimizer).items():
            assert_close(everything_whole(fresh)[name], value, "window", name)


@check(2)
def open_windows_of_sums_that_are_not_added_up_are_not_saved() -> None:
    for way in ("process_group",):
        model, optimizer = build(way, "fp32")
        take_steps(optimizer, range(1))
        give_gradients(optimizer, 1)
        optimizer.accumulate(2.0)
        with pytest.raises(RuntimeError, match="holds this process's own part of the sums"):
            states.get_optimizer_state_dict(model, optimizer)
        optimizer.step()
        states.get_optimizer_state_dict(model, optimizer)


@pytest.mark.parametrize(("size", "name"), CHECKS.every)
def test_over_processes(size: int, name: str) -> None:
    CHECKS.assert_passed(size, name)
