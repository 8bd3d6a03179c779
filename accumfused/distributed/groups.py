"""Queries to torch.distributed: process groups, and other owners of the reduction of gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from accumfused.formats.shards import is_dtensor


def has_processes() -> bool:
    """Whether there is more than one process."""
    available = torch.distributed.is_available() and torch.distributed.is_initialized()
    return available and torch.distributed.get_world_size() > 1


def default_seed() -> int:
    """torch's initial seed (no random number is consumed), or 0 with several processes, which must round alike."""
    return 0 if has_processes() else torch.initial_seed() % 2**63


def check_group(group: Any, name: str) -> None:
    """Refuses a group unless it is None, or a process group that contains this process."""
    if group is None:
        return
    if not torch.distributed.is_available() or not isinstance(group, torch.distributed.ProcessGroup):
        what = "a group that this process is not in" if isinstance(group, int) else type(group).__name__
        raise TypeError(
            f"{name} must be a torch.distributed.ProcessGroup (torch.distributed.group.WORLD, say), got {what}"
        )


def sends_from_host(group: Any) -> bool:
    """Tells whether a process group sends tensors of the host."""
    try:
        group._get_backend(torch.device("cpu"))  # noqa: SLF001
    except RuntimeError:
        return False
    return True


def refuse_released(param: Tensor, group: Any) -> None:
    """Refuses to release gradients that something else reduces later: it would reduce zeros.

    Args:
        group: the optimizer's process_group. (Beside one, a DistributedDataParallel that is not attached goes unseen.)

    Raises:
        RuntimeError: the parameter is sharded, or there are several processes and no group.
    """
    if is_dtensor(param):
        what = "a parameter belongs to several processes (DTensor: fully_shard, or tensor parallelism), which"
    elif is_sharded(param):
        what = "a parameter belongs to FullyShardedDataParallel, which"
    elif group is None and has_processes():
        what = "there is more than one process and no process_group, so something else"
    else:
        return
    raise RuntimeError(
        f"gradients cannot be released: {what} reduces them between processes after that, and would reduce zeros. Call "
        "remove() on the handle, or do not call release_gradients() or fuse_linears() (or call "
        "accumfused.attach_ddp(ddp, optimizer) first, where it is DistributedDataParallel)"
    )


def refuse_synchronizing(ddp: DistributedDataParallel) -> None:
    """Refuses to release gradients that an attached module reads after the backward pass.

    Raises:
        RuntimeError: the last forward pass, or this backward pass, is outside `no_sync()`.
    """
    if ddp.require_backward_grad_sync or ddp.require_forward_param_sync:
        raise RuntimeError(
            "gradients are released during backward, and DistributedDataParallel would look for them after that; run "
            "forward and backward within ddp.no_sync(), every micro-batch of a window, or do not call "
            "release_gradients() or fuse_linears()"
        )


def refuse_sharded(params: Iterable[Tensor]) -> None:
    """Refuses FullyShardedDataParallel's shards, of which each process would take a norm, and a skip, of its own."""
    if any(map(is_sharded, params)):
        raise RuntimeError(
            "the parameters belong to a FullyShardedDataParallel, which is not supported: its shards do not tell of "
            "which processes' gradients a norm is to be taken; use fully_shard, and no process_group"
        )


def is_sharded(param: Tensor) -> bool:
    """Whether FullyShardedDataParallel shards the parameter: it marks its own."""
    return bool(getattr(param, "_fsdp_flattened", False))
