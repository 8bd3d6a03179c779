"""What ours is compared with in fp32: torch's own recipes, and other people's optimizers where they are installed.

All of them work on the workload's parameters, gradients and moments, with the same hyper-parameters, behind torch's
`clip_grad_norm_`. None counts before it has come out at the same step as fp64.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench import peer_adapters, stock
from bench.exact import WrongError
from bench.measure import Variant
from bench.peer_adapters import Recipe
from bench.workload import Workload

Row = dict[str, Any]


@dataclass(frozen=True)
class Adapter:
    """How to make a peer.

    Args:
        label: its name in the tables.
        make: makes the recipe over a workload. Raises ImportError where the package is missing, RuntimeError or
            another exception where it does not run here.
        compiles: for seconds, for every shape (torch.compile).
    """

    label: str
    make: Callable[[Workload], Recipe]
    compiles: bool = False


KNOWN: dict[str, Adapter] = {
    "fused": Adapter("clip + AdamW(fused)", peer_adapters.fused),
    "grad_scale": Adapter("grad_scale trick", peer_adapters.grad_scale_trick),
    "foreach": Adapter("clip + AdamW(foreach)", peer_adapters.foreach),
    "for-loop": Adapter("clip + AdamW(for-loop)", peer_adapters.for_loop),
    "compiled": Adapter("clip + compiled AdamW(foreach)", peer_adapters.compiled, compiles=True),
    "per-tensor": Adapter("clip + one Triton launch per tensor", peer_adapters.per_tensor),
    "optimi": Adapter("clip + optimi", peer_adapters.optimi),
    "flashoptim": Adapter("clip + FlashAdamW, fp32", peer_adapters.flashoptim),
    "torchao": Adapter("clip + torchao _AdamW", peer_adapters.torchao, compiles=True),
    "bitsandbytes": Adapter("clip + bitsandbytes AdamW32bit", peer_adapters.bitsandbytes),
    "heavyball": Adapter("clip + heavyball AdamW", peer_adapters.heavyball, compiles=True),
    "deepspeed": Adapter("clip + DeepSpeedCPUAdam", peer_adapters.deepspeed),
    "apex": Adapter("clip + apex FusedAdam", peer_adapters.apex),
    "transformer_engine": Adapter("clip + TransformerEngine FusedAdam", peer_adapters.transformer_engine),
}
REFERENCES = ("fused", "grad_scale")  # every table compares with these


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


def selected(names: Sequence[str] | None, *, compiling: bool) -> list[str]:
    """KNOWN names: the references, and those that were asked for; None: all, those that compile if `compiling`."""
    if names is not None:
        return [name for name in KNOWN if name in names or name in REFERENCES]
    return [name for name, adapter in KNOWN.items() if compiling or not adapter.compiles]


def peers(work: Workload, names: Sequence[str] | None = None, *, compiling: bool = False) -> Peers:
    """Those that run here, over the workload's tensors, each checked against fp64; and why the others do not.

    Args:
        names: see `selected`.
        compiling: whether those that compile for every shape are among "all".
    """
    found = Peers()
    for name in selected(names, compiling=compiling):
        _add(found, KNOWN[name], work, required=name in REFERENCES)
    if names is None and not compiling:
        labels = [adapter.label for adapter in KNOWN.values() if adapter.compiles]
        found.notes.append(
            f"left out: {', '.join(labels)}: they compile for every shape, and are in update's table of one tensor; "
            "--peers with their names has them here"
        )
    return found


def _add(found: Peers, adapter: Adapter, work: Workload, *, required: bool) -> None:
    """`required`: a table is nothing without it, so what it raises is raised."""
    label = adapter.label
    try:
        with quiet():
            recipe = adapter.make(work)
            largest = work.error(recipe.whole, debiased=recipe.debiased)
    except WrongError as wrong:
        if required:
            raise
        found.gaps.append({"name": label, "error": wrong.error, "cannot": f"cannot: wrong, so not timed: {wrong}"})
    except Exception as error:  # of somebody else's package, and of any kind
        if required:
            raise
        found.notes.append(f"left out: {label}: {first_line(error)}")
    else:
        found.variants.append(Variant(label, recipe.run, recipe.setup, recipe.passes))
        found.errors[label] = largest


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


def unscale_clip_and_step(work: Workload) -> Variant:
    """What a GradScaler's loop does, as a variant beside the peers; gradients are LOSS_SCALE times too large."""
    run = stock.unscale_clip_and_step(work.params, work.stock(fused=True))
    return Variant("unscale + clip + fused", run, work.set_grads, stock.UNSCALE_CLIP_FUSED)
