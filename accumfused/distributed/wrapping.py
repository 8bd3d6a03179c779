"""DistributedDataParallel modules around an optimizer's parameters, and what their last passes did."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from accumfused.distributed.groups import has_processes

_synchronizes: WeakKeyDictionary[DistributedDataParallel, bool] = WeakKeyDictionary()  # its last pass with autograd


class Wrappers:
    """The modules that hold some of these parameters, as far as they exist now.

    Torch keeps no list of them: this looks at all objects of the process once (some 30 ms for a million).
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        ids = {id(param) for param in params} if has_processes() else set()
        found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)] if ids else []
        self.modules = WeakSet(each for each in found if any(id(param) in ids for param in each.parameters()))

    def watch(self) -> None:
        """Notes from now on whether the modules' passes synchronize."""
        for ddp in self.modules:
            if ddp not in _synchronizes:
                _synchronizes[ddp] = True
                ddp.register_forward_pre_hook(_note)

    def refuse_unsynchronized(self) -> None:
        """Refuses gradients of a pass within no_sync(), which the optimizer was told are reduced."""
        for ddp in self.modules:
            if not (ddp.require_backward_grad_sync and _synchronizes.get(ddp, True)):
                raise RuntimeError(
                    "grads_are_reduced=True says that every micro-batch's gradients are reduced, and "
                    "DistributedDataParallel was in no_sync(); leave no_sync() out, or leave grads_are_reduced= out "
                    "and call accumfused.attach_ddp(ddp, optimizer), which reduces once per window"
                )

    def refuse_joined(self) -> None:
        """Refuses to work within join(), whose collectives of processes that have finished do not know ours."""
        for ddp in self.modules:
            if ddp._join_config.enable:  # noqa: SLF001  # torch's
                raise RuntimeError(
                    "join() of DistributedDataParallel does not know the sums that the optimizer adds up over the "
                    "processes, and would answer them with others; leave join() out: run every micro-batch within "
                    "ddp.no_sync(), whatever their number here, and call step() equally often in every process"
                )


def _note(ddp: DistributedDataParallel, _: object) -> None:
    if torch.is_grad_enabled():
        _synchronizes[ddp] = ddp.require_backward_grad_sync
