"""The mutants of tools/mutants/*.toml, and csrc with all of them in it: see mutants.py."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AREAS = ROOT / "tools" / "mutants"
SWITCH = """#pragma once
#include <cstdlib>
[[maybe_unused]] static const int af_chosen = std::getenv("AF_MUTANT") ? std::atoi(std::getenv("AF_MUTANT")) : 0;
#define af_mutant(number) (af_chosen == (number))
"""
KINDS = {
    "expression": "(af_mutant({number}) ? ({replace}) : ({find}))",
    "statement": "{{ if (af_mutant({number})) {{ {replace}\n}} else {{ {find}\n}} }}",  # find may end in a comment
}


@dataclass
class Mutant:
    """One defect; `number`: what chooses it in csrc."""

    id: str
    file: str
    find: str
    replace: str
    tests: list[str]
    area: str
    kind: str | None = None
    reason: str | None = None
    number: int = field(default=0, compare=False)

    @property
    def is_native(self) -> bool:
        return self.file.startswith("csrc/")

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr((self.file, self.find, self.replace, self.kind)).encode()).hexdigest()[:16]


def load() -> list[Mutant]:
    tomllib = importlib.import_module("tomllib")  # which Python 3.10 has not
    found = [
        Mutant(area=path.stem, **entry)
        for path in sorted(AREAS.glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["mutant"]
    ]
    for number, mutant in enumerate((mutant for mutant in found if mutant.is_native), 1):
        mutant.number = number
    return found


def problems(mutants: list[Mutant]) -> Iterator[str]:
    """What is wrong with the list, or no longer fits the source."""
    for mutant in mutants:
        path = ROOT / mutant.file
        count = path.read_text().count(mutant.find) if path.exists() else 0
        if count != 1:
            yield f"{mutant.id}: the text stands {count} times in {mutant.file}, not once"
        if mutant.find == mutant.replace:
            yield f"{mutant.id}: nothing is changed"
        if (mutant.kind in KINDS) is not mutant.is_native:
            yield f"{mutant.id}: kind must be one of {', '.join(KINDS)} in csrc, and stands nowhere else"
        missing = [name for name in mutant.tests if not (ROOT / "tests" / name).exists()]
        if missing:
            yield f"{mutant.id}: there are no tests in {', '.join(missing)}"
    ids = [mutant.id for mutant in mutants]
    yield from (f"{name}: there are two" for name in sorted({name for name in ids if ids.count(name) > 1}))


def switched(files: Mapping[str, bytes], mutants: Iterable[Mutant]) -> dict[str, bytes]:
    """csrc with all its mutants, of which the environment chooses one when a module is loaded, or none."""
    new = {name: data.decode() for name, data in files.items() if name.startswith("csrc/")}
    for name, text in new.items():
        own = [(text.index(mutant.find), mutant) for mutant in mutants if mutant.file == name]
        for start, mutant in sorted(own, key=lambda each: each[0], reverse=True):
            both = KINDS[str(mutant.kind)].format(number=mutant.number, replace=mutant.replace, find=mutant.find)
            new[name] = new[name][:start] + both + new[name][start + len(mutant.find) :]
    new["csrc/target.h"] = new["csrc/target.h"].replace("#pragma once", '#pragma once\n#include "mutants.h"')
    return {name: text.encode() for name, text in {**new, "csrc/mutants.h": SWITCH}.items()}
