"""The examples for frameworks run offline; the other tests of this folder hold what they show. So does offload's."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGES = {"hf_trainer": "transformers", "accelerate_loop": "accelerate", "lightning_loop": "lightning"}


@pytest.mark.full
@pytest.mark.parametrize("name", PACKAGES)
def test_an_example_runs_offline(name: str) -> None:
    pytest.importorskip(PACKAGES[name])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_the_example_of_offload_finds_equal_weights_and_only_weights_and_gradients_on_the_card(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    assert importlib.import_module("offload").main()
    without, offloaded = (line.split() for line in capsys.readouterr().out.splitlines()[1:3])
    assert float(without[2]) == float(without[3]) == 0
    weights, rest = float(offloaded[1]), float(offloaded[2])
    assert weights == pytest.approx(float(without[1]) / 8, rel=0.01)  # 2 of 16 bytes
    assert weights + rest == pytest.approx(float(without[1]), rel=1e-3)
