"""Builds accumfused._C with ninja. It needs pybind11 and a C++17 compiler, but no torch.

ACCUMFUSED_NATIVE=auto (default): where the build fails, pure Python installs and `python -m accumfused` says why;
1: a failed build is an error; 0: no native module. CXX, CXXFLAGS and LDFLAGS are honoured.
"""

import itertools
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"
MODES = ("auto", "0", "1")
REASON = "_native_error.txt"  # why there is no native module; lies where the module would, and _native.py reads it
REASON_LINES = 20

# No -march=native and no -ffast-math: one wheel runs anywhere, and every instruction set computes the same bits. The
# last two change no result; without them sqrt does not vectorise.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-ffp-contract=off"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math"]
V3 = ["-mavx2", "-mfma"]
INSTRUCTION_SETS = {
    "cpu/x86_64_v3.cpp": V3,
    "cpu/x86_64_v4.cpp": [*V3, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl"],
}
PROBE = """
#if __cplusplus < 201703L
#error "this compiler has no C++17"
#endif
#include <optional>
"""


class BuildNative(build_ext):
    """One ninja file for all of csrc: parallel and incremental."""

    def run(self) -> None:
        # setuptools forgets `inplace` while it builds: ask before.
        in_place = bool(self.inplace or self.editable_mode)
        self.home = (ROOT if in_place else Path(self.build_lib).resolve()) / "accumfused"
        super().run()

    def build_extension(self, ext: Extension) -> None:
        module = Path(self.get_ext_fullpath(ext.name)).resolve()
        try:
            built = self._ninja()
        except (OSError, RuntimeError, ImportError) as error:
            module.unlink(missing_ok=True)
            forget(self.home)
            if mode() == "1":
                raise RuntimeError(f"ACCUMFUSED_NATIVE=1, but the native module does not build: {error}") from None
            self.home.mkdir(parents=True, exist_ok=True)
            (self.home / REASON).write_text(f"{error}\n")
            print(f"warning: installing without the native module: {error}", file=sys.stderr)
            return
        (self.home / REASON).unlink(missing_ok=True)
        module.parent.mkdir(parents=True, exist_ok=True)
        module.unlink(missing_ok=True)  # a running process may have the old file mapped: no write into it
        shutil.copy2(built, module)

    def _ninja(self) -> Path:
        # pip builds an editable install in a temporary folder; ours keeps it incremental.
        temp = ROOT / "build" / f"temp.{self.plat_name}-{sys.implementation.cache_tag}"
        build = (temp if self.editable_mode else Path(self.build_temp).resolve()) / "native"
        build.mkdir(parents=True, exist_ok=True)
        (build / "build.ninja").write_text(ninja_file())
        command = [ninja(), "-C", str(build), *([] if self.verbose else ["--quiet"])]
        lines = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="")
                lines.append(line)
        if process.returncode != 0:
            raise RuntimeError(f"{compiler()} failed:\n{the_error_in(lines)}")
        return build / "_C.so"


class BuildPython(build_py):
    """ACCUMFUSED_NATIVE=0 leaves no native module of an earlier editable install behind."""

    def run(self) -> None:
        if self.editable_mode and mode() == "0":
            forget(ROOT / "accumfused")
        super().run()


def forget(package: Path) -> None:
    """Removes what an earlier build left: a stale module would be imported in silence."""
    for name in (f"_C{sysconfig.get_config_var('EXT_SUFFIX')}", REASON):
        (package / name).unlink(missing_ok=True)


def the_error_in(lines: list[str]) -> str:
    """The first failure from its error on (compilers bury it under what follows), else the last lines."""
    first = next((i for i, line in enumerate(lines) if "error:" in line), None)
    if first is None:
        return "".join(lines[-REASON_LINES:]).strip()
    one = itertools.takewhile(lambda line: not line.startswith(("FAILED:", "ninja:")), lines[first:])
    return "".join(itertools.islice(one, REASON_LINES)).strip()


def mode() -> str:
    value = os.environ.get("ACCUMFUSED_NATIVE", "auto")
    if value not in MODES:
        raise ValueError(f"ACCUMFUSED_NATIVE={value!r}: use one of {', '.join(MODES)}")
    return value


def ninja() -> str:
    places = [sysconfig.get_path("scripts"), os.environ.get("PATH", "")]
    try:
        from ninja import BIN_DIR

        places.insert(0, BIN_DIR)
    except ImportError:
        pass
    found = shutil.which("ninja", path=os.pathsep.join(places))
    if found is None:
        raise RuntimeError("ninja was not found; pip install ninja")
    return found


def compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        if shutil.which(shlex.split(name)[0]):
            return name
    raise RuntimeError(f"no C++17 compiler was found (tried {', '.join(names)}); install g++ or clang++, or set CXX")


def check_compiler(flags: list[str]) -> None:
    """Says what is missing in one line, where compiling csrc would end in a page of errors.

    Raises:
        RuntimeError: no compiler, one without C++17, or no Python headers.
    """
    command = [*shlex.split(compiler()), *flags, "-fsyntax-only", "-x", "c++", "-"]
    probe = subprocess.run(command, input=PROBE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if probe.returncode != 0:
        output = the_error_in(probe.stdout.splitlines(keepends=True)) or f"exit status {probe.returncode}, no output"
        raise RuntimeError(f"{compiler()} cannot compile C++17; install g++ or clang++, or set CXX:\n{output}")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise RuntimeError(f"no Python.h in {headers}; install this Python's headers (python3-dev, python3-devel)")


def ninja_file() -> str:
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
    check_compiler([*FLAGS, *shlex.split(cxxflags)])
    flags = f"{shlex.join([*FLAGS, *openmp, *include])} {cxxflags}"
    lines = [
        f"cxx = {compiler().replace('$', '$$')}",
        f"flags = {flags.replace('$', '$$')}",
        "rule compile",
        "  command = $cxx $flags $extra -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = $in",
        "rule link",
        f"  command = $cxx -shared $in -o $out {' '.join(link)} {ldflags.replace('$', '$$')}",
        "  description = $out",
    ]
    objects = []
    for source in sources:
        objects.append(source.replace("/", "_") + ".o")
        lines.append(f"build {objects[-1]}: compile {escape(CSRC / source)}")
        lines.append(f"  extra = {' '.join(INSTRUCTION_SETS.get(source, []))}")
    lines += [f"build _C.so: link {' '.join(objects)}", ""]
    return "\n".join(lines)


def escape(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


setup(
    ext_modules=[] if mode() == "0" else [Extension("accumfused._C", sources=[], optional=mode() == "auto")],
    cmdclass={"build_ext": BuildNative, "build_py": BuildPython},
)
