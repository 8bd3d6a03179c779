"""Makes the development environment: python tools/environment.py FOLDER [TORCH]

Leaves a virtual environment in FOLDER with what pyproject.toml needs to build without isolation. With TORCH, a
requirement for pip, torch too: where the interpreter that runs this already has a supported one (a CUDA build
included), that one is used and none is downloaded. Can be run again: what is there stays.
"""

from __future__ import annotations

import ast
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PYPROJECT = (Path(__file__).parents[1] / "pyproject.toml").read_text()


def stated(pattern: str) -> str:
    """What pyproject.toml says there (tomllib came with Python 3.11)."""
    found = re.search(pattern, PYPROJECT, re.DOTALL)
    assert found, f"pyproject.toml has nothing like {pattern}"
    return found[1]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def supported_torch() -> str | None:
    """This interpreter's torch, if pyproject.toml's lower bound admits it."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    return version if numbers(version) >= numbers(stated(r'"torch>=([\d.]+)"')) else None


def main(folder: Path, torch: str | None) -> None:
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip"]
    here = supported_torch()
    if not Path(python).exists():
        print(f"making {folder} for Python {platform.python_version()}", flush=True)
        # This interpreter's pip and setuptools too: those that venv brings are older, and not there on every system.
        inherit = ["--system-site-packages", "--without-pip"] if here else []
        subprocess.run([sys.executable, "-m", "venv", *inherit, str(folder)], check=True)
        if here:
            # --system-site-packages leads to the base installation; this interpreter may itself be an environment.
            library = next(folder.glob("lib/python*/site-packages"))
            (library / "host.pth").write_text(f"{metadata.distribution('torch').locate_file('')}\n")
    build_requirements: list[str] = ast.literal_eval(stated(r"\nrequires = (\[.*?\])"))
    subprocess.run([*pip, "--quiet", "install", "pip>=25.1", *build_requirements], check=True)  # 25.1 has --group
    if torch is not None:
        check = subprocess.run([python, __file__, "--supported-torch"], stdout=subprocess.DEVNULL)
        if check.returncode != 0:
            print(f"installing {torch}", flush=True)
            subprocess.run([*pip, "install", *torch.split()], check=True)


if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036  (the one file that an older Python may be asked to run)
        sys.exit(f"Python 3.10 or newer is needed, this is {platform.python_version()}; try: make PYTHON=python3.12")
    if sys.argv[1:] == ["--supported-torch"]:
        sys.exit(0 if supported_torch() else 1)
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
