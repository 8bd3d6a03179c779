"""A warning for what no accumulation can repair: BatchNorm sees micro-batches, not the window."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from torch import Tensor
from torch.nn import Module, SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from accumfused.warn import AccumulationWarning, warn

_NAMED = 5  # modules that the warning lists


class BatchNormWarning(AccumulationWarning):
    """A model with BatchNorm in training mode is trained with gradient accumulation."""


def warn_of_batch_norm(params: Sequence[Tensor]) -> None:
    """Draws one `BatchNormWarning` if modules that belong to these parameters normalize each micro-batch by itself.

    Found are BatchNorm modules in training mode (SyncBatchNorm apart) that own one of the parameters, and those that
    train nothing themselves (affine=False, frozen) within a model that owns one. Neither modules nor parameters are
    changed or kept. Modules that `gc.freeze()` has put out of sight are not found.

    Args:
        params: those of an optimizer.
    """
    # A BatchNorm has weight and bias, of one dimension. One without (affine=False) in a model that has no other
    # parameter of one dimension is missed: too rare for all other models of matrices alone to pay for the scan.
    if all(param.dim() != 1 for param in params):
        return
    found = _micro_batch_norms({id(param) for param in params})
    if not found:
        return
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    warn(
        f"gradient accumulation with BatchNorm in training mode: {', '.join(found[:_NAMED])}{more}. Its statistics are "
        "those of each micro-batch, not of the effective batch, and its running statistics move once per micro-batch, "
        "so the result is not that of the large batch. Use GroupNorm, SyncBatchNorm if there are several processes, "
        "larger micro-batches, or freeze it with eval(). To silence this: "
        'warnings.simplefilter("ignore", af.BatchNormWarning)',
        BatchNormWarning,
    )


def _micro_batch_norms(params: set[int]) -> list[str]:
    """Names and classes of the modules to warn of. Args: params: ids. Only strings leave: no module is kept alive."""
    # An optimizer has parameters and does not know their modules; the garbage collector knows all modules. What a
    # foreign object is, is asked of its type: isinstance() reads __class__, and a lazy proxy would wake up.
    # 0.1 s for a million objects (2 cores of an AMD EPYC, Python 3.11), once per optimizer.
    modules: list[Module] = [thing for thing in gc.get_objects() if issubclass(type(thing), Module)]
    if not any(_uses_micro_batches(module) for module in modules):
        return []
    inner = {id(child) for module in modules for _, child in _children(module)}
    found: dict[int, str] = {}
    for model in modules:
        if id(model) in inner:
            continue
        named = _named(model)
        if not any(_owns(module, params) for module, _ in named):
            continue
        for module, name in named:
            if _uses_micro_batches(module) and (_owns(module, params) or not _trains(module)):
                kind = type(module).__name__
                found.setdefault(id(module), f"{name} ({kind})" if name else kind)
    return list(found.values())


def _named(model: Module) -> list[tuple[Module, str]]:
    """The modules of a model, itself included, with the names that its state_dict() has."""
    named: dict[int, tuple[Module, str]] = {}  # by id: a dataclass has no hash
    waiting = [(model, "")]
    while waiting:
        module, name = waiting.pop()
        if id(module) not in named:
            named[id(module)] = module, name
            children = [(child, f"{name}.{key}" if name else key) for key, child in _children(module)]
            waiting += reversed(children)
    return list(named.values())


# These read __dict__ alone: strangers' modules may compute attributes, and one whose __init__ failed has none.


def _uses_micro_batches(module: Module) -> bool:
    kind = type(module)
    return issubclass(kind, _BatchNorm) and not issubclass(kind, SyncBatchNorm) and vars(module).get("training", False)


def _children(module: Module) -> list[tuple[str, Module]]:
    return [(key, child) for key, child in vars(module).get("_modules", {}).items() if child is not None]


def _owns(module: Module, params: set[int]) -> bool:
    return any(id(param) in params for param in vars(module).get("_parameters", {}).values())


def _trains(module: Module) -> bool:
    return any(param is not None and param.requires_grad for param in vars(module).get("_parameters", {}).values())
