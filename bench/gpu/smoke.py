"""Are the bits of the backends for GPUs those of the CPU, and does any launch hang? `checks` has what is compared.

A ladder: each rung is a process that makes all checks, first with plain launches, then with one mechanism more. A rung
that hangs, dies or finds other bits so names its mechanism, which stays off in all later stages. The last is Triton.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from accumfused import compiled
from accumfused.backends import why_not
from bench.gpu import journal
from bench.gpu.checks import LARGE, SIZES, TINY, Check, Place, checks, differences, own_expectation
from bench.gpu.journal import Journal
from bench.gpu.runner import LAUNCHES, python, watch
from bench.gpu.target import MECHANISMS, Target

QUIET = 20.0  # seconds for a check
_LONG = 600.0  # the stage's own limit comes before
_DIFFERS, _UNUSABLE = 3, 70  # exit codes; 1 is an error of the program itself


def main() -> None:
    own, target = Journal("smoke"), Target()
    if sys.argv[1:] == ["triton"]:
        sys.exit(0 if compare_all(own, target, "triton", [check for check in checks() if check.brief]) else _DIFFERS)
    if sys.argv[1:]:
        several = [check for check in checks() if not (check.needs_gpu and target.is_dry)]
        sys.exit(0 if compare_all(own, target, target.backend, several) else _DIFFERS)
    names = () if target.is_dry else ("cuda", "triton")
    reasons = {name: why for name in names if (why := why_not(name, target.device)) is not None}
    for name, reason in reasons.items():
        own.write("left out", ok=False, backend=name, reason=reason)
    rungs = [*(() if "cuda" in reasons else ("plain", *MECHANISMS)), *(names if "triton" not in reasons else ())[1:]]
    sys.exit(0 if climb(own, python("-m", "bench.gpu.smoke"), rungs, QUIET) and not reasons else 1)


def climb(own: Journal, program: Sequence[str], rungs: Sequence[str], quiet: float) -> bool:
    """Makes the rungs in turn, and writes which mechanisms stay on. Whether all are right.

    Args:
        program: makes one rung, whose name is the last argument.
        quiet: seconds for a check; Triton, which compiles, has three times as many.
    """
    assert own.path is not None
    on: list[str] = []
    wrong: dict[str, set[str]] = {}  # a rung's checks
    good = True
    own.write("mechanisms", on=on)  # if the time is up before the first rung has ended
    for rung in rungs:
        asked = [*on, rung] if rung in MECHANISMS else on
        begin = len(journal.read(own.path))
        longest = 3 * quiet if rung == "triton" else quiet
        outcome = watch([*program, rung], own.path, _LONG, quiet=longest, known={LAUNCHES: ",".join(asked)})
        lines = journal.read(own.path)[begin:]
        wrong[rung] = {line["check"] for line in lines if line["kind"] == "bits" and not line["ok"]}
        last = [line["begins"] for line in lines if line["kind"] == "so far"][-1:]
        own.write("rung", ok=outcome == "passed", rung=rung, outcome=outcome, **({"at check": last[0]} if last else {}))
        # What plain launches have wrong, too, is not the mechanism's.
        if outcome == "passed" or (outcome == f"failed ({_DIFFERS})" and wrong[rung] <= wrong[rungs[0]]):
            on = asked
        good = good and outcome == "passed"
        own.write("mechanisms", on=on, off=[name for name in MECHANISMS if name in wrong and name not in on])
    return good


def compare_all(own: Journal, target: Target, backend: Any, several: Sequence[Check]) -> bool:
    """Whether all bits are equal."""
    launches, good = "+".join(target.mechanisms) or "plain", True
    name = getattr(backend, "name", backend)
    for number, check in enumerate(several):
        own.write("so far", number=number, of=len(several), begins=check.name)
        facts = compare(target, backend, check)
        own.write("bits", check=check.name, backend=name, launches=launches, **facts)
        good = good and facts["ok"]
        if "error" in facts and not _usable(target):
            sys.exit(_UNUSABLE)
    return good


def _usable(target: Target) -> bool:
    """False after an error that every later call would repeat."""
    try:
        return target.is_dry or torch.zeros(1, device=target.device).sum().item() == 0
    except RuntimeError:
        return False


def compare(target: Target, backend: Any, check: Check) -> dict[str, Any]:
    """One line of the report."""
    began = time.perf_counter()
    sizes = (TINY, (3 * TINY[-1],)) if target.is_dry else (SIZES, LARGE)
    try:
        found = check.run(Place(backend, target.device, *sizes))
        expected = own_expectation(found)
        if not expected:
            cpu = "torch" if compiled.module is None else "cpu"
            expected = check.run(Place(cpu, torch.device("cpu"), *sizes))
        differ = differences(found, expected)
    except Exception as error:
        return {"ok": False, **journal.told(error)}
    facts: dict[str, Any] = {"ok": not differ, "seconds": round(time.perf_counter() - began, 3)}
    return facts | ({"tensors": len(differ), **differ[0], "all": "\n".join(map(str, differ))} if differ else {})


if __name__ == "__main__":
    main()
