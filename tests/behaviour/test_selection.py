"""Which backend runs where, and what is said when one cannot."""

from __future__ import annotations

import logging
from typing import Any

import inside
import pytest
import torch
from table import random_grads, random_params, set_grads

import accumfused as af
from accumfused import backends, compiled
from accumfused.__main__ import advice
from accumfused.backends import TorchBackend

CPU, GPU, XPU = torch.device("cpu"), torch.device("cuda", 0), torch.device("xpu", 0)


@pytest.fixture
def built_for_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(compiled, "cuda_unavailable", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    return monkeypatch


def falls_back(name: str) -> str:
    return f"falling back to the {name} backend ({backends.COSTS[name]}): "


AUTO: list[tuple[torch.device, list[str], str, str | None]] = [
    (GPU, [], "cuda", None),
    (GPU, ["triton", "cpu"], "cuda", None),
    (GPU, ["cuda"], "triton", f"{falls_back('triton')}no cuda for cuda"),
    (GPU, ["cuda", "triton"], "torch", f"{falls_back('torch')}no cuda for cuda; and no triton for cuda"),
    (CPU, ["cuda"], "cpu", None),
    (CPU, ["cpu"], "torch", f"{falls_back('torch')}no cpu for cpu"),
    (XPU, ["cpu"], "torch", f"{falls_back('torch')}no cpu for xpu"),
]


@pytest.mark.parametrize(("device", "missing", "chosen", "said"), AUTO)
def test_auto_takes_the_fastest_that_runs_and_says_once_why_no_faster_one(
    device: Any, missing: Any, chosen: Any, said: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("cuda", "triton", "cpu"):
        reason = f"no {name} for {device.type}" if name in missing else None
        monkeypatch.setattr(backends, f"_why_not_{name}", lambda device, reason=reason: reason)
    monkeypatch.setattr(backends, "_make", lambda name: name)
    with caplog.at_level(logging.WARNING, logger="accumfused"):
        for _ in range(2):
            assert backends.select("auto", [device]) == chosen
    assert [record.getMessage() for record in caplog.records] == ([] if said is None else [said])
    for name in missing:
        with pytest.raises(
            RuntimeError, match=f"'{name}' cannot run: no {name} for {device.type}; use backend='auto' or 'torch'"
        ):
            backends.select(name, [device])


def test_without_a_compiler_torchs_kernels_serve_an_optimizer_whose_groups_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backends, "_why_not_cpu", lambda device: "none here")
    params = random_params([(3,)])
    set_grads(params, random_grads(params, 0))
    with caplog.at_level(logging.WARNING, logger="accumfused"):
        af.SGDScheduleFree(params).step()
    assert [record.getMessage() for record in caplog.records] == [f"{falls_back('torch')}none here"]


def test_kernels_run_where_they_are_for(native: None, built_for_gpus: Any) -> None:
    assert backends.why_not("cuda", CPU) == "parameters are on cpu"
    assert backends.why_not("cpu", GPU) == "parameters are on cuda:0"
    assert isinstance(backends.select("auto", [torch.device("meta")]), TorchBackend)


MISSING = [
    (torch.cuda, "_is_in_bad_fork", lambda: True, "start it with the spawn method"),
    (torch.version, "cuda", None, "is built for CPUs only"),
    (torch.cuda, "is_available", lambda: False, "finds no GPU that it can use"),
    (torch.version, "hip", "7.0", "is for AMD GPUs, and these kernels are for NVIDIA's"),
]


@pytest.mark.parametrize(("owner", "name", "value", "said"), MISSING)
def test_what_is_missing_for_gpus_is_told(owner: Any, name: str, value: Any, said: str, built_for_gpus: Any) -> None:
    built_for_gpus.setattr(torch.cuda, "is_available", lambda: True)
    built_for_gpus.setattr(owner, name, value)
    assert said in str(backends.why_not("cuda", GPU))


TROUBLE = [
    ("no kernel image is available for execution on the device", "rebuild with ACCUMFUSED_CUDA_ARCHS=70"),
    ("CUDA driver version is insufficient for ...", "update the driver, or rebuild with an older CUDA toolkit"),
    ("", ""),
]


@pytest.mark.parametrize(("trouble", "remedy"), TROUBLE)
def test_a_card_or_a_driver_that_is_too_old_is_told_so(
    emulated: Any, built_for_gpus: Any, trouble: str, remedy: str
) -> None:
    built_for_gpus.setattr(backends, "_why_no_gpu", lambda device: None)
    built_for_gpus.setattr(inside.native(), "cuda", emulated, raising=False)
    built_for_gpus.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    built_for_gpus.setattr(torch.cuda, "get_device_name", lambda index: "Tesla V100")
    inside.forget_what_loads()
    emulated.trouble(trouble)
    reason = str(backends.why_not("cuda", GPU))
    emulated.trouble("")
    inside.forget_what_loads()
    assert trouble in reason
    if trouble:
        built_for_gpus.setattr(torch.cuda, "is_available", lambda: True)
        assert "Tesla V100 has 70" in reason
        assert advice({"cuda": reason}) == remedy
    else:
        assert reason == "None"
