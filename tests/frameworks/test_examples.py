"""The examples for frameworks run offline, and print what the documentation says of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ROUNDING = 1e-6  # of float32 parameters below 1, after a few updates


def output(name: str, package: str) -> str:
    pytest.importorskip(package)
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **OFFLINE}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(text: str, line: str) -> list[float]:
    """Those behind the words that a line begins with."""
    (found,) = re.findall(rf"^\s*{re.escape(line)}(.*)$", text, re.MULTILINE)
    return [float(number) for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]\d+)?", found)]


def test_trainer() -> None:
    text = output("hf_trainer.py", "transformers")
    assert numbers(text, "largest difference between parameters:")[0] < ROUNDING
    for gone in ("aten::linalg_vector_norm", "aten::_foreach_mul_", "aten::_fused_adamw_"):
        stock, fused = numbers(text, gone)[:2]
        assert stock > 0 == fused


def test_accelerate() -> None:
    text = output("accelerate_loop.py", "accelerate")
    assert numbers(text, "the unchanged loop, torch.optim and accumfused:")[0] < ROUNDING
    assert numbers(text, "weighed by tokens, by hand and with accumfused:")[0] < 1e-5  # AdamW divides by small numbers
    assert numbers(text, "what the weights change:")[0] > 1e-3


def test_lightning() -> None:
    text = output("lightning_loop.py", "lightning")
    assert numbers(text, "Trainer, one line")[0] < ROUNDING
    for exact in ("Trainer, FusedAccumulation", "manual optimization", "Fabric"):
        assert numbers(text, exact)[1] < ROUNDING
        assert numbers(text, exact)[2:] == numbers(text, "Trainer, one line")[2:] == [0, 0, 0]
    assert min(numbers(text, "Trainer, stock")[2:]) > 0
