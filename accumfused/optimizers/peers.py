"""Constructors: with all arguments of torch's optimizer of the same name; and the checks where torch has none."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accumfused.settings import chosen


def constructor(peer: type[torch.optim.Optimizer]) -> Callable[..., None]:
    """An `__init__` with torch's arguments, then `**settings`; `takes_settings` writes these into its signature."""
    signature = inspect.signature(peer.__init__)

    @functools.wraps(peer.__init__)
    def construct(self: Any, params: Any, *args: Any, **options: Any) -> None:
        settings = {name: options.pop(name) for name in [*options] if name not in signature.parameters}
        peer.__init__(self, params, *args, **options)
        self.state.clear()  # torch's Adagrad makes its states here; the step makes them, in their format
        self.configure(chosen(type(self).__name__, self.defaults, **settings))

    rest = inspect.Parameter("settings", inspect.Parameter.VAR_KEYWORD, annotation=Any)
    vars(construct)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), rest])
    return construct


def check_hypers(lr: Any, betas: tuple[Any, ...] = (), count: int = 0, **others: Any) -> None:
    """Refuses hyper-parameters, in torch's words.

    Args:
        lr, others: >= 0.
        betas: `count` numbers, >= 0 and < 1.
    """
    for name, number in (("lr", lr), *((f"betas[{index}]", beta) for index, beta in enumerate(betas))):
        if isinstance(number, Tensor) and number.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element")
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    for name, value in others.items():
        if not value >= 0.0:
            raise ValueError(f"Invalid {name} value: {value}")
    if len(betas) != count:
        raise ValueError(f"betas must be {count} numbers, got {len(betas)}")
