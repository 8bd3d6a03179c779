"""One mutant in a copy of the repository, and the tests that are to find it: see mutants.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mutants_list import ROOT, Mutant, switched

PRINTS_FUNCTORS = tuple(f"accumfused/{name}" for name in ("arithmetic.py", "functors.py", "optimizers/", "rule.py"))


class Copy:
    """The tree in which one job runs its mutants: built once, written only where something changes."""

    def __init__(self, folder: Path, mutants: list[Mutant], tests: Path | None) -> None:
        self.folder, self.output = folder, folder / "build" / "last_output.txt"
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.splitlines()
        files = {name: (ROOT / name).read_bytes() for name in listed if (ROOT / name).is_file()}
        if tests is not None:
            files = {name: data for name, data in files.items() if not name.startswith("tests/")}
            files |= {f"tests/{p.relative_to(tests)}": p.read_bytes() for p in tests.rglob("*") if _is_source(p)}
            files["pyproject.toml"] = (tests.parent / "pyproject.toml").read_bytes()
        files |= switched(files, mutants)
        for gone in {p for p in (folder / "tests").rglob("*") if _is_source(p)} - {folder / name for name in files}:
            gone.unlink()
        for name, data in files.items():
            path = folder / name
            if not path.exists() or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        self.build()
        self.build_emulation()

    def build(self) -> None:
        """The native module, with the functors that its rules make; nothing where it is up to date."""
        environment = {**os.environ, "ACCUMFUSED_NATIVE": "1", "ACCUMFUSED_CUDA": "0"}
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(command, cwd=self.folder, env=environment, check=True)

    def build_emulation(self) -> None:
        """That of csrc/cuda: one defect that does not compile would take all its tests from the others."""
        environment = {**os.environ, "PYTHONPATH": f"{self.folder}{os.pathsep}{self.folder / 'tests'}"}
        command = [sys.executable, "-c", "import emulation; emulation.why_not() or emulation.load()"]
        subprocess.run(command, cwd=self.folder, env=environment, check=True)

    @contextmanager
    def holding(self, mutant: Mutant) -> Iterator[None]:
        """While the mutant is in the copy; the environment chooses those of csrc, and one of the rules is compiled."""
        path = self.folder / mutant.file
        is_compiled = mutant.file.startswith(PRINTS_FUNCTORS)
        text = path.read_text()
        try:
            if not mutant.is_native:
                path.write_text(text.replace(mutant.find, mutant.replace))
            if is_compiled:
                self.build()
            yield
        finally:
            if not mutant.is_native:
                path.write_text(text)
            if is_compiled:
                self.build()

    def tests(self, mutant: Mutant, *, rest: bool) -> list[str]:
        """The mutant's own, or where there are none all, those first that speak of its module most; or the rest."""
        own = [f"tests/{name}" for name in mutant.tests if (self.folder / "tests" / name).exists()]
        if own and not rest:
            return own
        if rest and not own:
            return []
        name = Path(mutant.file).stem
        every = {
            path.relative_to(self.folder).as_posix(): path.read_text().count(name)
            for path in (self.folder / "tests").rglob("test_*.py")
        }
        return sorted(every.keys() - own, key=lambda test: (-every[test], test))

    def run(
        self, tests: list[str], number: int, seconds: float, but: Iterable[str] = (), *, stops: bool = True
    ) -> tuple[list[Any], int]:
        """What the plugin has written, and pytest's exit code: below 0 it crashed, 124: it ran out of time."""
        with tempfile.TemporaryDirectory() as scratch:
            log = Path(scratch, "log")
            log.touch()
            environment = {
                **os.environ, "AF_MUTANTS_LOG": str(log), "AF_MUTANTS_ROOT": str(self.folder), "AF_MUTANT": str(number),
                "AF_MUTANTS_STOP": str(int(stops)),
                "PYTHONPATH": f"{self.folder}{os.pathsep}{self.folder / 'tools'}", "PYTHONDONTWRITEBYTECODE": "1",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1", "HYPOTHESIS_STORAGE_DIRECTORY": scratch,
            }  # fmt: skip
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mutants_plugin"]
            command += ["--continue-on-collection-errors", "--tb=short", *(f"--deselect={test}" for test in but)]
            with self.output.open("wb") as output:
                process = subprocess.Popen(
                    [*command, *tests], cwd=self.folder, env=environment, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )  # fmt: skip
                try:
                    code = process.wait(seconds)
                except subprocess.TimeoutExpired:
                    code = 124
                with suppress(ProcessLookupError):  # and the processes that it has started
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return [json.loads(line) for line in log.read_text().splitlines()], code

    def failing(self, tests: Iterable[str]) -> set[str]:
        """Those of these tests, or modules of tests, that fail with nothing changed, or are there no longer."""
        every = set(tests) - {"tests"}  # conftest.py, without which nothing runs
        files = {name.split("::")[0] for name in every}
        self.run(["--collect-only", *sorted(name for name in files if (self.folder / name).exists())], 0, 3600)
        there = files | {*self.output.read_text().splitlines()}
        gone = every - there  # of which one is enough for pytest to run none
        names = sorted(every & there)
        if not names:
            return gone
        entries, _ = self.run(names, 0, 3600, stops=False)
        if not any("ended" in entry for entry in entries):
            raise RuntimeError(f"the tests do not run without a mutant: {self.output.read_text()[-3000:]}")
        failed = {entry["failed"] for entry in entries if "failed" in entry}
        fail = {name for name in names if name in failed or any(other.startswith(f"{name}::") for other in failed)}
        return fail | gone


def _is_source(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def judge(copy: Copy, mutant: Mutant, seconds: float, *, rest: bool, but: Iterable[str]) -> dict[str, Any]:
    """Runs tests until one kills the mutant. Args: rest: also those that are not its own; but: tests to leave out."""
    start, errors = time.monotonic(), set[str]()
    killer: dict[str, Any] | None = None
    for tests in [copy.tests(mutant, rest=False), copy.tests(mutant, rest=True) if rest else []]:
        if killer is not None or not tests:
            continue
        with copy.holding(mutant):
            entries, code = copy.run(tests, mutant.number, seconds, but)
        failures = [entry for entry in entries if "failed" in entry]
        errors |= {f"{entry['failed']}: {entry['error']}" for entry in failures if entry["how"] is None}
        kills = [entry for entry in failures if entry["how"] is not None]
        killer = kills[0] if kills else _lost(copy, entries, code, seconds)
    found = killer or {"status": "survived"}
    return {
        "digest": mutant.digest, "status": found.get("status", "killed"), "by": found.get("failed"),
        "how": found.get("how"), "error": found.get("error"), "errors_in_tests": sorted(errors), "all_tests": rest,
        "is_sound": False, "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip


def _lost(copy: Copy, entries: list[Any], code: int, seconds: float) -> dict[str, Any] | None:
    """A session that did not come to its end: it crashed, or a test hung, or there was not enough time for all."""
    if any("ended" in entry for entry in entries) and code != 124:
        return None
    begun = next((entry for entry in reversed(entries) if "test" in entry), None)
    if code == 124:
        last = time.time() - begun["at"] if begun else 0.0
        hangs = begun is not None and last > seconds / 2
        return {"failed": begun and begun["test"], "how": "hangs", "status": "killed" if hangs else "unfinished"}
    if begun is not None:
        return {"failed": begun["test"], "how": f"crashed with {code}"}
    text = copy.output.read_text(errors="replace")  # conftest.py did not import
    frames = [line for line in text.splitlines() if line.startswith(("accumfused/", "tests/"))]
    if frames and frames[-1].startswith("accumfused/"):
        return {"failed": "tests", "how": "the tests do not import", "error": text[-300:]}
    raise RuntimeError(f"pytest does not run: {text[-3000:]}")
