"""offload=True: the order of calls, of threads and of failures. The card is the CPU here.

`programs` run with and without offload, and must have the same bits. `held` keeps the worker where a test wants it, as
long as nobody waits for it: a call that reads a sum, and does not wait, then reads an old one.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from compare import assert_all_same_bits, everything, refused
from interrupts import Interrupted
from torch import Tensor, nn

import accumfused as af
from accumfused.backends import offload, transfer

pytestmark = pytest.mark.usefixtures("native")

BF16 = torch.bfloat16
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": torch.float32},
    "split16": {"dtype": BF16},
    "8 bits, stochastic": {
        "dtype": BF16, "master_weights": None, "state_dtype": "8bit", "state_dtype_min_numel": 2, "rounding_seed": 5,
    },
    "sums in bf16": {"dtype": BF16, "sum_dtype": BF16, "rounding_seed": 5},
    "fp16": {"dtype": torch.float16},
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each optimizer here has several runs."""
    monkeypatch.setattr(offload, "RUN_BYTES", 256)


class Training:
    """A small model, its optimizer, and micro-batches of unequal sizes."""

    def __init__(self, *, offload: bool, dtype: torch.dtype = torch.float32, cls: Any = af.AdamW, **settings: Any):
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
        self.dtype, self.drawn, self.settings = dtype, 0, {"lr": 0.05, **settings}
        self.optimizer = cls(self.model.parameters(), offload=offload, **self.settings)
        self.found: dict[str, Tensor] = {}

    def loss(self, size: int = 3, scale: float = 1.0) -> Tensor:
        self.drawn += 1
        x = torch.randn(size, 6, generator=torch.Generator().manual_seed(self.drawn)).to(self.dtype)
        return self.model(x).float().square().mean() * scale

    def window(self, *weights: Any, step: bool = True) -> None:
        for weight in weights:
            self.loss().backward()  # type: ignore[no-untyped-call]
            self.optimizer.accumulate(weight)
        if step:
            self.optimizer.step()

    def note(self, name: str, tensors: Any) -> None:
        self.found |= {f"{name} {index}": tensor.detach().clone() for index, tensor in enumerate(tensors)}

    def result(self) -> dict[str, Tensor]:
        return everything(self.optimizer) | self.found | {"skipped": self.optimizer.skipped_steps}


# ---- programs --------------------------------------------------------------------------------------------------------


def weights_of_every_kind(it: Training) -> None:
    it.window(3, 5.0, 0, 2.5)
    it.window(torch.tensor(3.0), torch.tensor(0.0), 4.0)
    it.window(None, None, None)
    it.window(7)


def weights_in_the_loss(it: Training) -> None:
    for weights in ((3.0, 5.0), (2.0,), (torch.tensor(4.0), torch.tensor(1.0))):
        for weight in weights:
            it.optimizer.backward(it.loss(), weight)
        it.optimizer.step()


def released(it: Training) -> None:
    with af.release_gradients(it.optimizer, 100):
        weights_in_the_loss(it)


def closed(it: Training) -> None:
    it.window(3, 5, step=False)
    it.loss().backward()  # type: ignore[no-untyped-call]
    it.optimizer.accumulate(4, last=True)
    it.note("p.grad", [param.grad for param in it.model.parameters()])
    it.note("norm", [torch.nn.utils.clip_grad_norm_(it.model.parameters(), 0.1)])
    it.optimizer.step()
    it.loss().backward()  # type: ignore[no-untyped-call]
    it.optimizer.accumulate(last=True)
    it.optimizer.zero_grad()
    it.window(2)


def plain_steps(it: Training) -> None:
    for _ in range(3):
        it.loss().backward()  # type: ignore[no-untyped-call]
        it.optimizer.step()
        it.note("grad", [it.optimizer.grad_norm])
        it.optimizer.zero_grad()


def skips(it: Training) -> None:
    it.window(2)
    it.window(2, step=False)
    it.loss(scale=float("inf")).backward()  # type: ignore[no-untyped-call]
    it.optimizer.accumulate(3)
    it.optimizer.step()
    assert bool(it.optimizer.step_was_skipped)
    it.window(2, 4)


def scaled(it: Training) -> None:
    scaler = af.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    for number in range(4):
        for weight in (3, 2):
            loss = it.loss(scale=float("inf") if number == 1 and weight == 2 else 1.0)
            scaler.scale(loss).backward()
            it.optimizer.accumulate(weight)
        scaler.step(it.optimizer)
        scaler.update()
    it.found["scale"] = torch.tensor(scaler.get_scale())


def dropped(it: Training) -> None:
    it.window(3, 5, step=False)
    it.optimizer.zero_grad()
    it.window(2, 4)


def late_and_frozen(it: Training) -> None:
    last = it.model[4].weight
    last.requires_grad_(False)
    it.window(3, step=False)
    last.requires_grad_(True)
    extra = nn.Parameter(torch.ones(7, dtype=it.dtype))
    it.window(2, step=False)
    it.optimizer.add_param_group({"params": [extra], "lr": 0.3})
    (it.loss() * extra.float().sum()).backward()  # type: ignore[no-untyped-call]
    it.optimizer.accumulate(4)
    it.optimizer.step()
    it.window(2, 2)


def written_outside(it: Training) -> None:
    it.window(2, 3)
    for param in it.model.parameters():
        param.data.mul_(0.5)
    it.window(2)
    average = {name: value * 0.9 for name, value in it.model.state_dict().items()}
    it.model.load_state_dict(average)
    it.window(4, 1)
    for param in it.model.parameters():
        param.data = param.data.clone() + 0.25
    it.window(3)


def saved_and_loaded(it: Training) -> None:
    it.window(2, 3)
    it.window(5, step=False)
    saved = copy.deepcopy(it.optimizer.state_dict())
    it.found["words"] = torch.tensor(len(saved["state"]))
    it.optimizer.zero_grad()
    it.optimizer.load_state_dict(saved)
    it.window(4)


def copied(it: Training) -> None:
    it.window(2, 3)
    it.window(5, step=False)
    for way in (copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))):
        it.model, it.optimizer = way((it.model, it.optimizer))
        it.window(4, step=False)
    it.optimizer.step()


def metrics(it: Training) -> None:
    for _ in range(3):
        it.window(2, 3)
        it.note("metrics", [it.optimizer.metrics().values])
    it.note("noise", [it.optimizer.noise_scale().noise])


def batches(it: Training) -> None:
    def loss_of(x: Tensor) -> Tensor:
        return it.model(x).float().square().mean()

    for _ in range(2):
        af.accumulate_batch(it.optimizer, torch.randn(5, 6).to(it.dtype), loss_of, weight="samples")
        it.optimizer.step()


PROGRAMS: list[Callable[[Training], None]] = [
    weights_of_every_kind, weights_in_the_loss, released, closed, plain_steps, skips, dropped, late_and_frozen,
    written_outside, saved_and_loaded, copied, batches,
]  # fmt: skip
MEASURED = {"metrics": True, "noise_scale": True}
SOME = {
    "scaled": (scaled, {}), "metrics": (metrics, MEASURED), "metrics of split8": (metrics, {
        **MEASURED, "dtype": BF16, "master_weights": "split8", "rounding_seed": 3}),
}  # fmt: skip


def run(program: Callable[[Training], None], *, offload: bool, **settings: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    it = Training(offload=offload, **settings)
    program(it)
    return it.result()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_an_offloaded_run_has_the_bits_of_one_that_is_not(program: Callable[[Training], None], form: str) -> None:
    settings = {"max_grad_norm": 0.5, **FORMATS[form]}
    assert_all_same_bits(run(program, offload=True, **settings), run(program, offload=False, **settings))


@pytest.mark.parametrize("name", SOME)
def test_scalers_and_measures_too(name: str) -> None:
    program, settings = SOME[name]
    assert_all_same_bits(run(program, offload=True, **settings), run(program, offload=False, **settings))


# ---- the worker's time -----------------------------------------------------------------------------------------------


class Held:
    """Holds the worker at a point of each task until somebody waits for it, or needs its slot.

    Args:
        after: at the end of a task; else at its beginning.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, after: bool) -> None:
        self._gate, self.is_held = threading.Event(), threading.Event()
        run = inside.private(transfer.Worker, "_run")

        def later(worker: transfer.Worker, task: list[Any]) -> None:
            if after:
                run(worker, task)
            self._pass()
            if not after:
                run(worker, task)

        patch.setattr(transfer.Worker, "_run", later)
        for name in ("wait", "drop", "take"):
            patch.setattr(transfer.Worker, name, self._opening(getattr(transfer.Worker, name), name))

    def _pass(self) -> None:
        if not self._gate.is_set():
            self.is_held.set()
            assert self._gate.wait(60), "nobody has waited"
            self.is_held.clear()

    def _opening(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def opens(worker: transfer.Worker, *args: Any, **options: Any) -> Any:
            if name == "take" and not inside.private(worker, "_free").empty():
                return call(worker, *args, **options)
            while not self.is_held.wait(0.01) and not inside.is_idle(worker):
                """The worker comes to its point first."""
            self._gate.set()
            try:
                return call(worker, *args, **options)
            finally:
                self._gate.clear()

        return opens


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_whoever_reads_or_drops_sums_waits_first(
    program: Callable[[Training], None], after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = FORMATS["sums in bf16"] | {"max_grad_norm": 0.5}
    expected = run(program, offload=False, **settings)
    Held(monkeypatch, after=after)
    assert_all_same_bits(run(program, offload=True, **settings), expected)


def test_a_fold_runs_while_backward_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass waits, before its last layer, for the fold of another, and returns before that has ended."""
    began, ends = threading.Event(), threading.Event()
    fold = inside.private(offload.Offload, "_accumulate")

    def watched(*args: Any) -> None:
        began.set()
        assert ends.wait(60)
        fold(*args)

    monkeypatch.setattr(offload.Offload, "_accumulate", watched)
    it = Training(offload=True)
    with af.release_gradients(it.optimizer, 1):
        it.model[1].register_full_backward_hook(lambda *_: None if began.wait(60) else pytest.fail("no fold has begun"))
        loss = it.loss()
        monkeypatch.setattr(transfer, "SLOTS", 99)
        it.optimizer.release_memory()  # so that no part of the backward pass waits for a slot
        it.optimizer.backward(loss, 2.0)
        assert not ends.is_set()
        ends.set()
        it.optimizer.step()
    monkeypatch.undo()
    other = Training(offload=False)
    other.optimizer.backward(other.loss(), 2.0)
    other.optimizer.step()
    assert_all_same_bits(it.result(), other.result())


def test_gradients_are_read_while_a_fold_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table in common would point the running fold at the new gradients."""
    expected = run(lambda it: it.window(3, 5, 2), offload=False)
    monkeypatch.setattr(transfer, "SLOTS", 99)
    it = Training(offload=True)
    held = Held(monkeypatch, after=False)
    for weight in (3, 5, 2):
        it.loss().backward()  # type: ignore[no-untyped-call]
        it.optimizer.accumulate(weight)
        assert held.is_held.wait(60)  # in the first fold, still
    it.optimizer.step()
    assert_all_same_bits(it.result(), expected)


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["_accumulate", "_norm", "_step"])
@pytest.mark.parametrize("at", [0, 1])
def test_after_a_task_has_failed_all_is_refused_until_zero_grad(
    verb: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Training(offload=True, max_grad_norm=0.5)
    it.window(2, 3)
    before = {name: value.clone() for name, value in it.model.state_dict().items()}
    left = [at]
    task = getattr(offload.Offload, verb)

    def failing(*args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("the host is full")
        task(*args)

    with monkeypatch.context() as patch:
        patch.setattr(offload.Offload, verb, failing)
        with pytest.raises(RuntimeError, match="the host is full"):
            (plain_steps if verb == "_norm" else weights_of_every_kind)(it)
        if verb != "_step":
            assert_all_same_bits(it.model.state_dict() if verb == "_accumulate" else before, before)
        for call in (it.optimizer.step, it.optimizer.state_dict, lambda: copy.deepcopy(it.optimizer)):
            with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\)"):
                call()
    it.optimizer.zero_grad()
    it.window(2, 3)
    assert all(param.isfinite().all() for param in it.model.parameters())


def test_a_failed_task_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise MemoryError("the host is full")

    monkeypatch.setattr(offload.Offload, "_accumulate", failing)
    it = Training(offload=True)
    gc.collect()
    tensors = sum(isinstance(each, Tensor) for each in gc.get_objects())
    with pytest.raises(RuntimeError, match="the host is full"):
        it.window(2)
    it.optimizer.zero_grad()
    it.optimizer.release_memory()
    gc.collect()
    assert sum(isinstance(each, Tensor) for each in gc.get_objects()) <= tensors + 3  # counts, and nothing else


@pytest.mark.filterwarnings("ignore:two accumulation windows in a row were dropped")
@pytest.mark.parametrize("call", ["accumulate", "step", "zero_grad"])
def test_ctrl_c_leaves_the_window_right_or_broken(call: str) -> None:
    """At points all over the call; afterwards the call is repeated, or the window given up, and nothing hangs."""

    def until(it: Training) -> Callable[[], Any]:
        it.window(2, 3)
        it.window(4, step=False)
        if call == "accumulate":
            it.loss().backward()  # type: ignore[no-untyped-call]
            return lambda: it.optimizer.accumulate(5)
        return getattr(it.optimizer, call)  # type: ignore[no-any-return]

    counted = Interrupted(None)
    interrupted = until(Training(offload=True))
    with counted:
        interrupted()
    ends = []
    for made in (False, True):
        it = Training(offload=True)
        function = until(it)
        if made:
            function()
        it.optimizer.zero_grad()
        it.window(2, 3)
        ends.append(it.result())
    found = set()
    for at in range(0, counted.seen, max(1, counted.seen // 60)):
        it = Training(offload=True)
        function = until(it)
        with Interrupted(at):
            function()
        it.optimizer.zero_grad()
        it.drawn = 3 + (call == "accumulate")
        it.window(2, 3)
        result = it.result()
        alike = [all(torch.equal(result[name], end[name]) for name in end if name in result) for end in ends]
        if call != "step":
            assert any(alike), at
        found.add(tuple(alike))
    assert found


SCRIPT = """
import os, resource, sys, threading, torch
import accumfused as af

def made(size):
    param = torch.nn.Parameter(torch.zeros(size))
    return param, af.SGD([param], lr=1.0, offload=True)

param, optimizer = made(4)
param.grad = torch.ones(4)
optimizer.accumulate()
child = os.fork()
if not child:
    for call in (optimizer.step, optimizer.state_dict, optimizer.accumulate):
        try:
            param.grad = torch.ones(4) if call == optimizer.accumulate else None
            call()
            os._exit(1)
        except RuntimeError as error:
            if "forked" not in str(error):
                os._exit(2)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
optimizer.step()
assert param.tolist() == [-1.0] * 4, param

large, other = made(2**24)
large.grad = torch.ones(2**24)
used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, -1))  # there is room for a slot or the sum, and not for both
try:
    other.accumulate()
    other.step()
    sys.exit("it had room")
except (RuntimeError, MemoryError) as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
other.zero_grad()
large.grad = torch.ones(2**24)
other.accumulate()
other.step()
assert large.eq(-1).all()

assert all(thread.name.startswith("accumfused-offload") for thread in threading.enumerate()[1:])
large.grad = torch.ones(2**24)
other.accumulate()  # and the interpreter ends, while the fold runs
print("ended")
"""


def test_a_forked_child_a_full_host_and_the_end_of_the_interpreter() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(af.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("ended\n")


def test_the_worker_ends_with_its_optimizer() -> None:
    it = Training(offload=True)
    it.window(2, 3)
    before = [thread for thread in threading.enumerate() if thread.name.startswith("accumfused-offload")]
    assert before
    del it
    gc.collect()
    for thread in before:
        thread.join(60)
        assert not thread.is_alive()


# ---- what is refused -------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "backend": (lambda: Training(offload=True, backend="torch"), "by backend='cpu', got 'torch'"),
    "drop": (lambda: Training(offload=True, nonfinite="drop"), "nonfinite='drop' waits for the norm"),
    "fp64": (lambda: Training(offload=True, dtype=torch.float64), "parameters, and one is torch.float64"),
    "Muon": (lambda: af.Muon([nn.Parameter(torch.ones(3, 3))], lr=0.1, offload=True), "Muon multiplies matrices"),
    "a foreign step": (
        lambda: af.fuse(torch.optim.NAdam([nn.Parameter(torch.ones(3))], lr=0.1), offload=True), "keeps its own step",
    ),
    "a group in fp64": (
        lambda: Training(offload=True).optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).double())]}),
        "torch.float64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_offloaded_is_refused_by_name(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        call()


def test_linears_are_refused() -> None:
    it = Training(offload=True)
    with refused(it.optimizer, ValueError, "call release_gradients"):
        af.fuse_linears(it.model, it.optimizer)


# ---- with others -----------------------------------------------------------------------------------------------------


def clipped_together(*, offload: bool) -> dict[str, Tensor]:
    one, other = Training(offload=offload), Training(offload=False, dtype=BF16, cls=af.Lion)
    group = af.ClipGroup([one.optimizer, other.optimizer], max_grad_norm=0.1)
    for _ in range(3):
        for weight in (3, 5):
            for it in (one, other):
                it.loss().backward()  # type: ignore[no-untyped-call]
                it.optimizer.accumulate(weight)
        group.step()
        one.note("norm", [group.grad_norm])
    return one.result() | {f"other {name}": value for name, value in other.result().items()}


def test_a_clip_group_has_one_of_both() -> None:
    assert_all_same_bits(clipped_together(offload=True), clipped_together(offload=False))


def schedule_free(it: Training) -> None:
    it.window(2, 3)
    it.optimizer.eval()
    it.note("averaged", it.model.parameters())
    it.optimizer.train()
    it.window(4, 1)


@pytest.mark.parametrize("form", ["fp32", "split16"])
def test_schedule_free_switches(form: str) -> None:
    settings = FORMATS[form] | {"cls": af.AdamWScheduleFree}
    assert_all_same_bits(run(schedule_free, offload=True, **settings), run(schedule_free, offload=False, **settings))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("first", [True, False], ids=["offloaded first", "offloaded then"])
def test_a_checkpoint_goes_on_either_way(first: bool, form: str) -> None:
    """From an offloaded run to one that is not and back, in an open window."""
    ends = []
    for both in ((first, not first), (False, False)):
        it = Training(offload=both[0], **FORMATS[form])
        it.window(2, 3)
        it.window(5, step=False)
        file = io.BytesIO()
        torch.save((it.model.state_dict(), it.optimizer.state_dict()), file)
        file.seek(0)
        then = Training(offload=both[1], **FORMATS[form])
        model, optimizer = torch.load(file)
        then.model.load_state_dict(model)
        then.optimizer.load_state_dict(optimizer)
        then.drawn = it.drawn
        then.window(4)
        ends.append(then.result())
    assert_all_same_bits(*ends)


def test_a_plan_lasts_as_long_as_its_tensors() -> None:
    it = Training(offload=True)
    it.window(2, 3)
    plan = inside.plan_of(it.optimizer)
    it.window(2, 3)
    assert inside.plan_of(it.optimizer) is plan
    it.model[0].weight.data = it.model[0].weight.data.clone()
    assert inside.plan_of(it.optimizer) is not plan


def mixed(it: Training) -> None:
    """A run whose first gradient is copied, and measured, since another run's is rounded."""
    for _ in range(2):
        for number, param in enumerate(it.model.parameters()):
            param.grad_dtype = None
            param.grad = torch.full_like(param, 0.3 + number, dtype=torch.float32)
        it.model[0].weight.grad = it.model[0].weight.grad.half()
        it.optimizer.accumulate()
        it.optimizer.step()
        it.note("norm", [it.optimizer.grad_norm])


def test_runs_are_measured_as_the_whole_is() -> None:
    def both(offload: bool) -> dict[str, Tensor]:
        it = Training(offload=offload, dtype=BF16, sum_dtype=BF16, rounding_seed=5, max_grad_norm=0.1)
        it.model[0].half()
        it.optimizer = af.AdamW(it.model.parameters(), lr=0.05, sum_dtype=BF16, rounding_seed=5, offload=offload)
        mixed(it)
        return it.result()

    assert_all_same_bits(both(True), both(False))


def test_the_report_tells_what_lies_where() -> None:
    it = Training(offload=True, dtype=BF16, sum_dtype=BF16)
    it.window(2, 3)
    it.window(4, step=False)
    report = af.memory_report(it.optimizer)
    total, count = report.total, sum(param.numel() for param in it.model.parameters())
    assert total.on_host == total.total - 2 * count
    assert total.parts["accumulators"] == 2 * count
    assert 0 < report.slots <= transfer.SLOTS * 4096
    assert "lie on the host" in str(report)
    assert report.as_dict()["slots"] == report.slots
    it.optimizer.step()
    it.optimizer.release_memory()
    assert af.memory_report(it.optimizer).slots == 0


# ---- streams ---------------------------------------------------------------------------------------------------------


class Card:
    """Streams as a card has them: a copy is made when somebody waits for it, from memory that may be another's by then.

    Memory that was freed without a record for the stream holds NaN.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.copies, self.lock = 0, threading.Lock()
        self._current: list[Stream] = []
        self._main, self._recorded, self._slots = Stream(self), set[int](), set[int]()
        self._copy = Tensor.copy_
        patch.setattr(transfer, "has_streams", lambda device: True)
        patch.setattr(torch.cuda, "Stream", lambda device: Stream(self))
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda device: self._main)
        patch.setattr(torch.cuda, "stream", self._on)
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: self._recorded.add(tensor.data_ptr()))
        patch.setattr(transfer.Slot, "places_for", self._noting(transfer.Slot.places_for))
        patch.setattr(Tensor, "copy_", lambda target, source, **options: self._later(target, source, **options))

    def _noting(self, places_for: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        def noted(slot: transfer.Slot, tensors: Any) -> list[Tensor]:
            places = places_for(slot, tensors)
            self._slots |= {place.untyped_storage().data_ptr() for place in places}
            return places

        return noted

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()

    def _later(self, target: Tensor, source: Tensor, **options: Any) -> Tensor:
        if not self._current:
            return self._copy(target, source, **options)
        self.copies += 1
        self._current[-1].waiting.append((target, source, self._current[-1].has_waited))
        return target

    def make(self, target: Tensor, source: Tensor, *, has_waited: bool) -> None:
        is_slot = source.untyped_storage().data_ptr() in self._slots
        if not is_slot and not (has_waited and source.data_ptr() in self._recorded):
            target.fill_(torch.nan)
        else:
            self._copy(target, source)


class Stream:
    def __init__(self, card: Card) -> None:
        self.waiting: list[tuple[Tensor, Tensor, bool]] = []
        self.has_waited = False  # since its last event, for the loop, which writes what goes down
        self._card = card

    def wait_stream(self, other: Stream) -> None:
        self.has_waited = True
        other.synchronize()

    def synchronize(self) -> None:
        with self._card.lock:  # the loop and the worker wait for one stream
            waiting, self.waiting = self.waiting, []
            for target, source, has_waited in waiting:
                self._card.make(target, source, has_waited=has_waited)

    def wait_event(self, event: Event) -> None:
        event.synchronize()


class Event:
    def __init__(self, *, blocking: bool) -> None:
        assert blocking, "a wait would take a core from the folds"

    def record(self, stream: Stream) -> None:
        stream.has_waited, self.synchronize = False, stream.synchronize


@pytest.mark.parametrize("program", [weights_of_every_kind, released, closed, plain_steps, skips, late_and_frozen])
def test_copies_on_streams_wait_and_keep_their_memory(
    program: Callable[[Training], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = FORMATS["split16"] | {"max_grad_norm": 0.5}
    expected = run(program, offload=False, **settings)
    monkeypatch.setattr(offload, "RUN_BYTES", 32)  # more runs than slots
    card = Card(monkeypatch)
    assert_all_same_bits(run(program, offload=True, **settings), expected)
    assert card.copies > 0


@pytest.mark.parametrize("kind", ["kept", "a bucket's"])
def test_the_loop_may_write_gradients_again_that_it_keeps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory stays in use, the loop's stream waits for its copy: a graph's replay writes there."""
    Card(monkeypatch)
    Held(monkeypatch, after=False)
    param = nn.Parameter(torch.zeros(100))
    optimizer = af.SGD([param], lr=1.0, offload=True)
    bucket = torch.ones(200)
    kept = bucket[:100] if kind == "a bucket's" else torch.ones(100)
    for _ in range(2):
        kept.fill_(1.0)
        param.grad = kept if kind == "kept" else bucket[:100]
        optimizer.accumulate()
        kept.fill_(5.0)
    optimizer.step()
    assert param.eq(-2.0).all()


def test_a_slot_that_grows_gives_its_memory_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, memory = list[int](), []
    empty = torch.empty

    def watched(*args: Any, **options: Any) -> Tensor:
        sizes.append(sum(each() is not None for each in memory))
        made = empty(*args, **options)
        memory.append(weakref.ref(made))
        return made

    slot = transfer.Slot()
    monkeypatch.setattr(torch, "empty", watched)
    for size in (10, 1000):
        slot.places_for([torch.zeros(size)])
    assert sizes == [0, 0]
    assert slot.nbytes == 4032
