"""The loops that people write, each held to one float64 loop that knows neither windows nor scalers; and released."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compare import assert_all_same_bits, assert_close, everything
from table import Case, case_named
from torch import Tensor, nn

import accumfused as af

MAX_NORM = 0.05
SCALERS = {"stock": torch.amp.GradScaler, "ours": af.GradScaler}
EACH, SOME, ALL = 1, 300, 2**30  # bytes: every gradient by itself, a few at a time, all at the end


@dataclass(frozen=True)
class Loop:
    """What stands between two updates."""

    window: str  # none: gradients stay in p.grad, and autograd adds them; or open, closed
    scaler: str  # ours, stock, or no
    unscales: str  # unscale_ is called; or no
    clip: str  # ours: max_grad_norm; torch: clip_grad_norm_; together: a ClipGroup of two optimizers; or no
    zeroed_by: str  # after the step: optimizer, model, or nobody

    @property
    def name(self) -> str:
        return "-".join(vars(self).values())

    @property
    def skips(self) -> bool:
        """Whether somebody looks for gradients that are not finite."""
        return self.window != "none" or self.scaler != "no" or self.clip in ("ours", "together")

    @property
    def can_be_released(self) -> bool:
        """Whoever looks at p.grad before the step finds nothing where no window was closed."""
        looks = self.scaler == "stock" or self.unscales != "no" or self.clip == "torch"
        return self.window != "none" or not looks


LOOPS = [
    Loop(*row.split())
    for row in """
    none   no    no       no       optimizer
    none   no    no       ours     model
    none   no    no       torch    optimizer
    none   no    no       together optimizer
    open   no    no       ours     nobody
    open   no    no       no       model
    open   no    no       together nobody
    closed no    no       torch    nobody
    closed no    no       ours     model
    none   stock no       no       optimizer
    none   stock unscale_ torch    model
    none   stock unscale_ ours     optimizer
    closed stock no       no       optimizer
    closed stock no       ours     model
    closed stock unscale_ torch    optimizer
    closed stock unscale_ together model
    none   ours  no       no       optimizer
    none   ours  no       ours     model
    none   ours  unscale_ torch    optimizer
    open   ours  no       no       model
    open   ours  no       ours     nobody
    open   ours  no       together nobody
    closed ours  no       no       nobody
    closed ours  unscale_ ours     model
    closed ours  unscale_ torch    optimizer
    """.strip().splitlines()
]
CASES = [case_named("sgd_nesterov"), case_named("adamw_no_decay")]  # of which one sees the gradients' size
WEIGHTS = (3.0, 0.0, 0.7)  # the empty micro-batch's masked mean is NaN


class Net(nn.Module):
    """With a parameter in two places, one without a gradient, and one that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 1)
        self.unused, self.rare = nn.Linear(3, 3), nn.Parameter(torch.ones(9))

    def forward(self, seed: int) -> Tensor:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), device="cpu").to(self.rare)
        x = torch.tanh(self.middle(torch.tanh(self.middle(torch.tanh(self.first(x))))))
        return self.last(x * self.rare if seed % 2 else x).square().mean()


def make(kind: str, case: Case, params: Any, backend: str, **settings: Any) -> Any:
    torch_class: Any = case.of.torch_class
    if kind == "ours":
        return case.make(params, backend, **settings)
    if kind == "own step":
        torch_class = type("Own", (torch_class,), {})
    return af.fuse(torch_class(params, **case.options, fused=True), backend=backend, **settings)


clip_by_torch = nn.utils.clip_grad_norm_  # a loop that names it and steps an open window is warned


class Truth:
    """The same model in float64, stepped by torch."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        self.model = copy.deepcopy(model).double()
        torch_class: Any = case.of.torch_class
        self.optimizer = torch_class(self.model.parameters(), **case.options)

    def step(self, factors: dict[int, float], clip: bool) -> Tensor:
        self.optimizer.zero_grad()
        for seed, factor in factors.items():
            (self.model(seed) * factor).backward()
        norm = clip_by_torch(self.model.parameters(), MAX_NORM if clip else math.inf)
        self.optimizer.step()
        return norm


def run(
    loop: Loop, kind: str, case: Case, style: str, in_loss: bool, backend: str,
    bucket: int | None = None, grad_dtype: torch.dtype | None = None, truth: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Five updates, of which the fourth overflows. Returns: all that is left, and every norm."""
    torch.manual_seed(0)
    model = Net()
    params = list(model.parameters())
    held = Truth(model, case) if truth else None
    settings = {"max_grad_norm": MAX_NORM} if loop.clip == "ours" else {}
    parts = (params[:3], params[3:]) if loop.clip == "together" else (params,)
    optimizers = [make(kind, case, part, backend, **settings) for part in parts]
    steppers: list[Any] = [af.ClipGroup(optimizers, MAX_NORM)] if loop.clip == "together" else optimizers
    scaler = SCALERS[loop.scaler]("cpu", init_scale=2.0**10, growth_interval=2) if loop.scaler != "no" else None
    poison = torch.zeros_like(model.first.weight)
    model.first.weight.register_hook(lambda grad: grad + poison)
    for param in params[::2] if grad_dtype is not None else []:
        param.grad_dtype = grad_dtype
    grad_dtypes = [param.grad_dtype for param in params]
    for optimizer in optimizers if bucket is not None else []:
        af.release_gradients(optimizer, bucket)
    norms, scales = {}, []
    # torch's scaler leaves out the step itself, where the optimizer does not take what it says
    is_left_out = loop.scaler == "stock" and loop.clip != "together"
    for update in range(5):
        bad = update == 3 and loop.skips
        numbers = [*WEIGHTS[update % 3 :], *WEIGHTS[: update % 3]] if style != "sum" else [1.0] * 3
        numbers = [1.0, 1.0] if loop.window == "none" else numbers
        for index, number in enumerate(numbers):
            poison[2, 3] = math.inf if bad and index == len(numbers) - 1 else 0.0
            loss = model(3 * update + index) * (1.0 if number else math.nan)
            loss = scaler.scale(loss) if scaler else loss
            weight = {"sum": None, "numbers": number, "tensors": torch.tensor(number)}[style]
            closes = loop.window == "closed" and index == 2
            if in_loss and loop.window != "none":
                optimizers[0].backward(loss, weight, last=closes)
            else:
                loss.backward()
            for optimizer in optimizers[in_loss:] if loop.window != "none" else []:
                optimizer.accumulate(weight, last=closes)
        for stepper in steppers if loop.unscales != "no" else []:
            scaler.unscale_(stepper)
        if loop.clip == "torch":
            clip_by_torch(params, MAX_NORM)
        before = [everything(optimizer) for optimizer in optimizers if bad]
        normalizer = 4.0 if update % 2 and loop.clip != "torch" else 1.0
        for stepper in steppers:
            (scaler.step if scaler else type(stepper).step)(stepper, normalizer=normalizer)
        if scaler:
            scales.append(math.log2(scaler.get_scale()))
            scaler.update()
        if bad:
            for optimizer, known in zip(optimizers, before, strict=True):
                assert_all_same_bits(everything(optimizer), known)
                assert bool(optimizer.step_was_skipped) != is_left_out
        elif held:
            total = normalizer * (sum(numbers) if style != "sum" and loop.window != "none" else 1.0)
            counted = {3 * update + i: n / total for i, n in enumerate(numbers) if n or style == "tensors"}
            norm = held.step(counted, loop.clip != "no")
            for optimizer in optimizers if loop.clip in ("ours", "together") else []:
                assert_close(optimizer.grad_norm, norm, "model", f"norm {update}")
        if loop.window != "none" and not (bad and is_left_out):
            norms[f"norm {update}"] = optimizers[0].grad_norm
        if loop.zeroed_by != "nobody":
            for each in optimizers if loop.zeroed_by == "optimizer" else [model]:
                each.zero_grad()
        assert all(param.grad is None for param in params)
        assert [param.grad_dtype for param in params] == grad_dtypes
    assert scales in ([], [10, 10, 11, 11, 10])
    assert [int(optimizer.skipped_steps) for optimizer in optimizers] == [loop.skips and not is_left_out] * len(parts)
    for index, expected in enumerate(held.model.parameters() if held else []):
        assert_close(params[index], expected, "model", f"param {index}")
    left = [everything(optimizer) for optimizer in optimizers]
    return {f"{name} of {i}": value for i, each in enumerate(left) for name, value in each.items()} | norms


@pytest.mark.pairwise(
    loop=LOOPS, style=["sum", "numbers", "tensors"], in_loss=[False, True],
    kind=["ours", "converted", "own step"], case=CASES,
)  # fmt: skip
def test_every_loop_is_the_float64_loop(
    backend: str, loop: Loop, style: str, in_loss: bool, kind: str, case: Case
) -> None:
    run(loop, kind, case, style, in_loss and loop.clip != "together", backend, truth=True)


@pytest.mark.pairwise(
    loop=[loop for loop in LOOPS if loop.can_be_released], bucket=[EACH, SOME, ALL],
    style=["sum", "numbers", "tensors"], kind=["ours", "own step"],
    grad_dtype=[None, torch.bfloat16, torch.float16],
)  # fmt: skip
def test_released_gradients_leave_the_same_bits(
    backend: str, loop: Loop, bucket: int, style: str, kind: str, grad_dtype: Any
) -> None:
    """A weight is in the loss, or it would come too late."""
    # torch refuses some dtypes, and rounds the sums of others; one backward() for two optimizers has no weight
    grad_dtype = None if loop.scaler != "no" or loop.window == "none" else grad_dtype
    style = "sum" if loop.clip == "together" else style
    plain, released = (
        run(loop, kind, CASES[1], style, style != "sum", backend, each, grad_dtype) for each in (None, bucket)
    )
    assert_all_same_bits(released, plain)


def test_a_dropped_window_gives_parameters_the_dtype_of_their_gradients_back(backend: str) -> None:
    param = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = af.SGD([param], lr=0.5, backend=backend)
    param.sum().backward()
    optimizer.accumulate(2.0, last=True)
    assert param.grad is not None
    assert param.grad.dtype == torch.float32
    optimizer.zero_grad()
    assert param.grad_dtype == torch.bfloat16
