"""What the GPU itself counts in each verb, rule and format, where ncu (Nsight Compute) is there and may read it.

Bytes from and to memory beside those that reach the L2: stores of a few bytes show as more sectors to a store and more
bytes into the L2 than into memory. Instructions an element, the shares of the cycles that issue one and that the ALU is
busy, and what warps wait for: memory, shared memory, a result, a pipe, their turn, or room for one more access.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from bench.counters import parse
from bench.gpu.journal import Journal
from bench.gpu.verbs import BF16, FP32, Case, Verbs, text
from bench.shapes import flat
from bench.workload import random_tensors

ELEMENTS = 1 << 27
CASES = (
    Case(),
    Case(grads=BF16),
    Case("AdamW", "split8", "int8", BF16),
    Case("AdamW", "bf16 stochastic", "int8", BF16),
    Case("AdamW", "bf16 + fp32 master", "bf16", BF16),
    Case("AdamW", "split16", "fp32", BF16),
    Case("AMSGrad"),
    Case("Lion"),
)
_READ, _WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
_L2 = "lts__t_sectors_op_write.sum"
_STORES, _SECTORS = (f"l1tex__t_{what}_pipe_lsu_mem_global_op_st.sum" for what in ("requests", "sectors"))
_INSTRUCTIONS, _ISSUES = "smsp__inst_executed.sum", "smsp__issue_active.avg.pct_of_peak_sustained_active"
_ALU = "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active"
_TIME = "gpu__time_duration.sum"  # ns
_REASONS = (
    "long_scoreboard", "short_scoreboard", "wait", "math_pipe_throttle", "not_selected", "lg_throttle", "barrier",
    "no_instruction",
)  # fmt: skip
_WAITS = {reason: f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio" for reason in _REASONS}
_FEW = (_READ, _WRITTEN, _TIME)
_ALL = (*_FEW, _L2, _STORES, _SECTORS, _INSTRUCTIONS, _ISSUES, _ALU, *_WAITS.values())


def launches() -> Iterator[tuple[str, Case]]:
    """The verb and the case of each launch that is watched, in their order."""
    for case in CASES:
        if case.weights == "fp32" and case.rule == "AdamW":
            yield "norm", case
            yield "accumulate", case
        yield "step", case


def watched(device: torch.device, elements: int = ELEMENTS) -> list[tuple[str, Case]]:
    """What ncu runs: the launches of all cases."""
    several = list(launches())
    return [
        launch for case in CASES for launch in _watch(case, [v for v, of in several if of is case], device, elements)
    ]


def _watch(case: Case, verbs: Sequence[str], device: torch.device, elements: int) -> list[tuple[str, Case]]:
    gc.collect()  # optimizers are cycles, and hold tensors
    dtypes = (case.param_dtype, case.grads, FP32)
    params, grads, sums = (random_tensors(flat(elements), 1e-3, dtype, device) for dtype in dtypes)
    work = Verbs(case, [param.requires_grad_() for param in params], grads, "cuda")
    outcome = work.norm(grads)
    runs: dict[str, Callable[[], Any]] = {
        "norm": partial(work.norm, grads),
        "accumulate": partial(work.accumulate, grads, sums),
    }
    runs["step"] = partial(work.step, grads, outcome)
    for verb in verbs:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        runs[verb]()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
    return [(verb, case) for verb in verbs]


def read(metrics: Sequence[str]) -> tuple[list[tuple[str, dict[str, float]]], str]:
    """(kernel, metric -> number) of each launch; and what ncu said if there is none."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return [], "ncu (Nsight Compute) is not on the PATH"
    command = [ncu, "--csv", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off"]
    command += ["--metrics", ",".join(metrics), "--kernel-name", "regex:(accumulate|norm|step)"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "bench.gpu.counters", "--watched"], capture_output=True, text=True
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("==ERROR==")]
    return parse(done.stdout), " ".join(said) or done.stderr.strip()[-300:] or "it gave none"


def lines(found: Iterable[tuple[str, dict[str, float]]]) -> Iterator[dict[str, Any]]:
    """One of the report for each launch."""
    several, known = list(found), list(launches())
    for number, (kernel, numbers) in enumerate(several):
        line: dict[str, Any] = {"kernel": kernel.split("(")[0][-60:]}
        if len(several) == len(known):  # else which is which is not known
            verb, case = known[number]
            line = {"what": f"{verb}, {text(case.grads)}" if verb != "step" else case.name, **line}
        yield line | dict(_facts(numbers))


def _facts(numbers: dict[str, float]) -> Iterator[tuple[str, Any]]:
    for name, metric in {"read": _READ, "written": _WRITTEN}.items():
        if metric in numbers:
            yield f"{name}, B/el", round(numbers[metric] / ELEMENTS, 2)
    if _L2 in numbers:
        yield "into L2, B/el", round(32 * numbers[_L2] / ELEMENTS, 2)
    if numbers.get(_STORES):
        yield "sectors a store", round(numbers[_SECTORS] / numbers[_STORES], 1)
    if _INSTRUCTIONS in numbers:
        yield "instructions/el", round(32 * numbers[_INSTRUCTIONS] / ELEMENTS, 1)
    for name, metric in {"issuing, %": _ISSUES, "ALU, %": _ALU}.items():
        if metric in numbers:
            yield name, round(numbers[metric], 1)
    if numbers.get(_TIME):
        yield "us", round(numbers[_TIME] / 1e3, 1)
        yield "TB/s", round((numbers[_READ] + numbers[_WRITTEN]) / numbers[_TIME] / 1e3, 2)
    waits = {reason: round(numbers[metric], 1) for reason, metric in _WAITS.items() if metric in numbers}
    if waits:
        yield "warps wait for", waits


def count(journal: Journal) -> None:
    """Writes a line for each launch; where nothing can be read, one that says why."""
    for metrics in (_ALL, _FEW):  # a metric that this ncu does not know fails all
        found, says = read(metrics)
        for line in lines(found):
            journal.write("counters", **line)
        if found or "PATH" in says:
            break
    if not found:
        journal.write("counters", says=f"not counted: {says}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.counters", description=__doc__)
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().watched:
        watched(torch.device("cuda", 0))
    else:
        count(Journal.of_this_process("counters"))


if __name__ == "__main__":
    main()
