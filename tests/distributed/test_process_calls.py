"""What processes decide together, what they send each other, and calls at odd moments."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from typing import Any
from unittest import mock

import inside
import processes
import pytest
import torch
import torch.distributed as dist
from compare import assert_close, assert_same_bits, differences, params_of, snapshot
from spread import Net, adamw, everything_whole, loss_of, sharded
from table import random_grads, random_params, set_grads
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import accumfused as af
from accumfused.formats.shards import local


def after_a_window_of_its_own() -> list[float]:
    """In a worker: a closed window's gradients, of 16-bit parameters that were trained before there were processes."""
    model = nn.Linear(4, 4).bfloat16()
    optimizer = af.SGD(model.parameters(), lr=1.0, master_weights="split8")  # whose noise has one seed in all processes
    with mock.patch("accumfused.distributed.exchange.has_processes", return_value=False):
        set_grads(params_of(optimizer), [torch.zeros_like(p) for p in params_of(optimizer)])
        optimizer.accumulate()
        optimizer.step()
    af.attach_ddp(DistributedDataParallel(model), optimizer)
    set_grads(params_of(optimizer), [torch.full_like(p, dist.get_rank() + 1.0) for p in params_of(optimizer)])
    optimizer.accumulate(last=True)
    return [value for param in model.parameters() for value in param.grad.flatten().tolist()]  # type: ignore[union-attr]


def test_a_window_from_before_the_processes_leaves_nothing_behind() -> None:
    assert set(processes.agreed(2, after_a_window_of_its_own)) == {1.5}


def release_alone(releases: bool) -> list[list[float]]:
    """In a worker: all parameters after windows; the last process releases its memory between them."""
    params = [param.detach().bfloat16().requires_grad_() for param in random_params(((40, 7), (5,), (300, 20)))]
    optimizer = af.AdamW(params, lr=0.1, max_grad_norm=1.0, process_group=dist.group.WORLD)
    for step in range(3):
        for micro_batch in range(2):
            grads = random_grads(params, 100 * step + 10 * micro_batch + dist.get_rank(), torch.bfloat16)
            set_grads(params, [grad if micro_batch or index else None for index, grad in enumerate(grads)])
            optimizer.accumulate(weight=1.0 + dist.get_rank())
        optimizer.step()
        if releases and dist.get_rank() == 1:
            optimizer.release_memory()
    return [param.flatten().tolist() for param in params]


def test_one_process_may_release_its_memory_and_the_others_notice_nothing() -> None:
    """It asks nothing of them that was agreed before, and its small sums travel with theirs."""
    assert processes.agreed(2, release_alone, True) == processes.agreed(2, release_alone, False)


def release_shards(releases: bool) -> list[Tensor]:
    """In a worker: the whole weights after windows of shards."""
    model = Net()
    outer = sharded(model)
    optimizer = adamw(model)
    for step in range(2):
        for micro_batch in range(2):
            optimizer.backward(
                loss_of(outer, 3, 100 * step + 10 * micro_batch + dist.get_rank()), last=bool(micro_batch)
            )
        if releases:
            with pytest.raises(RuntimeError, match="closed window's sum"):
                optimizer.release_memory()
        optimizer.step()
        if releases:
            optimizer.release_memory()
    return [*everything_whole(optimizer).values()]


def test_memory_of_shards_is_released_after_a_closed_window_not_within() -> None:
    both = zip(*(processes.agreed(2, release_shards, releases) for releases in (True, False)), strict=True)
    for released, kept in both:
        assert_same_bits(released, kept)


# ---- one decision --------------------------------------------------------------------------------------------------

WAYS = [  # scaler, how a window ends: "unscaled" is closed, and unscale_() and torch's clip precede the step
    ("stock", "closed"), ("stock", "unscaled"), ("ours", "open"), ("ours", "closed"), ("ours", "unscaled"),
    ("ours", "none"), ("no", "open"), ("no", "closed"), ("no", "none"),
]  # fmt: skip


def decide(over: str, kind: str, ends: str, bad: float) -> list[Any]:
    """In a worker: scale, skipped steps, step counts, and all values, after each window; rank 1 has a bad one."""
    model = Net()
    outer = sharded(model) if over == "fully_shard" else DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = adamw(model, max_grad_norm=None if ends == "unscaled" else 0.5)
    if over == "ddp":
        af.attach_ddp(outer, optimizer)
    scaler_class = af.GradScaler if kind == "ours" else torch.amp.GradScaler
    scaler = scaler_class("cpu", init_scale=2.0**10, growth_interval=2, enabled=kind != "no")
    told: list[Any] = []
    for step in range(4):
        for index in range(1 if ends == "none" else 2):
            scaler.scale(loss_of(outer, 3, 100 * step + 10 * index + dist.get_rank())).backward()
            if (step, index, dist.get_rank()) == (1, 0, 1):
                local(model.first.weight.grad)[1, 3] = bad
            if ends != "none":
                optimizer.accumulate(last=ends != "open" and index == 1)
        if ends == "unscaled":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params_of(optimizer), 0.5)
        scaler.step(optimizer)
        steps = {float(entry["step"]) for entry in optimizer.state.values() if entry}
        told.append((scaler.get_scale(), int(optimizer.skipped_steps), steps, everything_whole(optimizer)))
        scaler.update()
        optimizer.zero_grad()
    return told


@pytest.mark.pairwise(way=WAYS, bad=(math.inf, math.nan), over=("ddp", "fully_shard"))
def test_processes_skip_together_and_go_on_together(over: str, way: tuple[str, str], bad: float) -> None:
    scales, skipped, steps, values = zip(*processes.agreed(2, decide, over, *way, bad), strict=True)
    assert scales == ((1.0,) * 4 if way[0] == "no" else (2.0**10, 2.0**10, 2.0**9, 2.0**9))
    assert skipped == ((0,) * 4 if way[0] == "stock" else (0, 1, 1, 1))  # which does not call step() then
    assert steps == ({1.0}, {1.0}, {2.0}, {3.0})
    for name, value in values[0].items():
        assert_same_bits(values[1][name], value, name)
        assert not torch.equal(values[2][name], value) or name in ("param 6", "param 7"), name  # `never`, in a DDP


def drop_one(last: bool) -> list[tuple[float, list[float], int]]:
    """In a worker: two windows; rank 1 alone leaves out a micro-batch of the first."""
    param = nn.Parameter(torch.zeros(3))
    optimizer = af.SGD([param], lr=1.0, nonfinite="drop", process_group=dist.group.WORLD)
    scaler, told = af.GradScaler("cpu", init_scale=4.0), []
    scaler.scale(torch.ones(()))  # makes the scale
    for window in range(2):
        for number in range(2):
            is_bad = (dist.get_rank(), window, number) == (1, 0, 0)
            param.grad = torch.full((3,), math.inf if is_bad else scaler.get_scale())
            optimizer.accumulate(1.0, last=last and number == 1)
        scaler.step(optimizer)
        scaler.update()
        told.append((scaler.get_scale(), param.tolist(), int(optimizer.skipped_steps)))
    return told


@pytest.mark.parametrize("last", [False, True])
def test_scalers_of_all_processes_back_off_for_what_one_has_dropped(last: bool) -> None:
    assert processes.agreed(2, drop_one, last) == [(2.0, [-1.0] * 3, 0), (2.0, [-2.0] * 3, 0)]


def disagree(over: str, what: str, last: bool) -> bool:
    """In a worker: rank 1 has no weights, or does not say last=True, or nobody has any weight; True: it was skipped."""
    model, is_one = Net(), dist.get_rank() == 1
    outer = sharded(model) if over == "fully_shard" else model
    optimizer = adamw(model, process_group=None if over == "fully_shard" else dist.group.WORLD)
    before = everything_whole(optimizer)
    weight = {"weights": None if is_one else 2.0, "last": 2.0, "nothing": torch.zeros(())}[what]
    optimizer.backward(loss_of(outer, 3, 0), weight=weight, last=last and not (what == "last" and is_one))
    optimizer.step()
    after = everything_whole(optimizer)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return bool(optimizer.step_was_skipped)


@pytest.mark.parametrize(("over", "what", "last"), [
    ("group", "last", True), *itertools.product(("group", "fully_shard"), ("weights", "nothing"), (True, False))
])  # fmt: skip
def test_windows_that_are_not_of_one_kind_are_skipped_by_all(over: str, what: str, last: bool) -> None:
    assert processes.agreed(2, disagree, over, what, last)


# ---- what travels --------------------------------------------------------------------------------------------------

SHAPES = [(64, 33), (130,), (), (17, 3)]


class Sent(TorchDispatchMode):
    """The collectives of a block: their names, and dtype and size of what each sends."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensor = args[0]
            while isinstance(tensor, list):
                tensor = tensor[0]
            self.calls.append((func.overloadpacket.__name__, tensor.dtype, tensor.numel()))
        return func(*args, **(kwargs or {}))


def gradients(rank: int, index: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return random_grads(random_params(SHAPES), 10 * rank + index, dtype)


def send(micro_batches: int, last: bool, wire: Any, dtype: Any, over: str, travels_alone: bool) -> list[Any]:
    """In a worker: fp32 values before and after a second window, and what was sent in it."""
    model = nn.ParameterList([values.detach().to(dtype) for values in random_params(SHAPES)])
    told, settings = "attach" in over, {"process_group": dist.group.WORLD, "reduce_dtype": wire}
    if told:
        settings = {"process_group": dist.group.WORLD} if over == "attached later" else {}
    with inside.sizes_on_the_way(0 if travels_alone else 2**21, 2**25):
        optimizer = af.SGD(model.parameters(), lr=1.0, **settings)
        if told:  # by a step, of what to do without processes, or with another dtype
            set_grads(model.parameters(), [torch.zeros_like(param) for param in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        if over != "process_group":
            ddp = DistributedDataParallel(model)
            af.attach_ddp(ddp, optimizer, reduce_dtype=wire if told else None)
        sent, values = Sent(), []
        for count, watch in ((1, contextlib.nullcontext()), (micro_batches, sent)):
            with watch:
                for index in range(count):
                    set_grads(model.parameters(), gradients(dist.get_rank(), index, dtype))
                    optimizer.accumulate(last=last and index == count - 1)
                optimizer.step()
            saved = optimizer.full_precision_state_dict(model)
            values.append(torch.cat([saved[name].flatten() for name, _ in model.named_parameters()]))
    return [*values, sent.calls]


@pytest.mark.pairwise(
    wire=(None, torch.float32, torch.bfloat16), over=("process_group", "own", "attach_ddp", "attached later"),
    micro_batches=(1, 2, 5), last=(False, True), dtype=(torch.float32, torch.bfloat16), travels_alone=(False, True),
)  # fmt: skip
def test_gradients_travel_once_a_window_in_the_dtype_that_was_asked_for(
    micro_batches: int, last: bool, wire: Any, dtype: Any, over: str, travels_alone: bool
) -> None:
    before, after, calls = processes.agreed(2, send, micro_batches, last, wire, dtype, over, travels_alone)
    sums = []
    for rank in range(2):
        parts = [torch.cat([g.float().flatten() for g in gradients(rank, i, dtype)]) for i in range(micro_batches)]
        sums.append(sum(parts[1:], parts[0]) / (2 if last else 1))  # exact, also before it travels
    carried = wire or torch.float32
    assert_same_bits(after, before - (sums[0].to(carried) + sums[1].to(carried)).float() / (1 if last else 2))
    assert {name for name, *_ in calls} == {"allreduce_"}  # who has which parameters was asked in the first window
    assert [kind for _, kind, _ in calls] == [torch.float64, *[carried] * (4 if travels_alone else 1)]
    assert calls[0][2] == 1024  # whatever the parameters
    numel = sum(math.prod(shape) for shape in SHAPES)
    gaps = 1 if travels_alone else 32 * len(SHAPES)
    assert numel <= sum(sent for *_, sent in calls[1:]) < numel + gaps


def sent_by_a_step(over: str, clips: float | None, micro_batches: int, weight: Any, noise: bool = False) -> list[int]:
    """In a worker: the sizes of what a step sends, once the processes know each other."""
    outer = sharded(model := Net()) if over == "parts" else (model := Net())
    group = None if over == "parts" else dist.group.WORLD
    optimizer = adamw(model, max_grad_norm=clips, noise_scale=noise, process_group=group)
    for _ in range(2):
        for part in range(max(micro_batches, 1)):
            loss = loss_of(outer, 3, part)
            optimizer.backward(loss, weight=weight) if micro_batches else loss.backward()
        with Sent() as sent:
            optimizer.step()
        optimizer.zero_grad()
    return [numel for *_, numel in sent.calls]


@pytest.mark.parametrize(("clips", "micro_batches", "weight", "sizes"), [
    (0.1, 0, None, [1]), (None, 0, None, []), (None, 2, None, [19, 1]), (None, 2, 3.0, [19, 1]),
])  # fmt: skip
def test_a_step_of_parts_sends_a_number_and_nineteen_for_a_window(
    clips: Any, micro_batches: int, weight: Any, sizes: list[int]
) -> None:
    assert processes.agreed(2, sent_by_a_step, "parts", clips, micro_batches, weight) == sizes


@pytest.mark.parametrize("over", ["parts", "group"])
def test_a_window_whose_noise_is_measured_sends_one_small_message_more(over: str) -> None:
    plain, measured = (processes.agreed(2, sent_by_a_step, over, 1.0, 2, None, noise) for noise in (False, True))
    (one,) = Counter(measured) - Counter(plain)
    assert one < 4
    assert len(measured) == len(plain) + 1


def window_of_whole_parameters() -> list[str]:
    """In a worker: the collectives of the second window, where only states are divided."""
    optimizer: Any = adamw(model := sharded(Net(), reshard_after_forward=False), max_grad_norm=0.1)
    for _ in range(2):
        with Sent() as sent:
            for part in range(3):
                model.set_requires_gradient_sync(part == 2)
                model.set_reshard_after_backward(part == 2)
                optimizer.backward(loss_of(model, 3, part), weight=3)
        optimizer.step()
    return [name for name, *_ in sent.calls]


def test_where_only_states_are_divided_a_window_gathers_and_scatters_each_layer_once() -> None:
    calls = processes.agreed(2, window_of_whole_parameters)
    assert sorted(calls) == ["_allgather_base_"] * 3 + ["_reduce_scatter_base_"] * 3  # of those that are trained


# ---- calls at odd moments ------------------------------------------------------------------------------------------


def give(value: float, *params: nn.Parameter) -> None:
    """Rank 0 gets the value, rank 1 three times of it: their mean is twice the value."""
    for p in params:
        p.grad = torch.full_like(p, value * (1.0 + 2.0 * dist.get_rank()))


def sgd(*params: nn.Parameter) -> af.SGD:
    return af.SGD(params, lr=1.0, process_group=dist.group.WORLD)


def a_step_that_is_tried_again(p: nn.Parameter, q: nn.Parameter) -> None:
    optimizer = sgd(p, q)
    give(1.0, p, q)
    optimizer.accumulate()
    if dist.get_rank() == 0:  # the other steps once, and will not add up again
        with inside.fails(optimizer, "norm"), pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step()
        give(1.0, p)
        with pytest.raises(RuntimeError, match="complete and waits for its step"):
            optimizer.accumulate()
        p.grad = None
    optimizer.step()


def a_reduction_that_fails(p: nn.Parameter, q: nn.Parameter) -> None:
    optimizer, all_reduce = sgd(p, q), dist.all_reduce

    def fail(tensor: Tensor, **given: Any) -> Any:
        return all_reduce(tensor, **given) if tensor.dtype == torch.float64 else 1 / 0

    for fails in (True, False):  # then some sums would be of all processes, and some are not: the window is dropped
        give(1.0, p, q)
        optimizer.accumulate()
        lost = mock.patch.object(dist, "all_reduce", fail if fails else all_reduce)
        with lost, pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
            optimizer.step()


def frozen_parameters_ask_nobody(p: nn.Parameter, frozen: nn.Parameter) -> None:
    frozen.requires_grad_(False)
    optimizer = sgd(p, frozen)
    give(1.0, p)
    optimizer.accumulate()
    with mock.patch.object(Tensor, "tolist", None):
        optimizer.step()
    frozen.requires_grad_(True)  # the arena grows, in all processes
    give(0.0, p)
    give(1.0, frozen)
    optimizer.step()


def unfrozen_after_a_refusal(p: nn.Parameter, late: nn.Parameter) -> None:
    late.requires_grad_(False)
    optimizer = sgd(p, late)
    for refuses in (True, False):
        give(1.0, p, late)
        optimizer.accumulate()
        with pytest.raises(RuntimeError, match="requires no gradient has one") if refuses else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()
        late.requires_grad_(True)


def unfrozen_within_a_window(p: nn.Parameter, late: nn.Parameter) -> None:
    late.requires_grad_(False)
    optimizer = sgd(p, late)
    if dist.get_rank() == 0:
        give(2.0, p)
        optimizer.accumulate()
    late.requires_grad_(True)
    p.grad, late.grad = torch.ones_like(p), torch.full_like(late, 2.0)
    optimizer.accumulate()
    optimizer.step()


def moved(name: str) -> list[float]:
    p, q = (nn.Parameter(torch.zeros(4, 3)) for _ in range(2))
    globals()[name](p, q)
    return [float(p.detach()[1, 2]), float(q.detach()[1, 2])]


@pytest.mark.parametrize("call", [
    a_step_that_is_tried_again, a_reduction_that_fails, frozen_parameters_ask_nobody, unfrozen_after_a_refusal,
    unfrozen_within_a_window,
], ids=lambda call: call.__name__)  # fmt: skip
def test_gradients_are_added_up_once(call: Any) -> None:
    assert processes.agreed(2, moved, call.__name__) == [-2.0, -2.0]


# ---- what is measured of all -----------------------------------------------------------------------------------------


def repeat(last: bool) -> None:
    """In a worker: steps that fail once the processes have added up their windows, and are made again."""
    found = []
    for fails in (False, True):
        settings: dict[str, Any] = {"clip": af.ZScore(1.0, 0.9, 2), "process_group": dist.group.WORLD}
        optimizer = adamw(model := Net(), noise_scale=0.5, **settings)
        for step in range(3):
            for index in range(2):
                loss_of(model, 3, 100 * step + 10 * dist.get_rank() + index).backward()
                optimizer.accumulate(2.0, last=last and index == 1)
            for verb in ("step", "norm", "step") if fails else ():
                with inside.fails(optimizer, verb), pytest.raises(RuntimeError, match="out of memory"):
                    optimizer.step()
            optimizer.step()
        found.append(snapshot(optimizer))
    assert differences(*found) == []


@pytest.mark.parametrize("last", [False, True])
def test_norms_and_noise_of_steps_that_fail_and_are_made_again_count_once(last: bool) -> None:
    processes.run(2, repeat, last)


def grow() -> list[int]:
    """In a worker: the sizes of windows whose noise scale is 40 micro-batches of one process."""
    param = torch.zeros(4000, requires_grad=True)
    optimizer = af.SGD([param], lr=0.0, noise_scale=0.9, process_group=dist.group.WORLD)
    steps = af.NoiseScale(optimizer, start=2, most=64, every=2)
    sizes = []
    for update in range(16):
        sizes.append(steps(update))
        for _ in range(sizes[-1]):
            param.grad = (1.0 + torch.randn_like(param) * 40**0.5) / sizes[-1]
            optimizer.accumulate()
        optimizer.step()
    return sizes


def test_windows_of_all_processes_grow_alike_and_share_the_batch() -> None:
    assert 18 <= processes.agreed(2, grow)[-1] <= 22


# ---- batches that do not fit everywhere ----------------------------------------------------------------------------


def fit(weighted: bool, options: dict[str, Any]) -> tuple[list[list[int]], list[Tensor]]:
    """In a worker: the parts of two batches, of which rank 1 can take two samples at a time; and the parameters."""
    model, calls = Net(), list[list[int]]()
    ddp = DistributedDataParallel(model, **options)
    optimizer = adamw(model, max_grad_norm=0.5)
    af.attach_ddp(ddp, optimizer)
    model.first.register_forward_hook(lambda layer, inputs, output: output.register_hook(run_out) and None)

    def run_out(grad: Tensor) -> None:  # in backward, when later layers have gradients
        if dist.get_rank() == 1 and len(grad) > 2:
            raise torch.OutOfMemoryError

    def loss_of(part: tuple[Tensor, Tensor]) -> Tensor:
        calls[-1].append(len(part[0]))
        loss = (ddp(part[0]) - part[1]).square()
        return loss.mean() if weighted else loss.sum()

    for step in range(2):
        calls.append([])
        batch = rows_of(dist.get_rank(), step)
        af.accumulate_batch(optimizer, batch, loss_of, weight="samples" if weighted else None)
        optimizer.step(normalizer=None if weighted else 27 / 2)
    return calls, [param.detach() for param in model.parameters()]


def rows_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """4 samples in one process, 5 in the other."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4 + rank, 7, generator=generator), torch.randn(4 + rank, 3, generator=generator)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_processes_cut_a_batch_into_parts_of_their_own_and_step_alike(weighted: bool, options: dict[str, Any]) -> None:
    (first, params), (second, others) = processes.run(2, fit, weighted, options)
    assert first == [[4], [4]]
    assert second == [[5, 3, 2, 1, 2], [2, 1, 2]]
    alone = Net()
    optimizer = adamw(alone, max_grad_norm=0.5)
    for step in range(2):
        x, y = (torch.cat(column) for column in zip(rows_of(0, step), rows_of(1, step), strict=True))
        (alone(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for param, other, whole in zip(params, others, alone.parameters(), strict=True):
        assert_same_bits(param, other)
        assert_close(param, whole, "model")
