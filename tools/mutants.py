"""What a test suite is worth: small defects put into the source one at a time, and how many of them the tests find.

tools/mutants/*.toml has them, a file for each area: `id`, `file`, `find` (a text that stands there exactly once),
`replace`, `tests` (below tests/, to be run first), and `reason` where one is known to survive rightly. Those of csrc
also have `kind`, "expression" or "statement": all of them are compiled into one native module and one emulation, where
AF_MUTANT chooses.

    python tools/mutants.py check                     that every text stands where it should
    python tools/mutants.py run [--only PATTERN]...   writes build/mutants.json after each, and goes on from there
    python tools/mutants.py report

A mutant is killed by an assertion, a warning, an exception out of accumfused/, a crash or a hang: see
mutants_plugin.py. In the end the tests that have killed one run without any, in the same copy: what fails there too is
left out, and the mutant judged again.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import queue
import sys
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mutants_judge import Copy, judge
from mutants_list import ROOT, Mutant, load, problems

COPIES = ROOT / "build" / "mutants"


def run(arguments: argparse.Namespace, mutants: list[Mutant]) -> None:
    """All that is left to do; and again what only tests have killed that fail anyway."""
    results, lock = read(arguments.results), threading.Lock()
    chosen = [m for m in mutants if any(fnmatch.fnmatch(f"{m.area}/{m.id}", f"*{only}*") for only in arguments.only)]
    # Drawn, so that a run which is interrupted has seen a bit of everything.
    which, shares = map(int, arguments.share.split("/"))
    chosen = sorted(chosen, key=lambda mutant: zlib.crc32(mutant.id.encode()))[which::shares]
    copies = [Copy(COPIES / f"job-{number}", mutants, arguments.tests) for number in range(arguments.jobs)]

    def save() -> None:
        partial = arguments.results.with_suffix(".part")
        partial.write_text(json.dumps(results, indent=1))
        partial.replace(arguments.results)

    def work(copy: Copy, waiting: queue.SimpleQueue[Mutant]) -> None:
        while not waiting.empty():
            mutant = waiting.get()
            found = judge(copy, mutant, arguments.timeout, rest=arguments.all_survivors, but=results.get("unsound", []))
            with lock:
                results[mutant.id] = found
                save()
            seconds, by = found["seconds"], found["by"] or ""
            print(f"{found['status']:10} {seconds:6} s  {mutant.area}/{mutant.id}  {by}", flush=True)

    for known in results.values():
        if isinstance(known, dict) and known["status"] == "unfinished":
            known["status"] = "open"
    while True:
        waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
        for mutant in chosen:
            if is_open(results.get(mutant.id, {}), mutant, arguments.all_survivors):
                waiting.put(mutant)
        jobs = [threading.Thread(target=work, args=(copy, waiting)) for copy in copies]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        kills = {m.id: results[m.id]["by"] for m in chosen if results[m.id]["status"] == "killed"}
        kills = {name: by for name, by in kills.items() if not results[name]["is_sound"]}
        unsound = copies[0].failing(kills.values())
        results["unsound"] = sorted({*results.get("unsound", []), *unsound})
        for name, by in kills.items():
            results[name] |= {"is_sound": by not in unsound, "status": "open" if by in unsound else "killed"}
        save()
        if not unsound:
            break
    report(chosen, results)


def is_open(known: Mapping[str, Any], mutant: Mutant, all_tests: bool) -> bool:
    """Whether a mutant is still to be judged."""
    if known.get("digest") != mutant.digest or known["status"] == "open":
        return True
    return all_tests and known["status"] != "killed" and not known["all_tests"]


def read(path: Path) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return known


def report(mutants: list[Mutant], results: Mapping[str, Any]) -> None:
    """A line for each area, and the survivors."""
    current = {m.id: results[m.id] for m in mutants if results.get(m.id, {}).get("digest") == m.digest}
    print(f"\n{'area':16} killed survived open   share")
    for area in [*sorted({m.area for m in mutants}), "all"]:
        own = [current.get(m.id, {"status": "open"})["status"] for m in mutants if area in (m.area, "all")]
        killed, survived = own.count("killed"), own.count("survived")
        share = f"{100 * killed / (killed + survived):.0f}%" if killed + survived else "-"
        print(f"{area:16} {killed:6} {survived:8} {len(own) - killed - survived:4} {share:>7}")
    for mutant in mutants:
        if current.get(mutant.id, {}).get("status") == "survived":
            print(f"survived: {mutant.area}/{mutant.id} ({mutant.file}){': ' + mutant.reason if mutant.reason else ''}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["check", "run", "report"])
    parser.add_argument("--only", action="append", help="a part of area/id, or a pattern; may be given again")
    parser.add_argument("--share", default="0/1", metavar="K/N", help="the k-th n-th of them")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tests", type=Path, help="another checkout's tests, for this source")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutants.json")
    parser.add_argument("--all-survivors", action="store_true", help="what its own tests leave, all others try")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for the tests of one mutant")
    arguments = parser.parse_args()
    arguments.only = arguments.only or [""]
    mutants = load()
    wrong = list(problems(mutants))
    if wrong or arguments.command == "check":
        print("\n".join(wrong) or f"{len(mutants)} mutants fit the source")
        return 1 if wrong else 0
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    if arguments.command == "run":
        run(arguments, mutants)
    else:
        report(mutants, read(arguments.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
