"""Released gradients: what is refused, what may follow what, copies, and other processes. Numbers: test_loops.py."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from snapshot import refused, writes_nothing
from torch import Tensor, distributed, nn
from torch.distributed import fsdp

import accumfused as af
from accumfused.distributed import exchange as processes

EACH, ALL = 1, 2**30
every_bucket = pytest.mark.parametrize("bucket", [EACH, ALL], ids=["each", "all"])


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise MemoryError("there is no more")


class Released:
    """Two parameters of 8, of which a micro-batch and a step make 7.5 and 7."""

    def __init__(self, backend: str, bucket: int = EACH) -> None:
        self.params = [nn.Parameter(torch.full((4,), 8.0)) for _ in range(2)]
        self.optimizer = af.SGD(self.params, lr=0.5, backend=backend)
        self.release = af.release_gradients(self.optimizer, bucket)

    def loss(self, slope: float = 1.0) -> Tensor:
        return sum(((index + 1) * slope * param).sum() for index, param in enumerate(self.params))

    def run(self, verbs: str) -> Released:
        """Calls of a loop, in words."""
        for verb in verbs.split():
            {
                "backward": lambda: self.loss().backward(),
                "weighted": lambda: self.optimizer.backward(self.loss(), 3),
                "empty": lambda: self.optimizer.backward(self.loss(torch.nan), 0),
                "accumulate": self.optimizer.accumulate, "close": lambda: self.optimizer.accumulate(last=True),
                "fail": self.fail, "zero": self.optimizer.zero_grad, "step": self.optimizer.step,
                "remove": self.release.remove,
            }[verb]()  # fmt: skip
        return self

    def fail(self) -> None:
        with pytest.raises(MemoryError):
            (Fails.apply(self.params[0]) * self.params[1]).sum().backward()  # the second parameter's comes first

    def values(self) -> list[float]:
        return [param[0].item() for param in self.params]


def stock_step(it: Released) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(it.loss())
    scaler.step(it.optimizer)


def with_block(it: Released) -> None:
    with it.release:
        pass


def added(it: Released) -> None:
    other = af.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    af.release_gradients(other)
    try:
        other.add_param_group({"params": it.params[:1]})
    finally:
        assert len(other.param_groups) == 1


OPEN = r"a window is open.*call optimizer\.step\(\) or zero_grad\(\) before"
LATE = r"optimizer\.backward\(loss, weight\) in place of"
STILL = "p.grad is still the previous window's accumulator"
EARLY = r"ended early, by an exception.*call optimizer\.zero_grad\(\)"
SOME, ZERO = "give one to every micro-batch, or to none", "all zero"  # the ValueErrors
PART = r"a micro-batch is in progress.*call accumulate\(\)"
REFUSED: list[tuple[str, str, Callable[[Released], Any], str]] = [
    ("a second release", "", lambda it: af.release_gradients(it.optimizer), r"already; call remove\(\)"),
    ("a parameter of two", "", lambda it: af.release_gradients(af.SGD(it.params[1:])), "released by another optimizer"),
    ("a parameter of two in a new group", "", added, "released by another optimizer"),
    ("release", "remove backward accumulate", lambda it: af.release_gradients(it.optimizer), OPEN),
    ("remove in a micro-batch", "backward", lambda it: it.release.remove(), OPEN),
    ("remove in a window", "backward accumulate", lambda it: it.release.remove(), OPEN),
    ("the end of a block", "backward accumulate", with_block, OPEN),
    ("a late weight", "backward", lambda it: it.optimizer.accumulate(3), LATE),
    ("a late 0", "backward", lambda it: it.optimizer.accumulate(0), LATE),
    ("a late tensor", "backward", lambda it: it.optimizer.accumulate(torch.ones(()), last=True), LATE),
    ("weights first", "weighted", lambda it: it.loss().backward(), SOME),
    ("weights second", "backward accumulate", lambda it: it.optimizer.backward(it.loss(), 3), SOME),
    ("zeros", "empty", lambda it: it.optimizer.backward(it.loss(), 0, last=True), ZERO),
    ("nothing new", "backward accumulate", lambda it: it.optimizer.accumulate(), "no new gradient"),
    ("two", "backward", lambda it: it.optimizer.backward(it.loss()), r"not accumulated; call accumulate\(\) or zero_"),
    ("a step", "backward accumulate backward", lambda it: it.optimizer.step(), r"call accumulate\(\) after the last"),
    ("closed", "backward close backward", lambda it: it.optimizer.accumulate(), STILL),
    ("closed, backward()", "backward close", lambda it: it.optimizer.backward(it.loss()), STILL),
    ("a part in state_dict()", "backward", lambda it: it.optimizer.state_dict(), PART),
    ("a part in a copy", "backward", lambda it: copy.deepcopy(it.optimizer), PART),
    ("a stock scaler", "backward", stock_step, r"accumulate\(\.\.\., last=True\)"),
    ("failed, accumulate()", "fail backward", lambda it: it.optimizer.accumulate(), EARLY),
    ("failed, backward()", "backward accumulate fail", lambda it: it.optimizer.backward(it.loss()), EARLY),
    ("failed, step()", "backward accumulate fail backward", lambda it: it.optimizer.step(), EARLY),
]


@every_bucket
@pytest.mark.parametrize(("before", "call", "text"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_cannot_be_is_refused_and_zero_grad_goes_on(
    backend: str, bucket: int, before: str, call: Callable[[Released], Any], text: str
) -> None:
    it = Released(backend, bucket).run(before)
    with refused(it.optimizer, ValueError if text in (SOME, ZERO) else RuntimeError, text):
        call(it)
    it.optimizer.zero_grad(set_to_none=False)
    assert [param.grad for param in it.params] == [None, None]
    assert it.run("backward step").values() == [7.5, 7.0]


@pytest.mark.parametrize(("bucket", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError)])
def test_wrong_arguments_are_refused(bucket: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="bucket_bytes must be"):
        af.release_gradients(af.SGD([nn.Parameter(torch.zeros(1))]), bucket)
    with pytest.raises(TypeError, match=r"got SGD; convert it with accumfused\.fuse"):
        af.release_gradients(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))  # type: ignore[arg-type]


@every_bucket
def test_after_a_refusal_the_window_goes_on_here_and_elsewhere(backend: str, bucket: int) -> None:
    it, other = Released(backend, bucket), Released(backend, bucket)
    it.optimizer.accumulate(0)  # an empty micro-batch needs no backward()
    with refused(it.run("weighted").optimizer, ValueError, SOME):
        it.loss(100.0).backward()
    other.optimizer.load_state_dict(copy.deepcopy(it.optimizer.state_dict()))
    for each in (it, other):
        each.optimizer.backward(each.loss(5.0), 1)
        assert each.run("step").values() == [8 - 0.5 * 2, 8 - 0.5 * 4]
    with refused(it.run("backward").optimizer, RuntimeError, LATE):
        it.optimizer.accumulate(2)
    assert it.run("accumulate step").values() == [6.5, 5.0]  # a plain sum


@every_bucket
def test_what_was_folded_may_be_dropped_by_zero_grad_but_not_whole_windows_in_a_row(backend: str, bucket: int) -> None:
    it = Released(backend, bucket).run("backward zero backward zero backward close")
    for param in it.params:
        param.grad = None  # model.zero_grad() ends a closed window too
    it.run("backward accumulate zero backward accumulate")
    with pytest.warns(UserWarning, match="two accumulation windows in a row"):
        it.optimizer.zero_grad()
    it.params[0].grad = torch.ones(4)  # by hand: as ever
    assert it.run("step").values() == [7.5, 8.0]
    it.optimizer.accumulate(2)  # nothing was folded, so the weight comes in time
    assert it.run("step").values() == [7.0, 8.0]


@pytest.mark.parametrize("entered", [False, True])
def test_an_exception_in_the_block_ends_the_release_in_any_case(backend: str, entered: bool) -> None:
    it = Released(backend).run("backward accumulate")
    with contextlib.suppress(KeyboardInterrupt), it.release:
        it.run("backward" if entered else "")
        raise KeyboardInterrupt
    assert it.run("backward accumulate step").values() == ([7.5, 7.0] if entered else [7.0, 6.0])
    it.run("backward remove")  # a second time does nothing
    assert [param.grad[0].item() for param in it.params] == [1.0, 2.0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copies_do_not_release(backend: str, copied: Any) -> None:
    it, other = Released(backend).run("backward accumulate"), Released(backend)
    other.optimizer = copied(it.optimizer)
    other.params = other.optimizer.param_groups[0]["params"]
    other.run("backward")
    assert [param.grad[0].item() for param in other.params] == [1.0, 2.0]
    with writes_nothing(it.optimizer):
        assert other.run("accumulate step").values() == [7.0, 6.0]
    af.release_gradients(other.optimizer)


@every_bucket
def test_an_optimizer_that_is_gone_takes_its_hooks_along(backend: str, bucket: int) -> None:
    it = Released(backend, bucket).run("backward step backward")
    gone = weakref.ref(it.optimizer), weakref.ref(it.release), weakref.ref(it.params[1])
    del it.optimizer, it.release
    gc.collect()
    assert [each() is None for each in gone] == [True, True, False]
    it.loss().backward()
    assert it.params[0].grad is not None
    af.release_gradients(af.SGD(it.params, lr=0.5, backend=backend))
    del it
    gc.collect()
    assert gone[2]() is None


# ---- several processes ----------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_processes_that_come_after_the_release_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Released("torch")
    monkeypatch.setattr(processes, "has_processes", lambda: True)
    with refused(it.optimizer, RuntimeError, "more than one process.*give the optimizer process_group="):
        it.loss().backward()
    monkeypatch.undo()
    assert it.run("backward step").values() == [7.5, 7.0]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ["DTensor", "FullyShardedDataParallel"])
def test_fsdp_is_refused(group: None, kind: str) -> None:
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    wrap: Any = {
        "DTensor": lambda model: fsdp.fully_shard(model, mesh=mesh),
        "FullyShardedDataParallel": lambda model: fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    }[kind]
    model = wrap(nn.Linear(3, 1))
    optimizer = af.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # it was not released the first time
        with pytest.raises(RuntimeError, match=kind):
            af.release_gradients(optimizer)
