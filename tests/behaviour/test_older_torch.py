"""torch 2.8 and 2.9, which keep p.grad in its parameter's dtype; 2.7 and older are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from compare import refused
from table import Own
from torch import Tensor
from torch.nn import Parameter

import accumfused as af

ROOT = Path(af.__file__).parents[1]


@pytest.fixture(autouse=True)
def _older(monkeypatch: pytest.MonkeyPatch) -> None:
    inside.forget_grad_dtype(monkeypatch)


def bf16_params() -> list[Parameter]:
    return [Parameter(torch.full((300,), 1.0, dtype=torch.bfloat16)) for _ in range(2)]


def micro_batch(params: list[Parameter]) -> None:
    for index, param in enumerate(params):
        param.grad = torch.full_like(param, 0.1 + index)


def test_a_window_of_16_bit_gradients_is_not_put_into_p_grad() -> None:
    params = bf16_params()
    optimizer = af.AdamW(params, lr=0.1)
    micro_batch(params)
    optimizer.accumulate(weight=2)
    micro_batch(params)
    text = r"leave it out, and step\(\) closes the window, or install torch 2.10"
    with refused(optimizer, RuntimeError, text):
        optimizer.accumulate(weight=3, last=True)
    for param in params:
        param.grad = None
    with refused(optimizer, RuntimeError, text):
        optimizer.backward(sum((p.float().sum() for p in params), start=torch.zeros(())), weight=3, last=True)


def after_a_window(make: Any) -> list[Tensor]:
    params = bf16_params()
    optimizer = make(params)
    for weight in (2, 3):
        micro_batch(params)
        optimizer.accumulate(weight=weight)
    optimizer.step()
    return params


MAKERS = {
    "kernels": lambda params: af.AdamW(params, lr=0.1, max_grad_norm=1.0),
    "converted": lambda params: af.fuse(torch.optim.SGD(params, lr=0.1, momentum=0.9), max_grad_norm=1.0),
    "its own step": lambda params: af.fuse(Own(params, lr=1.0, momentum=0.9), max_grad_norm=1.0),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_closes_it_with_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = MAKERS[name]
    older = after_a_window(make)
    assert name != "its own step" or all((param != 1).all() for param in older)
    monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip(older, after_a_window(make), strict=True))


def test_fp32_sums_are_in_p_grad_of_fp32_parameters() -> None:
    param = Parameter(torch.ones(3))
    optimizer = af.AdamW([param], lr=0.1)
    param.grad = torch.full((3,), 0.5)
    optimizer.accumulate(weight=2, last=True)
    assert param.grad is not None
    assert param.grad.tolist() == [0.5] * 3
    optimizer.step()
    assert (param != 1).all()


def test_a_torch_that_is_too_old_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.7.1+cu126'\nclass Tensor: pass\n")
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import accumfused"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    last = "ImportError: accumfused needs torch 2.8 or newer, and 2.7.1+cu126 is installed; pip install --upgrade torch"
    assert done.stderr.splitlines()[-1] == last


def test_without_torchs_muon_ours_is_refused_and_all_else_runs() -> None:
    program = """
import torch
del torch.optim.Muon
import accumfused as af
params = [torch.nn.Parameter(torch.ones(3, 3))]
af.fuse(torch.optim.AdamW(params))
try:
    af.Muon(params)
except RuntimeError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Muon needs torch 2.9 or newer" in run.stdout
