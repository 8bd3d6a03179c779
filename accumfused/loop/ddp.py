"""Lets the optimizer reduce DistributedDataParallel's gradients: once per window, in the accumulators' dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accumfused.batch_norm import check_model
from accumfused.optimizer import FusedOptimizer, check_fused


def attach_ddp(
    ddp: DistributedDataParallel, *optimizers: FusedOptimizer, reduce_dtype: torch.dtype | None = None
) -> None:
    """Disables DDP's own reduction for good: the optimizers sum gradients over the processes, once per window.

    Every backward() then leaves a process's own gradients, under any `no_sync()` pattern. `accumulate(weight,
    last=last)` folds them, and the last one (or `step()`) sums the accumulators of all processes. Without weights the
    result is the mean over processes, as in DDP. With weights it is divided by their sum over all processes and
    micro-batches.

    DDP still communicates in passes outside `no_sync()` (buffers, `find_unused_parameters`, its buckets). Processes
    whose numbers of micro-batches differ therefore need `no_sync()` around all of them.

    Args:
        ddp: the module. It keeps a communication hook that does nothing; this cannot be undone.
        optimizers: optimizers of this package that together hold all trainable parameters of the module; one without
            a `process_group` gets DDP's.
        reduce_dtype: see `accumfused.Adam`; None keeps each optimizer's own.

    It warns of BatchNorm in training mode (`accumfused.check_model`).

    Raises:
        TypeError: the module or an optimizer has another type, or there is no optimizer.
        ValueError: an optimizer has another process group than DDP; no optimizer holds a parameter of DDP.
        RuntimeError: a window is open; DDP has a communication hook already.

    Examples:
        >>> model = DistributedDataParallel(model)
        >>> optimizer = af.AdamW(model.parameters(), max_grad_norm=1.0)
        >>> af.attach_ddp(model, optimizer)
    """
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"attach_ddp takes a DistributedDataParallel first, got {type(ddp).__name__}")
    if not optimizers:
        raise TypeError("attach_ddp takes the module's optimizer, or several, after the module, and got none")
    for optimizer in optimizers:
        _check(ddp, optimizer, reduce_dtype)
    param_ids = {id(param) for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]}
    missing = [name for name, p in ddp.module.named_parameters() if p.requires_grad and id(p) not in param_ids]
    if missing:
        raise ValueError(
            f"no optimizer has the parameter {missing[0]!r} ({len(missing)} are missing), so its gradients would not "
            "be reduced; give attach_ddp all optimizers of the module"
        )
    check_model(ddp)  # a warning may be an error
    ddp.register_comm_hook(None, noop_hook)  # gradients stay this process's own
    ddp.register_forward_pre_hook(_forget_used)
    for optimizer in optimizers:
        settings = optimizer._engine.settings
        settings.process_group = ddp.process_group if settings.process_group is None else settings.process_group
        settings.reduce_dtype = settings.reduce_dtype if reduce_dtype is None else reduce_dtype
        optimizer._engine.plans.forget()
        optimizer._engine.attached.add(ddp)


def _forget_used(ddp: DistributedDataParallel, _: object) -> None:
    """Lets DDP forget which parameters earlier passes within no_sync() used: it would look for their p.grad.

    `accumulate()` has taken that. Without `find_unused_parameters` DDP remembers nothing of them.
    """
    if ddp.find_unused_parameters and ddp.require_backward_grad_sync and torch.is_grad_enabled():
        ddp.reducer._reset_state()  # noqa: SLF001  # torch's own method of another process group


def _check(ddp: DistributedDataParallel, optimizer: FusedOptimizer, reduce_dtype: torch.dtype | None) -> None:
    check_fused(optimizer, "attach_ddp")
    optimizer._engine.refuse_open("attach_ddp()")
    settings, group = optimizer._engine.settings, ddp.process_group
    if settings.process_group is not None and set(_ranks(settings.process_group)) != set(_ranks(group)):
        raise ValueError(
            f"the optimizer adds up over processes {_ranks(settings.process_group)}, DistributedDataParallel is on "
            f"{_ranks(group)}; give both the same process group"
        )
    if settings.grads_are_reduced:
        raise ValueError("the optimizer was told grads_are_reduced=True, and after this they are not; leave it out")
    replace(settings, process_group=group, reduce_dtype=reduce_dtype)  # checks them


def _ranks(group: Any) -> list[int]:
    return torch.distributed.get_process_group_ranks(group)
