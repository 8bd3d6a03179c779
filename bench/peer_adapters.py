"""One function per optimizer: it over a workload's own tensors, as its package wants them.

Each shares the workload's moments, so it needs no memory of its own and its step can be checked. Counts that a package
keeps as plain numbers are put back before each run, which is untimed.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench import stock
from bench.exact import BETAS, EPS, LR, WEIGHT_DECAY
from bench.workload import STEPS, Workload

_SETTINGS: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
_COUNT = int(STEPS)


@dataclass(frozen=True)
class Recipe:
    """Clipping and a step.

    Args:
        run: what is timed.
        setup: before it, untimed.
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


def fused(work: Workload) -> Recipe:
    return _stock(work, work.stock(fused=True), stock.CLIP_FUSED)


def foreach(work: Workload) -> Recipe:
    return _stock(work, work.stock(foreach=True))


def for_loop(work: Workload) -> Recipe:
    return _stock(work, work.stock(foreach=False))


def grad_scale_trick(work: Workload) -> Recipe:
    run = stock.grad_scale_trick(work.params, work.stock(fused=True))
    return Recipe(run, work.set_grads, stock.TRICK)


def compiled(work: Workload) -> Recipe:
    """torch.compile of the foreach step: one kernel where it can. Raises: RuntimeError: no compiler."""
    if work.device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        raise RuntimeError("torch.compile needs a C++ compiler, and there is no g++ or clang++")
    torch.compiler.reset()  # or it gives up, after so many sets of shapes, and runs uncompiled
    optimizer = work.stock(foreach=True)
    step = torch.compile(optimizer.step)

    def run() -> None:
        stock.clip(work.params)
        step()

    return Recipe(run, work.set_grads, stock.CLIP_FUSED)


def per_tensor(work: Workload) -> Recipe:
    if work.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton runs on GPUs")
    module: Any = importlib.import_module("bench.per_tensor")  # imports Triton, so not before
    return _stock(work, module.PerTensorAdamW(work.params, work.states, work.own_step()), stock.CLIP_FUSED)


def optimi(work: Workload) -> Recipe:
    """torch-optimi, whose newer versions have Triton kernels; it keeps the moments with their bias corrected."""
    module: Any = importlib.import_module("optimi")
    on_gpu = work.device.type == "cuda"
    try:
        optimizer = module.AdamW(work.params, triton=on_gpu, foreach=False, **_SETTINGS)
    except TypeError as error:
        raise RuntimeError(f"this version has no Triton kernels ({error})") from error
    for param, state in zip(work.params, work.states, strict=True):
        kahan = torch.zeros(1, dtype=torch.uint8, device=work.device) if on_gpu else None
        optimizer.state[param] = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"], "kahan_comp": kahan}
    optimizer.param_groups[0].update(setup=True, step=work.own_step(torch.int32))
    run = stock.clip_and_step(work.params, optimizer)
    return Recipe(run, work.set_grads, stock.CLIP_FUSED if on_gpu else None, debiased=True)


def flashoptim(work: Workload) -> Recipe:
    """Its fp32: nothing quantized. On a CPU it has no fused step."""
    module: Any = importlib.import_module("flashoptim")
    optimizer = module.FlashAdamW(
        work.params, quantize=False, master_weight_bits=None, fused=work.device.type == "cuda", decouple_lr=False,
        **_SETTINGS,
    )  # fmt: skip
    for param, state in zip(work.params, work.states, strict=True):
        optimizer._ensure_state_initialized(param, hparams=optimizer.param_groups[0])
        own = optimizer.state[param]
        own["step"] = work.own_step(torch.int64)
        for name in ("exp_avg", "exp_avg_sq"):
            own[name]._data = state[name]
    return _stock(work, optimizer, stock.CLIP_FUSED if work.device.type == "cuda" else None)


def torchao(work: Workload) -> Recipe:
    """The fp32 one, with which its 8-bit ones share their code: a compiled step per tensor."""
    module: Any = importlib.import_module("torchao.optim")
    optimizer = module._AdamW(work.params, **_SETTINGS)
    optimizer.state.update(zip(work.params, work.states, strict=True))
    return _stock(work, optimizer, stock.CLIP_FUSED)


def bitsandbytes(work: Workload) -> Recipe:
    module: Any = importlib.import_module("bitsandbytes")
    optimizer = module.optim.AdamW32bit(work.params, **_SETTINGS)
    optimizer.initialized = True  # its states are those that are put here
    for param, state in zip(work.params, work.states, strict=True):
        optimizer.state[param] = {"step": _COUNT, "state1": state["exp_avg"], "state2": state["exp_avg_sq"]}
    return _counting(work, optimizer, stock.CLIP_FUSED if work.device.type == "cuda" else None)


def heavyball(work: Workload) -> Recipe:
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


def deepspeed(work: Workload) -> Recipe:
    if work.device.type != "cpu":
        raise RuntimeError("it steps on the CPU")
    module: Any = importlib.import_module("deepspeed.ops.adam")
    optimizer = module.DeepSpeedCPUAdam(work.params, adamw_mode=True, **_SETTINGS)
    _share(work, optimizer, {"step": _COUNT})
    return _counting(work, optimizer, stock.CLIP_FUSED)


def apex(work: Workload) -> Recipe:
    return _fused_adam(work, "apex.optimizers")


def transformer_engine(work: Workload) -> Recipe:
    return _fused_adam(work, "transformer_engine.pytorch.optimizers")


def _fused_adam(work: Workload, package: str) -> Recipe:
    """NVIDIA's multi-tensor kernels; the count is the group's."""
    module: Any = importlib.import_module(package)
    if work.device.type != "cuda":
        raise RuntimeError("it steps on a GPU")
    optimizer = module.FusedAdam(work.params, adam_w_mode=True, **_SETTINGS)
    _share(work, optimizer, {})

    def setup() -> None:
        work.set_grads()
        optimizer.param_groups[0]["step"] = _COUNT

    return Recipe(stock.clip_and_step(work.params, optimizer), setup, stock.CLIP_FUSED)


def _stock(work: Workload, optimizer: Any, passes: tuple[str, ...] | None = None) -> Recipe:
    return Recipe(stock.clip_and_step(work.params, optimizer), work.set_grads, passes)


def _share(work: Workload, optimizer: Any, more: dict[str, Any]) -> None:
    for param, state in zip(work.params, work.states, strict=True):
        optimizer.state[param] = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"], **more}


def _counting(work: Workload, optimizer: Any, passes: tuple[str, ...] | None) -> Recipe:
    """Of an optimizer that counts steps in a number in each parameter's state."""

    def setup() -> None:
        work.set_grads()
        for param in work.params:
            optimizer.state[param]["step"] = _COUNT

    return Recipe(stock.clip_and_step(work.params, optimizer), setup, passes)
