"""What ours is compared with in fp32: torch's own recipes, and torch-optimi where it is installed.

All of them work on the workload's parameters, gradients and moments, with the same hyper-parameters, behind torch's
`clip_grad_norm_`: none needs memory of its own. None counts before it has come out at the same step as fp64.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench import stock
from bench.exact import BETAS, EPS, LR, WEIGHT_DECAY, WrongError
from bench.measure import Variant
from bench.tables import Row
from bench.workload import Workload


@dataclass(frozen=True)
class Recipe:
    """Clipping and a step.

    Args:
        passes: see `bench.measure.Variant`.
        debiased: see `exact.step`.
    """

    run: Callable[[], None]
    passes: tuple[str, ...] | None = None
    debiased: bool = False


def _clipped(work: Workload, passes: tuple[str, ...] | None = None, **settings: bool) -> Recipe:
    return Recipe(stock.clip_and_step(work.params, work.stock(**settings)), passes)


def _trick(work: Workload) -> Recipe:
    return Recipe(stock.grad_scale_trick(work.params, work.stock(fused=True)), stock.TRICK)


def _compiled(work: Workload) -> Recipe:
    """Takes torch.compile of the foreach step: one kernel where it can."""
    if work.device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        raise RuntimeError("torch.compile needs a C++ compiler, and there is no g++ or clang++")
    torch.compiler.reset()  # or it gives up, after so many sets of shapes, and runs uncompiled
    optimizer = work.stock(foreach=True)
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    return Recipe(stock.clip_and_step(work.params, optimizer), stock.CLIP_FUSED)


def _optimi(work: Workload) -> Recipe:
    """Takes torch-optimi, whose newer versions have Triton kernels; it keeps the moments with their bias corrected."""
    settings: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    module, on_gpu = importlib.import_module("optimi"), work.device.type == "cuda"
    try:
        optimizer = module.AdamW(work.params, triton=on_gpu, foreach=False, **settings)
    except TypeError as error:
        raise RuntimeError(f"this version has no Triton kernels ({error})") from error
    more = {"kahan_comp": torch.zeros(1, dtype=torch.uint8, device=work.device) if on_gpu else None}
    for param, state in zip(work.params, work.states, strict=True):
        optimizer.state[param] = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"], **more}
    optimizer.param_groups[0].update(setup=True, step=work.own_step(torch.int32))
    passes = stock.CLIP_FUSED if on_gpu else None
    return Recipe(stock.clip_and_step(work.params, optimizer), passes, debiased=True)


FUSED, TRICK = "clip + AdamW(fused)", "grad_scale trick"
FOREACH, FOR_LOOP, COMPILED = "clip + AdamW(foreach)", "clip + AdamW(for-loop)", "clip + compiled AdamW(foreach)"
OPTIMI = "clip + optimi"
AGAINST = {"trick": TRICK, "clip+fused": FUSED}  # every table compares with these: heading -> name
KNOWN: dict[str, Callable[[Workload], Recipe]] = {
    FUSED: lambda work: _clipped(work, stock.CLIP_FUSED, fused=True),
    TRICK: _trick,
    FOREACH: lambda work: _clipped(work, foreach=True),
    FOR_LOOP: _clipped,
    COMPILED: _compiled,  # for seconds, for every shape
    OPTIMI: _optimi,
}


@dataclass
class Peers:
    """Who runs on a workload, already checked, and what has to be said of the others.

    Args:
        errors: name -> the largest error of a parameter after one step, against fp64.
        gaps: rows without a time, each with its reason under "cannot".
    """

    variants: list[Variant] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    gaps: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def peers(work: Workload, names: Sequence[str] = ()) -> Peers:
    """Checks recipes over the workload's tensors against fp64, and says why others do not run.

    Args:
        names: beside those of AGAINST, without which a table is nothing: what these raise is raised.
    """
    found = Peers()
    for name in (FUSED, TRICK, *names):
        try:
            with quiet():
                recipe = KNOWN[name](work)
                work.set_grads()
                found.errors[name] = work.error(recipe.run, debiased=recipe.debiased)
        except Exception as error:  # of somebody else's package, and of any kind
            if name in AGAINST.values():
                raise
            if isinstance(error, WrongError):
                found.gaps.append(wrong(name, error))
            else:
                found.notes.append(f"left out: {name}: {first_line(error)}")
        else:
            found.variants.append(Variant(name, recipe.run, work.set_grads, recipe.passes))
    return found


def wrong(name: str, error: WrongError) -> Row:
    return {"name": name, "error": error.error, "cannot": f"cannot: wrong, so not timed: {error}"}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences packages that greet their users at import with warnings, and with logs of better machines."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
