"""Graphs and streams, on emulations and on a GPU: replays have the bits of eager windows, and memory lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import inside
import pytest
import torch
from compare import assert_all_same_bits, everything, refused
from gpu_runs import DEVICE, OTHERS, Card, Emulation, windows_on
from places import INTERPRETED, interpreted
from table import ADAMW_CASE, STATES, WEIGHTS, random_params
from torch import Tensor

import accumfused as af
import accumfused.backends.cuda
import accumfused.core.streams
from accumfused import backends, compiled
from accumfused.backends.cpu import CpuBackend
from accumfused.backends.cuda import CudaBackend
from accumfused.core.rows import Grads

FACTORS = (1.0, float("inf"), 0.5, 2.0, 1.0, 1.0)  # of the parameters in each window's losses, or of gradients
HALVES = ("bf16_stochastic", "split16", "split8")


CARDS = ["cuda", "triton"] if torch.cuda.is_available() else []


@pytest.fixture(params=["emulated", *INTERPRETED, *CARDS])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Card | Emulation]:
    """One whose steps can be captured."""
    if request.param == "emulated":
        checked = request.getfixturevalue("checked")
        checked.defer(True)
        backend = CudaBackend(checked, checked.Table)
        with Emulation(request.param, checked, backend, accumfused.backends.cuda, monkeypatch) as found:
            yield found
    elif request.param == "interpreted":
        for place in interpreted():
            with Emulation.of_triton(place.backend, monkeypatch) as found:
                yield found
    else:
        reason = backends.why_not(request.param, DEVICE)
        if reason is None and request.param == "triton":  # whose plans cannot be known to be unchanged without a table
            reason = compiled.unavailable
        if reason is not None:
            pytest.skip(reason)
        yield Card(request.param)


def of_format(weights: str, states: str) -> dict[str, Any]:
    dtype, settings = WEIGHTS[weights]
    return {"dtype": dtype, "state_dtype": STATES[states], "state_dtype_min_numel": 2, "rounding_seed": 17, **settings}


# Options of what is captured, and of what runs eagerly beside it; and the windows that are no replays.
Pair = tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]
EMULATED: dict[str, Pair] = {
    "windows": ({}, {}, ()),
    "eager windows between replays": ({}, {}, (2, 5)),  # `grad_norm` is theirs until the next capture
    **{f"{w}, {s}": (*[of_format(w, s)] * 2, ()) for w in HALVES for s in STATES},
    "sums in bf16": (*[{**of_format("split16", "fp32"), "sum_dtype": torch.bfloat16}] * 2, (2, 5)),
}
# Those in which torch computes, too.
PAIRS: dict[str, Pair] = EMULATED | {
    "our scaler, and torch's": ({"kind": af.GradScaler}, {"kind": torch.amp.GradScaler}, ()),
    **{f"released in {size}": ({"bucket": size}, {}, ()) for size in (1, 2000, 2**30)},
    **{
        str(clip): (*[{"max_grad_norm": None, "clip": clip}] * 2, ())
        for clip in (af.PerTensor(0.5), af.ZScore(0.1, 0.5, 2))
    },
}


def assert_replays_conform(name: str, gpu: Card | Emulation) -> None:
    *options, unreplayed = PAIRS[name]
    one, other = windows_on(gpu, **options[0]), windows_on(gpu, is_eager=True, **options[1])
    with gpu.on_side_stream():  # to warm up
        one.window()
    other.window()
    one.follow(1.0, 0.05)
    with gpu.capturing() as replay:
        one.window()
    for number, factor in enumerate(FACTORS):
        for run, play in ((one, one.window if number in unreplayed else replay), (other, other.window)):
            run.follow(factor, 0.05 / (number + 1))
            play()
    gpu.synchronize()
    assert_all_same_bits(one.everything(), other.everything())
    assert int(one.optimizers[0].state[one.params[0]]["step"]) == len(FACTORS)  # one to warm up, one that is skipped
    assert [int(optimizer.skipped_steps) for optimizer in one.optimizers] == [1] * len(one.optimizers)


@pytest.mark.parametrize("gpu", ["emulated", *CARDS], indirect=True)
@pytest.mark.parametrize("name", PAIRS if CARDS else EMULATED)
def test_a_captured_window_gives_the_bits_of_eager_ones(name: str, gpu: Card | Emulation) -> None:
    """It follows lr and losses, skips, rounds with the noise of its own step, and leaves eager windows alone."""
    if not isinstance(gpu, Card) and name not in EMULATED:
        pytest.skip("torch computes in this graph")
    assert_replays_conform(name, gpu)


def moved(optimizer: Any) -> None:
    param = optimizer.param_groups[0]["params"][0]
    param.data = param.data.clone()


def without_state(optimizer: Any) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"][1])


@pytest.mark.parametrize(
    ("change", "verb"),
    [(None, "step"), (None, "accumulate"), (moved, "step"), (moved, "accumulate"), (without_state, "step")],
)
def test_a_capture_that_would_build_a_plan_or_states_is_refused(change: Any, verb: str, gpu: Card | Emulation) -> None:
    optimizer = new_optimizer(gpu)
    give(optimizer, gradients(optimizer, 1.0))
    if change is not None:
        optimizer.step()
        gpu.synchronize()
        change(optimizer)
    with refused(optimizer, RuntimeError, "make one whole step"), gpu.capturing():
        getattr(optimizer, verb)()


@pytest.mark.parametrize("verb", ["step", "accumulate", None], ids=str)
def test_memory_that_a_graph_reads_is_not_released(verb: str | None, gpu: Card | Emulation) -> None:
    """Before the capture it is."""
    optimizer = new_optimizer(gpu)
    for _ in range(2):
        optimizer.release_memory()
        step(optimizer, gradients(optimizer, 1.0))
        gpu.synchronize()
    if verb == "accumulate":
        give(optimizer, gradients(optimizer, 1.0))
        optimizer.accumulate()  # the first has no launch
    give(optimizer, gradients(optimizer, 1.0))
    with gpu.capturing():
        if verb is None:
            with refused(optimizer, RuntimeError, "captured a call of this optimizer"):
                optimizer.release_memory()
        else:
            getattr(optimizer, verb)()
    optimizer.zero_grad()
    if verb is None:
        optimizer.release_memory()
        return
    with refused(optimizer, RuntimeError, r"call release_memory\(\) before the capture, or .* load_state_dict"):
        optimizer.release_memory()


COUNTS = (1, 300, 5_000)  # of tensors
KNOWN = (2, 0), [(1, 0), (1, 0), (2, 0)]  # launches and copies of a norm with its step; of two folds, and of these
FRESH = {"emulated": KNOWN, "interpreted": ((2, 1), [(1, 1), (1, 0), (2, 0)])}  # where gradients have new addresses
MANY = (4, 0), [(3, 0), (1, 0), (2, 0)]  # 5,000 new addresses, of which a launch of the CUDA backend carries thousands
CAPTURED = {"emulated": KNOWN, "interpreted": ((2, 3), [(1, 1), (1, 1), (2, 3)])}  # a table each, and numbers


@pytest.mark.parametrize(
    ("gpu", "count"),
    [
        # Triton's launches carry no address: many of them tell no more than 300 do.
        pytest.param(gpu, count, marks=pytest.mark.full if (gpu, count) == ("interpreted", COUNTS[-1]) else [])
        for gpu in ("emulated", *INTERPRETED)
        for count in COUNTS
    ],
    indirect=["gpu"],
)
def test_costs_do_not_depend_on_the_number_of_tensors(count: int, gpu: Emulation) -> None:
    """But of thousands of new addresses. Known ones cost nothing, nor does a weight on the device."""
    optimizer = ADAMW_CASE.make([torch.zeros(2).requires_grad_() for _ in range(count)], gpu.backend, max_grad_norm=1.0)
    known, new, weight = gradients(optimizer, 1.0), gradients(optimizer, 1.0), torch.tensor(3.0)

    def step(grads: list[Tensor]) -> tuple[int, int]:
        give(optimizer, grads)
        return gpu.costs(optimizer.step)

    def window(grads: list[Tensor]) -> list[tuple[int, int]]:
        """Of the first fold, which copies, of another, and of the norm with the step."""
        folds = []
        for _ in range(2):
            give(optimizer, grads)
            folds.append(gpu.costs(lambda: optimizer.accumulate(weight)))
        return [*folds, gpu.costs(optimizer.step)]

    def costs(grads: list[Tensor]) -> tuple[tuple[int, int], list[tuple[int, int]]]:
        """Each where the last one of its kind had the known addresses."""
        step(known)
        stepped = step(grads)
        window(known)
        return stepped, window(grads)

    costs(known)  # makes states and accumulators
    assert costs(known) == KNOWN
    assert costs(new) == (MANY if (gpu.name, count) == ("emulated", COUNTS[-1]) else FRESH[gpu.name])
    costs(known)
    with gpu.capturing():
        assert (step(new), window(new)) == CAPTURED[gpu.name]
    assert costs(known) == KNOWN, "a capture leaves eager calls alone"


@pytest.mark.parametrize("gpu", ["emulated"], indirect=True)
def test_addresses_that_were_sent_in_part_are_all_sent_again(gpu: Emulation) -> None:
    optimizer = ADAMW_CASE.make(
        [torch.zeros(2).requires_grad_() for _ in range(COUNTS[-1])], gpu.backend, max_grad_norm=1.0
    )
    known, new = gradients(optimizer, 1.0), gradients(optimizer, 1.0)
    for _ in range(2):
        give(optimizer, known)
        launched = gpu.costs(optimizer.step)
    assert launched == (2, 0)
    give(optimizer, new)
    gpu.machine.fail_after(1)
    with pytest.raises(RuntimeError, match="too many resources"):
        optimizer.step()
    gpu.machine.fail_after(-1)
    give(optimizer, known)
    assert gpu.costs(optimizer.step) == (2 + 2, 0)


@pytest.mark.parametrize("gpu", ["emulated"], indirect=True)
def test_a_graph_reads_what_was_there_when_it_was_captured(gpu: Emulation) -> None:
    """Though others now write its pool and all that was freed: addresses, numbers, and the table of another plan."""
    ours, theirs = new_optimizer(gpu), new_optimizer(None)
    static = gradients(ours, -2.0)
    step(ours, gradients(ours, 1.0))
    gpu.synchronize()
    with gpu.capturing() as replay:
        step(ours, static)
    step(ours, gradients(ours, 3.0), lr=0.05)
    ours.add_param_group({"params": [torch.ones(4, requires_grad=True)]})
    step(ours, gradients(ours, 3.0), lr=0.05)
    gpu.synchronize()
    with gpu.on(OTHERS):
        gpu.give_away()
    replay()
    replay()
    for value, lr in ((1.0, 0.1), (3.0, 0.05), (3.0, 0.05), (-2.0, 0.1), (-2.0, 0.1)):
        step(theirs, gradients(theirs, value), lr)
    found, wanted = everything(ours), everything(theirs)
    assert_all_same_bits({name: found[name] for name in wanted}, wanted)


def test_three_step_counts_in_a_group(gpu: Card | Emulation) -> None:
    """Tensors are frozen for a while, eagerly and in a graph; a step's arithmetic depends on its number."""
    plain = {"max_grad_norm": None, "nonfinite": "propagate"}  # else torch clears sums of squares, and is not replayed
    ours, theirs = (new_optimizer(each, [(5000,), (30,), (7,)], **plain) for each in (gpu, None))
    static = [gradients(ours, 0.5), [None, *gradients(ours, 2.0)[1:]]]
    for count in (3, 2, 1):
        step(ours, [*gradients(ours, 1.0)[:count], *[None] * (3 - count)])
    gpu.synchronize()
    with gpu.capturing() as replay:
        for grads in static:
            step(ours, grads)
    for _ in range(2):
        replay()
    step(ours, gradients(ours, -1.0))
    gpu.synchronize()
    for count in (3, 2, 1):
        step(theirs, [*gradients(theirs, 1.0)[:count], *[None] * (3 - count)])
    for _ in range(2):
        step(theirs, gradients(theirs, 0.5)), step(theirs, [None, *gradients(theirs, 2.0)[1:]])
    step(theirs, gradients(theirs, -1.0))
    assert_all_same_bits(everything(ours), everything(theirs))
    assert [int(everything(ours)[f"step {index}"]) for index in range(3)] == [6, 7, 6]


# ---- memory that others get -----------------------------------------------------------------------------------------


def new_optimizer(gpu: Card | Emulation | None, shapes: Any = ((5000,), (30,)), **options: Any) -> Any:
    device, backend = (gpu.device, gpu.backend) if gpu else ("cpu", CpuBackend())
    params = [param.detach().to(device).requires_grad_() for param in random_params(shapes)]
    return ADAMW_CASE.make(params, backend, **{"max_grad_norm": 1.0, **options})


def gradients(optimizer: Any, value: float) -> list[Tensor]:
    return [torch.full_like(p, value) for p in optimizer.param_groups[0]["params"]]


def give(optimizer: Any, grads: Sequence[Tensor | None]) -> None:
    for param, grad in zip(optimizer.param_groups[0]["params"], grads, strict=True):
        param.grad = grad


def step(optimizer: Any, grads: Sequence[Tensor | None], lr: float = 0.1) -> None:
    """One that leaves no gradient behind."""
    optimizer.param_groups[0]["lr"] = lr
    give(optimizer, grads)
    optimizer.step()
    optimizer.zero_grad()


def assert_made(optimizer: Any, *steps: tuple[float, float]) -> None:
    """These steps (gradient, lr), and no others."""
    other = new_optimizer(None)
    for value, lr in steps:
        step(other, gradients(other, value), lr)
    assert_all_same_bits(everything(optimizer), everything(other))


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize(("first", "micro_batches"), [("default", 1), ("side", 1), ("default", 2)])
def test_a_side_stream_keeps_what_it_reads(
    first: str, micro_batches: int, records: bool, gpu: Card | Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the stream of all steps. Gradients come from the default stream."""
    if not records:  # then the test has to fail
        if isinstance(gpu, Card):
            pytest.skip("a card may still have the right numbers there")
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, to: None)
    optimizer = new_optimizer(gpu)
    with gpu.on_side_stream() if first == "side" else contextlib.nullcontext():
        step(optimizer, gradients(optimizer, 1.0))
    gpu.synchronize()
    grads = [gradients(optimizer, -2.0) for _ in range(micro_batches)]
    with gpu.on_side_stream():
        while grads:
            give(optimizer, grads.pop())
            if micro_batches > 1:
                optimizer.accumulate()
                gpu.give_away()
                gpu.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        gpu.give_away()
    gpu.synchronize()
    if records:
        assert_made(optimizer, (1.0, 0.1), (-2.0 * micro_batches, 0.1))
    else:
        assert int(optimizer.skipped_steps) == 1, "the gradients are NaN"


@pytest.mark.parametrize("gpu", ["emulated"], indirect=True)
def test_a_side_stream_records_each_tensor_once(gpu: Emulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A microsecond each. But a new list may have new objects at the places of old ones, and a list may get more."""
    optimizer, recorded = new_optimizer(gpu, [(30,)]), list[int]()
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, to: recorded.append(tensor.data_ptr()))
    with gpu.on_side_stream():
        for _ in range(2):
            grads = gradients(optimizer, 1.0)
            step(optimizer, grads)
            assert recorded.count(grads[0].data_ptr()) == 1
        plan, (grad,), (own,) = inside.plan(optimizer), gradients(optimizer, 1.0), gradients(optimizer, 0.0)
        grads, sums = Grads([grad]), Grads([None])
        for _ in range(3):
            plan.record(grads, sums)
            sums[0] = own
        assert [recorded.count(tensor.data_ptr()) for tensor in (grad, own)] == [1, 1]
        plan.record(Grads(grads), sums)
        assert [recorded.count(tensor.data_ptr()) for tensor in (grad, own)] == [2, 1]
    plan.record(grads, sums)
    assert [recorded.count(tensor.data_ptr()) for tensor in (grad, own)] == [3, 2], "for another stream"


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_default_stream_keeps_what_it_reads_of_a_side_stream(
    micro_batches: int, last: bool, records: bool, gpu: Card | Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward runs on the side stream, which gets memory back when accumulate() or step() lets go of it."""
    if not records:  # then the test has to fail
        if isinstance(gpu, Card):
            pytest.skip("a card may still have the right numbers there")
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, to: None)
    optimizer = new_optimizer(gpu)
    step(optimizer, gradients(optimizer, 1.0))
    gpu.synchronize()
    for number in range(micro_batches):
        with gpu.on_side_stream():
            give(optimizer, gradients(optimizer, -2.0))
        gpu.delay()
        optimizer.accumulate(last=last and number + 1 == micro_batches)
        gpu.give_away(on_side_stream=True)
        gpu.synchronize()
    gpu.delay()
    optimizer.step()
    gpu.give_away(on_side_stream=True)
    gpu.synchronize()
    if records:
        assert_made(optimizer, (1.0, 0.1), (-2.0 * micro_batches, 0.1))
    else:
        assert int(optimizer.skipped_steps) == 1, "the gradients are NaN"


@pytest.mark.parametrize("gpu", ["emulated"], indirect=True)
def test_a_window_records_its_tensors_once_and_a_plain_step_on_the_default_stream_none(
    gpu: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a plain step the user's code releases, as with torch's optimizers."""
    optimizer, recorded = new_optimizer(gpu, [(30,)]), list[int]()
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, to: recorded.append(tensor.data_ptr()))
    step(optimizer, gradients(optimizer, 1.0))
    assert recorded == []
    grads = [gradients(optimizer, 1.0) for _ in range(3)]
    addresses = [of_all[0].data_ptr() for of_all in grads]
    while grads:
        give(optimizer, grads.pop())
        optimizer.accumulate()
    assert sorted(recorded) == sorted(addresses), "the first one is the sum, which zero_grad() may drop"
    optimizer.step()
    assert sorted(recorded) == sorted(addresses)


@pytest.mark.parametrize("gpu", ["emulated"], indirect=True)
def test_shards_pass_on_the_default_stream(gpu: Emulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP's stream waits for it before it allocates gradients: recorded ones would only come back late."""
    optimizer, recorded = new_optimizer(gpu, [(30,)]), list[int]()
    step(optimizer, gradients(optimizer, 1.0))
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, to: recorded.append(tensor.data_ptr()))
    plan, grads = inside.plan(optimizer), Grads(gradients(optimizer, 1.0))
    monkeypatch.setitem(vars(plan), "is_spread", True)
    plan.record(grads)
    assert recorded == []
    with gpu.on_side_stream():
        plan.record(grads)
    assert len(recorded) == 1


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_window_keeps_what_it_lets_go_of_whatever_computes(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a gradient that is copied, because it lies otherwise than its parameter."""
    recorded = list[int]()
    monkeypatch.setattr(accumfused.core.streams, "has_streams", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, to: recorded.append(tensor.data_ptr()))
    param = torch.zeros(20, 30, requires_grad=True)
    optimizer = af.AdamW([param], backend=backend)
    grads = [torch.ones(30, 20).t(), torch.ones(20, 30), torch.ones(30, 20).t()]
    addresses = {grad.data_ptr() for grad in grads}
    while grads:
        param.grad = grads.pop()
        optimizer.accumulate()
    assert addresses <= set(recorded)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_graph_reads_what_it_was_captured_with(keeps: bool, gpu: Card | Emulation) -> None:
    if not keeps and isinstance(gpu, Card):
        pytest.skip("a card may still have the right numbers there")
    optimizer = new_optimizer(gpu)
    step(optimizer, gradients(optimizer, 1.0))
    gpu.synchronize()
    static = gradients(optimizer, -2.0)  # the graph's, as long as the test keeps them
    with gpu.capturing() as replay:
        step(optimizer, static)
    if not keeps:
        static.clear()
    step(optimizer, gradients(optimizer, 3.0), lr=0.05)
    gpu.synchronize()
    with gpu.on_side_stream():
        gpu.give_away()
        for _ in range(2):
            replay()
    step(optimizer, gradients(optimizer, 4.0))
    gpu.give_away()
    gpu.synchronize()
    if keeps:
        assert_made(optimizer, (1.0, 0.1), (3.0, 0.05), (-2.0, 0.1), (-2.0, 0.1), (4.0, 0.1))
    else:
        assert int(optimizer.skipped_steps) == 2, "the gradients are NaN"


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own, which begins its pool
@pytest.mark.parametrize("gpu", CARDS, indirect=True)
def test_gradients_in_the_memory_of_compiled_graphs_are_copied(gpu: Card) -> None:
    """With reduce-overhead each backward pass writes the same memory again."""
    found = []
    for mode in (None, "reduce-overhead"):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)).to(DEVICE)
        forward: Any = net if mode is None else torch.compile(net, mode=mode)
        optimizer = af.SGD(net.parameters(), lr=0.1, backend=gpu.name)
        data = torch.randn(3, 16, 64, device=DEVICE)
        for _ in range(6):  # some to warm up, some recorded, some replayed
            for x in data:
                torch.compiler.cudagraph_mark_step_begin()
                forward(x).square().mean().backward()
                optimizer.accumulate()
            optimizer.step()
        found.append(torch.cat([param.detach().flatten() for param in net.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
