"""MkDocs' hooks.

Files outside docs/ that pages link to join the site. A table's cell knows
its column's head, which site.css shows on a phone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)")
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
HEAD = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)


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


def on_page_content(html: str, **_: Any) -> str:
    return TABLE.sub(with_labels, html)


def with_labels(table: re.Match[str]) -> str:
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
