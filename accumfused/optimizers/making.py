"""Optimizers of rules: `construct` makes one whose class is written, as Lion's is; `optimizer_of` makes a class."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accumfused.formats import kinds
from accumfused.optimizer import FusedOptimizer
from accumfused.rules import Rule
from accumfused.settings import PLACE, SettingArguments, chosen, takes_settings

_EPS = """Second moments below 2^-126 (in 8-bit blocks 2^-94) are stored as 0, so eps is 0 or at least {} ({} with 8-bit
states; fp64 parameters take any). With eps=0 gradients whose squares are smaller make steps that are too large."""
_FORMATS = kinds.Format(), kinds.Format(states=kinds.States.INT8)
_PARAMS = "parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes."
_MAXIMIZE = "True ascends instead of descending."
_RAISES = """
Raises:
    ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes.
    RuntimeError: a backend asked for by name cannot run.
"""


def construct(optimizer: FusedOptimizer, params: Any, arguments: Mapping[str, Any], settings: SettingArguments) -> None:
    """Gives a new optimizer its parameter groups, of arguments that its last rule and the variants before it have.

    Args:
        arguments: all hyper-parameters and flags, by name. One that only a variant has is in groups where it is on.

    Raises:
        ValueError, TypeError: wrong hyper-parameters, in torch's words; wrong settings.
    """
    rules = optimizer.rules
    defaults = arguments_of(rules)
    bounds = {name: bound for rule in rules for name, bound in rule.bounds.items()}
    for name, value in arguments.items():
        _check(name, value, defaults[name], bounds)
    always = {*rules[-1].hypers, *rules[-1].flags}
    group = {name: value for name, value in arguments.items() if name in always or value}
    torch.optim.Optimizer.__init__(optimizer, params, group)
    optimizer._configure(chosen(type(optimizer).__name__, arguments, **settings))


def arguments_of(rules: Sequence[type[Rule]]) -> dict[str, Any]:
    """Returns the arguments of an optimizer of these rules, the last without options first, with their defaults.

    Raises:
        ValueError: hyper-parameters without defaults; variants that lack hypers or flags.
    """
    *variants, first = rules
    arguments: dict[str, Any] = {}
    for rule in (first, *variants):
        if not isinstance(rule.hypers, Mapping):
            raise ValueError(f"{rule.__name__}.hypers has no defaults; write {{'lr': 1e-3}} in place of ('lr',)")
        arguments |= rule.hypers
        if {**rule.hypers, **first.hypers} != rule.hypers or rule.flags.keys() != first.flags.keys():  # type: ignore[dict-item]
            raise ValueError(f"{rule.__name__} has other hypers or flags than {first.__name__}; make two optimizers")
    return arguments | {flag: value for flag, value in first.flags.items() if not flag.startswith(("has_", "is_"))}


class RuleOptimizer(FusedOptimizer):
    """The base of the classes that `optimizer_of` makes.

    Args:
        params: parameters or parameter groups.
        hypers, options: hyper-parameters of the rule, in its order or by name, then settings by name.
    """

    if TYPE_CHECKING:  # each class has a constructor of its own, with the names of its rule

        def __init__(self, params: Any, *hypers: Any, **options: Any) -> None: ...


def optimizer_of(rule: type[Rule], *variants: type[Rule], name: str | None = None) -> type[RuleOptimizer]:
    """Makes an optimizer of a rule: with windows, clipping, formats, checkpoints, and kernels.

    On a GPU Triton compiles the rule. On a CPU the machine's C++ compiler does when the rule first steps; the result is
    kept in the folder ACCUMFUSED_CACHE, or in the user's cache. Without a compiler torch's kernels step ("torch":
    the rule's arithmetic, torch's own norm), and a log line says so. docs/guide/rules.md has an example.

    Args:
        rule: its `hypers` is a mapping of hyper-parameters to their defaults. Its docstring describes the class; the
            text of its Args describes hyper-parameters.
        variants: the same rule with other flags, if it has flags; a parameter group chooses by its keys. A variant may
            have further hyper-parameters: groups have them where they are on.
        name: of the class; None: the rule's without "Rule". A pickle finds the class by this name in the rule's module.

    Returns:
        A class: params, then the hyper-parameters and flags (those that are on or off by keyword), then the settings as
        keyword arguments. A flag named has_... or is_... is no argument: it follows from others.

    Raises:
        TypeError: it is no rule; a rule whose arithmetic is not its own.
        ValueError: hyper-parameters without defaults; variants that lack hypers; two rules with the same flags.
    """
    for each in (rule, *variants):
        if not (isinstance(each, type) and issubclass(each, Rule)):
            raise TypeError(f"optimizer_of() takes subclasses of Rule, got {each!r}")
        if each.is_foreign:
            raise TypeError(f"{each.__name__} has no name, so it has no arithmetic; give it one")
    rules = (*variants, rule)
    if len({tuple(each.flags.items()) for each in rules}) < len(rules):
        raise ValueError(f"two of {', '.join(each.__name__ for each in rules)} have the same flags")
    title = name or rule.__name__.removesuffix("Rule")
    constructor = _constructor(arguments_of(rules))
    body = {"__module__": rule.__module__, "__init__": constructor, "rules": rules}
    optimizer_class = type(title, (RuleOptimizer,), body)
    optimizer_class.__doc__ = _documentation(rule, title, inspect.signature(constructor))
    return takes_settings(optimizer_class)


def _constructor(arguments: Mapping[str, Any]) -> Callable[..., None]:
    """Makes a constructor that takes these arguments, with their defaults."""

    def init(*args: Any, **options: Any) -> None:
        call = signature.bind(*args, **options)
        call.apply_defaults()
        self, params, settings = (call.arguments[key] for key in ("self", "params", "settings"))
        construct(self, params, {key: call.arguments[key] for key in arguments}, settings)

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
    vars(init)["__signature__"] = signature
    return init


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


def _documentation(rule: type[Rule], title: str, signature: inspect.Signature) -> str:
    """Completes the rule's docstring by the texts that all optimizers have in common."""
    text, _, described = inspect.cleandoc(rule.__doc__ or "").partition("Args:\n")
    summary = text.strip() or f"{title}, with accumulation, unscaling and clipping in the same pass."
    if rule.eps_beside:
        summary += "\n\n" + _EPS.format(*(f"{kinds.least_eps(rule, form):g}" for form in _FORMATS))
    names = {*", ".join(re.findall(r"^    (\w[\w, ]*):", described, re.MULTILINE)).split(", ")}
    rest = [name for name in signature.parameters if name not in ("self", "params", "settings", "maximize", *names)]
    lines = [f"    params: {_PARAMS}", *described.rstrip().splitlines()]
    if rest:
        lines.append(f"    {', '.join(rest)}: hyper-parameters of the rule.")
    if "maximize" in signature.parameters and "maximize" not in names:
        lines.append(f"    maximize: {_MAXIMIZE}")
    return "\n".join([summary, "", "Args:", *lines, ""]) + PLACE + _RAISES
