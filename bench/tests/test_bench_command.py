"""The benchmark's command line: what it chooses for the suites, and what is left of an interrupted run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich")

import bench.__main__ as command
from bench import options, progress, suites
from bench.ceilings import Ceilings
from bench.options import Chosen, OptionError
from bench.report import Column, Table
from bench.shapes import GPT2, gpt2
from bench.stored import load, place
from bench.suites import Bench


def no_loops(elements: int = 0) -> Any:
    raise RuntimeError("no compiler")


@pytest.fixture
def bench() -> Bench:
    return Bench(Ceilings(no_loops), quick=True, rounds=1)


def run(monkeypatch: pytest.MonkeyPatch, suites: dict[str, Any], *arguments: str) -> None:
    monkeypatch.setattr(command, "all_suites", lambda on_gpu=False: suites)
    monkeypatch.setattr(command, "CpuLoops", no_loops)
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    command.main()


def one_table(bench: Bench) -> list[Table]:
    return [Table(f"tail, {GPT2}", [Column("name", "")], [{"name": str(len(bench.shapes(GPT2)))}])]


def test_an_interrupted_run_keeps_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(bench: Bench) -> list[Table]:
        raise KeyboardInterrupt

    path = tmp_path / "out.json"
    suites = {"first": one_table, "second": interrupted, "third": one_table}
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, suites, "--json", str(path))
    assert ended.value.code == 130
    results = load(path)
    assert results.interrupted
    assert [table.suite for table in results.tables] == ["first", "ceilings"]
    said = capsys.readouterr().out
    assert "suite 1 of 3: first, about 2 min left (a first guess, from an idle machine)" in said
    assert "suite 2 of 3: second, about 10 s left (at the pace so far)" in said  # the first took next to nothing
    assert "suite 3" not in said


def test_a_whole_run_is_not_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, {"first": one_table}, "--json", str(tmp_path), "--quick")
    (path,) = tmp_path.glob("*/*.json")
    assert path == place(str(tmp_path), load(path).machine)
    assert "interrupted" not in json.loads(path.read_text())


def test_the_commands_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "compare", "no.json", "no.json"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2


def test_a_models_shapes_take_the_place_and_unused_options_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models_of_test.py").write_text(
        "import torch\nmodule = lambda: torch.nn.Linear(3, 2)\nshapes = lambda: [(4, 5), [6]]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert options.model_shapes("models_of_test:module") == [(2, 3), (2,)]
    assert options.model_shapes("models_of_test:shapes") == [(4, 5), (6,)]
    arguments = ("--model", "models_of_test:module", "--dtype", "bf16", "--json", str(tmp_path / "out.json"))
    run(monkeypatch, {"first": one_table}, *arguments)
    results = load(tmp_path / "out.json")
    table = results.tables[0]
    assert table.rows == [{"name": "2"}]
    assert table.title == f"tail, models_of_test:module in place of {GPT2}"
    assert table.notes == ["--dtype bf16 makes no difference in this suite"]
    assert results.machine["options"] == ["--dtype bf16", "--model models_of_test:module"]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("models", "takes MODULE:FUNCTION"),
        ("no_such_module:f", "no_such_module does not import: ModuleNotFoundError: No module named 'no_such_module'"),
        ("bad_models:f", "bad_models does not import: ValueError: two lines"),
        ("good_models:f", "good_models has no function f"),
        ("good_models:raises", r"raises\(\) failed: ZeroDivisionError: division by zero"),
        ("good_models:empty", r"empty\(\) has no parameters"),
        ("good_models:frozen", r"frozen\(\) has no parameters"),
        ("good_models:number", r"number\(\) returned an int, not a module or a list of shapes"),
        ("good_models:strings", r"strings\(\) returned other things"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, said: str
) -> None:
    (tmp_path / "bad_models.py").write_text("raise ValueError('two\\nlines')")
    (tmp_path / "good_models.py").write_text(
        "import torch\nraises = lambda: 1 / 0\nempty = torch.nn.ReLU\nnumber = lambda: 5\nstrings = lambda: ['ab']\n"
        "frozen = lambda: torch.nn.Linear(2, 2).requires_grad_(False)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OptionError, match=said) as caught:
        options.model_shapes(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5", ""])
def test_threads_are_a_number_of_at_least_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, {"first": one_table}, f"--threads={given}")
    assert ended.value.code == 2
    assert f"argument --threads: {given!r} is no number of threads: give 1 or more" in capsys.readouterr().err


def test_peers_and_backends_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options.peers, "KNOWN", {"optimi": None, "fused": None}, raising=False)
    assert [options.peer_names(given) for given in ("all", "none", "fused, optimi")] == [None, (), ("fused", "optimi")]
    with pytest.raises(
        OptionError, match="unknown apex; give all, none, or names with commas between them: optimi, fused"
    ):
        options.peer_names("apex,fused")
    with pytest.raises(OptionError, match="no name"):
        options.peer_names(",")
    cpu = torch.device("cpu")
    assert options.backend("torch", cpu) == "torch"
    with pytest.raises(OptionError, match="unknown; choose from auto, cuda"):
        options.backend("rocm", cpu)
    with pytest.raises(OptionError, match="--backend cuda cannot run: "):
        options.backend("cuda", cpu)


def test_a_bench_carries_what_was_chosen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = options.chosen(bench)
    assert (plain.quick, plain.rounds, plain.peers, plain.dtype) == (True, 1, None, None)
    assert plain.shapes(GPT2) == gpt2(64, 2, 512, 64)
    other = options.chosen(
        bench, backends=("torch",), peers=(), given={"backends": "--backend torch", "peers": "--peers none"}
    )
    table = Table("t", [])
    other.begin()
    assert (getattr(other, "peers", None), isinstance(other, Chosen)) == ((), True)
    other.mark([table])
    assert table.notes == ["--backend torch makes no difference in this suite"]
    monkeypatch.setattr(suites, "available_bytes", lambda device: 3 * 10**9)
    assert plain.fits(27 * 10**8)  # with a tenth to spare
    assert not plain.fits(3 * 10**9)
    assert plain.skipped(4 * 10**9) == "skipped: needs 4.0 GB, 3.0 are free"
    monkeypatch.setattr(suites, "available_bytes", lambda device: None)
    assert plain.fits(10**18)


def test_the_estimate_follows_the_pace_so_far() -> None:
    usual = progress.TYPICAL
    assert progress.remaining(["tail", "small"], {}, on_gpu=False, quick=False) == usual["tail"] + usual["small"]
    half = {"tail": usual["tail"] / 2}
    assert progress.remaining(["small"], half, on_gpu=False, quick=False) == pytest.approx(usual["small"] / 2)
    assert progress.remaining(["tail"], {}, on_gpu=False, quick=True) < usual["tail"]
