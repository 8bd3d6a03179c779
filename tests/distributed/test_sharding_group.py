"""sharding_group: each process updates a part of every parameter, with the bits that process_group has."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from compare import assert_same_bits, everything
from snapshot import differences, snapshot
from table import set_grads
from torch import Tensor
from torch.nn import Parameter

import accumfused as af
from accumfused import distributed
from accumfused.shards import is_dtensor, local

STEPS = 3
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (af.SGD, {"lr": 0.3, "momentum": 0.6, "weight_decay": 0.2}),
    "adamw": (af.AdamW, {"lr": 0.1, "betas": (0.5, 0.7), "weight_decay": 0.4}),
    "amsgrad": (af.Adam, {"lr": 0.1, "betas": (0.5, 0.7), "amsgrad": True}),
    "lion": (af.Lion, {"lr": 0.05, "betas": (0.6, 0.8), "weight_decay": 0.5}),
}
# Rows that 2 and 4 do not divide, fewer rows than processes, channels_last, no rows, one dimension, many rows; the
# last is transposed, so that rows are no run of memory.
SHAPES: list[tuple[int, ...]] = [(5, 3), (1, 7), (6, 4, 3, 2), (), (131,), (3,), (40, 70), (6, 9)]
BLOCKS: list[tuple[int, ...]] = [(5, 256), (), (9, 128), (3,), (1, 128)]  # rows of whole blocks, or too small for int8
FORMATS: dict[str, tuple[torch.dtype, dict[str, Any], list[tuple[int, ...]]]] = {
    "fp32": (torch.float32, {}, SHAPES),
    "split16": (torch.bfloat16, {"master_weights": "split16"}, SHAPES),
    "fp32 masters": (torch.float16, {"master_weights": "fp32"}, SHAPES),
    "split8": (torch.bfloat16, {"master_weights": "split8"}, SHAPES[:-1]),
    "stochastic": (torch.bfloat16, {"master_weights": None, "rounding": "stochastic"}, SHAPES[:-1]),
    "bf16 states": (torch.float32, {"state_dtype": torch.bfloat16, "state_dtype_min_numel": 5}, SHAPES[:-1]),
    "int8 states": (torch.bfloat16, {"state_dtype": "int8", "state_dtype_min_numel": 100}, BLOCKS),
}


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    values = [v.to(memory_format=torch.channels_last) if v.dim() == 4 else v for v in values]
    values = [v.t().contiguous().t() if v.shape == (6, 9) else v for v in values]
    return [Parameter(v) for v in values]


def whole_numbers(params: list[Any], rank: int, index: int) -> list[Tensor | None]:
    """Gradients whose sums, and sums of squares, are exact in whatever order they are added up."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    return [torch.randint(-8, 9, p.shape, generator=generator).float() for p in params]


def any_numbers(params: list[Any], rank: int, index: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(100 * rank + index)
    return [torch.randn(p.shape, generator=generator) for p in params]


@dataclass(frozen=True)
class Way:
    """How gradients and parameters travel."""

    alone: bool = False  # each parameter by itself, as large ones do
    scatters: bool = False  # to the process that needs it only, as over NCCL


WAYS = [Way(alone, scatters) for alone in (False, True) for scatters in (False, True)]


def train(
    kind: str, rule: str, form: str, loop: str, way: Way, grads_of: Callable[..., list[Tensor | None]] = whole_numbers
) -> dict[str, Tensor]:
    """In a worker: parameters and (whole) states after some windows; kind: the setting that has the group."""
    optimizer_class, options = RULES[rule]
    dtype, settings, shapes = FORMATS[form]
    clip = 3.0 if grads_of is whole_numbers else None  # the norm of others is rounded in an order of its own
    params = parameters(shapes, dtype)
    optimizer = optimizer_class(
        params, **options, **settings, max_grad_norm=clip, rounding_seed=5, **{kind: dist.group.WORLD}
    )
    optimizer._reduction().transport.scatters = way.scatters
    for step in range(STEPS):
        for index in range(1 if loop == "step" else 2):
            set_grads(params, grads_of(params, dist.get_rank(), 10 * step + index))
            if loop != "step":
                weight = 1 + dist.get_rank() + index if loop == "weighted" else None
                optimizer.accumulate(weight, last=loop == "last" and index == 1)
        optimizer.step()
        assert all(param.grad is None for param in params)
    return wholly(optimizer)


def wholly(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """In a worker: parameters and states, of which every process gets all parts; gloo has no int16."""
    found: dict[str, Any] = everything(optimizer)
    for name, value in found.items():
        if is_dtensor(value):
            wide = value.int() if value.dtype in (torch.int16, torch.int8) else value
            found[name] = wide.full_tensor().to(value.dtype)
    return found


def differing(rules: list[str], forms: list[str], loops: list[str], way: Way, draws: Any = whole_numbers) -> list[str]:
    """In a worker: where the two groups have other bits, and parameters that did not move."""
    found, usual = [], distributed.BUNDLED_BYTES
    distributed.BUNDLED_BYTES = 0 if way.alone else usual
    for rule, form, loop in itertools.product(rules, forms, loops):
        one, other = (train(kind, rule, form, loop, way, draws) for kind in ("process_group", "sharding_group"))
        found += [f"{rule}, {form}, {loop}: {key}" for key in {*one} ^ {*other}]
        for name in {*one} & {*other}:
            try:
                assert_same_bits(other[name], one[name])
            except AssertionError as error:
                found.append(f"{rule}, {form}, {loop}: {name} {error}")
        for index, start in enumerate(parameters(FORMATS[form][2], FORMATS[form][0])):
            if torch.equal(one[f"param {index}"], start.detach()):
                found.append(f"{rule}, {form}, {loop}: parameter {index} did not move")
    distributed.BUNDLED_BYTES = usual
    return found


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("world", [2, 4])
def test_parts_have_the_bits_of_the_whole(world: int, form: str) -> None:
    assert processes.run(world, differing, list(RULES), [form], ["unweighted"], Way()) == [[]] * world


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, 4])
def test_parts_have_the_bits_of_the_whole_in_every_loop(world: int, way: Way) -> None:
    loops = ["unweighted", "weighted", "last", "step"]
    assert processes.run(world, differing, ["adamw"], ["fp32", "split16", "int8 states"], loops, way) == [[]] * world


# A reduce-scatter of more than two processes may add up in another order than an all-reduce.
@pytest.mark.parametrize(
    ("world", "way"), [*[(2, way) for way in WAYS], *[(4, way) for way in WAYS if not way.scatters]]
)
def test_sums_have_the_bits_of_the_whole_whatever_the_gradients_are(world: int, way: Way) -> None:
    given = list(RULES), ["fp32", "split16"], ["unweighted", "weighted"], way, any_numbers
    assert processes.run(world, differing, *given) == [[]] * world


# ---- what a process keeps ------------------------------------------------------------------------------------------


def kept() -> tuple[list[list[tuple[Any, ...]]], dict[str, Any], dict[str, Any]]:
    """In a worker: shapes of states here, and the memory of both kinds of groups."""
    reports = []
    for kind in ("process_group", "sharding_group"):
        params = parameters([(64, 48), (7, 3), (1, 5)])
        optimizer = af.AdamW(params, **{kind: dist.group.WORLD})
        set_grads(params, whole_numbers(params, dist.get_rank(), 0))
        optimizer.step()
        reports.append(af.memory_report(optimizer).total.as_dict())
    shapes = [[tuple(local(optimizer.state[p][name]).shape) for name in ("exp_avg", "exp_avg_sq")] for p in params]
    whole = {tuple(optimizer.state[p]["exp_avg"].shape) for p in params}
    assert whole == {(64, 48), (7, 3), (1, 5)}
    return shapes, reports[0], reports[1]


@pytest.mark.parametrize("world", [2, 4])
def test_a_process_keeps_the_states_of_its_rows_only(world: int) -> None:
    rows = {2: [(32, 4, 1), (32, 3, 0)], 4: [(16, 2, 1), (16, 2, 0), (16, 2, 0), (16, 1, 0)]}[world]
    for own, (shapes, whole, part) in zip(rows, processes.run(world, kept), strict=True):
        assert shapes == [[(n, columns)] * 2 for n, columns in zip(own, (48, 3, 5), strict=True)]
        numbers = sum(n * columns for n, columns in zip(own, (48, 3, 5), strict=True))
        assert part["states"] == 8 * numbers + 3 * 4
        assert whole["states"] == 8 * (64 * 48 + 7 * 3 + 5) + 3 * 4
        assert part["parameters"] == whole["parameters"]


# ---- norms, skips, and gradients that are not there ----------------------------------------------------------------


def measured(shapes: list[tuple[int, ...]], bad: float | None) -> list[Any]:
    """In a worker: norm, skips, what was written, for windows of which rank 1's second may be bad in one element."""
    params = parameters(shapes)
    optimizer = af.AdamW(params, lr=0.1, max_grad_norm=1.0, sharding_group=dist.group.WORLD)
    told = []
    for step in range(3):
        grads = any_numbers(params, dist.get_rank(), step)
        if bad is not None and step == 1 and dist.get_rank() == 1:
            assert grads[0] is not None
            grads[0][0, 1] = bad  # of a row that rank 0 updates
        set_grads(params, grads)
        optimizer.accumulate(3 + dist.get_rank())
        before = snapshot(optimizer)
        optimizer.step()
        changed = [n for n in differences(before, snapshot(optimizer)) if n.startswith(("param", "state"))]
        steps = {float(entry["step"]) for entry in optimizer.state.values() if "step" in entry}
        told.append((float(optimizer.grad_norm), int(optimizer.skipped_steps), bool(changed), steps))
    return told


@pytest.mark.parametrize("shapes", [SHAPES, [(5, 3), (40, 70)]], ids=["some are whole", "all are cut"])
@pytest.mark.parametrize("world", [2, 4])
def test_the_norm_is_that_of_all_parts(world: int, shapes: list[tuple[int, ...]]) -> None:
    answers = processes.run(world, measured, shapes, None)
    params, total = parameters(shapes), sum(range(3, 3 + world))
    for step in range(3):
        each = [any_numbers(params, rank, step) for rank in range(world)]
        sums = [sum((3 + r) / total * g.double() for r, g in enumerate(of_all)) for of_all in zip(*each, strict=True)]
        norm = math.sqrt(sum(float(g.square().sum()) for g in sums))
        for answer in answers:
            assert answer[step][0] == pytest.approx(norm, rel=2e-6)
            assert answer[step][0] == answers[0][step][0]
            assert answer[step][1:] == (0, True, {step + 1.0})


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_in_one_process_is_skipped_by_all(bad: float) -> None:
    for answer in processes.run(2, measured, SHAPES, bad):
        assert [told[1:] for told in answer] == [(0, True, {1.0}), (1, False, {1.0}), (1, True, {2.0})]
        assert not math.isfinite(answer[1][0])


def scaled(bad: bool) -> list[Any]:
    """In a worker: our GradScaler, over open windows and such as were closed."""
    told = []
    for last in (True, False):
        params = parameters(SHAPES)
        optimizer = af.AdamW(params, sharding_group=dist.group.WORLD)
        scaler = af.GradScaler("cpu", init_scale=4.0)
        for step in range(2):
            grads = [4.0 * g for g in whole_numbers(params, dist.get_rank(), step) if g is not None]
            if bad and step == 1 and dist.get_rank() == 1:
                grads[0][0, 0] = math.inf
            set_grads(params, grads)
            scaler.scale(torch.ones(()))
            optimizer.accumulate(last=last)
            scaler.step(optimizer)
            scaler.update()
            assert optimizer.grad_norm is not None
            told.append((scaler.get_scale(), int(optimizer.skipped_steps), float(optimizer.grad_norm)))
    return told


def test_our_scaler_divides_and_backs_off_in_all_processes() -> None:
    good, bad = processes.run(2, scaled, False), processes.run(2, scaled, True)
    params = parameters(SHAPES)
    for step in range(2):
        pairs = zip(whole_numbers(params, 0, step), whole_numbers(params, 1, step), strict=True)
        norm = math.sqrt(sum(float(((a + b) / 2).double().square().sum()) for a, b in pairs))  # type: ignore[operator]
        for answer in good:
            assert answer[step] == answer[2 + step] == (4.0, 0, pytest.approx(norm, rel=2e-6))
    for answer in bad:
        assert [told[:2] for told in answer] == [(4.0, 0), (2.0, 1)] * 2


def absent() -> tuple[list[bool], dict[str, Tensor], dict[str, Tensor]]:
    """In a worker: parameter 0 has a gradient nowhere, 1 in rank 1 only."""
    found = []
    for kind in ("process_group", "sharding_group"):
        params = parameters(SHAPES)
        optimizer = af.AdamW(params, lr=0.1, weight_decay=0.1, max_grad_norm=3.0, **{kind: dist.group.WORLD})
        for step in range(STEPS):
            grads = whole_numbers(params, dist.get_rank(), step)
            grads[0] = None
            grads[1] = grads[1] if dist.get_rank() == 1 else None
            set_grads(params, grads)
            optimizer.step()
        found.append(wholly(optimizer))
    states = [bool(optimizer.state.get(param)) for param in params]
    return states, found[0], found[1]


def test_parameters_without_a_gradient_stay_as_they_are() -> None:
    start = parameters(SHAPES)
    for states, whole, parts in processes.run(2, absent):
        assert states == [False] + [True] * (len(SHAPES) - 1)
        assert torch.equal(parts["param 0"], start[0].detach())
        assert not torch.equal(parts["param 1"], start[1].detach())
        assert whole.keys() == parts.keys()
        for name, value in whole.items():
            assert_same_bits(parts[name], value, name)


def overwritten(form: str) -> list[str]:
    """In a worker: parameters that others have written between steps, with each kind of group."""
    dtype, settings, shapes = FORMATS[form]
    found = []
    for kind in ("process_group", "sharding_group"):
        params = parameters(shapes, dtype)
        optimizer = af.AdamW(params, lr=0.1, **settings, **{kind: dist.group.WORLD})
        for step in range(2):
            set_grads(params, whole_numbers(params, dist.get_rank(), step))
            optimizer.step()
            with torch.no_grad():
                for param in params[::2]:
                    param.copy_(8 + torch.arange(param.numel(), dtype=torch.float32).view(param.shape) / 64)
        set_grads(params, [torch.zeros(p.shape) for p in params])  # momentum moves it on from what it is
        optimizer.step()
        found.append(wholly(optimizer))
    return [name for name, value in found[0].items() if not torch.equal(value, found[1][name])]


@pytest.mark.parametrize("form", ["split16", "fp32 masters"])
def test_parameters_that_were_overwritten_are_stepped_from_what_they_are(form: str) -> None:
    assert processes.run(2, overwritten, form) == [[], []]


# ---- refusals ------------------------------------------------------------------------------------------------------


def sharded(**settings: Any) -> tuple[list[Parameter], af.AdamW]:
    params = parameters([(5, 3), (4,)], settings.pop("dtype", torch.float32))
    optimizer = af.AdamW(params, lr=0.1, sharding_group=dist.group.WORLD, **settings)
    set_grads(params, whole_numbers(params, dist.get_rank(), 0))
    optimizer.step()
    set_grads(params, whole_numbers(params, dist.get_rank(), 1))
    return params, optimizer


def second(is_sharded: bool) -> Any:
    params, optimizer = sharded()
    other = af.SGD(params[1:], lr=0.1, **({"sharding_group": dist.group.WORLD} if is_sharded else {}))
    return optimizer, other.step


def wholly_first() -> Any:
    params = parameters([(5, 3), (4,)])
    optimizer = af.SGD(params, lr=0.1)
    set_grads(params, whole_numbers(params, 0, 0))
    optimizer.step()
    return optimizer, af.SGD(params[:1], lr=0.1, sharding_group=dist.group.WORLD).step


def seeds(kind: str, **settings: Any) -> Any:
    """Noise that every process draws for itself would lead them apart."""
    params = parameters([(5, 3)], torch.bfloat16)
    given = {"rounding_seed": dist.get_rank(), kind: dist.group.WORLD, **settings}
    optimizer = af.AdamW(params, master_weights="split8", **given)
    set_grads(params, whole_numbers(params, 0, 0))
    return optimizer, optimizer.step


def closed_twice() -> Any:
    params, optimizer = sharded()
    optimizer.accumulate(last=True)
    set_grads(params, whole_numbers(params, 0, 2))
    return optimizer, optimizer.accumulate


def by(call: Callable[[Any], Any], opens: bool = False) -> Any:
    _, optimizer = sharded()
    if opens:
        optimizer.accumulate()
    return optimizer, lambda: call(optimizer)


def construct(**settings: Any) -> Any:
    params, optimizer = sharded()
    return optimizer, lambda: af.AdamW(params, sharding_group=dist.group.WORLD, **settings)


def foreign() -> Any:
    params, optimizer = sharded()
    return optimizer, lambda: af.fuse(torch.optim.RMSprop(params), sharding_group=dist.group.WORLD)


def scale(optimizer: Any, unscales: bool = False) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    (scaler.unscale_ if unscales else scaler.step)(optimizer)


def unscale(optimizer: Any) -> None:
    af.GradScaler("cpu").unscale_(optimizer)


def save(optimizer: Any) -> None:
    optimizer.state_dict()


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = {
    "bf16 accumulators": (construct, {"accumulator_dtype": torch.bfloat16}, ValueError, "accumulators are fp32; leave"),
    "another's optimizer": (foreign, {}, ValueError, "RMSprop keeps its own step.*sharding_group="),
    "pickle": (by, {"call": pickle.dumps}, RuntimeError, "cannot be copied or pickled.*distributed.checkpoint"),
    "deepcopy": (by, {"call": copy.deepcopy}, RuntimeError, "cannot be copied or pickled.*distributed.checkpoint"),
    "state_dict(), open": (by, {"call": save, "opens": True}, RuntimeError, "this process's own part of the sums"),
    "a stock scaler": (by, {"call": scale}, RuntimeError, "use accumfused.GradScaler"),
    "unscale_": (by, {"call": unscale}, RuntimeError, "use accumfused.GradScaler"),
    "a second plain optimizer": (second, {"is_sharded": False}, RuntimeError, "a parameter is in two optimizers"),
    "a second one": (second, {"is_sharded": True}, RuntimeError, "give each parameter to one optimizer"),
    "a plain one was first": (wholly_first, {}, RuntimeError, "a parameter is in two optimizers"),
    "a closed window": (closed_twice, {}, RuntimeError, r"complete and waits for its step; call step\(\)"),
    "seeds": (seeds, {"kind": "sharding_group"}, ValueError, "the same rounding_seed"),
    "seeds, process_group": (seeds, {"kind": "process_group"}, ValueError, "the same rounding_seed"),
}


def refuse() -> list[Any]:
    """In a worker: for each, the error and what has changed of parameters and states."""
    told: list[Any] = []
    for make, given, *_ in REFUSED.values():
        optimizer, call = make(**given)
        before = snapshot(optimizer)
        try:
            call()
            told.append((None, "", []))
        except Exception as error:
            changed = differences(before, snapshot(optimizer))
            told.append((type(error), str(error), [n for n in changed if n.startswith(("param", "state", "skipped"))]))
    return told


def test_each_process_refuses_and_writes_nothing() -> None:
    for answer in processes.run(2, refuse):
        for (name, (_, _, error, text)), (kind, message, changed) in zip(REFUSED.items(), answer, strict=True):
            assert kind is error, f"{name}: {kind} {message}"
            assert re.search(text, message), f"{name}: {message}"
            assert changed == [], name
