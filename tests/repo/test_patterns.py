"""The patterns that people are taught: each example's numbers against float64, and a page that names them all."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import io
import math
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from compare import assert_close
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs"
FOLDER = ROOT / "examples" / "patterns"
PATTERNS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "data")
every_pattern = pytest.mark.parametrize("name", PATTERNS)

RIGHT = (0, 1e-5)  # of the update: fp32 rounding of weights around 0.3 that moved by some 0.03
WRONG = (0.1, math.inf)
ALL = (1 - 1e-4, 1 + 1e-4)  # the whole update is lost


def is_(number: float) -> tuple[float, float]:
    return number - 1e-12, number + 1e-12


# What main() returns: how far each way is off the truth, or a number that the pattern is about. Between which two.
FOUND: dict[str, dict[str, tuple[float, float]]] = {
    "basic_loop": {"weight=len(y)": RIGHT, "loss": WRONG, "loss / 4": WRONG, "weight and loss / 4": WRONG},
    "clipping": {"window": RIGHT, "each": WRONG},
    "mixed_precision": {"unscale first": RIGHT, "clip first": ALL},  # 1 / 65536 of each update is left
    "fixed_effective_batch": dict.fromkeys(("8 x 4", "4 x 8", "2 x 16", "1 x 32"), RIGHT)
    | dict.fromkeys(("4 x 4", "4 x 16", "4 x 32"), (0.3, math.inf)),
    "out_of_memory": {"accumulate_batch()": RIGHT, "a smaller batch": (0.5, math.inf)},
    "dynamic_accumulation": {"windows": RIGHT, "modulo": WRONG},
    "remainder": {"windows": RIGHT, "it dropped": WRONG, "it divided by 4": WRONG},
    "token_weights": {"tokens": RIGHT, "means": WRONG},
    "batch_norm": {
        "GroupNorm": RIGHT, "BatchNorm1d": WRONG, "warnings of GroupNorm": (0, 0), "warnings of BatchNorm1d": (1, 1),
    },
    "same_batch": {
        "one length, loss / N": RIGHT, "one length, weights": RIGHT,
        "padding, loss / N": WRONG, "padding, weights": RIGHT,
    },
    "contrastive": {"each micro-batch for itself": WRONG, "two passes": RIGHT},
    "expert_balance": {"shares of each micro-batch": WRONG, "shares of the window": RIGHT},
    "long_windows": {
        "here, fp32, N = 1024": (0, 1e-6), "here, bf16, N = 1024": (0, 1e-6), "autograd, bf16, N = 1024": WRONG,
    },
    "noise_scale": {},
    "dropout": {"p=0": RIGHT, "p=0.5, one draw": (0.6, math.inf), "mean of 100 draws": (0, 0.2)},
    "zero_grad": {"without": RIGHT, "zero_grad first": WRONG, "warnings": (1, 1)},
    "two_optimizers": {"zero_grad": (0, 1e-4), "no zero_grad": WRONG},  # two networks: each follows the other
    "existing_loop": {
        "fuse()": RIGHT, "new": WRONG, "lr": is_(0.1 * 0.8**8), "lr, fuse()": is_(0.1 * 0.8**8), "lr, new": is_(0.1),
    },
    "schedulers": {
        way: is_(0.5 * (1 + math.cos(math.pi * 12 / total)) / 2)  # 12 updates: 4 epochs of windows of 4, 4 and 2
        for way, total in (("len(loader)", 40), ("len(loader) // 4", 8), ("updates_per_epoch()", 12))
    },
    "learning_rate": {},
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {"long_windows": {"lengths": (4, 1024)}}  # of main(), where it would take seconds


@functools.cache
def example(name: str) -> Any:
    """An example as `python examples/patterns/NAME.py` imports it, forgotten again, for its name is a common one."""
    names = ("data", *PATTERNS)
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    with mock.patch.object(sys, "path", [str(FOLDER), *sys.path]):
        module = importlib.import_module(name)
    for each in names:
        sys.modules.pop(each, None)
    sys.modules.update(others)
    return module


@functools.cache
def ran(name: str) -> tuple[dict[str, float], str]:
    """What an example finds, and prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        found: dict[str, float] = example(name).main(**ARGUMENTS.get(name, {}))
    return found, said.getvalue()


@pytest.mark.parametrize("max_norm", [0.1, 1e9])
def test_the_truth_of_the_examples_is_gradient_descent_on_whole_batches(max_norm: float) -> None:
    data, sizes, lr = example("data"), [32, 8, 13], 0.1
    net = data.model()
    truth, names = [param.detach().double() for param in net.parameters()], [name for name, _ in net.named_parameters()]
    for x, y in data.micro_batches(sizes):
        truth = [param.requires_grad_() for param in truth]
        logits = torch.func.functional_call(net, dict(zip(names, truth, strict=True)), x.double())
        grads = torch.autograd.grad(F.cross_entropy(logits, y), truth)
        norm = float(torch.cat([grad.flatten() for grad in grads]).norm())
        truth = [(p - lr * min(1.0, max_norm / norm) * g).detach() for p, g in zip(truth, grads, strict=True)]
    found = data.whole_batches(net, sizes, lr, max_norm)
    for param, expected in zip(found.parameters(), truth, strict=True):
        assert_close(param, expected, "model")
    assert data.off(found, found, net) == 0
    assert data.off(net, found, net) == pytest.approx(1)


@every_pattern
def test_what_is_taught_is_right_and_what_is_warned_of_is_not(name: str) -> None:
    found, _ = ran(name)
    for way, (low, high) in FOUND[name].items():
        assert low <= found[way] <= high, way


def test_a_scaled_learning_rate_takes_a_large_batch_as_far_as_a_small_one() -> None:
    data, module = example("data"), example("learning_rate")
    small, kept, scaled = ran("learning_rate")[0].values()
    assert abs(scaled - small) < 0.02 * abs(kept - small)
    ((x, y),) = data.micro_batches([512])
    truth = data.whole_batches(data.model(), [32] * 16, 4 * module.LR)
    assert scaled == pytest.approx(F.cross_entropy(truth(x.double()), y).item(), rel=1e-5)


def test_the_noise_scale_is_estimated_from_the_norms_that_a_window_has() -> None:
    found, _ = ran("noise_scale")
    assert found["estimated at first"] == pytest.approx(found["exact at first"], rel=0.2)
    assert found["exact after 30 updates"] > 10 * found["exact at first"]
    assert found["estimated after 30 updates"] == pytest.approx(found["exact after 30 updates"], rel=0.5)


def masked_by_hand(net: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The other usual form of the example's loss: 0 / 0 in its gradients where nothing counts."""
    mask = targets != -100
    losses = F.cross_entropy(net(tokens).flatten(0, -2), targets.clamp(min=0).flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


def test_a_micro_batch_without_a_token_that_counts_is_nothing_whatever_the_form_of_the_loss() -> None:
    module, data = example("token_weights"), example("data")
    assert math.isnan(ran("token_weights")[0]["loss of the empty one"])
    by_index = data.weights(module.here())
    with mock.patch.object(module, "loss", masked_by_hand):
        assert_close(data.weights(module.here()), by_index, "model")
        assert bool(data.weights(module.taught()).isnan().any())


@every_pattern
def test_every_pattern_is_on_the_page_and_shows_its_pitfall_in_three_lines(name: str) -> None:
    linked = f"(../../examples/patterns/{name}.py)"
    assert any(linked in page.read_text() for page in PAGES.glob("guide/*.md"))
    docstring = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))
    assert docstring is not None
    first, blank, *rest = docstring.splitlines()
    assert first.startswith("Pattern: ")
    assert (blank, rest[0][:9]) == ("", "Pitfall: ")
    assert any(line.startswith("Remedy: ") for line in rest)
    assert len(rest) + 1 <= 6
    found, said = ran(name)
    assert {type(value) for value in found.values()} <= {float, int}
    assert 1 <= len(said.splitlines()) <= 3
