"""Are the bits of the backends for GPUs those of the reference, and does any launch hang?

A ladder of conformance tests, each rung a process: plain launches of the CUDA kernels; the same with more thread blocks
than fit on the card (the queue), which stays off in later stages if a test now hangs or fails; Triton's kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import torch

from accumfused.backends import why_not
from bench.gpu import journal
from bench.gpu.journal import SO_FAR, Journal
from bench.gpu.runner import DRY, QUEUE, ROOT
from bench.gpu.test import command

_TESTS = [str(ROOT / "tests" / "conformance" / name) for name in ("test_gpu.py", "test_gpu_graphs.py", "test_bits.py")]
_CUDA = command("smoke", "cuda", 30, *_TESTS, "-k", "many_chunks or captured_window or fused_linears or test_bits")
# Triton compiles for seconds: a few formats and rules.
_TRITON = command("smoke", "triton", 60, *_TESTS, "-k", "edges or captured_window")
_DRY = command("smoke", "emulated", 60, _TESTS[-1], "-k", "edges")


def main() -> None:
    own = Journal("smoke")
    rungs, reasons = {"plain": _DRY}, {}
    if not os.environ.get(DRY):
        gpu = torch.device("cuda", 0)
        reasons = {name: why for name in ("cuda", "triton") if (why := why_not(name, gpu)) is not None}
        rungs = {} if "cuda" in reasons else {"plain": _CUDA, "queue": _CUDA}
        rungs |= {} if "triton" in reasons else {"triton": _TRITON}
    for name, reason in reasons.items():
        own.write("left out", ok=False, backend=name, reason=reason)
    sys.exit(0 if climb(own, rungs) and not reasons else 1)


def climb(own: Journal, rungs: Mapping[str, list[str]]) -> bool:
    """Makes the rungs in turn by their commands. Returns whether all are right."""
    assert own.path is not None
    failed: dict[str, set[str]] = {}  # a rung's tests
    good = True
    for rung, run in rungs.items():
        begin = len(journal.read(own.path))
        known = {journal.FILE: str(own.path), QUEUE: "0" if rung == "plain" else "1"}
        code = subprocess.run(run, env={**os.environ, **known}, cwd=ROOT).returncode
        lines = journal.read(own.path)[begin:]
        failed[rung] = {line["test"] for line in lines if line["kind"] == "failure"}
        last = next((line for line in reversed(lines) if line["kind"] == SO_FAR), {})
        ended = bool(last.get("ended"))
        facts = {} if ended else {"in_test": last.get("begins")}
        if rung == "queue":  # which is not to blame for tests that plain launches fail, too
            facts["queue_stays_on"] = code == 0 or (ended and failed["queue"] <= failed["plain"])
        outcome = "passed" if code == 0 else "failed" if ended else "hangs or dies"
        own.write("rung", ok=code == 0, rung=rung, outcome=outcome, exit_code=code, **facts)
        good = good and code == 0
    return good


if __name__ == "__main__":
    main()
