"""A run of suites: in turn, with what is left to wait for, each one's figures kept as soon as they are there."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import progress
from bench.machine import nvidia_smi
from bench.options import Chosen
from bench.report import Table, ceiling_table, show, write_json
from bench.suites import Suite

INTERRUPTED = 130  # the exit code of what Ctrl-C has ended


class Run:
    """Runs suites one after the other, shows their tables, and writes them.

    Args:
        about: the machine; what the GPU's driver says after each suite is added to it.
        path: of the JSON; None: nothing is written.
    """

    def __init__(self, bench: Chosen, about: dict[str, Any], path: Path | None, console: Console) -> None:
        self.found: dict[str, list[Table]] = {}
        self.failed: list[str] = []
        self._taken: dict[str, float] = {}
        self._bench, self._about, self._path, self._console = bench, about, path, console

    def run(self, suites: Mapping[str, Suite]) -> int | str | None:
        """What sys.exit takes: None, 130 if it was interrupted, or which suites failed."""
        start, bench, interrupted = time.perf_counter(), self._bench, False
        try:
            for name, suite in suites.items():
                line = progress.line(name, [*suites], self._taken, on_gpu=bench.on_gpu, quick=bench.quick)
                self._console.print(line, style="dim")
                self._one(name, suite)
                self._save()  # now already: a later suite may not come to its end
        except KeyboardInterrupt:
            interrupted = True
            self._console.print(f"\ninterrupted: {len(self.found)} of {len(suites)} suites are complete")
        if bench.ceilings.best_rates() or bench.ceilings.reason:
            self.found["ceilings"] = [ceiling_table(bench.ceilings)]
            show(self.found["ceilings"][0], self._console)
        self._console.print(f"{time.perf_counter() - start:.0f} s")
        self._save(interrupted=interrupted)
        if self._path is not None:
            self._console.print(f"written to {self._path}", markup=False, highlight=False, soft_wrap=True)
        if interrupted:
            return INTERRUPTED
        return f"failed: {', '.join(self.failed)}" if self.failed else None

    def _one(self, name: str, suite: Suite) -> None:
        began = time.perf_counter()
        self._bench.begin()
        try:
            tables = suite(self._bench)
        except Exception:  # the others' figures are not lost
            self.failed.append(name)
            self._console.print(f"{name} failed:\n{traceback.format_exc()}", markup=False, highlight=False)
            return
        self._bench.mark(tables)
        self.found[name] = tables
        self._taken[name] = time.perf_counter() - began
        for table in tables:
            show(table, self._console)
        if self._bench.on_gpu:
            self._about["nvidia_smi_after"][name] = nvidia_smi()
        self._console.print(f"{name}: {self._taken[name]:.0f} s\n", style="dim")

    def _save(self, *, interrupted: bool = False) -> None:
        if self._path is not None:
            write_json(self._path, {**self._about, "quick": self._bench.quick}, self.found, interrupted=interrupted)
