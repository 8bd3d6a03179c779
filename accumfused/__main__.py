"""`accumfused doctor`, or `accumfused`, lists the backends that run here, and why others do not.

`accumfused audit train.py` says whether a script's updates are those of the large batch.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import accumfused
from accumfused import compiled
from accumfused.auditing import script, swap
from accumfused.backends import COSTS, NAMES, why_not
from accumfused.optimizers import PEERS

OTHER_PACKAGES = ("numpy", "triton", "transformers", "accelerate", "lightning", "pytorch-lightning")


def report() -> dict[str, Any]:
    """Returns the report as plain data; `--json` prints it."""
    backends = {name: why_not(name) for name in NAMES if name != "auto"}  # None: runs
    return {
        "versions": {
            "accumfused": accumfused.__version__,
            "python": f"{platform.python_version()} ({platform.python_implementation()})",
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "compiler": getattr(compiled.module, "COMPILER", None),
            "GPU kernels": cuda_kernels(),
            **{name: installed(name) for name in OTHER_PACKAGES},
            "system": platform.platform(),
            "installed in": str(Path(accumfused.__file__).parent),
        },
        "backends": backends,
        "next": advice(backends),
        "instruction_sets": compiled.module.instruction_sets()
        if compiled.module is not None
        else [],  # the first is used
        "threads": torch.get_num_threads(),
        "devices": {
            "cpu": processor(),
            **{f"cuda:{i}": torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())},
        },
    }


def advice(backends: dict[str, str | None]) -> str:
    """Says in one line what the user can do next."""
    reason, otherwise = compiled.unavailable, "install a C++ compiler (g++ or clang++), then accumfused again"
    if reason is None and torch.cuda.is_available():
        reason, otherwise = backends["cuda"], "nothing: the kernels for this GPU are Triton's"
    if reason is not None:
        return reason.partition("; ")[2].partition("\n")[0].rstrip(":)") or otherwise
    if not torch.cuda.is_available() and shutil.which("nvidia-smi"):
        return f"torch {torch.__version__} finds no GPU; nvidia-smi shows its driver, pytorch.org the torch for it"
    return "nothing: the fastest kernels for this machine are in use"


def installed(package: str) -> str | None:
    """Looks up the version of a package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cuda_kernels() -> str | None:
    """Names the compiler of the CUDA kernels, and the compute capabilities that they serve."""
    kernels = getattr(compiled.module, "cuda", None)
    return None if kernels is None else f"CUDA {kernels.COMPILER} for compute capabilities {kernels.ARCHS}"


def processor() -> str:
    """Looks up the CPU's name: platform.processor() is empty on most Linux systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def as_text(facts: dict[str, Any]) -> str:
    rows = [(name, version) for name, version in facts["versions"].items() if version is not None]
    rows += [("threads", str(facts["threads"])), *facts["devices"].items()]
    best, *others = facts["instruction_sets"] or ["none: there is no native module"]
    rows.append(("instruction sets", ", ".join([f"{best} (used)" if facts["instruction_sets"] else best, *others])))
    lines = [f"{name:<18}{value}" for name, value in rows]
    lines += ["", 'backends, in the order in which backend="auto" prefers them:']
    for name, reason in facts["backends"].items():
        runs = f"runs ({COSTS[name]})" if name in COSTS else "runs"
        lines.append(f"  {name:<8}{runs if reason is None else 'does not run: ' + indented(reason)}")
    place = "to report an error: put these lines into an issue at the repository that your copy came from"
    return "\n".join([*lines, "", place, f"what to do next: {facts['next']}"])


def indented(reason: str) -> str:
    first, _, rest = reason.partition("\n")
    return first + ("\n" + textwrap.indent(rest, " " * 10) if rest else "")


def parser() -> argparse.ArgumentParser:
    """The command line: `doctor`, also without a word, and `audit`."""
    text = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(prog="accumfused", description=__doc__, formatter_class=text)
    made.add_argument("--version", action="version", version=f"accumfused {accumfused.__version__}")
    made.add_argument("--json", action="store_true", help="doctor's report as JSON")
    commands = made.add_subparsers(dest="command", metavar="{doctor,audit}")
    doctor = commands.add_parser(
        "doctor",
        help="list the backends that run here, and why others do not",
        description="Lists the backends that run here, and why others do not. Put its output into a bug report.",
        epilog="example:\n  accumfused doctor --json",
        formatter_class=text,
    )
    doctor.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="the same as JSON")
    audit = commands.add_parser(
        "audit",
        help="say whether a script's updates are those of the large batch",
        description="Runs a script unchanged, watches its first steps, says whether they are those of the large "
        "batch,\nand ends it at once: none of its finally: blocks and atexit handlers runs.",
        epilog="examples:\n  accumfused audit train.py --epochs 1\n  accumfused audit --steps 50 train.py\n"
        "  accumfused audit --micro-batches 4 --ignore batch_norm train.py\n"
        "  accumfused audit --swap train.py\n  torchrun --nproc-per-node 2 -m accumfused audit train.py\n\n"
        "exit codes:\n  0  the large batch's update, or one whose other length has no fault that could be named\n"
        "  1  another update, or a fault that was named; --swap: losses differ\n  2  a wrong command line\n"
        "  3  the audit cannot tell, or no step was seen\n  4  the script failed",
        formatter_class=text,
    )
    script.add_arguments(audit)
    return made


def main(arguments: list[str] | None = None) -> None:
    commands = parser()
    given = commands.parse_args(arguments)
    if given.command != "audit":
        facts = report()
        script.say(json.dumps(facts, indent=2) if given.json else as_text(facts))
        return
    if not Path(given.script).is_file():
        commands.error(f"audit: there is no file {given.script}")
    command = [given.script, *given.rest]
    if given.swap:
        sys.exit(swap.compare(command, PEERS))
    sys.exit(script.watch_script(command, given.steps, given.micro_batches, {*given.ignore}, given.picture))


if __name__ == "__main__":
    main()
