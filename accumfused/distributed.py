"""Who reduces gradients between processes, and would find none where they were released."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def refuse_wrapped(params: Iterable[Tensor]) -> None:
    """Refuses parameters of a DistributedDataParallel or FullyShardedDataParallel: it would reduce zeros, in silence.

    Modules that `gc.freeze()` has put out of sight are not found.

    Raises:
        RuntimeError: there is one.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", DistributedDataParallel)
    kinds = _with_subclasses({DistributedDataParallel, fsdp})
    ids = set(map(id, params))
    for wrapper in gc.get_referrers(*kinds):  # an instance refers to its class
        if type(wrapper) not in kinds:
            continue
        inner = [child for child in vars(wrapper).get("_modules", {}).values() if child is not None]
        if any(id(param) in ids for module in inner for param in module.parameters()):
            _refuse(type(wrapper).__name__)


def refuse_tensor(param: Tensor) -> None:
    """Refuses a parameter that is spread over processes.

    Raises:
        RuntimeError: it is a DTensor.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(param, module.DTensor):
        _refuse("several processes (DTensor: fully_shard, or tensor parallelism)")


def _refuse(what: str) -> None:
    raise RuntimeError(
        f"gradients cannot be released: a parameter belongs to {what}, which reduces them between processes after "
        "that, and would reduce zeros. Call remove() on the handle, or do not call release_gradients()"
    )


def _with_subclasses(kinds: set[type]) -> set[type]:
    """All of them, at any depth."""
    below: set[type] = set()
    for kind in kinds:
        below.update(type.__subclasses__(kind))
    return kinds | _with_subclasses(below) if below else kinds
