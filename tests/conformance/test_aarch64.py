"""The CPU kernels give the same bits on aarch64, which QEMU emulates, as here: digests.cpp has the problems.

The baseline kernels run on both. Here test_bits.py compares them with the reference and with other instruction sets.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from accumfused import compiling
from accumfused.rules import to_cpp

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
AARCH64 = "aarch64-linux-gnu-g++"
NEEDED = {
    "the source": CSRC.exists(),
    "g++": shutil.which("g++") is not None,
    f"{AARCH64} (Debian: g++-aarch64-linux-gnu)": shutil.which(AARCH64) is not None,
    "qemu-aarch64 (Debian: qemu-user)": shutil.which("qemu-aarch64") is not None,
}
MISSING = [name for name, is_there in NEEDED.items() if not is_there]
pytestmark = pytest.mark.skipif(MISSING != [], reason=f"needs {', '.join(MISSING)}")


def digests(folder: Path, compiler: str, *flags: str, on: Sequence[str] = ()) -> list[str]:
    """What the program prints, built for this compiler's processor and run there."""
    folder.mkdir()
    to_cpp.write(folder)
    sources = HERE / "digests.cpp", CSRC / "cpu/baseline.cpp"
    flags = (*compiling.FLAGS, "-Wno-unknown-pragmas", f"-I{folder}", *flags)
    subprocess.run([compiler, *flags, "-static", *sources, "-o", folder / "program"], check=True)
    run = subprocess.run([*on, folder / "program"], check=True, stdout=subprocess.PIPE, text=True)
    return run.stdout.splitlines()


def test_aarch64_gives_the_bits_of_this_processor(tmp_path: Path) -> None:
    here = digests(tmp_path / "here", "g++")
    there = digests(tmp_path / "there", AARCH64, on=["qemu-aarch64"])
    assert len(here) > 800
    assert there == here
    # aarch64 has FMA always: where the compiler may contract, each rule and each sum has other bits.
    contracted = digests(tmp_path / "contracted", AARCH64, "-ffp-contract=fast", on=["qemu-aarch64"])
    different = {line.split()[0] for line, other in zip(here, contracted, strict=True) if line != other}
    assert different == {line.split()[0] for line in here}
