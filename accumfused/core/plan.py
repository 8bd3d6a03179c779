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

from accumfused import _native
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


@dataclass
class Plan:
    """Rows of tensors; built by `build`, dropped when something moves."""

    params: list[Tensor]  # as the user has them
    owned: list[Tensor]  # this process's part of each: the parameter itself, where it is not spread over processes
    tensors: list[Tensor]  # what the kernels write: the same, or a dense copy where that memory is not dense
    groups: list[int]
    rules: list[type[Rule]]  # per group
    formats: list[Format]
    storages: list[Storage | None]  # None: not made yet
    first_chunk: list[int] = field(default_factory=list)
    # Where each tensor begins in the one that it is a part of, in elements and in memory order: a part is rounded by
    # the noise that its elements have in the whole. 0: it is the whole one. With states in int8 a multiple of a block.
    origins: list[int] = field(default_factory=list)
    chunks: int = 0
    has_all_states: bool = False
    copied: list[int] = field(default_factory=list)  # rows whose tensor is a dense copy
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # where its kernels run
    table: Any = None  # the rows' addresses (_C.Table), for native kernels
    # Rows whose accumulators are to be reduced together: small ones.
    bundled: list[bool] = field(default_factory=list)
    shards: list[Shard | None] = field(default_factory=list)  # how parts lie in their parameters; None: the whole
    is_spread: bool = False  # there are such parts
    has_remainders: bool = False  # masters of which the parameter is a half
    rule_indices: list[int] = field(default_factory=list)  # per group, in the kernels' order
    device_tables: dict[int, Any] = field(default_factory=dict)  # the table's copies on a GPU, which cuda.py keeps here
    batches: dict[int, Any] = field(default_factory=dict)  # pieces of the tensors, which foreach.py keeps here
    parts: list[tuple[Any, Plan]] = field(default_factory=list)  # with several devices: backend and plan of each
    # With shards: the process groups of each kind, and its chunks (None: all), for the norm; made with the first one.
    kinds: list[tuple[tuple[Any, ...], Tensor | None]] | None = None
    _pointed_at: Grads | None = None
    _held: list[bool] = field(default_factory=list)
    _seen: tuple[Any, Any, Any] | None = None  # of groups and states, where there is no table that does
    _checked: set[int] = field(default_factory=set)  # parameters, for the same

    def add_table(self, table: Any, param_groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Any]) -> None:
        """Makes the table of the addresses on this device; `table`: the class, of a native module."""
        numels = [tensor.numel() for tensor in self.tensors]
        device = torch.empty(0, device=self.device).__dlpack_device__()
        slots = [None if storage is None else storage.slots() for storage in self.storages]
        formats = [(int(form.weights), int(form.states)) for form in self.formats]
        owners = [self.owned[row] if shard else self.params[row] for row, shard in enumerate(self.shards)]
        self.table = table(
            _native.exchange_api, device, owners, self.tensors, numels, self.origins, self.groups, slots, formats
        )
        if not self.is_spread:
            self.table.remember(param_groups, state)
        indices = {name: index for index, (name, *_) in enumerate(_native._C.rules())}
        self.rule_indices = [indices.get(rule.name, 0) for rule in self.rules]
        assert self.table.chunks == self.chunks

    def unchanged(self, param_groups: list[dict[str, Any]], state: Mapping[Tensor, Any]) -> bool:
        """Whether groups, states and the memory behind them are still those of this plan."""
        if self.parts and not self.is_spread:
            return all(part.unchanged(param_groups, state) for _, part in self.parts)
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
            grad is not None and storage is None for grad, storage in zip(grads, self.storages, strict=True)
        )

    def gradients(self) -> tuple[Grads, int]:
        """Every p.grad, and how many there are."""
        if self.table is None or self.is_spread:
            held = [p.grad is not None and sys.getrefcount(p.grad) > _OWN_REFERENCES for p in self.params]
            whole = [param.grad for param in self.params]
            counts = Counter(map(id, whole))
            self._held = [own or counts[id(grad)] > 1 for own, grad in zip(held, whole, strict=True)]
            grads = [g if s is None else _part(p, g) for p, g, s in zip(self.params, whole, self.shards, strict=True)]
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
        for _, part in self.parts:
            part.let_go()
        if self._pointed_at is not None:
            self.table.clear()
        self._pointed_at = None

    def _match(self, index: int, grad: Tensor) -> Tensor:
        tensor = self.tensors[index]
        if index not in self._checked:
            check_parameter(self.owned[index])
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
    params = [p for group in param_groups for p in group["params"]]
    groups = [g for g, group in enumerate(param_groups) for _ in group["params"]]
    plan = Plan(params, [], [], groups, rules, [], [])
    for index, (param, group) in enumerate(zip(params, groups, strict=True)):
        shard = shards.shard_of(param)
        tensor = shards.owned(param, shard)
        plan.shards.append(shard)
        plan.owned.append(tensor)
        if layout(tensor) == "strided":
            tensor = torch.empty_like(tensor, requires_grad=False)
            plan.copied.append(index)
        plan.tensors.append(tensor)
        form = format_of(rules[group], param, settings) if param.dtype in PARAM_DTYPES else Format()
        plan.formats.append(form)
        entries = state.get(param)
        if shard is not None and entries is not None:
            placed = shard.has_placed(entries, names(rules[group], form))
            entries = shard.parts(entries) if placed else None
        plan.storages.append(storage_of(rules[group], form, tensor, entries))
        plan.first_chunk.append(plan.chunks)
        plan.chunks += chunk_count(tensor.numel())
        plan.origins.append(0 if shard is None else shard.origin)
    plan.has_all_states = None not in plan.storages
    memory.check([tensor for tensor in plan.owned if has_memory(tensor) and not is_freed(tensor) and tensor.numel()])
    plan.is_spread = any(shard is not None for shard in plan.shards)
    plan.has_remainders = any(form.master is not None and form.master[0] == REMAINDER for form in plan.formats)
    if plan.is_spread:
        plan.remember(param_groups, state)
    plan.device = next((tensor.device for tensor in plan.tensors if has_memory(tensor)), torch.device("cpu"))
    return plan


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
