"""The pages of docs/: their code runs, and what they list is what the code has."""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import importlib
import os
import re
import sys
from pathlib import Path
from typing import get_args

import processes
import pytest

import accumfused as af
from accumfused import settings
from accumfused.auditing.hints import CAUSES

ROOT = Path(__file__).parents[2]
if not (ROOT / "tools").exists():
    pytest.skip("needs the source", allow_module_level=True)
sys.path.insert(0, str(ROOT / "tools"))
from run_blocks import blocks, run_python  # noqa: E402

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
RUNNING = [page for page in PAGES if "```python" in page.read_text()]
NEEDS = {
    "huggingface.md": ("transformers",), "trl.md": ("transformers",), "accelerate.md": ("accelerate",),
    "lightning.md": ("lightning",), "fabric.md": ("lightning",),
}  # fmt: skip
COLUMNS = 76  # of code that the site shows whole


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def run_page(page: Path, folder: Path) -> None:
    """In a process that has torch already: the page's Python code in an empty folder; files get what it says."""
    for number, name in ((1, "said"), (2, "complained")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    os.environ |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    (folder / "empty").mkdir()
    os.chdir(folder / "empty")
    run_python(page, [block for block in blocks(page.read_text()) if block.language == "python"])


@pytest.mark.parametrize("page", RUNNING, ids=named)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    for package in NEEDS.get(page.name, ()):
        pytest.importorskip(package)
    assert "```sh" not in page.read_text(), "run_page() leaves it out"
    process = processes.context().Process(target=run_page, args=(page, tmp_path))
    process.start()
    process.join()
    complained = (tmp_path / "complained").read_text()
    said = "" if page.name in NEEDS else complained  # frameworks talk
    assert (process.exitcode, said) == (0, ""), (tmp_path / "said").read_text() + complained


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "index.md", *sorted(DOCS.glob("guide/*.md"))], ids=named)
def test_what_a_reader_sees_of_a_page_is_all_of_its_code(page: Path) -> None:
    text = page.read_text()
    assert "<!--" not in text, "code that only the test sees"
    code = [line for block in blocks(text) if block.language == "python" for line in block.code.splitlines()]
    assert [line for line in code if len(line) > COLUMNS] == []


def rows(page: str) -> list[list[str]]:
    """The cells of all tables of a page, without their heads."""
    lines = (DOCS / page).read_text().splitlines()
    cells = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in cells]


def test_the_table_of_settings_is_that_of_the_code() -> None:
    fields = {field.name: field for field in dataclasses.fields(settings.Settings)}
    table = {name.strip("`"): rest for name, *rest in rows("reference/settings.md")}
    assert [name for name in table if name in fields] == [*fields]
    kinds = {
        "nonfinite": settings.Nonfinite, "backend": settings.BackendName, "master_weights": settings.MasterWeights,
    }  # fmt: skip
    for name, field in fields.items():
        values, default = table[name][:2]
        assert default == f"`{field.default!r}`".replace("'", '"'), name
        for value in {*get_args(kinds.get(name))} - {"reference"}:  # which the tests add
            assert f'`"{value}"`' in values, name
        assert ("None" in values) == ("None" in str(field.type) or name.endswith("_group")), name


def texts() -> set[str]:
    """All literal strings of the package, and the literal pieces of those with numbers in them."""
    nodes = (node for path in (ROOT / "accumfused").rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_every_error_on_the_page_is_in_the_code() -> None:
    messages = [message.strip("`") for message, *_ in rows("reference/errors.md")]
    assert len(messages) > 40
    known = texts()
    pieces = [(message, piece) for message in messages for piece in message.split("…") if piece]
    assert [message for message, piece in pieces if not any(piece in text for text in known)] == []


def test_the_table_of_an_audits_causes_is_that_of_the_code() -> None:
    table = [row for row in rows("guide/audit.md") if not row[0].startswith("`--")]
    assert table == [[f"`{name}`", cause.text] for name, cause in CAUSES.items()]


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(page.read_text() for page in DOCS.glob("reference/api/*.md"))
    listed = re.findall(r"^::: accumfused\.(\w+)$", pages, re.MULTILINE)
    assert sorted(listed) == sorted(af.__all__)


def bytes_a_parameter(loop: str) -> float:
    """The example that measures the page on memory, with one layer."""
    sys.path.append(str(ROOT / "examples"))
    measure = importlib.import_module("memory_of_loops").measure
    libc = ctypes.CDLL(None)
    for setting, value in ((-3, 4096), (-1, 0)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, as the example sets them
        libc.mallopt(setting, value)
    peak, parameters = measure(loop, 1, 1)
    return float(peak / parameters)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system reports no peak that can be reset")
def test_a_window_holds_fresh_gradients_beside_its_sums_and_released_ones_do_not() -> None:
    with processes.context().Pool(1, maxtasksperchild=1) as pool:
        beside, released = pool.map(bytes_a_parameter, ["fp32: accumulate()", "fp32: released"], chunksize=1)
    assert 20 < beside < 24  # 4 for each of weights, two states, sums and gradients; the activations are small
    assert 16 < released < beside - 1.5  # a bucket is more than half of this model's gradients
