"""`python -m bench [SUITE ...]`: the speed and memory of accumfused against the stock recipes, on this machine.

Every suite interleaves its variants and reports medians. Close other programs first: on a loaded machine the figures
say nothing. `python -m bench report FILE ...` makes a page of results, `python -m bench compare A.json B.json` says
what got slower or larger.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

try:
    import rich  # noqa: F401
except ImportError:
    sys.exit("the benchmarks print with rich, which is not installed; pip install '.[bench]' or run make bench")

import torch
from rich.console import Console

from accumfused.backends import NAMES, why_not
from bench import compare, page
from bench.ceilings import Ceilings
from bench.clock import CudaClock, EnqueueClock
from bench.command import Run
from bench.loops import CUDA_PIECE, PIECE, CpuLoops, CudaLoops
from bench.machine import gpu, machine
from bench.options import DTYPES, OptionError, backend, chosen, model_shapes, peer_names, threads
from bench.stored import BUSY, place
from bench.suites import Bench, all_suites

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"report": page.main, "compare": compare.main}


def main() -> None:
    if sys.argv[1:] and sys.argv[1] in COMMANDS:
        sys.exit(COMMANDS[sys.argv[1]](sys.argv[2:]))
    parser = arguments()
    asked = parser.parse_args()
    on_gpu = asked.device == "cuda"
    suites = all_suites(on_gpu)
    unknown = [name for name in asked.suites if name not in suites]
    if unknown:
        parser.error(f"unknown suite {', '.join(unknown)} for {asked.device}; choose from {', '.join(suites)}")
    if on_gpu and not torch.cuda.is_available():
        sys.exit(
            f"--device cuda: torch {torch.__version__} finds no GPU that it can use; python -m accumfused says more"
        )
    try:
        options = given(asked)
    except OptionError as error:
        parser.error(str(error))
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)

    console = Console(width=None if sys.stdout.isatty() else 160)
    torch.manual_seed(0)
    about = machine()
    console.print(f"{about['cpu']}, {about['threads']} threads, {about['instruction_set']}, torch {about['torch']},")
    console.print(f"accumfused {about['accumfused']}, {about['system']}, {about['date']}")
    if on_gpu:
        bench = gpu_bench(asked.quick, console)
        about.update(gpu(bench.device), nvidia_smi_after={})
        console.print(
            f"{about['gpu']}, {about['multiprocessors']} multiprocessors, {about['l2_bytes'] / 1e6:.0f} MB L2,"
        )
        console.print(f"CUDA {about['cuda']}, Triton {about['triton']}, {about['nvidia_smi']}")
    else:
        loops = CpuLoops if not asked.quick else lambda: CpuLoops(4 * PIECE)
        bench = Bench(Ceilings(loops), asked.quick, rounds=2 if asked.quick else 5)
    if options["given"]:
        about["options"] = list(options["given"].values())
    console.print()
    if about["load"] > BUSY:
        console.print(f"the machine is not idle: its load was {about['load']:.1f} in the minute before\n")
    if asked.quick:
        console.print("--quick: tiny sizes, the figures mean nothing\n")
    path = None if asked.json is None else place(asked.json, about)
    run = Run(chosen(bench, **options), about, path, console)
    status = run.run({name: suites[name] for name in asked.suites or suites})
    if status is not None:
        sys.exit(status)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = ", ".join(dict.fromkeys([*all_suites(), *all_suites(on_gpu=True)]))
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"one of {names}; default: all of the device's")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what is measured; default: the CPU")
    parser.add_argument(
        "--json", metavar="FILE",
        help="write everything that was measured to FILE, or to <machine>/<date>.json in a folder (FOLDER/)",
    )  # fmt: skip
    parser.add_argument("--threads", type=threads, metavar="N", help="torch.set_num_threads; default: torch's own")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    parser.add_argument(
        "--backend", metavar="NAME", help=f"ours: {', '.join(NAMES)}; default: auto, and on a GPU all that run there"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the gradients, where a suite has a choice")
    parser.add_argument("--peers", metavar="LIST", help="names with commas between them, none, or all (the default)")
    parser.add_argument(
        "--model", metavar="MODULE:FUNCTION",
        help="returns an nn.Module or a list of shapes, which take the place of the suites' models",
    )  # fmt: skip
    return parser


def given(asked: argparse.Namespace) -> dict[str, Any]:
    """The options as `bench.options.Chosen` takes them.

    Raises:
        OptionError: one cannot be followed.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if asked.device == "cuda" else torch.device("cpu")
    options: dict[str, Any] = {}
    texts: dict[str, str] = {}
    if asked.backend is not None:
        options["backends"] = (backend(asked.backend, device),)
        texts["backends"] = f"--backend {asked.backend}"
    if asked.dtype is not None:
        options["dtype"] = DTYPES[asked.dtype]
        texts["dtype"] = f"--dtype {asked.dtype}"
    if asked.peers is not None:
        options["peers"] = peer_names(asked.peers)
        texts["peers"] = f"--peers {asked.peers}"
    if asked.model is not None:
        options.update(model_shapes=model_shapes(asked.model), model_name=asked.model)
        texts["model_shapes"] = f"--model {asked.model}"
    return {**options, "given": texts}


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
