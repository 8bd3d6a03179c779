"""What `smoke` compares: each kernel, rule and format once, and streams, graphs, skips, fused linears.

A check gives tensors by name. It runs on a GPU's backend and on the CPU's, and all bits are equal; or it gives what
each should be itself, as "expected NAME".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import accumfused as af
from accumfused.formats import numeric
from bench.gpu.cases import BF16, FP16, FP32, RULES, STATES, WEIGHTS, Case, Kernels, text

CHUNK = numeric.CHUNK
SIZES = (1, 15, 17, 127, 2049, CHUNK - 1, CHUNK, CHUNK + 130, 2 * CHUNK + 5)
TINY = (1, 129, CHUNK + 130)  # in a dry run
LARGE = 70_000_000  # elements: more chunks than a card has room for thread blocks
_PATTERN = (1 << 20) + 7  # random numbers, repeated
_PACKED = [("split8", "int8"), ("split16", "int8"), ("split16", "fp32"), ("bf16 stochastic", "int8")]

Found = dict[str, Tensor]


@dataclass(frozen=True)
class Place:
    """Where a check runs. Args: backend: a name or a backend; large: elements of the large check."""

    backend: Any
    device: torch.device
    sizes: tuple[int, ...] = SIZES
    large: int = LARGE

    def drawn(self, dtype: torch.dtype, seed: int) -> list[Tensor]:
        """The same numbers on every device, some of them 0."""
        generator = torch.Generator().manual_seed(seed)
        several = []
        for size in self.sizes:
            tensor = torch.randn(min(size, _PATTERN), generator=generator)
            tensor = tensor.where(tensor.abs() > 0.01, 0.0).to(dtype)
            several.append(tensor.repeat(-(-size // _PATTERN))[:size].to(self.device))
        return several

    def kernels(self, case: Case) -> Kernels:
        params = [tensor.requires_grad_() for tensor in self.drawn(case.param_dtype, 0)]
        return Kernels(case, params, self.drawn(case.grads, 1), self.backend)


@dataclass(frozen=True)
class Check:
    """Args: first: it is one of those that go up the ladder; brief: Triton, which compiles for seconds, has it too."""

    name: str
    run: Callable[[Place], Found]
    first: bool = False
    brief: bool = True
    needs_gpu: bool = False


def checks() -> list[Check]:
    """What holds up all else comes first."""
    found = [
        Check("norm, fp32", norm(FP32), first=True),
        Check("accumulate, fp32", accumulate(FP32), first=True),
        Check("step: " + Case().name, step(Case()), first=True),
        Check("a window of two", window, first=True),
        Check("a skipped step", skip, first=True),
        Check("a side stream", side_stream, first=True, needs_gpu=True),
        Check("a captured graph, replayed", graph, first=True, needs_gpu=True),
        Check("one large tensor, bf16", large, first=True, brief=False),
        Check("fused linears, bf16", linears, brief=False),
    ]
    for dtype in (BF16, FP16):
        found += [Check(f"norm, {text(dtype)}", norm(dtype)), Check(f"accumulate, {text(dtype)}", accumulate(dtype))]
    cases = [Case(rule, grads=dtype) for rule in RULES for dtype in (FP32, BF16)][1:] + [Case(grads=FP16)]
    cases += [Case("AdamW", weights, states, dtype) for weights, states in _PACKED for dtype in (BF16, FP32)]
    others = [(weights, states) for weights in WEIGHTS for states in STATES if (weights, states) not in _PACKED][1:]
    rules = [rule for rule in RULES if rule not in ("SGD", "AMSGrad")]
    for number, (weights, states) in enumerate(others):
        for rule in dict.fromkeys(["AdamW", rules[number % len(rules)]]):
            cases.append(Case(rule, weights, states, WEIGHTS[weights][0]))
    brief = (Case("Lion"), Case("SGD-m"), Case("AdamW", "split16", "int8", BF16))
    found += [Check(f"step: {case.name}", step(case), brief=case in brief) for case in cases]
    for case in (Case(), Case("AdamW", "split8", "int8", BF16)):
        found.append(Check(f"gradients off their boundaries: {case.name}", step(case, off=True), brief=False))
    return found


def norm(dtype: torch.dtype) -> Callable[[Place], Found]:
    def run(place: Place) -> Found:
        work = place.kernels(Case("SGD", grads=dtype))
        values = work.norm(place.drawn(dtype, 2)).values
        return {"sums of squares": work.partials, "coefficient, norm, skipped": values}

    return run


def accumulate(dtype: torch.dtype) -> Callable[[Place], Found]:
    def run(place: Place) -> Found:
        work, sums = place.kernels(Case("SGD", grads=dtype)), place.drawn(FP32, 3)
        found: Found = {}
        for name, first in (("first", True), ("second", False)):
            work.accumulate(place.drawn(dtype, 4), sums, first=first)
            found |= {f"{name}, sum {index}": tensor.clone() for index, tensor in enumerate(sums)}
            found[f"{name}, sums of squares"] = work.partials.clone()
        return found

    return run


def step(case: Case, *, off: bool = False) -> Callable[[Place], Found]:
    """Two steps: the optimizer's own first one, and the kernels alone. Args: off: gradients lie one element off."""

    def run(place: Place) -> Found:
        work, grads = place.kernels(case), place.drawn(case.grads, 5)
        if off:
            grads = [grad.new_empty(len(grad) + 1)[1:].copy_(grad) for grad in grads]
        work.step(grads, work.norm(grads))
        return work.everything()

    return run


def large(place: Place) -> Found:
    return step(Case("AdamW", "split8", "int8", BF16))(Place(place.backend, place.device, (place.large,)))


def skip(place: Place) -> Found:
    work = place.kernels(Case())
    before = {name: tensor.clone() for name, tensor in work.everything().items()}
    grads = place.drawn(FP32, 6)
    grads[-1][-1] = torch.inf
    for param, grad in zip(work.plan.params, grads, strict=True):
        param.grad = grad
    work.optimizer.step()
    skipped = work.optimizer.skipped_steps.reshape(())
    return _pairs({**work.everything(), "skipped": skipped}, {**before, "skipped": torch.ones_like(skipped)})


def _windows(place: Place) -> tuple[Kernels, Callable[[], None], list[Tensor]]:
    """A window of two weighted micro-batches and its step, and the tensors that its gradients are copied from."""
    work, source = place.kernels(Case()), place.drawn(FP32, 7)

    def run() -> None:
        for micro in range(2):
            for param, grad in zip(work.plan.params, source, strict=True):
                param.grad = grad * (micro + 1.0)
            work.optimizer.accumulate(weight=micro + 1.0)
        work.optimizer.step()

    return work, run, source


def window(place: Place) -> Found:
    work, run, _ = _windows(place)
    run()
    run()
    return work.everything()


def side_stream(place: Place) -> Found:
    found = []
    for aside in (False, True):
        work, run, _ = _windows(place)
        stream = torch.cuda.Stream(place.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(place.device))
        with torch.cuda.stream(stream if aside else torch.cuda.current_stream(place.device)):
            if aside:  # what goes to another stream comes too early then
                torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            run()
            run()
        torch.cuda.current_stream(place.device).wait_stream(stream)
        found.append(work.everything())
    return _pairs(found[1], found[0])


def graph(place: Place) -> Found:
    found = []
    for captures in (False, True):
        work, run, source = _windows(place)
        side = torch.cuda.Stream(place.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(place.device))
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream(place.device).wait_stream(side)
        if captures:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                run()
        for factor in (0.5, 3.0):
            for tensor in source:
                tensor.mul_(factor)
            captured.replay() if captures else run()
        torch.cuda.synchronize()
        found.append({name: tensor.clone() for name, tensor in work.everything().items()})
    return _pairs(found[1], found[0])


def linears(place: Place) -> Found:
    """A window with and without `fuse_linears`, of numbers so small that every sum is exact."""
    width = 1024  # fuse_linears leaves smaller layers alone
    found = []
    for fuses in (False, True):
        generator = torch.Generator().manual_seed(8)
        layer = torch.nn.Linear(width, width, bias=False, device=place.device, dtype=BF16)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(width, width, generator=generator))
        optimizer = Case("AdamW", "split16", "fp32", BF16).optimizer(layer.parameters(), place.backend)
        handle = af.fuse_linears(layer, optimizer) if fuses else None
        for micro in range(2):
            x, grad = (torch.randint(-2, 3, (4, width), generator=generator) for _ in range(2))
            output = layer(x.to(place.device, BF16))
            optimizer.backward((output * grad.to(place.device, BF16)).sum(), 1, micro == 1)
        optimizer.step()
        if handle is not None and place.device.type == "cuda" and not handle.fused:
            raise RuntimeError(f"the layer is not fused: {handle.left}")
        found.append({"weight": layer.weight.detach(), **optimizer.state[layer.weight]})
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
        left, right = left.detach().cpu().flatten(), right.detach().cpu().flatten()
        differ = (bits(left) != bits(right)).nonzero().flatten()
        if len(differ):
            at = int(differ[0])
            several.append(
                {"tensor": name, "differ": len(differ), "of": len(left), "first": at, "last": int(differ[-1])}
                | {"found": left[at].item(), "expected": right[at].item()}
                | {"found_bits": _hex(left[at]), "expected_bits": _hex(right[at])}
            )
    return several


def bits(tensor: Tensor) -> Tensor:
    """As integers, so that zeros of different sign differ; every NaN is one NaN."""
    if not tensor.is_floating_point():
        return tensor
    tensor = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _hex(value: Tensor) -> str:
    width = 8 * value.element_size()
    return f"0x{int(bits(value.reshape(1))[0]) & (1 << width) - 1:0{width // 4}x}"
