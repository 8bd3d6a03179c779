"""`python -m bench compare A.json B.json`: what got slower or larger from A to B, beyond the noise.

The exit code is 0 where nothing did, 1 where something did, 2 where a file cannot be used.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.tables import Results, ResultsError, Row, compared, load, median, text
from bench.verdicts import NOISE, interval

BUSY = 0.5  # load average of the minute before a run
_AROUND = ("gpu", "cpu", "instruction_set", "threads", "system", "accumfused", "torch", "python", "compiler", "cuda",
           "triton", "options")  # fmt: skip
_SECTIONS = ("slower or larger in B", "faster or smaller in B", "the machine itself: rates of the ceilings",
             "only in A", "only in B")  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench compare", description=__doc__)
    parser.add_argument("first", type=Path, metavar="A.json", help="a file of python -m bench --json")
    parser.add_argument("second", type=Path, metavar="B.json", help="the later one")
    parser.add_argument(
        "--noise", type=_share, default=NOISE, metavar="SHARE",
        help="changes up to this share are noise, and up to the distance of either's quartiles; default: %(default)s",
    )  # fmt: skip
    chosen = parser.parse_args(arguments)
    try:
        first, second = load(chosen.first), load(chosen.second)
    except ResultsError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"A: {chosen.first}: {first.where()}\nB: {chosen.second}: {second.where()}")
    for warning in warnings(first, second):
        print(f"note: {warning}")
    found, same = compare(first, second, chosen.noise)
    for section, lines in found.items():
        if lines:
            print(f"\n{section}:", *(f"  {line}" for line in lines), sep="\n")
    worse, better = (len(found[section]) for section in _SECTIONS[:2])
    print(f"\n{worse} worse, {better} better, {same} the same within the noise")
    return 1 if worse else 0


def compare(first: Results, second: Results, noise: float) -> tuple[dict[str, list[str]], int]:
    """Matches rows by suite, title and name. Returns the lines of each section, and how many figures stay the same."""
    found: dict[str, list[str]] = {section: [] for section in _SECTIONS}
    worse, better, ceilings, only_first, only_second = found.values()
    before, after = dict(_rows(first)), dict(_rows(second))
    tables = [{place[:2] for place in rows} for rows in (before, after)]
    same = 0
    for place in dict.fromkeys([*before, *after]):
        if place not in before or place not in after:
            missing, others = (only_first, tables[1]) if place in before else (only_second, tables[0])
            line = " | ".join(place if place[:2] in others else (*place[:2], "all rows"))
            missing += [line] if line not in missing else []
            continue
        a, b = before[place], after[place]
        if place[0] == "ceilings":
            change = b["GB/s"] / a["GB/s"] - 1
            if abs(change) > noise:
                ceilings.append(f"{place[2]}: {text(a['GB/s'])} -> {text(b['GB/s'])} GB/s ({change:+.0%})")
            continue
        for heading in dict.fromkeys([*compared(a), *compared(b)]):
            label = f"{' | '.join(place)}: {heading}"
            if heading not in compared(a):
                only_second.append(f"{label} (A: {a.get('cannot', 'has none')})")
            elif heading not in compared(b):
                only_first.append(f"{label} (B: {b.get('cannot', 'has none')})")
            else:
                old, new = median(a[heading]), median(b[heading])
                # A fall to a half is as large as a rise to twice: the larger over the smaller judges both.
                factor = 1.0 if old == new else max(old, new) / (min(old, new) or math.nan)
                allowed = max(noise, _spread(a[heading]), _spread(b[heading]))
                if factor <= 1 + allowed:
                    same += 1
                    continue
                percent = f"{new / old - 1:+.0%}; noise {allowed:.0%}" if old else "from nothing"
                (worse if new > old else better).append(f"{label}: {text(old)} -> {text(new)} ({percent})")
    return found, same


def _spread(figure: float | list[float]) -> float:
    """Returns the distance between the quartiles as a share of the median; 0 where it is not known."""
    low, high = interval(figure)
    return (high - low) / median(figure) if isinstance(figure, list) and median(figure) > 0 else 0.0


def _rows(results: Results) -> Iterator[tuple[tuple[str, str, str], Row]]:
    for suite, tables in results.suites.items():
        yield from (((suite, table.title, row["name"]), row) for table in tables for row in table.rows)


def warnings(first: Results, second: Results) -> list[str]:
    """Names what else differs between two runs, and what makes either one doubtful."""
    a, b = first.machine, second.machine
    found = [f"different {key}: {a.get(key)} against {b.get(key)}" for key in _AROUND if a.get(key) != b.get(key)]
    return [*found, *(f"{letter} {words}" for letter, each in (("A", first), ("B", second)) for words in doubts(each))]


def doubts(results: Results) -> list[str]:
    """Says why a run's figures mean little; no line where they do not."""
    found = ["was measured with --quick: tiny sizes, its figures mean nothing"] if results.machine.get("quick") else []
    found += ["was interrupted: what came after is missing"] if results.interrupted else []
    load_before = results.machine.get("load") or 0.0
    return [*found, *([f"had a load of {load_before:.1f} in the minute before"] if load_before > BUSY else [])]


def _share(written: str) -> float:
    try:
        share = float(written)
    except ValueError:
        share = math.nan
    if not 0 <= share < math.inf:
        raise argparse.ArgumentTypeError(f"{written!r} is no share: give a number from 0, such as 0.05")
    return share
