"""`python -m bench compare A.json B.json`: what got slower or larger from A to B, beyond the noise.

Exit code 0: nothing; 1: something did; 2: a file cannot be used.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.readings import NOISE, Reading, gap, number, readings
from bench.stored import BUSY, Results, ResultsError, load, name, text

_MACHINE = ("gpu", "cpu", "instruction_set", "threads", "system")
_VERSIONS = ("accumfused", "torch", "python", "compiler", "cuda", "triton")
Place = tuple[str, str, str]  # suite, title, name


@dataclass
class Difference:
    """Lines for people, by kind."""

    warnings: list[str] = field(default_factory=list)
    worse: list[str] = field(default_factory=list)
    better: list[str] = field(default_factory=list)
    ceilings: list[str] = field(default_factory=list)
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    same: int = 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench compare", description=__doc__)
    parser.add_argument("first", type=Path, metavar="A.json", help="results of python -m bench --json")
    parser.add_argument("second", type=Path, metavar="B.json", help="the later ones")
    parser.add_argument(
        "--noise", type=_share, default=NOISE, metavar="SHARE",
        help="changes up to this share are noise, and up to what lies between either's quartiles; default: %(default)s",
    )  # fmt: skip
    chosen = parser.parse_args(arguments)
    try:
        first, second = load(chosen.first), load(chosen.second)
    except ResultsError as error:
        print(error, file=sys.stderr)
        return 2
    found = compare(first, second, chosen.noise)
    print(f"A: {first.path}: {first.where()}\nB: {second.path}: {second.where()}")
    for warning in found.warnings:
        print(f"note: {warning}")
    _section("slower or larger in B", found.worse)
    _section("faster or smaller in B", found.better)
    _section("the machine itself: rates of the ceilings", found.ceilings)
    _section("only in A", found.only_first)
    _section("only in B", found.only_second)
    print(f"\n{len(found.worse)} worse, {len(found.better)} better, {found.same} the same within the noise")
    return 1 if found.worse else 0


def compare(first: Results, second: Results, noise: float) -> Difference:
    """Matches rows by suite, title and name; figures by their key."""
    found = Difference(_warnings(first, second))
    rates = [dict(_rates(results)) for results in (first, second)]
    for mix in rates[0].keys() & rates[1].keys():
        before, after = rates[0][mix], rates[1][mix]
        if before > 0 and abs(after / before - 1) > noise:
            found.ceilings.append(f"{mix}: {before:.1f} -> {after:.1f} GB/s ({after / before - 1:+.0%})")
    found.ceilings.sort()
    a, b = dict(_rows(first)), dict(_rows(second))
    found.only_first, found.only_second = _only(a, b), _only(b, a)
    for place in a:
        if place not in b:
            continue
        (before_row, reason_before), (after_row, reason_after) = a[place], b[place]
        for key in dict.fromkeys([*before_row, *after_row]):
            label = f"{' | '.join(place)}: {key.replace('_', ' ')}"
            if key not in after_row:
                found.only_first.append(label + (f" (B: {reason_after})" if reason_after else ""))
            elif key not in before_row:
                found.only_second.append(label + (f" (A: {reason_before})" if reason_before else ""))
            else:
                _judge(found, label, before_row[key], after_row[key], noise)
    return found


def _only(these: Iterable[Place], those: Iterable[Place]) -> list[str]:
    """The rows that the others lack; a table that they lack altogether is one line."""
    others = set(those)
    tables = {place[:2] for place in others}
    missing = [place if place[:2] in tables else (*place[:2], "all rows") for place in these if place not in others]
    return [" | ".join(place) for place in dict.fromkeys(missing)]


def _judge(found: Difference, label: str, before: Reading, after: Reading, noise: float) -> None:
    allowed = max(noise, before.spread, after.spread)
    old, new = before.common(), after.common()
    change = new / old - 1 if old > 0 else (math.inf if new > 0 else 0.0)
    # A fall of a half is as large as a rise to twice: both are judged by the larger over the smaller.
    factor = max(old, new) / min(old, new) if min(old, new) > 0 else (1.0 if old == new else math.inf)
    if factor <= 1 + allowed or (before.unit == after.unit and not before.matters(after.value)):
        found.same += 1
        return
    percent = f"{change:+.0%}" if math.isfinite(change) else "from nothing"
    line = f"{label}: {text(before.value)} {before.unit} -> {text(after.value)} {after.unit}"
    (found.worse if new > old else found.better).append(f"{line} ({percent}; noise {allowed:.0%})")


def _rows(results: Results) -> Iterator[tuple[Place, tuple[dict[str, Reading], str | None]]]:
    """Where a row stands -> its figures by key, and why it has no time. Rows of one name are numbered."""
    seen: dict[Place, int] = {}
    for table in results.tables:
        if table.suite == "ceilings":
            continue
        for row in table.rows:
            place = (table.suite, table.title, name(row))
            seen[place] = seen.get(place, 0) + 1
            if seen[place] > 1:
                place = (table.suite, table.title, f"{name(row)} #{seen[place]}")
            yield place, ({reading.key: reading for reading in readings(row)}, gap(row))


def _rates(results: Results) -> Iterator[tuple[str, float]]:
    for table in results.tables:
        if table.suite == "ceilings":
            yield from ((name(row), row["median"]) for row in table.rows if number(row.get("median")))


def _warnings(first: Results, second: Results) -> list[str]:
    found = []
    for what, keys in (("different machines", _MACHINE), ("different versions", _VERSIONS)):
        pairs = [(key, first.machine.get(key), second.machine.get(key)) for key in keys]
        several = [f"{key.replace('_', ' ')} {old} against {new}" for key, old, new in pairs if old != new]
        if several:
            found.append(f"{what}: {'; '.join(several)}")
    options = [" ".join(results.machine.get("options", [])) or "none" for results in (first, second)]
    if options[0] != options[1]:
        found.append(f"different options: {options[0]} against {options[1]}")
    for letter, results in (("A", first), ("B", second)):
        if results.quick:
            found.append(f"{letter} was measured with --quick: tiny sizes, its figures mean nothing")
        if results.interrupted:
            found.append(f"{letter} was interrupted: what came after is missing")
        load_before = results.machine.get("load")
        if number(load_before) and float(load_before or 0) > BUSY:
            found.append(f"{letter}'s machine was not idle: its load was {load_before:.1f} in the minute before")
    return found


def _section(heading: str, lines: Sequence[str]) -> None:
    if lines:
        print(f"\n{heading}:", *(f"  {line}" for line in lines), sep="\n")


def _share(written: str) -> float:
    try:
        share = float(written)
    except ValueError:
        share = math.nan
    if not 0 <= share < math.inf:
        raise argparse.ArgumentTypeError(f"{written!r} is no share: give a number from 0, such as 0.05")
    return share
