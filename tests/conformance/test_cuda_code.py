"""The machine code that the module holds for GPUs, read by cuobjdump: wide accesses, no local memory, few instructions.

No GPU is needed. What cannot be seen here is speed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from accumfused import _native

TOOLS = Path(__file__).parents[2] / "tools"
if not TOOLS.exists():
    pytest.skip("needs the source", allow_module_level=True)
sys.path.insert(0, str(TOOLS))
import machine_code  # noqa: E402

# Instructions per element and thread: (where weight decay is decoupled or none, otherwise), gradients in fp32.
BUDGETS = {
    "accumulate": (9, 9), "norm": (4, 4), "step: SGD": (9, 9), "step: SGD with momentum": (15, 19),
    "step: Adam": (45, 47), "step: AMSGrad": (53, 55), "step: Lion": (21, 21),
}  # fmt: skip
# The same for AdamW on 8-bit states, where no root or quotient is unusual, by weights and gradient.
PACKED_BUDGETS = {
    ("split8", "bf16"): 70, ("split8", "fp32"): 69, ("split16", "bf16"): 69, ("split16", "fp32"): 68,
    ("bf16_stochastic", "bf16"): 67, ("bf16_stochastic", "fp32"): 66,
}  # fmt: skip
PACKED = "step: Adam in any format"


@pytest.fixture(scope="module")
def archs() -> list[int]:
    """The compute capabilities that the module was built for."""
    if _native._C is None or not hasattr(_native._C, "cuda"):
        pytest.skip(_native.cuda_unavailable or "")
    if machine_code.cuobjdump() is None:
        pytest.skip("there is no cuobjdump; the CUDA toolkit and Triton's wheel have one")
    return [int(arch) for arch in _native._C.cuda.ARCHS.split()]


@pytest.fixture(scope="module")
def hopper(archs: list[int]) -> dict[str, machine_code.Kernel]:
    if 90 not in archs:
        pytest.skip(f"the module was built for {archs}")
    return {kernel.name: kernel for kernel in machine_code.kernels(machine_code.module(), 90)}


def test_every_kernel_is_there_for_every_architecture(archs: list[int]) -> None:
    for arch in archs:
        assert {kernel.name for kernel in machine_code.kernels(machine_code.module(), arch)} == {
            *machine_code.NAMES.values()
        }


def test_no_kernel_uses_local_memory(hopper: dict[str, machine_code.Kernel]) -> None:
    assert [name for name, kernel in hopper.items() if kernel.uses_local_memory and name != PACKED] == []
    assert hopper[PACKED].local_bytes <= 32  # for parameters that were written from outside, beside the loops
    assert [loop for *_, loop in hopper[PACKED].packed_loops() if loop.uses_local_memory] == []


def test_elsewhere_local_memory_is_out_of_the_loops(archs: list[int]) -> None:
    for arch in archs:
        for kernel in machine_code.kernels(machine_code.module(), arch):
            assert kernel.local_bytes <= 48, (arch, kernel.name)
            for loop in kernel.vector_loops():  # on 10.0 AMSGrad's keep a number there
                assert not loop.uses_local_memory or (arch, kernel.name) == (100, "step: AMSGrad")
            for weights, grad, loop in kernel.packed_loops():
                assert not loop.uses_local_memory, (arch, weights, grad)


def test_registers_allow_half_of_the_threads(archs: list[int]) -> None:
    for arch in archs:
        for kernel in machine_code.kernels(machine_code.module(), arch):
            assert kernel.occupancy >= 0.5, (arch, kernel.name, kernel.registers)


@pytest.mark.parametrize("name", BUDGETS)
def test_the_loops_access_16_bytes_at_a_time(name: str, hopper: dict[str, machine_code.Kernel]) -> None:
    reads, writes = machine_code.STREAMS[name]
    loops = list(hopper[name].vector_loops())
    fp32 = [loop for loop in loops if not loop.half_loads]
    assert fp32, "no loop of this kernel has wide accesses alone"
    # Several in flight: the widest loop reads four times or more before it computes.
    assert max(loop.loads for loop in fp32) >= 4
    for loop in loops:
        rows = (loop.loads + loop.half_loads) // reads
        assert loop.stores == rows * writes
        assert loop.half_loads in (0, rows), "8 bytes for four elements of a 16-bit gradient"


@pytest.mark.parametrize(("name", "least"), [("step: any rule per group", 50), ("step: any rule and format", 15)])
def test_general_kernels_have_wide_accesses_too(name: str, least: int, hopper: dict[str, machine_code.Kernel]) -> None:
    loads, stores = hopper[name].wide_accesses()
    assert loads >= least
    assert stores >= least


def test_no_store_is_split(archs: list[int]) -> None:
    for arch in archs:
        for kernel in machine_code.kernels(machine_code.module(), arch):
            assert kernel.split_stores() == [], (arch, kernel.name)


@pytest.mark.parametrize("name", sorted(BUDGETS.keys() - {"norm", "step: AMSGrad"}))
def test_a_stream_off_its_boundary_leaves_the_others_wide(name: str, hopper: dict[str, machine_code.Kernel]) -> None:
    """For each type of gradient a loop that can do both; norm has one stream, and AMSGrad no registers for it."""
    loops = [{access.split()[-3] for access in stores(body)} for body in hopper[name].innermost_loops()]
    assert sum({"STG.E.128", "STG.E"} <= widths for widths in loops) >= 3


def stores(body: list[tuple[int, str]]) -> list[str]:
    return [text for _, text in body if "STG.E" in text]


@pytest.mark.parametrize("name", BUDGETS)
def test_instructions_per_element_stay_in_the_budget(name: str, hopper: dict[str, machine_code.Kernel]) -> None:
    loops = [loop for loop in hopper[name].vector_loops() if not loop.half_loads]
    best = min(loops, key=lambda loop: loop.most)  # the one that most rows go through
    least, most = BUDGETS[name]
    assert best.least <= least
    assert best.most <= most


def test_packed_formats_stay_in_the_budget(hopper: dict[str, machine_code.Kernel]) -> None:
    loops = {(weights, grad): loop for weights, grad, loop in hopper[PACKED].packed_loops()}
    assert loops.keys() == PACKED_BUDGETS.keys()
    for key, most in PACKED_BUDGETS.items():
        assert loops[key].least <= most, key


def following(code: list[tuple[int, str]], first: str, operation: str, count: int) -> Iterator[list[list[str]]]:
    """For each instruction of that name the operands, the result first, of the operations that follow it."""
    texts = [text.replace(".reuse", "") for _, text in code]
    for start, text in enumerate(texts):
        if first in text:
            found = [text.split(" ", 1) for text in texts[start + 1 :] if re.match(operation, text)][:count]
            if len(found) == count:
                yield [re.split(r",\s*", operands) for _, operands in found]


def is_root(operations: list[list[str]]) -> bool:
    (s, x, y), (h, *half), (r, *remainder), (_, *root) = operations
    return (half, remainder, root) == ([y, "0.5"], [f"-{s}", s, x], [r, h, s])


def is_quotient(operations: list[list[str]]) -> bool:
    (e, *error), (y1, y, *better), (q, a, *quotient), (r, *remainder), (_, *result) = operations
    b = error[0].lstrip("-")
    numbers = (error, better, quotient, remainder, result)
    return numbers == ([f"-{b}", y, "1"], [e, y], [y1, "RZ"], [f"-{b}", q, a], [y1, r, q])


def test_packed_roots_and_quotients_are_those_of_the_compiler(archs: list[int]) -> None:
    """csrc/cuda/packed_adam.cuh writes down what the compiler makes of sqrtf and of a division on their usual way.

    The compiler mixes some of them with other operations, not all.
    """
    for arch in archs:
        adam = next(k for k in machine_code.kernels(machine_code.module(), arch) if k.name == "step: Adam")
        assert any(map(is_root, following(adam.code, "MUFU.RSQ", "FMUL.FTZ|FFMA", 4))), arch
        assert any(map(is_quotient, following(adam.code, "FCHK", "FFMA", 5))), arch


@pytest.fixture(scope="module")
def ptx(archs: list[int]) -> str:
    command = [machine_code.cuobjdump() or "", "--dump-ptx", str(machine_code.module())]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert ".entry" in text
    return text


def test_nothing_is_contracted_approximated_or_flushed(ptx: str) -> None:
    fused, approximate = r"\b(?:fma|mad)\.(?:rn\.)?f(?:32|64)\b", r"\S+\.(?:ftz|approx|full)\b\S*"
    packed, others = [], []
    for entry in ptx.split(".entry")[1:]:
        (packed if "PackedAdam" in entry.split("(")[0] else others).append(entry)
    for entry in others:
        assert re.findall(fused, entry) == []
        assert re.findall(approximate, entry) == []
    # What the compiler makes of an IEEE root and division, and fused where the product is exact.
    for entry in packed:
        assert set(re.findall(approximate, entry)) == {"rsqrt.approx.ftz.f32", "rcp.approx.ftz.f32"}
        assert set(re.findall(fused, entry)) == {"fma.rn.f32"}
    assert len(packed) == 1
    assert {"sqrt.rn.f32", "div.rn.f32", "div.rn.f64"} <= set(re.findall(r"\b(?:sqrt|div)\.rn\.f\d\d\b", ptx))


def test_the_module_is_not_linked_to_a_cuda_runtime() -> None:
    if _native._C is None:
        pytest.skip(_native.unavailable or "")
    libraries = subprocess.run(["ldd", _native._C.__file__], capture_output=True, text=True, check=True).stdout
    assert "cuda" not in libraries
    assert "torch" not in libraries
