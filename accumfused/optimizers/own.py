"""An optimizer class of a user's own rule."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accumfused.optimizer import FusedOptimizer
from accumfused.rules import Rule
from accumfused.settings import chosen, takes_settings


def optimizer_of(rule: type[Rule], *variants: type[Rule], name: str | None = None) -> type[FusedOptimizer]:
    """Makes an optimizer of a rule: with windows, clipping, formats, checkpoints, and kernels.

    On a GPU Triton compiles the rule. On a CPU the machine's C++ compiler does when the rule first steps; the result is
    kept in the folder ACCUMFUSED_CACHE, or in the user's cache. Without a compiler torch's kernels step ("foreach":
    the rule's arithmetic, torch's own norm), and a log line says so. docs/guide/rules.md has an example.

    Args:
        rule: its `hypers` is a mapping of hyper-parameters to their defaults.
        variants: the same rule with other flags, if it has flags; a parameter group chooses by its keys.
        name: of the class; None: the rule's without "Rule". A pickle finds the class by this name in the rule's module.

    Returns:
        A class: params, then the hyper-parameters and flags, then the settings as keyword arguments.

    Raises:
        TypeError: it is no rule; a rule whose arithmetic is not its own.
        ValueError: hyper-parameters without defaults; variants with other hypers; two rules with the same flags.
    """
    rules = (rule, *variants)
    hypers: dict[str, float] = {}
    for own in rules:
        if not (isinstance(own, type) and issubclass(own, Rule)):
            raise TypeError(f"optimizer_of() takes subclasses of Rule, got {own!r}")
        if own.is_foreign:
            raise TypeError(f"{own.__name__} has no name, so it has no arithmetic; give it one")
        if not isinstance(own.hypers, Mapping):
            raise ValueError(f"{own.__name__}.hypers has no defaults; write {{'lr': 1e-3}} in place of ('lr',)")
        hypers = hypers or dict(own.hypers)
        if dict(own.hypers) != hypers or own.flags.keys() != rule.flags.keys():
            raise ValueError(f"{own.__name__} has other hypers or flags than {rule.__name__}; make two optimizers")
    if len({tuple(own.flags.items()) for own in rules}) < len(rules):
        raise ValueError(f"two of {', '.join(own.__name__ for own in rules)} have the same flags")
    defaults = {**hypers, **{flag: value for flag, value in rule.flags.items() if not flag.startswith("has_")}}
    title = name or rule.__name__.removesuffix("Rule")
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(key, keyword, default=value) for key, value in defaults.items()]
    signature = inspect.Signature(
        [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY),
            inspect.Parameter("params", keyword),
            *parameters,
            inspect.Parameter("settings", inspect.Parameter.VAR_KEYWORD),
        ]
    )

    def construct(*args: Any, **options: Any) -> None:
        given = signature.bind(*args, **options)
        given.apply_defaults()
        self, params, settings = (given.arguments[key] for key in ("self", "params", "settings"))
        group = {key: given.arguments[key] for key in defaults}
        for key, value in group.items():
            _check_number(key, value)
        torch.optim.Optimizer.__init__(self, params, group)
        self.configure(chosen(title, defaults, **settings))

    vars(construct)["__signature__"] = signature
    body = {"__doc__": rule.__doc__, "__module__": rule.__module__, "__init__": construct, "rules": rules}
    return takes_settings(type(title, (FusedOptimizer,), body))


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} is a tensor of shape {list(value.shape)}; it must have one element")
    elif not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    elif value != value:
        raise ValueError(f"{name} must be a number, got {value}")
