"""The build, on a copy of the source: incremental, and in every mode of ACCUMFUSED_NATIVE as it says."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULE = f"accumfused/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
REASON = "accumfused/_native_error.txt"
OBJECTS = "build/temp/native"
# Runs a program in a session of its own, whose terminal is the first argument.
ON_TERMINAL = "import os, sys; os.setsid(); os.open(sys.argv[1], os.O_RDWR); os.execv(sys.argv[2], sys.argv[2:])"

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source")
x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")


def copy_of_the_source(folder: Path) -> Path:
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, folder)
    for name in ("csrc", "accumfused"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("_C.*", "_native_error.txt"))
    return folder


def setup_py(source: Path, *command: str, terminal: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if name not in ("CXX", "CXXFLAGS", "LDFLAGS")}
    modes = {"ACCUMFUSED_NATIVE": "auto", "ACCUMFUSED_CUDA": "0"}
    on_terminal = [sys.executable, "-c", ON_TERMINAL, terminal] if terminal else []
    return subprocess.run(
        [*on_terminal, sys.executable, "setup.py", *command],
        cwd=source, env={**known, **modes, **environment}, capture_output=True, text=True,
    )  # fmt: skip


def build_in_place(source: Path, **options: str) -> subprocess.CompletedProcess[str]:
    return setup_py(source, "build_ext", "--inplace", "--build-temp", "build/temp", **options)


def written(source: Path) -> dict[str, int]:
    """When each object was last written."""
    return {path.name: path.stat().st_mtime_ns for path in (source / OBJECTS).iterdir() if path.suffix in (".o", ".so")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source folder in which the native module was built once."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler")
    source = copy_of_the_source(tmp_path_factory.mktemp("with spaces and $"))
    done = build_in_place(source, ACCUMFUSED_NATIVE="1")
    assert done.returncode == 0, done.stderr
    return source


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A source folder with a module and a reason that an earlier build has left."""
    source = copy_of_the_source(tmp_path)
    (source / MODULE).write_bytes(b"stale")
    (source / REASON).write_text("stale")
    return source


def test_the_module_loads(built: Path) -> None:
    program = "import accumfused, accumfused._native as n; print(n._C.__file__)"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=built, check=True, capture_output=True, text=True)
    assert loaded.stdout.strip() == str(built / MODULE)
    assert not (built / REASON).exists()


def test_a_second_build_does_nothing(built: Path) -> None:
    before = written(built)
    said = build_in_place(built).stdout
    assert "no work to do" in said
    assert "compiling" not in said
    assert written(built) == before


def test_a_change_rebuilds_what_depends_on_it(built: Path) -> None:
    before = written(built)
    with (built / "csrc" / "cpu" / "baseline.cpp").open("a") as file:
        file.write("// changed\n")
    done = build_in_place(built)
    assert done.returncode == 0
    assert re.search(r"accumfused: compiling 1 file\n(.*\n)*\[1/2\] .*cpu/baseline.cpp", done.stdout)
    after = written(built)
    assert {name for name in after if after[name] != before[name]} == {"cpu_baseline.cpp.o", "_C.so"}


def test_the_terminal_is_told_what_pip_keeps_to_itself(built: Path) -> None:
    ours, terminal = os.openpty()
    os.set_blocking(ours, False)
    (built / OBJECTS / "cpu_dispatch.cpp.o").unlink()
    build_in_place(built, terminal=os.ttyname(terminal), PIP_BUILD_TRACKER="pip's")
    assert b"accumfused: compiling 1 file\r\n" in os.read(ours, 1000)
    (built / OBJECTS / "cpu_dispatch.cpp.o").unlink()
    build_in_place(built, terminal=os.ttyname(terminal))
    with pytest.raises(BlockingIOError):
        os.read(ours, 1000)
    os.close(ours)
    os.close(terminal)


def test_a_changed_header_is_noticed(built: Path) -> None:
    header = built / "csrc" / "cpu" / "stream.h"
    good = header.read_text()
    header.write_text(f"#error broken on purpose\n{good}")
    try:
        failed = build_in_place(built, ACCUMFUSED_NATIVE="1")
        assert failed.returncode != 0
        assert "error: #error broken on purpose" in failed.stderr
        assert not (built / MODULE).exists(), "a stale module would be imported in silence"
        assert build_in_place(built).returncode == 0
        assert "error: #error broken on purpose" in (built / REASON).read_text()
        assert "FAILED" not in (built / REASON).read_text()
    finally:
        header.write_text(good)
        assert build_in_place(built, ACCUMFUSED_NATIVE="1").returncode == 0
    assert (built / MODULE).exists()
    assert not (built / REASON).exists()


@x86_64
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs binutils")
@pytest.mark.parametrize("unit", ["cpu_baseline", "cpu_dispatch", "binding", "table"])
def test_the_baseline_has_no_avx(built: Path, unit: str) -> None:
    assert "xmm" in assembly(built, "cpu_baseline")
    assert re.findall(r"%[yz]mm\d+|\tv[a-z0-9]+ .*%xmm", assembly(built, unit)) == []


@x86_64
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs binutils")
def test_each_instruction_set_is_used(built: Path) -> None:
    assert "%ymm" in assembly(built, "cpu_x86_64_v3")
    assert "%zmm" not in assembly(built, "cpu_x86_64_v3")
    assert "%zmm" in assembly(built, "cpu_x86_64_v4")


@x86_64
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs binutils")
@pytest.mark.parametrize("target", ["x86_64_v3", "x86_64_v4"])
def test_nothing_shared_is_compiled_for_an_instruction_set(built: Path, target: str) -> None:
    """Of a weak symbol the linker keeps one copy for all: it must not be the one with AVX."""
    command = ["nm", "-C", "--defined-only", str(built / OBJECTS / f"cpu_{target}.cpp.o")]
    symbols = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    shared = [line for line in symbols if line.split(maxsplit=2)[1] == "W"]
    assert [line for line in shared if f"accumfused::{target}::" not in line] == []


def assembly(source: Path, unit: str) -> str:
    command = ["objdump", "-d", "--no-show-raw-insn", str(source / OBJECTS / f"{unit}.cpp.o")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("false", "false cannot compile C++17"), ("no-such-compiler", "no C++17 compiler was found")],
)
def test_without_a_compiler_pure_python_installs(fresh: Path, compiler: str, reason: str) -> None:
    done = build_in_place(fresh, CXX=compiler)
    assert done.returncode == 0, done.stderr
    assert reason in (fresh / REASON).read_text()
    assert not (fresh / MODULE).exists()
    report = subprocess.run([sys.executable, "-m", "accumfused"], cwd=fresh, check=True, capture_output=True, text=True)
    assert reason in report.stdout


def test_a_compiler_of_an_old_standard_is_refused_by_its_own_words(fresh: Path) -> None:
    build_in_place(fresh, CXXFLAGS="-std=c++14")
    assert "this compiler has no C++17" in (fresh / REASON).read_text()


def test_mode_1_makes_a_missing_compiler_an_error(fresh: Path) -> None:
    done = build_in_place(fresh, CXX="false", ACCUMFUSED_NATIVE="1")
    assert done.returncode != 0
    assert "false cannot compile C++17" in done.stderr
    assert not (fresh / MODULE).exists()


def test_mode_0_makes_a_pure_python_wheel(fresh: Path) -> None:
    done = setup_py(fresh, "bdist_wheel", ACCUMFUSED_NATIVE="0")
    assert done.returncode == 0, done.stderr
    (wheel,) = (fresh / "dist").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")


def test_an_unknown_mode_is_refused(fresh: Path) -> None:
    done = setup_py(fresh, "--version", ACCUMFUSED_NATIVE="yes")
    assert done.returncode != 0
    assert "ACCUMFUSED_NATIVE='yes': use one of auto, 0, 1" in done.stderr


def test_a_wheel_after_a_failed_build_carries_the_reason_and_no_stale_module(built: Path) -> None:
    for compiler in (None, "false"):
        environment = {} if compiler is None else {"CXX": compiler}
        done = setup_py(built, "build", "--build-temp", "build/temp", "--build-lib", "build/lib", **environment)
        assert done.returncode == 0, done.stderr
        assert (built / "build" / "lib" / MODULE).exists() == (compiler is None)
        assert (built / "build" / "lib" / REASON).exists() == (compiler is not None)
    assert (built / MODULE).exists(), "a build elsewhere leaves the source folder alone"


def test_the_source_distribution_has_every_source(fresh: Path) -> None:
    done = setup_py(fresh, "sdist")
    assert done.returncode == 0, done.stderr
    (archive,) = (fresh / "dist").iterdir()
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    sources = {path.relative_to(fresh).as_posix() for path in (fresh / "csrc").rglob("*.*")}
    assert "csrc/rules.h" in sources
    assert sources <= packed
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md", "accumfused/py.typed"} <= packed
    assert MODULE not in packed


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
class TestMake:
    """By what `make --dry-run` would do from a fresh clone: neither .venv nor the build folder is touched."""

    def would_run(self, target: str, folder: Path, cards: str = "", **environment: str) -> str:
        """The commands, on a machine whose nvidia-smi says `cards`."""
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nprintf '{cards}'\n")
        program.chmod(0o755)
        known = {name: value for name, value in os.environ.items() if not name.startswith(("ACCUMFUSED_", "MAKE"))}
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["make", "--dry-run", target, f"VENV={folder}/venv"],
            cwd=ROOT, env={**known, "PATH": path, **environment}, check=True, capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout.replace(str(folder), "")

    def test_a_wheel_needs_no_torch(self, tmp_path: Path) -> None:
        assert "torch" not in self.would_run("wheel", tmp_path)
        assert "torch==" in self.would_run("demo", tmp_path)

    @pytest.mark.parametrize("target", ["demo", "test", "wheel"])
    def test_no_pip_hides_the_compiler(self, target: str, tmp_path: Path) -> None:
        """Where pip asks for the native module, setup.py has built it already, in sight."""
        commands = self.would_run(target, tmp_path)
        assert 0 < commands.index("setup.py build_ext") < commands.index("--no-build-isolation")

    @pytest.mark.parametrize(
        ("cards", "asked", "built_with"),
        [
            ("", {}, "ACCUMFUSED_CUDA=0 "),
            ("No devices were found\\n", {}, "ACCUMFUSED_CUDA=0 "),
            ("9.0\\n8.6\\n9.0\\n", {}, 'ACCUMFUSED_CUDA_ARCHS="86 90" '),
            ("", {"ACCUMFUSED_CUDA": "1"}, ""),
            ("9.0\\n", {"ACCUMFUSED_CUDA_ARCHS": "80"}, ""),
        ],
        ids=["no driver", "no card", "cards", "asked", "asked for others"],
    )
    def test_to_develop_only_cuda_code_that_is_of_use(
        self, cards: str, asked: dict[str, str], built_with: str, tmp_path: Path
    ) -> None:
        commands = self.would_run("test", tmp_path, cards, **asked)
        assert f"\n{built_with}/venv/bin/python setup.py build_ext --inplace" in commands
        assert f"\n{built_with}/venv/bin/python -m pip --quiet --disable-pip-version-check install" in commands
