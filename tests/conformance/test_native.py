"""The native module itself: what machine code it holds, what it is linked to, which addresses it works on.

What holds of addresses is asked of every backend.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from typing import Any

import pytest
import torch
from compare import assert_same_bits, everything
from table import ADAMW_CASE, Case, case_named, every_case, random_grads, random_params, set_grads
from test_layouts import transposed, with_holes
from torch import Tensor

from accumfused import _native
from accumfused.backends.reference import ReferenceBackend

native_only = pytest.mark.skipif(_native._C is None, reason=_native.unavailable or "")
VECTOR_NAMESPACES = ("x86_64_v3", "x86_64_v4")
AVX = re.compile(r"%[yz]mm\d|^v[a-z]")  # a register wider than SSE's, or a mnemonic of AVX's encoding
FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")


def output_of(tool: str, *arguments: str) -> str:
    """What a binutils tool says about the module; skips the test without it."""
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    run = subprocess.run([tool, *arguments, _native._C.__file__], capture_output=True, text=True, check=True)
    return run.stdout


@pytest.fixture(scope="module")
def avx_instructions() -> dict[str, str]:
    """Function -> its first AVX instruction ("" if it has none)."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"AVX is an x86-64 matter, this is {platform.machine()}")
    if platform.system() == "Darwin":
        pytest.skip("GNU objdump's format is read here")
    found: dict[str, str] = {}
    function = ""
    for line in output_of("objdump", "-d", "--no-show-raw-insn").splitlines():
        if header := FUNCTION.match(line):
            function = header[1]
            found.setdefault(function, "")
        elif "\t" in line:
            instruction = line.split("\t", 1)[1].strip()
            if not found[function] and AVX.search(instruction):
                found[function] = instruction
    return found


@native_only
def test_the_baseline_has_no_avx_instruction(avx_instructions: dict[str, str]) -> None:
    baseline = {f: i for f, i in avx_instructions.items() if not any(name in f for name in VECTOR_NAMESPACES)}
    assert any("baseline" in function for function in baseline)
    assert {f: i for f, i in baseline.items() if i} == {}


@native_only
def test_the_other_instruction_sets_do_have_avx_instructions(avx_instructions: dict[str, str]) -> None:
    for namespace in VECTOR_NAMESPACES:  # otherwise the check above would see nothing
        kernels = [i for f, i in avx_instructions.items() if namespace in f]
        assert sum(bool(i) for i in kernels) > 3, f"{namespace}: {len(kernels)} functions"


@native_only
def test_the_module_is_linked_to_neither_torch_nor_an_openmp_runtime() -> None:
    if platform.system() != "Linux":
        pytest.skip("ELF only")
    needed = re.findall(r"NEEDED\s+(\S+)", output_of("objdump", "-p"))
    assert any(name.startswith("libc.") for name in needed)
    assert [name for name in needed if re.search(r"gomp|omp5|iomp|torch|c10|python", name)] == []


@native_only
def test_the_kernels_follow_the_parameters_addresses() -> None:
    params = random_params([(40,), (50,)])
    optimizer = ADAMW_CASE.make(params, "cpu")
    expected_params = random_params([(40,), (50,)])
    expected = ADAMW_CASE.make(expected_params, ReferenceBackend())
    left_behind = []
    for seed in range(4):
        grads = random_grads(params, seed)
        set_grads(params, grads)
        set_grads(expected_params, grads)
        optimizer.step()
        expected.step()
        left_behind.append((params[1].data, params[1].detach().clone()))
        params[1].data = params[1].data.clone()
    for old, value in left_behind:
        assert_same_bits(old, value, "memory that a parameter has left")
    for name, value in everything(expected).items():
        assert_same_bits(everything(optimizer)[name], value, name)


@native_only
def test_a_released_parameter_is_not_written_any_more() -> None:
    params = random_params([(40,), (50,)])
    optimizer = ADAMW_CASE.make(params, "cpu")
    set_grads(params, random_grads(params, 0))
    optimizer.step()
    optimizer.param_groups[0]["params"] = [params[1]]
    before = params[0].detach().clone()
    optimizer.step()
    assert_same_bits(params[0], before)


# ---- tensors that move between steps --------------------------------------------------------------------------------


def clone_data(optimizer: Any, param: Tensor) -> None:
    param.data = param.data.clone()


def other_memory_order(optimizer: Any, param: Tensor) -> None:
    param.data = transposed(param.data)


def data_with_holes(optimizer: Any, param: Tensor) -> None:
    param.data = with_holes(param.data)


def transpose_in_place(optimizer: Any, param: Tensor) -> None:
    """A square parameter keeps its address, size and shape: only its strides change."""
    param.data = param.data.t()


def replace_states(optimizer: Any, param: Tensor) -> None:
    for name, value in list(optimizer.state[param].items()):
        optimizer.state[param][name] = value.clone()


def swap_state_data(optimizer: Any, param: Tensor) -> None:
    for value in optimizer.state[param].values():
        value.data = value.data.clone()


def states_in_another_order(optimizer: Any, param: Tensor) -> None:
    for name, value in list(optimizer.state[param].items()):
        if value.dim() == 2:
            optimizer.state[param][name] = transposed(value)


def state_data_in_another_order(optimizer: Any, param: Tensor) -> None:
    """Same address, other strides (and so other values, here as there)."""
    for value in optimizer.state[param].values():
        if value.dim() == 2:
            value.data = value.data.t()


def double_states(optimizer: Any, param: Tensor) -> None:
    for name, value in list(optimizer.state[param].items()):
        optimizer.state[param][name] = value.double()


def drop_states(optimizer: Any, param: Tensor) -> None:
    del optimizer.state[param]


MOVES = (
    clone_data, other_memory_order, data_with_holes, transpose_in_place, replace_states, swap_state_data,
    states_in_another_order, state_data_in_another_order, double_states, drop_states,
)  # fmt: skip


def train_moving(case: Case, backend: Any, move: Any, *, tidy: bool) -> dict[str, Tensor]:
    """Two steps, a move, two more; `tidy`: everything is made contiguous again in new memory after the move."""
    param = random_params([(8, 8)])[0]
    optimizer = case.make([param], backend)
    for seed in range(4):
        set_grads([param], random_grads([param], seed))
        optimizer.step()
        if seed == 1 and optimizer.state[param]:
            move(optimizer, param)
            if tidy:
                param.data = param.data.clone(memory_format=torch.contiguous_format)
                entries = optimizer.state[param]
                entries |= {n: v.float().clone(memory_format=torch.contiguous_format) for n, v in entries.items()}
    return {"param": param.detach().clone(), **{n: v.clone() for n, v in optimizer.state[param].items()}}


def compare_moved(case: Case, backend: Any, move: Any) -> None:
    expected = train_moving(case, ReferenceBackend(), move, tidy=True)
    found = train_moving(case, backend, move, tidy=False)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert_same_bits(found[key], value, key)


COMPARISONS = [(f"move: {m.__name__}", lambda c, b, m=m: compare_moved(c, b, m), lambda case: True) for m in MOVES[:3]]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
@pytest.mark.parametrize("name", ["sgd_dampening", "adamw_amsgrad", "lion_weight_decay"])
def test_tensors_may_be_moved_and_replaced_between_steps(name: str, move: Any, backend: str) -> None:
    compare_moved(case_named(name), backend, move)


@pytest.mark.parametrize("move", [clone_data, other_memory_order, data_with_holes, transpose_in_place])
@pytest.mark.parametrize("closes", [False, True])
def test_a_parameter_may_be_moved_within_a_window(move: Any, closes: bool, backend: str) -> None:
    found = []
    for moves in (False, True):
        param = random_params([(8, 8)])[0]
        optimizer = case_named("sgd_momentum").make([param], backend if moves else ReferenceBackend())
        for seed in range(2):
            for micro in range(3):
                set_grads([param], random_grads([param], 10 * seed + micro))
                optimizer.accumulate(micro + 1.0, last=closes and micro == 2)
                if micro == 1:
                    if moves:
                        move(optimizer, param)
                    elif move is transpose_in_place:
                        param.data = param.data.t().contiguous()
            optimizer.step()
        found.append(param.detach().clone())
    assert_same_bits(found[1], found[0])


def test_a_parameter_of_another_shape_starts_anew_or_is_refused(backend: str) -> None:
    param = torch.zeros(6, requires_grad=True)
    behind = param.data
    optimizer = case_named("sgd").make([param], backend)
    param.grad = torch.ones(6)
    optimizer.step()
    param.grad = None
    param.data = param.data[:4]  # the same address
    param.grad = torch.ones(4)
    optimizer.step()
    step = torch.tensor(0.3)
    assert_same_bits(behind, torch.cat([-(step + step).expand(4), -step.expand(2)]))


@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_a_state_of_another_shape_is_refused(shape: tuple[int, ...], backend: str) -> None:
    param = torch.zeros(6, requires_grad=True)
    optimizer = case_named("adamw").make([param], backend)
    param.grad = torch.ones(6)
    optimizer.step()
    state = optimizer.state[param]["exp_avg"]
    memory = state.data
    state.data = memory[: torch.Size(shape).numel()].view(shape)  # the same address
    before = [param.detach().clone(), memory.clone()]
    with pytest.raises(RuntimeError, match="state 'exp_avg' has shape"):
        optimizer.step()
    assert_same_bits(param, before[0])
    assert_same_bits(memory, before[1])


# ---- autograd's version counters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulates", [False, True])
@every_case
def test_autograd_notices_a_step_between_forward_and_backward(case: Case, accumulates: bool, backend: Any) -> None:
    (param,) = random_params([(6,)])
    optimizer = case.make([param], backend)
    set_grads([param], random_grads([param], 0))
    loss = (param * param).sum()  # its backward needs the parameter as it is now
    if accumulates:
        optimizer.accumulate()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("shape", [(6,), (3, 8)])
def test_autograd_notices_it_where_the_parameter_has_holes(shape: tuple[int, ...], backend: str) -> None:
    param = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2].requires_grad_()
    optimizer = ADAMW_CASE.make([param], backend)
    param.grad = torch.ones(shape)
    loss = (param * param).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
