"""MkDocs' hooks.

Files outside docs/ that pages link to join the site. A table's cell knows
its column's head, which site.css shows on a phone; a table of numbers
scrolls there. Each page has a copy in Markdown, and llms.txt lists them.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, InclusionLevel

LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)")
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
HEAD = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
CELL = re.compile(r"<td[^>]*>(.*?)</td>", re.DOTALL)
PAGES: list[Any] = []


def on_files(files: Any, config: Any) -> Any:
    docs = Path(config.docs_dir).resolve()
    for page in list(files.documentation_pages()):
        folder = Path(page.abs_src_path).resolve().parent
        for link in LINK.findall(page.content_string):
            target = (folder / link).resolve()
            if docs not in target.parents and target.is_file():
                include(target, docs, files, config)
    return files


def include(target: Path, docs: Path, files: Any, config: Any) -> None:
    name = Path(os.path.relpath(target, docs)).as_posix()
    if files.get_file_from_path(name) is not None:
        return
    included = InclusionLevel.INCLUDED  # though the name begins with a dot
    content = target.read_bytes()
    file = File.generated(config, name, content=content, inclusion=included)
    file.dest_uri = f"files/{target.relative_to(docs.parent).as_posix()}"
    files.append(file)


def on_nav(nav: Any, **_: Any) -> None:
    PAGES[:] = nav.pages


def on_post_build(config: Any) -> None:
    site = Path(config.site_dir)
    lines = [
        f"# {config.site_name}",
        "",
        f"> {config.site_description}",
        "",
    ]
    section = None
    for page in PAGES:
        name, text = page.file.src_uri, page.file.content_string
        (site / name).write_text(LINK.sub(partial(moved, name), text))
        top = page.ancestors[-1].title if page.ancestors else None
        if top != section:
            lines += ["", f"## {top}", ""]
        section = top
        from_code = re.search("^::: ", text, re.MULTILINE)
        link = page.url if from_code else name
        lines.append(f"- [{page.title}]({link})")
    (site / "llms.txt").write_text("\n".join(lines) + "\n")
    for page in PAGES:
        copy = site / page.file.src_uri
        for link in LINK.findall(copy.read_text()):
            if not (copy.parent / link).is_file():
                raise PluginError(f"{copy}: {link} is not in the site")


def moved(page: str, link: re.Match[str]) -> str:
    """A link of a page's copy: to files outside docs/ where they are."""
    path = os.path.normpath(f"{page}/../{link[1]}")
    up = "../" * page.count("/")
    return f"]({up}files/{path[3:]}" if path[:3] == "../" else link[0]


def on_page_content(html: str, **_: Any) -> str:
    return TABLE.sub(with_labels, html)


def is_of_numbers(table: str) -> bool:
    """Most cells after a row's first have a number, and none is long."""
    rows = [CELL.findall(row) for row in ROW.findall(table)]
    inner = [cell for row in rows for cell in row[1:]]
    cells = [re.sub(r"<[^>]*>", "", cell) for cell in inner]
    numbers = [c for c in cells if re.search(r"\d", c) or c in ("", "-")]
    longest = max(map(len, cells), default=99)
    return longest <= 40 and 2 * len(numbers) > len(cells)


def with_labels(table: re.Match[str]) -> str:
    if is_of_numbers(table[0]):
        return table[0].replace("<table>", "<table data-numbers>")
    heads = [
        re.sub(r"<[^>]*>", "", head).replace('"', "&quot;")
        for head in HEAD.findall(table[0])
    ]

    def labelled(row: re.Match[str]) -> str:
        head, *cells = row[0].split("<td")
        labels = [f'<td data-label="{name}"' for name in heads]
        return head + "".join(
            map("".join, zip(labels, cells, strict=False))
        )

    return ROW.sub(labelled, table[0])
