"""The GPU's benchmark without a GPU: every suite and stage at tiny sizes, on the CPU, over the emulated kernels."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import emulation
import inside
import pytest
import torch

from accumfused.backends.cuda import CudaBackend
from bench import machine
from bench.ceilings import Ceilings, CopyLoops
from bench.clock import CudaClock
from bench.gpu import journal, probe, versus
from bench.gpu.journal import Journal
from bench.measure import Variant, interleave
from bench.suites import GPU_SUITES, Bench, all_suites

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def tiny(emulate_cuda: None) -> Bench:
    return Bench(Ceilings(lambda: CopyLoops(CPU, 3000)), quick=True, rounds=1, on_gpu=True, backends=["cuda"])


def test_a_copy_moves_as_many_bytes_as_the_mix() -> None:
    loops = CopyLoops(CPU, 1000)
    (stream, goal) = (value for value in vars(loops).values() if isinstance(value, torch.Tensor))
    goal.zero_()
    loops.run("step", 0)
    assert torch.equal(goal[:3500], stream[:3500])  # 28 bytes for each of 1000, half read, half written
    assert not goal[3500:].any()


@pytest.mark.parametrize("name", GPU_SUITES)
def test_every_suite_runs_and_checks_its_variants(name: str, tiny: Bench) -> None:
    tables = all_suites(on_gpu=True)[name].run(tiny)
    assert tables
    for table in tables:
        names = [row["name"] for row in table.rows]
        assert any("accumfused cuda" in row for row in names) or "cuda" in table.title, table.title
        assert len(names) == len(set(names))


# ---- stages ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Journal:
    return Journal("x", tmp_path / "lines")


def of(own: Journal, *kinds: str) -> list[dict[str, Any]]:
    assert own.path is not None
    return [line for line in journal.read(own.path) if line["kind"] in kinds]


def test_ours_and_torchs_recipes_are_timed_eager_and_captured(tiny: Bench, own: Journal) -> None:
    versus.measure(tiny, own, "some", [(300,), (7,)])
    recipes = ("clip + AdamW(fused)", "grad_scale trick", "clip + AdamW(foreach)", "accumfused cuda")
    expected = [*recipes, *(f"{name}, captured" for name in (*recipes, "accumfused cuda, window of 2"))]
    on_gpu, on_host = of(own, "on the GPU"), of(own, "host, warm")
    assert [line["by"] for line in on_gpu] == [line["by"] for line in on_host] == expected
    assert all(line["us"] > 0 for line in on_gpu + on_host)
    row = {"name": "a", "ms": [1.0, 2.0, 3.0], "moved B/param": 32, "% of ceiling": 91.0, "x fused": 1.2}
    assert versus.facts(row) == {"by": "a", "us": 2000.0, "of copy": 0.91, "x fused": 1.2}


def test_what_is_wrong_is_not_timed(tiny: Bench, own: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    class Idle(CudaBackend):
        def step(self, *args: Any) -> None:
            pass

    machine = emulation.load()
    inside.replace_cuda(monkeypatch, lambda: Idle(machine, machine.Table))
    versus.measure(tiny, own, "some", [(300,)])
    wrong = [line for line in of(own, "on the GPU") if line.get("ok") is False]
    assert {line["by"].partition(",")[0] for line in wrong} == {"accumfused cuda"}
    assert all(line["cannot"] == "wrong, so not timed: the step did nothing" and "us" not in line for line in wrong)


def test_the_probe_measures_all_formats_by_their_bytes_and_goes_on_after_an_error(
    tiny: Bench, own: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "elements", lambda bench, wanted, each: 5000)
    works = probe.Probe(tiny, own)
    monkeypatch.setattr(works, "folds", lambda name, dtype: 1 / 0)
    works.run()
    assert [line["error"] for line in of(own, "probe")] == ["ZeroDivisionError: division by zero"] * 3
    steps = {line["what"]: round(line["B/el"]) for line in of(own, "step")}
    assert list(steps.values()) == [28, 12, 14, 26, 14, 26, 18, 10, 20, 36, 20, 10, 30, 28]


# ---- clocks ---------------------------------------------------------------------------------------------------------


def test_the_gpu_is_busy_until_the_host_has_sent_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose work takes three milliseconds."""
    order: list[str] = []
    event = SimpleNamespace(record=lambda: order.append("event"), synchronize=lambda: order.append("wait"))
    event.elapsed_time = lambda other: 3.0
    for name, fake in {
        "Event": lambda enable_timing: event if enable_timing else None,
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=1024),
        "synchronize": lambda: order.append("wait"),
        "_sleep": lambda cycles: order.append("sleep" if cycles > 0 else "nothing"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    run: Callable[[], Any] = lambda: order.append("run")  # noqa: E731
    assert CudaClock(CPU).seconds(run, host_seconds=0.1) == 0.003
    assert order == ["sleep", "event", "run", "event", "wait"]
    order.clear()
    (timing,) = interleave([Variant("a", run)], 1, clock=CudaClock(CPU), of_host=True)
    assert 0 <= timing.seconds[0] < 1
    assert order == ["wait", "run", "wait"] * 3  # two rounds warm up


def test_the_driver_and_the_clocks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '580.1, 345 MHz, 2619 MHz, 1980 MHz, 3201 MHz, 700.00 W, P0'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert machine.nvidia_smi()["driver_version"] == "580.1"
    assert machine.nvidia_smi()["pstate"] == "P0"
    program.write_text("#!/bin/sh\nexit 9\n")
    assert machine.nvidia_smi() == {}
