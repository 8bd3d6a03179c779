"""bench/numerics itself: what it compares with is the truth, and its report is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import need_native

import accumfused as af
from bench.numerics import contenders, tiny_steps
from bench.numerics.contenders import BF16, FP16, FP32, Contender


def test_the_benchmark_compares_with_the_exact_displacement() -> None:
    """Its harness over torch's own AdamW in fp64, whose displacement is the exact one."""
    contender = Contender("fp64", torch.float64, torch.optim.AdamW, grad_dtype=torch.float64)
    (row,) = tiny_steps.follow(contender, [(0.02, 1e-6, 1 << 13)], 20)
    assert abs(row["bias"]) < 1e-8
    assert row["error"] < 1e-8


def test_the_benchmarks_bias_is_that_of_the_displacement() -> None:
    """A step that is a tenth too long has a bias of 10%."""

    def make(groups: Any, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{**group, "lr": 1.1 * group["lr"]} for group in groups], **options)

    (row,) = tiny_steps.follow(
        Contender("", torch.float64, make, grad_dtype=torch.float64), [(0.02, 1e-6, 1 << 13)], 20
    )
    assert row["bias"] == pytest.approx(0.1, abs=1e-6)


def test_the_benchmark_writes_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("rich", "matplotlib"):
        pytest.importorskip(package)
    import bench.numerics.__main__ as command

    monkeypatch.setattr("sys.argv", ["", "equal", "codes", "--quick", "--processes", "1", "--out", str(tmp_path)])
    command.main()
    report = (tmp_path / "report.md").read_text()
    assert "| AdamW | bf16 + split16 | 20 | 4096 | 0 | 0 |" in report
    assert "](codes.png)" in report
    assert (tmp_path / "codes.png").stat().st_size > 10_000
    found = json.loads((tmp_path / "numerics.json").read_text())["suites"]["codes"][0]["rows"]
    kinds = [cell for row in found for cell in row["kinds"] if row["format"] == "floats 1+3+4; 4+4"]
    assert max(cell["largest"] for cell in kinds) < 1.5


def test_a_measurement_that_fails_is_named() -> None:
    from bench.numerics.tasks import run_all

    found = run_all([(tiny_steps.decay, ("no such format", True)), (abs, (-1,))], processes=1)
    assert found[0].startswith("KeyError: 'no such format'")
    assert found[1] == 1


def test_masters_are_read_out_of_all_formats() -> None:
    need_native()
    values = torch.randn(4096)
    formats = (BF16, "fp32", 0.0), (BF16, "split16", 0.0), (FP16, "fp32", 0.0), (BF16, "split8", 2.0**-14)
    for dtype, masters, most in formats:
        param, full = torch.nn.Parameter(values.to(dtype)), torch.nn.Parameter(values.to(dtype).float())
        optimizers = af.SGD([param], lr=1e-3, master_weights=masters, rounding_seed=0), torch.optim.SGD([full], lr=1e-3)
        param.grad, full.grad = torch.ones_like(param), torch.ones_like(full)
        for optimizer in optimizers:
            optimizer.step()
        found = contenders.master(optimizers[0], param)
        off = (found - full.detach().double()).abs().max().item()
        assert off <= most, (masters, off)
        assert found.dtype == torch.float64
    assert contenders.master(af.SGD([full], lr=1.0), full).to(FP32).equal(full.detach())
