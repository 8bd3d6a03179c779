"""Who ours is compared with: torch's own recipes in fp32, and how tables treat what fails or comes out elsewhere.

The recipes work on the workload's parameters, gradients and moments, with the same hyper-parameters: none needs memory
of its own. None counts before it has come out at the same step as fp64.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from bench import stock
from bench.exact import WrongError
from bench.measure import Variant
from bench.tables import Row, Table
from bench.workload import Sets, Workload

FUSED, TRICK = "clip + AdamW(fused)", "grad_scale trick"
FOREACH, FOR_LOOP, COMPILED = "clip + AdamW(foreach)", "clip + AdamW(for-loop)", "clip + compiled AdamW(foreach)"
AGAINST = {"trick": TRICK, "clip+fused": FUSED}  # every table compares with these: heading -> name
Recipe = Callable[[], object]


def _recipe(make: Callable[..., Recipe], **settings: bool) -> Callable[..., Recipe]:
    return lambda work, **more: make(work.params, work.stock(**settings, **more))


def _compiled(work: Workload) -> Recipe:
    """Takes torch.compile of the foreach step: one kernel where it can."""
    torch.compiler.reset()  # or it gives up, after so many sets of shapes, and runs uncompiled
    optimizer = work.stock(foreach=True)
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    return stock.clip_and_step(work.params, optimizer)


# Name -> a clipped step over a workload, and the passes that it consists of (see `bench.measure.Variant`).
KNOWN: dict[str, tuple[Callable[..., Recipe], tuple[str, ...] | None]] = {
    FUSED: (_recipe(stock.clip_and_step, fused=True), stock.CLIP_FUSED_PASSES),
    TRICK: (_recipe(stock.grad_scale_trick, fused=True), stock.TRICK_PASSES),
    FOREACH: (_recipe(stock.clip_and_step, foreach=True), None),
    FOR_LOOP: (_recipe(stock.clip_and_step), None),
    COMPILED: (_compiled, stock.CLIP_FUSED_PASSES),  # for seconds, for every shape
}


@dataclass
class Checked:
    """Variants over a workload that come out at the same step as fp64, and rows for the others.

    Args:
        errors: name -> the largest error of a parameter after one step.
        gaps: rows without a time, each with its reason under "cannot".
    """

    work: Workload
    variants: list[Variant] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    gaps: list[Row] = field(default_factory=list)

    def add(self, variant: Variant, sets: Sets | None = None, scale: float = 1.0) -> None:
        """Adds a variant that is right; see `Workload.error`."""
        self.errors[variant.name] = self.work.error(variant.whole, sets, scale)
        self.variants.append(variant)

    def attempt(
        self, name: str, make: Callable[[], Recipe], passes: tuple[str, ...] | None, sets: Sets | None = None
    ) -> None:
        """Adds a step from p.grad, or a gap where it cannot be made, does not run, or is wrong."""
        try:
            self.add(Variant(name, make(), self.work.set_grads, passes), sets=sets)
        except Exception as error:  # of any kind: the others have their times
            self.gaps.append(gap(name, error))

    def explain(self, table: Table) -> Table:
        """Adds to a table what was checked, and what is missing."""
        worst = max(self.errors, key=lambda name: self.errors[name])
        error = f"{self.errors[worst]:.1e} ({worst}); all were checked"
        table.rows += self.gaps
        table.notes.append(f"largest error of a parameter after one step, against fp64: {error}")
        return table


def peers(work: Workload, names: Sequence[str] = ()) -> Checked:
    """Checks those of AGAINST, without which a table is nothing, and other recipes over the workload's tensors."""
    found = Checked(work)
    for name in (FUSED, TRICK, *names):
        make, passes = KNOWN[name]
        work.set_grads()
        if name in AGAINST.values():
            found.add(Variant(name, make(work), work.set_grads, passes))
            continue
        with quiet():
            found.attempt(name, partial(make, work), passes)
    return found


def other(module: str, name: str, **settings: Any) -> Callable[..., Any]:
    """Makes another package's optimizer; calling it imports the package."""
    return lambda params, **more: getattr(importlib.import_module(module), name)(params, **more, **settings)


def gap(name: str, error: Exception) -> Row:
    """Makes a row without a time, which says why."""
    if isinstance(error, WrongError):
        return {"name": name, "error": error.error, "cannot": f"wrong, so not timed: {error}"}
    lines = str(error).splitlines()
    return {"name": name, "cannot": f"{type(error).__name__}: {lines[0] if lines else 'no message'}"}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences compilers, and packages that greet their users with warnings and with logs of better machines."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
