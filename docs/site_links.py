"""MkDocs' hook: a file outside docs/ that a page links to becomes a part of the site, below files/."""

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
            name = Path(os.path.relpath(target, docs)).as_posix()
            if docs not in target.parents and target.is_file() and files.get_file_from_path(name) is None:
                included = InclusionLevel.INCLUDED  # though the name begins with a dot
                file = File.generated(config, name, content=target.read_bytes(), inclusion=included)
                file.dest_uri = f"files/{target.relative_to(docs.parent).as_posix()}"
                files.append(file)
    return files
