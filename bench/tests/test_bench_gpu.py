"""The GPU's benchmark without a GPU: every suite at tiny sizes, on the CPU and its clock, over the emulated kernels."""

from __future__ import annotations

import ctypes
import json
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
from bench import counters, machine
from bench.ceilings import MIXES, Ceilings
from bench.clock import CudaClock, EnqueueClock
from bench.loops import CUDA_PIECE, CudaLoops
from bench.suites import Bench, all_suites, graph, memory_gpu
from bench.workload import Workload

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
    monkeypatch.setattr(memory_gpu, "peak_megabytes", lambda run: (run(), 0.0)[1])
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


@pytest.mark.parametrize("name", all_suites(on_gpu=True))
def test_every_suite_runs_and_checks_its_variants(name: str, tiny: Bench) -> None:
    tables = all_suites(on_gpu=True)[name](tiny)
    assert tables
    for table in tables:
        names = [row["name"] for row in table.rows]
        if all("cannot" in row for row in table.rows):
            continue
        assert any("accumfused cuda" in row for row in names) or "cuda" in table.title, table.title
        assert len(names) == len(set(names))


@pytest.mark.parametrize("scale", [0.0, 0.5, 0.9])
def test_a_wrong_coefficient_is_found_before_its_time_counts(scale: float) -> None:
    work = Workload([(300, 100), (64,)])
    optimizer = work.ours()
    work.set_grads()
    assert work.error(optimizer.step) < 1e-8
    with pytest.raises(AssertionError):
        work.error(optimizer.step, scale=scale)
    with pytest.raises(AssertionError, match="did nothing"):
        work.error(lambda: None)


def test_a_checked_step_leaves_everything_as_it_was() -> None:
    work = Workload([(300,)])
    optimizer = work.stock(fused=True)
    work.set_grads()
    tensors = [*work.params, *work.grads, *work.states[0].values()]
    before = [tensor.detach().clone() for tensor in tensors]
    work.error(optimizer.step)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


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


def test_the_command_reports_a_suite_that_fails_and_goes_on(
    fake_gpu: list[str],
    tiny: Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(bench: Bench) -> Any:
        raise AssertionError("a parameter is 1.0 off")

    suites = {"verbs": fails, "memory": memory_gpu.run}
    monkeypatch.setattr(command, "all_suites", lambda on_gpu=False: suites)
    monkeypatch.setattr(command, "gpu_bench", lambda quick, console: tiny)
    monkeypatch.setattr(sys, "argv", ["bench", "--device", "cuda", "--quick", "--json", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit, match="failed: verbs"):
        command.main()
    assert "a parameter is 1.0 off" in capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["machine"]["gpu"] == "fake"
    assert [row["name"] for row in found["suites"]["memory"][0]["rows"]][-1].startswith("accumfused cuda")


def test_the_driver_and_the_clocks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '580.1, 345 MHz, 2619 MHz, 1980 MHz, 3201 MHz, 700.00 W, P0'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert machine.nvidia_smi()["driver_version"] == "580.1"
    assert machine.nvidia_smi()["pstate"] == "P0"
    program.write_text("#!/bin/sh\nexit 9\n")
    assert machine.nvidia_smi() == {}


def test_the_counters_are_read_from_what_ncu_prints() -> None:
    row = '"{}","7","python3","h","{}","1","7","(256, 1, 1)","(528, 1, 1)","0","9.0","","{}","byte","{}"'
    head = '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
    head += '"Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
    kernels = ["accumulate_kernel(Work, Fold)", "void step_kernel<AdamW>(Work)"]
    lines = ["==PROF== Connected to process 7", head]
    for index, kernel in enumerate(kernels):
        for metric, value in zip(counters.METRICS, ("1,600", "1,200"), strict=True):
            lines.append(row.format(index, kernel, metric, value))
    launches = counters.parse("\n".join(lines))
    assert [kernel for kernel, _ in launches] == kernels
    assert counters.parse("==ERROR== nothing") == []
    printed = counters.table(launches, parameters=100)
    assert printed[1].split()[-5:] == ["16.00", "12.00", "8", "+", "4"]
    assert printed[2].split()[-5:] == ["16.00", "12.00", "16", "+", "12"]
