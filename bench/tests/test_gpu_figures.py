"""What `make gpu` compares and measures, without a GPU: the bits, the rates, and the counters, over the emulation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import emulation
import pytest
import torch
from torch import Tensor

from accumfused.backends.cuda import CudaBackend
from bench.clock import HostClock
from bench.gpu import bits, counters, journal, predictions, probe, smoke
from bench.gpu.journal import Journal
from bench.gpu.verbs import Case

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cuda(emulate_cuda: None, emulated: Any) -> CudaBackend:
    return CudaBackend(emulated, emulated.Table)


# ---- smoke ----------------------------------------------------------------------------------------------------------


class Off:
    """A backend whose norm has another last bit."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def norm(self, *args: Any) -> Any:
        outcome = self._inner.norm(*args)
        outcome.values[1] = torch.nextafter(outcome.values[1], torch.tensor(torch.inf))
        return outcome


def without_streams() -> list[smoke.Check]:
    return [check for check in smoke.checks() if check.run not in (smoke._side_stream, smoke._graph)]


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "SIZES", (1, 129, smoke.CHUNK + 130))


def test_every_check_finds_the_bits_of_the_reference(small_sizes: None, cuda: CudaBackend, tmp_path: Path) -> None:
    own = Journal(tmp_path / "lines", "smoke")
    several = without_streams()
    assert smoke.run_checks(own, several, {"cuda": cuda}, CPU)
    lines = [line for line in journal.read(tmp_path / "lines") if line["kind"] == "bits"]
    assert len(lines) == len({(line["check"], line["gradients"]) for line in lines}) == len(several)


def test_a_different_bit_is_found_said_and_survived(small_sizes: None, cuda: CudaBackend, tmp_path: Path) -> None:
    own = Journal(tmp_path / "lines", "smoke")
    several = [check for check in without_streams() if check.name in ("norm", "accumulate")]
    assert not smoke.run_checks(own, several, {"cuda": Off(cuda)}, CPU)
    lines = [line for line in journal.read(tmp_path / "lines") if line["kind"] == "bits"]
    assert [line["ok"] for line in lines] == [line["check"] != "norm" for line in lines]
    first = lines[0]["first"]
    assert (first["tensor"], first["first"], first["differ"], first["of"]) == ("coefficient, norm, skipped", 1, 1, 3)
    assert int(first["found_bits"], 16) == int(first["expected_bits"], 16) + 1


def test_a_difference_names_the_first_place_and_both_bits() -> None:
    right = torch.tensor([1.0, 0.0, torch.nan, 2.0], dtype=torch.bfloat16)
    left = torch.tensor([1.0, -0.0, torch.nan, 3.0], dtype=torch.bfloat16)
    assert bits.differences({"x": right.clone()}, {"x": right}) == []
    (found,) = bits.differences({"x": left}, {"x": right})
    assert (found["differ"], found["of"], found["first"], found["last"]) == (2, 4, 1, 3)
    assert (found["found_bits"], found["expected_bits"]) == ("0x8000", "0x0000")
    assert bits.differences({}, {"x": right})[0]["found"] == "None"


def test_an_unusable_gpu_begins_a_new_process_behind_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(backend: Any, device: torch.device) -> dict[str, Tensor]:
        raise RuntimeError("CUDA error: misaligned address")

    started: list[int] = []
    monkeypatch.setattr(smoke, "_usable", lambda device: False)
    several = [smoke.Check(name, torch.float32, fails) for name in ("a", "b")]
    own = Journal(tmp_path / "lines", "smoke")
    assert not smoke.run_checks(own, several, {"cuda": None}, torch.device("cuda", 0), 1, started.append)
    assert started == [2]
    (line,) = [line for line in journal.read(tmp_path / "lines") if line["kind"] == "bits"]
    assert (line["check"], line["error"]) == ("b", "RuntimeError: CUDA error: misaligned address")


def test_triton_makes_the_brief_checks_alone(tmp_path: Path) -> None:
    """It compiles for each of them, and the CPU's tests of it have all formats."""
    own = Journal(tmp_path / "lines", "smoke")
    several = [smoke.Check(name, torch.float32, lambda *_: {}, brief=name == "a") for name in ("a", "b")]
    smoke.run_checks(own, several, {"cuda": None, "triton": None}, CPU)
    lines = [line for line in journal.read(tmp_path / "lines") if line["kind"] == "bits"]
    assert [(line["backend"], line["check"]) for line in lines] == [("cuda", "a"), ("cuda", "b"), ("triton", "a")]


def test_a_step_that_is_not_skipped_is_found(small_sizes: None, cuda: CudaBackend, monkeypatch: Any) -> None:
    check = next(check for check in smoke.checks() if check.run is smoke._skip)
    assert smoke.compare(check, cuda, CPU, "torch", {})["ok"]
    monkeypatch.setattr(smoke.torch, "inf", 3.0)
    assert not smoke.compare(check, cuda, CPU, "torch", {})["ok"]


# ---- probe ----------------------------------------------------------------------------------------------------------


def test_the_probe_measures_all_that_was_predicted_and_two_modules_in_turn(
    cuda: CudaBackend, emulated: Any, tmp_path: Path
) -> None:
    subjects = {"this": cuda, "that": probe.module_at(emulation.build(ROOT / "build" / "emulation"))}
    own = Journal(tmp_path / "lines", "probe")
    clock = HostClock()
    tiny = probe.Probe(own, CPU, subjects, 3000, clock, clock, rounds=1, allow=emulated.allow)
    tiny.measure_ceilings = lambda: None  # type: ignore[method-assign]  # test_bench_gpu.py has them
    tiny.measure_all({name: [(300,), (7,)] for name in predictions.MICROSECONDS})
    lines = journal.read(tmp_path / "lines")
    assert not [line for line in lines if line.get("ok") is False]
    measured = {line["what"]: line for line in lines if "what" in line}
    assert predictions.SHARES.keys() | predictions.MICROSECONDS.keys() <= measured.keys()
    for name, known in predictions.SHARES.items():
        assert measured[name]["so"] in ("slower", "as predicted", "faster")
        found = measured[name].get("bytes_an_element")
        if known.bytes and found is not None:
            assert found == pytest.approx(known.bytes, abs=0.1), name
    timed = [line for line in lines if "by" in line]
    orders = [line["by"] for line in timed if line["what"].endswith(", window of 4")]
    assert orders == ["overlapping", "one after another"] * len(predictions.MICROSECONDS)
    modules = [line for line in timed if not line["what"].endswith(", window of 4")]
    by = [line["by"] for line in modules if line["kind"] != "graph replay"]
    assert by == ["this", "that"] * (len(by) // 2)
    replays = [line["by"] for line in modules if line["kind"] == "graph replay"]
    assert replays == ["this", "that", "this, norm apart", "this, no queue"] * len(predictions.MICROSECONDS)
    assert all(line["times_as_fast_as_the_first"] > 0 for line in timed)


def test_the_probe_compares_one_launch_with_two(cuda: CudaBackend, emulated: Any, tmp_path: Path) -> None:
    own = Journal(tmp_path / "lines", "probe")
    tiny = probe.Probe(own, CPU, {}, 9, HostClock(), HostClock(), allow=emulated.allow)
    param = torch.ones(9, requires_grad=True)
    param.grad = torch.ones(9)
    optimizer = Case().optimizer([param], cuda)
    optimizer.step()
    made = []
    for switch in (None, "one_launch", None):
        before = emulated.launches()
        tiny.without(switch, optimizer.step)()
        made.append(emulated.launches() - before)
    assert made == [1, 2, 1]


def test_what_fails_in_the_probe_is_said_and_the_next_part_follows(tmp_path: Path) -> None:
    class Fails:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("CUDA error: no")

    own = Journal(tmp_path / "lines", "probe")
    clock = HostClock()
    tiny = probe.Probe(own, CPU, {"cuda": Fails()}, 300, clock, clock, rounds=1)
    for case in (Case(), Case("Lion")):
        tiny.section("step", case.name, lambda case=case: tiny.measure_step(case))  # type: ignore[misc]
    lines = journal.read(tmp_path / "lines")
    assert [(line["what"], line["error"]) for line in lines] == [
        (case.name, "RuntimeError: CUDA error: no") for case in (Case(), Case("Lion"))
    ]


def test_a_prediction_says_on_which_side_of_it_a_figure_is() -> None:
    known = predictions.Prediction(4, (0.9, 0.95))
    assert [known.verdict(share) for share in (0.89, 0.9, 0.95, 0.96)] == ["slower", *["as predicted"] * 2, "faster"]


def test_without_counters_the_report_has_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    counters.count(Journal(tmp_path / "lines", "probe"))
    (line,) = journal.read(tmp_path / "lines")
    assert line["says"] == "not counted: ncu (Nsight Compute) is not on the PATH"


NCU = """#!{python}
import sys
metrics = sys.argv[sys.argv.index("--metrics") + 1].split(",")
if len(metrics) > {most}:
    sys.exit("==ERROR== Failed to find metric")
print('"ID","Kernel Name","Metric Name","Metric Value"')
for number in range({launches}):
    for place, metric in enumerate(metrics):
        value = 1024 if "requests" in metric else (number + 1) * 134217728 * (place + 1)
        print(f'"{{number}}","step_kernel(Work)","{{metric}}","{{value}}"')
"""


def test_the_program_under_ncu_makes_the_launches_that_are_named(
    cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: watching.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: None)
    known = list(counters.launches())
    assert counters.watched(CPU, 3000) == known
    assert len(watching) == len(known)


@pytest.mark.parametrize(("most", "columns"), [(99, True), (3, False)], ids=["all", "an older ncu"])
def test_the_counters_are_named_by_their_launch(
    most: int, columns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = list(counters.launches())
    program = tmp_path / "ncu"
    program.write_text(NCU.format(python=sys.executable, most=most, launches=len(known)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    counters.count(Journal(tmp_path / "lines", "probe"))
    lines = journal.read(tmp_path / "lines")
    assert [line["what"] for line in lines][:3] == ["norm, fp32", "accumulate, fp32", known[2][1].name]
    assert (lines[1]["read, B/el"], lines[1]["written, B/el"]) == (2, 4)
    assert ("into L2, B/el" in lines[0]) is columns
    assert ("ALU, %" in lines[0]) is columns
    waits = {"long_scoreboard", "short_scoreboard", "wait", "math_pipe_throttle", "not_selected"}
    assert (waits <= lines[0].get("warps wait for", {}).keys()) is columns
    assert len(lines) == len(known)
