"""What ours is compared with in fp32: torch's own recipes, and other people's optimizers where they are installed.

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
from bench.workload import STEPS, Workload

Row = dict[str, Any]
REFERENCES = ("fused", "grad_scale")  # every table compares with these
_SETTINGS: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
_COUNT = int(STEPS)


@dataclass(frozen=True)
class Recipe:
    """Clipping and a step.

    Args:
        setup: before each run, untimed. Counts that a package keeps as plain numbers are put back there.
        passes: see `bench.measure.Variant`.
        debiased: see `exact.step`.
    """

    run: Callable[[], None]
    setup: Callable[[], None]
    passes: tuple[str, ...] | None = None
    debiased: bool = False

    def whole(self) -> None:
        self.setup()
        self.run()


@dataclass(frozen=True)
class Peer:
    """How to make a recipe over a workload.

    Args:
        make: raises ImportError where the package is missing, RuntimeError or another exception where it does not run.
        compiles: for seconds, for every shape (torch.compile).
    """

    label: str
    make: Callable[[Workload], Recipe]
    compiles: bool = False


def _clipped(
    work: Workload, optimizer: Any, passes: tuple[str, ...] | None = None, *,
    counts: Sequence[dict[str, Any]] = (), debiased: bool = False,
) -> Recipe:  # fmt: skip
    """Clips, and steps by this optimizer; `counts`: where it keeps its step numbers."""

    def setup() -> None:
        work.set_grads()
        for each in counts:
            each["step"] = _COUNT

    return Recipe(stock.clip_and_step(work.params, optimizer), setup, passes, debiased)


def _share(work: Workload, optimizer: Any, first: str = "exp_avg", second: str = "exp_avg_sq", **more: Any) -> None:
    """Gives the optimizer the workload's moments, under its own names."""
    for param, state in zip(work.params, work.states, strict=True):
        optimizer.state[param] = {first: state["exp_avg"], second: state["exp_avg_sq"], **more}


def _on_gpu(work: Workload, passes: tuple[str, ...]) -> tuple[str, ...] | None:
    return passes if work.device.type == "cuda" else None


def _trick(work: Workload) -> Recipe:
    return Recipe(stock.grad_scale_trick(work.params, work.stock(fused=True)), work.set_grads, stock.TRICK)


def _compiled(work: Workload) -> Recipe:
    """Takes torch.compile of the foreach step: one kernel where it can."""
    if work.device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        raise RuntimeError("torch.compile needs a C++ compiler, and there is no g++ or clang++")
    torch.compiler.reset()  # or it gives up, after so many sets of shapes, and runs uncompiled
    optimizer = work.stock(foreach=True)
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    return _clipped(work, optimizer, stock.CLIP_FUSED)


def _optimi(work: Workload) -> Recipe:
    """Takes torch-optimi, whose newer versions have Triton kernels; it keeps the moments with their bias corrected."""
    module, on_gpu = importlib.import_module("optimi"), work.device.type == "cuda"
    try:
        optimizer = module.AdamW(work.params, triton=on_gpu, foreach=False, **_SETTINGS)
    except TypeError as error:
        raise RuntimeError(f"this version has no Triton kernels ({error})") from error
    _share(work, optimizer, kahan_comp=torch.zeros(1, dtype=torch.uint8, device=work.device) if on_gpu else None)
    optimizer.param_groups[0].update(setup=True, step=work.own_step(torch.int32))
    return _clipped(work, optimizer, _on_gpu(work, stock.CLIP_FUSED), debiased=True)


def _flashoptim(work: Workload) -> Recipe:
    """Takes its fp32: nothing quantized. On a CPU it has no fused step."""
    fused = {"fused": work.device.type == "cuda", "decouple_lr": False, "quantize": False, "master_weight_bits": None}
    optimizer = importlib.import_module("flashoptim").FlashAdamW(work.params, **fused, **_SETTINGS)
    for param, state in zip(work.params, work.states, strict=True):
        optimizer._ensure_state_initialized(param, hparams=optimizer.param_groups[0])
        own = optimizer.state[param]
        own["step"] = work.own_step(torch.int64)
        for name in ("exp_avg", "exp_avg_sq"):
            own[name]._data = state[name]
    return _clipped(work, optimizer, _on_gpu(work, stock.CLIP_FUSED))


def _torchao(work: Workload) -> Recipe:
    """Takes the fp32 one, with which its 8-bit ones share their code: a compiled step per tensor."""
    optimizer = importlib.import_module("torchao.optim")._AdamW(work.params, **_SETTINGS)
    optimizer.state.update(zip(work.params, work.states, strict=True))
    return _clipped(work, optimizer, stock.CLIP_FUSED)


def _bitsandbytes(work: Workload) -> Recipe:
    optimizer = importlib.import_module("bitsandbytes").optim.AdamW32bit(work.params, **_SETTINGS)
    optimizer.initialized = True  # its states are those that are put here
    _share(work, optimizer, "state1", "state2")
    return _clipped(work, optimizer, _on_gpu(work, stock.CLIP_FUSED), counts=[*optimizer.state.values()])


def _heavyball(work: Workload) -> Recipe:
    """Its moments are kept with their bias corrected, in a state within the state.

    eps is the least that it divides by, not a summand; the workload's second moments are too large to show it.
    """
    module: Any = importlib.import_module("heavyball")
    internals: Any = importlib.import_module("heavyball.utils")
    internals.compile_mode = "default"  # its own default tries many kernels first
    optimizer = module.AdamW(work.params, consume_grad=False, **_SETTINGS)

    def setup() -> None:
        work.set_grads()
        optimizer.param_groups[0]["step"] = _COUNT
        for param, state in zip(work.params, work.states, strict=True):
            optimizer.state[param] = {0: {
                "step": torch.tensor(_COUNT), "is_initialized": {0},
                "update_by_adam_exp_avg_0": state["exp_avg"], "update_by_adam_exp_avg_sq_0": state["exp_avg_sq"],
            }}  # fmt: skip

    return Recipe(stock.clip_and_step(work.params, optimizer), setup, debiased=True)


def _deepspeed(work: Workload) -> Recipe:
    if work.device.type != "cpu":
        raise RuntimeError("it steps on the CPU")
    make = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    optimizer = make(work.params, adamw_mode=True, **_SETTINGS)
    _share(work, optimizer)
    return _clipped(work, optimizer, stock.CLIP_FUSED, counts=[*optimizer.state.values()])


def _nvidia(package: str) -> Callable[[Workload], Recipe]:
    """Takes multi-tensor kernels, which count steps in the group."""

    def make(work: Workload) -> Recipe:
        module = importlib.import_module(package)
        if work.device.type != "cuda":
            raise RuntimeError("it steps on a GPU")
        optimizer = module.FusedAdam(work.params, adam_w_mode=True, **_SETTINGS)
        _share(work, optimizer)
        return _clipped(work, optimizer, stock.CLIP_FUSED, counts=optimizer.param_groups)

    return make


KNOWN: dict[str, Peer] = {
    "fused": Peer("clip + AdamW(fused)", lambda work: _clipped(work, work.stock(fused=True), stock.CLIP_FUSED)),
    "grad_scale": Peer("grad_scale trick", _trick),
    "foreach": Peer("clip + AdamW(foreach)", lambda work: _clipped(work, work.stock(foreach=True))),
    "for-loop": Peer("clip + AdamW(for-loop)", lambda work: _clipped(work, work.stock(foreach=False))),
    "compiled": Peer("clip + compiled AdamW(foreach)", _compiled, compiles=True),
    "optimi": Peer("clip + optimi", _optimi),
    "flashoptim": Peer("clip + FlashAdamW, fp32", _flashoptim),
    "torchao": Peer("clip + torchao _AdamW", _torchao, compiles=True),
    "bitsandbytes": Peer("clip + bitsandbytes AdamW32bit", _bitsandbytes),
    "heavyball": Peer("clip + heavyball AdamW", _heavyball, compiles=True),
    "deepspeed": Peer("clip + DeepSpeedCPUAdam", _deepspeed),
    "apex": Peer("clip + apex FusedAdam", _nvidia("apex.optimizers")),
    "transformer_engine": Peer("clip + TransformerEngine FusedAdam", _nvidia("transformer_engine.pytorch.optimizers")),
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


def peers(work: Workload, names: Sequence[str] | None = None, *, compiling: bool = False) -> Peers:
    """Checks those that run here, over the workload's tensors, against fp64, and says why the others do not run.

    Args:
        names: beside the references, without which a table is nothing: what these raise is raised. None: all.
        compiling: whether those that compile for every shape are among all.
    """
    found = Peers()
    for name, peer in KNOWN.items():
        wanted = name in names if names is not None else compiling or not peer.compiles
        if name in REFERENCES or wanted:
            _add(found, peer, work, required=name in REFERENCES)
    if names is None and not compiling:
        labels = ", ".join(peer.label for peer in KNOWN.values() if peer.compiles)
        found.notes.append(f"left out: {labels}: they compile for every shape, and are in update's table of a tensor; "
                           "--peers with their names has them here")  # fmt: skip
    return found


def _add(found: Peers, peer: Peer, work: Workload, *, required: bool) -> None:
    try:
        with quiet():
            recipe = peer.make(work)
            largest = work.error(recipe.whole, debiased=recipe.debiased)
    except Exception as error:  # of somebody else's package, and of any kind
        if required:
            raise
        if isinstance(error, WrongError):
            found.gaps.append(wrong(peer.label, error))
        else:
            found.notes.append(f"left out: {peer.label}: {first_line(error)}")
    else:
        found.variants.append(Variant(peer.label, recipe.run, recipe.setup, recipe.passes))
        found.errors[peer.label] = largest


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


def unscale_clip_and_step(work: Workload) -> Variant:
    """Does what a GradScaler's loop does; gradients are LOSS_SCALE times too large."""
    run = stock.unscale_clip_and_step(work.params, work.stock(fused=True))
    return Variant("unscale + clip + fused", run, work.set_grads, stock.UNSCALE_CLIP_FUSED)
