"""The pages name files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
FOLDERS = "accumfused|bench|csrc|docs|examples|tests|tools"
GONE = {"CHANGELOG.md"}  # which tells of what was


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GONE], ids=lambda page: page.name)
def test_every_path_on_a_page_exists(page: Path) -> None:
    named = set(re.findall(rf"(?<![\w/.])(?:{FOLDERS})/[\w./*-]*[\w/*]", page.read_text().replace("NAME", "*")))
    assert [name for name in sorted(named) if not any(ROOT.glob(name.rstrip("/")))] == []
