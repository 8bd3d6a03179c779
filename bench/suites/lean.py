"""Storage formats: a clipped AdamW step from p.grad with 16-bit parameters and leaner states, against fp32 and peers.

Each variant has parameters and states of its own, so that its bytes are its own; gradients are bf16 beside bf16
parameters. What is persistent is counted from the tensors that the optimizer keeps.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import accumfused as af
from bench import shapes, stock
from bench.exact import LR, MAX_GRAD_NORM, WEIGHT_DECAY, WrongError, deviation, master
from bench.measure import Variant
from bench.peers import first_line, quiet, wrong
from bench.suites import Bench
from bench.tables import Row, Table, quartiles
from bench.workload import random_tensors

FOLLOWS = ("backend", "peers", "model")
BF16 = torch.bfloat16
_SETTINGS: dict[str, Any] = {"lr": LR, "weight_decay": WEIGHT_DECAY}
_STOCK = "clip + AdamW(fused), fp32"
_EXACT = 1e-3
_EIGHT_BITS = 0.02  # a hundredth of a moment, here and there
_SIXTEEN_BITS = 0.6  # a step of a weight is about as large as the weight's last bit


@dataclass(frozen=True)
class Lean:
    """A variant: its parameters' dtype, its optimizer, and what its format may be off.

    Args:
        tolerance: see `exact.deviation`: what the first two steps may be off, of what they change.
        clips: by itself.
        peer: its name in `bench.peers.KNOWN`; None where it is ours or torch's.
        compiles: for seconds, for every shape.
    """

    name: str
    dtype: torch.dtype
    make: Callable[[list[torch.nn.Parameter]], Any]
    tolerance: float
    clips: bool = True
    peer: str | None = None
    compiles: bool = False

    @property
    def bytes_while_checked(self) -> int:
        """Per parameter: itself, two gradients, copies of these three, two moments and a master, the master in fp64."""
        return 6 * self.dtype.itemsize + 3 * 4 + 8


def _ours(backend: str, **settings: Any) -> Callable[[list[torch.nn.Parameter]], af.AdamW]:
    def make(params: list[torch.nn.Parameter]) -> af.AdamW:
        return af.AdamW(
            params, lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM, backend=backend, **settings
        )

    return make


def ours(label: str, backend: str) -> list[Lean]:
    int8: dict[str, Any] = {"state_dtype": "8bit"}
    stochastic: dict[str, Any] = {"master_weights": None, **int8}
    made: dict[str, tuple[torch.dtype, dict[str, Any], float]] = {
        "fp32": (torch.float32, {}, _EXACT),
        "bf16 + split16, fp32 states": (BF16, {}, _EXACT),
        "bf16 + split16, 8-bit states": (BF16, int8, _EIGHT_BITS),
        "bf16 + split8, 8-bit states": (BF16, {"master_weights": "split8", **int8}, _EIGHT_BITS),
        "bf16 stochastic, 8-bit states": (BF16, stochastic, _SIXTEEN_BITS),
    }
    return [
        Lean(f"{label}, {name}", dtype, _ours(backend, **settings), tolerance)
        for name, (dtype, settings, tolerance) in made.items()
    ]


def peers() -> list[Lean]:
    def fused(params: list[torch.nn.Parameter]) -> torch.optim.AdamW:
        return torch.optim.AdamW(params, fused=True, **_SETTINGS)

    def torchao(params: list[torch.nn.Parameter]) -> Any:
        return importlib.import_module("torchao.optim").AdamW8bit(params, **_SETTINGS)

    def bitsandbytes(params: list[torch.nn.Parameter]) -> Any:
        return importlib.import_module("bitsandbytes").optim.AdamW8bit(params, **_SETTINGS)

    def flashoptim(params: list[torch.nn.Parameter]) -> Any:
        return importlib.import_module("flashoptim").FlashAdamW(params, **_SETTINGS)

    fp32 = torch.float32
    return [
        Lean(_STOCK, fp32, fused, _EXACT, clips=False),
        Lean("clip + AdamW(fused), bf16 throughout", BF16, fused, _SIXTEEN_BITS, clips=False),
        Lean("clip + torchao AdamW8bit, fp32", fp32, torchao, _EIGHT_BITS, False, "torchao", True),
        Lean("clip + bitsandbytes AdamW8bit, fp32", fp32, bitsandbytes, _EIGHT_BITS, False, "bitsandbytes", True),
        Lean("clip + FlashAdamW, bf16", BF16, flashoptim, _SIXTEEN_BITS, clips=False, peer="flashoptim"),
    ]


def run(bench: Bench) -> list[Table]:
    names = (shapes.GPT2, shapes.LLAMA_1B) if bench.on_gpu else (shapes.GPT2_BLOCKS,)
    return [_model(bench, name, of, backend) for name, of in bench.models(*names).items() for backend in bench.backends]


def _model(bench: Bench, name: str, of: shapes.Shapes, backend: str) -> Table:
    """A table for each of our backends: the variants of all of them together do not fit in a GPU."""
    table = Table(f"lean, {name}: clipped AdamW step from p.grad")
    if len(bench.backends) > 1:
        table.title += f", {bench.label(backend)}"
    try:
        _measure(table, bench, of, backend)
    except torch.OutOfMemoryError as error:
        table.rows = [{"name": "all variants", "cannot": first_line(error)}]
    return table


def _measure(table: Table, bench: Bench, of: shapes.Shapes, backend: str) -> None:
    count, variants = shapes.count(of), []
    figures: dict[str, Row] = {}
    gaps: list[Row] = []
    others = [each for each in peers() if _wanted(each, bench, first=backend == bench.backends[0])]
    mine = ours(bench.label(backend), backend)
    # Where memory ends, the other packages are left out: they come last.
    for lean in sorted([*others, *mine], key=lambda lean: lean.peer is not None):
        bench.release()
        needed = count * lean.bytes_while_checked
        if not bench.fits(needed):
            gaps.append({"name": lean.name, "cannot": bench.skipped(needed)})
            continue
        try:
            with quiet() if lean.peer else contextlib.nullcontext():
                params, optimizer, step, off = _made(lean, of, bench.device)
        except WrongError as error:
            if lean.peer is None:
                raise
            gaps.append(wrong(lean.name, error))
        except Exception as error:  # of somebody else's package, and of any kind
            if lean.peer is None:
                raise
            table.notes.append(f"left out: {lean.name}: {first_line(error)}")
        else:
            variants.append(Variant(lean.name, step))
            kept = (sum(map(tensor_bytes, params)) + _state_bytes(optimizer)) / count
            figures[lean.name] = {"kept B/param": kept, "2 steps off by": off}
    bench.release()
    timings = bench.interleave(variants, ceilings=False) if variants else []
    by_name = {timing.variant.name: timing for timing in timings}
    for timing in timings:
        row: Row = {"name": timing.variant.name, "ms": quartiles(timing.seconds, 1e3), **figures[timing.variant.name]}
        for heading, other in (("our fp32", mine[0].name), ("clip+fused", _STOCK)):
            row[f"x {heading}"] = timing.times_as_fast_as(by_name[other]) if other in by_name else None
        table.rows.append(row)
    table.rows += gaps
    table.notes.append("kept: parameters and optimizer states; 2 steps off by: of what they change, against fp64")


def _wanted(lean: Lean, bench: Bench, *, first: bool) -> bool:
    """Other packages' variants are in the first table alone; torch's are in each, for each compares with them."""
    if not first and lean.peer is not None:
        return False
    if bench.peers is None:
        return not (bench.quick and lean.compiles)
    return lean.peer is None or lean.peer in bench.peers


def _made(
    lean: Lean, of: shapes.Shapes, device: torch.device
) -> tuple[list[torch.nn.Parameter], Any, Callable[[], Any], float]:
    """Parameters with gradients, their optimizer, its clipped step, and how far its first two steps were off.

    Raises:
        WrongError: further than the format explains. And whatever somebody else's package raises.
    """
    params = [torch.nn.Parameter(p) for p in random_tensors(of, 0.02, lean.dtype, device)]
    sets = [random_tensors(of, 1e-3, lean.dtype, device) for _ in range(2)]
    before = [param.detach().clone() for param in params]
    saved = [[grad.clone() for grad in grads] for grads in sets]  # clipping is in place
    optimizer = lean.make(params)
    step = optimizer.step if lean.clips else stock.clip_and_step(params, optimizer)
    for grads in sets:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        step()
    off = deviation(before, [master(optimizer, param) for param in params], saved)
    if not off <= lean.tolerance:
        raise WrongError(f"two steps are {off:.1%} off, more than {lean.tolerance:.1%}", off)
    return params, optimizer, step, off


def _state_bytes(optimizer: Any) -> int:
    """Of all tensors in the optimizer's state, in subclasses' parts too; not of numbers."""
    seen: set[int] = set()
    total = 0
    for entries in optimizer.state.values():
        for value in entries.values():
            if isinstance(value, Tensor) and value.numel() > 1 and id(value) not in seen:
                seen.add(id(value))
                total += tensor_bytes(value)
    return total


def tensor_bytes(tensor: Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(tensor_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()
