"""Storage formats: a clipped AdamW step from p.grad with 16-bit parameters and leaner states, against fp32 and peers.

Each variant has parameters and states of its own, so that its bytes are its own; gradients are bf16 beside bf16
parameters. Kept bytes are counted from the tensors that the optimizer keeps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import accumfused as af
from bench import shapes, stock
from bench.exact import ADAMW, MAX_GRAD_NORM, WrongError, deviation, master
from bench.measure import Variant
from bench.peers import gap, other, quiet
from bench.suites import Bench
from bench.tables import Row, Table, timed
from bench.workload import random_tensors, state_bytes

FOLLOWS = ("backend", "model")
FP32, BF16 = torch.float32, torch.bfloat16
_STOCK = "clip + AdamW(fused), fp32"
_EXACT = 1e-3
_EIGHT_BITS = 0.02  # a hundredth of a moment, here and there
_SIXTEEN_BITS = 0.6  # a step of a weight is about as large as the weight's last bit


@dataclass(frozen=True)
class Lean:
    """A variant: its parameters' dtype, its optimizer, and what its format may be off.

    Args:
        tolerance: see `exact.deviation`: what the first two steps may be off, of what they change.
        package: whose it is; None where it is ours or torch's.
    """

    name: str
    dtype: torch.dtype
    make: Callable[[list[torch.nn.Parameter]], Any]
    tolerance: float
    package: str | None = None


def ours(label: str, backend: str) -> list[Lean]:
    formats: dict[str, tuple[torch.dtype, dict[str, Any], float]] = {
        "fp32": (FP32, {}, _EXACT),
        "bf16 + split16, fp32 states": (BF16, {}, _EXACT),
        "bf16 + split16, 8-bit states": (BF16, {"state_dtype": "8bit"}, _EIGHT_BITS),
        "bf16 + split8, 8-bit states": (BF16, {"state_dtype": "8bit", "master_weights": "split8"}, _EIGHT_BITS),
        "bf16 stochastic, 8-bit states": (BF16, {"state_dtype": "8bit", "master_weights": None}, _SIXTEEN_BITS),
    }

    known = {**ADAMW, "max_grad_norm": MAX_GRAD_NORM, "backend": backend}
    return [
        Lean(f"{label}, {name}", dtype, partial(af.AdamW, **known, **kept), off)
        for name, (dtype, kept, off) in formats.items()
    ]


def torchs() -> list[Lean]:
    fused = partial(torch.optim.AdamW, fused=True, **ADAMW)
    return [
        Lean(_STOCK, FP32, fused, _EXACT),
        Lean("clip + AdamW(fused), bf16 throughout", BF16, fused, _SIXTEEN_BITS),
    ]


def packages() -> list[Lean]:
    """Returns other packages' optimizers, which compile for seconds, for every shape."""
    eights = {package: other(f"{package}.optim", "AdamW8bit", **ADAMW) for package in ("torchao", "bitsandbytes")}
    return [Lean(f"clip + {name} AdamW8bit, fp32", FP32, make, _EIGHT_BITS, name) for name, make in eights.items()]


def run(bench: Bench) -> list[Table]:
    models = bench.models() if bench.on_gpu else bench.models(shapes.GPT2_BLOCKS)
    return [_model(bench, name, of, backend) for name, of in models.items() for backend in bench.backends]


def _model(bench: Bench, name: str, of: shapes.Shapes, backend: str) -> Table:
    """Makes a table for each of our backends: the variants of all of them together do not fit in a GPU."""
    end = f", {bench.label(backend)}" if len(bench.backends) > 1 else ""
    title = f"lean, {name}: clipped AdamW step from p.grad{end}"
    try:
        return _measured(title, bench, of, backend)
    except torch.OutOfMemoryError as error:
        return Table(title, [gap("all variants", error)])


def _measured(title: str, bench: Bench, of: shapes.Shapes, backend: str) -> Table:
    mine = ours(bench.label(backend), backend)
    # Other packages' are in the first table alone; torch's are in each, for each compares with them.
    others = [] if bench.quick or backend != bench.backends[0] else packages()
    variants, gaps = [], []
    figures: dict[str, Row] = {}
    for lean in (*torchs(), *mine, *others):  # where memory ends, the other packages are left out
        bench.release()
        try:
            with quiet() if lean.package else contextlib.nullcontext():
                step, kept, off = _made(lean, of, bench.device)
        except Exception as error:  # of any kind, where it is somebody else's package
            if lean.package is None and not isinstance(error, torch.OutOfMemoryError):
                raise
            gaps.append(gap(lean.name, error))
        else:
            variants.append(Variant(lean.name, step))
            figures[lean.name] = {"kept B/param": kept, "2 steps off by": off}
    bench.release()
    timings = bench.interleave(variants) if variants else []
    table = timed(title, timings, shapes.count(of), {"our fp32": mine[0].name, "clip+fused": _STOCK})
    table.rows = [{**row, **figures[row["name"]]} for row in table.rows] + gaps
    table.notes.append("kept: parameters and optimizer states; 2 steps off by: of what they change, against fp64")
    return table


def _made(lean: Lean, of: shapes.Shapes, device: torch.device) -> tuple[Callable[[], Any], float, float]:
    """Returns a clipped step, the bytes kept per parameter, and how far the first two steps were off.

    Raises:
        WrongError: further than the format explains. And whatever somebody else's package raises.
    """
    params = [torch.nn.Parameter(tensor) for tensor in random_tensors(of, 0.02, lean.dtype, device)]
    sets = [random_tensors(of, 1e-3, lean.dtype, device) for _ in range(2)]
    before = [param.detach().clone() for param in params]
    saved = [[grad.clone() for grad in grads] for grads in sets]  # clipping is in place
    optimizer = lean.make(params)
    step = optimizer.step if isinstance(optimizer, af.AdamW) else stock.clip_and_step(params, optimizer)
    for grads in sets:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        step()
    off = deviation(before, [master(optimizer, param) for param in params], saved)
    if not off <= lean.tolerance:
        raise WrongError(f"two steps are {off:.1%} off, more than {lean.tolerance:.1%}", off)
    kept = sum(param.nbytes for param in params) + state_bytes(optimizer)
    return step, kept / shapes.count(of), off
