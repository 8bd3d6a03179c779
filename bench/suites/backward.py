"""Whole windows, forward and backward, without the step: what the sums of gradients cost in time and in memory.

Every contender has a copy of the model, and they take turns. "% accumulating" is the share of its time by which
a contender is slower than the same passes with `p.grad` released before each, so that autograd adds nothing.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import accumfused as af
from bench.exact import WrongError
from bench.measure import Variant
from bench.suites import Bench
from bench.suites.train import demo
from bench.tables import Table, quartiles

FOLLOWS = ("backend",)
_MICRO_BATCHES = 4
_TOKENS = (32, 128, 512, 1024)  # a micro-batch
_LONGEST = 512  # tokens of a sequence
_LARGEST_ERROR = 1e-5  # of a gradient, of its norm


@dataclass
class Contender:
    """A copy of the model, the call after each backward pass, and that which ends a window; a step is not timed."""

    name: str
    model: nn.Module
    after_backward: Callable[[], object]
    end: Callable[[], object]
    sums: Callable[[], list[Any]]
    before_backward: Callable[[], object] = lambda: None

    def window(self, inputs: list[Tensor], *, ends: bool = True) -> None:
        for x in inputs:
            self.before_backward()
            self.model(x).square().mean().backward()
            self.after_backward()
        if ends:
            self.end()


def run(bench: Bench) -> list[Table]:
    _, text_model = demo()
    width, depth = (32, 1) if bench.quick else (768, 2)
    mlp = (nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(2 * depth))
    models = {
        "GELU-MLP": nn.Sequential(*mlp),
        "GPT-2's blocks": nn.Sequential(*(text_model.Block(width, width // 64 or 1) for _ in range(depth))),
    }
    sizes = (8,) if bench.quick else _TOKENS
    return [_table(bench, name, of.to(bench.device), width, tokens) for name, of in models.items() for tokens in sizes]


def _table(bench: Bench, name: str, model: nn.Module, width: int, tokens: int) -> Table:
    parameters = sum(param.numel() for param in model.parameters())
    table = Table(f"backward, {name} of {parameters:,} parameters: {_MICRO_BATCHES} micro-batches of {tokens} tokens")
    rows = max(1, tokens // _LONGEST)
    inputs = [torch.randn(rows, tokens // rows, width, device=bench.device) for _ in range(_MICRO_BATCHES)]
    contenders = _contenders(bench, model)
    windows = [functools.partial(each.window, inputs) for each in contenders]
    peaks = [_peak(bench.device, window) for window in windows]
    error = max(_error(each, model, inputs) for each in contenders[1:])
    variants = [Variant(each.name, window) for each, window in zip(contenders, windows, strict=True)]
    nothing, stock, *ours = bench.interleave(variants)
    for timing, peak in zip((stock, *ours), peaks[1:], strict=True):
        table.rows.append({
            "name": timing.variant.name, "ms": quartiles(timing.seconds, 1e3),
            "x autograd": timing.times_as_fast_as(stock),
            "% accumulating": 100 * (1 - timing.times_as_fast_as(nothing)), "peak B/param": peak / parameters,
        })  # fmt: skip
    table.notes.append(f"largest error of a sum against fp64, of its norm: {error:.1e}; peak: of a first window")
    return table


def _contenders(bench: Bench, model: nn.Module) -> list[Contender]:
    """Makes first one that adds nothing, then autograd, then ours."""
    found = []
    for name in ("nothing added", "autograd's sums"):
        own = copy.deepcopy(model)
        grads = functools.partial(lambda own: [param.grad for param in own.parameters()], own)
        found.append(Contender(name, own, lambda: None, own.zero_grad, grads))
    found[0].before_backward = found[0].end
    for backend in bench.backends:
        for fuses in (False, True):
            own = copy.deepcopy(model)
            optimizer: Any = af.AdamW(own.parameters(), lr=0.0, backend=backend)
            if fuses:
                af.fuse_linears(own, optimizer)
            name = f"{bench.label(backend)}{', fuse_linears' if fuses else ''}"
            sums = functools.partial(lambda engine: engine.window.sums, optimizer._engine)
            found.append(Contender(name, own, optimizer.accumulate, optimizer._engine.drop, sums))
    return found


def _error(contender: Contender, model: nn.Module, inputs: list[Tensor]) -> float:
    """Returns the largest error of the contender's sums; they are dropped. Raises: WrongError: they are wrong."""
    exact = copy.deepcopy(model).double()
    for x in inputs:
        exact(x.double()).square().mean().backward()
    contender.window(inputs, ends=False)
    error = 0.0
    for grad, right in zip(contender.sums(), exact.parameters(), strict=True):
        assert right.grad is not None
        error = max(error, float((right.grad - grad).norm() / right.grad.norm()))
    contender.end()
    if not error <= _LARGEST_ERROR:
        raise WrongError(f"{contender.name}: a sum of gradients is {error:.1e} off", error)
    return error


def _peak(device: torch.device, call: Callable[[], object]) -> int:
    """Returns by how many bytes the allocated memory grows at most during a call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    assert profiler.profiler is not None
    found: Any = profiler.profiler.kineto_results
    events = [event for event in found.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
