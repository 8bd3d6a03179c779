"""Builds accumfused._C with ninja. It needs pybind11 and a C++17 compiler, but no torch.

ACCUMFUSED_NATIVE=auto (default): where the build fails, pure Python installs and `python -m accumfused` says why;
1: a failed build is an error; 0: no native module. CXX, CXXFLAGS and LDFLAGS are honoured.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"
MODES = ("auto", "0", "1")

# No -march=native and no -ffast-math: one wheel runs anywhere, and every instruction set computes the same bits. The two
# -fno flags change no result; without them sqrt does not vectorise.
FLAGS = (
    "-std=c++17 -O3 -fPIC -fvisibility=hidden -Wall -Wextra -ffp-contract=off -fno-math-errno -fno-trapping-math"
).split()
V3 = ["-mavx2", "-mfma"]
INSTRUCTION_SETS = {
    "cpu/x86_64_v3.cpp": V3,
    "cpu/x86_64_v4.cpp": [*V3, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl"],
}


class BuildNative(build_ext):
    """One ninja file for all of csrc: parallel and incremental."""

    def build_extension(self, ext: Extension) -> None:
        module = Path(self.get_ext_fullpath(ext.name)).resolve()
        package = ROOT / "accumfused" if getattr(self, "editable_mode", False) else module.parent
        failure = package / "_native_error.txt"
        failure.unlink(missing_ok=True)
        try:
            self._ninja(module)
        except (OSError, RuntimeError, ImportError, subprocess.CalledProcessError) as error:
            if mode() == "1":
                raise RuntimeError(f"ACCUMFUSED_NATIVE=1, but the native module does not build: {error}") from error
            package.mkdir(parents=True, exist_ok=True)
            failure.write_text(f"{error}\n")
            print(f"warning: installing without the native module: {error}", file=sys.stderr)

    def _ninja(self, module: Path) -> None:
        build = Path(self.build_temp).resolve() / "native"
        build.mkdir(parents=True, exist_ok=True)
        module.parent.mkdir(parents=True, exist_ok=True)
        (build / "build.ninja").write_text(ninja_file(module))
        subprocess.run([ninja(), "-C", str(build), "-v" if self.verbose else "--quiet"], check=True)


def mode() -> str:
    value = os.environ.get("ACCUMFUSED_NATIVE", "auto")
    if value not in MODES:
        raise ValueError(f"ACCUMFUSED_NATIVE={value!r}: use one of {', '.join(MODES)}")
    return value


def ninja() -> str:
    found = shutil.which("ninja", path=sysconfig.get_path("scripts") + os.pathsep + os.environ.get("PATH", ""))
    if found is None:
        raise RuntimeError("ninja was not found; pip install ninja")
    return found


def compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        if shutil.which(name.split()[0]):
            return name
    raise RuntimeError(f"no C++17 compiler was found (tried {', '.join(names)}); install g++ or clang++, or set CXX")


def ninja_file(module: Path) -> str:
    import pybind11

    x86 = platform.machine() in ("x86_64", "AMD64")
    sources = sorted(p.relative_to(CSRC).as_posix() for p in CSRC.rglob("*.cpp"))
    if not x86:
        sources = [s for s in sources if s not in INSTRUCTION_SETS]
    # Compiled with OpenMP but not linked to a runtime: the symbols bind to the one that torch has loaded, and follow
    # torch.set_num_threads.
    mac = sys.platform == "darwin"
    openmp = ["-Xpreprocessor", "-fopenmp"] if mac else ["-fopenmp"]
    link = ["-undefined", "dynamic_lookup"] if mac else []
    include = [f"-I{sysconfig.get_path('include')}", f"-I{pybind11.get_include()}"]
    cxxflags, ldflags = os.environ.get("CXXFLAGS", ""), os.environ.get("LDFLAGS", "")
    lines = [
        f"cxx = {compiler()}",
        f"flags = {' '.join([*FLAGS, *openmp, *include])} {cxxflags}",
        "rule compile",
        "  command = $cxx $flags $extra -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = $in",
        "rule link",
        f"  command = $cxx -shared $in -o $out {' '.join(link)} {ldflags}",
        "  description = $out",
    ]
    objects = []
    for source in sources:
        objects.append(source.replace("/", "_") + ".o")
        lines.append(f"build {objects[-1]}: compile {escape(CSRC / source)}")
        lines.append(f"  extra = {' '.join(INSTRUCTION_SETS.get(source, []))}")
    lines += [f"build {escape(module)}: link {' '.join(objects)}", ""]
    return "\n".join(lines)


def escape(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


setup(
    ext_modules=[] if mode() == "0" else [Extension("accumfused._C", sources=[], optional=mode() == "auto")],
    cmdclass={"build_ext": BuildNative},
)
