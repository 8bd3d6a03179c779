"""Who runs the three verbs: the only place where backends are chosen."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable

import torch

from accumfused import _native
from accumfused.backends.base import Backend
from accumfused.backends.cpu import CpuBackend
from accumfused.backends.reference import ReferenceBackend

NAMES = ("auto", "cuda", "triton", "cpu", "torch")

_log = logging.getLogger("accumfused")


def why_not(name: str, devices: Iterable[torch.device] = ()) -> str | None:
    """Why the backend cannot run (for tensors on these devices), or None."""
    if name in ("cuda", "triton"):
        return f"this version has no {name} kernels yet"
    if name == "cpu":
        if _native.unavailable is not None:
            return _native.unavailable
        elsewhere = sorted({str(device) for device in devices if device.type not in ("cpu", "meta")})
        if elsewhere:
            return f"parameters are on {', '.join(elsewhere)}"
    return None


def check(name: str, devices: Iterable[torch.device] = ()) -> None:
    """Refuses a backend asked for by name that cannot run.

    Raises:
        RuntimeError: with the reason.
    """
    reason = None if name == "auto" else why_not(name, devices)
    if reason is not None:
        raise RuntimeError(f"backend={name!r} cannot run: {reason}; use backend='auto' or 'torch'")


def select(name: str, devices: Iterable[torch.device]) -> Backend:
    """The backend of that name, or for "auto" the fastest that can run.

    Raises:
        RuntimeError: one asked for by name cannot run.
    """
    devices = list(devices)
    check(name, devices)
    reason = why_not("cpu", devices)
    if name == "cpu" or (name == "auto" and reason is None):
        return CpuBackend()
    if name == "auto":
        _say_once(f"falling back to the (slower) torch backend: {reason}")
    return ReferenceBackend()


@functools.cache
def _say_once(message: str) -> None:
    _log.warning(message)
