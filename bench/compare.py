"""`python -m bench compare A.json B.json`: what got slower or larger from A to B, beyond the noise.

The exit code is 0 where nothing did, 1 where something did, 2 where a file cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.tables import Results, ResultsError, Row, compared, load, median, text
from bench.verdicts import NOISE, interval

BUSY = 0.5  # load average of the minute before a run
_AROUND = ("gpu", "cpu", "instruction_set", "threads", "system", "accumfused", "torch", "python", "compiler", "cuda",
           "triton", "options")  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench compare", description=__doc__)
    parser.add_argument("first", type=Path, metavar="A.json", help="a file of python -m bench --json")
    parser.add_argument("second", type=Path, metavar="B.json", help="the later one")
    parser.add_argument("--noise", type=float, default=NOISE, metavar="SHARE", help="default: %(default)s")
    chosen = parser.parse_args(arguments)
    try:
        first, second = load(chosen.first), load(chosen.second)
    except ResultsError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"A: {chosen.first}: {first.where()}\nB: {chosen.second}: {second.where()}")
    different = [key for key in _AROUND if first.machine.get(key) != second.machine.get(key)]
    notes = [f"different {key}: {first.machine.get(key)} against {second.machine.get(key)}" for key in different]
    notes += [f"{letter} {words}" for letter, each in (("A", first), ("B", second)) for words in doubts(each)]
    print(*(f"note: {line}" for line in notes), sep="\n")
    found = compare(first, second, chosen.noise)
    for section, lines in found.items():
        if lines and section != "the same":
            print(f"\n{section}:", *(f"  {line}" for line in lines), sep="\n")
    worse, better, same = (len(found[section]) for section in ("slower or larger", "faster or smaller", "the same"))
    print(f"\n{worse} worse, {better} better, {same} the same within the noise")
    return 1 if worse else 0


def compare(first: Results, second: Results, noise: float) -> dict[str, list[str]]:
    """Matches rows by suite, title and name. Returns the lines of each section."""
    sections = ("slower or larger", "faster or smaller", "rates of the machine itself", "only in A", "only in B")
    found: dict[str, list[str]] = {section: [] for section in (*sections, "the same")}
    before, after = _figures(first), _figures(second)
    for place in dict.fromkeys([*before, *after]):
        label = " | ".join(place)
        if place not in before or place not in after:
            found["only in A" if place in before else "only in B"].append(label)
            continue
        old, new = median(before[place]), median(after[place])
        # A fall to a half is as large as a rise to twice: the larger over the smaller judges both.
        factor = max(old, new) / min(old, new)
        allowed = max(noise, _spread(before[place]), _spread(after[place]))
        line = f"{label}: {text(old)} -> {text(new)} ({new / old - 1:+.0%}; noise {allowed:.0%})"
        if place[0] == "ceilings":
            found["rates of the machine itself"] += [line] if factor > 1 + noise else []
        else:
            worse_or_better = "slower or larger" if new > old else "faster or smaller"
            found["the same" if factor <= 1 + allowed else worse_or_better].append(line)
    return found


def _figures(results: Results) -> dict[tuple[str, ...], Any]:
    """Returns (suite, title, row, heading) -> figure."""
    found = {}
    for suite, tables in results.suites.items():
        for table in tables:
            for row in table.rows:
                headings: Row = {"GB/s": 0} if suite == "ceilings" else compared(row)
                found |= {(suite, table.title, row["name"], heading): row[heading] for heading in headings}
    return found


def _spread(figure: float | list[float]) -> float:
    """Returns the distance between the quartiles as a share of the median; 0 where it is not known."""
    low, high = interval(figure)
    return (high - low) / median(figure) if isinstance(figure, list) and median(figure) > 0 else 0.0


def doubts(results: Results) -> list[str]:
    """Says why a run's figures mean little; no line where they do not."""
    found = ["was measured with --quick: tiny sizes, its figures mean nothing"] if results.machine.get("quick") else []
    found += ["was interrupted: what came after is missing"] if results.interrupted else []
    load_before = results.machine.get("load") or 0.0
    return [*found, *([f"had a load of {load_before:.1f} in the minute before"] if load_before > BUSY else [])]
