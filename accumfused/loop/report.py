"""The memory of an optimizer's tensors, by use and by format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from accumfused.core.rows import home_of
from accumfused.formats.codecs import block_count
from accumfused.formats.kinds import (
    MASTER,
    REMAINDER,
    Format,
    States,
    counts_steps,
    described,
    format_of,
    is_stored,
    scale_name,
)
from accumfused.formats.numeric import layout
from accumfused.formats.shards import Shard, initialized, local, owned, shard_of
from accumfused.optimizer import FusedOptimizer, check_fused
from accumfused.rules import Rule
from accumfused.settings import SettingArguments

PARTS = ("parameters", "masters", "states", "scales", "accumulators", "gradients")


@dataclass
class Memory:
    """The memory of one format's parameters: bytes for each of PARTS."""

    tensors: int = 0
    elements: int = 0
    parts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    not_made: int = 0  # the bytes of masters, states and scales that the first step will make
    kept: int = 0  # the bytes of accumulators that wait for a window
    on_host: int = 0  # the bytes of `parts` that offload=True keeps on the host

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def per_element(self) -> float:
        return self.total / self.elements if self.elements else 0.0

    def add(self, other: Memory) -> None:
        self.tensors += other.tensors
        self.elements += other.elements
        self.not_made += other.not_made
        self.kept += other.kept
        self.on_host += other.on_host
        for part, size in other.parts.items():
            self.parts[part] += size

    def as_dict(self) -> dict[str, Any]:
        return {
            "tensors": self.tensors,
            "elements": self.elements,
            **self.parts,
            "total": self.total,
            "bytes_per_element": self.per_element,
            "not_made_yet": self.not_made,
            "kept_for_the_next_window": self.kept,
            "on_host": self.on_host,
        }


@dataclass
class MemoryReport:
    """The result of `memory_report`; `str()` makes a table of it."""

    formats: dict[str, Memory]  # by weights and states: "bf16 + split16, fp32 states"
    slots: int = 0  # the bytes of the host's memory through which offload=True sends tensors

    @property
    def total(self) -> Memory:
        """The sum over all formats."""
        total = Memory()
        for memory in self.formats.values():
            total.add(memory)
        return total

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as plain data, in bytes."""
        formats = {name: memory.as_dict() for name, memory in self.formats.items()}
        return {"total": self.total.as_dict(), "formats": formats, "slots": self.slots}

    def __str__(self) -> str:
        header = ["", "tensors", "elements", *PARTS, "total", "bytes/element"]
        rows = [header, *(_row(name, memory) for name, memory in self.formats.items()), _row("total", self.total)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
        notes, total = list[str](), self.total
        if total.not_made:
            notes.append(f"{_size(total.not_made)} of masters and states will be made by the first step.")
        if total.kept:
            notes.append(
                f"{_size(total.kept)} of accumulators are kept for the next window; release_memory() frees them."
            )
        if total.on_host:
            card = total.total - total.on_host
            notes.append(
                f"{_size(total.on_host)} lie on the host, and {_size(card)} with the model; the host has "
                f"{_size(self.slots)} more of slots, in which tensors travel."
            )
        return "\n".join([*lines, *(["", *notes] if notes else [])])


def memory_report(optimizer: FusedOptimizer) -> MemoryReport:
    """Reports the memory of the optimizer's parameters, masters, states, scales, accumulators and gradients.

    States that the first step will make count with their future size. Accumulators and gradients count as they are now,
    so an open window shows its peak. `p.grad` of a closed window counts as an accumulator, and so do accumulators that
    no window holds now: they are kept for the next one, until `optimizer.release_memory()`.

    Args:
        optimizer: of this package. If it keeps its own step (`fuse` of Adafactor, say), only existing states count.

    Raises:
        TypeError: the optimizer is of another package.
    """
    check_fused(optimizer, "memory_report")
    window, formats = optimizer._engine.window, dict[str, Memory]()
    places, params = window.arena.places, window.params or optimizer._engine.plans.params
    rows = zip(params, window.sums or repeat(None), places, strict=False)
    accumulators = {id(param): (accumulator, place) for param, accumulator, place in rows}
    for group in optimizer.param_groups:
        rule = optimizer._rule_of(group)
        for param in group["params"]:
            form = format_of(rule, param, optimizer._engine.settings)
            shard, entries = shard_of(param), optimizer.state.get(param, {})
            home = home_of(local(param), optimizer._engine.settings)
            memory = _memory_of(rule, form, param, shard, entries, home, *accumulators.get(id(param), (None, None)))
            if optimizer._engine.settings.offload:
                memory.on_host = memory.total - memory.parts["parameters"] - memory.parts["gradients"]
            formats.setdefault(described(rule, form, param), Memory()).add(memory)
    plan = optimizer._engine.plans.last
    pending = None if plan is None else plan.pending
    return MemoryReport(formats, 0 if pending is None else pending.nbytes)


# By the masters of the default: settings that take less memory; with these of bf16, no more than torch.
_LEANER: dict[str, tuple[SettingArguments, ...]] = {
    "split16": (
        {"master_weights": "split8", "state_dtype": "8bit"},
        {"master_weights": None, "state_dtype": "8bit"},  # the least
    ),
    "fp32": ({"master_weights": "fp32", "state_dtype": "8bit"},),
    "auto": ({"state_dtype": "8bit"},),
}


def growth_of(optimizer: FusedOptimizer) -> str | None:
    """Tells how much more 16-bit parameters take than with torch's optimizer, and which settings take less.

    None if they take no more, or if the user has set `master_weights`.
    """
    settings = optimizer._engine.settings
    if settings.offload:
        return None  # not where the model lies
    params = [
        (optimizer._rule_of(group), initialized(param))
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad and param.dtype in (torch.float16, torch.bfloat16)
    ]

    def bytes_with(arguments: SettingArguments) -> int:
        variant = replace(settings, **arguments)
        return sum(
            param.nbytes + sum(_to_be_made(rule, format_of(rule, param, variant), param).values())
            for rule, param in params
        )

    stock = sum(param.nbytes * (1 + len(rule.states)) + 4 * ("step" in rule.torch_states) for rule, param in params)
    ours = bytes_with({})
    if settings.master_weights != "auto" or ours <= stock:
        return None
    dtypes = {param.dtype for _, param in params}
    masters = "auto" if len(dtypes) > 1 else "fp32" if torch.float16 in dtypes else "split16"
    leaner = _LEANER[masters]
    if any(rule.needs_16_bits for rule, _ in params):
        leaner = tuple({**arguments, "state_dtype": torch.bfloat16} for arguments in leaner)
    least = next((arguments for arguments in leaner if bytes_with(arguments) <= stock), leaner[-1])
    if bytes_with(least) >= ours:
        return None  # the parameters are small
    elements = sum(param.numel() for _, param in params)
    arguments = ", ".join(f"{name}={value!r}" for name, value in least.items())
    return (
        f"16-bit parameters with their masters and states will take {ours / elements:.2f} bytes each ({_size(ours)}), "
        f"where torch's optimizer takes {stock / elements:.2f} ({_size(stock)}); an open window adds "
        f"{2 if settings.sum_dtype is torch.bfloat16 else 4}. {arguments} takes {bytes_with(least) / elements:.2f}"
        + ("" if masters == "auto" else f". Pass master_weights={masters!r} to keep this and silence the line")
    )


def _memory_of(
    rule: type[Rule],
    form: Format,
    param: Tensor,
    shard: Shard | None,
    entries: Mapping[str, Any],
    home: torch.device,
    accumulator: Tensor | None,
    place: Tensor | None,
) -> Memory:
    """Counts one parameter's memory.

    Args:
        home: where its state lies.
        accumulator: the window's; None: it has none.
        place: where the next window's will lie, and perhaps this one's; None: there is none.
    """
    memory = Memory(1, local(param).numel())
    if place is not None and (accumulator is None or accumulator.data_ptr() != place.data_ptr()):
        memory.kept = place.nbytes
    parts = memory.parts
    parts["parameters"] = local(param).nbytes
    accumulators = {id(tensor): tensor for tensor in (accumulator, place) if tensor is not None}
    parts["accumulators"] = sum(tensor.nbytes for tensor in accumulators.values())
    grad = local(param.grad)
    if grad is not None and id(grad) not in accumulators:
        parts["gradients"] = grad.nbytes
    tensor = owned(param, shard)
    if shard is not None:
        entries = shard.parts(entries)
    dense = torch.empty_like(tensor) if layout(tensor) == "strided" else tensor  # as plan.build has it
    if rule.is_foreign or is_stored(rule, form, dense, entries, home) or not param.requires_grad:
        for name, value in entries.items():
            parts[_part(rule, name)] += value.nbytes if isinstance(value, Tensor) else 0
    else:
        parts |= _to_be_made(rule, form, tensor)
        memory.not_made = sum(parts[part] for part in ("masters", "states", "scales"))
    return memory


def _part(rule: type[Rule], name: str) -> str:
    if name in (MASTER, REMAINDER):
        return "masters"
    return "scales" if name in map(scale_name, rule.states) else "states"


def _to_be_made(rule: type[Rule], form: Format, param: Tensor) -> dict[str, int]:
    numbers = 4 * counts_steps(rule, form) + (8 if form.needs_noise else 0)
    states = len(rule.states) * param.numel() * form.state_dtype.itemsize
    return {
        "masters": param.numel() * form.master[1].itemsize if form.master else 0,
        "states": states + numbers,
        "scales": len(rule.states) * block_count(param.numel()) if form.states is States.INT8 else 0,
    }


def _row(name: str, memory: Memory) -> list[str]:
    sizes = [_size(size) for size in (*memory.parts.values(), memory.total)]
    return [name, f"{memory.tensors:,}", f"{memory.elements:,}", *sizes, f"{memory.per_element:.2f}"]


def _size(size: int) -> str:
    """Prints a size in bytes below 10 KiB, then in larger units with one decimal."""
    if size < 10 * 2**10:
        return f"{size:,} B" if size else "-"
    unit = min((size.bit_length() - 1) // 10, 3)
    return f"{size / 2 ** (10 * unit):,.1f} {('KiB', 'MiB', 'GiB')[unit - 1]}"
