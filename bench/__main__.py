"""`python -m bench [SUITE ...]`: the speed and memory of accumfused against the stock recipes, on this machine.

Close other programs first: on a loaded machine the figures say nothing. `python -m bench report FILE` draws a page of
results, `python -m bench compare A.json B.json` says what got slower or larger.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

try:
    import rich  # noqa: F401
except ImportError:
    sys.exit("rich prints the figures, and is not installed; pip install --group bench or run make bench")

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from accumfused.backends import NAMES, why_not
from bench import compare, report
from bench.ceilings import PIECE, Ceilings, CpuLoops
from bench.machine import gpu, machine, nvidia_smi
from bench.shapes import Shapes
from bench.suites import CPU_SUITES, GPU_SUITES, Bench, all_suites, bench_of_gpu
from bench.tables import Results, ceiling_table, show, write
from bench.verdicts import losses
from bench.workload import CPU

INTERRUPTED = 130  # the exit code after Ctrl-C
OPTIONS = ("backend", "model")  # that suites follow, or not: FOLLOWS in each


def main() -> None:
    commands = {"report": report.main, "compare": compare.main}
    if sys.argv[1:] and sys.argv[1] in commands:
        sys.exit(commands[sys.argv[1]](sys.argv[2:]))
    parser = arguments()
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads or torch.get_num_threads())
    torch.manual_seed(0)
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        suites, bench = chosen_suites(asked), chosen_bench(asked, console)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    about = {**machine(), "quick": asked.quick, **(gpu(bench.device) if bench.on_gpu else {})}
    given = {"backend": asked.backend, "model": asked.model and asked.model[0]}
    about["options"] = [f"--{name} {value}" for name, value in given.items() if value is not None]
    results = Results(about, {})
    doubts = (f"this run {words}" for words in compare.doubts(results))
    console.print(results.where(), *doubts, sep="\n", highlight=False)
    if status := run(suites, bench, results, asked.json, console):
        sys.exit(status)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = ", ".join(dict.fromkeys([*CPU_SUITES, *GPU_SUITES]))
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"one of {names}; default: all that fit the options")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: the CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE, after each suite")
    parser.add_argument("--threads", type=int, metavar="N", help="torch.set_num_threads; default: torch's own")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    parser.add_argument("--backend", choices=NAMES, help="ours; default: auto, or all of a GPU's")
    parser.add_argument("--model", type=model, metavar="MODULE:FUNCTION", help="returns an nn.Module or list of shapes")
    return parser


def model(written: str) -> tuple[str, Shapes]:
    """Returns the name and the shapes of MODULE:FUNCTION's model."""
    module, _, function = written.partition(":")
    found = getattr(importlib.import_module(module), function)()
    if isinstance(found, torch.nn.Module):
        found = [param.shape for param in found.parameters() if param.requires_grad]
    shapes = [tuple(shape) for shape in found if math.prod(shape) > 0]
    if not shapes:
        raise argparse.ArgumentTypeError(f"{written} has no parameters that are trained")
    return written, shapes


def chosen_suites(asked: argparse.Namespace) -> dict[str, ModuleType]:
    """Returns the suites that were named, or all that follow the options."""
    suites = all_suites(on_gpu=asked.device == "cuda")
    options = [option for option in OPTIONS if getattr(asked, option) is not None]
    fitting = [name for name, suite in suites.items() if set(options) <= set(suite.FOLLOWS)]
    for name in asked.suites:
        if name not in suites:
            raise argparse.ArgumentTypeError(
                f"unknown suite {name} for {asked.device}; choose from {', '.join(suites)}"
            )
        if name not in fitting:
            raise argparse.ArgumentTypeError(f"{name} does not follow {options}; {', '.join(fitting)} do")
    return {name: suites[name] for name in asked.suites or fitting}


def chosen_bench(asked: argparse.Namespace, console: Console) -> Bench:
    """Returns the benchmark of the CPU, or of the current GPU with our backends that run there."""
    on_gpu = asked.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"--device cuda: torch {torch.__version__} finds no GPU that it can use")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else CPU
    names = [asked.backend] if asked.backend else ["cuda", "triton"] if on_gpu else ["auto"]
    reasons = {name: None if name == "auto" else why_not(name, device) for name in names}
    for name, reason in reasons.items():
        if reason is not None and asked.backend:
            raise argparse.ArgumentTypeError(f"--backend {name} cannot run: {' '.join(reason.split())}")
        if reason is not None:
            console.print(f"backend {name} is left out: {reason}", markup=False, highlight=False)
    backends = [name for name, reason in reasons.items() if reason is None]
    if on_gpu:
        bench = bench_of_gpu(device, backends, 2 if asked.quick else 15, quick=asked.quick)
    else:
        ceilings = Ceilings(lambda: CpuLoops((4 if asked.quick else 2048) * PIECE))  # 1 GiB, far beyond any cache
        bench = Bench(ceilings, asked.quick, 2 if asked.quick else 5, backends=backends)
    bench.model = asked.model
    return bench


def run(
    suites: Mapping[str, Any], bench: Bench, results: Results, path: Path | None, console: Console
) -> int | str | None:
    """Runs suites in turn, shows their tables, and writes the file after each: a later one may not come to its end.

    Returns what sys.exit takes: None, 130 after Ctrl-C, or which suites failed.
    """
    failed: list[str] = []

    def save() -> None:
        ceilings = {"ceilings": [ceiling_table(bench.ceilings)]} if bench.ceilings.rates else {}
        if path is not None:
            write(path, Results(results.machine, {**results.suites, **ceilings}, results.interrupted))

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=len(suites))
            for name, suite in suites.items():
                progress.update(task, description=name)
                try:
                    results.suites[name] = suite.run(bench)
                except Exception:  # the others' figures are not lost
                    failed.append(name)
                    console.print(f"{name} failed:\n{traceback.format_exc()}", markup=False, highlight=False)
                for table in results.suites.get(name, ()):
                    show(table, console, [f"{each.name}: {each.words()} ({each.heading})" for each in losses(table)])
                if bench.on_gpu:
                    results.machine[f"nvidia_smi_after_{name}"] = nvidia_smi()
                progress.advance(task)
                save()
    except KeyboardInterrupt:
        results.interrupted = True
        save()
    if results.interrupted:
        console.print(f"interrupted: {len(results.suites)} of {len(suites)} suites are complete")
    if bench.ceilings.reason or bench.ceilings.rates:
        show(ceiling_table(bench.ceilings), console)
    if path is not None:
        console.print(f"written to {path}", markup=False, highlight=False, soft_wrap=True)
    return INTERRUPTED if results.interrupted else f"failed: {', '.join(failed)}" if failed else None


if __name__ == "__main__":
    main()
