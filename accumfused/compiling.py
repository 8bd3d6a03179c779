"""How C++ is compiled: the native module by setup.py, a user's rule when it first runs. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
from pathlib import Path

# No -march=native and no -ffast-math: one wheel runs anywhere, and every instruction set computes the same bits. The
# last three change no result: without the first two sqrt does not vectorise, without the third the module is a fifth
# larger. With -O3 it is a third larger, and no faster.
FLAGS = ["-std=c++17", "-O2", "-ftree-vectorize", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-unswitch-loops"]
_V3 = ["-mavx2", "-mfma"]
_V4 = ["-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl"]
INSTRUCTION_SETS = {"baseline": [], "x86_64_v3": _V3, "x86_64_v4": [*_V3, *_V4]}
# What C++ and Python tell each other: functions and their arguments, the order of a row, the numbers of the formats.
_INTERFACE = ("binding.cpp", "table.cpp", "table.h", "rows.h", "cpu/kernels.h", "cuda/binding.cpp")


def compiler() -> str:
    """Looks up the C++ compiler's command.

    Raises:
        RuntimeError: there is none.
    """
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        if shutil.which(shlex.split(name)[0]):
            return name
    raise RuntimeError(f"no C++17 compiler was found (tried {', '.join(names)}); install g++ or clang++, or set CXX")


def interface(csrc: Path) -> str | None:
    """Digests the code between C++ and Python, comments aside; None where its sources are not, as in a wheel."""
    files = [csrc / name for name in _INTERFACE]
    if not all(map(Path.exists, files)):
        return None
    code = re.sub(r"//.*|\s+", "", "".join(file.read_text() for file in files))
    return hashlib.sha256(code.encode()).hexdigest()[:16]
