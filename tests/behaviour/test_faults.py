"""A call that runs out of memory at a torch operation, or is interrupted, leaves nothing half made.

Made again, it gives the bits of a run that nothing disturbed; and what is saved in between is whole, or refused with
the remedy.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from compare import assert_all_same_bits
from interrupts import Interrupted
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import accumfused as af

SIZES = ((64, 70), (7,), (5000,))  # 8 bits are for 4096 elements and more
Optimizer = Any


class Fault(TorchDispatchMode):
    """Within the block the n-th operation of torch raises MemoryError, before it has done anything. None: counts."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.at, self.seen, self.came = at, 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        if self.at is not None and self.seen > self.at and not self.came:
            self.came = True
            raise MemoryError(f"no memory for {func}")
        return func(*args, **(kwargs or {}))

    def __exit__(self, *exception: Any) -> bool:
        super().__exit__(*exception)
        return exception[0] is MemoryError


@dataclass
class Run:
    """Parameters and an optimizer in some format, with a checkpoint that may be of another one."""

    make: Callable[[list[torch.nn.Parameter]], Optimizer]
    dtype: torch.dtype = torch.float32
    steps: int = 0
    loads: Callable[[list[torch.nn.Parameter]], Optimizer] | None = None  # what makes the optimizer that resumes
    params: list[torch.nn.Parameter] = field(init=False)
    optimizer: Optimizer = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(size).to(self.dtype)) for size in SIZES]
        self.optimizer = self.make(self.params)
        for number in range(self.steps):
            self.backward(number)
            self.optimizer.step()
        if self.loads is not None:
            self.resume(self.optimizer.state_dict(), self.loads)
        self.backward(self.steps)

    def resume(self, saved: Any, make: Callable[[list[torch.nn.Parameter]], Optimizer]) -> None:
        torch.manual_seed(1)
        self.params = [torch.nn.Parameter(param.detach().clone()) for param in self.params]
        self.optimizer = make(self.params)
        self.optimizer.load_state_dict(copy.deepcopy(saved))

    def backward(self, number: int) -> None:
        draws = torch.Generator().manual_seed(number)
        for param in self.params:
            param.grad = torch.randn(param.shape, generator=draws).to(param.dtype)

    def values(self) -> dict[str, Tensor]:
        values = {f"param {index}": param.detach().clone() for index, param in enumerate(self.params)}
        for key, entries in self.optimizer.state_dict()["state"].items():
            values |= {f"{name} {key}": value for name, value in entries.items() if isinstance(value, Tensor)}
        return values


# ---- the calls ------------------------------------------------------------------------------------------------------


def adamw(**settings: Any) -> Callable[[list[torch.nn.Parameter]], Optimizer]:
    return lambda params: af.AdamW(params, lr=0.1, max_grad_norm=1.0, **settings)


def sgd(**settings: Any) -> Callable[[list[torch.nn.Parameter]], Optimizer]:
    return lambda params: af.SGD(params, lr=0.1, momentum=0.9, max_grad_norm=1.0, **settings)


def schedule_free(**settings: Any) -> Callable[[list[torch.nn.Parameter]], Optimizer]:
    return lambda params: af.AdamWScheduleFree(params, lr=0.1, **settings)


def with_history(params: list[torch.nn.Parameter]) -> Optimizer:
    return af.AdamW(params, lr=0.1, clip=af.ZScore(warmup=2))


BF16 = torch.bfloat16
SPLIT16, SPLIT8, NO_MASTER = ({"master_weights": which} for which in ("split16", "split8", None))
IN_8_BITS, IN_BF16 = {"state_dtype": "8bit"}, {"state_dtype": BF16}

CONVERSIONS: dict[str, Callable[[], Run]] = {
    "fp32 to 8 bits": lambda: Run(adamw(), steps=3, loads=adamw(**IN_8_BITS)),
    "8 bits to fp32": lambda: Run(adamw(**IN_8_BITS), steps=3, loads=adamw()),
    "fp32 to bf16": lambda: Run(adamw(), steps=3, loads=adamw(**IN_BF16)),
    "bf16 to 8 bits": lambda: Run(adamw(**IN_BF16), steps=3, loads=adamw(**IN_8_BITS)),
    "SGD to 8 bits": lambda: Run(sgd(), steps=3, loads=sgd(**IN_8_BITS)),
    "SGD to bf16": lambda: Run(sgd(), steps=3, loads=sgd(**IN_BF16)),
    "split16 to split8": lambda: Run(adamw(**SPLIT16), BF16, 3, adamw(**SPLIT8)),
    "split8 to split16": lambda: Run(adamw(**SPLIT8), BF16, 3, adamw(**SPLIT16)),
    "split16 to stochastic": lambda: Run(adamw(**SPLIT16), BF16, 3, adamw(**NO_MASTER)),
    "stochastic to split8, 8 bits": lambda: Run(adamw(**NO_MASTER), BF16, 3, adamw(**SPLIT8, **IN_8_BITS)),
    "fp16, fp32 states to 8 bits": lambda: Run(adamw(), torch.float16, 3, adamw(**IN_8_BITS)),
}
FIRST_STEPS: dict[str, Callable[[], Run]] = {
    "fp32": lambda: Run(adamw()),
    "8 bits": lambda: Run(adamw(**IN_8_BITS)),
    "split8, 8 bits": lambda: Run(adamw(**SPLIT8, **IN_8_BITS), BF16),
    "SGD, split16": lambda: Run(sgd(**SPLIT16), BF16),
    "Schedule-Free": lambda: Run(schedule_free()),
}


def step(run: Run) -> None:
    """Steps, unless an earlier try has made the step: a step that is made has a norm."""
    if run.optimizer.grad_norm.isnan():
        run.optimizer.step()


def evaluate(run: Run) -> None:
    run.optimizer.eval()


def train(run: Run) -> None:
    run.optimizer.train()


def save(run: Run) -> None:
    run.saved = run.optimizer.state_dict()  # type: ignore[attr-defined]


def load(run: Run) -> None:
    """Loads, unless an earlier try has loaded all: the window comes last."""
    if "window: open" not in repr(run.optimizer):
        run.optimizer.load_state_dict(run.saved)  # type: ignore[attr-defined]


def duplicate(run: Run) -> None:
    copy.deepcopy(run.optimizer)


def add_group(run: Run) -> None:
    if len(run.optimizer.param_groups) == 1:
        run.optimizer.add_param_group({"params": run.more})  # type: ignore[attr-defined]


def with_window(run: Run) -> Run:
    run.optimizer.accumulate(3.0)
    return run


def with_checkpoint(run: Run) -> Run:
    other = Run(adamw(**IN_8_BITS), steps=2)
    other.optimizer.accumulate(2.0)
    run.saved = other.optimizer.state_dict()  # type: ignore[attr-defined]
    return run


def with_more(run: Run) -> Run:
    run.more = [torch.nn.Parameter(torch.ones(5))]  # type: ignore[attr-defined]
    return run


def in_eval(run: Run) -> Run:
    run.optimizer.eval()
    return run


def split16_schedule_free() -> Run:
    return Run(schedule_free(**SPLIT16), BF16, 3)


CALLS: dict[str, tuple[Callable[[], Run], Callable[[Run], None]]] = {
    **{f"conversion, {name}": (make, step) for name, make in CONVERSIONS.items()},
    **{f"first step, {name}": (make, step) for name, make in FIRST_STEPS.items()},
    "eval": (lambda: Run(schedule_free(), steps=3), evaluate),
    "eval, split16": (split16_schedule_free, evaluate),
    "train": (lambda: in_eval(Run(schedule_free(), steps=3)), train),
    "train, split16": (lambda: in_eval(split16_schedule_free()), train),
    "save": (lambda: with_window(Run(with_history, steps=3)), save),
    "load": (lambda: with_checkpoint(Run(adamw(), steps=3)), load),
    "copy": (lambda: with_window(Run(adamw(), steps=3)), duplicate),
    "add_param_group": (lambda: with_more(Run(adamw(), steps=3)), add_group),
}


def values(run: Run) -> dict[str, Tensor]:
    """What the call has left, and a window and step after it."""
    found = run.values()
    if isinstance(run.optimizer, af.AdamWScheduleFree):
        run.optimizer.train()
    run.optimizer.zero_grad()
    run.backward(9)
    run.optimizer.accumulate(2.0)
    run.optimizer.step()
    return found | {f"then {name}": value for name, value in run.values().items()}


@pytest.mark.parametrize("how", [Fault, Interrupted])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_failed_can_be_made_again(name: str, how: Any, request: pytest.FixtureRequest) -> None:
    make, call = CALLS[name]
    undisturbed = make()
    with how(None) as counted:
        call(undisturbed)
    wanted = values(undisturbed)
    is_full = request.config.getoption("--full")
    # All operations of torch, and many of some 20,000 instructions: all would take hours.
    count = counted.seen if is_full and how is Fault else min(150 if is_full else 6, counted.seen)
    for at in random.Random(name).sample(range(counted.seen), count):
        run = make()
        with how(at) as fault:
            call(run)
        assert fault.came
        check_saved(run, call, wanted, make)
        call(run)
        assert_all_same_bits(values(run), wanted)


def check_saved(run: Run, call: Callable[[Run], None], wanted: dict[str, Tensor], make: Callable[[], Run]) -> None:
    """What is saved after the failure is whole: a run that resumes from it, and makes the call, has the same bits."""
    try:
        saved = copy.deepcopy(run.optimizer.state_dict())
    except RuntimeError as refused:
        assert "call it again" in str(refused)  # noqa: PT017
        return
    if call is not step or not run.optimizer.grad_norm.isnan():
        return
    resumed = make()
    resumed.params = [torch.nn.Parameter(param.detach().clone()) for param in run.params]
    resumed.optimizer = (resumed.loads or resumed.make)(resumed.params)
    resumed.optimizer.load_state_dict(saved)
    resumed.backward(resumed.steps)
    call(resumed)
    found = values(resumed)
    seeds = {name for name in wanted if "seed" in name}  # another optimizer's
    if not seeds:
        assert_all_same_bits(found, wanted)


@pytest.mark.parametrize("call", ["accumulate", "step"])
def test_ctrl_c_leaves_autograd_on(call: str) -> None:
    """A signal comes after a call: here after the one that has turned autograd off."""
    run = Run(adamw(), steps=1)
    came = []

    def interrupt(_: Any, event: str, function: Any) -> None:
        if event == "c_return" and function.__name__ == "_set_grad_enabled" and not came:
            came.append(event)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            getattr(run.optimizer, call)()
    finally:
        sys.setprofile(None)
        is_on = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
    assert is_on
    getattr(run.optimizer, call)()
