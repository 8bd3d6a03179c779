"""The page on what fits has the numbers of its script, and the allocator's peaks are those numbers."""

from __future__ import annotations

import ast
import functools
import gc
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from torch import nn

import accumfused as af

ROOT = Path(__file__).parents[2]
if not (ROOT / "examples").exists():
    pytest.skip("needs the source", allow_module_level=True)
sys.path.append(str(ROOT / "examples"))
import what_fits  # noqa: E402

PAGE = ROOT / "docs" / "guide" / "what-fits.md"
PAGE_OF_OFFLOAD = ROOT / "docs" / "guide" / "offload.md"
BF16, FP32 = torch.bfloat16, torch.float32


def test_the_tables_of_the_page_are_those_of_the_script() -> None:
    page = PAGE.read_text()
    assert [table for table in what_fits.tables() if table not in page] == []
    assert what_fits.times() in PAGE_OF_OFFLOAD.read_text()


def test_the_settings_to_paste_are_those_of_the_tables() -> None:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    values = [node.value for node in ast.parse(code).body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    pasted = [value for value in values if isinstance(value, ast.Dict)]
    assert [eval(ast.unparse(value), {"torch": torch}) for value in pasted] == [what_fits.SETTINGS]


@pytest.mark.parametrize("name", ["A", "B", "C", "A2", "B2", "C2"])
def test_fp32_weights_take_what_bf16_weights_with_whole_masters_take(name: str) -> None:
    found = [what_fits.windows(what_fits.RUNGS[name], dtype).stays for dtype in (FP32, BF16)]
    assert found[0] == pytest.approx(found[1], rel=1e-4)  # one seed and one step count for each tensor


def peak_of(
    optimizer_of: Any, dtype: torch.dtype, width: int, layers: int, bucket: int, updates: int
) -> tuple[int, int]:
    """The allocator's peak in bytes, of windows of two micro-batches with one sample, and those of slots at the end."""
    gc.collect()  # what other tests have left would be freed within the profile
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        linears = (nn.Linear(width, width, bias=False, dtype=dtype, device="meta") for _ in range(layers))
        model = nn.Sequential(*linears).to_empty(device="cpu")
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(1 / width)
        optimizer = optimizer_of(model.parameters())
        release = af.release_gradients(optimizer, bucket) if isinstance(optimizer, af.FusedOptimizer) else None
        for _ in range(updates):
            for _ in range(2):
                what_fits.backward(model, optimizer)
            optimizer.step()
            if release is None:
                optimizer.zero_grad()
        slots = af.memory_report(optimizer).slots if isinstance(optimizer, af.FusedOptimizer) else 0
    return max(itertools.accumulate(inside.allocations(profiler))), slots


def hold_to_peak(
    stays: float, optimizer_of: Any, dtype: torch.dtype, width: int = 512, layers: int = 12, updates: int = 2
) -> tuple[int, int]:
    """Besides what stays there are at most a bucket and the gradient that fills it, and activations.

    Activations: each layer's input, and a few rows within a layer or the loss, in fp32. With offload the CPU is the
    card, too: slots come on top, which have their last size at the last step's peak.
    """
    largest = width * width * dtype.itemsize
    bucket, activations = largest * 3 // 2, (layers + 4) * width * 4
    peak, slots = peak_of(optimizer_of, dtype, width, layers, bucket, updates)
    assert 0 <= peak - stays * layers * width * width - slots <= bucket + largest + activations
    return peak, slots


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("name", what_fits.RUNGS)
def test_a_window_takes_what_the_report_says(name: str, dtype: torch.dtype, offload: bool) -> None:
    settings = what_fits.RUNGS[name] | (what_fits.OFFLOAD if offload else {})
    if dtype == FP32 and settings.get("master_weights", "auto") != "auto":
        return  # fp32 weights have no masters
    stays = what_fits.windows(settings, dtype).stays
    hold_to_peak(stays, functools.partial(af.AdamW, max_grad_norm=1.0, **settings), dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_torchs_optimizer_takes_what_is_said_of_it(dtype: torch.dtype) -> None:
    hold_to_peak(what_fits.plain(dtype).stays, functools.partial(torch.optim.AdamW, fused=True), dtype)


@pytest.mark.full  # ten seconds
def test_a_window_above_a_gigabyte_takes_what_the_report_says() -> None:
    settings = what_fits.RUNGS["E2"]
    stays = what_fits.windows(settings).stays
    adamw = functools.partial(af.AdamW, max_grad_norm=1.0, **settings)
    assert hold_to_peak(stays, adamw, BF16, 4096, 10, updates=1)[0] > 10**9


def test_with_offload_only_the_weights_stay_on_the_card() -> None:
    for settings in what_fits.RUNGS.values():
        cost, here = what_fits.windows(settings | what_fits.OFFLOAD), what_fits.windows(settings)
        assert (cost.on_card, cost.stays) == (BF16.itemsize, here.stays)


def test_large_parameters_take_three_slots_of_their_size() -> None:
    settings, width = what_fits.RUNGS["E2"] | what_fits.OFFLOAD, 4096
    adamw = functools.partial(af.AdamW, max_grad_norm=1.0, **settings)
    _, slots = hold_to_peak(what_fits.windows(settings).stays, adamw, BF16, width, layers=3, updates=1)
    assert slots == what_fits.slots(2 * width * width)
