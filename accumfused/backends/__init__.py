"""Chooses the backends, which run the three verbs; no other file chooses."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterable
from typing import Any, get_args

import torch

from accumfused import compiled
from accumfused.backends.cpu import CpuBackend
from accumfused.backends.cuda import CudaBackend
from accumfused.backends.offload import Offload
from accumfused.backends.several import SeveralDevices
from accumfused.backends.torch_kernels import TorchBackend
from accumfused.core.protocol import Backend
from accumfused.core.rows import HOST
from accumfused.rules import Rule, compile
from accumfused.settings import BackendName
from accumfused.warn import say_once

NAMES = get_args(BackendName)

COSTS = {  # compared with the backend that "auto" prefers; docs/internals/arithmetic.md has the measurements
    "triton": "slower",
    "torch": "torch's own kernels and bits; for fp32 AdamW native ones take 0.6 to 0.9 of its time",
}


def why_not(
    name: str,
    device: torch.device | None = None,
    rules: Iterable[type[Rule]] = (),
    dtype: torch.dtype = torch.float32,
) -> str | None:
    """Tells why the backend cannot run (for tensors on that device, or at all; for these rules), or returns None.

    Args:
        dtype: of the plan's arithmetic.
    """
    if dtype == torch.float64 and name != "torch":
        return "a parameter is torch.float64"
    reasons = {"cuda": _why_not_cuda, "triton": _why_not_triton, "cpu": _why_not_cpu}
    reason = reasons[name](device) if name in reasons else None
    if reason is not None or name not in _RULE_REASONS:
        return reason
    return next(filter(None, map(_RULE_REASONS[name], rules)), None)


def check(
    name: str,
    device: torch.device | None = None,
    rules: Iterable[type[Rule]] = (),
    dtype: torch.dtype = torch.float32,
) -> None:
    """Refuses a backend asked for by name that cannot run; the text has the reason."""
    reason = None if name == "auto" else why_not(name, device, rules, dtype)
    if reason is not None:
        raise RuntimeError(f"backend={name!r} cannot run: {reason}; use backend='auto' or 'torch'")


def select(
    name: str,
    devices: Iterable[torch.device],
    rules: Iterable[type[Rule]] = (),
    dtype: torch.dtype = torch.float32,
    *,
    offload: bool = False,
) -> Backend:
    """Selects the backend of that name, or for "auto" the fastest that runs these rules; one for each device.

    Args:
        offload: sums and states lie on the host, which runs the verbs, by "cpu" alone.

    Raises:
        RuntimeError: a backend asked for by name cannot run, or that of offload.
    """
    if offload:
        check("cpu", HOST, rules, dtype)
        return Offload()
    chosen = {device: _select(name, device, rules, dtype) for device in devices if device.type != "meta"}
    if len(chosen) > 1:
        return SeveralDevices(chosen)
    return next(iter(chosen.values()), TorchBackend())


def _select(name: str, device: torch.device, rules: Iterable[type[Rule]], dtype: torch.dtype) -> Backend:
    check(name, device, rules, dtype)
    if name != "auto":
        return _make(name)
    reasons = []
    for candidate in ("cuda", "triton", "torch") if device.type == "cuda" else ("cpu", "torch"):
        reason = why_not(candidate, device, rules, dtype)
        if reason is None:
            break
        reasons.append(reason)
    if reasons:
        say_once(f"falling back to the {candidate} backend ({COSTS[candidate]}): {'; and '.join(reasons)}")
    return _make(candidate)


def _make(name: str) -> Backend:
    return MAKERS[name]()


def _triton() -> Backend:
    module: Any = importlib.import_module("accumfused.backends.triton.backend")  # imports Triton, so not before
    backend: Backend = module.TritonBackend()
    return backend


MAKERS: dict[str, Callable[[], Backend]] = {
    "cuda": CudaBackend, "triton": _triton, "cpu": CpuBackend, "torch": TorchBackend,
}  # fmt: skip


_RULE_REASONS: dict[str, Callable[[type[Rule]], str | None]] = {
    "cpu": compile.why_not_cpu,
    "cuda": compile.why_not_cuda,
}


def _why_not_cpu(device: torch.device | None) -> str | None:
    if compiled.unavailable is not None:
        return compiled.unavailable
    return None if device is None or device.type in ("cpu", "meta") else f"parameters are on {device}"


def _why_not_cuda(device: torch.device | None) -> str | None:
    if compiled.cuda_unavailable is not None:
        return compiled.cuda_unavailable
    reason = _why_no_gpu(device)
    if reason is not None:
        return reason
    if torch.version.hip is not None:
        return f"torch {torch.__version__} is for AMD GPUs, and these kernels are for NVIDIA's"
    return _loads_on(torch.cuda.current_device() if device is None else device.index)


def _why_not_triton(device: torch.device | None) -> str | None:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"Triton does not load: {error}; pip install triton"
    # Triton's interpreter runs the kernels in Python, on any device's tensors.
    return None if os.environ.get("TRITON_INTERPRET") == "1" else _why_no_gpu(device)


def _why_no_gpu(device: torch.device | None) -> str | None:
    if device is not None and device.type != "cuda":
        return f"parameters are on {device}"
    if torch.cuda._is_in_bad_fork():
        return "this process was forked after its parent used CUDA; start it with the spawn method"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built for CPUs only; install a build for GPUs"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU that it can use; torch.cuda.init() may say why"
    return None


@functools.cache
def _loads_on(index: int) -> str | None:
    """Tells why the CUDA kernels do not load on a GPU, or returns None."""
    kernels = compiled.module.cuda
    reason = kernels.why_not(index)
    if not reason:
        return None
    major, minor = torch.cuda.get_device_capability(index)
    remedy = f"rebuild with ACCUMFUSED_CUDA_ARCHS={major}{minor}"
    if "driver version is insufficient" in reason:  # whatever it was built for
        remedy = "update the driver, or rebuild with an older CUDA toolkit"
    return (
        f"{reason} (built by CUDA {kernels.COMPILER} for compute capabilities {kernels.ARCHS}, and "
        f"{torch.cuda.get_device_name(index)} has {major}{minor}; {remedy})"
    )
