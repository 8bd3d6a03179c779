"""`python -m bench [SUITE ...]`: the speed and memory of accumfused against the stock recipes, on this machine.

Every suite interleaves its variants and reports medians. Close other programs first: on a loaded machine the figures
say nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

try:
    import rich  # noqa: F401
except ImportError:
    sys.exit(
        "the benchmarks print with rich, which is not installed; pip install 'accumfused[bench]' or run make bench"
    )

import torch
from rich.console import Console

from accumfused.backends import why_not
from bench.ceilings import Ceilings
from bench.clock import CudaClock, EnqueueClock
from bench.loops import CUDA_PIECE, PIECE, CpuLoops, CudaLoops
from bench.machine import gpu, machine, nvidia_smi
from bench.report import Table, ceiling_table, show, write_json
from bench.suites import Bench, all_suites


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = ", ".join(dict.fromkeys([*all_suites(), *all_suites(on_gpu=True)]))
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"one of {names}; default: all of the device's")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what is measured; default: the CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured to FILE")
    parser.add_argument("--threads", type=int, help="torch.set_num_threads; default: torch's own")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    chosen = parser.parse_args()
    on_gpu = chosen.device == "cuda"
    suites = all_suites(on_gpu)
    unknown = [name for name in chosen.suites if name not in suites]
    if unknown:
        parser.error(f"unknown suite {', '.join(unknown)} for {chosen.device}; choose from {', '.join(suites)}")
    if on_gpu and not torch.cuda.is_available():
        sys.exit(
            f"--device cuda: torch {torch.__version__} finds no GPU that it can use; python -m accumfused says more"
        )
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)

    console = Console(width=None if sys.stdout.isatty() else 160)
    torch.manual_seed(0)
    about = machine()
    console.print(f"{about['cpu']}, {about['threads']} threads, {about['instruction_set']}, torch {about['torch']},")
    console.print(f"accumfused {about['accumfused']}, {about['system']}, {about['date']}")
    if on_gpu:
        bench = gpu_bench(chosen.quick, console)
        about.update(gpu(bench.device), nvidia_smi_after={})
        console.print(
            f"{about['gpu']}, {about['multiprocessors']} multiprocessors, {about['l2_bytes'] / 1e6:.0f} MB L2,"
        )
        console.print(f"CUDA {about['cuda']}, Triton {about['triton']}, {about['nvidia_smi']}")
    else:
        loops = CpuLoops if not chosen.quick else lambda: CpuLoops(4 * PIECE)
        bench = Bench(Ceilings(loops), chosen.quick, rounds=2 if chosen.quick else 9)
    console.print()
    if about["load"] > 0.5:
        console.print(f"the machine is not idle: its load was {about['load']:.1f} in the minute before\n")
    if chosen.quick:
        console.print("--quick: tiny sizes, the figures mean nothing\n")

    found: dict[str, list[Table]] = {}
    failed = []

    def save() -> None:
        if chosen.json is not None:
            write_json(chosen.json, {**about, "quick": chosen.quick}, found)

    start = time.perf_counter()
    for name in chosen.suites or suites:
        began = time.perf_counter()
        try:
            found[name] = suites[name](bench)
        except Exception:  # the others' figures are not lost
            failed.append(name)
            console.print(f"{name} failed:\n{traceback.format_exc()}", markup=False, highlight=False)
            continue
        for table in found[name]:
            show(table, console)
        if on_gpu:
            about["nvidia_smi_after"][name] = nvidia_smi()
            console.print(f"{name}: {time.perf_counter() - began:.0f} s\n")
        save()  # now already: a later suite may not come to its end
    if bench.ceilings.best_rates() or bench.ceilings.reason:
        found["ceilings"] = [ceiling_table(bench.ceilings)]
        show(found["ceilings"][0], console)
    console.print(f"{time.perf_counter() - start:.0f} s")
    save()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def gpu_bench(quick: bool, console: Console) -> Bench:
    """The benchmark of the current GPU: of what runs there."""
    device = torch.device("cuda", torch.cuda.current_device())
    reasons = {name: why_not(name, device) for name in ("cuda", "triton")}
    for name, reason in reasons.items():
        if reason is not None:
            console.print(f"backend {name} is left out: {reason}", markup=False, highlight=False)
    clock = CudaClock(device)
    ceilings = Ceilings(lambda: CudaLoops(device, (16 if quick else 2048) * CUDA_PIECE), clock)
    return Bench(
        ceilings, quick, 2 if quick else 15, on_gpu=True, device=device, clock=clock, host_clock=EnqueueClock(device),
        backends=[name for name, reason in reasons.items() if reason is None],
    )  # fmt: skip


if __name__ == "__main__":
    main()
