"""Every suite on a CPU at tiny sizes, and what it finds before a time counts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("rich")

from accumfused.loop import linears
from bench import exact, shapes
from bench.ceilings import PIECE, Ceilings, CpuLoops
from bench.measure import Variant, interleave
from bench.suites import CPU_SUITES, Bench, all_suites, backward, lean, train
from bench.tables import compared
from bench.workload import Workload


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
