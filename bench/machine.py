"""Where and when the figures were taken."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from accumfused.__main__ import installed, processor, report

_QUERY = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit", "pstate")


def machine() -> dict[str, Any]:
    """The CPU and the versions."""
    found = report()
    return {
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "instruction_set": (found["instruction_sets"] or ["none: no native module"])[0],
        "load": os.getloadavg()[0],  # of the minute before: what else was running
        "revision": revision(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        **{name: found["versions"][name] for name in ("accumfused", "torch", "python", "system", "compiler")},
    }


def revision() -> str | None:
    """The commit of these sources, with "-dirty" if they have been changed since; None outside a repository."""
    if shutil.which("git") is None:
        return None
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=9"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() or None


def gpu(device: torch.device) -> dict[str, Any]:
    """The GPU, and what is set on it: nothing is changed."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "triton": installed("triton"),
        "nvidia_smi": nvidia_smi(),
    }


def nvidia_smi() -> dict[str, str]:
    """The driver and the clocks as they are now; empty where nvidia-smi does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(_QUERY, values, strict=True)) if done.returncode == 0 and len(values) == len(_QUERY) else {}
