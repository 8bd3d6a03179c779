"""torch.distributed as it is found here: groups, and who reduces gradients between processes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def has_processes() -> bool:
    """Whether there is more than one."""
    available = torch.distributed.is_available() and torch.distributed.is_initialized()
    return available and torch.distributed.get_world_size() > 1


def default_seed() -> int:
    """That of torch's generator, of which nothing is drawn; of several processes, one that all have."""
    return 0 if has_processes() else torch.initial_seed() % 2**63


def check_group(group: Any) -> None:
    """Refuses what is no process group of this process.

    Raises:
        TypeError: it is none.
    """
    if not torch.distributed.is_available() or not isinstance(group, torch.distributed.ProcessGroup):
        what = "a group that this process is not in" if isinstance(group, int) else type(group).__name__
        raise TypeError(
            f"process_group must be a torch.distributed.ProcessGroup (torch.distributed.group.WORLD, say), got {what}"
        )


def refuse_wrapped(params: Iterable[Tensor]) -> None:
    """Refuses to release gradients that somebody reduces: it would reduce zeros.

    Raises:
        RuntimeError: they belong to a FullyShardedDataParallel, or to a DistributedDataParallel that is not attached.
    """
    for wrapper in _wrappers(params):
        if not _is_attached(wrapper):
            _refuse(type(wrapper).__name__)


def refuse_synchronizing(ddp: DistributedDataParallel) -> None:
    """Refuses to release gradients of a backward pass after which an attached module looks at them.

    Raises:
        RuntimeError: the last forward pass, or this backward pass, is outside `no_sync()`.
    """
    if ddp.require_backward_grad_sync or ddp.require_forward_param_sync:
        raise RuntimeError(
            "gradients are released during backward, and DistributedDataParallel would look for them after that; run "
            "forward and backward within ddp.no_sync(), every micro-batch of a window, or do not call "
            "release_gradients()"
        )


def refuse_reducing(params: Iterable[Tensor]) -> None:
    """Refuses parameters whose gradients somebody else reduces too.

    Raises:
        RuntimeError: they are.
    """
    for wrapper in _wrappers(params):
        if not _is_attached(wrapper):
            raise RuntimeError(
                f"the optimizer has a process group, and its parameters belong to a {type(wrapper).__name__} that "
                "reduces their gradients too; call accumfused.attach_ddp(ddp, optimizer) (FullyShardedDataParallel: "
                "use fully_shard, and no process_group)"
            )


def _is_attached(wrapper: Any) -> bool:
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

    return noop_hook in [hook for hook, _ in getattr(wrapper, "_comm_hooks", [])]


def _wrappers(params: Iterable[Tensor]) -> Iterator[Any]:
    """The DistributedDataParallel or FullyShardedDataParallel modules that have any of these parameters.

    Modules that `gc.freeze()` has put out of sight are not found.
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
            yield wrapper


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
        "that, and would reduce zeros. Call remove() on the handle, or do not call release_gradients() "
        "(DistributedDataParallel: or call accumfused.attach_ddp(ddp, optimizer) first)"
    )


def _with_subclasses(kinds: set[type]) -> set[type]:
    """All of them, at any depth."""
    below: set[type] = set()
    for kind in kinds:
        below.update(type.__subclasses__(kind))
    return kinds | _with_subclasses(below) if below else kinds
