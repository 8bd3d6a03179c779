"""Stopwatches: for work that is done when a call returns, and for work that a GPU does later.

`warm_ups` are the uncounted rounds before the first counted one. `host_seconds` says how long a call takes to return,
`seconds` how long its work takes, given what `host_seconds` has said of it before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

_HIGHEST_HERTZ = 2e9  # of a multiprocessor: a pause of so many cycles a second is at least as long as asked for
_LONGEST_PAUSE = 0.5  # seconds


class HostClock:
    """For a CPU: the work is done when the call returns."""

    warm_ups = 1

    def seconds(self, run: Callable[[], Any], host_seconds: float = 0.0) -> float:
        return self.host_seconds(run)

    def host_seconds(self, run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


class CudaClock:
    """For a GPU: events around the work, which starts with nothing of it in the caches.

    The GPU is kept busy until the host has sent everything, as it is by a backward pass in training: the time is the
    GPU's own. (What itself waits for the GPU, or sends more than the queue of about 1000 launches holds, leaves gaps.)
    The host's time is that of the calls, to an idle GPU.
    """

    warm_ups = 2  # the first one compiles; the second tells how long the host needs

    def __init__(self, device: torch.device) -> None:
        caches = torch.cuda.get_device_properties(device).L2_cache_size
        self._others = torch.randn(caches, device=device)  # four times the L2's bytes

    def seconds(self, run: Callable[[], Any], host_seconds: float = 0.0) -> float:
        self._others.sum()  # read, not written: nothing of it has to be written back during the time
        pause = min(1.5 * host_seconds + 2e-4, _LONGEST_PAUSE)
        torch.cuda._sleep(int(pause * _HIGHEST_HERTZ))  # type: ignore[no-untyped-call]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def host_seconds(self, run: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        torch.cuda.synchronize()
        return seconds


Clock = HostClock | CudaClock
