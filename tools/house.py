"""How much there is to hold in mind: sizes, the way of a plain step(), circles, and names that should stay at home.

    python tools/house.py           the figures
    python tools/house.py picture   the picture in docs/internals/architecture.md: which folder imports which

tests/repo/test_house.py holds what must not grow again.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "accumfused"


def modules() -> dict[str, ast.Module]:
    """The package's sources by their dotted names."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text())
    return found


def lines(*patterns: str) -> int:
    """Of all files below the repository's root that match."""
    return sum(len(path.read_text().splitlines()) for each in patterns for path in ROOT.glob(each))


def imports(tree: ast.AST, known: dict[str, ast.Module]) -> set[str]:
    """The modules of ours that a module imports, also for its types only."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name):
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & known.keys()
            found |= inner or {str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known.keys()
    return found


def circles(known: dict[str, ast.Module]) -> list[set[str]]:
    """Sets of modules that import each other, in however many steps."""
    direct = {name: imports(tree, known) - {name} for name, tree in known.items()}
    reached = {name: set(others) for name, others in direct.items()}
    for middle in known:
        for others in reached.values():
            if middle in others:
                others |= reached[middle]
    found: list[set[str]] = []
    for name in known:
        circle = {name, *(other for other in reached[name] if name in reached[other])}
        if name in reached[name] and circle not in found:
            found.append(circle)
    return found


def inner_imports(known: dict[str, ast.Module]) -> list[str]:
    """Imports of ours inside functions."""
    functions = (
        (name, node)
        for name, tree in known.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return [f"{name}: {node.name}()" for name, node in functions if imports(node, known)]


def picture(known: dict[str, ast.Module]) -> str:
    """Folders (and files beside them) as a Mermaid graph: an arrow from each to those that it imports.

    An arrow is left out where a longer way goes from the one to the other.
    """

    def room(name: str) -> str:
        inner = name.removeprefix(f"{PACKAGE.name}.").split(".")
        return inner[0] if (PACKAGE / inner[0]).is_dir() else f"{inner[0]}.py"

    left_out = {PACKAGE.name, f"{PACKAGE.name}.__main__", f"{PACKAGE.name}.warn", f"{PACKAGE.name}.arguments"}
    arrows: dict[str, set[str]] = {}
    for name, tree in known.items():
        if name not in left_out:
            others = {room(other) for other in imports(tree, known) if other not in left_out}
            arrows.setdefault(room(name), set()).update(others - {room(name)})

    def below(start: str, *on_the_way: str) -> set[str]:
        if start in on_the_way:
            raise ValueError(f"a circle of folders: {' -> '.join((*on_the_way, start))}")
        return {far for near in arrows[start] for far in (near, *below(near, *on_the_way, start))}

    lines = ["graph TD"]
    for start, others in sorted(arrows.items()):
        longer = {far for near in others for far in below(near)}
        lines += [f"    {start} --> {other}" for other in sorted(others - longer)]
    return "\n".join(lines)


def _private(tree: ast.AST) -> Iterator[str]:
    """Names with one underscore that a module defines: functions, classes, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def crossings(known: dict[str, ast.Module]) -> list[str]:
    """Private names of one module of ours that another one uses."""
    own = {name: {n for n in _private(tree) if n[0] == "_" and n[:2] != "__"} for name, tree in known.items()}
    ours = set().union(*own.values())
    found = []
    for name, tree in known.items():
        for node in ast.walk(tree):
            used = [node.attr] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name):
                used = [alias.name for alias in node.names]
            found += [f"{name}: {each}" for each in used if each in ours - own[name]]
    return found


def classes(known: dict[str, ast.Module]) -> dict[str, tuple[int, int]]:
    """Methods and attributes of each class."""
    found = {}
    for name, tree in known.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            declared = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
            attributes = {target.id for target in declared if isinstance(target, ast.Name)}
            stored = [part for part in ast.walk(node) if isinstance(part, ast.Attribute)]
            stored = [part for part in stored if isinstance(part.ctx, ast.Store) and isinstance(part.value, ast.Name)]
            attributes |= {part.attr for part in stored if part.value.id == "self"}  # type: ignore[attr-defined]
            found[f"{name}.{node.name}"] = len(methods), len(attributes)
    return found


def way_of_a_step() -> tuple[list[str], list[tuple[str, str]], list[str]]:
    """Of a warm step() that clips: files in order, pairs of them that call each other, classes."""
    import torch

    import accumfused as af

    params = [torch.ones(64).requires_grad_() for _ in range(3)]
    optimizer = af.AdamW(params, max_grad_norm=1.0)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones(64)
        optimizer.step()
    files: dict[str, None] = {}
    calls: set[tuple[str, str]] = set()
    seen: dict[str, None] = {}

    def place(frame: FrameType | None) -> str | None:
        path = Path(frame.f_code.co_filename) if frame is not None else None
        return str(path.relative_to(PACKAGE)) if path is not None and PACKAGE in path.parents else None

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
        kind = owner if isinstance(owner, type) else type(owner)
        if kind.__module__.startswith(PACKAGE.name):
            seen.setdefault(kind.__name__)
        here, caller = place(frame), place(frame.f_back)
        if here is not None:
            files.setdefault(here)
            if caller not in (None, here):
                calls.add((str(caller), here))

    sys.setprofile(watch)
    optimizer.step()
    sys.setprofile(None)
    bounces = [(one, other) for one, other in calls if (other, one) in calls and one < other]
    return list(files), bounces, list(seen)


def main() -> None:
    known = modules()
    if sys.argv[1:] == ["picture"]:
        print(picture(known))
        return
    files, bounces, seen = way_of_a_step()
    sizes = classes(known)
    methods, attributes = (max(sizes.items(), key=lambda item: item[1][i]) for i in (0, 1))
    folders = Counter(path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py") for _ in path.open())
    print(f"Python in accumfused/: {lines('accumfused/**/*.py')} lines")
    print("  " + ", ".join(f"{name} {count}" for name, count in folders.most_common()))
    print(f"csrc/: {lines('csrc/**/*.*')} lines; tests/ (Python): {lines('tests/**/*.py')}")
    print(f"files on the way of a step(): {len(files)}: {' '.join(files)}")
    print(f"  pairs of them that call each other: {bounces or 'none'}")
    print(f"  classes on it: {len(seen)}: {' '.join(seen)}")
    print(f"most methods: {methods[0]} {methods[1][0]}; most attributes: {attributes[0]} {attributes[1][1]}")
    print(f"private names that another module uses: {crossings(known) or 'none'}")
    print(f"circles of imports: {circles(known) or 'none'}")
    print(f"imports of ours inside functions: {inner_imports(known) or 'none'}")


if __name__ == "__main__":
    main()
