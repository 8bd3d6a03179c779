"""`make gpu-test`: the tests that run on a GPU, of the CUDA backend first and then of Triton's.

--sanitizer: those that run compute-sanitizer, alone, since it slows down all that runs beside it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from bench.gpu.failures import ASKS

TESTS = Path(__file__).parents[2] / "tests"
_WORKERS = 12  # each has its context on the GPU, of half a gigabyte
_CHUNK = 8  # tests that a worker is given at once: the order holds across workers


def files() -> list[Path]:
    """Those with a test for every backend, and those about GPUs: collecting the others takes time."""
    needs = re.compile(rf"\bbackend: str\b|\bplace: Place\b|{re.escape(ASKS)}")
    return [path for path in sorted(TESTS.rglob("test_*.py")) if needs.search(path.read_text())]


def command(*, sanitizer: bool, dry: bool) -> list[str]:
    pytest = [sys.executable, "-m", "pytest", "-p", "bench.gpu.failures", "-rN", "--no-header", "--tb=short"]
    if sanitizer:
        return [*pytest, "-v", "-k", "sanitizer", *map(str, sorted(TESTS.rglob("test_gpu*.py")))]
    workers = min(_WORKERS, os.cpu_count() or 1)
    pytest += ["-p", "xdist", "-n", str(workers), "--dist", "load", "--maxschedchunk", str(_CHUNK)]
    if dry:
        return [*pytest, "--gpu-backends", "torch,cpu", "-k", "no_decay", str(TESTS / "numbers" / "test_rules.py")]
    return [*pytest, "--gpu-backends", "cuda,triton", *map(str, files())]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.tests", description=__doc__)
    parser.add_argument("--sanitizer", action="store_true", help="those that run compute-sanitizer")
    parser.add_argument("--dry", action="store_true", help="without a GPU: some of those for CPUs")
    asked = parser.parse_args()
    # Without the plugins that happen to be installed.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ["PYTHONPATH"] = str(TESTS.parent)
    run = command(sanitizer=asked.sanitizer, dry=asked.dry)
    sys.stdout.flush()
    os.execv(run[0], run)


if __name__ == "__main__":
    main()
