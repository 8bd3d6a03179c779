"""The machine's own rate for each mix of reads and writes: what a pass over memory can be compared with.

A read-only pass, one that overwrites and one that reads and writes several streams reach very different rates (46 GB/s
against 21 on one machine), so every verb has a ceiling of its own mix. ceiling.cpp holds the loops.
"""

from __future__ import annotations

import ctypes
import math
import shlex
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import environ
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("ceiling.cpp")
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
    "narrow_bf16": Mix(4, 2, "fp32 parameters copied to bf16 ones (non-temporal stores)"),
    "step": Mix(16, 12, "AdamW: gradient, parameter and two states read, three written"),
    "step_rewriting_grad": Mix(16, 16, "the same with the gradient rewritten: torch's fused step with grad_scale"),
}


def moved_bytes(passes: Sequence[str]) -> int:
    return sum(MIXES[name].bytes for name in passes)


def seconds_at(rates: Mapping[str, float], passes: Sequence[str] | None) -> float | None:
    """What these passes take per parameter at these rates; None where one is not known."""
    if not passes or not all(mix in rates for mix in passes):
        return None
    return sum(MIXES[mix].bytes / rates[mix] for mix in passes)


class Ceilings:
    """Times the loops of ceiling.cpp; without a compiler `reason` says why there are none.

    Args:
        elements: of each of the four streams; the default is 1 GiB in all, far beyond any cache.
    """

    def __init__(self, elements: int = 2048 * PIECE) -> None:
        self.reason: str | None = None
        self._library: ctypes.CDLL | None = None
        self._seconds: dict[str, list[float]] = {}
        self._loop: dict[str, int] = {}
        self._elements = elements
        try:
            self._library = _load()
        except RuntimeError as error:
            self.reason = str(error)
            return
        # Like parameters, the streams are torch's memory: huge pages, say, would be another machine.
        pattern = torch.randn(PIECE)
        self._streams = [pattern.repeat(elements // PIECE) for _ in range(4)]

    def measure(self, mixes: Sequence[str]) -> dict[str, float]:
        """Times each mix once more, with the loop that was the fastest when the mix was met first.

        Returns:
            Mix -> bytes a second, this time; empty without a compiler.
        """
        rates: dict[str, float] = {}
        if self._library is None:
            return rates
        for mix in mixes:
            if mix not in self._loop:
                self._loop[mix] = self._fastest_loop(mix)
                self._seconds[mix] = []
            seconds = self._time(mix, self._loop[mix])
            self._seconds[mix].append(seconds)
            rates[mix] = MIXES[mix].bytes * self._elements / seconds
        return rates

    def best_rates(self) -> dict[str, float]:
        """Mix -> the best so far, in bytes a second."""
        return {mix: MIXES[mix].bytes * self._elements / min(seconds) for mix, seconds in self._seconds.items()}

    def median_rates(self) -> dict[str, float]:
        medians = {mix: statistics.median(seconds) for mix, seconds in self._seconds.items()}
        return {mix: MIXES[mix].bytes * self._elements / seconds for mix, seconds in medians.items()}

    def _fastest_loop(self, mix: str) -> int:
        assert self._library is not None
        loops = range(self._library.loops())
        rounds = [[self._time(mix, loop) for loop in loops] for _ in range(4)]
        return min(loops, key=lambda loop: min(seconds[loop] for seconds in rounds))

    def _time(self, mix: str, loop: int) -> float:
        addresses = [ctypes.c_void_p(stream.data_ptr()) for stream in self._streams]
        run = getattr(self._library, mix)
        run.restype = ctypes.c_float
        start = time.perf_counter()
        result = run(loop, ctypes.c_int64(self._elements), torch.get_num_threads(), *addresses)
        seconds = time.perf_counter() - start
        assert math.isfinite(result), "the streams hold finite numbers"
        return seconds


def _load() -> ctypes.CDLL:
    """Compiles ceiling.cpp into a temporary folder and loads it.

    Compiled with OpenMP but not linked to a runtime, like the package's own kernels: a second pool of threads would
    compete with torch's.

    Raises:
        RuntimeError: no compiler, or one that fails.
    """
    names = [environ["CXX"]] if environ.get("CXX") else ["c++", "g++", "clang++"]
    compiler = next((name for name in names if shutil.which(shlex.split(name)[0])), None)
    if compiler is None:
        raise RuntimeError(f"no C++ compiler was found (tried {', '.join(names)}); install g++ or set CXX")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder)
        flags = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-c"]
        commands = [
            [*shlex.split(compiler), *flags, str(SOURCE), "-o", str(built / "ceiling.o")],
            [*shlex.split(compiler), "-shared", str(built / "ceiling.o"), "-o", str(built / "ceiling.so")],
        ]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"{compiler} failed:\n{done.stderr.strip()}")
        try:
            return ctypes.CDLL(str(built / "ceiling.so"))
        except OSError as error:
            raise RuntimeError(f"the compiled loops do not load: {error}") from error
