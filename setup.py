"""Builds accumfused._C with ninja. It needs pybind11 and a C++17 compiler, but no torch; for the GPU's kernels nvcc.

ACCUMFUSED_NATIVE=auto (default): where the build fails, pure Python installs and `python -m accumfused` says why;
1: a failed build is an error; 0: no native module. ACCUMFUSED_CUDA: the same for the part that nvcc compiles.
ACCUMFUSED_CUDA_ARCHS="80 90": compute capabilities to build for, in place of all that nvcc knows. CXX, CXXFLAGS,
LDSHARED (what links, in place of "$CXX -shared"), LDFLAGS and CUDACXX (nvcc) are honoured.
"""

import contextlib
import importlib
import itertools
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
# The package imports torch, which an isolated build does not have; these modules of it do not.
sys.modules["accumfused"] = types.ModuleType("accumfused")
sys.modules["accumfused"].__path__ = [str(ROOT / "accumfused")]
compiling = importlib.import_module("accumfused.compiling")
to_cpp = importlib.import_module("accumfused.rules.to_cpp")

CSRC = ROOT / "csrc"
MODES = ("auto", "0", "1")
SETTINGS = ("ACCUMFUSED_NATIVE", "ACCUMFUSED_CUDA", "ACCUMFUSED_CUDA_ARCHS", "ACCUMFUSED_CACHE")
REASON = "_native_error.txt"  # why there is no native module; lies where the module would, and compiled.py reads it
CUDA_REASON = "_cuda_error.txt"  # why that has no CUDA kernels
REASON_LINES = 20

# No contraction into FMA; what else IEEE asks for (roots, division, subnormals) is nvcc's default.
NVCC_FLAGS = ["-std=c++17", "-O3", "--fmad=false", "--threads=0", "-Xcompiler=-fPIC,-fvisibility=hidden"]
OLDEST_NVCC = (12, 4)
# Compute capability -> the nvcc that brought it. Cards of the same major number run the one below. All others compile
# the PTX of the first or the last when they first load it. The first is PTX alone, unless it is asked for.
ARCHS = {75: (12, 4), 80: (12, 4), 90: (12, 4), 100: (12, 8), 120: (12, 8)}
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
        forget(self.home)
        self.home.mkdir(parents=True, exist_ok=True)
        try:
            built = self._with_or_without_cuda()
        except (OSError, RuntimeError) as error:
            if mode("NATIVE") == "1":
                raise RuntimeError(f"ACCUMFUSED_NATIVE=1, but the native module does not build: {error}") from None
            if mode("CUDA") == "1":
                raise
            (self.home / REASON).write_text(f"{error}\n")
            print(f"warning: installing without the native module: {error}", file=sys.stderr)
            return
        module.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built, module)

    def _with_or_without_cuda(self) -> Path:
        if mode("CUDA") == "0":
            (self.home / CUDA_REASON).write_text("ACCUMFUSED_CUDA=0\n")
            return self._ninja(None)
        try:
            return self._ninja(Nvcc())
        except (OSError, RuntimeError) as error:
            if mode("CUDA") == "1":
                raise RuntimeError(f"ACCUMFUSED_CUDA=1, but the kernels for GPUs do not build: {error}") from None
            built = self._ninja(None)  # where the rest does not build either, that is the reason to give
            (self.home / CUDA_REASON).write_text(f"{error}\n")
            print(f"installing without kernels for GPUs: {error}", file=sys.stderr)
            return built

    def _ninja(self, nvcc: "Nvcc | None") -> Path:
        # pip builds an editable install in a temporary folder; ours keeps it incremental.
        temp = ROOT / "build" / f"temp.{self.plat_name}-{sys.implementation.cache_tag}"
        build = (temp if self.editable_mode else Path(self.build_temp).resolve()) / "native"
        build.mkdir(parents=True, exist_ok=True)
        to_cpp.write(build)
        (build / "build.ninja").write_text(ninja_file(build, nvcc))
        command = [ninja(), "-C", str(build), *([] if self.verbose else ["--quiet"])]
        announce(command, nvcc)
        lines = []
        # Under `make -j` ninja would look for make's jobserver, whose files Python does not pass on.
        known = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
        with subprocess.Popen(
            command, env=known, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        if process.returncode != 0:
            raise RuntimeError(f"the compiler failed:\n{the_error_in(lines)}")
        return build / "_C.so"


class BuildPython(build_py):
    """Adds csrc to the package, for rules that users compile; an editable install has it beside the package.

    ACCUMFUSED_NATIVE=0 leaves no native module of an earlier editable install behind.
    """

    def run(self) -> None:
        if self.editable_mode and mode("NATIVE") == "0":
            forget(ROOT / "accumfused")
        super().run()
        if not self.editable_mode:
            home = Path(self.build_lib) / "accumfused" / "csrc"
            for header in (*CSRC.glob("*.h"), *CSRC.glob("cpu/*.h"), *CSRC.glob("cpu/*.inl")):
                (home / header.relative_to(CSRC)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(header, home / header.relative_to(CSRC))


def announce(command: list[str], nvcc: "Nvcc | None") -> None:
    """Says what ninja is about to compile; ninja itself names a file when that is done, and nvcc takes minutes.

    Where pip has our stdout, which it shows only with -v, the line goes to the terminal too, if there is one.
    """
    said = subprocess.run([*command, "-n", "-v"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    files = said.count(" -c ")
    if files == 0:
        return
    text = f"accumfused: compiling {files} file{'s' if files > 1 else ''}"
    if nvcc is not None and "launch.cu" in said:
        archs = " ".join(map(str, nvcc.archs))
        text += f", for some minutes: kernels for GPUs of compute capability {archs} too (ACCUMFUSED_CUDA=0: without)"
    print(text, flush=True)
    if "PIP_BUILD_TRACKER" in os.environ:
        with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
            terminal.write(f"\n{text}\n")


def forget(package: Path) -> None:
    """Removes what an earlier build left: a stale module would be imported in silence.

    A running process may have the old file mapped, so it is never written into.
    """
    for name in (f"_C{sysconfig.get_config_var('EXT_SUFFIX')}", REASON, CUDA_REASON):
        (package / name).unlink(missing_ok=True)


def the_error_in(lines: list[str]) -> str:
    """The first failure from its error on (compilers bury it under what follows), else the last lines."""
    first = next((i for i, line in enumerate(lines) if "error:" in line), None)
    if first is None:
        return "".join(lines[-REASON_LINES:]).strip()
    one = itertools.takewhile(lambda line: not line.startswith(("FAILED:", "ninja:")), lines[first:])
    return "".join(itertools.islice(one, REASON_LINES)).strip()


def check_settings() -> None:
    """A name that is spelt wrongly would change nothing, in silence."""
    names = [name for name in os.environ if name.startswith("ACCUMFUSED_") and not name.startswith("ACCUMFUSED_GPU_")]
    if unknown := sorted({*names} - {*SETTINGS}):
        raise ValueError(f"{unknown[0]} is set, which is no setting of accumfused: use one of {', '.join(SETTINGS)}")
    for part in ("NATIVE", "CUDA"):
        mode(part)
    asked_archs()


def asked_archs() -> list[int]:
    asked = os.environ.get("ACCUMFUSED_CUDA_ARCHS", "")
    words = asked.replace(",", " ").replace(";", " ").split()
    if not all(map(str.isdigit, words)):
        raise ValueError(f'ACCUMFUSED_CUDA_ARCHS={asked!r}: use compute capabilities like "80 90"')
    return sorted(map(int, words))


def mode(part: str) -> str:
    value = os.environ.get(f"ACCUMFUSED_{part}", "auto")
    if value not in MODES:
        raise ValueError(f"ACCUMFUSED_{part}={value!r}: use one of {', '.join(MODES)}")
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


class Nvcc:
    """NVIDIA's compiler, and what it is to build for.

    Raises:
        RuntimeError: there is none, it is too old, does not take the host's compiler, or cannot build for what
            ACCUMFUSED_CUDA_ARCHS asks for.
    """

    def __init__(self) -> None:
        homes = [f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
        places = [*homes, os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
        found = shutil.which(os.environ.get("CUDACXX", "nvcc"), path=os.pathsep.join(places))
        if found is None:
            raise RuntimeError("no nvcc was found; install the CUDA toolkit, or set CUDA_HOME or CUDACXX")
        self.path = found
        said = self._says("--version")
        release = re.search(r"release (\d+)\.(\d+)", said)
        if release is None:
            raise RuntimeError(f"{found} is no nvcc: {said.strip()}")
        self.version = (int(release[1]), int(release[2]))
        if self.version < OLDEST_NVCC:
            raise RuntimeError(f"{found} is {dotted(self.version)}; install CUDA {dotted(OLDEST_NVCC)} or newer")
        listed = set(map(int, re.findall(r"compute_(\d+)", self._says("--list-gpu-arch"))))
        known = [arch for arch, since in ARCHS.items() if self.version >= since and (not listed or arch in listed)]
        asked = asked_archs()
        self.archs = asked or known
        self.images = self.archs if asked else self.archs[1:]
        if listed and (strange := sorted({*self.archs} - listed)):
            raise RuntimeError(
                f"nvcc {dotted(self.version)} does not build for compute capability {strange[0]}, but for "
                f"{min(listed)} to {max(listed)}; change ACCUMFUSED_CUDA_ARCHS, or CUDA_HOME to another toolkit"
            )
        self.host = next(word for word in reversed(shlex.split(compiling.compiler())) if not word.startswith("-"))
        probe = self._says("-ccbin", self.host, "-E", "-x", "cu", "-o", os.devnull, os.devnull)
        if refused := re.search(r"#error -- (unsupported .*?)!? The nvcc flag", probe):
            raise RuntimeError(
                f"nvcc {dotted(self.version)} does not take {self.host} ({refused[1]}); set CXX to a compiler that it "
                "takes, or CUDA_HOME to another CUDA toolkit"
            )

    @property
    def flags(self) -> list[str]:
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in self.images]
        ends = sorted({self.archs[0], self.archs[-1]})
        ptx = [f"-gencode=arch=compute_{arch},code=compute_{arch}" for arch in ends]
        # A fifth of the bytes on disk. Drivers for CUDA 13 unpack it, some for CUDA 12 do not.
        small = ["--compress-mode=size"] if self.version >= (13, 0) else []
        return [*NVCC_FLAGS, *small, "-ccbin", self.host, *codes, *ptx]

    @property
    def link_flags(self) -> list[str]:
        """The static runtime lies where nvcc itself would look for it."""
        libraries = re.search(r"LIBRARIES=(.*)", self._says("--dryrun", "x.cu")) or [None, ""]
        return [*shlex.split(libraries[1]), "-lcudart_static", "-ldl", "-lrt", "-lpthread"]

    @property
    def defines(self) -> list[str]:
        archs = " ".join(map(str, self.images))
        return [f'-DAF_CUDA_ARCHS="{archs}"', f'-DAF_CUDA_VERSION="{dotted(self.version)}"']

    def _says(self, *arguments: str) -> str:
        run = subprocess.run([self.path, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return run.stdout


def dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def check_compiler(flags: list[str]) -> None:
    """Says what is missing in one line, where compiling csrc would end in a page of errors.

    Raises:
        RuntimeError: no compiler, one without C++17, or no Python headers.
    """
    command = [*shlex.split(compiling.compiler()), *flags, "-fsyntax-only", "-x", "c++", "-"]
    probe = subprocess.run(command, input=PROBE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if probe.returncode != 0:
        output = the_error_in(probe.stdout.splitlines(keepends=True)) or f"exit status {probe.returncode}, no output"
        raise RuntimeError(
            f"{compiling.compiler()} cannot compile C++17; install g++ or clang++, or set CXX and CXXFLAGS:\n{output}"
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise RuntimeError(f"no Python.h in {headers}; install this Python's headers (python3-dev, python3-devel)")


def ninja_file(build: Path, nvcc: "Nvcc | None") -> str:
    try:
        import pybind11
    except ImportError:  # built without isolation
        raise RuntimeError("pybind11 was not found; pip install pybind11") from None

    x86 = platform.machine() in ("x86_64", "AMD64")
    sources = sorted(p.relative_to(CSRC).as_posix() for p in CSRC.rglob("*.cpp"))
    if not x86:
        sources = [s for s in sources if not s.startswith("cpu/x86")]
    if nvcc is None:
        sources = [s for s in sources if not s.startswith("cuda/")]
    # Compiled with OpenMP but not linked to a runtime: the symbols bind to the one that torch has loaded, and follow
    # torch.set_num_threads.
    mac = sys.platform == "darwin"
    openmp = ["-Xpreprocessor", "-fopenmp"] if mac else ["-fopenmp"]
    link = ["-undefined", "dynamic_lookup"] if mac else []
    link += nvcc.link_flags if nvcc else []
    # Kernels know neither Python nor pybind11, whose folder is another one in each isolated build: they stay compiled.
    python = [f"-I{sysconfig.get_path('include')}", f"-I{pybind11.get_include()}"]
    cxxflags, ldflags = os.environ.get("CXXFLAGS", ""), os.environ.get("LDFLAGS", "")
    check_compiler([*compiling.FLAGS, *shlex.split(cxxflags)])
    flags = f"{shlex.join([*compiling.FLAGS, *openmp, f'-I{build}'])} {cxxflags}"
    lines = [
        f"cxx = {compiling.compiler().replace('$', '$$')}",
        f"flags = {flags.replace('$', '$$')}",
        f"ldshared = {os.environ.get('LDSHARED', '$cxx -shared')}",
        f"nvcc = {shlex.quote(nvcc.path).replace('$', '$$') if nvcc else ''}",
        f"nvcc_flags = {shlex.join(nvcc.flags).replace('$', '$$') if nvcc else ''}",
        "rule compile",
        "  command = $cxx $flags $extra -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = $in",
        "rule compile_cuda",
        "  command = $nvcc $nvcc_flags -I. -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = $in",
        "rule link",
        f"  command = $ldshared $in -o $out {shlex.join(link)} {ldflags.replace('$', '$$')}",
        "  description = $out",
    ]
    objects = []
    if nvcc is not None:  # takes longest: first
        objects.append("cuda_launch.cu.o")
        source = os.path.relpath(CSRC / "cuda/launch.cu", build)  # nvcc mangles what lies in a folder like "$0"
        lines.append(f"build {objects[-1]}: compile_cuda {escape(source)}")
    for source in sources:
        objects.append(source.replace("/", "_") + ".o")
        lines.append(f"build {objects[-1]}: compile {escape(CSRC / source)}")
        extra = compiling.INSTRUCTION_SETS.get(Path(source).stem, python)
        if source.endswith("binding.cpp"):
            extra = [*python, f'-DAF_INTERFACE="{compiling.interface(CSRC)}"', *(nvcc.defines if nvcc else [])]
        lines.append(f"  extra = {shlex.join(extra).replace('$', '$$')}")
    lines += [f"build _C.so: link {' '.join(objects)}", ""]
    return "\n".join(lines)


def escape(path: "Path | str") -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def description() -> str:
    """README for a package index, which has no other file: without pictures, and with the text of links for links."""
    readme = re.sub(r"^!\[.*\n", "", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    return re.sub(r"\[([^]]+)\]\((?!https?:)[^)]*\)", r"\1", readme)


check_settings()
native = Extension("accumfused._C", sources=[], optional=mode("NATIVE") == "auto")
setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    ext_modules=[] if mode("NATIVE") == "0" else [native],
    cmdclass={"build_ext": BuildNative, "build_py": BuildPython},
)
