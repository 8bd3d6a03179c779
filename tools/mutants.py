"""Judges the tests: makes small defects in the package, one at a time, and prints those that no test finds.

    python tools/mutants.py                 in the modules that have changed since main, or in the last commit
    python tools/mutants.py accumfused/loop --sample 75 --seed 1 --jobs 2

cosmic-ray makes the defects and runs the tests, in copies of the repository in build/mutants. The first run records
which lines each test file runs (coverage). A mutant is judged by the test files that run its statement. The same
command continues an interrupted run; another state of the repository starts afresh.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import queue
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import attrs
import parso
from cosmic_ray import plugins
from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.operators.operator import Operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, WorkItem, WorkResult
from coverage import CoverageData

FOLDER = Path("build/mutants").resolve()
# One replacement of each operator: the others are found by the same tests, or change nothing (`is` for `==`).
KINDS = "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_FloorDiv Pow_Mul LShift_RShift RShift_LShift BitAnd_BitOr "
KINDS += "BitOr_BitAnd BitXor_BitOr Eq_NotEq NotEq_Eq Lt_LtE LtE_Lt Gt_GtE GtE_Gt Is_IsNot IsNot_Is Delete_Not "
KINDS += "USub_UAdd"
LEFT_OUT = "tests/repo/"  # they read the sources, or build them
PROCESSES = "tests/distributed/"  # they kill their workers, with what coverage has recorded: these may run any line


class Remove(Operator):  # type: ignore[misc]
    """Replaces a call, or an assignment to an attribute or an item, by `pass`."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        assigned = node.type == "expr_stmt" and node.children[0].type in ("atom_expr", "power")
        called = node.type in ("atom_expr", "power") and node.children[-1].get_first_leaf().value == "("
        if (assigned or called) and node.parent.type == "simple_stmt":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, _: int) -> Any:
        return parso.python.tree.Keyword("pass", node.start_pos, node.get_first_leaf().prefix)

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


plugins.OPERATOR_PROVIDERS["statement"] = {"Remove": Remove}


def git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.splitlines()


def changed(base: str) -> list[str]:
    """The package's files that have changed since the base, or where nothing has, in the last commit."""
    files = git("diff", "--name-only", *git("merge-base", base, "HEAD")) or git("diff", "--name-only", "HEAD~1")
    return [name for name in files if name.startswith("accumfused/") and name.endswith(".py") and Path(name).exists()]


def repository() -> dict[str, bytes]:
    """The files of the repository, with what is compiled."""
    names = {*git("ls-files", "-co", "--exclude-standard"), *map(str, Path("accumfused").glob("*.so"))}
    return {name: Path(name).read_bytes() for name in sorted(names) if Path(name).is_file()}


def copy(files: dict[str, bytes], folder: Path) -> None:
    """Leaves the files in a folder, also where an interrupted run has left a mutant."""
    for name, data in files.items():
        place = folder / name
        if not place.exists() or place.read_bytes() != data:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)


def record(folder: Path, pattern: str, pool: ThreadPoolExecutor) -> tuple[dict[str, float], CoverageData]:
    """Runs each test file once. Returns the seconds of those that pass, and which of them run which lines."""
    journal, settings, data = FOLDER / "seconds.json", FOLDER / "coveragerc", FOLDER / "coverage"
    seconds: dict[str, float | None] = json.loads(journal.read_text()) if journal.exists() else {}
    settings.write_text(
        f"[run]\nsource_dirs = {folder}/accumfused\ndata_file = {data}\nparallel = true\npatch = subprocess\n"
    )
    measured = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}"]

    def run(file: str) -> tuple[str, float | None]:
        start = time.perf_counter()
        command = [*measured, f"--context={file}", "-m", "pytest", "-q", file]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode not in (0, 5):  # 5: all of its tests wait for --full
            print(f"fails without a mutant, and is left out: {file}\n{done.stdout[-2000:]}", flush=True)
        return file, time.perf_counter() - start if done.returncode == 0 else None

    files = [str(path.relative_to(folder)) for path in sorted(folder.glob(pattern))]
    missing = [file for file in files if file not in seconds and not file.startswith(LEFT_OUT)]
    for done, (file, taken) in enumerate(pool.map(run, missing), 1):
        seconds[file] = taken
        journal.write_text(json.dumps(seconds))
        print(f"recorded {done}/{len(missing)}: {file}", flush=True)
    if any(FOLDER.glob("coverage.*")):
        subprocess.run([sys.executable, "-m", "coverage", "combine", "-q", "-a", f"--rcfile={settings}"], check=True)
    lines = CoverageData(str(data))
    lines.read()
    return {file: taken for file in files if (taken := seconds.get(file)) is not None}, lines


def draw(files: list[Path], sample: int, seed: int, database: WorkDB) -> None:
    """Leaves a sample of the files' mutants in the database, none of them in an annotation, which nothing runs."""
    init(files, database, {})
    nodes = [(file, node) for file in files for node in ast.walk(ast.parse(file.read_text()))]
    hints = [(file, getattr(node, name, None)) for file, node in nodes for name in ("annotation", "returns")]
    places = [
        (file, (hint.lineno, hint.col_offset), (hint.end_lineno, hint.end_col_offset)) for file, hint in hints if hint
    ]

    def counts(mutant: MutationSpec) -> bool:
        kind = mutant.operator_name.partition("Operator_")[2]
        is_hint = any(file == mutant.module_path and start <= mutant.start_pos < end for file, start, end in places)
        return not is_hint and (not kind or kind in KINDS.split())

    items = sorted((i for i in database.work_items if counts(i.mutations[0])), key=lambda item: str(item.mutations))
    print(f"{min(sample, len(items))} of {len(items)} mutants in {len(files)} files, seed {seed}", flush=True)
    database.clear()
    database.add_work_items(random.Random(seed).sample(items, min(sample, len(items))))


def finders(mutant: MutationSpec, seconds: dict[str, float], lines: CoverageData) -> list[str]:
    """The test files that run a mutant's statement, or its function or module where the import has run the statement.

    First come quick ones that run much of the module.
    """
    by_line = lines.contexts_by_lineno(str(FOLDER / "1" / mutant.module_path))
    nodes = list(ast.walk(ast.parse(mutant.module_path.read_text())))
    bodies = [part for node in nodes if isinstance(node, ast.FunctionDef) for part in node.body]
    inner = {line for part in bodies for line in span(part)}
    around = [span(node) for node in nodes if isinstance(node, ast.stmt) and mutant.start_pos[0] in span(node)]
    smallest = next((inner & {*each} for each in reversed(around) if inner & {*each}), inner or by_line.keys())
    found = {file for line in smallest for file in by_line.get(line, [])} & seconds.keys()
    share = Counter(file for files in by_line.values() for file in files)
    spread = [file for file in seconds if file.startswith(PROCESSES) and file not in found]
    return [*sorted(found, key=lambda file: seconds[file] / share[file]), *spread]


def span(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def judge(item: WorkItem, tests: list[str], limit: float, folders: queue.Queue[Path]) -> tuple[WorkItem, WorkResult]:
    """Puts a mutant into a free copy, and runs test files, a few at a time, until one fails."""
    folder = folders.get()
    pytest = f"{shlex.quote(sys.executable)} -m pytest -x -q -p no:cacheprovider "
    steps = [f"cd {shlex.quote(str(folder))}", "export PYTHONPATH=$PWD"]  # for the tests' own programs, too
    steps += [pytest + " ".join(tests[i : i + 6]) for i in range(0, len(tests), 6)]
    mutant = attrs.evolve(item.mutations[0], module_path=folder / item.mutations[0].module_path)
    result = mutate_and_test([mutant], shlex.join(["sh", "-c", " && ".join(steps)]), limit)
    folders.put(folder)
    return item, result


def judged(
    database: WorkDB, seconds: dict[str, float], lines: CoverageData, pool: ThreadPoolExecutor, folders: list[Path]
) -> Iterator[tuple[WorkItem, WorkResult]]:
    """The outcomes: those of an interrupted run, then the others as they come."""
    yield from database.completed_work_items
    free = queue.Queue[Path]()
    for folder in folders:
        free.put(folder)
    waiting = []
    for item in database.pending_work_items:
        tests = finders(item.mutations[0], seconds, lines)
        waiting.append(pool.submit(judge, item, tests, 60 + 3 * sum(seconds[test] for test in tests), free))
    for done in as_completed(waiting):
        item, result = done.result()
        database.set_result(item.job_id, result)
        yield item, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders to make mutants of")
    parser.add_argument("--base", default="main", help="the commit whose changes count where no path is given")
    parser.add_argument("--sample", type=int, default=100, help="mutants drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="mutants judged side by side")
    parser.add_argument("--tests", default="tests/**/test_*.py", help="the test files that may find them (a pattern)")
    asked = parser.parse_args()
    paths = asked.paths or [Path(name) for name in changed(asked.base)]
    modules = sorted({file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])})
    if not modules:
        sys.exit("no module of accumfused/ has changed: name files or folders")
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_WAIT_POLICY": "passive", "PYTHONDONTWRITEBYTECODE": "1"}
    files = repository()
    state = hashlib.sha256(repr(files).encode()).hexdigest()
    if not (FOLDER / state).exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
    folders = [FOLDER / str(job + 1) for job in range(asked.jobs)]
    for folder in folders:
        copy({**files, f"../{state}": b""}, folder)
    draw_key = hashlib.sha256(repr((modules, asked.sample, asked.seed, asked.tests)).encode()).hexdigest()
    with use_db(FOLDER / f"{draw_key[:12]}.sqlite") as database, ThreadPoolExecutor(asked.jobs) as pool:
        if not database.num_work_items:
            draw(modules, asked.sample, asked.seed, database)
        outcomes = Counter[str]()
        try:
            for item, result in judged(database, *record(folders[0], asked.tests, pool), pool, folders):
                mutant, outcome = item.mutations[0], str(result.test_outcome and result.test_outcome.value)
                outcomes[outcome if result.output != "timeout" else "killed by its time"] += 1
                name = f"{mutant.module_path}:{mutant.start_pos[0]}: {mutant.operator_name}"
                print(f"{outcomes.total()}/{database.num_work_items} {name}: {outcome}", flush=True)
                if outcome != "killed":
                    print(result.diff or result.output, flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
        print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))


if __name__ == "__main__":
    main()
