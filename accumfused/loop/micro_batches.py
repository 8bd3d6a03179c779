"""One batch in as many micro-batches as fit in memory: the whole batch if it fits, else halves of what does not.

A part that runs out of memory leaves nothing: its gradients are dropped, and its halves take its place. What is in the
sums stays.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from accumfused.arguments import checked_positive
from accumfused.auditing.graph import leaves_below
from accumfused.core.engine import Engine
from accumfused.core.protocol import Number, on_device
from accumfused.core.rows import Grads
from accumfused.distributed.groups import has_processes
from accumfused.eager import uncompiled
from accumfused.loop.clip_group import ClipGroup
from accumfused.loop.grad_scaler import GradScaler
from accumfused.optimizer import FusedOptimizer, check_fused

Batch = TypeVar("Batch")
Optimizers = FusedOptimizer | ClipGroup | Sequence[FusedOptimizer | ClipGroup]
Weight = Literal["samples"] | Callable[[Batch], float | Tensor] | None

_ALLOCATORS = (  # what they say, where it is no torch.OutOfMemoryError
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",  # Windows
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
)
_PATIENCE = 16  # batches in parts, after which parts of twice the size are tried


_HAS_GRADIENT = (
    "there is a gradient already, of {}, and a part that runs out of memory would change it; call accumulate() or "
    "zero_grad() before accumulate_batch()"
)


@dataclass
class _Fit:
    """The size of parts that fit."""

    most: float = math.inf  # elements of the largest tensor: texts of as many samples differ in length
    batches: int = 0  # in parts, since `most` changed


# By optimizer, and by the code of loss_of.
_fits: WeakKeyDictionary[FusedOptimizer, WeakKeyDictionary[Any, _Fit]] = WeakKeyDictionary()


@uncompiled
def accumulate_batch(
    optimizer: Optimizers,
    batch: Batch,
    loss_of: Callable[[Batch], Tensor],
    *,
    weight: Weight[Batch],
    split: Callable[[Batch], Sequence[Batch]] | None = None,
    scaler: GradScaler | None = None,
) -> Tensor:
    """Accumulates a batch: whole if it fits in memory, else in micro-batches that fit. `optimizer.step()` follows.

    Each part goes through `loss_of`, `backward()` and `accumulate(weight)`. One that runs out of memory is halved, and
    repeated: with new dropout masks, and BatchNorm counts it twice. What fits is remembered for the next batch of
    `loss_of`, in elements of the largest tensor; after 16 batches in parts it tries parts of twice the size.

    Args:
        optimizer: an optimizer of this package, a `ClipGroup`, or a list of them; together they have all parameters
            that the loss reaches and that require a gradient.
        batch: a tensor, or (nested) tuples, lists and dicts of tensors, whose first dimension is that of samples.
        loss_of: takes the batch, or a part of it, and returns the mean loss of what `weight` counts.
        weight: "samples", or a function that takes a part and returns its weight: the number of its tokens, if the loss
            is a mean over tokens. None: a plain sum, for losses that are sums; then divide by `step(normalizer=)`.
        split: halves a batch of another form. The size of a part is then that of its largest tensor, or without one
            the number of its leaves; what leaves a single part that is not empty is one sample.
        scaler: scales the losses; `scaler.step(optimizer)` follows.

    Returns:
        The mean of the losses by their weights, without those of weight 0; with weight=None their sum. Shape [], fp32
        or fp64, detached.

    Raises:
        TypeError: an optimizer or scaler of another package; a batch, weight or loss of a wrong type.
        ValueError: the batch cannot be halved; weight="samples" beside `split`; as `accumulate()`.
        RuntimeError: there is a gradient already; the loss reaches other parameters; gradients are folded during
            backward; several processes without `attach_ddp` (with it all parts run in `no_sync()`); as `accumulate()`.
        torch.OutOfMemoryError: one sample does not fit, or the sums do not. `zero_grad()` drops the parts so far.

    Examples:
        >>> batch = torch.randn(32, 64), torch.randint(10, (32,))
        >>> loss_of = lambda part: torch.nn.functional.cross_entropy(model(part[0]), part[1])
        >>> loss = af.accumulate_batch(optimizer, batch, loss_of, weight="samples")
        >>> optimizer.step()
    """
    optimizers = _members(optimizer)
    engines = [member._engine for member in optimizers]
    weight_of = None if weight is None else _weight_of(weight, split)
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler must be an accumfused.GradScaler, for open windows, got {type(scaler).__name__}")
    if split is None:
        _check_batch(batch)
        split = _halves
    fit = _fits.setdefault(optimizers[0], WeakKeyDictionary()).setdefault(_code(loss_of), _Fit())
    losses, weights, in_parts = list[Tensor](), list[Number | None](), False
    with contextlib.ExitStack() as quiet:
        for engine in engines:
            _refuse(engine)
            for ddp in engine.attached:
                quiet.enter_context(ddp.no_sync())
        waiting = deque([batch])
        while waiting:
            part = waiting.popleft()
            parts = _cut(part, split) if _size(part) > fit.most else []
            if len(parts) < 2:
                part_weight = weight_of and checked_positive(weight_of(part), "weight", or_zero=True)
                _prepare(engines, part_weight)
                loss, failure = _tried(loss_of, part, engines, scaler)
                if loss is not None:
                    for member in optimizers:
                        member.accumulate(part_weight)
                    losses.append(loss)
                    weights.append(part_weight)
                    continue
                gc.collect()  # graphs in cycles; no frame holds anything of the part now
                if torch.accelerator.is_available():
                    torch.accelerator.empty_cache()
                parts = _cut(part, split)
                if len(parts) < 2:
                    shapes = [list(leaf.shape) for leaf in tree_leaves(part) if isinstance(leaf, Tensor)]
                    raise torch.OutOfMemoryError(
                        f"one sample, of shapes {shapes}, does not fit in memory ({failure}); shorten it, use "
                        "torch.utils.checkpoint, or keep less (state_dtype='8bit'). zero_grad() drops the parts so far"
                    )
                fit.most, fit.batches = max(map(_size, parts)), 0
            waiting.extendleft(reversed(parts))
            in_parts = True
    fit.batches += in_parts
    if fit.batches == _PATIENCE:
        fit.most, fit.batches = 2 * fit.most, 0
    return _mean(losses, weights)


def _members(optimizer: Optimizers) -> list[FusedOptimizer]:
    """Lists the optimizers, and those of groups, each once."""
    given: list[Any] = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    members = [member for each in given for member in (each.optimizers if isinstance(each, ClipGroup) else [each])]
    for member in members or [optimizer]:
        check_fused(member, "accumulate_batch")
    return list(dict.fromkeys(members))


def _weight_of(weight: object, split: object) -> Callable[[Any], Number]:
    """Returns the function that weighs a part."""
    if callable(weight):
        return weight
    if not isinstance(weight, str) or weight != "samples":
        raise TypeError(
            'weight must be "samples", a function that takes a part (and counts its tokens, say), or None for losses '
            f"that are sums, got {weight!r}: one number for all parts would weigh small ones as large ones"
        )
    if split is not None:
        raise ValueError('weight="samples" counts tensors; with split= give a function of the part, such as len')
    return _samples


def _code(function: Any) -> Any:
    """Returns what lasts of a function: a lambda in a loop and a method are new objects in each turn."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(getattr(function, "__func__", function), "__code__", function)


def _check_batch(batch: object) -> None:
    remedy = "; leave it out of the batch, or give split=, a function that halves a batch"
    names = dict[int, str]()  # by length
    for path, leaf in tree_flatten_with_path(batch)[0]:
        name = f"batch{keystr(path)}"
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            what = "a tensor without dimensions" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(f"{name} is {what}, and only tensors with a first dimension can be halved{remedy}")
        names.setdefault(len(leaf), name)
    if len(names) != 1:
        found = ", ".join(f"{name} has {length}" for length, name in names.items()) or "there is no tensor"
        raise ValueError(f"the first dimension must be that of samples in all tensors of a batch: {found}{remedy}")


def _samples(part: object) -> int:
    return len(tree_leaves(part)[0])


def _halves(batch: Any) -> list[Any]:
    middle = (_samples(batch) + 1) // 2
    if middle == _samples(batch):
        return [batch]
    return [tree_map(lambda leaf: leaf[:middle], batch), tree_map(lambda leaf: leaf[middle:], batch)]


def _cut(part: Batch, split: Callable[[Batch], Sequence[Batch]]) -> list[Batch]:
    return [each for each in split(part) if _size(each)]  # a list of one text halves into itself and nothing


def _size(part: object) -> int:
    leaves = tree_leaves(part)
    return max((leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)), default=len(leaves))


def _refuse(engine: Engine) -> None:
    """Refuses an optimizer that cannot drop a part, or processes that would wait for the parts of others."""
    if engine.during_backward is not None:
        raise RuntimeError(
            "release_gradients() or fuse_linears() folds gradients during backward, and accumulate_batch() must drop "
            "those of a part that runs out of memory; call remove() on the handle first"
        )
    if has_processes() and not engine.attached:
        raise RuntimeError(
            "accumulate_batch() may cut batches differently in each process, and others would wait for ever for a part "
            "that is not there; call accumfused.attach_ddp(ddp, optimizer) first, or fix the parts (accumfused.windows)"
        )
    if any(ddp.static_graph for ddp in engine.attached):
        raise RuntimeError(
            "accumulate_batch() runs within no_sync(), where DistributedDataParallel(static_graph=True) cannot run its "
            "first backward(); leave static_graph out"
        )


def _prepare(engines: Sequence[Engine], weight: Number | None) -> None:
    """Refuses a part before it runs. Makes the sums that no gradient becomes first: the part has to fit beside them."""
    for engine in engines:
        plan, _, present = engine.check(weight, in_loss=False, last=False)
        if present:
            raise RuntimeError(_HAS_GRADIENT.format("the optimizer's parameters"))
        if not engine.window.is_open:
            engine.window = engine.window.fitted(plan)
            missing = Grads([None] * len(plan.rows))
            for index, row in enumerate(plan.rows):
                if row.is_initialized and row.param.requires_grad and row.param.dtype != row.form.dtype:
                    missing[index] = row.tensor
            engine.window.arena.places_for(plan, missing)


def _tried(
    loss_of: Callable[[Batch], Tensor], part: Batch, engines: Sequence[Engine], scaler: GradScaler | None
) -> tuple[Tensor | None, str]:
    """Runs a part forward and backward.

    Returns:
        Its detached loss. Out of memory: None, and what the allocator says; then the part has left no gradient.
    """
    params = {id(param): param for engine in engines for param in engine.plans.params}
    leaves = list[Tensor]()
    try:
        loss = loss_of(part)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TypeError("loss_of(part) must return a loss: a tensor with one element and a graph")
        leaves = leaves_below(loss)
        for leaf in leaves:
            if leaf.grad is not None:
                raise RuntimeError(_HAS_GRADIENT.format(f"a tensor of shape {list(leaf.shape)}"))
            if isinstance(leaf, Parameter) and id(leaf) not in params:
                raise RuntimeError(
                    f"the loss reaches a parameter of shape {list(leaf.shape)} that none of the optimizers has; list "
                    "its optimizer too, or freeze it by requires_grad_(False)"
                )
        (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        return loss.detach(), ""
    except RuntimeError as error:  # whose traceback holds the frames with all that the part has computed
        text = str(error)
        if not isinstance(error, torch.OutOfMemoryError) and not any(each in text for each in _ALLOCATORS):
            raise
    for tensor in (*leaves, *params.values()):  # reentrant checkpoints hide leaves
        tensor.grad = None
    return None, text.partition("\n")[0]


def _mean(losses: list[Tensor], weights: list[Number | None]) -> Tensor:
    """Takes the mean of losses by their weights, or the sum if these are None, without a wait for the device."""
    values = torch.stack([loss.reshape(()).double() for loss in losses])
    dtype = torch.promote_types(losses[0].dtype, torch.float32)
    given = [values.new_full((), w) if not isinstance(w, Tensor) else w for w in weights if w is not None]
    if not given:
        return values.sum().to(dtype)
    shares = torch.stack([on_device(w, values.device, values.dtype) for w in given])
    return (torch.where(shares == 0, 0.0, values * shares).sum() / shares.sum()).to(dtype)
