"""A warning about BatchNorm, which no accumulation can repair: it sees micro-batches, not the window."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Module, SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from accumfused.warn import AccumulationWarning, warn

_NAMED = 5  # layers that the warning lists
# The most graph nodes that one optimizer visits, once: 20 ms (a core of an AMD EPYC, torch 2.13, 2026-11-22).
# torch frees nodes that Python has seen recursively, at 200 bytes of stack each: 40,000 in a row overflow the stack.
_MOST_NODES = 2048


class BatchNormWarning(AccumulationWarning):
    """A model with BatchNorm in training mode is trained with gradient accumulation."""


def check_model(model: Module) -> None:
    """Warns once (`BatchNormWarning`) if layers of the model normalize each micro-batch by itself.

    Those are BatchNorm layers in training mode, except SyncBatchNorm. Call it before a training with accumulation;
    the integrations do. (An optimizer knows no layers: only `backward(loss)` sees the BatchNorm that it trains.)

    Args:
        model: the model, in the mode in which it will be trained.

    Raises:
        TypeError: not a module.

    Examples:
        >>> af.check_model(model.train())
    """
    if not isinstance(model, Module):
        raise TypeError(f"check_model takes a torch.nn.Module, got {type(model).__name__}")
    found = [
        f"{name} ({type(layer).__name__})" if name else type(layer).__name__
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm) and layer.training
    ]
    if found:
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        _warn(", ".join(found[:_NAMED]) + more)


def check_graph(loss: Tensor, params: Iterable[Tensor]) -> None:
    """Gives the same warning if BatchNorm in training mode used one of these parameters for this loss.

    It sees the nodes next to the loss, which outlive the backward pass. It misses layers that torch.compile or a
    reentrant checkpoint hides in one node, and BatchNorm without a trainable weight.
    """
    owned, seen, waiting = set(map(id, params)), set[Any](), deque([loss.grad_fn])
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = [other for other, _ in node.next_functions]
        # InstanceNorm is the same operation, with a copy of its weight.
        weight = getattr(following[1], "variable", None) if _uses_micro_batch(node) else None
        if id(weight) in owned:
            _warn("seen in the graph of the loss, af.check_model(model) names the layers")
            return
        waiting += following


def _uses_micro_batch(node: Any) -> bool:
    name = node.name()
    return "BatchNorm" in name and getattr(node, "_saved_training", "WithUpdate" in name)


def _warn(layers: str) -> None:
    warn(
        f"gradient accumulation with BatchNorm in training mode: {layers}. Its statistics are "
        "those of each micro-batch, not of the effective batch, and its running statistics move once per micro-batch, "
        "so the result is not that of the large batch. Use GroupNorm, SyncBatchNorm if there are several processes, "
        "larger micro-batches, or freeze it with eval(). To silence this: "
        'warnings.simplefilter("ignore", af.BatchNormWarning)',
        BatchNormWarning,
    )
