"""The benchmark of the first GPU, or in a dry run of the CPU, with the kernels over the emulation where it compiles."""

from __future__ import annotations

import functools
import os
import sys

import torch

from accumfused import compiled
from accumfused.backends import why_not
from accumfused.backends.cuda import CudaBackend
from bench.ceilings import Ceilings, CopyLoops
from bench.gpu.runner import DRY, ROOT
from bench.suites import Bench, bench_of_gpu
from bench.workload import CPU


def card() -> Bench:
    """Returns the benchmark, with our fastest backend that runs."""
    if os.environ.get(DRY):
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
