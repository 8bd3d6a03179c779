"""`python -m accumfused` says what is true here; without the native module the package is pure Python, and says so."""

from __future__ import annotations

import importlib.util
import json
import platform
import runpy
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import inside
import pytest
import torch

import accumfused
from accumfused import compiled
from accumfused.__main__ import advice, as_text, report
from accumfused.backends import COSTS, NAMES, why_not

PACKAGE = Path(accumfused.__file__).parent


def test_json_holds_what_a_bug_report_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for arguments in (["--json"], [], ["doctor"]):
        monkeypatch.setattr(sys, "argv", ["accumfused", *arguments])
        monkeypatch.delitem(sys.modules, "accumfused.__main__", raising=False)
        runpy.run_module("accumfused", run_name="__main__")
        said.append(capsys.readouterr().out)
    assert said[1] == said[2]
    found, native = json.loads(said[0]), inside.native()
    versions = {"accumfused": accumfused.__version__, "torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("numpy", "triton", "transformers", "accelerate", "lightning"):
        versions[name] = metadata.version(name) if importlib.util.find_spec(name) else None
    assert found["versions"].items() >= {**versions, "installed in": str(PACKAGE)}.items()
    assert found["versions"]["python"].startswith(platform.python_version())
    assert [*found["backends"].items()] == [(name, why_not(name)) for name in NAMES if name != "auto"]
    assert found["instruction_sets"] == ([] if native is None else native.instruction_sets())
    assert found["threads"] >= 1
    assert "\n" not in found["next"]
    if native is not None and not torch.cuda.is_available() and not shutil.which("nvidia-smi"):
        assert said[1].splitlines()[-1] == "what to do next: nothing: the fastest kernels for this machine are in use"
    assert len(found["devices"]) == 1 + torch.cuda.device_count()
    assert said[1].rstrip("\n") == as_text(found)
    assert native is None or f"instruction sets  {native.instruction_sets()[0]} (used)" in said[1]


PURE = """
import importlib, importlib.machinery, json, logging, os, sys
import torch
import accumfused as af, accumfused.integrations.lightning
assert {"transformers", "accelerate", "lightning", "pytorch_lightning"}.isdisjoint(sys.modules)
from accumfused import compiled
from accumfused.__main__ import report

def train(make):
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    try:
        make([param]).step()
    except RuntimeError as error:
        assert param.tolist() == param.grad.tolist() == [1.0] * 3
        return str(error)
    return param.tolist()

said = []
handler = logging.Handler()
handler.emit = lambda record: said.append([record.levelname, record.getMessage()])
logging.getLogger("accumfused").addHandler(handler)
results = [train(lambda params: af.SGD(params, lr=0.5, backend="torch"))]
assert said == []  # it was asked for
results += [train(lambda params: af.SGD(params, lr=0.5)) for _ in range(3)]
results += [train(lambda params: af.AdamW(params, backend="cpu"))]
results += [train(lambda params: af.fuse(torch.optim.NAdam(params), backend="cpu"))]
os.mkdir("csrc")
sys.path = [path for path in sys.path if path == "" or not os.path.exists(path + "/accumfused")]  # nothing is installed
reports = []
for name, text in (
    ("README", ""), ("_C.cpython-399-x86_64-linux-gnu.so", ""),
    (f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}", "no module"),
    ("_native_error.txt", "g++ failed:\\nrules.h:1: error: no such thing"),
):
    with open(f"accumfused/{name}", "w") as file:
        file.write(text)
    importlib.invalidate_caches()
    importlib.reload(compiled)
    reports += [report()]
print(json.dumps([said, results, reports]))
"""


def test_without_a_native_module_it_runs_and_says_why_it_is_slow_and_what_to_do(tmp_path: Path) -> None:
    """And that its import brings no framework, which only its integrations need."""
    shutil.copytree(PACKAGE, tmp_path / "accumfused", ignore=shutil.ignore_patterns("_C.*", "_native_error.txt"))
    command = [sys.executable, "-W", "error", "-c", PURE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={})
    if done.returncode:
        pytest.fail(done.stderr)
    said, results, (*reports, found) = json.loads(done.stdout)
    missing = "the native module was not built (ACCUMFUSED_NATIVE=0, or installed from pure Python)"
    assert said == [["WARNING", f"falling back to the torch backend ({COSTS['torch']}): {missing}"]]
    refused = f"backend='cpu' cannot run: {missing}; use backend='auto' or 'torch'"
    assert results == [*[[0.5] * 3] * 4, refused, refused]
    for each, (reason, remedy) in zip(reports, (
        ("has no native module; build it: pip install -e .", "build it: pip install -e ."),
        (f"_C.cpython-399-x86_64-linux-gnu.so is not for Python {platform.python_version()}; install accumfused again",
         "install accumfused again"),
        ("the native module does not load: ", "install accumfused again"),
    ), strict=True):  # fmt: skip
        assert reason in each["backends"]["cpu"]
        assert each["next"] == remedy
    lines = as_text(found).splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("  cpu "))
    assert lines[at].endswith("does not run: the native module was not built: g++ failed:")
    assert lines[at + 1] == "          rules.h:1: error: no such thing"
    assert found["backends"]["cuda"] == found["backends"]["cpu"]
    assert {f"  {name:<8}runs ({COSTS[name]})" for name in ("torch",)} <= {*lines}
    assert found["instruction_sets"] == []
    assert lines[-1] == "what to do next: install a C++ compiler (g++ or clang++), then accumfused again"
    assert lines[-2].endswith("at the repository that your copy came from")


def test_the_report_ends_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    known = report()
    for reason, remedy in (
        ("it was not built: pybind11 was not found; pip install pybind11", "pip install pybind11"),
        ("it was not built: false cannot compile C++17; install g++, or set CXX:\nerror", "install g++, or set CXX"),
    ):
        monkeypatch.setattr(compiled, "unavailable", reason)
        assert advice(known["backends"]) == remedy
    monkeypatch.setattr(compiled, "unavailable", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    without = "the native module was built without CUDA: no nvcc was found; install the CUDA toolkit, or set CUDA_HOME"
    assert advice({**known["backends"], "cuda": without}) == "install the CUDA toolkit, or set CUDA_HOME"
    assert advice({**known["backends"], "cuda": None}) == "nothing: the fastest kernels for this machine are in use"


CLONE = """
import importlib, torch
import accumfused as af

print(af.compiled.__file__, af.compiled.module.__file__, sep="\\n")
for added in ("// a remark", "constexpr int kMore = 1;"):
    with open("csrc/rows.h", "a") as file:
        file.write(f"{added}\\n")
    importlib.reload(af.compiled)
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    af.SGD([param], lr=0.5).step()
    print(param.tolist(), af.compiled.unavailable)
"""


@pytest.mark.usefixtures("native")
def test_a_clone_takes_the_native_module_that_is_installed_unless_it_is_older_than_the_source(tmp_path: Path) -> None:
    if not (PACKAGE.parent / "csrc").exists():
        pytest.skip("needs the source")
    shutil.copytree(PACKAGE, tmp_path / "accumfused", ignore=shutil.ignore_patterns("_C.*", "_native_error.txt"))
    shutil.copytree(PACKAGE.parent / "csrc", tmp_path / "csrc")
    command, environment = [sys.executable, "-c", CLONE], {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment)
    reason = "the native module is older than the C++ source here; build it again: pip install -e ."
    assert done.stdout.splitlines() == [
        str(tmp_path / "accumfused/compiled.py"), inside.native().__file__,
        "[0.5, 0.5, 0.5] None", f"[0.5, 0.5, 0.5] {reason}",
    ]  # fmt: skip
    assert done.stderr.count(reason) == 1


def test_a_torch_that_is_too_old_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.7.1+cu126'\nclass Tensor: pass\n")
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(PACKAGE.parent)!r}]; import accumfused"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    text = "accumfused needs torch 2.11 or newer, and 2.7.1+cu126 is installed; pip install --upgrade torch"
    assert done.stderr.splitlines()[-1] == f"ImportError: {text}"
