"""`python -m bench [SUITE ...]`: the speed and memory of accumfused against the stock recipes, on this machine.

Every suite interleaves its variants and reports medians. Close other programs first: on a loaded machine the figures
say nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

try:
    import rich  # noqa: F401
except ImportError:
    sys.exit(
        "the benchmarks print with rich, which is not installed; pip install 'accumfused[bench]' or run make bench"
    )

import torch
from rich.console import Console

from bench.ceilings import PIECE, Ceilings
from bench.report import Table, ceiling_table, machine, show, write_json
from bench.suites import Bench, all_suites


def main() -> None:
    suites = all_suites()
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"one of {', '.join(suites)}; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured to FILE")
    parser.add_argument("--threads", type=int, help="torch.set_num_threads; default: torch's own")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.suites if name not in suites]
    if unknown:
        parser.error(f"unknown suite {', '.join(unknown)}; choose from {', '.join(suites)}")
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)

    console = Console(width=None if sys.stdout.isatty() else 160)
    torch.manual_seed(0)
    about = machine()
    console.print(f"{about['cpu']}, {about['threads']} threads, {about['instruction_set']}, torch {about['torch']},")
    console.print(f"accumfused {about['accumfused']}, {about['system']}, {about['date']}\n")
    if about["load"] > 0.5:
        console.print(f"the machine is not idle: its load was {about['load']:.1f} in the minute before\n")
    if chosen.quick:
        console.print("--quick: tiny sizes, the figures mean nothing\n")

    ceilings = Ceilings(4 * PIECE) if chosen.quick else Ceilings()
    bench = Bench(ceilings, chosen.quick, rounds=2 if chosen.quick else 9)
    found: dict[str, list[Table]] = {}
    start = time.perf_counter()
    for name in chosen.suites or suites:
        found[name] = suites[name](bench)
        for table in found[name]:
            show(table, console)
    if ceilings.best_rates() or ceilings.reason:
        found["ceilings"] = [ceiling_table(ceilings)]
        show(found["ceilings"][0], console)
    console.print(f"{time.perf_counter() - start:.0f} s")
    if chosen.json is not None:
        write_json(chosen.json, {**about, "quick": chosen.quick}, found)


if __name__ == "__main__":
    main()
