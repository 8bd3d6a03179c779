"""The structure does not grow back: see tools/house.py, which prints it."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import accumfused as af

PATH = Path(__file__).parents[2] / "tools" / "house.py"


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_module_imports_itself_in_any_number_of_steps_or_one_of_ours_within_a_function(house: ModuleType) -> None:
    known = house.modules()
    assert len(known) > 50
    assert house.circles(known) == []
    assert house.inner_imports(known) == []


def test_no_module_uses_the_private_names_of_another(house: ModuleType) -> None:
    assert house.crossings(house.modules()) == []


def test_no_class_has_more_than_20_methods_or_12_attributes(house: ModuleType) -> None:
    for name, (methods, attributes) in house.classes(house.modules()).items():
        assert methods <= 20, name
        assert attributes <= 12 or name.startswith("accumfused.settings."), name  # settings are one flat list


def test_no_module_has_the_name_of_something_public(house: ModuleType) -> None:
    assert {name.rpartition(".")[2] for name in house.modules()}.isdisjoint(af.__all__)


def test_the_picture_in_the_documentation_is_that_of_the_code(house: ModuleType) -> None:
    page = (PATH.parents[1] / "docs" / "internals" / "architecture.md").read_text()
    assert f"```mermaid\n{house.picture(house.modules())}\n```" in page


def test_a_step_goes_one_way(house: ModuleType) -> None:
    files, bounces, _ = house.way_of_a_step()
    assert len(files) <= 6, files
    assert bounces == []


def test_what_is_watched_for_is_seen(house: ModuleType) -> None:
    wrong = {
        "accumfused.a": ast.parse("from accumfused import b\ndef f():\n    import accumfused.b\n    b._hidden"),
        "accumfused.b": ast.parse("from accumfused.a import f\n_hidden = 1"),
    }
    assert house.circles(wrong) == [{"accumfused.a", "accumfused.b"}]
    assert house.inner_imports(wrong) == ["accumfused.a: f()"]
    assert house.crossings(wrong) == ["accumfused.a: _hidden"]
