"""Are the bits of the backends for GPUs those of the CPU? Each verb, rule and format once, and streams, graphs, skips.

Quick, and without pytest. Where bits differ, the report says of which tensor, from which index on, how many, and what
the first two are; then the next check follows. After an error that leaves the GPU unusable the program begins a new
process behind that check.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accumfused import compiled
from accumfused.backends import why_not
from accumfused.formats import numeric
from bench.gpu.bits import differences
from bench.gpu.journal import Journal
from bench.gpu.verbs import BF16, FP16, FP32, RULES, STATES, WEIGHTS, Case, Verbs, text

CHUNK = numeric.CHUNK
SIZES = (1, 15, 17, 127, 2049, CHUNK - 1, CHUNK, CHUNK + 130, 2 * CHUNK + 5)
_DTYPES = (FP32, BF16, FP16)
_BRIEF = (Case(), Case("Lion"), Case("SGD-m"), Case("AdamW", "split16", "int8", BF16))

Found = dict[str, Tensor]


@dataclass(frozen=True)
class Check:
    """Tensors that a backend gives on a device. `dtype`: of the gradients."""

    name: str
    dtype: torch.dtype
    run: Callable[[Any, torch.device], Found]
    has_expected: bool = False  # `run` gives what it should be, too: "expected ..." beside each
    brief: bool = True  # also for Triton, which compiles most of these for seconds each: its tests have the others


def drawn(dtype: torch.dtype, device: torch.device, seed: int, scale: float = 1.0) -> list[Tensor]:
    """The same numbers on every device, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(size, generator=generator) * scale for size in SIZES]
    return [tensor.where(tensor.abs() > 0.01 * scale, 0.0).to(dtype).to(device) for tensor in tensors]


def moved(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies that lie one element behind where an allocation begins."""
    memories = [tensor.new_empty(len(tensor) + 1) for tensor in tensors]
    return [memory[1:].copy_(tensor) for memory, tensor in zip(memories, tensors, strict=True)]


def verbs(case: Case, backend: Any, device: torch.device) -> Verbs:
    params = [tensor.requires_grad_() for tensor in drawn(case.param_dtype, device, 0)]
    return Verbs(case, params, drawn(case.grads, device, 1), backend)


def _norm(dtype: torch.dtype) -> Callable[[Any, torch.device], Found]:
    def run(backend: Any, device: torch.device) -> Found:
        work = verbs(Case("SGD", grads=dtype), backend, device)
        values = work.norm(drawn(dtype, device, 2)).values
        return {"sums of squares": work.partials, "coefficient, norm, skipped": values}

    return run


def _accumulate(dtype: torch.dtype) -> Callable[[Any, torch.device], Found]:
    def run(backend: Any, device: torch.device) -> Found:
        work = verbs(Case("SGD", grads=dtype), backend, device)
        sums = drawn(FP32, device, 3)
        found: Found = {}
        for name, first in (("first", True), ("second", False)):
            work.accumulate(drawn(dtype, device, 4), sums, first=first)
            found |= {f"{name}, sum {index}": tensor.clone() for index, tensor in enumerate(sums)}
            found[f"{name}, sums of squares"] = work.partials.clone()
        return found

    return run


def _step(case: Case, *, off: bool = False) -> Callable[[Any, torch.device], Found]:
    """Two steps: the optimizer's own first one, and one of the verbs alone. Args: off: its gradients are `moved`."""

    def run(backend: Any, device: torch.device) -> Found:
        work = verbs(case, backend, device)
        grads = drawn(case.grads, device, 5)
        grads = moved(grads) if off else grads
        work.step(grads, work.norm(grads))
        return work.everything()

    return run


def _skip(backend: Any, device: torch.device) -> Found:
    work = verbs(Case(), backend, device)
    before = {name: tensor.clone() for name, tensor in work.everything().items()}
    params = work.plan.params
    for param, grad in zip(params, drawn(FP32, device, 6), strict=True):
        param.grad = grad
    assert params[-1].grad is not None
    params[-1].grad[-1] = torch.inf
    work.optimizer.step()
    found = _pairs(work.everything(), before)
    found["skipped"] = work.optimizer.skipped_steps.reshape(())
    found["expected skipped"] = torch.ones_like(found["skipped"])
    return found


def _window(backend: Any, device: torch.device) -> tuple[Verbs, Callable[[], None], list[Tensor]]:
    """A window of two weighted micro-batches, and the tensors that its gradients are copied from."""
    work = verbs(Case(), backend, device)
    source = drawn(FP32, device, 7)

    def window() -> None:
        for micro in range(2):
            for param, grad in zip(work.plan.params, source, strict=True):
                param.grad = grad * (micro + 1.0)
            work.optimizer.accumulate(weight=micro + 1.0)
        work.optimizer.step()

    return work, window, source


def _side_stream(backend: Any, device: torch.device) -> Found:
    found = []
    for aside in (False, True):
        work, window, _ = _window(backend, device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream if aside else torch.cuda.current_stream(device)):
            if aside:
                # So that what goes to another stream comes too early.
                torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            window()
            window()
        torch.cuda.current_stream(device).wait_stream(stream)
        found.append(work.everything())
    return _pairs(found[1], found[0])


def _graph(backend: Any, device: torch.device) -> Found:
    found = []
    for captures in (False, True):
        work, window, source = _window(backend, device)
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            window()
        torch.cuda.current_stream(device).wait_stream(side)
        run: Callable[[], Any] = window
        if captures:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                window()
            run = graph.replay
        for factor in (0.5, 3.0):
            for tensor in source:
                tensor.mul_(factor)
            run()
        torch.cuda.synchronize()
        found.append({name: tensor.clone() for name, tensor in work.everything().items()})
    return _pairs(found[1], found[0])


def _pairs(found: Found, expected: Found) -> Found:
    return found | {f"expected {name}": tensor for name, tensor in expected.items()}


def checks() -> list[Check]:
    """What holds up all else comes first."""
    found = [Check("norm", dtype, _norm(dtype)) for dtype in _DTYPES]
    found += [Check("accumulate", dtype, _accumulate(dtype)) for dtype in _DTYPES]
    cases = [Case(rule, grads=dtype) for rule in RULES for dtype in (FP32, BF16)]
    cases += [Case(grads=FP16)]
    packed = [("split8", "int8"), ("split16", "int8"), ("split16", "fp32"), ("bf16 stochastic", "int8")]
    cases += [Case("AdamW", weights, states, dtype) for weights, states in packed for dtype in (BF16, FP32)]
    others = [(weights, states) for weights in WEIGHTS for states in STATES if (weights, states) not in packed]
    rules = [rule for rule in RULES if rule not in ("SGD", "AMSGrad")]
    for number, (weights, states) in enumerate(others[1:]):  # but plain fp32
        grads = WEIGHTS[weights][0]
        cases += [Case(rule, weights, states, grads) for rule in dict.fromkeys(["AdamW", rules[number % len(rules)]])]
    found += [Check(f"step: {case.name}", case.grads, _step(case), brief=case in _BRIEF) for case in cases]
    for case in (Case(), Case("AdamW", "split8", "int8", BF16)):
        found.append(
            Check(f"gradients off their boundaries: {case.name}", case.grads, _step(case, off=True), brief=False)
        )
    own = {"a skipped step": _skip, "a side stream": _side_stream, "a captured graph, replayed": _graph}
    return found[:6] + [Check(name, FP32, run, has_expected=True) for name, run in own.items()] + found[6:]


def compare(
    check: Check, backend: Any, device: torch.device, reference: Any, known: dict[str, Found]
) -> dict[str, Any]:
    """One line of the report. Args: known: what the reference has given, by check."""
    began = time.perf_counter()
    facts: dict[str, Any] = {}
    try:
        found = check.run(backend, device)
        if check.has_expected:
            expected = {name.removeprefix("expected "): each for name, each in found.items() if name[:9] == "expected "}
        else:
            key = f"{check.name} {check.dtype}"
            if key not in known:
                known[key] = check.run(reference, torch.device("cpu"))
            expected = known[key]
        differ = differences(found, expected)
        facts = {"ok": not differ, "differences": len(differ), "first": differ[0] if differ else None}
        if len(differ) > 1:
            facts["all"] = "\n".join(map(str, differ[:20]))
    except Exception as error:
        facts = {
            "ok": False,
            "error": f"{type(error).__name__}: {error}".split("\n")[0],
            "trace": traceback.format_exc(),
        }
    return {**facts, "seconds": round(time.perf_counter() - began, 3)}


def run_checks(
    journal: Journal, several: Sequence[Check], backends: dict[str, Any], device: torch.device, start: int = 0,
    again: Callable[[int], Any] = lambda start: None,
) -> bool:  # fmt: skip
    """Whether all bits are equal. Args: start: how many comparisons are done; again: begins anew with that number."""
    reference = "torch" if compiled.module is None or device.type == "cpu" else "cpu"
    known: dict[str, Found] = {}
    ordered = [(name, check) for name in backends for check in several if check.brief or name != "triton"]
    good = True
    for number, (name, check) in enumerate(ordered[start:], start=start):
        called = {"check": check.name, "backend": name, "gradients": text(check.dtype)}
        journal.write("so far", number=number, of=len(ordered), begins=called)  # the last one, if it never ends
        facts = compare(check, backends[name], device, reference, known)
        journal.write("bits", **called, **facts)
        good = good and facts["ok"]
        if "error" in facts and device.type == "cuda" and not _usable(device):
            again(number + 1)
    return good


def _usable(device: torch.device) -> bool:
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).sum().item()
    except RuntimeError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.smoke", description=__doc__)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: its backend, to see that it runs"
    )
    parser.add_argument("--start", type=int, default=0, help="leave out so many comparisons")
    asked = parser.parse_args()
    journal = Journal.of_this_process("smoke")
    device = torch.device("cuda", 0) if asked.device == "cuda" else torch.device("cpu")
    reasons = {name: why_not(name, device) for name in (("cuda", "triton") if device.type == "cuda" else ("cpu",))}
    for name, reason in reasons.items():
        if reason is not None and not asked.start:
            journal.write("left out", ok=False, backend=name, reason=reason)
    backends = {name: name for name, reason in reasons.items() if reason is None}
    several = checks()
    if device.type == "cpu":
        several = [check for check in several if check.brief and check.run not in (_side_stream, _graph)]

    def again(start: int) -> None:
        sys.stdout.flush()
        program = [sys.executable, "-m", "bench.gpu.smoke", "--device", asked.device, "--start", str(start)]
        os.execv(sys.executable, program)

    good = run_checks(journal, several, backends, device, asked.start, again)
    sys.exit(0 if good and not any(reasons.values()) and not asked.start else 1)


if __name__ == "__main__":
    main()
