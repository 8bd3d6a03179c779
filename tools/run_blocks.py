"""Runs the code blocks of Markdown files: python tools/run_blocks.py README.md ...

The language tag decides. `python`: all blocks of a file in order, in one fresh process and an empty folder, so that a
later block sees an earlier one's names. `sh`: each block in a shell of its own, in the repository's folder, with this
interpreter's programs first. Any other tag (`console` for a long job or another machine, `text`) is only shown. A block
inside an HTML comment runs like any other: set-up that the reader need not see.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    line: int  # of its first line of code
    code: str


def blocks(text: str) -> list[Block]:
    return [Block(m[1], text.count("\n", 0, m.start(2)) + 1, m[2]) for m in FENCE.finditer(text)]


def run_python(path: Path, found: list[Block]) -> None:
    """In this process. A traceback shows the file's own lines."""
    namespace = {"__name__": "__main__"}
    for block in found:
        print(f"{path.name}:{block.line} python", flush=True)
        exec(compile("\n" * (block.line - 1) + block.code, str(path), "exec"), namespace)


def run(path: Path) -> list[bool]:
    """Whether each part ran: the python blocks together, and every sh block."""
    found = blocks(path.read_text())
    passed = []
    if any(block.language == "python" for block in found):
        with tempfile.TemporaryDirectory() as empty:
            command = [sys.executable, __file__, "--python", str(path)]
            passed.append(subprocess.run(command, cwd=empty).returncode == 0)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    for block in found:
        if block.language == "sh":
            print(f"{path.name}:{block.line} sh", flush=True)
            command = ["bash", "-euxo", "pipefail", "-c", block.code]
            passed.append(subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": programs}).returncode == 0)
    return passed


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--python"]:
        path = Path(arguments[1])
        run_python(path, [block for block in blocks(path.read_text()) if block.language == "python"])
        return 0
    passed = [ok for name in arguments for ok in run(Path(name).resolve())]
    print(f"{sum(passed)} passed, {len(passed) - sum(passed)} failed")
    return 0 if passed and all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
