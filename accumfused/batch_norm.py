"""A warning about BatchNorm, which no accumulation can repair: it sees micro-batches, not the window."""

from __future__ import annotations

from torch.nn import Module, SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from accumfused.warn import AccumulationWarning, warn

_NAMED = 5  # layers that the warning lists


class BatchNormWarning(AccumulationWarning):
    """A model with BatchNorm in training mode is trained with gradient accumulation."""


def check_model(model: Module) -> None:
    """Warns once (`BatchNormWarning`) if layers of the model normalize each micro-batch by itself.

    Those are BatchNorm layers in training mode, except SyncBatchNorm. Call it before a training with accumulation:
    an optimizer knows no layers. `attach_ddp`, `fuse_linears` and the integrations, which are given the model, do.

    Args:
        model: the model, in the mode in which it will be trained.

    Raises:
        TypeError: not a module.

    Examples:
        >>> af.check_model(model.train())
    """
    if not isinstance(model, Module):
        raise TypeError(f"check_model takes a torch.nn.Module, got {type(model).__name__}")
    layers = [
        f"{name} ({type(layer).__name__})" if name else type(layer).__name__
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm) and layer.training
    ]
    if layers:
        more = f" and {len(layers) - _NAMED} more" if len(layers) > _NAMED else ""
        warn(
            f"gradient accumulation with BatchNorm in training mode: {', '.join(layers[:_NAMED])}{more}. Its "
            "statistics are those of each micro-batch, not of the effective batch, and its running statistics move "
            "once per micro-batch, so the result is not that of the large batch. Use GroupNorm, SyncBatchNorm if there "
            "are several processes, larger micro-batches, or freeze it with eval(). To silence this: "
            'warnings.simplefilter("ignore", af.BatchNormWarning)',
            BatchNormWarning,
        )
