"""The loops behind the ceilings: ceiling.cpp and ceiling.cu, compiled for the machine that they run on."""

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

_HERE = Path(__file__).parent
PIECE = 32768  # elements: kPiece in ceiling.cpp
CUDA_PIECE = 65536  # elements: what every tile in ceiling.cu divides


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

    def check(self, mix: str, loop: int) -> None:
        """Nothing: what the loops share the work by is OpenMP's."""


class CudaLoops:
    """ceiling.cu, on torch's current stream.

    Args:
        elements: of each stream; the default is that of GPT-2, 2.25 GiB in all.

    Raises:
        RuntimeError: no nvcc, or one that fails.
    """

    def __init__(self, device: torch.device, elements: int = 2048 * CUDA_PIECE, library: ctypes.CDLL | None = None):
        self._library = library or compile_for_gpu(device)
        self.elements = elements
        self.count = self._library.loops()
        self._library.reason.restype = ctypes.c_char_p
        self._device = device
        pattern = torch.randn(CUDA_PIECE, device=device)
        self._streams = [pattern.roll(i).repeat(elements // CUDA_PIECE) for i in range(4)]
        self._half = pattern.bfloat16().repeat(elements // CUDA_PIECE)
        self._sum = torch.zeros((), device=device)

    def run(self, mix: str, loop: int, sum_above: float = math.inf) -> None:
        queue = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
        addresses = [ctypes.c_void_p(stream.data_ptr()) for stream in (*self._streams, self._half)]
        status = getattr(self._library, f"mix_{mix}")(
            loop, ctypes.c_int64(self.elements), ctypes.c_void_p(queue), *addresses,
            ctypes.c_float(sum_above), ctypes.c_void_p(self._sum.data_ptr()),
        )  # fmt: skip
        if status != 0:
            raise RuntimeError(f"{mix}, loop {loop}: {self._library.reason(status).decode()}")

    def check(self, mix: str, loop: int) -> None:
        streams = self._streams
        before = [stream.clone() for stream in streams]
        a, b, c, d = before
        self._sum.zero_()
        self.run(mix, loop, sum_above=-1.0)
        half = self._half.float()
        expected = {
            "read": before,
            "scale": [-a, b, c, d],
            "accumulate": [a * 0.5 + d, b, c, d],
            "accumulate_bf16": [a * 0.5 + half, b, c, d],
            "overwrite_bf16": [half, b, c, d],
            "step": [a * 0.5 + d, b * 0.5 + d, c * 0.5 + d, d],
            "step_rewriting_grad": [a * 0.5 + d, b * 0.5 + d, c * 0.5 + d, -d],
        }
        if mix == "narrow_bf16":
            # Half of a is written: with d, its low 16 bits cut off.
            found = streams[0].view(torch.bfloat16)[: self.elements].float()
            bits = d.view(torch.int32) & -65536
            right = torch.equal(found, bits.view(torch.float32)) and torch.equal(
                streams[0][len(a) // 2 :], a[len(a) // 2 :]
            )
        else:
            right = all(torch.allclose(x, y, rtol=1e-6, atol=1e-6) for x, y in zip(streams, expected[mix], strict=True))
        if mix == "read":
            right = right and math.isclose(float(self._sum), float(d.double().square().sum()), rel_tol=1e-3)
        for stream, kept in zip(streams, before, strict=True):
            stream.copy_(kept)
        if not right:
            raise RuntimeError(f"loop {loop} of {mix} in ceiling.cu does not do what it should")


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


def compile_for_gpu(device: torch.device) -> ctypes.CDLL:
    """Compiles ceiling.cu for this GPU into a temporary folder and loads it."""
    compiler = shutil.which(environ.get("NVCC", "nvcc"))
    if compiler is None and environ.get("CUDA_HOME"):
        compiler = shutil.which("nvcc", path=str(Path(environ["CUDA_HOME"]) / "bin"))
    if compiler is None:
        raise RuntimeError("nvcc was not found; put CUDA's bin folder on the PATH, or set NVCC or CUDA_HOME")
    major, minor = torch.cuda.get_device_capability(device)
    flags = ["-std=c++17", "-O3", f"-arch=sm_{major}{minor}", "-Xcompiler", "-fPIC", "-shared"]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "ceiling.so"
        _call([compiler, *flags, str(_HERE / "ceiling.cu"), "-o", str(library)])
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
