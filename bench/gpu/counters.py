"""Hardware counters of a step, where ncu (Nsight Compute) is there and may read them: bytes from and to memory,
instructions, how busy the issue slots and the ALU are, and what warps wait for. Not in the default order.
"""

from __future__ import annotations

import contextlib
import csv
import io
import shutil
import subprocess
import sys

import torch

from bench.gpu.card import card
from bench.gpu.journal import Journal
from bench.gpu.probe import FIRST, OTHERS, Case
from bench.gpu.runner import ROOT, python
from bench.shapes import flat
from bench.suites import Bench
from bench.suites.kernels import Kernels
from bench.workload import random_tensors

CASES = (*FIRST, *OTHERS)
ELEMENTS = 1 << 27
_REASONS = ("long_scoreboard", "short_scoreboard", "wait", "math_pipe_throttle", "not_selected", "lg_throttle")
METRICS = {  # name -> metric, and by what it is multiplied: an element's share of a total, or 1
    "read, B/el": ("dram__bytes_read.sum", 1 / ELEMENTS),
    "written, B/el": ("dram__bytes_write.sum", 1 / ELEMENTS),
    "into L2, B/el": ("lts__t_sectors_op_write.sum", 32 / ELEMENTS),
    "instructions/el": ("smsp__inst_executed.sum", 32 / ELEMENTS),
    "issuing, %": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1),
    "ALU, %": ("sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active", 1),
    **{f"waits: {name}": (f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio", 1) for name in _REASONS},
}


def main() -> None:
    own, bench, ncu = Journal("counters"), card(), shutil.which("ncu")
    if sys.argv[1:]:
        step_once(bench, CASES[int(sys.argv[1])], 40_000 if bench.quick else ELEMENTS)
        return
    if ncu is None and not bench.quick:
        own.write("left out", ok=False, reason="ncu (Nsight Compute) is not on the PATH")
        sys.exit(1)
    command = [ncu or "", "--csv", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off"]
    command += ["--metrics", ",".join(metric for metric, _ in METRICS.values()), "--kernel-name", "regex:step"]
    good = True
    for number, case in enumerate(CASES):
        watched = python("-m", "bench.gpu.counters", str(number))
        run = [*([] if bench.quick else command), *watched]
        done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT)
        found = counted(done.stdout)
        fine = done.returncode == 0 and (bool(found) or bench.quick)
        own.write("counters", what=case.name, **found, **({} if fine else {"ok": False, "says": done.stdout[-500:]}))
        good = good and fine
    sys.exit(0 if good else 1)


def step_once(bench: Bench, case: Case, elements: int) -> None:
    """Makes the step that ncu watches."""
    dtypes = ((case.params, 0.02), (case.grads, 1e-3))
    params, grads = (random_tensors(flat(elements), scale, dtype, bench.device) for dtype, scale in dtypes)
    kernels = Kernels(case.make([param.requires_grad_() for param in params], grads, bench.backends[0]))
    outcome = kernels.norm(grads)
    with contextlib.nullcontext() if bench.quick else torch.cuda.profiler.profile():
        kernels.step(grads, outcome)
        if not bench.quick:
            torch.cuda.synchronize(bench.device)


def counted(text: str) -> dict[str, float]:
    """Reads ncu's CSV; empty where there is none."""
    lines = text.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = csv.DictReader(io.StringIO("\n".join(lines[first:])))
    values = {row["Metric Name"]: float(row["Metric Value"].replace(",", "")) for row in rows}
    return {name: values[metric] * factor for name, (metric, factor) in METRICS.items()} if values else {}


if __name__ == "__main__":
    main()
