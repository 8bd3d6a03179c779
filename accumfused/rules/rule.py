"""Rule: an optimizer's elementwise arithmetic, written once.

    class SignRule(Rule):
        name = "sign"
        hypers = ("lr", "weight_decay")

        @staticmethod
        def update(h, step, p, g):
            return (p * (1.0 - h.lr * h.weight_decay) - sign(g) * h.lr,)

update() runs once, when the class is made, and leaves a trace: see trace.py.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from accumfused.rules.trace import CONDITIONS, FUNCTIONS, Names, Trace

MAX_STATES = 4  # csrc/rows.h's kMaxStates
MAX_HYPERS = 12  # csrc/rows.h's kMaxHypers
MAX_SCALARS = 23  # that csrc/rows.h's kMaxFunctorBytes holds, with the coefficient
MAXIMUM_RATCHETS = "whose maximum ratchets up on the noise of 8-bit codes"
_TAKEN = ("p", "g", "step")  # names of the function's other arguments
_FIXED = ("name", "states", "second_moments", "hypers", "derived", "flags", "update")


class _RuleType(type):
    """A rule is traced when its class is made, so nothing of its arithmetic may change later."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if name in _FIXED:
            raise AttributeError(f"{cls.__name__}.{name} is compiled into kernels; make another rule with another name")
        super().__setattr__(name, value)

    @property
    def is_foreign(cls) -> bool:
        """Whether it has no arithmetic: the optimizer's own step writes parameters and states, in its own formats."""
        return not cls.name  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Traced:
    scalars: Trace  # fp64, once for each tensor
    update: Trace  # fp32, for each element; reads the results of `scalars`


class Rule(metaclass=_RuleType):
    """The base class of all rules.

    Raises, when a rule's class is made:
        TypeError: `update` branches on a number, uses unknown operations or names, or returns something else than it
            has to.
        ValueError: a name stands twice, is no identifier, or there are too many.
    """

    name: ClassVar[str] = ""  # of the functor and the kernels, unique; "" for a base of rules
    states: ClassVar[tuple[str, ...]] = ()  # per element, under the names of the optimizer's state
    second_moments: ClassVar[tuple[str, ...]] = ()  # the last of the states: never negative
    # Keys of a parameter group, see `hyper`; optimizer_of() takes a mapping to their defaults. Of a tuple's default,
    # such as "betas": (0.9, 0.99), update() reads the elements: h.beta1 and h.beta2.
    hypers: ClassVar[tuple[str, ...] | Mapping[str, Any]] = ("lr",)
    derived: ClassVar[tuple[str, ...]] = ()  # further numbers of `h`, which `hyper` makes of a group
    counts: ClassVar[tuple[str, ...]] = ()  # numbers that a group counts: its checkpoint needs them
    # The least value of a hyper-parameter, and one above the largest, by the names that update() reads.
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "lr": (0.0, math.inf), "beta": (0.0, 1.0), "eps": (0.0, math.inf), "weight_decay": (0.0, math.inf),
    }  # fmt: skip
    # What eps is added to, the "root" of a second moment or its "square" (the moment itself): an eps at which moments
    # that are stored as 0 would count is refused. "": any eps goes.
    eps_beside: ClassVar[str] = ""
    flags: ClassVar[Mapping[str, bool]] = {}  # what update() may branch on: each value is another rule
    counts_steps: ClassVar[bool] = True  # keeps state["step"], an fp32 scalar per tensor
    torch_states: ClassVar[tuple[str, ...]] = ()  # all that torch's optimizer of this name keeps and expects
    restarts: ClassVar[
        tuple[str, ...]
    ] = ()  # states that torch's optimizer makes anew, in silence, where they are missing
    # States that begin at a hyper-parameter in torch's checkpoints, not at 0. Step 1 does not read them.
    starts: ClassVar[Mapping[str, str]] = {}
    needs_16_bits: ClassVar[str] = ""  # why 8 bits are too few for its states; "": they are enough
    is_elementwise: ClassVar[bool] = True  # else the step is more than update(): it multiplies matrices, say
    # All loops are compiled for it, for GPUs by nvcc, too. Otherwise Triton steps on a GPU, and a CPU converts 16-bit
    # gradients to fp32 first, a tile at a time.
    is_common: ClassVar[bool] = False

    hyper_names: ClassVar[tuple[str, ...]] = ()  # what kernels are given, in order
    traced: ClassVar[Traced]

    @classmethod
    def hyper(cls, group: Mapping[str, Any], name: str) -> Any:
        """Reads a hyper-parameter: group["lr"] for "lr", group["betas"][1] for "beta2"; a switch may be missing."""
        if name in group:
            return group[name]
        if name[-1].isdigit():
            return group[f"{name[:-1]}s"][int(name[-1]) - 1]
        is_switch = isinstance(cls.hypers, Mapping) and cls.hypers.get(name) is False
        return False if is_switch else group[name]

    @classmethod
    def start(cls, group: Mapping[str, Any], name: str) -> Any:
        """Returns the number or tensor at which a state begins in torch's checkpoints."""
        return cls.hyper(group, cls.starts[name]) if name in cls.starts else 0.0

    @classmethod
    def fits(cls, group: Mapping[str, Any]) -> bool:
        """Tells whether the flags are those of the group; "has_momentum" is set where group["momentum"] is not 0."""
        return all(bool(group.get(flag.removeprefix("has_"))) == value for flag, value in cls.flags.items())

    @staticmethod
    def update(*arguments: Any, **none: Any) -> tuple[Any, ...]:  # typed so that a rule's may name its states
        """Computes the new parameter and states of one element: `update(h, step, p, g, *states)`.

        A number that depends on no element is computed in fp64, once for each tensor, and rounded to fp32 where it
        meets an element. What depends on an element is fp32.

        Args:
            h: the hyper-parameters and flags, by name.
            step: this step's number, 1 for the first.
            p, states: the parameter and its states.
            g: the gradient, unscaled, normalised, clipped and, with `maximize`, negated.
        """
        raise NotImplementedError

    @classmethod
    def _names_of(cls, hyper: str) -> list[str]:
        """Lists the names by which update() reads a hyper-parameter."""
        default = cls.hypers[hyper] if isinstance(cls.hypers, Mapping) else None
        if not isinstance(default, tuple):
            return [hyper]
        return [f"{hyper.removesuffix('s')}{index}" for index, _ in enumerate(default, 1)]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.is_foreign:
            return
        cls.hyper_names = (*itertools.chain(*map(cls._names_of, cls.hypers)), *cls.derived)
        _check_names(cls)
        cls.traced = _traced(cls)
        if repr(_traced(cls)) != repr(cls.traced):
            raise TypeError(
                f"{cls.__name__}.update gives other operations when it runs again (random numbers, a counter?), and "
                "kernels are compiled from one run; take such numbers from h, or from a state"
            )


def _check_names(rule: type[Rule]) -> None:
    names = [*rule.states, *rule.hyper_names, *rule.flags]
    for name in (rule.name, *names):
        if not name.isidentifier():
            raise ValueError(f"{rule.__name__}: {name!r} is no identifier")
    if taken := [name for name in names if name in _TAKEN]:
        raise ValueError(f"{rule.__name__}: {taken[0]!r} means something else already; choose another name")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{rule.__name__}: {', '.join(twice)} stands twice among states, hypers and flags")
    for name, members, most in (("states", rule.states, MAX_STATES), ("hypers", rule.hyper_names, MAX_HYPERS)):
        if len(members) > most:
            raise ValueError(f"{rule.__name__} has {len(members)} {name}; at most {most} are possible")
    first = len(rule.states) - len(rule.second_moments)
    if rule.states[first:] != rule.second_moments:
        raise ValueError(f"{rule.__name__}: second_moments must be the last of states {rule.states}")


def _check_arguments(rule: type[Rule], arguments: Sequence[Any]) -> None:
    signature = inspect.signature(rule.update)
    try:
        signature.bind(*arguments)
    except TypeError:
        expected = ", ".join(("h", "step", "p", "g", *rule.states))
        raise TypeError(f"it takes {signature}, and is to take ({expected})") from None


def _traced(rule: type[Rule]) -> Traced:
    scalars = Trace()
    trace = Trace(scalars)
    *numbers, step = scalars.inputs(*rule.hyper_names, "step")
    by_name = dict(zip(rule.hyper_names, numbers, strict=True))
    names = Names(f"h of {rule.__name__}.update", {**by_name, **rule.flags})
    expected = ("p", *rule.states)
    try:
        arguments = names, step, *trace.inputs("p", "g", *rule.states)
        _check_arguments(rule, arguments)
        results = rule.update(*arguments)
        if not isinstance(results, tuple) or len(results) != len(expected):
            returned = f"{len(results)} values" if isinstance(results, tuple) else type(results).__name__
            raise TypeError(f"it returns {returned}; it must return ({', '.join(expected)},)")
        places = [trace.symbol(value).place for value in results]
        if any(trace.operations[place].name in CONDITIONS for place in places):
            raise TypeError(
                "a condition stands for a number in the result; where(condition, a, b) makes a number of it"
            )
    except (TypeError, AttributeError, ValueError) as error:
        function = f"; accumfused.rules has {FUNCTIONS}" if "not Symbol" in str(error) else ""  # one of torch's
        raise TypeError(f"{rule.__name__}.update cannot be traced: {error}{function}") from error
    trace.results = dict(zip(expected, places, strict=True))
    # A number that only a dropped result of an element's operation reads is not computed.
    read = {trace.operations[place].label for place in trace.needed()}
    read_scalars = [(name, place) for name, place in scalars.results.items() if f"s.{name}" in read]
    # Computed ones first, then those as they are given: nvcc makes fewer instructions of this order than of others.
    scalars.results = dict(sorted(read_scalars, key=lambda item: item[1] if item[1] <= len(by_name) else -1))
    if len(scalars.results) > MAX_SCALARS:
        count = len(scalars.results)
        raise ValueError(
            f"the elements of {rule.__name__}.update read {count} numbers that they share; at most {MAX_SCALARS} can be"
        )
    return Traced(scalars, trace)


def known_states() -> set[str]:
    """Collects the names of the states of all rules, including rules that a user has defined."""
    pending: list[type[Rule]] = [Rule]
    names = set[str]()
    while pending:
        rule = pending.pop()
        names.update(rule.states)
        pending += rule.__subclasses__()
    return names
