"""The loops behind the ceilings: ceiling.cpp, compiled for the machine that it runs on; on a GPU a copy."""

from __future__ import annotations

import ctypes
import math
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from os import environ
from pathlib import Path

import torch

from bench.ceilings import MIXES

_HERE = Path(__file__).parent
PIECE = 32768  # elements: kPiece in ceiling.cpp


class CpuLoops:
    """ceiling.cpp.

    Args:
        elements: of each of the four streams; the default is 1 GiB in all, far beyond any cache.

    Raises:
        RuntimeError: no compiler, or one that fails.
    """

    def __init__(self, elements: int = 2048 * PIECE) -> None:
        self._library = compile_for_cpu()
        self.elements = elements
        self.count = self._library.loops()
        # Like parameters, the streams are torch's memory: huge pages, say, would be another machine.
        pattern = torch.randn(PIECE)
        self._streams = [pattern.repeat(elements // PIECE) for _ in range(4)]

    def run(self, mix: str, loop: int) -> None:
        addresses = [ctypes.c_void_p(stream.data_ptr()) for stream in self._streams]
        run = getattr(self._library, mix)
        run.restype = ctypes.c_float
        result = run(loop, ctypes.c_int64(self.elements), torch.get_num_threads(), *addresses)
        assert math.isfinite(result), "the streams hold finite numbers"


class CopyLoops:
    """torch's copy of as many bytes as a mix reads and writes: on a GPU the mixes' rates are hardly apart.

    Args:
        elements: of a stream, as in CpuLoops; the default is that of GPT-2, 4 GiB in all.
    """

    count = 1

    def __init__(self, device: torch.device, elements: int = 1 << 27) -> None:
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
    names = [environ["CXX"]] if environ.get("CXX") else ["c++", "g++", "clang++"]
    compiler = next((name for name in names if shutil.which(shlex.split(name)[0])), None)
    if compiler is None:
        raise RuntimeError(f"no C++ compiler was found (tried {', '.join(names)}); install g++ or set CXX")
    flags = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-c"]
    with tempfile.TemporaryDirectory() as folder:
        made, library = Path(folder) / "ceiling.o", Path(folder) / "ceiling.so"
        _call([*shlex.split(compiler), *flags, str(_HERE / "ceiling.cpp"), "-o", str(made)])
        _call([*shlex.split(compiler), "-shared", str(made), "-o", str(library)])
        return _load(library)


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed:\n{done.stderr.strip()}")


def _load(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise RuntimeError(f"the compiled loops do not load: {error}") from error
