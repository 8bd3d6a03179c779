"""The benchmark's command line: what it refuses, what it chooses for the suites, what an interrupted run leaves."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("rich")

import bench.__main__ as command
from bench.shapes import GPT2
from bench.suites import Bench
from bench.tables import Table, load


def tensors(bench: Bench) -> list[Table]:
    (name,) = bench.models(GPT2)
    return [Table(name, [{"name": str(shape)} for shape in bench.models(GPT2)[name][:2]])]


def fails(bench: Bench) -> list[Table]:
    raise RuntimeError("a parameter is 1.0 off")


def run(monkeypatch: pytest.MonkeyPatch, suites: dict[str, Any], *arguments: str) -> None:
    modules = {name: SimpleNamespace(run=run, FOLLOWS=("model",)) for name, run in suites.items()}
    monkeypatch.setattr(command, "all_suites", lambda on_gpu: modules)
    monkeypatch.setattr(command, "CpuLoops", fails)
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    command.main()


def test_an_interrupted_run_keeps_the_suites_that_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "out.json"

    def second(bench: Bench) -> list[Table]:
        assert list(load(path).suites) == ["first"]  # figures are written as soon as a suite has them
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, {"first": tensors, "second": second, "third": tensors}, "--json", str(path))
    assert ended.value.code == 130
    assert load(path).interrupted
    assert list(load(path).suites) == ["first"]


def test_a_suite_that_fails_is_named_and_the_others_run_and_say_what_they_lose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(bench: Bench) -> list[Table]:
        return [Table("t", [{"name": "stock", "ms": [9.0, 10, 11]}, {"name": "accumfused", "ms": [14.0, 15, 16]}])]

    with pytest.raises(SystemExit, match="failed: first"):
        run(monkeypatch, {"first": fails, "second": lost}, "--json", str(tmp_path / "out.json"))
    said = capsys.readouterr().out
    assert "a parameter is 1.0 off" in said
    assert "accumfused: 1.50 times as slow as stock (ms)" in said
    assert list(load(tmp_path / "out.json").suites) == ["second"]


MODELS = """
import torch
module = lambda: torch.nn.Linear(3, 2)
shapes = lambda: [(4, 5), [6], (0, 7)]
frozen = lambda: torch.nn.Linear(2, 2).requires_grad_(False)
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models_of_test.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("models")
def test_a_models_shapes_take_the_place_of_the_suites_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.model("models_of_test:shapes") == ("models_of_test:shapes", [(4, 5), (6,)])
    run(monkeypatch, {"first": tensors}, "--model", "models_of_test:module", "--json", str(tmp_path / "out.json"))
    results = load(tmp_path / "out.json")
    (table,) = results.suites["first"]
    assert (table.title, [row["name"] for row in table.rows]) == ("models_of_test:module", ["(2, 3)", "(2,)"])
    assert results.machine["options"] == ["--model models_of_test:module"]


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tail"], "unknown suite tail for cpu; choose from update, window"),
        (["graph"], "unknown suite graph for cpu"),
        (["small", "--model=models_of_test:module"], "small does not follow ['model']; update, window, lean, "),
        (["--device=cuda", "small"], "finds no GPU that it can use"),
        (["--backend=cuda"], "--backend cuda cannot run: "),
        (["--model=models_of_test:frozen"], "has no parameters that are trained"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_options_are_refused_in_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert said in line


def test_without_names_the_options_choose_the_suites() -> None:
    def chosen(*arguments: str) -> list[str]:
        return list(command.chosen_suites(command.arguments().parse_args(arguments)))

    assert len(chosen()) == 10
    assert chosen("--model", "bench.shapes:gpt2") == ["update", "window", "lean", "kernels", "offload"]
    assert "graph" in chosen("--device", "cuda")
