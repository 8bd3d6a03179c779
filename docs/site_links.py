"""MkDocs' hook: files outside docs/ that pages link to join the site."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)")


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
