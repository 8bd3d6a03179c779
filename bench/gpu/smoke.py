"""Are the bits of the backends for GPUs those of the reference, and does any launch hang?

A ladder: each rung is a process with the conformance tests of the kernels, first with plain launches, then with one
mechanism more. A rung that hangs, dies or finds other bits so names its mechanism, which stays off in all later stages.
The last rung is Triton.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch

from accumfused.backends import why_not
from bench.gpu import journal
from bench.gpu.journal import Journal
from bench.gpu.runner import DRY, LAUNCHES, MECHANISMS, ROOT
from bench.gpu.test import SECONDS, command

_TESTS = [str(ROOT / "tests" / "conformance" / name) for name in ("test_gpu.py", "test_gpu_graphs.py", "test_bits.py")]
# All formats and rules of the CUDA kernels; of Triton's, which compile for seconds, a few.
_CHOSEN = {"cuda": "many_chunks or captured_window or fused_linears or test_bits", "triton": "edges or captured_window"}


def main() -> None:
    own = Journal("smoke")
    if os.environ.get(DRY):
        dry = command("smoke", _TESTS[2], "--gpu-backends", "emulated", "-k", "edges")
        sys.exit(0 if climb(own, ["plain"], lambda rung: dry) else 1)
    reasons = {name: why for name in ("cuda", "triton") if (why := why_not(name, torch.device("cuda", 0))) is not None}
    for name, reason in reasons.items():
        own.write("left out", ok=False, backend=name, reason=reason)
    rungs = [*(() if "cuda" in reasons else ("plain", *MECHANISMS)), *(() if "triton" in reasons else ("triton",))]
    sys.exit(0 if climb(own, rungs, tests) and not reasons else 1)


def tests(rung: str) -> list[str]:
    backend = "triton" if rung == "triton" else "cuda"
    return command("smoke", *_TESTS, "--gpu-backends", backend, "-k", _CHOSEN[backend])


def climb(own: Journal, rungs: Sequence[str], program: Callable[[str], Sequence[str]]) -> bool:
    """Makes the rungs in turn by their commands, and writes which mechanisms stay on. Returns whether all are right."""
    assert own.path is not None
    on: list[str] = []
    wrong: dict[str, set[str]] = {}  # the tests that failed in a rung
    good = True
    own.write("mechanisms", on=on)  # if the time is up before the first rung has ended
    for rung in rungs:
        asked = [*on, rung] if rung in MECHANISMS else on
        begin = len(journal.read(own.path))
        known = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", SECONDS: "60" if rung == "triton" else "30"}
        known |= {**os.environ, journal.FILE: str(own.path), LAUNCHES: ",".join(asked)}
        code = subprocess.run(program(rung), env=known, cwd=ROOT).returncode
        lines = journal.read(own.path)[begin:]
        wrong[rung] = {line["test"] for line in lines if line["kind"] == "failure"}
        last = next((line for line in reversed(lines) if line["kind"] == "so far"), {})
        outcome = "passed" if code == 0 else "failed" if last.get("ended") else "hangs or dies"
        where = {} if last.get("ended") else {"in_test": last.get("begins")}
        own.write("rung", ok=code == 0, rung=rung, outcome=outcome, exit_code=code, **where)
        # The mechanism is not to blame for tests that plain launches fail, too.
        if outcome == "passed" or (outcome == "failed" and wrong[rung] <= wrong[rungs[0]]):
            on = asked
        good = good and code == 0
        own.write("mechanisms", on=on, off=[name for name in MECHANISMS if name in wrong and name not in on])
    return good


if __name__ == "__main__":
    main()
