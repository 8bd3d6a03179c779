"""The native module as a file: what machine code it holds, and what it is linked to."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess

import inside
import pytest

pytestmark = pytest.mark.usefixtures("native")
VECTOR_NAMESPACES = ("x86_64_v3", "x86_64_v4")
AVX = re.compile(r"%[yz]mm\d|^v[a-z]")  # a register wider than SSE's, or a mnemonic of AVX's encoding
FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")


def output_of(*command: str) -> str:
    """What a binutils tool says about the module; skips the test without it, and where modules are no ELF."""
    if platform.system() != "Linux" or shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} for ELF is needed")
    return subprocess.run([*command, inside.native().__file__], capture_output=True, text=True, check=True).stdout


def test_the_baseline_has_no_avx_instruction_and_the_others_have() -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"AVX is an x86-64 matter, this is {platform.machine()}")
    first: dict[str, str] = {}  # function -> its first AVX instruction, or ""
    function = ""
    for line in output_of("objdump", "-d", "--no-show-raw-insn").splitlines():
        if header := FUNCTION.match(line):
            function = header[1]
            first.setdefault(function, "")
        elif "\t" in line and not first[function] and AVX.search(instruction := line.split("\t", 1)[1].strip()):
            first[function] = instruction
    baseline = {name: found for name, found in first.items() if not any(space in name for space in VECTOR_NAMESPACES)}
    assert any("baseline" in name for name in baseline)
    assert {name: found for name, found in baseline.items() if found} == {}
    for space in VECTOR_NAMESPACES:  # otherwise the check above would see nothing
        assert sum(bool(found) for name, found in first.items() if space in name) > 3


def test_the_module_is_linked_to_neither_torch_nor_a_runtime_of_openmp_or_cuda() -> None:
    needed = re.findall(r"NEEDED\s+(\S+)", output_of("objdump", "-p"))
    assert any(name.startswith("libc.") for name in needed)
    assert [name for name in needed if re.search(r"gomp|omp5|iomp|torch|c10|python|cuda", name)] == []
