"""Makes an optimizer class of a rule: the package's, except three that are written by hand, and users'."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from accumfused.formats import kinds
from accumfused.optimizer import FusedOptimizer
from accumfused.rules import Rule
from accumfused.settings import PLACE, chosen, takes_settings

_LIKE_TORCH = "It replaces `torch.optim.{}`: same arguments, group keys, state names and checkpoints."
_EPS = """Second moments below 2^-126 (in 8-bit blocks 2^-94) are stored as 0, so eps is 0 or at least {} ({} with 8-bit
states; fp64 parameters take any). With eps=0 gradients whose squares are smaller make steps that are too large."""
_FORMATS = kinds.Format(), kinds.Format(states=kinds.States.INT8)
_ARGUMENTS = {  # what all optimizers say of theirs; a rule's docstring has the rest
    "params": "parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.",
    "maximize": "True ascends instead of descending.",
    "differentiable": "not supported.",
    **dict.fromkeys(("foreach", "fused", "capturable"), "unused; groups have them for torch's own optimizer."),
}
_RAISES = """
Raises:
    ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes.
    RuntimeError: a backend asked for by name cannot run.
"""


def optimizer_of(
    rule: type[Rule],
    *variants: type[Rule],
    name: str | None = None,
    peer: type[torch.optim.Optimizer] | None = None,
    base: type[FusedOptimizer] = FusedOptimizer,
) -> type[FusedOptimizer]:
    """Makes an optimizer of a rule: with windows, clipping, formats, checkpoints, and kernels.

    On a GPU Triton compiles the rule. On a CPU the machine's C++ compiler does when the rule first steps; the result is
    kept in the folder ACCUMFUSED_CACHE, or in the user's cache. Without a compiler torch's kernels step ("torch":
    the rule's arithmetic, torch's own norm), and a log line says so. docs/guide/rules.md has an example.

    Args:
        rule: its `hypers` is a mapping of hyper-parameters to their defaults. Its docstring describes the class; the
            text of its Args describes hyper-parameters.
        variants: the same rule with other flags, if it has flags; a parameter group chooses by its keys. A variant may
            have further hyper-parameters: groups have them where they are on.
        name: of the class; None: the peer's, or the rule's without "Rule". A pickle finds the class by this name in the
            rule's module.
        peer: a class of torch.optim, whose arguments, checks and checkpoints the class has.
        base: a base class with further methods.

    Returns:
        A class: params, then the hyper-parameters and flags (those that are on or off by keyword), then the settings as
        keyword arguments. A flag named has_... or is_... is no argument: it follows from others.

    Raises:
        TypeError: it is no rule; a rule whose arithmetic is not its own.
        ValueError: hyper-parameters without defaults; variants that lack hypers; two rules with the same flags.
    """
    rules = (rule, *variants)
    for variant in rules:
        if not (isinstance(variant, type) and issubclass(variant, Rule)):
            raise TypeError(f"optimizer_of() takes subclasses of Rule, got {variant!r}")
        if variant.is_foreign:
            raise TypeError(f"{variant.__name__} has no name, so it has no arithmetic; give it one")
    if len({tuple(variant.flags.items()) for variant in rules}) < len(rules):
        raise ValueError(f"two of {', '.join(variant.__name__ for variant in rules)} have the same flags")
    construct = _of_peer(peer) if peer is not None else _of_rules(rules)
    title = name or (rule.__name__.removesuffix("Rule") if peer is None else peer.__name__)
    body = {"__module__": rule.__module__, "__init__": construct, "rules": (*variants, rule)}
    optimizer_class = type(title, (base,) if peer is None else (base, peer), body)
    optimizer_class.__doc__ = _documentation(rule, title, peer, inspect.signature(construct))
    return takes_settings(optimizer_class)


def _of_peer(peer: type[torch.optim.Optimizer]) -> Callable[..., None]:
    """Makes a constructor with the arguments and checks of torch's."""
    theirs = inspect.signature(peer.__init__)

    def construct(self: Any, params: Any, *args: Any, **options: Any) -> None:
        settings = {name: options.pop(name) for name in [*options] if name not in theirs.parameters}
        peer.__init__(self, params, *args, **options)
        self.state.clear()  # torch's Adagrad makes its states here; the step makes them, in their format
        self._configure(chosen(type(self).__name__, self.defaults, **settings))

    rest = inspect.Parameter("settings", inspect.Parameter.VAR_KEYWORD, annotation=Any)
    vars(construct)["__signature__"] = theirs.replace(parameters=[*theirs.parameters.values(), rest])
    return construct


def _of_rules(rules: tuple[type[Rule], ...]) -> Callable[..., None]:
    """Makes a constructor whose arguments are the rules' hyper-parameters and flags."""
    first = rules[0]
    arguments: dict[str, Any] = {}
    for rule in rules:
        if not isinstance(rule.hypers, Mapping):
            raise ValueError(f"{rule.__name__}.hypers has no defaults; write {{'lr': 1e-3}} in place of ('lr',)")
        arguments |= rule.hypers
        if {**rule.hypers, **first.hypers} != rule.hypers or rule.flags.keys() != first.flags.keys():  # type: ignore[dict-item]
            raise ValueError(f"{rule.__name__} has other hypers or flags than {first.__name__}; make two optimizers")
    arguments |= {flag: value for flag, value in first.flags.items() if not flag.startswith(("has_", "is_"))}
    bounds = {name: bound for rule in rules for name, bound in rule.bounds.items()}

    def construct(*args: Any, **options: Any) -> None:
        call = signature.bind(*args, **options)
        call.apply_defaults()
        self, params, settings = (call.arguments[key] for key in ("self", "params", "settings"))
        group = {key: call.arguments[key] for key in arguments}
        for key, value in group.items():
            _check(key, value, arguments[key], bounds)
        for key in [key for key in arguments if key not in first.hypers and key not in first.flags]:
            if not group[key]:
                del group[key]
        torch.optim.Optimizer.__init__(self, params, group)
        self._configure(chosen(type(self).__name__, arguments, **settings))

    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(
            key, inspect.Parameter.KEYWORD_ONLY if isinstance(value, bool) else keyword, default=value,
            annotation=_annotation(key, value),
        )
        for key, value in sorted(arguments.items(), key=lambda item: isinstance(item[1], bool))
    ]  # fmt: skip
    signature = inspect.Signature(
        [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY),
            inspect.Parameter("params", keyword, annotation=Any),
            *parameters,
            inspect.Parameter("settings", inspect.Parameter.VAR_KEYWORD, annotation=Any),
        ]
    )
    vars(construct)["__signature__"] = signature
    return construct


def _annotation(name: str, default: Any) -> Any:
    if isinstance(default, tuple):
        return tuple[(float | Tensor,) * len(default)]  # type: ignore[misc]
    if name == "lr":
        return float | Tensor
    return int | None if default is None else type(default)


def _check(name: str, value: Any, default: Any, bounds: Mapping[str, tuple[float, float]]) -> None:
    """Refuses hyper-parameters, in torch's words."""
    if isinstance(default, tuple):
        numbers = {f"{name.removesuffix('s')}{index}": number for index, number in enumerate(value, 1)}
        texts = [f"{name.removesuffix('s')} parameter at index {index}:" for index in range(len(value))]
    else:
        numbers = {} if value is None and default is None else {name: value}
        texts = [{"lr": "learning rate:", "eps": "epsilon value:"}.get(name, f"{name} value:")]
    for (key, number), text in zip(numbers.items(), texts, strict=False):
        if isinstance(number, Tensor):
            if number.numel() != 1:
                raise ValueError(f"Tensor {name} must be 1-element")
        elif not isinstance(number, int | float):
            raise TypeError(f"{name} must be a number, got {number!r}")
        least, end = bounds.get(key) or Rule.bounds.get(key.rstrip("0123456789")) or (-math.inf, math.inf)
        if not (least <= number < end or number == end == math.inf):
            raise ValueError(f"Invalid {text} {number}")
    if isinstance(default, tuple) and len(value) != len(default):
        raise ValueError(f"{name} must be {len(default)} numbers, got {len(value)}")


def _documentation(
    rule: type[Rule], title: str, peer: type[torch.optim.Optimizer] | None, signature: inspect.Signature
) -> str:
    """Completes the rule's docstring by the texts that all optimizers have in common."""
    text, _, arguments = inspect.cleandoc(rule.__doc__ or "").partition("Args:\n")
    summary = text.strip() or f"{title}, with accumulation, unscaling and clipping in the same pass."
    described = set(", ".join(re.findall(r"^    (\w[\w, ]*):", arguments, re.MULTILINE)).split(", "))
    names = [name for name in signature.parameters if name not in ("self", "settings", *described)]
    plain = [name for name in names if name not in _ARGUMENTS]
    lines = [f"    params: {_ARGUMENTS['params']}", *arguments.rstrip().splitlines()]
    if plain:
        lines.append(f"    {', '.join(plain)}: {'hyper-parameters of the rule.' if peer is None else 'as in torch.'}")
    for meaning in dict.fromkeys(_ARGUMENTS[name] for name in names if name in _ARGUMENTS and name != "params"):
        lines.append(f"    {', '.join(name for name in names if _ARGUMENTS.get(name) == meaning)}: {meaning}")
    if rule.eps_beside:
        summary += "\n\n" + _EPS.format(*(f"{kinds.least_eps(rule, form):g}" for form in _FORMATS))
    if peer is not None:
        summary += "\n\n" + _LIKE_TORCH.format(title)
    return "\n".join([summary, "", "Args:", *lines, ""]) + PLACE + _RAISES
