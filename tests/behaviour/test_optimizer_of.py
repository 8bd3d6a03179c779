"""af.optimizer_of: a user's own rule is an optimizer like any other."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import inside
import pytest
import torch
from compare import assert_all_same_bits, everything
from table import random_grads, random_params, set_grads

import accumfused as af
from accumfused.optimizers.sgd import SgdRule
from accumfused.rules import power, sqrt, where


class CountedRule(af.Rule):
    """Root mean squares, with two steps of half the learning rate, and a flag."""

    name = "counted"
    states = ("average", "square_avg")
    second_moments = ("square_avg",)
    hypers = {"lr": 0.1, "beta": 0.5, "maximize": 0.0}  # noqa: RUF012
    flags = {"centered": False}  # noqa: RUF012

    @staticmethod
    def update(h: Any, step: Any, p: Any, g: Any, *states: Any) -> tuple[Any, ...]:
        average, square_avg = states
        average = average * h.beta + g * (1.0 - h.beta)
        square_avg = square_avg * h.beta + (g * g) * (1.0 - h.beta)
        spread = square_avg - average * average if h.centered else square_avg
        lr = h.lr * where(step <= 2, 0.5, 1.0)
        return p - (average * lr) / (sqrt(abs(spread)) + 0.01), average, square_avg


class CenteredRule(CountedRule):
    name = "counted_centered"
    flags = {"centered": True}  # noqa: RUF012


class KeywordRule(af.Rule):
    """Its names are words of C++, or of the kernels."""

    name = "row"
    states = ("double", "v1")
    hypers = {"new": 0.5, "coef": 0.25}  # noqa: RUF012

    @staticmethod
    def update(h: Any, step: Any, p: Any, g: Any, *states: Any) -> tuple[Any, ...]:
        double, v1 = states
        return p * h.new - g * h.coef + double * power(h.new, step), v1 + g, double + p


Counted = af.optimizer_of(CountedRule, CenteredRule)
Keyword = af.optimizer_of(KeywordRule)
SHAPES = ((3,), (17, 5), (), (0, 4), (1040,))


def trained(optimizer_class: Any, steps: int = 4, **options: Any) -> dict[str, torch.Tensor]:
    params = random_params(SHAPES)
    optimizer = optimizer_class(params, **options)
    for seed in range(steps):
        for weight in (3.0, 5.0):
            set_grads(params, random_grads(params, int(10 * seed + weight)))
            optimizer.accumulate(weight)
        optimizer.step()
    return everything(optimizer)


OPTIONS: dict[str, Any] = {"lr": 0.2, "maximize": 1.0, "max_grad_norm": 0.5}
INT8: dict[str, Any] = {"state_dtype": "8bit", "state_dtype_min_numel": 0, "rounding_seed": 1}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("kind", "options"), [
    (Counted, OPTIONS), (Counted, OPTIONS | INT8), (Counted, OPTIONS | {"centered": True}),
    (Counted, OPTIONS | INT8 | {"centered": True}), (Keyword, {}),
])  # fmt: skip
def test_a_compiled_rule_has_the_references_bits(kind: Any, options: dict[str, Any]) -> None:
    """With any names in it."""
    assert_all_same_bits(trained(kind, backend="cpu", **options), trained(kind, backend="reference", **options))


def test_checkpoints_copies_and_pickles_go_on() -> None:
    params = random_params(SHAPES)
    optimizer = Counted(params, lr=0.2)
    set_grads(params, random_grads(params, 0))
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is Counted
        assert_all_same_bits(everything(other), everything(optimizer))
    fresh = Counted(params)
    fresh.load_state_dict(saved)
    assert_all_same_bits(everything(fresh), everything(optimizer))
    assert fresh.param_groups[0]["lr"] == 0.2
    del saved["state"][1]["average"]
    with pytest.raises(ValueError, match="state of parameter 1 has no 'average'"):
        fresh.load_state_dict(saved)


def test_without_a_compiler_pytorch_runs_the_rule(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class LonelyRule(KeywordRule):
        name = "lonely"

    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level("INFO", logger="accumfused"):
        params = random_params(SHAPES)
        optimizer = af.optimizer_of(LonelyRule)(params)
        set_grads(params, random_grads(params, 0))
        optimizer.step()
    assert "no C++17 compiler was found" in caplog.text
    assert inside.backend(optimizer).name == "torch"


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no rule": (lambda: af.optimizer_of(dict), TypeError, "takes subclasses of Rule"),  # type: ignore[arg-type]
    "no name": (lambda: af.optimizer_of(af.Rule), TypeError, "has no name"),
    "no defaults": (lambda: af.optimizer_of(SgdRule), ValueError, "has no defaults"),
    "other hypers": (lambda: af.optimizer_of(CountedRule, KeywordRule), ValueError, "other hypers or flags"),
    "one flag twice": (lambda: af.optimizer_of(CountedRule, CountedRule), ValueError, "the same flags"),
    "unknown option": (lambda: Counted(random_params(SHAPES), momentum=1.0), TypeError, "momentum"),
    "no number": (lambda: Counted(random_params(SHAPES), lr="fast"), TypeError, "lr must be a number"),
    "not a number": (lambda: Counted(random_params(SHAPES), lr=float("nan")), ValueError, "Invalid learning rate: nan"),
    "two numbers": (
        lambda: Counted(random_params(SHAPES), lr=torch.ones(2)),
        ValueError,
        "Tensor lr must be 1-element",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_call_is_refused(name: str) -> None:
    call, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        call()
