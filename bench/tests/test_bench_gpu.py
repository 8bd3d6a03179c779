"""The GPU's benchmark without a GPU: every suite at tiny sizes, on the CPU and its clock, over the emulated kernels."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import emulation
import pytest
import torch

pytest.importorskip("rich")

import bench.__main__ as command
from bench import machine
from bench.ceilings import MIXES, Ceilings
from bench.clock import CudaClock, EnqueueClock
from bench.loops import CUDA_PIECE, CudaLoops
from bench.suites import GPU_SUITES, Bench, all_suites, graph
from bench.tables import load

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
ALSO = """
template <class T> T __ldcs(const T* from) { return *from; }
template <class T> void __stcs(T* to, T value) { *to = value; }
inline void atomicAdd(float* to, float value) { *to += value; }
"""  # what ceiling.cu calls beyond what the emulation has


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """ceiling.cu over the emulation."""
    reason = emulation.why_not()
    if reason is not None:
        pytest.skip(reason)
    built = tmp_path_factory.mktemp("ceiling") / "ceiling.so"
    also = built.with_name("also.h")
    also.write_text(f"#include <cuda_runtime.h>\n{ALSO}")
    flags = [*(flag for flag in emulation.FLAGS if "visibility" not in flag), f"-I{emulation.HERE}", "-shared"]
    source = str(ROOT / "bench" / "ceiling.cu")
    subprocess.run(["g++", *flags, "-include", str(also), "-x", "c++", source, "-o", str(built)], check=True)
    return ctypes.CDLL(str(built))


@pytest.fixture
def tiny(library: ctypes.CDLL, emulate_cuda: None, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(graph, "captured", lambda run: (run(), run(), run)[-1])
    ceilings = Ceilings(lambda: CudaLoops(CPU, CUDA_PIECE, library))
    return Bench(ceilings, quick=True, rounds=1, on_gpu=True, backends=["cuda"], peers=("foreach",))


@pytest.mark.parametrize("mix", MIXES)
def test_every_loop_does_the_work_of_its_mix(mix: str, library: ctypes.CDLL) -> None:
    loops = CudaLoops(CPU, CUDA_PIECE, library)
    for loop in range(loops.count):
        loops.check(mix, loop)


def test_a_loop_that_leaves_elements_out_is_found(library: ctypes.CDLL) -> None:
    loops = CudaLoops(CPU, CUDA_PIECE, library)
    run = loops.run

    def half_of_it(mix: str, loop: int, sum_above: float) -> None:
        loops.elements //= 2
        run(mix, loop, sum_above)
        loops.elements *= 2

    loops.run = half_of_it  # type: ignore[method-assign, assignment]
    for mix in MIXES:
        with pytest.raises(RuntimeError, match="does not do what it should"):
            loops.check(mix, 0)


@pytest.mark.parametrize("name", GPU_SUITES)
def test_every_suite_runs_and_checks_its_variants(name: str, tiny: Bench) -> None:
    tables = all_suites(on_gpu=True)[name].run(tiny)
    assert tables
    for table in tables:
        names = [row["name"] for row in table.rows]
        assert any("accumfused cuda" in row for row in names) or "cuda" in table.title, table.title
        assert len(names) == len(set(names))


def test_one_launch_per_tensor_steps_as_torch_does() -> None:
    triton, numpy = pytest.importorskip("triton"), pytest.importorskip("numpy")
    if triton.__version__.startswith("3.6.") and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 needs numpy < 2.4")
    code = (
        "from bench.peers import peers; from bench.workload import Workload;"
        "found = peers(Workload([(40, 30), (64,), ()]), ['per-tensor']);"
        "assert any('Triton' in name for name in found.errors), (found.notes, found.gaps)"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr


class FakeEvent:
    """A GPU whose work takes three milliseconds."""

    order: ClassVar[list[str]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.order.append("event")

    def synchronize(self) -> None:
        self.order.append("wait")

    def elapsed_time(self, other: FakeEvent) -> float:
        return 3.0


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of it, in order."""
    FakeEvent.order = order = []
    properties = SimpleNamespace(
        name="fake", major=9, minor=0, multi_processor_count=2, total_memory=1, L2_cache_size=1024
    )
    for name, fake in {
        "Event": FakeEvent,
        "get_device_properties": lambda device: properties,
        "synchronize": lambda: order.append("wait"),
        "_sleep": lambda cycles: order.append("sleep" if cycles > 0 else "nothing"),
        "is_available": lambda: True,
        "current_device": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return order


def test_the_gpu_is_busy_until_the_host_has_sent_all(fake_gpu: list[str]) -> None:
    run: Callable[[], Any] = lambda: fake_gpu.append("run")  # noqa: E731
    assert CudaClock(CPU).seconds(run, host_seconds=0.1) == 0.003
    assert fake_gpu == ["sleep", "event", "run", "event", "wait"]
    fake_gpu.clear()
    assert 0 <= EnqueueClock(CPU).seconds(run) < 1
    assert fake_gpu == ["wait", "run", "wait"]


def test_the_command_writes_the_gpu_and_its_clocks_after_each_suite(
    fake_gpu: list[str], tiny: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "gpu_bench", lambda quick, console: tiny)
    monkeypatch.setattr(machine, "nvidia_smi", lambda: {"pstate": "P0"})
    monkeypatch.setattr(command, "nvidia_smi", lambda: {"pstate": "P1"})
    arguments = ["bench", "kernels", "--device", "cuda", "--quick", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", arguments)
    command.main()
    found = load(tmp_path / "out.json")
    assert (found.machine["gpu"], found.machine["nvidia_smi"]) == ("fake", {"pstate": "P0"})
    assert found.machine["nvidia_smi_after_kernels"] == {"pstate": "P1"}
    assert list(found.suites) == ["kernels", "ceilings"]


def test_the_driver_and_the_clocks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '580.1, 345 MHz, 2619 MHz, 1980 MHz, 3201 MHz, 700.00 W, P0'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert machine.nvidia_smi()["driver_version"] == "580.1"
    assert machine.nvidia_smi()["pstate"] == "P0"
    program.write_text("#!/bin/sh\nexit 9\n")
    assert machine.nvidia_smi() == {}
