"""What tools and readers see of the package before anything runs: signatures, help, static types, the example."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import json
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import accumfused as af
from accumfused.formats import kinds
from accumfused.loop import batch_size, batches
from accumfused.optimizers import ALL, PEERS
from accumfused.optimizers.making import arguments_of
from accumfused.settings import SettingArguments, Settings

ROOT = Path(__file__).parents[2]
SETTINGS = inspect.signature(Settings, eval_str=True).parameters
every_taker = pytest.mark.parametrize("taker", [*ALL, af.fuse], ids=lambda taker: taker.__name__)


def documented(taker: Any) -> list[str]:
    """The names that a docstring's Args describe."""
    args = inspect.getdoc(taker).partition("Args:\n")[2].partition("\n\n")[0]
    return [name for names in re.findall(r"^    (\w[\w, ]*):", args, re.MULTILINE) for name in names.split(", ")]


def test_each_setting_has_a_description_and_a_type_for_static_tools() -> None:
    assert documented(Settings) == [*SETTINGS]
    types = {name: repr(value.__forward_arg__) for name, value in SettingArguments.__annotations__.items()}
    assert types == {field.name: repr(field.type) for field in dataclasses.fields(Settings)}


@every_taker
def test_every_setting_is_in_the_signature_and_in_the_help(taker: Any) -> None:
    found = inspect.signature(taker).parameters
    ours = {name: parameter for name, parameter in found.items() if name in SETTINGS}
    assert ours == {name: each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, each in SETTINGS.items()}
    assert not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in found.values())
    named = documented(taker)
    assert sorted(named) == sorted(found)
    assert [name for name in named if name in SETTINGS] == [*SETTINGS]


def arguments(optimizer: Any) -> dict[str, inspect.Parameter]:
    """What an optimizer takes beside parameters and settings."""
    found = inspect.signature(optimizer).parameters
    return {name: each for name, each in found.items() if name != "params" and name not in SETTINGS}


@pytest.mark.parametrize(
    "optimizer", [each for each in ALL if each not in PEERS.values()], ids=lambda each: each.__name__
)
def test_a_class_has_the_arguments_and_defaults_of_its_rules(optimizer: Any) -> None:
    found = {name: each.default for name, each in arguments(optimizer).items()}
    assert found == arguments_of(optimizer.rules)
    by_keyword = [name for name, each in arguments(optimizer).items() if each.kind is each.KEYWORD_ONLY]
    assert by_keyword == [name for name, default in found.items() if isinstance(default, bool)]


@pytest.mark.parametrize(("theirs", "ours"), PEERS.items(), ids=lambda each: each.__name__)
def test_a_class_has_the_arguments_and_defaults_of_torchs(theirs: Any, ours: Any) -> None:
    found, expected = arguments(ours), arguments(theirs)
    assert found.keys() - expected.keys() <= {"cautious", "cautious_weight_decay"}
    assert {name: (each.kind, each.default) for name, each in found.items() if name in expected} == {
        name: (each.kind, each.default) for name, each in expected.items()
    }
    assert [name for name, each in found.items() if each.kind is not each.KEYWORD_ONLY] == [
        name for name, each in expected.items() if each.kind is not each.KEYWORD_ONLY
    ]


@pytest.mark.parametrize("optimizer", ALL, ids=lambda each: each.__name__)
def test_help_begins_with_a_line_and_the_formula_and_settings_follow_the_arguments(optimizer: Any) -> None:
    text = str(inspect.getdoc(optimizer))
    assert re.match(r"[A-Z].*\.\n\n(    \S.* (<-|=) .*\n( {6,}.*\n)?)+\n", text)
    assert documented(optimizer)[-len(SETTINGS) :] == [*SETTINGS]
    for rule in (each for each in optimizer.rules if each.__module__ == optimizer.__module__):
        least = kinds.least_eps(rule, kinds.Format())
        assert not least or re.search(rf"at\s+least\s+{least:g}", text)


@every_taker
def test_an_unknown_keyword_is_refused_with_the_nearest_one(taker: Any) -> None:
    params = [Parameter(torch.ones(3, 1))]
    hints = {
        "max_norm": "; did you mean 'max_grad_norm'?",
        "weight_decy": "; did you mean 'weight_decay'?",
        "elbow": "",
    }
    for typo, hint in hints.items():
        given: Any = torch.optim.SGD(params) if taker is af.fuse else params
        has_decay = "weight_decay" in inspect.signature(taker).parameters
        hint = hint if typo != "weight_decy" or has_decay else ""
        text = f"{taker.__name__}() got an unexpected keyword argument {typo!r}{hint}"
        with pytest.raises(TypeError, match=re.escape(text) + "$"):
            taker(given, **{typo: 1.0})
        assert taker is not af.fuse or type(given) is torch.optim.SGD


def test_help_shows_the_optimizers_own_text_and_the_signature_that_a_subclass_was_given() -> None:
    class Mine(af.AdamW):
        def __init__(self, params: Any, warmth: float = 1.0) -> None:
            super().__init__(params, lr=warmth, max_grad_norm=1.0)

    assert [*inspect.signature(Mine).parameters] == ["params", "warmth"]
    text = pydoc.plain(pydoc.render_doc(af.AdamW))
    assert "max_grad_norm: float | None = None" in text
    assert "the limit, > 0, of the global norm" in text
    assert str(torch.optim.AdamW.__doc__).strip().splitlines()[0] not in text


def test_the_packages_example_stands_first_in_its_help_and_all_examples_run() -> None:
    text = pydoc.plain(pydoc.render_doc(af))
    assert text.index(">>> optimizer = af.AdamW(") < text.index("PACKAGE CONTENTS")
    for module, least in ((af, 6), (batches, 1), (batch_size, 4)):
        found = doctest.testmod(module)
        assert (found.failed, found.attempted >= least) == (0, True)


def test_an_integration_without_its_framework_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "accumfused.integrations.huggingface", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"transformers.*pip install '\.\[huggingface\]'") as raised:
        importlib.import_module("accumfused.integrations.huggingface")
    assert raised.value.name == "transformers"


def test_no_module_has_the_name_of_something_public() -> None:
    """Otherwise an import of the module would replace what the package gives under that name."""
    modules = {path.stem for path in ROOT.glob("accumfused/**/*.py")}
    assert len(modules) > 50
    assert modules & {*af.__all__} == {"clip", "schedule"}  # which are public themselves


def test_completion_shows_the_public_names_and_older_spellings_keep_working() -> None:
    assert {*dir(af)} == {*af.__all__, "__version__"}
    for module in (af.clip, af.schedule):
        for name in module.__all__:
            assert getattr(af, name) is getattr(module, name)


# Pages whose code has types that others do not have: frameworks.
UNTYPED = {"distributed", "fabric", "lightning", "trl"}
ALLOWED = "# mypy: allow-untyped-calls, allow-untyped-defs, allow-incomplete-defs, allow-redefinition\n"
PROMISED = """
from typing_extensions import assert_type  # torch brings it
import torch
import accumfused as af
params = torch.nn.Linear(3, 3).parameters()
optimizer = af.fuse(torch.optim.AdamW(params), max_grad_norm=1.0)
assert_type(optimizer, af.AdamW)
assert_type(optimizer.grad_norm, torch.Tensor)
assert_type(af.clip.PerTensor(1.0), af.PerTensor)
assert_type(af.fuse(torch.optim.Adam(params)), af.Adam)
assert_type(af.fuse(torch.optim.SGD(params)), af.SGD)
assert_type(af.fuse(torch.optim.RMSprop(params)), af.RMSprop)
assert_type(muon := af.fuse(torch.optim.Muon(params)), af.Muon)
af.ClipGroup([muon, optimizer], max_grad_norm=1.0).step()
lion = af.Lion(params, 1e-4, betas=(0.9, 0.99), cautious=True, max_grad_norm=1.0)
assert_type(lion, af.Lion)
assert_type(lion.accumulate(weight=3), None)
af.AdEMAMix(params, alpha_warmup=None, state_dtype=torch.bfloat16)
af.AdamWScheduleFree(params, inner_momentum=0.9).eval()
af.Lion(params, beta=0.9)  # type: ignore[call-arg]
af.Signum(params, lr="fast")  # type: ignore[arg-type]
af.Adan(params, max_grad_norm="1")  # type: ignore[arg-type]
"""


def test_the_code_of_the_documentation_type_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from run_blocks import blocks

    (tmp_path / "promised.py").write_text(ALLOWED + PROMISED)
    for page in (ROOT / "README.md", ROOT / "docs/index.md", *ROOT.glob("docs/guide/*.md")):
        found = [block.code for block in blocks(page.read_text()) if block.language == "python"]
        if page.stem not in UNTYPED:
            (tmp_path / f"page_{page.stem.replace('-', '_')}.py").write_text(ALLOWED + "\n".join(found))
    assert len([*tmp_path.glob("*.py")]) > 12
    # As make lint checks, whose cache has all of torch.
    command = [sys.executable, "-m", "mypy", *map(str, tmp_path.glob("*.py"))]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


PROMISED_OF_RULES = """
from typing_extensions import assert_type
assert_type(optimizer.grad_norm, torch.Tensor)
kind: type[af.FusedOptimizer] = HeavySign
af.ClipGroup([HeavySign(model.parameters(), 0.02, weight_decay=0.1), optimizer], max_grad_norm=1.0).step()
optimizer.accumulate(wait=3)  # type: ignore


class OtherRule(af.Rule):
    name = "other"
    hypers = {"lr": 1e-3}

    @staticmethod
    def update(h: Any, step: Symbol, p: Symbol, g: Symbol, *states: Symbol) -> tuple[Symbol, ...]:
        return (p - g.mean() * h.lr,)  # type: ignore
"""


def test_a_rule_as_its_page_writes_it_and_its_class_pass_strict_type_checkers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from run_blocks import blocks

    found = [block.code for block in blocks((ROOT / "docs/guide/rules.md").read_text()) if block.language == "python"]
    page = tmp_path / "page.py"
    page.write_text("\n".join([*found, PROMISED_OF_RULES]))
    # pyright does not look where pytest was started, as mypy does.
    rules = {"typeCheckingMode": "strict", "reportUnnecessaryTypeIgnoreComment": "error", "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(rules))
    pyright = ["basedpyright", "--project", str(tmp_path), "--pythonpath", sys.executable]
    for checker in (["mypy", "--strict", str(page)], pyright):
        checked = subprocess.run([sys.executable, "-m", *checker], cwd=ROOT, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr
