"""fuse(): the same object, now fused, and everything that held it before goes on. Loops: test_loops.py."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_close, assert_same, differences, params_of, refused, snapshot
from table import OPTIMIZERS, Own, OwnAdagrad
from torch.nn import Parameter
from torch.optim import lr_scheduler

import accumfused as af


def counted(step: Callable[..., Any]) -> Callable[..., Any]:
    """A user's decorator around a step is a part of it."""

    @functools.wraps(step)
    def wrapper(self: Any) -> Any:
        self.calls = [*getattr(self, "calls", []), id(self)]
        return step(self)

    return wrapper


class Doubling(torch.optim.AdamW):
    """A user's subclass, without a closure, which does something of its own around torch's step."""

    @counted
    def step(self) -> Any:  # type: ignore[override]
        with torch.no_grad():
            for param in params_of(self):
                param.mul_(1.5 if param.grad is not None else 1.0)
        return super().step()


RULED = {name: row.torch_class for name, row in OPTIMIZERS.items() if row.torch_class is not None}
FOREIGN_CLASSES = (
    torch.optim.Adafactor, torch.optim.NAdam, torch.optim.ASGD, torch.optim.Rprop, Own, OwnAdagrad, Doubling
)  # fmt: skip
FOREIGN = {each.__name__: each for each in FOREIGN_CLASSES}
every_optimizer = pytest.mark.parametrize("name", [*RULED, *FOREIGN])
COPIES = [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))]


def parameters() -> list[Parameter]:
    return [Parameter(torch.randn(shape)) for shape in ((5, 3), (7,), (2,))]


def make(name: str, **options: Any) -> Any:
    decay = {} if name == "Rprop" else {"weight_decay": 0.1}
    return {**RULED, **FOREIGN}[name](parameters(), lr=0.1, **decay, **options)


def set_grads(*optimizers: torch.optim.Optimizer, factor: float = 1.0) -> None:
    """The same random gradients for all; none for a parameter of two elements."""
    for params in zip(*map(params_of, optimizers), strict=True):
        grad = torch.randn_like(params[0]) * factor
        for param in params:
            param.grad = None if len(grad) == 2 else grad.clone()


def sequence(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, lr_scheduler.CosineAnnealingLR(optimizer, 6)], [2])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=10, cycle_momentum=False),
    "SequentialLR": sequence,
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
}


@pytest.mark.pairwise(
    name=[*RULED, *FOREIGN], scheduler=[*SCHEDULERS], bound=["before", "before a step", "after"],
    loads=["never", "before", "after"],
)  # fmt: skip
def test_an_optimizer_and_its_scheduler_go_on(backend: str, name: str, scheduler: str, bound: str, loads: str) -> None:
    """Against the same optimizer of torch's, with clip_grad_norm_ before its step."""
    torch.manual_seed(0)
    ours = make(name)
    torch.manual_seed(0)
    theirs = make(name)  # no copy: on a machine with a GPU a copy of torch's Adafactor cannot step
    schedules = [SCHEDULERS[scheduler](optimizer) for optimizer in (theirs, ours)[: 1 + (bound != "after")]]

    def step(*, fused: bool, factor: float = 3.0) -> None:
        set_grads(ours, theirs, factor=factor)
        unclipped = [(param, param.grad.clone()) for param in params_of(ours) if param.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(params_of(theirs), 1.0 if fused else math.inf)
        theirs.step()
        ours.step()
        for schedule in schedules:  # warnings are errors: none about the order of calls
            schedule.step(*([1.0] if scheduler == "ReduceLROnPlateau" else []))
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
        if fused:
            assert_close(ours.grad_norm, norm, "norm")
        assert all(torch.equal(param.grad, grad) for param, grad in unclipped)  # torch's step has scaled copies

    if bound == "before a step":
        step(fused=False)
    checkpoint = copy.deepcopy(theirs.state_dict())
    if loads == "before":
        ours.load_state_dict(checkpoint)
    kind, state, groups = type(ours), ours.state, ours.param_groups
    assert af.fuse(ours, max_grad_norm=1.0, backend=backend) is ours
    assert isinstance(ours, kind)
    assert type(ours) is OPTIMIZERS[name].ours if name in RULED else type(ours).__name__ == f"Fused{name}"
    assert (ours.state is state, ours.param_groups is groups) == (True, True)
    if loads == "after":
        ours.load_state_dict(checkpoint)
    if bound == "after":
        schedules.append(SCHEDULERS[scheduler](ours))
    for factor in (3.0, 1e-3, 3.0):  # in the middle nothing is clipped
        step(fused=True, factor=factor)
    for param, truth in zip(params_of(ours), params_of(theirs), strict=True):
        assert_close(param, truth, "torch.optim")
    theirs.load_state_dict(ours.state_dict())  # and back


NAMES = ("RMSprop", "NAdam", "Adagrad", "RAdam", "Adamax", "Muon", "AdamW")
OWN = {name: type("Own", (getattr(torch.optim, name),), {}) for name in NAMES}


@pytest.mark.pairwise(name=[*OWN], dtype=[torch.bfloat16, torch.float16], window=["p.grad", "open", "closed"])
def test_a_step_of_its_own_sees_gradients_in_its_parameters_dtype(
    backend: str, name: str, dtype: torch.dtype, window: str
) -> None:
    params = [Parameter(torch.ones(40, 33, dtype=dtype)) for _ in range(2)]
    ours, theirs = (OWN[name]([param], lr=0.01) for param in params)
    af.fuse(ours, backend=backend)
    for _ in range(2):
        grad = torch.randn(40, 33).to(dtype)
        for last in [True] if window == "p.grad" else [False, True]:  # twice the same, whose mean is exact in 16 bits
            params[0].grad = grad.clone()
            if window != "p.grad":
                ours.accumulate(1.0, last=last and window == "closed")
        params[1].grad = grad
        ours.step()
        theirs.step()
        ours.zero_grad()
    assert_same(ours, theirs)


def test_a_window_whose_own_step_has_failed_stays_closed(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients, cast to the parameter's dtype, are no new ones."""
    param = Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer: Any = af.fuse(OWN["NAdam"]([param], lr=0.01), backend=backend)
    param.grad = torch.ones_like(param)
    optimizer.accumulate(last=True)
    with monkeypatch.context() as failing:
        failing.setattr(OWN["NAdam"], "step", None)
        with pytest.raises(TypeError, match="not callable"):
            optimizer.step()
    with refused(optimizer, RuntimeError, "after a window was closed"):
        optimizer.accumulate()
    optimizer.step()


def test_a_scheduler_that_is_called_before_the_first_step_still_warns(backend: str) -> None:
    optimizer = make("AdamW")
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    af.fuse(optimizer, backend=backend)
    with pytest.warns(UserWarning, match=r"`lr_scheduler\.step\(\)` before `optimizer\.step\(\)`"):
        schedule.step()


@every_optimizer
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("copied", COPIES)
def test_hooks_run_once_a_step_and_copies_go_on_alike_and_apart(
    backend: str, name: str, late: bool, copied: Any
) -> None:
    make(name), make("AdamW")  # another one of the class has patched the class's step
    optimizer, calls = make(name), list[str]()
    fuse = functools.partial(af.fuse, max_grad_norm=0.5, backend=backend)
    optimizer = optimizer if late else fuse(optimizer)
    handles = [optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))]
    handles.append(optimizer.register_step_post_hook(lambda *_: calls.append("post")))
    optimizer = fuse(optimizer) if late else optimizer
    set_grads(optimizer)
    optimizer.step()
    # torch's AdamW.step, called by the subclass's own, has hooks of its own: stock fires twice there.
    assert calls == (["pre", "pre", "post", "post"] if name == "Doubling" else ["pre", "post"])
    assert getattr(optimizer, "calls", [id(optimizer)]) == [id(optimizer)]  # once, and with the optimizer itself
    for handle in handles:
        handle.remove()  # no copy has a function of a test
    twin = copied(optimizer)
    assert type(twin) is type(optimizer)
    set_grads(optimizer, factor=9.0)
    for param, source in zip(params_of(twin), params_of(optimizer), strict=True):
        param.grad = copy.deepcopy(source.grad)
    kept = snapshot(twin)
    optimizer.step()
    assert differences(kept, snapshot(twin)) == []
    twin.step()
    assert differences(snapshot(optimizer), snapshot(twin)) == []
    assert torch.equal(twin.grad_norm, optimizer.grad_norm)


def test_hooks_of_a_class_that_was_never_made_before_run(backend: str) -> None:
    calls: list[str] = []
    own: Any = af.fuse(type("Own", (torch.optim.SGD,), {})(parameters(), lr=0.1), backend=backend)
    own.register_step_post_hook(lambda *_: calls.append("post"))
    own.step()
    assert calls == ["post"]


def wrapped() -> torch.optim.Optimizer:
    optimizer = make("AdamW")
    optimizer.step = print
    return optimizer


def wrapper() -> torch.optim.Optimizer:
    """What Accelerate's prepare() returns, and others: an optimizer by its class, whose parent never made it."""
    outer: Any = torch.optim.Optimizer.__new__(torch.optim.Optimizer)
    outer.optimizer = make("AdamW")
    outer.param_groups = outer.optimizer.param_groups
    return outer  # type: ignore[no-any-return]


SPARSE = "SparseAdam takes sparse gradients only, which cannot be fused; keep it as it is .* next to a fused optimizer"
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: torch.optim.LBFGS(parameters()), TypeError, "LBFGS evaluates a closure within its step, which cannot be"),
    (lambda: torch.optim.SparseAdam(parameters()), TypeError, SPARSE),
    (lambda: af.fuse(make("AdamW")), TypeError, r"fused already \(AdamW\)"),
    (lambda: af.Lion(parameters()), TypeError, r"fused already \(Lion\)"),
    (lambda: torch.nn.Linear(2, 2), TypeError, r"takes a torch\.optim\.Optimizer, got Linear"),
    (wrapper, TypeError, "Optimizer wraps another optimizer; fuse that one, before it is wrapped"),
    (wrapped, RuntimeError, r"call fuse\(\) before whatever wraps it"),
]


@pytest.mark.parametrize(("given", "error", "text"), REFUSED)
def test_what_cannot_be_fused_is_refused_and_stays_what_it_is(
    given: Callable[[], Any], error: type[Exception], text: str
) -> None:
    optimizer = given()
    kind, own = type(optimizer), {*vars(optimizer)}
    with pytest.raises(error, match=text):
        af.fuse(optimizer)
    assert (type(optimizer), {*vars(optimizer)}) == (kind, own)
