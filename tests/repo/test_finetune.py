"""The fine-tune (examples/finetune.py): all recipes make the same update, but for what their formats round."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close

ROOT = Path(__file__).parents[2]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("finetune")


@pytest.mark.parametrize("released", [False, True])
def test_our_recipe_makes_the_update_of_torchs(released: bool, example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "MAX_GRAD_NORM", 4.0)  # above the norm of the mean, below that of the sum
    torch.manual_seed(0)
    start = example.GPT(example.SAMPLE_BYTES, *example.SIZES["tiny"])
    samples, _ = example.code(example.SAMPLE_BYTES)
    models = []
    for recipe in (example.RECIPES[example.IN_FP32], example.Recipe(torch.float32, example.ours(), released)):
        models.append(copy.deepcopy(start))
        run = example.train(models[-1], recipe, example.windows(samples, 0), lambda _: 1.0, lambda: None)
        for _ in range(3):
            next(run)
    for ours, torchs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert_close(ours, torchs, "model")


def test_every_recipe_of_ours_and_torchs_runs_and_another_packages_may_be_missing(
    example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "K", 3)  # each backward pass looks at all objects of the process
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    results, missing = example.compare("tiny", "cpu", 1, 1)
    assert list(missing) == [name for name, recipe in example.RECIPES.items() if recipe.is_optional]
    held = {name: round(result.bytes_per_parameter, 1) for name, result in results.items()}
    assert (held[example.IN_FP32], held[example.IN_BF16]) == (16.0, 8.0)
    assert held["accumfused"] == 18.0  # bf16 weights and gradients 4, masters 2, states 8, sums 4
    lines = example.table(results, missing).splitlines()
    assert len({line.count("|") for line in lines}) == 1
