"""Which backend runs where, and what is said when one cannot."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import accumfused as af
from accumfused import _native, backends
from accumfused.backends.cuda import CudaBackend
from accumfused.backends.reference import ReferenceBackend
from accumfused.warn import say_once

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _says_again() -> Iterator[None]:
    say_once.cache_clear()
    yield
    say_once.cache_clear()


def can_run(monkeypatch: pytest.MonkeyPatch, **reasons: str | None) -> None:
    """Sets why each backend cannot run, and lets one be chosen without its kernels."""
    for name, reason in reasons.items():
        monkeypatch.setattr(backends, f"_why_not_{name}", lambda device, reason=reason: reason)
    monkeypatch.setattr(backends, "_make", lambda name: name)


@pytest.mark.parametrize(
    ("cuda", "triton", "chosen", "said"),
    [
        (None, None, "cuda", None),
        (None, "no Triton", "cuda", None),
        ("no nvcc", None, "triton", f"falling back to the triton backend ({backends.COSTS['triton']}): no nvcc"),
        (
            "no nvcc", "no Triton", "foreach",
            f"falling back to the foreach backend ({backends.COSTS['foreach']}): no nvcc; and no Triton",
        ),
    ],
)  # fmt: skip
def test_auto_on_a_gpu_takes_cuda_then_triton_then_foreach(
    cuda: str | None, triton: str | None, chosen: str, said: str | None,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    can_run(monkeypatch, cuda=cuda, triton=triton)
    with caplog.at_level(logging.WARNING, logger="accumfused"):
        for _ in range(2):
            assert backends.select("auto", [GPU]) == chosen
    assert [record.getMessage() for record in caplog.records] == ([] if said is None else [said])


@pytest.mark.parametrize(("device", "chosen"), [(CPU, "foreach"), (torch.device("xpu", 0), "torch")])
def test_auto_without_the_native_module_takes_what_torch_has(
    device: torch.device, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    can_run(monkeypatch, cpu="no native module")
    assert backends.select("auto", [device]) == chosen


@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_one_asked_for_by_name_raises_with_the_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    can_run(monkeypatch, cuda="no nvcc was found", triton="no nvcc was found")
    with pytest.raises(RuntimeError, match=f"backend='{name}' cannot run: no nvcc was found; use backend='auto'"):
        backends.select(name, [GPU])
    with pytest.raises(RuntimeError, match=f"backend='{name}' cannot run"):
        af.AdamW([torch.zeros(3, requires_grad=True)], backend=name)


@pytest.mark.skipif(_native._C is None, reason=_native.unavailable or "")
def test_kernels_for_gpus_are_not_for_the_cpu(emulate_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(_native, "cuda_unavailable", None)
    assert backends.why_not("cuda", CPU) == "parameters are on cpu"
    assert backends.why_not("cpu", GPU) == "parameters are on cuda:0"


def test_without_a_device_the_reference_is_chosen() -> None:
    assert isinstance(backends.select("auto", [torch.device("meta")]), ReferenceBackend)


def test_a_forked_process_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cuda_unavailable", None)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    for name in ("cuda", "triton"):
        assert "start it with the spawn method" in str(backends.why_not(name, GPU))


def test_a_torch_for_cpus_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cuda_unavailable", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert "is built for CPUs only" in str(backends.why_not("cuda", GPU))


def test_no_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cuda_unavailable", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no GPU that it can use" in str(backends.why_not("cuda", GPU))


@pytest.mark.parametrize(
    "trouble",
    [
        "no kernel image is available for execution on the device",
        "CUDA driver version is insufficient for CUDA runtime",
    ],
)
def test_a_card_or_a_driver_that_is_too_old_is_told_so(
    trouble: str, emulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "cuda_unavailable", None)
    monkeypatch.setattr(backends, "_why_no_gpu", lambda device: None)
    monkeypatch.setattr(_native._C, "cuda", emulated, raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla V100")
    backends._loads_on.cache_clear()
    emulated.trouble(trouble)
    try:
        reason = backends.why_not("cuda", GPU)
    finally:
        emulated.trouble("")
        backends._loads_on.cache_clear()
    assert reason is not None
    assert trouble in reason
    assert "Tesla V100 has 70; rebuild with ACCUMFUSED_CUDA_ARCHS=70" in reason
    assert backends.why_not("cuda", GPU) is None, "the trouble is over"
    backends._loads_on.cache_clear()


def test_trouble_in_a_launch_names_the_kernel(emulated: Any) -> None:
    param = torch.zeros(3, requires_grad=True)
    optimizer = af.SGD([param], lr=1.0)
    optimizer._runtime.backend = CudaBackend(emulated, emulated.Table)
    param.grad = torch.ones(3)
    emulated.fail_after(2)  # the table, the coefficient
    try:
        with pytest.raises(RuntimeError, match=r"CUDA, (table|step): too many resources"):
            optimizer.step()
    finally:
        emulated.fail_after(-1)
    assert torch.equal(param.detach(), torch.zeros(3))
    optimizer.step()
    assert torch.equal(param.detach(), -torch.ones(3))
