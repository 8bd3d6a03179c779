"""The build with nvcc, on a copy of the source: for the architectures asked for, and without, each with its reason."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from building import MODULE, build_in_place, copy_of_the_source, needs_source, written

CUDA_REASON = "accumfused/_cuda_error.txt"

pytestmark = [needs_source, pytest.mark.full]


def has_cuda(source: Path) -> bool:
    program = "import accumfused.compiled as n; print(hasattr(n.module, 'cuda'), n.cuda_unavailable)"
    done = subprocess.run([sys.executable, "-c", program], cwd=source, check=True, capture_output=True, text=True)
    return done.stdout.startswith("True")


def reported(source: Path) -> str:
    """What `python -m accumfused` says of the cuda backend."""
    done = subprocess.run([sys.executable, "-m", "accumfused"], cwd=source, check=True, capture_output=True, text=True)
    return done.stdout.partition("\n  cuda")[2].partition("\n  triton")[0]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source folder, built once without CUDA, so that the tests below compile little."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler")
    folder = copy_of_the_source(tmp_path_factory.mktemp("with spaces and $"))
    done = build_in_place(folder, ACCUMFUSED_NATIVE="1", ACCUMFUSED_CUDA="0")
    assert done.returncode == 0, done.stderr
    return folder


def fake_nvcc(folder: Path, says: str) -> str:
    program = folder / "nvcc"
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)
    return str(program)


def test_without_cuda_on_purpose(source: Path) -> None:
    assert build_in_place(source, ACCUMFUSED_CUDA="0").returncode == 0
    assert not has_cuda(source)
    assert "built without CUDA: ACCUMFUSED_CUDA=0" in reported(source)


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("Cuda compilation tools, release 12.3, V12.3.107", "is 12.3; install CUDA 12.4 or newer"),
        ("hello", "is no nvcc: hello"),
    ],
)
def test_an_nvcc_that_cannot_do(says: str, reason: str, source: Path, tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path, says)
    assert build_in_place(source, ACCUMFUSED_CUDA="auto", CUDACXX=nvcc).returncode == 0
    assert (source / MODULE).exists(), "the CPU's kernels are there"
    assert reason in (source / CUDA_REASON).read_text()
    assert reason in reported(source)
    done = build_in_place(source, ACCUMFUSED_CUDA="1", CUDACXX=nvcc, ACCUMFUSED_NATIVE="1")
    assert done.returncode != 0
    assert "ACCUMFUSED_CUDA=1, but the kernels for GPUs do not build" in done.stderr


def test_no_nvcc_at_all(source: Path) -> None:
    assert build_in_place(source, ACCUMFUSED_CUDA="auto", CUDACXX="no-such-nvcc").returncode == 0
    assert "no nvcc was found" in reported(source)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
class TestWithNvcc:
    def test_a_wrong_architecture_is_refused(self, source: Path) -> None:
        assert build_in_place(source, ACCUMFUSED_CUDA="auto", ACCUMFUSED_CUDA_ARCHS="hopper").returncode == 0
        assert 'use compute capabilities like "80 90"' in (source / CUDA_REASON).read_text()

    def test_the_architectures_asked_for_are_built(self, source: Path) -> None:
        done = build_in_place(source, ACCUMFUSED_CUDA="1", ACCUMFUSED_CUDA_ARCHS="80;90", ACCUMFUSED_NATIVE="1")
        assert done.returncode == 0, done.stderr
        assert "kernels for GPUs of compute capability 80 90" in done.stdout
        assert not (source / CUDA_REASON).exists()
        program = "import accumfused.compiled as n; print(n.module.cuda.ARCHS)"
        found = subprocess.run([sys.executable, "-c", program], cwd=source, check=True, capture_output=True, text=True)
        assert found.stdout.strip() == "80 90"

    def test_a_second_build_does_nothing_and_a_changed_kernel_rebuilds_its_own(self, source: Path) -> None:
        options = {"ACCUMFUSED_CUDA": "1", "ACCUMFUSED_CUDA_ARCHS": "90"}
        assert build_in_place(source, **options).returncode == 0
        before = written(source)
        assert "no work to do" in build_in_place(source, **options).stdout
        with (source / "csrc" / "cuda" / "kernels.cuh").open("a") as file:
            file.write("// changed\n")
        assert build_in_place(source, **options).returncode == 0
        after = written(source)
        assert {name for name in after if after[name] != before[name]} == {"cuda_launch.cu.o", "_C.so"}

    def test_a_kernel_that_does_not_compile_leaves_the_cpu(self, source: Path) -> None:
        kernels = source / "csrc" / "cuda" / "kernels.cuh"
        good = kernels.read_text()
        kernels.write_text(f"#error broken on purpose\n{good}")
        try:
            done = build_in_place(source, ACCUMFUSED_CUDA="auto", ACCUMFUSED_CUDA_ARCHS="90")
            assert done.returncode == 0
            assert (source / MODULE).exists()
            assert "broken on purpose" in reported(source)
        finally:
            kernels.write_text(good)
