"""How much memory is free: what does not fit is left out and said, not tried."""

from __future__ import annotations

import torch


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device, or None where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    try:
        with open("/proc/meminfo") as file:
            found = dict(line.split(":", 1) for line in file)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
