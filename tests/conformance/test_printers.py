"""One trace, three languages: random programs have the same bits in PyTorch, C++ and Triton."""

from __future__ import annotations

import ctypes
import inspect
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same_bits
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from places import interpreted
from torch import Tensor

from accumfused.rules import Rule, float32, maximum, minimum, on_tensors, power, sign, sqrt, to_cpp, where
from accumfused.rules.trace import Symbol

CSRC = Path(__file__).parents[2] / "csrc"
# With numbers a and b and a condition c.
OPERATIONS: list[Callable[[Any, Any, Any], Any]] = [
    lambda a, b, c: a + b, lambda a, b, c: a - b, lambda a, b, c: b - a, lambda a, b, c: a * b, lambda a, b, c: a / b,
    lambda a, b, c: b / a, lambda a, b, c: abs(a), lambda a, b, c: -a, lambda a, b, c: a**2, lambda a, b, c: sqrt(a),
    lambda a, b, c: sign(a), lambda a, b, c: maximum(a, b), lambda a, b, c: minimum(a, b),
    lambda a, b, c: where(c, b, a), lambda a, b, c: where(c, 0.0, -0.0), lambda a, b, c: a < b,
    lambda a, b, c: a <= b, lambda a, b, c: a > b, lambda a, b, c: a >= b, lambda a, b, c: a == b,
    lambda a, b, c: a != b, lambda a, b, c: c & (a < b), lambda a, b, c: c | (a > b), lambda a, b, c: ~c,
]  # fmt: skip
CONSTANTS = [0.0, -0.0, 1.0, -1.0, 0.1, 2.0, 1e-45, 1e-310, 3.4e38, 1e39, float("inf"), float("nan")]
SPECIAL = [0.0, 1.0, 0.1, 3.0, 1e-45, 1.1754942e-38, 1.17549435e-38, 1e-20, 1e20, 3.4028235e38, float("inf")]
ELEMENTS, PROGRAMS = 512, 26
NAMES = {
    "add", "sub", "mul", "div", "abs", "where", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "sqrt", "power",
    "real_power", "float32",
}  # fmt: skip


def compute(draws: random.Random, numbers: list[Any], count: int) -> list[Any]:
    """Random operations on numbers and on their results: all that is known in the end."""
    conditions = [numbers[0] == numbers[1]]
    for _ in range(count):
        operands = draws.choice(numbers[-8:]), draws.choice([*numbers, *CONSTANTS]), draws.choice(conditions)
        made = draws.choice(OPERATIONS)(*operands)
        (conditions if is_condition(made) else numbers).append(made)
    return numbers


def is_condition(made: Symbol) -> bool:
    return made.trace.operations[made.place].name in to_cpp.CONDITIONS


def rule_from(code: int, place: int) -> type[Rule]:
    """A random program; one operation, told by the place, comes in any case, on numbers as they were given."""

    class Program(Rule):
        name = f"program{place}"
        states = ("exp_avg", "exp_avg_sq")
        hypers = ("lr", "eps")

        @staticmethod
        def update(h: Any, step: Any, p: Any, g: Any, *states: Any) -> tuple[Any, ...]:
            draws, base = random.Random(code), abs(h.lr)  # the same program whenever it is traced
            powers = [power(base, step), power(base, h.eps), power(base, -h.eps), float32(h.lr), float32(h.eps) - h.eps]
            *_, z, y = compute(draws, [h.lr, h.eps, step, *powers], 8)
            x, given = powers[place % len(powers)], [p, g, *states]
            a, b = draws.choice(given), draws.choice([*given, x, *CONSTANTS])
            made = OPERATIONS[place % len(OPERATIONS)](a, b, draws.choice([g < p, h.eps < step, h.lr != 0]))
            numbers = compute(draws, [x, y, z, *given], 12)
            if place % 2:  # results that are inputs, which others overwrite
                return where(made, a, x) if is_condition(made) else made, p, states[0]
            return where(made, a, x) if is_condition(made) else made, numbers[-1] + x, numbers[-2] * z

    return Program


def in_torch(rule: type[Rule], hypers: tuple[float, float], step: int, tensors: list[Tensor]) -> list[Tensor]:
    number = torch.float64
    known = dict(
        zip((*rule.hyper_names, "step"), (torch.tensor(x, dtype=number) for x in (*hypers, step)), strict=True)
    )
    made = on_tensors.evaluate(rule.traced.scalars, known, number, torch.device("cpu"))
    return on_tensors.update(rule, {name: value.float() for name, value in made.items()}, *tensors[:2], tensors[2:])


@pytest.fixture
def in_cpp(tmp_path: Path) -> Callable[[list[type[Rule]]], Any]:
    """The compiled functors of these rules: (place, hypers, step, tensors) -> what `update` leaves in the tensors."""
    compiler = shutil.which("g++")
    if compiler is None or not CSRC.exists():
        pytest.skip("needs g++ and the source")
    flags = ["-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
    flags += ["-shared", "-fPIC", "-DAF_TARGET=cpu", f"-I{tmp_path}", f"-I{CSRC}"]
    source, numbers = tmp_path / "programs.cpp", iter(range(100))
    source.write_text("""
#include "rules.h"
using namespace accumfused::cpu;
template <class Rule>
void run(const double* hypers, int64_t step, float* p, const float* g, float* a, float* b, int n) {
  const Rule rule(hypers, step, 1.0f);
  for (int i = 0; i < n; ++i) rule(p[i], g[i], a[i], b[i]);
}
#define AF_RUN(Rule) run<Rule>,
using Program = void (*)(const double*, int64_t, float*, const float*, float*, float*, int);
extern "C" const Program programs[] = {AF_RULES(AF_RUN)};
""")

    def compiled(rules: list[type[Rule]]) -> Any:
        library = tmp_path / f"programs{next(numbers)}.so"
        (tmp_path / "functors.h").write_text(to_cpp.header(rules))
        subprocess.run([str(compiler), *flags, str(source), "-o", str(library)], check=True)
        kind = ctypes.CFUNCTYPE(
            None, ctypes.POINTER(ctypes.c_double), ctypes.c_int64, *[ctypes.c_void_p] * 4, ctypes.c_int
        )
        programs = (kind * len(rules)).in_dll(ctypes.CDLL(str(library)), "programs")

        def run(place: int, hypers: tuple[float, float], step: int, tensors: list[Tensor]) -> list[Tensor]:
            p, g, a, b = (tensor.clone() for tensor in tensors)
            numbers = (ctypes.c_double * len(hypers))(*hypers)
            programs[place](numbers, step, p.data_ptr(), g.data_ptr(), a.data_ptr(), b.data_ptr(), p.numel())
            return [p, a, b]

        return run

    return compiled


@pytest.fixture
def in_triton() -> Iterator[Callable[[list[type[Rule]]], Any]]:
    """The same of Triton's, by its interpreter."""
    for _ in interpreted():
        import triton
        import triton.language as tl

        from accumfused.backends.triton import numeric
        from accumfused.rules import to_triton

        @triton.jit
        def kernel(hypers, step, one, p, g, a, b, n: tl.constexpr, scalars: tl.constexpr, update: tl.constexpr):  # type: ignore[no-untyped-def]
            prepared = scalars((tl.load(hypers), tl.load(hypers + 1)), tl.load(step), tl.load(one))
            i = tl.arange(0, n)
            first, second = tl.load(a + i), tl.load(b + i)
            param, first, second, _, _ = update(prepared, tl.load(p + i), tl.load(g + i), first, second, first, second)
            tl.store(p + i, param)
            tl.store(a + i, first)
            tl.store(b + i, second)

        kernel.fn.__globals__["tl"] = tl

        def run(programs: Any, place: int, hypers: Any, step: int, tensors: list[Tensor]) -> list[Tensor]:
            p, g, a, b = (tensor.clone() for tensor in tensors)
            numbers = torch.tensor(hypers, dtype=torch.float64), torch.tensor(step, dtype=torch.int32), torch.ones(())
            kernel[(1,)](*numbers, p, g, a, b, ELEMENTS, *to_triton.compiled(programs[place], numeric))
            return [p, a, b]

        yield lambda programs: partial(run, programs)


def values(seed: int) -> list[Tensor]:
    """Parameter, gradient and states: numbers of every size, and special ones beside each other."""
    draws = torch.Generator().manual_seed(seed)
    special = torch.tensor([*SPECIAL, *(-x for x in SPECIAL), float("nan")])
    found = []
    for _ in range(4):
        made = torch.randn(ELEMENTS, generator=draws) * 10.0 ** torch.randint(-30, 30, (ELEMENTS,), generator=draws)
        chosen = special[torch.randint(len(special), (ELEMENTS,), generator=draws)]
        found.append(torch.where(torch.rand(ELEMENTS, generator=draws) < 0.5, chosen, made))
    return found


SOME = st.sampled_from([0.1, 0.5, 0.9, 0.999, 1e-8, 0.0, -0.0, 1.0, 2.0, 1e-310, 1e300, float("inf"), float("nan")])
every_program = given(
    codes=st.lists(st.integers(0, 2**32), min_size=PROGRAMS, max_size=PROGRAMS, unique=True),
    hypers=st.lists(st.tuples(st.floats(0.01, 3.0) | SOME, st.floats(-3.0, 3.0) | SOME), min_size=6, max_size=6),
    step=st.sampled_from([1, 2, 7, 1000, 2**24]), seed=st.integers(0, 2**16),
)  # fmt: skip
# Each example is a compilation, or takes the interpreter seconds: nothing is made smaller.
few = settings(max_examples=4, phases=[Phase.explicit, Phase.reuse, Phase.generate], derandomize=True, database=None)


def rule_of(constant: float, place: int) -> type[Rule]:
    """One that chooses between a constant and other numbers: it adds nothing, which would lose a zero's sign."""

    class Literal(Rule):
        name = f"literal{place}"
        states = ("exp_avg", "exp_avg_sq")
        hypers = ("lr", "eps")

        @staticmethod
        def update(h: Any, step: Any, p: Any, g: Any, *states: Any) -> tuple[Any, ...]:
            in_fp64 = where(h.lr > step, h.eps, constant), float32(where(h.lr > step, h.eps, constant))
            return where(g < p, constant, g), where(g < p, *in_fp64), minimum(maximum(states[1], constant), constant)

    return Literal


LITERALS = [sign * abs(x) for x in [*CONSTANTS, *SPECIAL, 5e-324, 1e308] for sign in (1.0, -1.0)]


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_literals_keep_their_bits(language: str, request: pytest.FixtureRequest) -> None:
    """Signed zeros, numbers that fp32 cannot have, inf and NaN."""
    compiled, tensors, hypers = request.getfixturevalue(f"in_{language}"), values(0), (0.5, 3.0)
    rules = [rule_of(literal, place) for place, literal in enumerate(LITERALS)]
    run = compiled(rules)
    for place, rule in enumerate(rules):
        assert_agree(rule, run(place, hypers, 1, tensors), in_torch(rule, hypers, 1, tensors))


def test_no_zero_with_a_sign_is_a_literal_of_triton() -> None:
    """Before Triton 3.9 it has none."""
    pytest.importorskip("triton")
    from accumfused.backends.triton import numeric
    from accumfused.rules import to_triton

    for function in to_triton.compiled(rule_of(-0.0, 0), numeric):
        source = inspect.getsource(function.fn)
        assert "0.0" in source
        assert "-0.0" not in source


def assert_agree(rule: type[Rule], ours: list[Tensor], theirs: list[Tensor]) -> None:
    for name, mine, other in zip(("p", *rule.states), ours, theirs, strict=True):
        assert_same_bits(mine, other, f"{name} of\n{to_cpp.functor(rule, is_common=False)}")


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_other_languages_have_the_bits_of_torch(language: str, request: pytest.FixtureRequest) -> None:
    compiled, met = request.getfixturevalue(f"in_{language}"), set[str]()

    @few
    @every_program
    def agree(codes: list[int], hypers: list[tuple[float, float]], step: int, seed: int) -> None:
        rules, tensors = [rule_from(code, place) for place, code in enumerate(codes)], values(seed)
        run = compiled(rules)
        for place, rule in enumerate(rules):
            met.update(op.name for trace in (rule.traced.scalars, rule.traced.update) for op in trace.operations)
            for own in hypers if language == "cpp" else [hypers[place % len(hypers)]]:
                assert_agree(rule, run(place, own, step, tensors), in_torch(rule, own, step, tensors))

    agree()
    assert met >= NAMES
