"""`python -m bench.gpu [STAGE ...]`, by an interpreter that has torch: builds the module for the GPU that is here, then
runs the stages. Nothing is installed or fetched. The report's folder has at most 8 files, which are complete up to the
moment at which all is ended: report.jsonl, report.md, bench.json, and what each stage has printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from pathlib import Path

from bench.gpu import journal, page
from bench.gpu.stages import BENCH, JOURNAL, Stage, python, run_all

MINUTES = 9.0
NAMES = ("smoke", "test", "probe", "bench", "sanitize")


def all_stages(folder: Path, *, dry: bool = False) -> list[Stage]:
    """All, in their order, with their seconds of nine minutes.

    Args:
        dry: without a GPU, tiny: shows that they run.
    """
    device = "cpu" if dry else "cuda"
    bench = ["-m", "bench", "--device", device, "--json", str(folder / BENCH)]
    bench += ["--quick", "--peers", "none", "verbs"] if dry else ["--backend", "cuda"]
    tests = ["-m", "bench.gpu.tests", *(["--dry"] if dry else [])]
    return [
        Stage("build", 100, python("-m", "bench.gpu.build")),
        Stage("smoke", 60, python("-m", "bench.gpu.smoke", "--device", device)),
        Stage("test", 100, python(*tests)),
        Stage("probe", 150, python("-m", "bench.gpu.probe", "--device", device, "--counters")),
        Stage("bench", 80, python(*bench)),
        *([] if dry else [Stage("sanitize", 50, python(*tests, "--sanitizer"))]),  # all of its tests need a GPU
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all of them; default: {MINUTES:g}")
    parser.add_argument("--report", type=Path, default=Path("build/gpu"), metavar="FOLDER", help="default: build/gpu")
    parser.add_argument("--dry", action="store_true", help="without a GPU, tiny, with the module that is there")
    asked = parser.parse_args()
    if unknown := set(asked.stages) - set(NAMES):
        parser.error(f"unknown stage {', '.join(sorted(unknown))}; choose from {', '.join(NAMES)}")
    if importlib.util.find_spec("torch") is None:
        sys.exit(f"{sys.executable} has no torch; name an interpreter that has: make gpu PYTHON=...")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = asked.report.resolve()
    wanted = [*([] if asked.dry else ["build"]), *(asked.stages or NAMES)]
    chosen = [each for each in all_stages(folder, dry=asked.dry) if each.name in wanted]
    try:
        bad = run_all(chosen, folder, 60 * asked.minutes)
    except KeyboardInterrupt:
        sys.exit(f"interrupted; what is known until now: {folder}")
    print("\n" + page.markdown(journal.read(folder / JOURNAL), details=False))
    print(f"report: {folder}")
    sys.exit(f"not passed: {', '.join(bad)}" if bad else None)


if __name__ == "__main__":
    main()
