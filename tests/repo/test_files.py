"""The pages name files that are there, and a test imports no other test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import accumfused

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
FOLDERS = "accumfused|bench|csrc|docs|examples|tests|tools"
GONE = {"CHANGELOG.md"}  # which tells of what was


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GONE], ids=lambda page: page.name)
def test_every_path_on_a_page_exists(page: Path) -> None:
    named = set(re.findall(rf"(?<![\w/.])(?:{FOLDERS})/[\w./*-]*[\w/*]", page.read_text().replace("NAME", "*")))
    assert [name for name in sorted(named) if not any(ROOT.glob(name.rstrip("/")))] == []


def test_no_test_imports_another() -> None:
    """What tests share lies beside them, or in tests/ itself, and begins with no test_."""
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("bench/tests/**/*.py")]
    assert len(files) > 40
    line = re.compile(r"^\s*(?:from|import) +test_\w+", re.MULTILINE)
    found = [(path.name, line.findall(path.read_text())) for path in files]
    assert [(name, lines) for name, lines in found if lines] == []


def test_a_wheel_has_every_folder_of_the_package() -> None:
    folders = {path.parent.relative_to(ROOT) for path in ROOT.glob("accumfused/**/*.py")}
    packages = (ROOT / "pyproject.toml").read_text().partition("packages = [")[2].partition("]")[0]
    listed = re.findall(r'"(accumfused[\w.]*)"', packages)
    assert sorted(listed) == sorted(".".join(folder.parts) for folder in folders)


def test_the_citation_and_the_forms_say_what_the_package_does() -> None:
    assert f"\nversion: {accumfused.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    forms = [*ROOT.glob(".github/ISSUE_TEMPLATE/[!c]*.yml")]
    assert len(forms) == 2
    assert all("`accumfused doctor`" in form.read_text() for form in forms)
