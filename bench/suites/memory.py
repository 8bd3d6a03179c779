"""Peak memory of a step and of a window beyond parameters, gradients, accumulators and states.

From the kernel's own count of resident pages (VmHWM, reset before each run), so that C++ and Python are in it as
well as tensors. Each variant runs in a process of its own: what one has freed must not serve the next. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench import shapes, stock
from bench.report import Column, Table
from bench.suites import Bench
from bench.suites.window import set_grad_dtype, window
from bench.workload import Workload

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def run(bench: Bench) -> list[Table]:
    columns = [
        Column("name", ""),
        Column("first_megabytes", "first, MB", "{:.2f}"),
        Column("later_megabytes", "later, MB", "{:.2f}"),
    ]
    table = Table(f"memory: peak beyond parameters, gradients, accumulators and states, {shapes.GPT2_BLOCKS}", columns)
    if not _RESET.exists():
        table.notes.append("left out: this system does not report a peak that can be reset (/proc/self/clear_refs)")
        return [table]
    command = [sys.executable, "-m", "bench.suites.memory", *(["--quick"] if bench.quick else [])]
    command += ["--threads", str(torch.get_num_threads())]

    def measured(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, name], capture_output=True, text=True, cwd=Path(__file__).parents[2])

    with ThreadPoolExecutor(2) as pool:  # nothing is timed
        results = list(pool.map(measured, VARIANTS))
    for name, done in zip(VARIANTS, results, strict=True):
        if done.returncode != 0:
            table.notes.append(f"{name}: failed: {done.stderr.strip().splitlines()[-1]}")
            continue
        first, later = json.loads(done.stdout)
        table.rows.append({"name": name, "first_megabytes": first, "later_megabytes": later})
    table.notes.append(
        "first: with the optimizer's tables (states and, where there are any, kept accumulators are there before); "
        "the kernel counts pages per thread, to about 0.25 MB"
    )
    return [table]


# What is measured, and what runs before it so that kept accumulators are there.
Prepared = tuple[Callable[[], object], Callable[[], object] | None]


def _step(kind: str) -> Callable[[Workload], Prepared]:
    def prepare(work: Workload) -> Prepared:
        work.set_grads()
        if kind == "ours":
            return work.ours().step, None
        optimizer = work.stock(fused=kind == "fused", foreach=kind == "foreach")
        return stock.clip_and_step(work.params, optimizer), None

    return prepare


def _window(dtype: torch.dtype) -> Callable[[Workload], Prepared]:
    def prepare(work: Workload) -> Prepared:
        optimizer = work.ours()
        set_grad_dtype(work.params, dtype)
        if dtype == torch.float32:
            return window(work, optimizer, [work.grads, work.random()]), None
        run = window(work, optimizer, [work.random(dtype=dtype) for _ in range(2)])
        return run, run  # the accumulators are made by the first window and kept

    return prepare


VARIANTS = {
    "clip + AdamW(fused), step": _step("fused"),
    "clip + AdamW(foreach), step": _step("foreach"),
    "accumfused, step from p.grad": _step("ours"),
    "accumfused, window of fp32 gradients": _window(torch.float32),
    "accumfused, window of bf16 gradients": _window(torch.bfloat16),
}


def peak_megabytes(run: Callable[[], object]) -> float:
    """How far the resident pages rise above where they were, during the call."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # pages that were freed must not hide new ones
    _RESET.write_text("5")
    before = _kilobytes("VmRSS")
    run()
    return (_kilobytes("VmHWM") - before) * 1024 / 1e6


def _kilobytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.ones(1 << 20).mul(2)  # the threads' own stacks are not the optimizer's
    # Another optimizer has stepped before: what the first call of its kind loads is not the tail's memory.
    VARIANTS[chosen.variant](Workload(shapes.small(4)))[0]()
    work = Workload(shapes.model(shapes.GPT2_BLOCKS, chosen.quick))
    run, before = VARIANTS[chosen.variant](work)
    if before is not None:
        before()
    print(json.dumps([peak_megabytes(run), peak_megabytes(run)]))


if __name__ == "__main__":
    main()
