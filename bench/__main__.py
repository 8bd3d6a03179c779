"""`python -m bench [SUITE ...]`: the speed and memory of accumfused against the stock recipes, on this machine.

Close other programs first: on a loaded machine the figures say nothing. `python -m bench report FILE` draws a page of
results, `python -m bench compare A.json B.json` says what got slower or larger.
"""

from __future__ import annotations

import argparse
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
from bench.ceilings import Ceilings
from bench.clock import CudaClock, EnqueueClock
from bench.loops import CUDA_PIECE, PIECE, CpuLoops, CudaLoops
from bench.machine import gpu, machine, nvidia_smi
from bench.options import DTYPES, OptionError, backend, model_shapes, peer_names, threads
from bench.suites import CPU_SUITES, GPU_SUITES, Bench, all_suites
from bench.tables import Results, ceiling_table, show, write
from bench.verdicts import loss_lines

INTERRUPTED = 130  # the exit code after Ctrl-C
OPTIONS = ("backend", "dtype", "peers", "model")  # that suites follow, or not: FOLLOWS in each


def main() -> None:
    commands = {"report": report.main, "compare": compare.main}
    if sys.argv[1:] and sys.argv[1] in commands:
        sys.exit(commands[sys.argv[1]](sys.argv[2:]))
    parser = arguments()
    asked = parser.parse_args()
    try:
        suites = chosen_suites(asked)
        if asked.device == "cuda" and not torch.cuda.is_available():
            raise OptionError(f"--device cuda: torch {torch.__version__} finds no GPU that it can use")
        options = given(asked)
    except OptionError as error:
        parser.error(str(error))
    torch.set_num_threads(asked.threads or torch.get_num_threads())
    torch.manual_seed(0)
    console = Console(width=None if sys.stdout.isatty() else 160)
    bench = gpu_bench(asked.quick, console) if asked.device == "cuda" else cpu_bench(asked.quick)
    for name, value in options.items():
        setattr(bench, name, value)
    about = {**machine(), "quick": asked.quick, **(gpu(bench.device) if bench.on_gpu else {})}
    about["options"] = [f"--{name} {getattr(asked, name)}" for name in OPTIONS if getattr(asked, name) is not None]
    results = Results(about, {})
    console.print(
        results.where(), *(f"this run {words}" for words in compare.doubts(results)), sep="\n", highlight=False
    )
    status = run(suites, bench, results, asked.json, console)
    if status is not None:
        sys.exit(status)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = ", ".join(dict.fromkeys([*CPU_SUITES, *GPU_SUITES]))
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"one of {names}; default: all that fit the options")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what is measured; default: the CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE, after each suite")
    parser.add_argument("--threads", type=threads, metavar="N", help="torch.set_num_threads; default: torch's own")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    parser.add_argument("--backend", metavar="NAME", help=f"ours: {', '.join(NAMES)}; default: auto, or all of a GPU's")
    parser.add_argument("--dtype", choices=DTYPES, help="of the gradients")
    parser.add_argument("--peers", metavar="LIST", help="names with commas between them, none, or all (the default)")
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help="returns an nn.Module, or a list of shapes")
    return parser


def chosen_suites(asked: argparse.Namespace) -> dict[str, ModuleType]:
    """Returns the suites that were named, or all that follow the options.

    Raises:
        OptionError: there is no such suite, or a named one does not follow an option.
    """
    suites = all_suites(on_gpu=asked.device == "cuda")
    unknown = [name for name in asked.suites if name not in suites]
    if unknown:
        raise OptionError(f"unknown suite {unknown[0]} for {asked.device}; choose from {', '.join(suites)}")
    options = [option for option in OPTIONS if getattr(asked, option) is not None]
    for option in options:
        follow = [name for name, suite in suites.items() if option in suite.FOLLOWS]
        deaf = [name for name in asked.suites if name not in follow]
        if deaf:
            raise OptionError(f"--{option} makes no difference to {deaf[0]}; it does to {', '.join(follow)}")
    fitting = [name for name, suite in suites.items() if set(options) <= set(suite.FOLLOWS)]
    return {name: suites[name] for name in asked.suites or fitting}


def given(asked: argparse.Namespace) -> dict[str, Any]:
    """Returns the options as fields of `Bench`.

    Raises:
        OptionError: one cannot be followed.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if asked.device == "cuda" else torch.device("cpu")
    options: dict[str, Any] = {}
    if asked.backend is not None:
        options["backends"] = (backend(asked.backend, device),)
    if asked.dtype is not None:
        options["dtype"] = DTYPES[asked.dtype]
    if asked.peers is not None:
        options["peers"] = peer_names(asked.peers)
    if asked.model is not None:
        options["model"] = (asked.model, model_shapes(asked.model))
    return options


def cpu_bench(quick: bool) -> Bench:
    return Bench(Ceilings(lambda: CpuLoops((4 if quick else 2048) * PIECE)), quick, rounds=2 if quick else 5)


def gpu_bench(quick: bool, console: Console) -> Bench:
    """Returns the benchmark of the current GPU, of our backends that run there."""
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


def run(
    suites: Mapping[str, Any], bench: Bench, results: Results, path: Path | None, console: Console
) -> int | str | None:
    """Runs suites in turn, shows their tables, and writes the file after each: a later one may not come to its end.

    Returns what sys.exit takes: None, 130 after Ctrl-C, or which suites failed.
    """
    failed: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(suites))
        try:
            for name, suite in suites.items():
                progress.update(task, description=name)
                _one(name, suite, bench, results, failed, console)
                _save(path, bench, results)
                progress.advance(task)
        except KeyboardInterrupt:
            results.interrupted = True
            _save(path, bench, results)
    if results.interrupted:
        console.print(f"interrupted: {len(results.suites)} of {len(suites)} suites are complete")
    if bench.ceilings.reason or bench.ceilings.best_rates():
        show(ceiling_table(bench.ceilings), console)
    if path is not None:
        console.print(f"written to {path}", markup=False, highlight=False, soft_wrap=True)
    return INTERRUPTED if results.interrupted else f"failed: {', '.join(failed)}" if failed else None


def _one(name: str, suite: Any, bench: Bench, results: Results, failed: list[str], console: Console) -> None:
    try:
        results.suites[name] = suite.run(bench)
    except Exception:  # the others' figures are not lost
        failed.append(name)
        console.print(f"{name} failed:\n{traceback.format_exc()}", markup=False, highlight=False)
        return
    for table in results.suites[name]:
        show(table, console, loss_lines(table))
    if bench.on_gpu:
        results.machine[f"nvidia_smi_after_{name}"] = nvidia_smi()


def _save(path: Path | None, bench: Bench, results: Results) -> None:
    if path is not None:
        tables = {"ceilings": [ceiling_table(bench.ceilings)]} if bench.ceilings.best_rates() else {}
        write(path, Results(results.machine, {**results.suites, **tables}, results.interrupted))


if __name__ == "__main__":
    main()
