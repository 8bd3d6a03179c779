"""The examples for frameworks run offline; the other tests of this folder hold what they show."""

from __future__ import annotations

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
