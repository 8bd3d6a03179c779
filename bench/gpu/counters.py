"""What the GPU itself counts in a step, where ncu (Nsight Compute) is there and may read it: bytes from and to memory,
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

from bench.gpu.cases import PACKED, PURE, Case
from bench.gpu.journal import Journal
from bench.gpu.probe import OTHERS, Kernels
from bench.gpu.runner import python
from bench.gpu.target import Target
from bench.shapes import flat
from bench.workload import random_tensors

CASES = (Case(), PACKED[0], PURE, *OTHERS)
_TOTALS = {  # name -> metric, and what one of it is, an element
    "read, B/el": ("dram__bytes_read.sum", 1),
    "written, B/el": ("dram__bytes_write.sum", 1),
    "into L2, B/el": ("lts__t_sectors_op_write.sum", 32),
    "instructions/el": ("smsp__inst_executed.sum", 32),
}
_SHARES = {
    "issuing, %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "ALU, %": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
}
_REASONS = ("long_scoreboard", "short_scoreboard", "wait", "math_pipe_throttle", "not_selected", "lg_throttle")
_WAITS = {name: f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in _REASONS}
_METRICS = [*(metric for metric, _ in _TOTALS.values()), *_SHARES.values(), *_WAITS.values()]


def main() -> None:
    own, target, ncu = Journal("counters"), Target(), shutil.which("ncu")
    elements = target.elements(1 << 27, 40)
    if sys.argv[1:]:
        step_once(target, CASES[int(sys.argv[1])], elements)
        return
    if ncu is None and not target.is_dry:
        own.write("left out", ok=False, reason="ncu (Nsight Compute) is not on the PATH")
        sys.exit(1)
    good = True
    for number, case in enumerate(CASES):
        command = [ncu or "ncu", "--csv", "--print-units", "base", "--clock-control", "none", "--profile-from-start"]
        command += ["off", "--metrics", ",".join(_METRICS), "--kernel-name", "regex:step"]
        watched = python("-m", "bench.gpu.counters", str(number))
        done = subprocess.run([*([] if target.is_dry else command), *watched], capture_output=True, text=True)
        found = counted(done.stdout, elements)
        fine = done.returncode == 0 and (bool(found) or target.is_dry)
        own.write("counters", what=case.name, **found, **({} if fine else {"ok": False, "says": done.stdout[-500:]}))
        good = good and fine
    sys.exit(0 if good else 1)


def step_once(target: Target, case: Case, elements: int) -> None:
    """What ncu runs."""
    dtypes = ((case.param_dtype, 0.02), (case.grads, 1e-3))
    params, grads = (random_tensors(flat(elements), scale, dtype, target.device) for dtype, scale in dtypes)
    work = Kernels(case, [param.requires_grad_() for param in params], grads, target.backend)
    outcome = work.norm(grads)
    target.synchronize()
    with contextlib.nullcontext() if target.is_dry else torch.cuda.profiler.profile():
        work.step(grads, outcome)
        target.synchronize()


def counted(text: str, elements: int) -> dict[str, object]:
    """The facts of ncu's CSV; none where it has none."""
    lines = text.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = csv.DictReader(io.StringIO("\n".join(lines[first:])))
    values = {row["Metric Name"]: float(row["Metric Value"].replace(",", "")) for row in rows}
    if not values:
        return {}
    facts: dict[str, object] = {name: values[metric] * each / elements for name, (metric, each) in _TOTALS.items()}
    facts |= {name: values[metric] for name, metric in _SHARES.items()}
    return facts | {"warps wait for": {name: values[metric] for name, metric in _WAITS.items()}}


if __name__ == "__main__":
    main()
