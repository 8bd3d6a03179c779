"""Rules that a user writes: which ones are refused when the class is made, and that a name is not the rule."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from compare import assert_all_same_bits, assert_same_bits, everything
from harness import need_native
from table import random_grads, random_params, set_grads

import accumfused as af
from accumfused.optimizers.adam import AdamRule
from accumfused.rules import maximum, minimum, on_tensors, power, sign, sqrt, where
from accumfused.rules.rule import MAX_HYPERS, MAX_STATES, Rule


def make(update: Callable[..., Any] = lambda h, step, p, g, *states: (p - g, *states), **members: Any) -> type[Rule]:
    return type("Wrong", (Rule,), {"name": "wrong", "update": staticmethod(update), **members})


def of_elements(update: Callable[..., Any]) -> type[Rule]:
    """A rule of which the function takes the parameter and the gradient alone."""
    return make(lambda h, step, p, g: update(p, g))


def branches(h: Any, step: Any, p: Any, g: Any) -> Any:
    return (p - g if g > 0 else p,)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a branch": ({"update": branches}, TypeError, "Wrong.update cannot be traced: a rule cannot branch on a number"),
    "a branch of what elements share": (
        {"update": lambda h, step, p, g: (p if h.lr > 0 else g,)}, TypeError, "Wrong.update .* cannot branch",
    ),
    "an unknown hyper": ({"update": lambda h, step, p, g: (p * h.beta1,)}, TypeError, "has no 'beta1'; it has lr"),
    "too few values": (
        {"update": lambda h, step, p, g, m: (p,), "states": ("exp_avg",)}, TypeError,
        r"returns 1 values; it must return \(p, exp_avg,\)",
    ),
    "no tuple": ({"update": lambda h, step, p, g: p}, TypeError, r"returns Symbol; it must return \(p,\)"),
    "no number": ({"update": lambda h, step, p, g: (None,)}, TypeError, "NoneType is no number of a rule"),
    "a condition as a result": ({"update": lambda h, step, p, g: (p > g,)}, TypeError, "a condition stands for"),
    "a condition as a number": ({"update": lambda h, step, p, g: (p * (g > 0),)}, TypeError, "mul takes numbers here"),
    "a shared condition as a number": (
        {"update": lambda h, step, p, g: (p * (h.lr > 0),)}, TypeError, "mul takes numbers here",
    ),
    "a number as a condition": (
        {"update": lambda h, step, p, g: (where(g, p, g),)}, TypeError, "where takes conditions",
    ),
    "& of numbers": ({"update": lambda h, step, p, g: (where(g & p, p, g),)}, TypeError, "and takes conditions here"),
    "a function of math": (
        {"update": lambda h, step, p, g: (math.exp(p),)}, TypeError, r"accumfused\.rules has agree\(\), .*where\(\)",
    ),
    "a function of torch": (
        {"update": lambda h, step, p, g: (torch.exp(p),)}, TypeError, r"accumfused\.rules has agree\(\), .* where\(\)",
    ),
    "an argument too few": (
        {"update": lambda h, step, p, g: (p - g, g), "states": ("m",)}, TypeError,
        r"it takes \(h, step, p, g\), and is to take \(h, step, p, g, m\)",
    ),
    "an argument too many": (
        {"update": lambda h, step, p, g, m: (p - g,)}, TypeError,
        r"it takes \(h, step, p, g, m\), and is to take \(h, step, p, g\)",
    ),
    "another exponent": ({"update": lambda h, step, p, g: (p**3,)}, TypeError, "the exponent 2 alone"),
    "an exponent that is a number of the rule": (
        {"update": lambda h, step, p, g: (p * h.lr**step,)}, TypeError, "the exponent 2 alone",
    ),
    "a power of an element": (
        {"update": lambda h, step, p, g: (power(p, 3.0),)}, TypeError, r"power\(\) takes numbers that all",
    ),
    "a number of another rule": (
        {"update": lambda h, step, p, g: (p + leaked[0],)}, TypeError, "a number of another function",
    ),
    "random numbers": (
        {"update": lambda h, step, p, g: (p - g * (h.lr * random.random()),)}, TypeError,
        "gives other operations when it runs again",
    ),
    "a name that stands twice": ({"states": ("lr",)}, ValueError, "lr stands twice"),
    "no identifier": ({"hypers": ("weight decay",)}, ValueError, "'weight decay' is no identifier"),
    "a name of a rule that is none": ({"name": "a-rule"}, ValueError, "'a-rule' is no identifier"),
    "a name that is taken": ({"states": ("g",)}, ValueError, "'g' means something else already"),
    "too many numbers": (
        {"update": lambda h, step, p, g: (sum((h.lr + n for n in range(24)), p),)}, ValueError,
        "update read 24 numbers that they share; at most 23 can",
    ),
    "too many states": ({"states": tuple("abcdefgh"[: MAX_STATES + 1])}, ValueError, "at most 4"),
    "too many hypers": ({"hypers": tuple(f"a{n}" for n in range(MAX_HYPERS + 1))}, ValueError, "at most"),
    "second moments in front": (
        {"states": ("exp_avg_sq", "exp_avg"), "second_moments": ("exp_avg_sq",)}, ValueError, "must be the last of",
    ),
}  # fmt: skip
leaked: list[Any] = []
make(lambda h, step, p, g: leaked.append(h.lr) or (p,))


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_rule_is_refused_when_its_class_is_made(name: str) -> None:
    members, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        make(**members)


def test_a_rule_does_not_change_after_its_class_was_made() -> None:
    rule = make()
    for name in ("name", "states", "hypers", "flags", "update"):
        with pytest.raises(AttributeError, match="compiled into kernels; make another rule with another name"):
            setattr(rule, name, getattr(AdamRule, name))


def test_each_function_is_that_of_torch() -> None:
    special = torch.tensor([0.0, -0.0, 1.0, -2.5, 1e-45, 3e38, torch.inf, -torch.inf, torch.nan])
    p, g = (values.flatten() for values in torch.meshgrid(special, special, indexing="ij"))
    expected: dict[str, tuple[Any, torch.Tensor]] = {
        "maximum": (lambda p, g: (maximum(p, g),), torch.where(p == g, g, torch.maximum(p, g))),
        "minimum": (lambda p, g: (minimum(p, g),), torch.where(p == g, g, torch.minimum(p, g))),
        "sign": (lambda p, g: (sign(g),), torch.where((g == 0) | g.isnan(), g, g.sign())),
        "-": (lambda p, g: (-g,), -g),
        "abs": (lambda p, g: (abs(g),), g.abs()),
        "** 2": (lambda p, g: (g**2,), g * g),
        "zeros": (lambda p, g: (where(g > 0, 0.0, -0.0),), torch.where(g > 0, 0.0, -0.0)),
        "conditions": (lambda p, g: (where((p < g) & ~(g >= 1.0) | (p != p), p, g),),
                       torch.where((p < g) & ~(g >= 1.0) | p.isnan(), p, g)),
        "from the left": (lambda p, g: ((1.0 - p) * (2.0 / g),), (1.0 - p) * (2.0 / g)),
    }  # fmt: skip
    for name, (update, values) in expected.items():
        (made,) = on_tensors.update(of_elements(update), {}, p, g, [])
        assert_same_bits(made, values, name)


def test_what_no_element_enters_is_fp64_and_rounded_where_it_meets_one() -> None:
    h, one, ones = {"lr": 5.0 + 2.0**-30}, torch.ones(1, dtype=torch.int64), torch.ones(3)
    cases: list[tuple[Callable[..., Any], float]] = [
        (lambda h, step, p, g: (g * (h.lr - 5.0),), 2.0**-30),
        (lambda h, step, p, g: (g * h.lr - 5.0,), 0.0),
        (lambda h, step, p, g: (where(h.lr > 5.0, g, p - p),), 1.0),  # a condition is the same for all that read it
        (lambda h, step, p, g: (g * where(h.lr > 5.0, 2.0, 0.0),), 2.0),
        (lambda h, step, p, g: (where((h.lr > 5.0) & (g < 2.0) & ~(step == 2), g, p - p),), 1.0),
    ]
    for update, expected in cases:
        rule = make(update)
        numbers = {name: value.reshape(()) for name, value in on_tensors.scalars(rule, h, one).items()}
        (made,) = on_tensors.update(rule, numbers, ones, ones, [])
        assert_same_bits(made, torch.full((3,), expected))


# ---- powers ---------------------------------------------------------------------------------------------------------

each_base = pytest.mark.parametrize("base", [0.9, 0.999, 0.5, 0.1, 1.0000001, 1.7, 1e-12])


@each_base
def test_powers_of_steps_are_within_their_error(base: float) -> None:
    for exponent in (0, 1, 2, 3, 10, 31, 200):
        found = on_tensors.power(torch.tensor(base, dtype=torch.float64), torch.tensor(exponent)).item()
        exact = Fraction(base) ** exponent
        if exact > Fraction(2) ** -1000:
            assert abs(Fraction(found) - exact) <= exact * exponent * Fraction(2) ** -53


@each_base
def test_real_powers_are_within_their_error(base: float) -> None:
    for exponent in (0.0, 0.5, -0.5, 0.8, -0.8, 1 / 3, 1.0, 2.75, -3.1, 17.001, 1e-9):
        made = on_tensors.real_power(*(torch.tensor(x, dtype=torch.float64) for x in (base, exponent)))
        with localcontext() as context:
            context.prec = 60
            exact = Decimal(base) ** Decimal(exponent)
            bound = exact * Decimal(abs(exponent) + 160 + abs(math.log(base))) / 2**53
            assert abs(Decimal(made.item()) - exact) <= bound


def test_a_power_of_plain_numbers_is_pythons() -> None:
    assert power(0.9, 3) == 0.9**3
    assert sqrt(2.0) == math.sqrt(2.0)


# ---- a rule's name is not the rule ----------------------------------------------------------------------------------


def other_adam() -> type[af.Adam]:
    """A class whose rule has Adam's name and states, and other arithmetic."""

    class OtherRule(AdamRule):
        @staticmethod
        def update(h: Any, step: Any, p: Any, g: Any, *states: Any) -> tuple[Any, ...]:
            exp_avg, exp_avg_sq = states
            return p - g * h.lr, exp_avg + g, exp_avg_sq

    return type("Other", (af.Adam,), {"rules": (OtherRule,)})


def stepped(kind: type[af.Adam], backend: str) -> dict[str, torch.Tensor]:
    """Parameter and states after a step by this backend."""
    params = random_params([(1000,)])
    set_grads(params, random_grads(params, 0))
    optimizer = kind(params, lr=0.1, backend=backend)
    optimizer.step()
    assert inside.backend(optimizer).name == backend
    return everything(optimizer)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library of the rule, which is compiled once."""
    need_native()
    folder = tmp_path_factory.mktemp("rules") / "first"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCUMFUSED_CACHE", str(folder))
        stepped(other_adam(), "cpu")
    return folder


def test_no_kernel_of_the_same_name_runs_another_rule(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCUMFUSED_CACHE", str(cache))
    kind = other_adam()
    expected = stepped(kind, "reference")
    for backend in ("cpu", "torch"):
        assert_all_same_bits(stepped(kind, backend), expected)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("ACCUMFUSED_CACHE", __file__, "set ACCUMFUSED_CACHE to a folder that can be written"),
        ("ACCUMFUSED_CACHE", "/proc/self", "set ACCUMFUSED_CACHE to a folder that can be written"),  # it is there
        ("CXX", "no-such-compiler", r"no C\+\+17 compiler was found"),
        ("CXX", "false", r"false failed; install g\+\+ or clang\+\+, or set CXX"),
    ],
)
def test_what_prevents_a_rule_from_compiling_is_named_with_the_remedy(
    native: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, remedy: str
) -> None:
    monkeypatch.setenv("ACCUMFUSED_CACHE", str(tmp_path))
    monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=remedy):
        stepped(other_adam(), "cpu")


@pytest.fixture
def planted(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the rule's library would lie in a new cache: the system loads nothing twice under one path."""
    assert cache.stat().st_mode & 0o777 == 0o700
    (own,) = cache.glob("*.so")
    monkeypatch.setenv("ACCUMFUSED_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    return tmp_path / "cache" / own.name


def plant(made: Path, code: str) -> None:
    subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(made)], input=code, text=True, check=True)
    made.chmod(0o700)


@pytest.mark.parametrize(
    "way",
    [
        "folder of mode 0777", "foreign file",
        # These mix what those two have.
        *(pytest.param(way, marks=pytest.mark.full) for way in ("file of mode 0777", "foreign folder")),
    ],
)  # fmt: skip
def test_no_library_is_loaded_that_others_can_write(
    planted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    ran = tmp_path / "ran"
    plant(
        planted, f'#include <cstdio>\n__attribute__((constructor)) static void run() {{ fclose(fopen("{ran}", "w")); }}'
    )
    target = planted.parent if "folder" in way else planted
    if "foreign" not in way:
        target.chmod(0o777)
    elif os.getuid() == 0:
        os.chown(target, 65534, 65534)
    else:
        pytest.skip("only root can give a file away")
    with caplog.at_level("WARNING", "accumfused"):
        assert_all_same_bits(stepped(other_adam(), "cpu"), stepped(other_adam(), "reference"))
    assert "others can write it" in caplog.text
    assert not ran.exists()


@pytest.mark.parametrize("code", ["", "int x;", "zeros"])
def test_a_damaged_library_is_made_anew(cache: Path, planted: Path, code: str) -> None:
    """One that does not load, one without the rule, and one of which a block was not written."""
    if code == "int x;":
        plant(planted, code)
    else:
        whole = (cache / planted.name).read_bytes()
        planted.write_bytes(whole[:-512] + bytes(512) if code else b"no library")
        planted.chmod(0o700)
    assert_all_same_bits(stepped(other_adam(), "cpu"), stepped(other_adam(), "reference"))
    assert not planted.exists()


_STEP = """
import torch, accumfused as af
from accumfused.rules import sign
class Cut(af.Rule):
    name = "cut_short"
    hypers = {"lr": 1e-3}
    @staticmethod
    def update(h, step, p, g):
        return (p - sign(g) * h.lr,)
param = torch.nn.Parameter(torch.zeros(4))
param.grad = torch.ones(4)
af.optimizer_of(Cut)([param], lr=1.0, backend="cpu").step()
print(param.tolist())
"""


def step_elsewhere(cache: Path) -> None:
    """Steps in a process of its own, which a library that is cut short kills."""
    run = subprocess.run(
        [sys.executable, "-c", _STEP], env={**os.environ, "ACCUMFUSED_CACHE": str(cache)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (0, "[-1.0, -1.0, -1.0, -1.0]\n"), run.stderr


def test_a_library_that_is_cut_short_is_made_anew(
    native: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a full disk, a power loss, a copy that broke off."""
    monkeypatch.setenv("ACCUMFUSED_CACHE", str(tmp_path / "whole"))
    exec(_STEP, {"__name__": "__main__"})
    (library,) = (tmp_path / "whole").glob("*.so")
    cut = tmp_path / "cut" / library.name
    cut.parent.mkdir(mode=0o700)
    cut.write_bytes(library.read_bytes()[: library.stat().st_size // 2])
    cut.chmod(0o700)
    step_elsewhere(cut.parent)
    assert list(cut.parent.iterdir()) == []  # so the next process makes another one


def test_a_rule_needs_no_learning_rate(backend: str) -> None:
    rule = make(lambda h, step, p, g: (p - g * h.scale,), name="fixed", hypers={"scale": 0.5})
    param = torch.zeros(3, requires_grad=True)
    param.grad = torch.ones(3)
    af.optimizer_of(rule)([param], backend=backend).step()
    assert param.tolist() == [-0.5] * 3
