"""The plan: an optimizer's tensors, validated, in the form that the backends work on.

In: param_groups and state. Out: one row per parameter, in the groups' order. Every parameter has its own range of
chunks whether or not it has a gradient, so the norm's summation order depends on the optimizer alone.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accumfused import compiled
from accumfused.core import memory
from accumfused.formats import shards
from accumfused.formats.kinds import PARAM_DTYPES, REMAINDER, Format, Storage, format_of, names, storage_of
from accumfused.formats.numeric import chunk_count
from accumfused.formats.shards import Shard
from accumfused.rule import Rule
from accumfused.settings import Settings

GRAD_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Grads = list[Tensor | None]


def _own_references() -> int:
    param = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)
    param.grad = torch.zeros(1, dtype=torch.float32, device="cpu")
    return sys.getrefcount(param.grad)


_OWN_REFERENCES = _own_references()  # of `param.grad` that was just read, where nobody else holds the gradient


@dataclass(eq=False)
class Row:
    """One parameter, in the form that the backends work on."""

    param: Tensor  # as the user has it
    owned: Tensor  # this process's part of it: the parameter itself, where it is not spread over processes
    tensor: Tensor  # what the kernels write: the same, or a dense copy where that memory is not dense
    group: int
    rule: type[Rule]
    form: Format
    storage: Storage | None  # None: not made yet
    first_chunk: int
    shard: Shard | None  # how the part lies in the parameter; None: it is the whole
    # Where the part begins in the whole tensor, in elements and in memory order: it is rounded by the noise that its
    # elements have in the whole. With states in int8 a multiple of a block.
    origin: int
    is_bundled: bool = False  # its accumulator is small, and reduced together with others

    @property
    def is_copy(self) -> bool:
        """Whether the kernels write a dense copy."""
        return self.tensor is not self.owned


@dataclass(eq=False)
class Plan:
    """A row for each parameter; built by `build`, dropped when something moves."""

    rows: list[Row]
    rules: list[type[Rule]]  # per group
    chunks: int
    device: torch.device  # where its kernels run
    table: Any = None  # the rows' addresses (_C.Table), for native kernels
    parts: list[Plan] = field(default_factory=list)  # with several devices: the plan of each
    # What follows from the rows:
    params: list[Tensor] = field(init=False)
    copies: list[int] = field(init=False)  # rows whose tensor is a dense copy
    has_all_states: bool = field(init=False)
    has_remainders: bool = field(init=False)  # masters of which the parameter is a half
    is_spread: bool = field(init=False)  # some rows are parts of their parameters
    _pointed_at: Grads | None = None
    _held: list[bool] = field(default_factory=list)
    _seen: tuple[Any, Any, Any] | None = None  # of groups and states, where there is no table that does
    _checked: set[int] = field(default_factory=set)  # parameters, for the same

    def __post_init__(self) -> None:
        self.params = [row.param for row in self.rows]
        self.copies = [index for index, row in enumerate(self.rows) if row.is_copy]
        self.has_all_states = all(row.storage is not None for row in self.rows)
        masters = [row.form.master for row in self.rows]
        self.has_remainders = any(master is not None and master[0] == REMAINDER for master in masters)
        self.is_spread = any(row.shard is not None for row in self.rows)

    def add_table(self, table: Any, param_groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Any]) -> None:
        """Makes the table of the addresses on this device; `table`: the class, of a native module."""
        self.table = table(compiled.exchange_api, torch.empty(0, device=self.device).__dlpack_device__(), self.rows)
        if not self.is_spread:
            self.table.remember(param_groups, state)
        assert self.table.chunks == self.chunks

    def unchanged(self, param_groups: list[dict[str, Any]], state: Mapping[Tensor, Any]) -> bool:
        """Whether groups, states and the memory behind them are still those of this plan."""
        if self.parts and not self.is_spread:
            return all(part.unchanged(param_groups, state) for part in self.parts)
        if self.table is None or self.is_spread:
            # The reference has seen nothing: it reads everything at each step.
            return self._seen is not None and self._is_as_seen(*self._seen, *_objects(param_groups, state))
        return bool(self.table.unchanged(param_groups, state))

    def remember(self, param_groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Any]) -> None:
        """Notes what `unchanged` compares, where there is no table that does."""
        objects, names = _objects(param_groups, state)
        self._seen = objects, names, [_place(shards.local(value)) for value in objects]

    def _is_as_seen(self, known: list[Any], names: list[Any], places: list[Any], objects: list[Any], now: Any) -> bool:
        if len(objects) != len(known) or names != now or not all(map(operator.is_, objects, known)):
            return False
        parts = map(shards.local, objects) if self.is_spread else objects
        return all(map(_lies, parts, places))

    def hypers(self, param_groups: Sequence[Mapping[str, Any]]) -> list[tuple[float | Tensor, ...]]:
        """The groups' numbers in the order of their rules' `hypers`, as they stand there: a tensor is not read."""
        return [
            tuple(
                group["betas"][name == "beta2"] if name in ("beta1", "beta2") else group[name] for name in rule.hypers
            )
            for rule, group in zip(self.rules, param_groups, strict=True)
        ]

    def lacks_state(self, grads: Grads) -> bool:
        return not self.has_all_states and any(
            grad is not None and row.storage is None for grad, row in zip(grads, self.rows, strict=True)
        )

    def gradients(self) -> tuple[Grads, int]:
        """Every p.grad, and how many there are."""
        if self.table is None or self.is_spread:
            held = [p.grad is not None and sys.getrefcount(p.grad) > _OWN_REFERENCES for p in self.params]
            whole = [param.grad for param in self.params]
            counts = Counter(map(id, whole))
            self._held = [own or counts[id(grad)] > 1 for own, grad in zip(held, whole, strict=True)]
            grads = [g if row.shard is None else _part(row.param, g) for row, g in zip(self.rows, whole, strict=True)]
            return grads, sum(grad is not None for grad in grads)
        grads, present, refused = self.table.read_grads(_OWN_REFERENCES)
        self._pointed_at = grads if refused < 0 else []
        return grads, present

    def held(self) -> list[bool]:
        """Of the gradients that `gradients` gave last: which somebody else has, too, and may write again."""
        if self.table is None or self.is_spread:
            return self._held or [True] * len(self.params)  # a new plan has not read any
        return self.table.held()  # type: ignore[no-any-return]

    def release_gradients(self) -> None:
        """p.grad = None for every parameter."""
        if self.table is not None and not self.is_spread:
            self.table.release_grads()
            return
        for param in self.params:
            param.grad = None

    def match(self, grads: Grads) -> Grads:
        """The gradients as the kernels can read them: dense, laid out as their parameters.

        A gradient of another layout is copied (slower).

        Raises:
            RuntimeError: sparse or complex gradients; another device or shape than the parameter's.
            TypeError: a parameter or gradient that is not fp32, fp16 or bf16.
        """
        if self.table is not None and (self._pointed_at is grads or self.table.set_grads(grads) < 0):
            self._pointed_at = grads
            return grads
        return [None if g is None else self._match(i, g) for i, g in enumerate(grads)]

    def point_at(self, grads: Grads, accumulators: Grads | None = None, held: list[int] | None = None) -> None:
        """Points the table's rows at these (matched) gradients, and at accumulators, until `let_go`."""
        if self._pointed_at is not grads:
            refused = self.table.set_grads(grads)
            if refused >= 0:
                raise RuntimeError(f"the gradient of parameter {refused} cannot be read natively; use backend='torch'")
            self._pointed_at = grads
        if accumulators is not None:
            refused = self.table.set_accumulators(accumulators, held)
            if refused < -1:
                raise overwritten(-2 - refused)
            if refused >= 0:
                raise RuntimeError(f"the accumulator of parameter {refused} no longer fits it; call zero_grad()")

    def let_go(self) -> None:
        """Forgets the gradients, which would live on otherwise."""
        for part in self.parts:
            part.let_go()
        if self._pointed_at is not None:
            self.table.clear()
        self._pointed_at = None

    def _match(self, index: int, grad: Tensor) -> Tensor:
        tensor = self.rows[index].tensor
        if index not in self._checked:
            check_parameter(self.rows[index].owned)
            self._checked.add(index)
        check_gradient(tensor, grad)
        in_memory = type(grad) is Tensor and not grad.is_neg() and not grad._is_zerotensor()
        if in_memory and grad.stride() == tensor.stride():
            return grad
        return torch.empty_like(tensor, dtype=grad.dtype, requires_grad=False).copy_(grad.detach())


def build(
    param_groups: Sequence[Mapping[str, Any]],
    state: Mapping[Tensor, Any],
    rules: list[type[Rule]],
    settings: Settings,
) -> Plan:
    """Builds the plan; the backend then adds what it keeps with it.

    Raises:
        RuntimeError: two parameters share memory; one's memory is too small or read-only; a DTensor of which this
            process has no part to update.
    """
    rows, chunks = list[Row](), 0
    for index, group in enumerate(param_groups):
        for param in group["params"]:
            rows.append(_row(param, index, rules[index], state.get(param), settings, chunks))
            chunks += chunk_count(rows[-1].tensor.numel())
    owned = [row.owned for row in rows]
    memory.check([tensor for tensor in owned if has_memory(tensor) and not is_freed(tensor) and tensor.numel()])
    device = next((tensor.device for tensor in owned if has_memory(tensor)), torch.device("cpu"))
    plan = Plan(rows, rules, chunks, device)
    if plan.is_spread:
        plan.remember(param_groups, state)
    return plan


def _row(
    param: Tensor, group: int, rule: type[Rule], entries: Mapping[str, Any] | None, settings: Settings, chunk: int
) -> Row:
    """Args: entries: the optimizer's state of the parameter; chunk: its first one."""
    shard = shards.shard_of(param)
    tensor = owned = shards.owned(param, shard)
    if layout(owned) == "strided":
        tensor = torch.empty_like(owned, requires_grad=False)
    form = format_of(rule, param, settings) if param.dtype in PARAM_DTYPES else Format()
    if shard is not None and entries is not None:
        entries = shard.parts(entries) if shard.has_placed(entries, names(rule, form)) else None
    storage, origin = storage_of(rule, form, tensor, entries), 0 if shard is None else shard.origin
    return Row(param, owned, tensor, group, rule, form, storage, chunk, shard, origin)


def _objects(param_groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Any]) -> tuple[list[Any], list[Any]]:
    """Parameters and what the state holds of them, and how they are arranged: groups' sizes, and names."""
    params = [param for group in param_groups for param in group["params"]]
    entries = [state.get(param) or {} for param in params]
    arranged = [[len(group["params"]) for group in param_groups], *map(list, entries)]
    return params + [value for own in entries for value in own.values()], arranged


def _place(value: Any) -> tuple[Any, ...] | None:
    """Where a tensor lies, as `_lies` compares it."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    return value.data_ptr(), value.dtype, value.shape, value.stride()


def _lies(value: Tensor, place: tuple[Any, ...] | None) -> bool:
    """One by one: thousands of new tuples at each step would be the garbage collector's."""
    if place is None:
        return True
    address, dtype, shape, stride = place
    return value.data_ptr() == address and value.dtype is dtype and value.shape == shape and value.stride() == stride


def overwritten(row: int) -> RuntimeError:
    """The memory that a window has adopted was written again: what it holds is no sum."""
    return RuntimeError(
        f"the gradient of parameter {row} lies where the window's sum does, so one has overwritten the other; call "
        "zero_grad(), and give every micro-batch a gradient in memory of its own (p.grad = buffer.clone())"
    )


def _part(param: Tensor, grad: Tensor | None) -> Tensor | None:
    """This process's part of a gradient.

    One that is placed otherwise than its parameter (a sum that is pending, with tensor parallelism) is redistributed.
    """
    if grad is None:
        return None
    given: Any = grad
    placements = getattr(param, "placements", None)
    if shards.is_dtensor(given) and given.placements != placements:
        param.grad = grad = given.redistribute(placements=placements)
    return shards.local(grad)  # type: ignore[no-any-return]


def layout(tensor: Tensor) -> str:
    """ "dense" (no holes, no overlap), "strided" (holes) or "overlapping"."""
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return "dense"
    reach = 1  # elements from the first to behind the last, over the dimensions so far
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < reach:
            return "overlapping"
        reach += stride * (size - 1)
    return "dense" if reach == tensor.numel() else "strided"


def has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type != "meta"


def is_freed(tensor: Tensor) -> bool:
    """Whether its storage was resized to nothing: what is frozen may be away, until somebody brings it back."""
    return tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


def check_parameter(param: Tensor) -> None:
    """Refuses what no backend can update."""
    if param.is_complex():
        raise RuntimeError("complex parameters are not supported; optimize torch.view_as_real(parameter) instead")
    if param.dtype not in PARAM_DTYPES:
        dtypes = ", ".join(str(dtype) for dtype in PARAM_DTYPES)
        raise TypeError(f"a parameter is {param.dtype}; supported are {dtypes}")
    if param.is_neg():
        raise RuntimeError("a parameter is lazily negated, so its memory holds other values; use param.resolve_neg()")
    if not has_memory(param) or is_freed(param):
        raise RuntimeError(
            f"a parameter has no memory to update (layout {param.layout}, device {param.device}); materialize it first"
        )
    if layout(param) == "overlapping":
        raise RuntimeError(
            f"a parameter of shape {list(param.shape)} and strides {list(param.stride())} overlaps itself in memory "
            "(expanded?); clone() it first"
        )


def check_gradient(param: Tensor, grad: Tensor) -> None:
    """Refuses what no backend can read."""
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"sparse gradients are not supported (a gradient has layout {grad.layout}); "
            "use Embedding(sparse=False), or keep these parameters in an optimizer of torch's own"
        )
    if grad.dtype not in GRAD_DTYPES:
        dtypes = ", ".join(str(dtype) for dtype in GRAD_DTYPES)
        kind = RuntimeError if grad.is_complex() else TypeError
        raise kind(f"a gradient is {grad.dtype}; supported are {dtypes}")
    if grad.device != param.device:
        raise RuntimeError(f"a gradient is on {grad.device}, its parameter on {param.device}; move one of them")
    if grad.shape != param.shape:
        raise RuntimeError(f"a gradient has shape {list(grad.shape)}, its parameter {list(param.shape)}")
