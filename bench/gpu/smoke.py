"""Are the bits of the backends for GPUs those of the CPU, and does any launch hang? `checks` has what is compared.

First a ladder: the first checks run in a process of their own for plain launches, and then with one mechanism more each
time. A mechanism whose process hangs, dies or finds other bits stays off, here and in all later stages. All other
checks follow in one process, which begins again after a check that hangs or leaves the GPU unusable.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from accumfused import compiled
from accumfused.backends import why_not
from bench.gpu import journal, runner
from bench.gpu.checks import LARGE, SIZES, TINY, Check, Found, Place, checks, differences, own_expectation
from bench.gpu.journal import Journal
from bench.gpu.runner import python, watch
from bench.gpu.target import LAUNCHES, MECHANISMS, Target

QUIET = 20.0  # seconds in which a check is done
_LONG = 600.0  # the stage's own limit comes before
_UNUSABLE = 70  # the exit code

Job = tuple[str, Any, Check]  # a backend's name, the backend, and what it has to do


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.smoke", description=__doc__)
    parser.add_argument("--first", action="store_true", help="only compare, the first checks")
    parser.add_argument("--from", type=int, dest="start", metavar="N", help="only compare, all others from the N-th on")
    asked = parser.parse_args()
    own = Journal("smoke")
    if asked.first or asked.start is not None:
        target = Target.here()
        own.write("so far", number=asked.start or 0, begins="the process")
        sys.exit(0 if compare_all(own, target, jobs(target, first=asked.first), asked.start or 0) else 1)
    if own.path is None:
        sys.exit("smoke needs a journal: python -m bench.gpu smoke")
    good = climb(own, python("-m", "bench.gpu.smoke"), QUIET)
    sys.exit(0 if go_through(own, python("-m", "bench.gpu.smoke"), QUIET) and good else 1)


def climb(own: Journal, program: Sequence[str], quiet: float) -> bool:
    """Tries plain launches and then each mechanism; writes which ones stay on. Whether none hung or was wrong."""
    assert own.path is not None
    on: list[str] = []
    good = True
    for rung in ("plain", *MECHANISMS):
        asked = [*on, *([] if rung == "plain" else [rung])]
        outcome = watch([*program, "--first"], own.path, _LONG, quiet=quiet, known={LAUNCHES: ",".join(asked)})
        own.write("ladder", ok=outcome == "passed", rung=rung, outcome=outcome, **_last(own))
        good = good and outcome == "passed"
        if outcome == "passed":
            on = asked
        elif rung == "plain":
            break  # there is nothing to switch off
    own.write("mechanisms", on=on)
    return good


def go_through(own: Journal, program: Sequence[str], quiet: float) -> bool:
    """Runs all other checks. Whether all bits are equal."""
    assert own.path is not None
    start, good = 0, True
    while True:
        known = runner.launches(own.path)
        outcome = watch([*program, "--from", str(start)], own.path, _LONG, quiet=3 * quiet, known=known)  # Triton compiles
        if outcome in ("passed", "failed (1)"):
            return good and outcome == "passed"
        last = _last(own)
        own.write("bits", ok=False, error=outcome, **last)
        if last.get("begins") == "the process":
            return False
        start, good = last["number"] + 1, False


def _last(own: Journal) -> dict[str, Any]:
    """Where the process was."""
    assert own.path is not None
    lines = [line for line in journal.read(own.path) if (line["stage"], line["kind"]) == (own.stage, "so far")]
    return {name: lines[-1][name] for name in ("number", "begins") if name in lines[-1]} if lines else {}


def jobs(target: Target, *, first: bool) -> list[Job]:
    """What a process has to do: the first checks on the CUDA kernels, or all others on all backends."""
    backends = [(getattr(target.backend, "name", target.backend), target.backend)]
    if not target.is_dry:
        backends = [(name, name) for name in ("cuda", "triton") if why_not(name, target.device) is None]
    found = []
    for name, backend in backends[: 1 if first else None]:
        for check in checks():
            fits = (check.brief or name != "triton") and not (check.needs_gpu and target.is_dry)
            if fits and (check.first if first else name == "triton" or not check.first):
                found.append((name, backend, check))
    return found


def compare_all(own: Journal, target: Target, several: Sequence[Job], start: int = 0) -> bool:
    """Whether all bits are equal. Args: start: how many comparisons are done."""
    known: dict[str, Found] = {}
    good = True
    for number, (name, backend, check) in enumerate(several[start:], start=start):
        own.write("so far", number=number, of=len(several), begins=f"{check.name}, {name}")
        facts = compare(target, backend, check, known)
        if facts.get("differences"):
            facts["right without"] = _culprits(target, backend, check, known)
        own.write("bits", check=check.name, backend=name, launches="+".join(target.mechanisms) or "plain", **facts)
        good = good and facts["ok"]
        if "error" in facts and not target.is_dry and not _usable(target.device):
            sys.exit(_UNUSABLE)
    return good


def compare(target: Target, backend: Any, check: Check, known: dict[str, Found]) -> dict[str, Any]:
    """One line of the report. Args: known: what the CPU has given, by check."""
    began = time.perf_counter()
    sizes, large = (TINY, 3 * TINY[-1]) if target.is_dry else (SIZES, LARGE)
    try:
        found = check.run(Place(backend, target.device, sizes, large))
        expected = own_expectation(found) or known.get(check.name)
        if expected is None:
            cpu = "torch" if compiled.module is None else "cpu"
            expected = known[check.name] = check.run(Place(cpu, torch.device("cpu"), sizes, large))
        differ = differences(found, expected)
    except Exception as error:
        says = f"{type(error).__name__}: {error}".split("\n")[0]
        return {"ok": False, "error": says, "trace": traceback.format_exc()}
    facts: dict[str, Any] = {"ok": not differ, "seconds": round(time.perf_counter() - began, 3)}
    return facts | ({"differences": len(differ), "first": differ[0], "all": "\n".join(map(str, differ))} if differ else {})


def _culprits(target: Target, backend: Any, check: Check, known: dict[str, Found]) -> list[str]:
    """The mechanisms without which the bits are right."""
    found = []
    for name in target.mechanisms:
        target.allow({*target.mechanisms} - {name})
        found += [name] if compare(target, backend, check, known)["ok"] else []
    target.allow(target.mechanisms)
    return found


def _usable(device: torch.device) -> bool:
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).sum().item()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    main()
