"""`python -m accumfused`: what it says is what is true here."""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import accumfused
from accumfused import _native
from accumfused.backends import COSTS, NAMES, why_not

PACKAGE = Path(accumfused.__file__).parent


def output(*arguments: str, where: Path) -> str:
    command = [sys.executable, "-m", "accumfused", *arguments]
    return subprocess.run(command, cwd=where, check=True, capture_output=True, text=True).stdout


def test_json_holds_what_a_bug_report_needs() -> None:
    found = json.loads(output("--json", where=PACKAGE.parent))
    assert found["versions"]["accumfused"] == accumfused.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["cuda"] == torch.version.cuda
    assert found["versions"]["python"].startswith(platform.python_version())
    assert found["versions"]["installed in"] == str(PACKAGE)
    for name in ("numpy", "triton", "transformers", "accelerate", "lightning"):
        assert found["versions"][name] == (metadata.version(name) if importlib.util.find_spec(name) else None)
    assert list(found["backends"]) == [name for name in NAMES if name != "auto"]
    assert found["backends"] == {name: why_not(name) for name in found["backends"]}
    assert found["backends"]["torch"] is None
    assert found["threads"] >= 1
    assert len(found["devices"]) == 1 + torch.cuda.device_count()


def test_the_instruction_set_that_it_names_is_the_one_in_use(native: None) -> None:
    from accumfused.backends.cpu import CpuBackend

    assert json.loads(output("--json", where=PACKAGE.parent))["instruction_sets"] == _native._C.instruction_sets()
    assert f"{CpuBackend().instruction_set} (used)" in output(where=PACKAGE.parent)


@pytest.mark.parametrize("reason", ["g++ failed:\nrules.h:1: error: no such thing", None])
def test_without_a_native_module_it_says_why(tmp_path: Path, reason: str | None) -> None:
    shutil.copytree(PACKAGE, tmp_path / "accumfused", ignore=shutil.ignore_patterns("_C.*", "_native_error.txt"))
    if reason is not None:
        (tmp_path / "accumfused" / "_native_error.txt").write_text(reason)
    text = output(where=tmp_path)
    (cpu,) = (line for line in text.splitlines() if line.startswith("  cpu "))
    assert "does not run: the native module was not built" in cpu
    for line in (reason or "ACCUMFUSED_NATIVE=0").splitlines():
        assert line in text
    assert json.loads(output("--json", where=tmp_path))["instruction_sets"] == []
    (runs,) = (line.split() for line in text.splitlines() if line.startswith("  torch "))
    assert runs[:2] == ["torch", "runs"]
    assert f"  foreach runs ({COSTS['foreach']})" in text.splitlines()
