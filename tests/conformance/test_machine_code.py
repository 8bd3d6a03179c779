"""The machine code for GPUs, read by cuobjdump: wide accesses, no local memory, few instructions.

No GPU is needed. What cannot be seen here is speed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import inside
import pytest

from accumfused import compiled
from accumfused.rules import to_cpp

ROOT = Path(__file__).parents[2]
if not (ROOT / "tools").exists():
    pytest.skip("needs the source", allow_module_level=True)
sys.path.insert(0, str(ROOT / "tools"))
import machine_code  # noqa: E402

# Instructions per element and thread: (where weight decay is decoupled or none, otherwise), gradients in fp32.
BUDGETS = {
    "accumulate": (9, 9), "norm": (4, 4), "step: SGD": (9, 9), "step: SGD with momentum": (12, 16),
    "step: SGD with Nesterov momentum": (14, 18), "step: Adam": (45, 47), "step: AMSGrad": (51, 53),
    "step: Lion": (21, 21),
}  # fmt: skip
# The same of packed formats, for AdamW where no root or quotient is unusual: by rule and states, by weights, with bf16
# and fp32 gradients.
PACKED_BUDGETS = {
    ("Adam", "8-bit"): {"split8": (60, 59), "split16": (59, 58), "bf16 stochastic": (58, 57)},
    ("Adam", "bf16"): {"split8": (49.5, 48.5), "split16": (48, 47), "bf16 stochastic": (47, 46)},
    ("Lion", "8-bit"): {"split8": (44, 42.5), "split16": (42, 41), "bf16 stochastic": (37.5, 37)},
    ("Lion", "bf16"): {"split8": (36, 35), "split16": (35, 34), "bf16 stochastic": (31, 30)},
}
# Of these, the ALU's with either gradients: it takes half as many in a clock. The compiler shares shifts and moves
# between the ALU and the units that multiply, over all loops of a kernel together.
ALU_BUDGETS = {
    ("Adam", "8-bit"): {"split8": 20.5, "split16": 22, "bf16 stochastic": 20.5},
    ("Adam", "bf16"): {"split8": 12.5, "split16": 14, "bf16 stochastic": 12.5},
    ("Lion", "8-bit"): {"split8": 20.5, "split16": 22, "bf16 stochastic": 17.5},
    ("Lion", "bf16"): {"split8": 15.5, "split16": 17.5, "bf16 stochastic": 13},
}
ADAM, LION = "step: Adam in any format", "step: Lion in any format"


def built(arch: int, kernels: str) -> Path:
    """What nvcc makes of that source, or has made before."""
    nvcc = shutil.which("nvcc")
    if machine_code.cuobjdump() is None or nvcc is None:
        pytest.skip("nvcc and cuobjdump are in the CUDA toolkit, the latter in Triton's wheel, too")
    folder = ROOT / "build" / "machine_code"
    folder.mkdir(parents=True, exist_ok=True)
    to_cpp.write(folder)
    sources = b"".join(path.read_bytes() for path in (folder / "functors.h", *sorted((ROOT / "csrc").rglob("*.*"))))
    made = folder / f"{hashlib.sha256(sources + kernels.encode()).hexdigest()[:16]}.{arch}.o"
    if not made.exists():
        part = folder / f"{os.getpid()}-{arch}"
        part.with_suffix(".cu").write_text(kernels)
        flags = ["-std=c++17", "-O3", "--fmad=false", f"-I{folder}", f"-I{ROOT / 'csrc'}"]
        flags += ["-gencode", f"arch=compute_{arch},code=[sm_{arch},compute_{arch}]"]
        # Without the code for the host, which takes as long to compile as some kernels.
        subprocess.run([nvcc, *flags, "-fatbin", f"{part}.cu", "-o", f"{part}.o"], check=True)
        part.with_suffix(".o").replace(made)
    return made


@pytest.fixture(scope="module")
def module() -> Path:
    """The native module, or where it has no CUDA its kernels for 9.0, which nvcc compiles here once."""
    if compiled.cuda_unavailable is None and machine_code.cuobjdump() is not None:
        return machine_code.module()
    return built(90, '#include "cuda/launch.cu"')


@pytest.fixture(scope="module")
def archs(module: Path, request: pytest.FixtureRequest) -> list[int]:
    """Compute capabilities: all that the module was built for with --full, otherwise 9.0 or the first."""
    if module.suffix == ".o":
        return [90]
    every = [int(arch) for arch in inside.native().cuda.ARCHS.split()]
    return every if request.config.getoption("--full") else [90 if 90 in every else every[0]]


@pytest.fixture(scope="module")
def kernels(module: Path, archs: list[int]) -> dict[int, list[machine_code.Kernel]]:
    return {arch: machine_code.kernels(module, arch) for arch in archs}


@pytest.fixture(scope="module")
def hopper(kernels: dict[int, list[machine_code.Kernel]]) -> dict[str, machine_code.Kernel]:
    if 90 not in kernels:
        pytest.skip(f"the module was built for {[*kernels]}")
    return {kernel.name: kernel for kernel in kernels[90]}


def test_every_kernel_is_there_for_every_architecture(kernels: dict[int, list[machine_code.Kernel]]) -> None:
    for found in kernels.values():
        assert {kernel.name for kernel in found} == {*machine_code.NAMES.values()}


def test_no_kernel_uses_local_memory(hopper: dict[str, machine_code.Kernel]) -> None:
    for name, kernel in hopper.items():
        if "any format" not in name:
            assert not kernel.uses_local_memory, name
        else:  # outside of the loops for one format: for parameters written from outside, and in the general loop
            assert kernel.local_bytes <= (24 if name == ADAM else 8), name
            loops = [*kernel.vector_loops(), *(loop for *_, loop in kernel.packed_loops())]
            assert not any(loop.uses_local_memory for loop in loops), name


def test_every_architecture_has_registers_for_enough_threads_and_splits_no_store(
    kernels: dict[int, list[machine_code.Kernel]],
) -> None:
    for arch, found in kernels.items():
        for kernel in found:
            assert kernel.local_bytes <= 48, (arch, kernel.name)
            for loop in kernel.vector_loops():
                assert not loop.uses_local_memory, (arch, kernel.name)
            for *formats, loop in kernel.packed_loops():
                assert not loop.uses_local_memory, (arch, *formats)
            shared = [body for body in kernel.innermost_loops() if any("LDS.U8" in text for _, text in body)]
            assert len(shared) == (6 if kernel.name in (ADAM, LION) else 0), "loops that read scales of 8-bit states"
            assert not any(re.search(r"(LD|ST)G\.E\.U8", text) for body in shared for _, text in body), arch
            # These have more in flight: a thread asks for 80 or 64 bytes before it computes.
            has_more = "AMSGrad" in kernel.name or (arch >= 100 and "bf16" in kernel.name)
            assert kernel.occupancy >= (0.375 if has_more else 0.5), (arch, kernel.name)
            assert kernel.split_stores() == [], (arch, kernel.name)


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


def test_a_norm_asks_for_eight_rows_at_once(hopper: dict[str, machine_code.Kernel]) -> None:
    """For each type of gradient in two loops: over whole rows, and over the rest, four elements of a row one by one."""
    found = []
    for body in hopper["norm"].innermost_loops():
        texts = [text for _, text in body]
        loads = [index for index, text in enumerate(texts) if "LDG.E" in text]
        first_product = next((index for index, text in enumerate(texts) if "FMUL" in text), 0)
        if len(loads) % 8 == 0 and first_product and not any("STG" in text for text in texts):
            assert loads[-1] < first_product, "all are asked for before one is waited for"
            wide = [sum(f"LDG.E.{bits}" in text for text in texts) for bits in (128, 64)]
            found.append((*wide, len(loads)))
    assert sorted(found) == [(0, 8, 8), (0, 8, 8), (0, 8, 40), (0, 8, 40), (8, 0, 8), (8, 0, 40)]


def test_pairs_of_rows_of_sums_in_bf16_have_accesses_of_16_bytes(hopper: dict[str, machine_code.Kernel]) -> None:
    """Two pairs at a time, kept or overwritten, rounded by noise or to nearest: 16 elements of a thread."""
    found = []
    for body in hopper["accumulate, sums in bf16"].innermost_loops():
        texts = [text for _, text in body]
        if sum("SHFL.BFLY" in text for text in texts) != 4:
            continue
        accesses = [re.sub(r".*?((LDG|STG)\.\S+).*", r"\1", text) for text in texts if "LDG" in text or "STG" in text]
        loads = [index for index, text in enumerate(texts) if "LDG.E.128" in text]
        assert loads[-1] < 20, "all are asked for before one is waited for"
        assert len(texts) <= 17 * 16, "a GPU's memory leaves time for three times as many"
        assert {*accesses} == {"LDG.E.128", "STG.E.128"}
        found.append(len(loads))
    assert sorted(found) == [2, 2, 4, 4]


@pytest.mark.parametrize("rule", sorted(machine_code.RULES.values()))
def test_each_stream_of_a_step_in_any_format_has_wide_accesses(
    rule: str, hopper: dict[str, machine_code.Kernel]
) -> None:
    reads, writes = machine_code.STREAMS[f"step: {rule}"]
    loads, stores = hopper[f"step: {rule} in any format"].wide_accesses()
    assert loads >= reads
    assert stores >= writes


@pytest.mark.parametrize("name", sorted(BUDGETS.keys() - {"norm"}))
def test_a_stream_off_its_boundary_leaves_the_others_wide(name: str, hopper: dict[str, machine_code.Kernel]) -> None:
    """For each type of gradient a loop that can do both; norm has one stream."""
    bodies = hopper[name].innermost_loops()
    loops = [{text.split()[-3] for _, text in body if "STG.E" in text} for body in bodies]
    assert sum({"STG.E.128", "STG.E"} <= widths for widths in loops) >= 3


def test_instructions_per_element_stay_in_the_budget(hopper: dict[str, machine_code.Kernel]) -> None:
    for name, (least, most) in BUDGETS.items():
        loops = [loop for loop in hopper[name].vector_loops() if not loop.half_loads]
        best = min(loops, key=lambda loop: loop.most)  # the one that most rows go through
        assert best.least <= least, name
        assert best.most <= most, name


@pytest.mark.parametrize(("rule", "states"), PACKED_BUDGETS)
def test_packed_instructions_stay_in_the_budget(rule: str, states: str, hopper: dict[str, machine_code.Kernel]) -> None:
    budgets = PACKED_BUDGETS[rule, states].items()
    most = {(weights, grad): both[grad == "fp32"] for weights, both in budgets for grad in ("bf16", "fp32")}
    every = hopper[f"step: {rule} in any format"].packed_loops()
    loops = {(weights, grad): loop for found, weights, grad, loop in every if found == states}
    assert loops.keys() == most.keys()
    assert [key for key, loop in loops.items() if loop.least > most[key]] == []
    assert [key for key, loop in loops.items() if not 0 < loop.alu <= ALU_BUDGETS[rule, states][key[0]]] == []


def test_pairs_of_packed_adam_take_an_instruction_each_and_none_is_contracted() -> None:
    """From 10.0 on. Of a product and a sum behind it the compiler would make one FFMA2, which rounds once."""
    kernel = """
    #define AF_TARGET gpu
    #include <cuda_runtime.h>
    #include "cuda/step.cuh"
    using namespace accumfused::gpu;
    void* kernel = reinterpret_cast<void*>(step_kernel<Kind::kAny, PackedRule<AdamFunctor>>);
    """
    adam = next(kernel for kernel in machine_code.kernels(built(100, kernel), 100) if kernel.name == ADAM)
    bodies = (" ".join(text for _, text in body) for body in adam.innermost_loops())
    packed = [body for body in bodies if "FFMA2" in body]
    # Of each pair 12 products, 9 fused operations as the source asks for (3 for 8-bit states), and 4 sums; a
    # thread has 4 pairs.
    found = [[len(re.findall(rf"\b{name}\b", body)) for name in ("FFMA2", "FADD2", "FMUL2")] for body in packed]
    assert sorted(found) == [[4 * 18, 4 * 4, 0]] * 6 + [[4 * 21, 4 * 4, 0]] * 6
    loops = {tuple(formats): loop for *formats, loop in adam.packed_loops()}
    assert [key for key, loop in loops.items() if loop.least > 48.5 or not 0 < loop.alu <= 20.5] == []
    assert [key for key, loop in loops.items() if loop.uses_local_memory] == []
    assert len(loops) == 12


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


def test_packed_roots_and_quotients_are_those_of_the_compiler(kernels: dict[int, list[machine_code.Kernel]]) -> None:
    """csrc/cuda/step_packed.cuh writes down what the compiler makes of sqrtf and of a division on their usual way.

    The compiler mixes some of them with other operations, not all.
    """
    for arch, found in kernels.items():
        adam = next(kernel for kernel in found if kernel.name == "step: Adam")
        assert any(map(is_root, following(adam.code, "MUFU.RSQ ", "FMUL.FTZ|FFMA", 4))), arch
        assert any(map(is_quotient, following(adam.code, "FCHK", "FFMA", 5))), arch


@pytest.fixture(scope="module")
def ptx(module: Path) -> str:
    command = [machine_code.cuobjdump() or "", "--dump-ptx", str(module)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert ".entry" in text
    return text


def test_nothing_is_contracted_approximated_or_flushed(ptx: str) -> None:
    fused, approximate = r"\b(?:fma|mad)\.(?:rn\.)?f(?:32|64)\b", r"\S+\.(?:ftz|approx|full)\b\S*"
    packed, others = [], []
    for entry in ptx.split(".entry")[1:]:
        (packed if "PackedRule" in entry.split("(")[0] else others).append(entry)
    for entry in others:
        assert re.findall(fused, entry) == []
        assert re.findall(approximate, entry) == []
    # Fused where the product is exact, and for Adam what the compiler makes of an IEEE root and division. Adding 0
    # flushes bf16 states.
    roots, flush = {"rsqrt.approx.ftz.f32", "rcp.approx.ftz.f32"}, {"add.rn.ftz.f32"}
    for entry in packed:
        is_adam = "11AdamFunctor" in entry.split("(")[0]
        assert set(re.findall(approximate, entry)) == flush | (roots if is_adam else set())
        assert set(re.findall(fused, entry)) == {"fma.rn.f32"}
    assert len(packed) == len({rule for rule, _ in PACKED_BUDGETS}) * ptx.count(
        "\n.target "
    )  # the first and the last architecture
    assert {"sqrt.rn.f32", "div.rn.f32", "div.rn.f64"} <= set(re.findall(r"\b(?:sqrt|div)\.rn\.f\d\d\b", ptx))
