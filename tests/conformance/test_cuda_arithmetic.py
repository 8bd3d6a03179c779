"""Root and quotient of the loops for packed formats, from all approximations that NVIDIA documents for the hardware.

csrc/cuda/packed_adam.cuh takes them as the compiler does: test_cuda_code.py compares the instructions.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import emulation
import pytest

# The documented errors alone leave these, up to powers of four, or two: no GPU gives them, or sqrtf and the division
# that the compiler makes of the same instructions would not be those of IEEE there.
RESTS_ON_THE_HARDWARE = {
    "root of 0x1.dd26e4p+1 from 0x1.092fp+0",
    "root of 0x1.f82294p+0 from 0x1.6cda12p+0",
    "0x1p+0 / 0x1.fffffep+0 from 0x1p+0",
}


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reason = emulation.why_not()
    if reason is not None:
        pytest.skip(reason)
    return emulation.build_program("arithmetic.cpp", tmp_path_factory.mktemp("arithmetic"))


def found(program: Path, *arguments: str) -> set[str]:
    command = [str(program), *arguments]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines())


def test_every_approximation_leads_to_the_root_and_the_quotient_of_ieee(arithmetic: Path) -> None:
    assert found(arithmetic) == RESTS_ON_THE_HARDWARE


def test_the_search_finds_what_worse_approximations_would_spoil(arithmetic: Path) -> None:
    assert len(found(arithmetic, "2") - RESTS_ON_THE_HARDWARE) > 10
