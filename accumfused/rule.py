"""Rule: the face that an optimizer's arithmetic shows to the rest of the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor


class Rule:
    """An optimizer's elementwise arithmetic, in PyTorch.

    The functor of the same `name` in csrc/rules.h does the same operations in the same order.
    """

    name: ClassVar[str]
    states: ClassVar[tuple[str, ...]]  # per element, torch's names
    second_moments: ClassVar[tuple[str, ...]] = ()  # must be the last entries of `states`
    torch_states: ClassVar[tuple[str, ...]] = ()  # all that torch's optimizer of this name keeps and expects
    keeps_maximum: ClassVar[bool] = False  # one state is a maximum, where noise does not average out
    counts_steps: ClassVar[bool]  # keeps state["step"], an fp32 scalar per tensor
    is_foreign: ClassVar[bool] = False  # its own step writes parameters and states, in its own formats
    hypers: ClassVar[tuple[str, ...]]  # keys of a parameter group; beta1 and beta2 are group["betas"]

    @staticmethod
    def scalars(hyper: Mapping[str, float], step: Tensor, coefficient: Tensor) -> dict[str, Tensor]:
        """The numbers that all elements share, computed in fp64 and rounded to fp32 once.

        Args:
            hyper: the group's hyper-parameters.
            step: [tensors], this step's number (1 for the first), fp32.
            coefficient: [], the gradients' factor, fp32.

        Returns:
            Tensors of shape [tensors] or [].
        """
        raise NotImplementedError

    @staticmethod
    def update(s: Mapping[str, Tensor], param: Tensor, grad: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """The new parameter and states, out of place; `s` holds one tensor's scalars, each of shape []."""
        raise NotImplementedError

    # The same in Triton; `arithmetic` in backends/triton/backend.py compiles them.
    triton_scalars: ClassVar[Callable[..., Any]]
    triton_update: ClassVar[Callable[..., Any]]


def known_states() -> set[str]:
    """The names of the states of all rules, including rules that a user has defined."""
    below, names = [Rule], set[str]()
    while below:
        rule = below.pop()
        names.update(getattr(rule, "states", ()))
        below += rule.__subclasses__()
    return names


def fp32(numbers: Mapping[str, float], device: torch.device) -> dict[str, Tensor]:
    """Each number as an fp32 tensor of shape [], rounded once."""
    return {name: torch.tensor(value, dtype=torch.float32, device=device) for name, value in numbers.items()}
