"""The trace: an optimizer's arithmetic, written once in Python, as two lists of single operations in the written order.

A rule's function is called with symbols in place of numbers, and each operator that it applies is recorded. An
operation on which an element has an influence is one of fp32, for each element. All others go to the second list: they
are computed in fp64, once for each tensor, and rounded to fp32 where they meet an element. to_cpp.py prints the lists
as C++, to_triton.py as Triton, and on_tensors.py runs them on tensors. Each operation is one IEEE operation, so all
backends compute the same bits. This file imports Python alone: setup.py prints the functors where no torch is
installed.

A function may use + - * /, abs(), comparisons, & | ~ between those, and the functions below. It must not branch on a
number: `where` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

CONDITIONS = ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not")  # operations that are true or false
_TAKE_CONDITIONS = ("and", "or", "not")
_IN_FP64 = ("power", "real_power", "float32")


@dataclass(frozen=True)
class Operation:
    name: str  # "input", "constant", or what is done to the operands
    operands: tuple[int, ...] = ()  # the places of earlier operations in the list
    label: str = ""  # of an input, or a constant's digits: 0 and -0 are equal numbers, but not the same
    constant: float = 0.0


@dataclass(eq=False)
class Trace:
    """Operations in order: first the inputs, then what is computed from them. No two are the same.

    Args:
        scalars: the trace of the numbers that all elements of a tensor share, whose results are inputs here; None: this
            is that trace.
    """

    scalars: Trace | None = None
    operations: list[Operation] = field(default_factory=list)
    results: dict[str, int] = field(default_factory=dict)  # by name, their places
    names: dict[int, str] = field(default_factory=dict)  # of operations that `named` names
    _places: dict[Operation, int] = field(default_factory=dict)

    def add(self, name: str, *operands: Any, label: str = "", constant: float = 0.0) -> Symbol:
        if name in _IN_FP64 and self.scalars is not None:
            raise TypeError(f"{name.removeprefix('real_')}() takes numbers that all elements share, not an element's")
        places = tuple(self.symbol(operand).place for operand in operands)
        for index, place in enumerate(places):
            takes_condition = name in _TAKE_CONDITIONS or (name == "where" and index == 0)
            if (self.operations[place].name in CONDITIONS) != takes_condition:
                raise TypeError(
                    f"{name} takes {'conditions' if takes_condition else 'numbers'} here; where(condition, a, b) makes "
                    "a number of a condition, a comparison a condition of numbers"
                )
        operation = Operation(name, places, label, constant)
        if operation not in self._places:
            self._places[operation] = len(self.operations)
            self.operations.append(operation)
        return Symbol(self, self._places[operation])

    def symbol(self, value: Any) -> Symbol:
        """Returns the value as a symbol of this trace; a plain number becomes a constant."""
        if isinstance(value, Symbol):
            if value.trace is self:
                return value
            if value.trace is self.scalars:
                return self._rounded(value)
            raise TypeError("a number of another function is used, or one that depends on an element where none may")
        if isinstance(value, int | float):
            return self.add("constant", label=float(value).hex(), constant=float(value))
        raise TypeError(f"{type(value).__name__} is no number of a rule; use + - * / and accumfused.rules")

    def _rounded(self, value: Symbol) -> Symbol:
        """Makes an input of a number that all elements share. A condition travels as the number 1 or 0."""
        scalars = value.trace
        operation = scalars.operations[value.place]
        if operation.name in CONDITIONS:
            zero = Operation("constant", label=(0.0).hex())
            # A test of a number that is at hand.
            is_test = operation.name == "ne" and scalars.operations[operation.operands[1]] == zero
            number = Symbol(scalars, operation.operands[0]) if is_test else scalars.add("where", value, 1.0, 0.0)
            return self.add("ne", number, 0.0)
        label = operation.label if operation.name == "input" else scalars.names.get(value.place)
        name = f"s{value.place}" if label is None else f"{label}_"
        if scalars.results.setdefault(name, value.place) != value.place:
            raise TypeError(f"two numbers are named {label}")
        return self.add("input", label=f"s.{name}")

    def inputs(self, *labels: str) -> list[Symbol]:
        return [self.add("input", label=label) for label in labels]

    def needed(self) -> list[int]:
        """Lists the places of the operations that the results need, in order."""
        needed = set(self.results.values())
        for place in range(len(self.operations) - 1, -1, -1):
            if place in needed:
                needed.update(self.operations[place].operands)
        return sorted(needed)


def _recorded(name: str, *operands: Any) -> Symbol:
    """Records the operation where its operands are: among the elements' if one of them is an element's."""
    traces = [operand.trace for operand in operands if isinstance(operand, Symbol)]
    return next((trace for trace in traces if trace.scalars is not None), traces[0]).add(name, *operands)


def _operator(name: str) -> Callable[[Symbol, Any], Symbol]:
    return lambda a, b: _recorded(name, a, b)


def _reflected(name: str) -> Callable[[Symbol, Any], Symbol]:
    return lambda b, a: _recorded(name, a, b)


class Symbol:
    """A number, or a condition, that is known when the arithmetic runs."""

    __slots__ = ("place", "trace")

    def __init__(self, trace: Trace, place: int) -> None:
        self.trace = trace
        self.place = place

    __add__, __radd__ = _operator("add"), _reflected("add")
    __sub__, __rsub__ = _operator("sub"), _reflected("sub")
    __mul__, __rmul__ = _operator("mul"), _reflected("mul")
    __truediv__, __rtruediv__ = _operator("div"), _reflected("div")
    __lt__, __le__, __gt__, __ge__ = _operator("lt"), _operator("le"), _operator("gt"), _operator("ge")
    __eq__, __ne__ = _operator("eq"), _operator("ne")  # type: ignore[assignment]  # an operation, no comparison
    __and__, __or__ = _operator("and"), _operator("or")
    __hash__ = None  # type: ignore[assignment]

    def __invert__(self) -> Symbol:
        return self.trace.add("not", self)

    def __neg__(self) -> Symbol:
        return self * -1.0

    def __abs__(self) -> Symbol:
        return self.trace.add("abs", self)

    def __pow__(self, exponent: Any) -> Symbol:
        if isinstance(exponent, int | float) and exponent == 2:
            return self * self
        raise TypeError("** takes the exponent 2 alone; power(base, exponent) takes any, of shared numbers")

    def __bool__(self) -> NoReturn:
        raise TypeError("a rule cannot branch on a number that is known only when it runs; use where(condition, a, b)")

    def __float__(self) -> NoReturn:
        raise TypeError(f"the number is known only when the rule runs; accumfused.rules has {FUNCTIONS}")

    __int__ = __index__ = __float__


def _apply(name: str, plain: Callable[..., Any], *operands: Any) -> Any:
    """Records the operation; plain numbers alone are computed at once."""
    return _recorded(name, *operands) if any(isinstance(operand, Symbol) for operand in operands) else plain(*operands)


def sqrt(value: Any) -> Any:
    """Takes the square root, correctly rounded."""
    return _apply("sqrt", math.sqrt, value)


def where(condition: Any, a: Any, b: Any) -> Any:
    """Chooses `a` where the condition holds, `b` elsewhere; both are computed."""
    if not isinstance(condition, Symbol):
        return a if condition else b
    return _recorded("where", condition, a, b)


def maximum(a: Any, b: Any) -> Any:
    """Returns the larger number; a NaN propagates."""
    return where(a != a, a, where(a > b, a, b))


def minimum(a: Any, b: Any) -> Any:
    """Returns the smaller number; a NaN propagates."""
    return where(a != a, a, where(a < b, a, b))


def sign(value: Any) -> Any:
    """Returns 1, -1, or the value itself if it is a zero or NaN."""
    return where(value > 0, 1.0, where(value < 0, -1.0, value))


def agree(a: Any, b: Any) -> Any:
    """Tells whether both are > 0 or both < 0: a product of theirs may be too small for a number."""
    return ((a > 0) & (b > 0)) | ((a < 0) & (b < 0))


def power(base: Any, exponent: Any) -> Any:
    """Computes base ** exponent, of numbers that all elements share: base >= 0, or the exponent is `step`.

    Squares are multiplied for the exponent's whole part, and roots for the digits after the point, because no two
    backends have a pow() with the same bits. The relative error is at most (|exponent| + 160 + |log(base)|) 2^-53, for
    exponents below 2^24.
    """
    is_step = isinstance(exponent, Symbol) and exponent.trace.operations[exponent.place].label == "step"
    return _apply("power" if is_step else "real_power", pow, base, exponent)


def float32(value: Any) -> Any:
    """Rounds a number that all elements share to fp32; it would be fp64."""
    return _apply("float32", float, value)


FUNCTIONS = ", ".join(f"{each.__name__}()" for each in (agree, float32, maximum, minimum, power, sign, sqrt, where))


def named(**numbers: Any) -> None:
    """Names numbers that all elements share, for a kernel written by hand that reads them in the printed C++."""
    for name, value in numbers.items():
        value.trace.names[value.place] = name


class Names:
    """The numbers and flags that a rule's function reads by name."""

    def __init__(self, of: str, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)
        self.__of = of

    def __getattr__(self, name: str) -> NoReturn:
        names = ", ".join(key for key in self.__dict__ if not key.startswith("_"))
        raise AttributeError(f"{self.__of} has no {name!r}; it has {names or 'nothing'}")
