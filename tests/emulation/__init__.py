"""csrc/cuda on the CPU: builds `emulated`, a Python module of the kernels over the emulation in cuda_runtime.h."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from accumfused.rules import to_cpp

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLACE = ROOT / "build" / "emulation"
OBJECTS = PLACE / "shared"  # of both modules
OWN = [HERE / "module.cpp", ROOT / "csrc" / "cuda" / "launch.cu"]  # what the name of a module and its checks change
SHARED = [ROOT / "csrc" / "table.cpp", ROOT / "csrc" / "cuda" / "binding.cpp"]
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wall"]
FLAGS += ["-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE", '-DAF_CUDA_ARCHS="emulated"', '-DAF_CUDA_VERSION="none"']
# The compiler calls module.cpp before each access to memory, and for each address that is not aligned. The sanitizer
# for addresses would do so, too, but leaves out what lies in a variable for certain: shared memory at a constant index.
CHECKS = ["-fsanitize=thread,alignment"]


def why_not() -> str | None:
    """Why there is no emulation here."""
    if not (ROOT / "csrc").exists():
        return "needs the source"
    return None if shutil.which("g++") else "needs g++"


def build(folder: Path, *kernel_flags: str, name: str = "emulated") -> Path:
    """Compiles into a folder what is out of date there, the kernels with more flags; the module's path.

    Modules of one name are one module to a process, wherever they lie.
    """
    folder.mkdir(parents=True, exist_ok=True)
    include = _include(folder)
    newest = max(
        path.stat().st_mtime for place in (ROOT / "csrc", HERE) for path in place.rglob("*.*") if path.suffix != ".pyc"
    )
    newest = max(newest, (folder / "functors.h").stat().st_mtime)
    module = folder / f"{name}.so"

    def compile_one(source: Path) -> str:
        own, flags = source in OWN, [*FLAGS, *(kernel_flags if source.suffix == ".cu" else [])]
        out = (folder if own else OBJECTS) / f"{source.name}.{source.parent.name}.o"
        with _locked(Path(f"{out}.lock")):
            if own or not out.exists() or out.stat().st_mtime < newest:
                flags += [f"-DAF_EMULATED={name}"] if own else []
                command = ["g++", *flags, *include, "-x", "c++", "-c", str(source), "-o", f"{out}.part"]
                subprocess.run(command, check=True)
                Path(f"{out}.part").replace(out)
        return str(out)

    with _locked(folder / "lock"):
        if not module.exists() or module.stat().st_mtime < newest:
            OBJECTS.mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor() as pool:
                objects = list(pool.map(compile_one, [*OWN, *SHARED]))
            subprocess.run(["g++", "-shared", *objects, "-o", str(module)], check=True)
    return module


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Test processes side by side, and threads, wait for each other."""
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _include(folder: Path) -> list[str]:
    """The compiler's flags, once the rules are printed into the folder."""
    import pybind11

    to_cpp.write(folder)
    return [f"-I{HERE}", f"-I{folder}", f"-I{sysconfig.get_path('include')}", f"-I{pybind11.get_include()}"]


def build_program(name: str, folder: Path) -> Path:
    """A program over the emulation, for this processor: searches go through many numbers."""
    program = folder / Path(name).stem
    to_cpp.write(folder)
    flags = [*FLAGS, "-O2", "-march=native", f"-I{HERE}", f"-I{folder}"]
    subprocess.run(["g++", *flags, str(HERE / name), "-o", str(program)], check=True)
    return program


def load(*, checked: bool = False) -> ModuleType:
    """The module, built once for all test processes; checked: its kernels' accesses are."""
    path = build(PLACE / "checked", *CHECKS, name="emulated_checked") if checked else build(PLACE)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
