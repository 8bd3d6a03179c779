"""Every suite on a CPU at tiny sizes, and what it finds before a time counts."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import emulation
import inside
import pytest
import torch

pytest.importorskip("rich")

from accumfused.backends.cuda import CudaBackend
from accumfused.loop import linears
from bench import exact, machine, shapes
from bench.ceilings import PIECE, Ceilings, CopyLoops, CpuLoops
from bench.clock import CudaClock, HostClock
from bench.gpu import card, probe, versus
from bench.gpu import offload as gpu_offload
from bench.measure import Variant, back_to_back, interleave
from bench.suites import CPU_SUITES, GPU_SUITES, Bench, all_suites, backward, lean, offload, train
from bench.tables import compared
from bench.workload import CPU, Workload


@pytest.fixture(scope="module")
def ceilings() -> Ceilings:
    return Ceilings(lambda: CpuLoops(4 * PIECE))  # compiles


@pytest.fixture
def bench(ceilings: Ceilings) -> Bench:
    return Bench(ceilings, quick=True, rounds=1)


@pytest.mark.parametrize("name", CPU_SUITES)
def test_every_suite_runs(name: str, bench: Bench) -> None:
    tables = all_suites()[name].run(bench)
    assert tables
    for table in tables:
        names = [row["name"] for row in table.rows]
        assert len(names) == len(set(names)), table.title
        assert any("accumfused" in name for name in names) or name == "kernels", table.title
        assert all(compared(row) for row in table.rows)


def test_each_round_begins_with_another_variant() -> None:
    order: list[str] = []
    variants = [Variant(name, lambda name=name: order.append(name)) for name in "abc"]
    timings = interleave(variants, rounds=3)
    assert "".join(order) == "cab" + "abc" + "bca" + "cab"  # the first round warms up
    assert [len(timing.seconds) for timing in timings] == [3, 3, 3]


def test_ceilings_are_those_of_the_same_rounds(ceilings: Ceilings) -> None:
    timed = interleave([Variant("norm", lambda: torch.ones(1000).sum(), passes=("read",))], 3, ceilings)[0]
    assert len(timed.at_ceiling) == len(timed.seconds) == 3
    ratios = sorted(1000 * ceiling / own for ceiling, own in zip(timed.at_ceiling, timed.seconds, strict=True))
    assert timed.share_of_ceiling(1000) == ratios[1]


@pytest.mark.parametrize("scale", [0.0, 0.5, 0.9])
def test_a_wrong_coefficient_is_found_before_its_time_counts(scale: float) -> None:
    work = Workload([(300, 100), (64,)])
    optimizer = work.ours()
    work.set_grads()
    assert work.error(optimizer.step) < 1e-8
    with pytest.raises(exact.WrongError):
        work.error(optimizer.step, scale=scale)
    with pytest.raises(exact.WrongError, match="did nothing"):
        work.error(lambda: None)


def test_a_format_that_is_further_off_than_its_bits_has_no_time(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    def wrong(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1.05 * exact.LR, weight_decay=exact.WEIGHT_DECAY)

    named = lean.Lean("wrong by 5%", torch.float32, wrong, 0.02, "torchao")
    monkeypatch.setattr(lean, "torchs", lambda real=lean.torchs: [*real(), named])
    (table,) = lean.run(bench)
    (row,) = [row for row in table.rows if row["name"] == "wrong by 5%"]
    assert 0.03 < row["error"] < 0.07
    assert not compared(row)
    assert all(row["2 steps off by"] < 0.6 for row in table.rows if "ms" in row)


def test_what_runs_out_of_memory_leaves_the_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A format while it is made, or a backend's table while it is timed: all variants are too much for a GPU."""
    bench.backends = ["auto", "torch"]

    def fits_all_but_one(each: lean.Lean, *rest: Any, real: Any = lean._made) -> Any:
        if each.name == "accumfused, fp32":
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.\nMore of it.")
        return real(each, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(lean, "_made", fits_all_but_one)
        first, second = lean.run(bench)
    rows = {row["name"]: row for row in first.rows}
    assert rows.pop("accumfused, fp32")["cannot"] == "OutOfMemoryError: Tried to allocate 2.00 GiB."
    assert all(compared(row) and "x our fp32" not in row for row in rows.values())

    def times_the_second_alone(self: Bench, variants: Any, real: Any = Bench.interleave, **settings: Any) -> Any:
        if variants[-1].name.startswith("accumfused,"):
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")
        return real(self, variants, **settings)

    monkeypatch.setattr(Bench, "interleave", times_the_second_alone)
    lost, whole = lean.run(bench)
    assert lost.rows == [{"name": "all variants", "cannot": "OutOfMemoryError: Tried to allocate 2.00 GiB."}]
    assert lost.title != whole.title
    assert len(whole.rows) == len(second.rows)
    assert all(map(compared, whole.rows))


def test_recipes_that_learn_something_else_are_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "MAX_GRAD_NORM", 1e-6)  # ours clips to that
    with pytest.raises(exact.WrongError, match="a loss is"):
        train.run(bench)


def test_sums_that_are_wrong_have_no_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.Loop, "whole", offload.Loop.open)  # which leaves the last gradients out of the sums
    with pytest.raises(exact.WrongError, match="sums are"):
        offload.run(bench)


def test_a_package_that_steps_elsewhere_is_a_row_with_the_reason(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.stock, "clip_and_step", lambda params, optimizer: optimizer.step)  # without the clip
    monkeypatch.setattr(exact, "MAX_GRAD_NORM", 1e-3)
    monkeypatch.setattr(offload, "MAX_GRAD_NORM", 1e-3)
    *_, table, _ = offload.run(bench)
    (row,) = [row for row in table.rows if "accumfused" not in row["name"]]
    assert "ms" not in row
    assert row["cannot"].startswith("wrong, so not timed: two steps are")


def test_seven_billion_parameters_wait_for_the_longer_one_of_bus_and_host() -> None:
    slow, fast = {"first": 1e-9, "further": 2e-9, "step": 3e-9}, dict.fromkeys(offload.VERBS, 1e-12)
    table = offload.computed({"a": offload.Measured(slow, 14.0), "b": offload.Measured(fast, 4.0)})
    assert "COMPUTED" in table.title
    found = [
        [row[heading] for heading in ("first s", "further s", "step s", "card GB", "host GB")] for row in table.rows
    ]
    assert found == [pytest.approx([7, 14, 21, 14, 98]), pytest.approx([0.56, 0.56, 0.56, 14, 28])]


def test_fused_linears_take_less_memory_in_both_models(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "SMALLEST", 1)
    mlp, blocks = backward.run(bench)
    assert "GELU-MLP of 16,704 parameters" in mlp.title  # two pairs of layers, of 32 and 128 outputs
    for table in (mlp, blocks):
        _, ours, fused = table.rows
        assert fused["peak B/param"] < ours["peak B/param"]


def test_the_shapes_are_the_models() -> None:
    tensors = {shapes.GPT2: 148, shapes.RESNET50: 161, shapes.LLAMA_1B: 146}
    counts = {shapes.GPT2: 124_439_808, shapes.RESNET50: 25_557_032}
    counts[shapes.LLAMA_1B] = 1_235_814_400
    for name, quick in itertools.product(tensors, (False, True)):
        of = shapes.model(name, quick)
        assert quick or (len(of), shapes.count(of)) == (tensors[name], counts[name])
        assert shapes.count(of) <= counts[name]


# ---- a GPU's, without a GPU: on the CPU, over the emulated kernels ---------------------------------------------------


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
def test_every_suite_of_a_gpu_runs_and_checks_its_variants(name: str, tiny: Bench) -> None:
    tables = all_suites(on_gpu=True)[name].run(tiny)
    assert tables
    for table in tables:
        names = [row["name"] for row in table.rows]
        assert any("accumfused cuda" in row for row in names) or "cuda" in table.title, table.title
        assert len(names) == len(set(names))


def test_ours_and_torchs_recipes_are_timed_eager_and_captured(tiny: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    versus.measure(tiny, "some", [(300,), (7,)])
    recipes = ("clip + AdamW(fused)", "grad_scale trick", "clip + AdamW(foreach)", "accumfused cuda")
    expected = [*recipes, *(f"{name}, captured" for name in (*recipes, "accumfused cuda, window of 2"))]
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"some, {name}" for name in expected]
    assert all(re.search(r": GPU \S+ us.*, host cold \S+ us, warm \S+ us$", line) for line in lines)


def test_what_is_wrong_is_not_timed(
    tiny: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Idle(CudaBackend):
        def step(self, *args: Any) -> None:
            pass

    emulated = emulation.load()
    inside.replace_cuda(monkeypatch, lambda: Idle(emulated, emulated.Table))
    with pytest.raises(RuntimeError, match="not right: accumfused cuda, accumfused cuda, captured"):
        versus.measure(tiny, "some", [(300,)])
    assert "some, accumfused cuda: cannot: wrong, so not timed: the step did nothing" in capsys.readouterr().out


def test_the_probe_measures_all_formats_by_their_bytes_and_goes_on_after_an_error(
    tiny: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "elements", lambda bench, wanted, each: 5000)
    monkeypatch.setattr(probe.Probe, "folds", lambda self, name, dtype: 1 / 0)
    assert card.run(probe.Probe(tiny).parts()) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if "FAILED" in line]
    assert failed == [
        f"folds of {name}: FAILED: ZeroDivisionError: division by zero" for name in ("fp32", "bf16", "fp16")
    ]
    sizes = [round(float(line.rpartition(": ")[2].split()[0])) for line in lines if line not in failed]
    assert sizes == [28, 12, 14, 26, 14, 26, 18, 10, 20, 36, 20, 10, 30, 28]


def test_offload_is_compared_with_the_card_bit_for_bit(
    tiny: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_offload, "SHAPES", [(70, 60), (7,)])
    gpu_offload.bits(tiny, "skip")
    assert capsys.readouterr().out == "bits, skip: 13 of 13 tensors equal\n"
    monkeypatch.setattr(gpu_offload.Copies, "up", lambda *tensors: lambda: None)
    with pytest.raises(RuntimeError, match="other bits in parameter 0, parameter 1"):
        gpu_offload.bits(tiny, "AdamW")


@pytest.mark.parametrize("are_kept", [False, True])
def test_weights_that_come_late_are_found(are_kept: bool, tiny: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_offload, "STREAMED", [(500,)] * 3)
    gpu_offload.streams(tiny, are_kept=are_kept)

    def late(bench: Bench, optimizer: Any, way: str) -> None:
        if way == "up":
            gpu_offload.copies_of(optimizer).up = lambda *tensors: lambda: None  # type: ignore[method-assign]

    monkeypatch.setattr(gpu_offload, "stall", late)
    with pytest.raises(RuntimeError, match="tensors are wrong"):
        gpu_offload.streams(tiny, are_kept=are_kept)


def test_bytes_over_the_bus_are_counted(tiny: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    gpu_offload.times(tiny, "8-bit states, two-byte sums")
    *times, bus = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0].split(", ")[-1] for line in times] == ["on the card", "offload"]
    assert bus.endswith(": 2 B a parameter and micro-batch; a step 2 down, 2 up")


def test_the_host_is_timed_warm_by_calls_that_follow_their_own_like() -> None:
    order: list[str] = []
    variants = [Variant(name, lambda name=name: order.append(name)) for name in "ab"]
    timings = back_to_back(variants, HostClock())
    assert [len(timing.seconds) for timing in timings] == [200, 200]
    assert "".join(order) == "ab" + "ab" + 201 * "a" + 201 * "b"


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
    interleave([Variant("a", run)], 1, clock=CudaClock(CPU), of_host=True)
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
