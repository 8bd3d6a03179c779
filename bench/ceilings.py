"""The machine's own rate for each mix of reads and writes: what a pass over memory can be compared with.

A read-only pass, one that overwrites and one that reads and writes several streams reach very different rates (46 GB/s
against 21 on one machine), so every verb has a ceiling of its own mix. The loops are in ceiling.cpp. A GPU's ceiling is
a copy of as many bytes.
"""

from __future__ import annotations

import ctypes
import math
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.clock import Clock, HostClock

_SOURCE = str(Path(__file__).with_name("ceiling.cpp"))
PIECE = 32768  # elements: kPiece in ceiling.cpp


@dataclass(frozen=True)
class Mix:
    """Bytes that a pass reads and writes per parameter."""

    read: int
    written: int
    meaning: str

    @property
    def bytes(self) -> int:
        return self.read + self.written


MIXES = {
    "read": Mix(4, 0, "the norm of fp32 gradients"),
    "scale": Mix(4, 4, "fp32 gradients rewritten: clip, unscale"),
    "accumulate": Mix(8, 4, "fp32 gradients into fp32 accumulators"),
    "accumulate_bf16": Mix(6, 4, "16-bit gradients into fp32 accumulators"),
    "overwrite_bf16": Mix(2, 4, "first 16-bit gradients: accumulators only overwritten (non-temporal stores)"),
    "accumulate_in_bf16": Mix(4, 2, "16-bit gradients into 16-bit accumulators"),
    "copy_bf16": Mix(2, 2, "16-bit tensors copied (non-temporal stores)"),
    "narrow_bf16": Mix(4, 2, "fp32 parameters copied to bf16 ones (non-temporal stores)"),
    "step": Mix(16, 12, "AdamW: gradient, parameter and two states read, three written"),
    "step_rewriting_grad": Mix(16, 16, "the same with the gradient rewritten: torch's fused step with grad_scale"),
}


class CpuLoops:
    """ceiling.cpp.

    Args:
        elements: of each of the four streams, a multiple of PIECE.

    Raises:
        RuntimeError: no compiler, or one that fails.
    """

    def __init__(self, elements: int) -> None:
        self._library = compile_for_cpu()
        self.elements = elements
        self.count = self._library.loops()
        # Like parameters, the streams are torch's memory: huge pages, say, would be another machine.
        pattern = torch.randn(PIECE)
        self._streams = [pattern.repeat(elements // PIECE) for _ in range(4)]

    def run(self, mix: str, loop: int) -> None:
        """Makes one pass of a mix by one of its loops."""
        addresses = [ctypes.c_void_p(stream.data_ptr()) for stream in self._streams]
        run = getattr(self._library, mix)
        run.restype = ctypes.c_float
        result = run(loop, ctypes.c_int64(self.elements), torch.get_num_threads(), *addresses)
        assert math.isfinite(result), "the streams hold finite numbers"


class CopyLoops:
    """torch's copy of as many bytes as a mix reads and writes: on a GPU the mixes' rates are hardly apart.

    Args:
        elements: of a stream, as in CpuLoops.
    """

    count = 1

    def __init__(self, device: torch.device, elements: int) -> None:
        self.elements = elements
        most = max(mix.bytes for mix in MIXES.values()) * elements // 8
        self._source = torch.randn(PIECE, device=device).repeat(-(-most // PIECE))
        self._goal = torch.empty_like(self._source)

    def run(self, mix: str, loop: int) -> None:
        copied = MIXES[mix].bytes * self.elements // 8  # floats, read and written
        self._goal[:copied].copy_(self._source[:copied])


def compile_for_cpu() -> ctypes.CDLL:
    """Compiles ceiling.cpp into a temporary folder and loads it.

    Compiled with OpenMP but not linked to a runtime, like the package's own kernels: a second pool of threads would
    compete with torch's.
    """
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    compiler = next((name for name in names if shutil.which(shlex.split(name)[0])), None)
    if compiler is None:
        raise RuntimeError(f"no C++ compiler was found (tried {', '.join(names)}); install g++ or set CXX")
    flags = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-c"]
    with tempfile.TemporaryDirectory() as folder:
        made, library = f"{folder}/ceiling.o", f"{folder}/ceiling.so"
        for step in ([*flags, _SOURCE, "-o", made], ["-shared", made, "-o", library]):
            done = subprocess.run([*shlex.split(compiler), *step], capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"{compiler} failed:\n{done.stderr.strip()}")
        try:
            return ctypes.CDLL(library)
        except OSError as error:
            raise RuntimeError(f"the compiled loops do not load: {error}") from error


class Ceilings:
    """Times the loops; where they cannot be made `reason` says why.

    Args:
        make: makes the loops, or raises RuntimeError.

    `rates`: mix -> bytes a second, of every measurement.
    """

    def __init__(self, make: Callable[[], CpuLoops | CopyLoops], clock: Clock | None = None) -> None:
        self.reason: str | None = None
        self.rates: dict[str, list[float]] = {}
        self._clock = clock or HostClock()
        self._loop: dict[str, int] = {}
        self._loops: CpuLoops | CopyLoops | None = None
        try:
            self._loops = make()
        except RuntimeError as error:
            self.reason = str(error)

    def measure(self, mixes: Sequence[str]) -> dict[str, float]:
        """Times each mix once more, with the loop that was the fastest when the mix was met first.

        Returns:
            Mix -> bytes a second, this time; empty where there are no loops.
        """
        if self._loops is None:
            return {}
        for mix in mixes:
            if mix not in self._loop:
                self._loop[mix] = self._fastest_loop(self._loops, mix)
            rate = MIXES[mix].bytes * self._loops.elements / self._time(self._loops, mix, self._loop[mix])
            self.rates.setdefault(mix, []).append(rate)
        return {mix: self.rates[mix][-1] for mix in mixes}

    def _fastest_loop(self, loops: CpuLoops | CopyLoops, mix: str) -> int:
        rounds = [[self._time(loops, mix, loop) for loop in range(loops.count)] for _ in range(4)]
        return min(range(loops.count), key=lambda loop: min(seconds[loop] for seconds in rounds))

    def _time(self, loops: CpuLoops | CopyLoops, mix: str, loop: int) -> float:
        return self._clock.seconds(lambda: loops.run(mix, loop))
