"""`python -m bench.gpu [STAGE ...]`, by an interpreter that has torch: builds the module for the GPU that is here, then
runs the stages. Nothing is installed or fetched. The report's folder is complete up to the moment at which all is
ended: report.jsonl, report.md, output.txt, and the module. `python -m bench.gpu report FOLDER` makes report.md anew.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from bench.gpu import journal
from bench.gpu.runner import DRY, JOURNAL, Stage, run_all, write_report

MINUTES = 9.5
SECONDS = {"build": 60, "smoke": 100, "versus": 75, "probe": 40, "test": 200, "sanitize": 95}


def main() -> None:
    if sys.argv[1:2] == ["report"] and len(sys.argv) == 3:
        write_report(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(SECONDS)}; default: all of them")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all of them; default: {MINUTES:g}")
    parser.add_argument("--report", type=Path, default=Path("build/gpu"), metavar="FOLDER", help="default: build/gpu")
    parser.add_argument("--dry", action="store_true", help="without a GPU, tiny, with the module that is there")
    asked = parser.parse_args()
    if unknown := set(asked.stages) - set(SECONDS):
        parser.error(f"unknown stage {', '.join(sorted(unknown))}; choose from {', '.join(SECONDS)}")
    try:
        import torch
    except ImportError:
        sys.exit(f"{sys.executable} has no torch; name an interpreter that has: make gpu PYTHON=...")
    if not asked.dry and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no GPU that it can use; --dry runs the stages without one")
    os.environ |= {DRY: "1"} if asked.dry else {}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    wanted = {*(asked.stages or SECONDS), "build"} - ({"build"} if asked.dry else set())
    several = [
        Stage(name, SECONDS[name], [sys.executable, "-m", f"bench.gpu.{name}"]) for name in SECONDS if name in wanted
    ]
    folder = asked.report.resolve()
    try:
        bad = run_all(several, folder, 60 * asked.minutes)
    except KeyboardInterrupt:
        sys.exit(f"interrupted; the report has all results so far: {folder}")
    print("\n" + journal.markdown(journal.read(folder / JOURNAL), texts=False))
    print(f"report: {folder}")
    sys.exit(f"not passed: {', '.join(bad)}" if bad else None)


if __name__ == "__main__":
    main()
