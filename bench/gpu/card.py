"""What the measuring stages share: the benchmark of the first GPU, and parts that go on after one that fails.

In a dry run it is the benchmark of the CPU, with the kernels over the emulation where it compiles.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from accumfused import compiled
from accumfused.backends import why_not
from accumfused.backends.cuda import CudaBackend
from bench.ceilings import Ceilings, CopyLoops
from bench.suites import Bench, bench_of_gpu
from bench.workload import CPU

ROOT = Path(__file__).parents[2]
DRY = bool(os.environ.get("DRY"))


def run(parts: Mapping[str, Callable[[], object]]) -> int:
    """Runs the parts in turn, prints what fails, and returns an exit code."""
    failed = 0
    for name, part in parts.items():
        try:
            part()
        except Exception as error:
            failed += 1
            traceback.print_exc()
            print(f"{name}: FAILED: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    return min(failed, 1)


def card() -> Bench:
    """Returns the benchmark, with our fastest backend that runs."""
    if DRY:
        return Bench(Ceilings(lambda: CopyLoops(CPU, 40_000)), True, 1, on_gpu=True, backends=[_emulated()])
    device = torch.device("cuda", 0)
    return bench_of_gpu(device, ["triton" if why_not("cuda", device) else "cuda"], rounds=9)


def _emulated() -> str:
    sys.path.insert(0, str(ROOT / "tests"))
    import emulation
    import inside
    import pytest

    if compiled.module is None or emulation.why_not():
        return "auto"
    module = emulation.load()
    inside.replace_cuda(pytest.MonkeyPatch(), functools.partial(CudaBackend, module, module.Table))
    return "cuda"


def elements(bench: Bench, wanted: int, bytes_each: int) -> int:
    """Returns so many elements, or as many as fit; in a dry run next to none."""
    if bench.device == CPU:
        return min(wanted, 40_000)
    bench.release()
    return min(wanted, int(0.8 * torch.cuda.mem_get_info(bench.device)[0] / bytes_each))
