"""The build with compilers, on a copy of the source: incremental, and for each machine what belongs there."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pybind11
import pytest
from building import MODULE, OBJECTS, REASON, build_in_place, built, needs_source, says, setup_py, written

from accumfused.compiling import INSTRUCTION_SETS

pytestmark = [needs_source, pytest.mark.full]
x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")


CUDA_REASON = "accumfused/_cuda_error.txt"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("with spaces and $"))


def test_a_change_rebuilds_what_depends_on_it_and_a_second_build_does_nothing(source: Path) -> None:
    assert says(source, "-c", "import accumfused.compiled as n; print(n.module.__file__)") == f"{source / MODULE}\n"
    assert not (source / REASON).exists()
    before = written(source)
    with (source / "csrc" / "cpu" / "baseline.cpp").open("a") as file:
        file.write("// changed\n")
    assert re.search(r"compiling 1 file\n(.*\n)*\[1/2\] .*cpu/baseline.cpp", build_in_place(source).stdout)
    after = written(source)
    assert {name for name in after if after[name] != before[name]} == {"cpu_baseline.cpp.o", "_C.so"}
    said = build_in_place(source).stdout
    assert "no work to do" in said
    assert "compiling" not in said
    assert written(source) == after


def test_the_terminal_is_told_what_pip_keeps_to_itself(source: Path) -> None:
    ours, terminal = os.openpty()
    os.set_blocking(ours, False)
    (source / OBJECTS / "cpu_dispatch.cpp.o").unlink()
    build_in_place(source, terminal=os.ttyname(terminal), PIP_BUILD_TRACKER="pip's")
    assert b"accumfused: compiling 1 file\r\n" in os.read(ours, 1000)
    (source / OBJECTS / "cpu_dispatch.cpp.o").unlink()
    build_in_place(source, terminal=os.ttyname(terminal))
    with pytest.raises(BlockingIOError):
        os.read(ours, 1000)
    os.close(ours)
    os.close(terminal)


def test_a_changed_header_is_noticed(source: Path) -> None:
    header = source / "csrc" / "cpu" / "stream.h"
    good = header.read_text()
    header.write_text(f"#error broken on purpose\n{good}")
    try:
        failed = build_in_place(source, ACCUMFUSED_NATIVE="1")
        assert failed.returncode != 0
        assert "error: #error broken on purpose" in failed.stderr
        assert not (source / MODULE).exists(), "a stale module would be imported in silence"
        assert build_in_place(source).returncode == 0
        assert "error: #error broken on purpose" in (source / REASON).read_text()
        assert "FAILED" not in (source / REASON).read_text()
    finally:
        header.write_text(good)
        assert build_in_place(source, ACCUMFUSED_NATIVE="1").returncode == 0
    assert (source / MODULE).exists()
    assert not (source / REASON).exists()


@x86_64
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs binutils")
@pytest.mark.parametrize("target", ["x86_64_v3", "x86_64_v4"])
def test_nothing_shared_is_compiled_for_an_instruction_set(source: Path, target: str) -> None:
    """Of a weak symbol the linker keeps one copy for all: it must not be the one with AVX."""
    command = ["nm", "-C", "--defined-only", str(source / OBJECTS / f"cpu_{target}.cpp.o")]
    symbols = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    shared = [line for line in symbols if line.split(maxsplit=2)[1] == "W"]
    assert [line for line in shared if f"accumfused::{target}::" not in line] == []


def test_kernels_stay_compiled_where_pybind11_lies_elsewhere(source: Path, tmp_path: Path) -> None:
    """As it does in each isolated build."""
    shutil.copytree(Path(pybind11.__file__).parent, tmp_path / "pybind11")
    before = written(source)
    assert build_in_place(source, PYTHONPATH=str(tmp_path), ACCUMFUSED_NATIVE="1").returncode == 0
    changed = {name for name, when in written(source).items() if when != before[name]}
    assert "binding.cpp.o" in changed
    assert not changed & {f"cpu_{name}.cpp.o" for name in INSTRUCTION_SETS}


def test_a_wheel_after_a_failed_build_carries_the_reason_and_no_stale_module(source: Path) -> None:
    for compiler in (None, "false"):
        environment = {} if compiler is None else {"CXX": compiler}
        done = setup_py(source, "build", "--build-temp", "build/temp", "--build-lib", "build/lib", **environment)
        assert done.returncode == 0, done.stderr
        assert (source / "build" / "lib" / MODULE).exists() == (compiler is None)
        assert (source / "build" / "lib" / REASON).exists() == (compiler is not None)
    assert (source / MODULE).exists(), "a build elsewhere leaves the source folder alone"


# ---- nvcc ----------------------------------------------------------------------------------------------------------


def reported(source: Path) -> str:
    """What `python -m accumfused` says of the cuda backend."""
    return says(source, "-m", "accumfused").partition("\n  cuda")[2].partition("\n  triton")[0]


@pytest.mark.parametrize(
    ("nvcc_says", "asked", "reason"),
    [
        (None, "0", "built without CUDA: ACCUMFUSED_CUDA=0"),
        (None, "auto", "no nvcc was found"),
        ("Cuda compilation tools, release 12.3, V12.3.107", "auto", "is 12.3; install CUDA 12.4 or newer"),
        ("hello", "auto", "is no nvcc: hello"),
    ],
)
def test_without_an_nvcc_that_will_do_there_are_the_kernels_of_cpus_and_a_reason(
    source: Path, tmp_path: Path, nvcc_says: str | None, asked: str, reason: str
) -> None:
    nvcc = tmp_path / "nvcc"
    if nvcc_says is not None:
        nvcc.write_text(f"#!/bin/sh\necho '{nvcc_says}'\n")
        nvcc.chmod(0o755)
    assert build_in_place(source, ACCUMFUSED_CUDA=asked, CUDACXX=str(nvcc)).returncode == 0
    assert (source / MODULE).exists()
    assert says(source, "-c", "import accumfused.compiled as n; print(hasattr(n.module, 'cuda'))") == "False\n"
    assert reason in reported(source)
    done = build_in_place(source, ACCUMFUSED_CUDA="1", CUDACXX=str(nvcc))
    assert done.returncode != 0
    assert "ACCUMFUSED_CUDA=1, but the kernels for GPUs do not build" in done.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
class TestWithNvcc:
    def test_the_architectures_asked_for_are_built(self, source: Path) -> None:
        done = build_in_place(source, ACCUMFUSED_CUDA="1", ACCUMFUSED_CUDA_ARCHS="80;90", ACCUMFUSED_NATIVE="1")
        assert done.returncode == 0, done.stderr
        assert "kernels for GPUs of compute capability 80 90" in done.stdout
        assert not (source / CUDA_REASON).exists()
        assert says(source, "-c", "import accumfused.compiled as n; print(n.module.cuda.ARCHS)") == "80 90\n"

    def test_a_kernel_that_does_not_compile_leaves_the_cpu(self, source: Path) -> None:
        kernels = source / "csrc" / "cuda" / "step.cuh"
        good = kernels.read_text()
        kernels.write_text(f"#error broken on purpose\n{good}")
        try:
            done = build_in_place(source, ACCUMFUSED_CUDA="auto", ACCUMFUSED_CUDA_ARCHS="90")
            assert done.returncode == 0
            assert (source / MODULE).exists()
            assert "broken on purpose" in reported(source)
        finally:
            kernels.write_text(good)
