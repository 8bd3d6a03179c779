"""What Triton makes of the kernels: wide accesses, IEEE operations one by one. Compiles for GPUs that are not there."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accumfused.formats.kinds import Format, States, Weights
from accumfused.optimizers import RULES

pytest.importorskip("triton")

TOOLS = Path(__file__).parents[2] / "tools"
NVIDIA = ("80", "90", "100")
LANES = {"gfx942": 64, "gfx1100": 32, "gfx1201": 32}  # of AMD's warps
STATES = {rule.name: len(rule.states) for rule in RULES}
ADAM = next(rule for rule in RULES if rule.name == "adam")
LEAN = {
    "adam_split16": (ADAM, Format(Weights.BFLOAT16_SPLIT16)),
    "adam_split8_int8": (ADAM, Format(Weights.BFLOAT16_SPLIT8, States.INT8)),
}
ALL_KERNELS = ("norm", "accumulate", *STATES, *LEAN)
# The first rule with each number of states, and Muon, which writes no parameter: the others are printed alike.
FIRST = {count: name for name, count in reversed(STATES.items())}
FEW_KERNELS = ("norm", "accumulate", *FIRST.values(), "muon", *LEAN)
MEASURES = ("segment norms",)
POINTERS = {"table": "*i64", "partials": "*fp32", "hypers": "*i64", "outcome": "*fp32"}
POINTERS |= {"bounds": "*i64", "squares": "*fp64"}


def compile_kernels(target: str, folder: Path, *chosen: str) -> None:
    """Writes each kernel's assembly into the folder. In a process of its own: nothing may be interpreted in it."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from accumfused.backends.triton import backend, step
    from accumfused.backends.triton import kernels as verbs

    nvidia, lanes = target in NVIDIA, LANES.get(target, 32)
    gpu = GPUTarget("cuda", int(target), lanes) if nvidia else GPUTarget("hip", target, lanes)
    kernels: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        "norm": (verbs.norm_kernel, {}, backend.options(lanes)),
        "accumulate": (verbs.accumulate_kernel, {}, backend.options(lanes, backend.FOLD_REGISTERS)),
        "segment norms": (verbs.segment_norms_kernel, {}, backend.options(lanes)),
    }
    for name, (rule, form) in ({rule.name: (rule, Format()) for rule in RULES} | LEAN).items():
        kernel = step.step_kernel
        names = [p.name for p in kernel.params if p.is_constexpr]
        options = backend.options(lanes, backend.step_registers(form))
        kernels[name] = kernel, dict(zip(names, backend.constants(rule, form), strict=True)), options
    for name, (kernel, constants, options) in ((name, kernels[name]) for name in chosen):
        kinds = {
            p.name: "constexpr" if p.is_constexpr else p.annotation_type or POINTERS[p.name] for p in kernel.params
        }
        source = ASTSource(
            fn=kernel, signature=kinds, constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()}
        )
        compiled = triton_compile(source, target=gpu, options=options)
        (folder / name).write_text(compiled.asm["ptx" if nvidia else "amdgcn"])
        if nvidia:
            (folder / f"{name}.cubin").write_bytes(compiled.asm["cubin"])


@pytest.fixture(scope="module")
def compiled(folder: Any) -> Any:
    """code(target, kernel): its assembly."""
    return lambda target, kernel: (folder(target) / kernel).read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """folder(target): where everything is that was compiled for it."""
    is_full = request.config.getoption("--full")
    chosen = (*(ALL_KERNELS if is_full else FEW_KERNELS), *MEASURES)
    root = Path(__file__).parents[2]
    import triton

    sources = [Path(__file__), *sorted((root / "accumfused").rglob("*.py"))]
    text = f"{triton.__version__} {chosen}".encode() + b"".join(path.read_bytes() for path in sources)
    key = hashlib.sha256(text).hexdigest()[:16]

    made = {target: root / "build" / "triton_code" / f"{target}-{key}" for target in (*NVIDIA, *LANES)}
    wanted = [target for target in made if is_full or target == "90" or target in LANES]
    left = [target for target in wanted if not made[target].exists()]
    if left:  # in one process, which imports torch and Triton
        part = tmp_path_factory.mktemp("triton")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        # Triton keeps what it has compiled, and compiles again what has changed.
        environment |= {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(root / "build" / "triton_code" / "cache")}
        of_amd = chosen if is_full else ("norm", *MEASURES)
        tasks = [",".join((target, *(chosen if target in NVIDIA else of_amd))) for target in left]
        subprocess.run([sys.executable, __file__, str(part), *tasks], env=environment, check=True)
        for target in left:
            shutil.copytree(part / target, made[target], dirs_exist_ok=True)
    return made.__getitem__


each_target = pytest.mark.parametrize(
    "target", [pytest.param(target, marks=[] if target == "90" else pytest.mark.full) for target in NVIDIA]
)
KERNELS = [pytest.param(name, marks=[] if name in FEW_KERNELS else pytest.mark.full) for name in ALL_KERNELS]
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


@each_target
@each_kernel
def test_the_machine_code_splits_no_store(target: str, kernel: str, folder: Any) -> None:
    if not TOOLS.exists():
        pytest.skip("needs the source")
    sys.path.insert(0, str(TOOLS))
    import machine_code

    (found,) = machine_code.kernels(folder(target) / f"{kernel}.cubin", int(target))
    assert found.code
    assert found.split_stores() == []


LOAD, STORE, LOAD_HALF, STORE_HALF = (f"{way}.global.{kind}" for kind in ("v4.b32", "v2.b32") for way in ("ld", "st"))
# Each thread of 256 has 4 of 1024 elements: 16 bytes of fp32, 8 of 16 bits, 4 of 8 bits. Of three dtypes of gradients:
COUNTS: dict[str, dict[str, int]] = {
    "norm": {LOAD: 4, LOAD_HALF: 4 * 2, STORE: 0, "sqrt.rn.f32": 1, "div.rn.f64": 2},  # four rows at a time
    # Two rows at a time: folds, copies, rescaling; first of sums in fp32, then of those in bf16.
    "accumulate": {
        LOAD: (2 + 1 + 1 + 1 + 1) * 2 + 2 * 2, LOAD_HALF: (2 + 2) * 2 + (1 + 3 + 3 + 1) * 2, STORE: (3 + 3 + 1) * 2,
        STORE_HALF: (3 + 3 + 1) * 2, "atom.global.gpu.relaxed.add.u64": 1,
    },
    # Parameter and states for each of them, and the gradient. The ticket alone goes through shared memory.
    **{
        rule: {LOAD: (1 + n) * 3 * 2 + 2, LOAD_HALF: 2 * 2, STORE: (1 + n) * 3 * 2, "ld.shared": 1}
        for rule, n in STATES.items()
    },
    # It writes in place of a parameter, and reads none.
    "muon": {LOAD: 3 * 2 + 2, LOAD_HALF: 2 * 2, STORE: 2 * 3 * 2, "ld.shared": 1},
    # The states; parameter and remainder; and the gradient.
    "adam_split16": {
        LOAD: 2 * 3 * 2 + 2, STORE: 2 * 3 * 2, LOAD_HALF: (2 * 3 + 2) * 2, STORE_HALF: 2 * 3 * 2, "ld.shared": 1,
    },
    # Remainder and codes. Besides: four step counts a thread, which the last program advances.
    "adam_split8_int8": {LOAD: 2, STORE: 0, LOAD_HALF: (3 + 2) * 2, STORE_HALF: 3 * 2, "st.global.b32": 3 * 3 * 2 + 4},
}  # fmt: skip
for name in ("adam", "adam_amsgrad", *LEAN):  # 8 elements a thread and piece, 4 off the boundaries; scalars' roots
    COUNTS[name] |= {"div.rn.f32": (8 + 4) * 3, "sqrt.rn.f32": (8 + 4) * 3, "sqrt.rn.f64": 2}


@each_target
@each_kernel
def test_accesses_are_wide_and_roots_and_quotients_those_of_ieee(target: str, kernel: str, compiled: Any) -> None:
    code = compiled(target, kernel)
    assert {kind: len(re.findall(rf"\b{re.escape(kind)}\b", code)) for kind in COUNTS[kernel]} == COUNTS[kernel]
    assert kernel != "norm" or "0d3EB0C6F7A0B5ED8D" in code  # 1e-6, not rounded to fp32
    assert not kernel.startswith("adam") or "div.rn.f64" in code


@each_target
@pytest.mark.parametrize("kernel", [*KERNELS, *MEASURES])
def test_nothing_is_contracted_approximated_or_flushed(target: str, kernel: str, compiled: Any) -> None:
    code = compiled(target, kernel)
    operations = set(re.findall(r"\b(?:add|sub|mul|div|sqrt|rcp|rsqrt|fma|mad)\.[a-z0-9.]*f(?:32|64)\w*", code))
    assert operations
    # Without .rn, ptxas may contract.
    assert {op for op in operations if not re.match(r"(add|sub|mul|div|sqrt)\.rn\.f(32|64)", op)} == set()
    assert not re.search(r"\.ftz|\.approx|\.full|\bfma\b", code)


@each_target
@each_kernel
def test_a_program_has_written_before_it_takes_its_ticket(target: str, kernel: str, compiled: Any) -> None:
    before, ticket, after = compiled(target, kernel).partition("atom.global.gpu.acq_rel.add.u64")
    if kernel == "accumulate":  # which takes none
        assert not ticket
        return
    assert ticket
    assert "atom." not in after
    assert "bar.sync" in before
    since_barrier = before[before.rindex("bar.sync") :]
    assert not re.search(r"\bst\.global|\n\$L_", since_barrier)  # in the same block of code


AMD_KERNELS = [pytest.param(name, marks=[] if name == "norm" else pytest.mark.full) for name in ALL_KERNELS]


@pytest.mark.parametrize("kernel", AMD_KERNELS)
def test_amd_code_has_wide_accesses_and_spills_nothing(kernel: str, compiled: Any) -> None:
    code = compiled("gfx942", kernel)
    wide = re.findall(r"\b(?:global|buffer)_load_dwordx4\b", code)
    # The norm takes four rows at a time, fp32; the rest of a row, and what lies off its boundary, goes otherwise.
    assert len(wide) >= (4 if kernel == "norm" else 1)
    assert re.findall(r"\.(?:private_segment_fixed_size|vgpr_spill_count):\s+(\d+)", code) == ["0", "0"]
    assert not re.search(r"\bscratch_", code)
    widest = "dwordx2" if kernel == "adam_split8_int8" else "dwordx4"
    assert kernel == "norm" or re.search(rf"\b(global|buffer)_store_{widest}\b", code)


@pytest.mark.parametrize("kernel", ["norm", *MEASURES])
@pytest.mark.parametrize(("target", "modifier"), [("gfx1100", "glc"), ("gfx1201", "scope:SCOPE_DEV")])
def test_rdna_reads_the_partials_past_the_first_cache(target: str, modifier: str, kernel: str, compiled: Any) -> None:
    """Behind the norm's ticket another wave's cache may have lines from before it: see numeric.sum_partials."""
    code = compiled(target, kernel)
    loads = [line for line in code.splitlines() if re.search(r"\b(global|buffer)_load_", line)]
    assert len([line for line in loads if modifier in line]) >= 4, "a thread has 1024 / 256 lanes of the sum"


if __name__ == "__main__":
    for task in sys.argv[2:]:
        name, *kernels = task.split(",")
        (Path(sys.argv[1]) / name).mkdir()
        compile_kernels(name, Path(sys.argv[1]) / name, *kernels)
