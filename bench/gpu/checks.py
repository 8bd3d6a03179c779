"""What `smoke` compares: kernels, rules and formats, and streams, graphs, skips, fused linears.

A check gives tensors by name. It runs on a GPU's backend and on the CPU's, and all bits are equal; or it gives what
each should be itself, as "expected NAME". The tests go through all combinations of rules and formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import accumfused as af
from accumfused.formats.numeric import CHUNK
from bench.gpu.cases import BF16, DTYPES, FP16, FP32, PACKED, PURE, RULES, Case, everything

SIZES = (1, 15, 17, 127, 2049, CHUNK - 1, CHUNK, CHUNK + 130, 2 * CHUNK + 5)
TINY = (1, 129, CHUNK + 130)  # in a dry run
LARGE = (70_000_000,)  # more chunks than a card has room for thread blocks
_PATTERN = (1 << 20) + 7  # random numbers, repeated

Found = dict[str, Tensor]


@dataclass(frozen=True)
class Place:
    """Where a check runs. Args: backend: a name or a backend; sizes: of the tensors; large: of the large check."""

    backend: Any
    device: torch.device
    sizes: tuple[int, ...] = SIZES
    large: tuple[int, ...] = LARGE

    def drawn(self, dtype: torch.dtype, seed: int) -> list[Tensor]:
        """The same numbers on every device, some of them 0."""
        generator = torch.Generator().manual_seed(seed)
        several = []
        for size in self.sizes:
            tensor = torch.randn(min(size, _PATTERN), generator=generator)
            tensor = tensor.where(tensor.abs() > 0.01, 0.0).to(dtype)
            several.append(tensor.repeat(-(-size // _PATTERN))[:size].to(self.device))
        return several

    def optimizer(self, case: Case) -> tuple[af.FusedOptimizer, list[Tensor]]:
        """It, and its parameters, which have gradients of that dtype."""
        params = [tensor.requires_grad_() for tensor in self.drawn(case.param_dtype, 0)]
        for param in params:
            if case.grads != param.dtype:
                param.grad_dtype = case.grads
        return case.optimizer(params, self.backend), params


@dataclass(frozen=True)
class Check:
    """Args: brief: Triton, which compiles for seconds, has it too; needs_gpu: a dry run leaves it out."""

    name: str
    run: Callable[[Place], Found]
    brief: bool = False
    needs_gpu: bool = False


def checks() -> list[Check]:
    """What holds up all else comes first."""
    first = [
        Check("sums of a window, fp32", partial(sums, FP32), brief=True),
        Check(f"step: {Case().name}", partial(step, Case()), brief=True),
        Check("weighted windows", windows, brief=True),
        Check("a skipped step", skip, brief=True),
        Check("a side stream", side_stream, brief=True, needs_gpu=True),
        Check("a captured graph, replayed", graph, brief=True, needs_gpu=True),
        Check("one large tensor, bf16", lambda at: step(PACKED[0], Place(at.backend, at.device, at.large))),
        Check("fused linears, bf16", linears),
    ]
    cases = [*(Case(rule) for rule in RULES if rule != "AdamW"), *PACKED, PURE, Case(grads=BF16), Case(grads=FP16)]
    cases += [Case("AdamW", "split16", "bf16", BF16), Case("Lion", "fp16 + fp32 master", "8bit", FP16)]
    return [
        *first,
        *(Check(f"sums of a window, {DTYPES[dtype]}", partial(sums, dtype)) for dtype in (BF16, FP16)),
        *(Check(f"step: {case.name}", partial(step, case)) for case in cases),
        *(Check(f"gradients off: {case.name}", partial(step, case, off=True)) for case in (Case(), PACKED[0])),
    ]


def sums(dtype: torch.dtype, place: Place) -> Found:
    """A window's accumulators, and their norm."""
    optimizer, params = place.optimizer(Case("SGD", grads=dtype))
    for last in (False, True):
        for param, grad in zip(params, place.drawn(dtype, 4 + last), strict=True):
            param.grad = grad
        optimizer.accumulate(last=last)
    found = {f"sum {index}": param.grad for index, param in enumerate(params) if param.grad is not None}
    optimizer.step()
    return found | {"norm": optimizer.grad_norm}


def step(case: Case, place: Place, *, off: bool = False) -> Found:
    """Two clipped steps. Args: off: gradients lie one element off their boundary."""
    optimizer, params = place.optimizer(case)
    found: Found = {}
    for seed in (1, 2):
        for param, grad in zip(params, place.drawn(case.grads, seed), strict=True):
            param.grad = grad.new_empty(len(grad) + 1)[1:].copy_(grad) if off else grad
        optimizer.step()
        found[f"norm {seed}"] = optimizer.grad_norm.clone()
    return found | everything(optimizer)


def skip(place: Place) -> Found:
    optimizer, params = place.optimizer(Case())
    before: Found = {}
    for value in (1.0, torch.inf):
        before = {name: tensor.clone() for name, tensor in everything(optimizer).items()}
        for param, grad in zip(params, place.drawn(FP32, 6), strict=True):
            param.grad = grad
        params[-1].grad[-1] = value
        optimizer.step()
    skipped = optimizer.skipped_steps.reshape(())
    return _pairs({**everything(optimizer), "skipped": skipped}, {**before, "skipped": torch.ones_like(skipped)})


def _windows(place: Place) -> tuple[Callable[[], None], list[Tensor], Callable[[], Found]]:
    """A window of two weighted micro-batches and its step, the tensors of its gradients, and what has come out."""
    optimizer, params = place.optimizer(Case())
    source = place.drawn(FP32, 7)

    def run() -> None:
        for weight in (1.0, 2.0):
            for param, grad in zip(params, source, strict=True):
                param.grad = grad * weight
            optimizer.accumulate(weight=weight)
        optimizer.step()

    return run, source, lambda: {name: tensor.clone() for name, tensor in everything(optimizer).items()}


def windows(place: Place) -> Found:
    run, source, found = _windows(place)
    for factor in (1.0, 0.5, 3.0):
        torch._foreach_mul_(source, factor)
        run()
    return found()


def side_stream(place: Place) -> Found:
    """The same while that stream is late: what goes to a wrong stream comes too early."""
    here, side = torch.cuda.current_stream(place.device), torch.cuda.Stream(place.device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        found = windows(place)
    here.wait_stream(side)
    return _pairs(found, windows(place))


def graph(place: Place) -> Found:
    """The same by an eager window and two replays."""
    run, source, found = _windows(place)
    here, side = torch.cuda.current_stream(place.device), torch.cuda.Stream(place.device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        run()
    here.wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        run()
    for factor in (0.5, 3.0):
        torch._foreach_mul_(source, factor)
        captured.replay()
    return _pairs(found(), windows(place))


def linears(place: Place) -> Found:
    """A window with and without `fuse_linears`, of numbers so small that every sum is exact."""
    width, found = 1024, []  # fuse_linears leaves smaller layers alone
    for fuses in (False, True):
        generator = torch.Generator().manual_seed(8)
        layer = torch.nn.Linear(width, width, bias=False, device=place.device, dtype=BF16)
        layer.weight.data.copy_(torch.randn(width, width, generator=generator))
        optimizer = Case("AdamW", "split16", "fp32", BF16).optimizer(layer.parameters(), place.backend)
        handle = af.fuse_linears(layer, optimizer) if fuses else None
        for last in (False, True):
            x, grad = (torch.randint(-2, 3, (4, width), generator=generator).to(place.device, BF16) for _ in range(2))
            optimizer.backward((layer(x) * grad).sum(), 1, last)
        optimizer.step()
        if handle is not None and place.device.type == "cuda" and not handle.fused:  # a CPU has no such product
            raise RuntimeError(f"the layer is not fused: {handle.left}")
        found.append(everything(optimizer))
    return _pairs(found[1], found[0])


def _pairs(found: Found, expected: Found) -> Found:
    return found | {f"expected {name}": tensor for name, tensor in expected.items()}


def own_expectation(found: Found) -> Found:
    """What a check says itself that its tensors should be; empty where the CPU has to say it."""
    return {name.removeprefix("expected "): each for name, each in found.items() if name.startswith("expected ")}


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """For each tensor whose bits differ: how many do, the first index, and there both values and their bits."""
    several: list[dict[str, Any]] = []
    for name, right in expected.items():
        left = found.get(name)
        if left is None or left.shape != right.shape or left.dtype != right.dtype:
            several.append({"tensor": name, "found": str(left if left is None else (left.shape, left.dtype))})
            continue
        left, right = (tensor.detach().cpu().flatten() for tensor in (left, right))
        differ = (bits(left) != bits(right)).nonzero().flatten()
        if len(differ):
            at = int(differ[0])
            facts = {"tensor": name, "differ": len(differ), "of": len(left), "first": at, "last": int(differ[-1])}
            for side, values in (("found", left), ("expected", right)):
                facts |= {side: values[at].item(), f"{side} bits": int(bits(values[at : at + 1]))}
            several.append(facts)
    return several


def bits(tensor: Tensor) -> Tensor:
    """As integers, so that zeros of different sign differ; every NaN is one NaN."""
    if not tensor.is_floating_point():
        return tensor
    tensor = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
