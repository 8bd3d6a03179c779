"""Parameters that are spread over processes (DTensors), held to the same in one process: numbers, bits, and calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import inside
import processes
import pytest
import torch
import torch.distributed as dist
from compare import assert_close, assert_same_bits, params_of
from harness import pairwise
from spread import Net, adamw, differing, give_random_gradients, mesh_over, sharded, take_steps, whole
from table import EACH_RULE, STATES, WEIGHTS, Case, Own, kept
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import accumfused as af
from accumfused.formats.shards import local

STEPS = 2
MAX_NORM = 0.5
ONE: list[tuple[Any, ...]] = [  # on a mesh of one dimension: shape and placements
    ((6, 5), Shard(0)), ((6, 5), Shard(1)), ((6, 5), Replicate()), ((1, 3), Shard(0)), ((5,), Shard(0)),
    ((), Replicate()), ((3, 2), Shard(1)),
]  # fmt: skip
TWO: list[tuple[Any, ...]] = [  # on one of 2 x 2; with one placement on its second dimension, with none a plain tensor
    ((6, 5), Shard(0), Shard(1)), ((3, 5), Replicate(), Shard(0)), ((7,),), ((9, 2), Shard(0), Shard(0)),
    ((4, 3), Shard(1)), ((2, 2),),
]  # fmt: skip
# All are cut twice. (Of the shapes above torch would remember the mesh of an earlier test, with groups of its own.)
BOTH: list[tuple[Any, ...]] = [((5, 4), Shard(0), Shard(1)), ((8, 3), Shard(0), Shard(0)), ((4, 6), Shard(1), Shard(0))]
LAID = {"2": (2, ONE), "4": (4, ONE), "2 x 2": (4, TWO), "2 x 2, both": (4, BOTH)}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5, weight_decay=0.1),
    "own step": lambda params: Own(params, lr=0.05),
}
POLICIES: dict[str, dict[str, Any]] = {
    "norm": {"max_grad_norm": MAX_NORM}, "per tensor": {"clip": af.PerTensor(0.3)},
    "per group": {"max_grad_norm": 0.5},  # and another one in the second group
    "z-score": {"clip": af.ZScore(0.1, 0.5, 2), "skip_above": af.RunningMean(1.001, 0.5, 1)},
}  # fmt: skip


def values(laid: list[tuple[Any, ...]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).to(dtype) for shape, *_ in laid]


def laid_out(laid: list[tuple[Any, ...]], meshes: dict[int, Any], dtype: torch.dtype = torch.float32) -> list[Any]:
    rows = zip(values(laid, dtype), laid, strict=True)
    return [
        nn.Parameter(distribute_tensor(value, meshes[len(placements)], placements) if placements else value)
        for value, (_, *placements) in rows
    ]


def step_laid_out(name: str, kind: str, policy: str, on: str, how: str) -> tuple[Any, ...]:
    """Parameters, norms, what the policy remembers, and skips. Args: how: spread, summed over a group, or alone."""
    laid = LAID[name][1]
    params: list[Any] = [nn.Parameter(value) for value in values(laid)]
    if how == "spread":
        mesh = mesh_over(2, 2) if "x" in name else mesh_over()
        params = laid_out(laid, {1: mesh["b"] if mesh.ndim == 2 else mesh, 2: mesh})
    group = dist.group.WORLD if how == "summed" else None  # each process has the whole gradients: so is their mean
    made, norms = OPTIMIZERS[kind]([{"params": params[:2]}, {"params": params[2:]}]), list[float]()
    if policy == "per group":
        made.param_groups[1]["max_grad_norm"] = 0.3
    optimizer = af.fuse(made, backend=on, process_group=group, **POLICIES[policy])
    for step in range(5):
        give_random_gradients(step, optimizer)
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
    history = inside.memories(optimizer)["history"]
    return [whole(p) for p in params], torch.tensor(norms), history, int(optimizer.skipped_steps)


@pytest.mark.pairwise(
    where=[*((name, "spread") for name in LAID), ("2", "summed")], kind=tuple(OPTIMIZERS), policy=tuple(POLICIES),
    on=("auto", "reference"),
)  # fmt: skip
def test_norms_and_clips_are_over_the_whole_however_it_lies(
    where: tuple[str, str], kind: str, policy: str, on: str
) -> None:
    name, how = where
    found, norms, history, skipped = processes.agreed(LAID[name][0], step_laid_out, name, kind, policy, on, how)
    wanted, lengths, truth, skips = step_laid_out(name, kind, policy, on, "alone")
    assert_close(norms, lengths, "norm")
    for actual, expected, start in zip(found, wanted, values(LAID[name][1]), strict=True):
        assert_close(actual, expected, "model")
        assert not torch.equal(actual, start)
    assert skipped == skips
    if truth is not None:
        assert_close(history, truth, "norm")


# ---- rules and formats, bit for bit ----------------------------------------------------------------------------------


def train_both(case: Case, weights: str, states: str, loop: str) -> list[str]:
    """In a worker: what is not as in one process, and parameters that did not move.

    A cut through rows draws noise of its own. Without a norm, whose last bit depends on how it is cut.
    """
    dtype, settings = WEIGHTS[weights]
    settings = {"state_dtype_min_numel": 0, "rounding_seed": 3, **settings}
    settings["state_dtype"] = STATES[kept(states, case)]
    is_exact = states == "fp32" and weights in ("fp32", "split16", "fp16_master")
    shapes = [(6, 128), (3, 256), *([(7,), (2, 5)] if states != "8bit" else [])]
    cuts = [Shard(0), Replicate(), *([Shard(1)] if is_exact else [])]
    laid = [(shape, cut) for shape in shapes for cut in cuts if getattr(cut, "dim", 0) < len(shape)]
    one = case.make(laid_out(laid, {1: mesh_over()}, dtype), **settings)
    other = case.make([nn.Parameter(value) for value in values(laid, dtype)], **settings, grads_are_reduced=True)
    for step in range(STEPS):
        for index in range(1 if loop == "step" else 2):
            give_random_gradients(10 * step + index, one, other)
            for optimizer in (one, other) if loop != "step" else ():
                optimizer.accumulate(last=loop == "closed" and index == 1)
        if loop == "closed":
            places = [(p.grad.shape, p.grad.placements, p.grad.dtype) for p in params_of(one)]
            assert places == [(p.shape, p.placements, torch.float32) for p in params_of(one)]
        for optimizer in (one, other):
            optimizer.step()
    still = zip(params_of(other), values(laid, dtype), strict=True)
    return differing(one, other) + [f"{index} did not move" for index, (p, v) in enumerate(still) if torch.equal(p, v)]


LOOPS = ("step", "open", "closed")
ROWS = pairwise({"weights": [*WEIGHTS], "states": [*STATES], "loop": LOOPS})


@pytest.mark.parametrize(  # what a rule computes is no matter here: each is there, in one row or two
    ("case", "weights", "states", "loop"), [(case, *row) for case, row in zip(EACH_RULE, itertools.cycle(ROWS))]
)
def test_every_rule_and_format_has_the_bits_of_one_process(case: Case, weights: str, states: str, loop: str) -> None:
    assert processes.agreed(2, train_both, case, weights, states, loop) == []


def switch_both(weights: str) -> list[str]:
    """In a worker: what is not as in one process, in eval mode and after it."""
    dtype, settings = WEIGHTS[weights]
    laid: list[tuple[Any, ...]] = [((6, 5), Shard(0)), ((6, 5), Shard(1)), ((1, 3), Shard(0)), ((5,), Replicate())]
    params = laid_out(laid, {1: mesh_over()}, dtype), [nn.Parameter(value) for value in values(laid, dtype)]
    one, other = (
        af.AdamWScheduleFree(each, lr=0.1, betas=(0.5, 0.7), grads_are_reduced=True, **settings) for each in params
    )
    take_steps(range(3), one, other)
    before = [whole(param) for param in params_of(one)]
    for optimizer in (one, other):
        optimizer.eval()
    found = differing(one, other)
    found += [
        f"{i} is y" for i, (p, y) in enumerate(zip(params_of(one), before, strict=True)) if torch.equal(whole(p), y)
    ]
    for optimizer in (one, other):
        optimizer.train()
    take_steps(range(3, 5), one, other)
    return found + differing(one, other)


@pytest.mark.parametrize("weights", ["fp32", "split16", "fp16_master"])
def test_schedule_free_optimizers_switch_their_own_parts(weights: str) -> None:
    assert processes.agreed(2, switch_both, weights) == []


def draws_alike() -> bool:
    """In a worker: whether parts that are no run of memory are rounded alike, after a step that is the same for all."""
    param = nn.Parameter(distribute_tensor(torch.ones(6, 128, dtype=torch.bfloat16), mesh_over(), [Shard(1)]))
    optimizer = af.SGD([param], lr=0.0011, master_weights=None, rounding_seed=3)
    param.grad = torch.ones_like(param)
    optimizer.step()
    return torch.equal(*whole(param).chunk(2, dim=1))


def test_columns_draw_noise_of_their_own() -> None:
    assert not processes.agreed(2, draws_alike)


def kept_in_8_bits(shape: tuple[int, ...], cut: Any) -> bool:
    (param,) = laid_out([(shape, cut)], {1: mesh_over()})
    optimizer = af.AdamW([param], state_dtype="8bit", state_dtype_min_numel=0)
    take_steps(range(1), optimizer)
    state = optimizer.state[param]
    assert all(value.placements == param.placements for value in state.values() if value.dim())
    return "exp_avg_8bit" in state


@pytest.mark.parametrize(("shape", "cut", "expected"), [
    ((4, 128), Shard(0), True), ((4, 128), Shard(1), False), ((4, 64), Shard(0), False),
    ((4, 64), Replicate(), True), ((256,), Shard(0), False),
])  # fmt: skip
def test_states_in_8_bits_fall_back_where_blocks_are_cut(shape: tuple[int, ...], cut: Any, expected: bool) -> None:
    assert processes.agreed(2, kept_in_8_bits, shape, cut) is expected


# ---- calls that a model and its plain twin take alike ----------------------------------------------------------------


HALF_A_UNIT = 2.0**-7  # of bfloat16 at 3, which remainders may add


def overwritten(model: Any, optimizer: Any) -> None:
    three = {name: torch.full_like(value.detach(), 3.0) for name, value in model.state_dict().items()}
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(three[name])
    values = optimizer.full_precision_state_dict(model).values()
    assert all(bool(((whole(value) - 3).abs() <= HALF_A_UNIT).all()) for value in values)
    take_steps(range(20, 21), optimizer)
    model.load_state_dict(three)
    values = optimizer.full_precision_state_dict(model).values()
    assert all(bool(((whole(value) - 3).abs() <= HALF_A_UNIT).all()) for value in values)


def resumed_in_full_precision(model: Any, optimizer: Any) -> None:
    saved = {name: value.clone() for name, value in optimizer.full_precision_state_dict(model).items()}
    for name, param in model.named_parameters():
        assert saved[name].dtype == torch.float32
        assert getattr(saved[name], "placements", None) == getattr(param, "placements", None)
        assert_same_bits(whole(saved[name]).bfloat16(), whole(param), name)
    assert any(not torch.equal(whole(value).bfloat16().float(), whole(value)) for value in saved.values())
    overwritten(model, optimizer)
    optimizer.load_full_precision_state_dict(model, saved)
    for name, value in optimizer.full_precision_state_dict(model).items():
        assert_same_bits(whole(value), whole(saved[name]), name)


def joined_by_a_group(model: Any, optimizer: Any) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    take_steps(range(20, 22), optimizer)
    scheduler.step()
    optimizer.add_param_group({"params": list(model.never.requires_grad_().parameters()), "lr": 0.1, "amsgrad": True})


def live(name: str, masters: str) -> list[str]:
    both = []
    for model in (sharded(Net(torch.bfloat16)), Net(torch.bfloat16)):
        model.never.requires_grad_(False)
        optimizer = adamw(model, master_weights=masters)
        take_steps(range(2), optimizer)
        globals()[name](model, optimizer)
        take_steps(range(2, 4), optimizer)
        both.append(optimizer)
    return differing(*both)


@pytest.mark.pairwise(call=[overwritten, resumed_in_full_precision, joined_by_a_group], masters=("split16", "split8"))
def test_what_spread_parameters_live_through_is_what_plain_ones_do(call: Any, masters: str) -> None:
    assert processes.agreed(2, live, call.__name__, masters) == []


def report() -> tuple[int, list[dict[str, int]]]:
    """In a worker: elements here; and memory before and after states are made, and in a window."""
    model = sharded(Net(torch.bfloat16))
    optimizer = adamw(model)
    memory = [af.memory_report(optimizer).total.parts]
    take_steps(range(1), optimizer)
    memory.append(af.memory_report(optimizer).total.parts)
    give_random_gradients(1, optimizer)
    optimizer.accumulate()
    memory.append(af.memory_report(optimizer).total.parts)
    for param in params_of(optimizer):
        placed = [value for name, value in optimizer.state[param].items() if name != "step"]
        assert all((value.shape, value.placements) == (param.shape, param.placements) for value in placed)
        assert all(local(value).shape == local(param).shape for value in placed)
    return sum(local(param).numel() for param in params_of(optimizer)), memory


def test_a_process_keeps_and_reports_the_part_that_is_here() -> None:
    elements = [3 * 7 + 3 + 2 * (2 * 5 + 2), 2 * 7 + 2 + 2 * (1 * 5 + 1)]
    for expected, (here, memory) in zip(elements, processes.run(2, report), strict=True):
        assert here == expected
        for parts in memory:
            assert (parts["parameters"], parts["masters"], parts["states"]) == (2 * here, 2 * here, 8 * here + 6 * 4)
        assert memory[2]["accumulators"] == 4 * here
