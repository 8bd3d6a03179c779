"""Storage formats: a clipped AdamW step from p.grad with 16-bit parameters and leaner states, against fp32 and peers.

Each variant has parameters and states of its own, so that its bytes are its own; gradients are bf16 beside bf16
parameters. What is persistent is counted from the tensors that the optimizer keeps.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import accumfused as af
from bench import shapes, stock
from bench.exact import LR, MAX_GRAD_NORM, WEIGHT_DECAY
from bench.measure import Timing, Variant
from bench.report import Column, Table
from bench.suites import Bench
from bench.workload import random_tensors

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Lean:
    """A variant: its parameters' dtype, its optimizer, and the bytes per parameter that one step must move."""

    name: str
    dtype: torch.dtype
    make: Callable[[list[torch.nn.Parameter]], Any]
    clips: bool = True  # by itself


def _ours(backend: str, **settings: Any) -> Callable[[list[torch.nn.Parameter]], af.AdamW]:
    def make(params: list[torch.nn.Parameter]) -> af.AdamW:
        return af.AdamW(
            params, lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM, backend=backend, **settings
        )

    return make


def ours(label: str, backend: str) -> list[Lean]:
    int8: dict[str, Any] = {"state_dtype": "int8"}
    made = {
        "fp32": (torch.float32, {}),
        "bf16 + split16, fp32 states": (BF16, {}),
        "bf16 + split16, int8 states": (BF16, int8),
        "bf16 + split8, int8 states": (BF16, {"master_weights": "split8", **int8}),
        "bf16 stochastic, int8 states": (BF16, {"master_weights": None, "rounding": "stochastic", **int8}),
    }
    return [Lean(f"{label}, {name}", dtype, _ours(backend, **settings)) for name, (dtype, settings) in made.items()]


def peers() -> list[Lean]:
    def fused(params: list[torch.nn.Parameter]) -> torch.optim.AdamW:
        return torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def torchao(params: list[torch.nn.Parameter]) -> Any:
        return importlib.import_module("torchao.optim").AdamW8bit(params, lr=LR, weight_decay=WEIGHT_DECAY)

    def bitsandbytes(params: list[torch.nn.Parameter]) -> Any:
        return importlib.import_module("bitsandbytes").optim.AdamW8bit(params, lr=LR, weight_decay=WEIGHT_DECAY)

    def flashoptim(params: list[torch.nn.Parameter]) -> Any:
        return importlib.import_module("flashoptim").FlashAdamW(params, lr=LR, weight_decay=WEIGHT_DECAY)

    return [
        Lean("clip + AdamW(fused), fp32", torch.float32, fused, clips=False),
        Lean("clip + AdamW(fused), bf16 throughout", BF16, fused, clips=False),
        Lean("clip + torchao AdamW8bit, fp32", torch.float32, torchao, clips=False),
        Lean("clip + bitsandbytes AdamW8bit, fp32", torch.float32, bitsandbytes, clips=False),
        Lean("clip + FlashAdamW, bf16", BF16, flashoptim, clips=False),
    ]


def run(bench: Bench) -> list[Table]:
    names = [shapes.GPT2, shapes.LLAMA_1B] if bench.on_gpu else [shapes.GPT2_BLOCKS]
    return [_model(bench, name) for name in names]


def _model(bench: Bench, name: str) -> Table:
    of = bench.shapes(name)
    count = shapes.count(of)
    variants, persistent, moved, notes = [], {}, {}, []
    mine = [lean for backend in bench.backends for lean in ours(bench.label(backend), backend)]
    for lean in [*peers(), *mine]:
        params = [torch.nn.Parameter(p) for p in random_tensors(of, 0.02, lean.dtype, bench.device)]
        for param, grad in zip(params, random_tensors(of, 1e-3, lean.dtype, bench.device), strict=True):
            param.grad = grad
        try:
            optimizer = lean.make(params)
            step = optimizer.step if lean.clips else stock.clip_and_step(params, optimizer)
            step()  # makes the states
        except Exception as error:  # of somebody else's package, and of any kind
            if lean.clips:
                raise
            notes.append(f"left out: {lean.name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        variants.append(Variant(lean.name, step))
        kept = sum(map(tensor_bytes, params)) + _state_bytes(optimizer)
        persistent[lean.name] = kept / count
        if lean.clips:
            gradients = sum(map(tensor_bytes, params)) / count
            moved[lean.name] = 2 * gradients + 2 * persistent[lean.name]
    gc.collect()
    timings = bench.interleave(variants, ceilings=False)
    fp32 = {bench.label(backend): f"{bench.label(backend)}, fp32" for backend in bench.backends}
    return _table(name, timings, count, persistent, moved, notes, next(iter(fp32.values())))


def _table(
    name: str, timings: Sequence[Timing], count: int, persistent: dict[str, float], moved: dict[str, float],
    notes: list[str], reference: str,
) -> Table:  # fmt: skip
    columns = [
        Column("name", ""),
        Column("persistent_bytes", "B/param kept", "{:.2f}"),
        Column("moved_bytes", "B/param moved", "{:.2f}"),
        Column("milliseconds", "ms", "{:.1f}"),
        Column("quartiles", "quartiles"),
        Column("gigabytes_per_second", "GB/s", "{:.1f}"),
        Column("over_fp32", "x our fp32", "{:.2f}"),
        Column("over_fused", "x clip+fused", "{:.2f}"),
    ]
    table = Table(f"lean, {name}: clipped AdamW step from p.grad ({count:,} parameters)", columns)
    by_name = {timing.variant.name: timing for timing in timings}
    for timing in timings:
        own, (first, third) = timing.variant.name, timing.quartiles
        rate = moved[own] * count / timing.median / 1e9 if own in moved else None
        table.rows.append(
            {
                "name": own, "persistent_bytes": persistent[own], "moved_bytes": moved.get(own),
                "milliseconds": timing.median * 1e3, "quartiles": f"{first * 1e3:.1f} - {third * 1e3:.1f}",
                "gigabytes_per_second": rate, "over_fp32": timing.times_as_fast_as(by_name[reference]),
                "over_fused": timing.times_as_fast_as(by_name["clip + AdamW(fused), fp32"]),
            }
        )  # fmt: skip
    table.notes += [
        "kept: parameters and optimizer states; moved: the gradient twice (norm, step), the rest in and out"
    ]
    slower = [row["name"] for row in table.rows if row["moved_bytes"] is not None and row["over_fp32"] < 1]
    if slower:
        table.notes.append(
            f"slower than fp32, though they move fewer bytes: {', '.join(slower)}; there arithmetic is the limit: "
            "decoding, noise and encoding take two to three times the instructions of the update itself"
        )
    table.notes += notes
    return table


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
