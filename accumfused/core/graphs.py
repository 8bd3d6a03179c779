"""CUDA graphs: things that an optimizer must not do while one is captured."""

from __future__ import annotations

import sys

import torch


def is_capturing(device: torch.device) -> bool:
    """Tells whether a graph captures the current stream of a device."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def refuse_new_tensors(devices: set[torch.device]) -> None:
    """Refuses new tensors in a capture: the graph would keep addresses that are unused or outdated, and fill nothing.

    Raises:
        RuntimeError: a graph captures one of the devices.
    """
    if any(map(is_capturing, devices)):
        raise RuntimeError(
            "the optimizer's tensors are new, or have moved since its last step, and a CUDA graph would keep their "
            "addresses; make one whole step (accumulate() included) before the capture"
        )


def has_static_memory(device: torch.device) -> bool:
    """Tells whether torch.compile keeps CUDA graphs on a device: each run writes the same gradients' memory."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if device.type != "cuda" or trees is None:
        return False
    return trees.get_manager(device.index or 0, create_if_none_exists=False) is not None
