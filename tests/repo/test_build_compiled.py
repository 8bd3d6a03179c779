"""The build with a compiler, on a copy of the source: incremental, and for each instruction set what belongs there."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from building import MODULE, OBJECTS, REASON, build_in_place, copy_of_the_source, needs_source, setup_py, written

pytestmark = [needs_source, pytest.mark.full]
x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source folder in which the native module was built once."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler")
    source = copy_of_the_source(tmp_path_factory.mktemp("with spaces and $"))
    done = build_in_place(source, ACCUMFUSED_NATIVE="1")
    assert done.returncode == 0, done.stderr
    return source


def test_the_module_loads(built: Path) -> None:
    program = "import accumfused, accumfused.compiled as n; print(n.module.__file__)"
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


def test_a_wheel_after_a_failed_build_carries_the_reason_and_no_stale_module(built: Path) -> None:
    for compiler in (None, "false"):
        environment = {} if compiler is None else {"CXX": compiler}
        done = setup_py(built, "build", "--build-temp", "build/temp", "--build-lib", "build/lib", **environment)
        assert done.returncode == 0, done.stderr
        assert (built / "build" / "lib" / MODULE).exists() == (compiler is None)
        assert (built / "build" / "lib" / REASON).exists() == (compiler is not None)
    assert (built / MODULE).exists(), "a build elsewhere leaves the source folder alone"
