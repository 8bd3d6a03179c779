"""What a tensor may be, and what may become of it between steps: the same numbers for every backend, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import inside
import pytest
import torch
from compare import assert_all_same_bits, assert_same_bits, everything, refused
from harness import on_device, tensors_alive
from layouts import GAP, UNUSUAL, every_third_row, shifted, transposed, with_holes
from places import INTERPRETED, ON_CPU, ON_GPU, Place
from reference import ReferenceBackend
from table import ADAMW_CASE, Case, case_named, random_grads, random_params, set_grads
from torch import Tensor

pytestmark = pytest.mark.usefixtures("tensors_there")
accumulates_or_not = pytest.mark.parametrize("accumulates", [False, True])
LR = 0.3  # of "sgd"


@pytest.mark.parametrize("put", [with_holes, every_third_row, shifted])
def test_memory_between_a_parameters_elements_is_left_alone(put: Any, place: Place) -> None:
    memory = torch.full((60, 12), GAP)
    views = {with_holes: memory[:20, ::2], every_third_row: memory[::3, :6], shifted: memory[1:, 3:9]}
    param = views[put].zero_().requires_grad_()
    gaps = memory == GAP
    optimizer = ADAMW_CASE.make([param], place.backend, max_grad_norm=1.0)
    param.grad = torch.ones(param.shape)
    optimizer.step()
    assert (memory[gaps] == GAP).all()
    assert (memory[~gaps] != 0).all()


@accumulates_or_not
def test_a_lazily_negated_gradient_is_taken_at_its_values(accumulates: bool, place: Place) -> None:
    """Also in the place of one that was freed: its object and its memory may be those."""
    values, param = torch.randn(64), torch.zeros(64, requires_grad=True)
    optimizer = case_named("sgd").make([param], place.backend)
    for _ in range(3):
        for make, sign in ((values.detach, 1.0), (lambda: inside.negated(values), -1.0)):
            before = param.detach().clone()
            param.grad = make()
            if accumulates:
                optimizer.accumulate()
            optimizer.step()
            param.grad = None
            assert_same_bits(param, before - sign * values * torch.tensor(LR))


@accumulates_or_not
@pytest.mark.parametrize("kind", UNUSUAL)
def test_a_gradient_without_memory_of_its_own_is_refused_or_taken_at_its_values(
    kind: str, accumulates: bool, place: Place
) -> None:
    params, value = random_params([(3,), (3,)]), {"wrapper": 1.0, "zero": 0.0, "expanded": 2.0}[kind]
    expected = [p.detach().clone() for p in params]
    optimizer = case_named("sgd_weight_decay").make(params, place.backend)
    params[0].grad, params[1].grad = UNUSUAL[kind](), torch.ones(3)
    try:
        if accumulates:
            optimizer.accumulate()
        optimizer.step()
    except (RuntimeError, TypeError):
        assert kind != "expanded"
    else:
        grads = [torch.full((3,), value), torch.ones(3)]
        expected = [p - (g + p * torch.tensor(0.2)) * torch.tensor(LR) for p, g in zip(expected, grads, strict=True)]
    for param, wanted in zip(params, expected, strict=True):
        assert_same_bits(param, wanted)


@pytest.mark.parametrize("place", [*ON_CPU, *INTERPRETED, *ON_GPU], indirect=True)
def test_a_gradient_in_its_accumulators_memory_is_refused(place: Place) -> None:
    (param,) = random_params([(6,)])
    optimizer = ADAMW_CASE.make([param], place.backend)
    param.grad = torch.ones(6)
    optimizer.accumulate()
    (accumulator,) = inside.accumulators(optimizer)
    param.grad = accumulator.detach()
    with refused(optimizer, RuntimeError, "lies where the window.s sum does"):
        optimizer.accumulate()


# ---- tensors that move between steps --------------------------------------------------------------------------------


def states(change: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], None]:
    """Replaces them by others."""

    def move(optimizer: Any, param: Tensor) -> None:
        for name, value in optimizer.state[param].items():
            optimizer.state[param][name] = change(value) if value.dim() == 2 else value.clone()

    return move


def data(change: Callable[[Tensor], Tensor], of: str = "param") -> Callable[[Any, Tensor], None]:
    """Replaces what the objects hold."""

    def move(optimizer: Any, param: Tensor) -> None:
        for value in [param] if of == "param" else optimizer.state[param].values():
            value.data = change(value.data) if value.dim() == 2 else value.data.clone()

    return move


MOVES: dict[str, Callable[[Any, Tensor], Any]] = {
    "elsewhere": data(torch.clone), "another order": data(transposed), "holes": data(with_holes),
    "transposed in place": data(torch.t),  # a square one keeps its address, size and shape: only strides change
    "other states": states(torch.clone), "other data of states": data(torch.clone, "states"),
    "states in another order": states(transposed), "transposed states": data(torch.t, "states"),
    "double states": states(Tensor.double), "no states": lambda optimizer, param: optimizer.state.pop(param),
}  # fmt: skip


def train_moving(case: Case, backend: Any, move: Callable[[Any, Tensor], Any], *, tidy: bool) -> dict[str, Tensor]:
    """Two steps, a move, two more; `tidy`: everything is made contiguous again in new memory after the move."""
    param = random_params([(8, 8)])[0]
    optimizer = case.make([param], backend)
    for seed in range(4):
        set_grads([param], random_grads([param], seed))
        optimizer.step()
        if seed == 1:
            left = param.data, param.detach().clone()
            move(optimizer, param)
            if tidy:
                param.data = param.data.clone(memory_format=torch.contiguous_format)
                entries = optimizer.state[param]
                entries |= {n: v.float().clone(memory_format=torch.contiguous_format) for n, v in entries.items()}
        elif seed > 1 and param.data_ptr() != left[0].data_ptr():
            assert_same_bits(left[0], left[1], "memory that a parameter has left")
    return everything(optimizer)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", ["sgd_dampening", "adamw_amsgrad", "lion_weight_decay"])
def test_tensors_may_be_moved_and_replaced_between_steps(name: str, move: str, place: Place) -> None:
    expected = train_moving(case_named(name), ReferenceBackend(), MOVES[move], tidy=True)
    found = train_moving(case_named(name), place.backend, MOVES[move], tidy=False)
    assert_all_same_bits(found, expected)


@pytest.mark.parametrize("move", [*MOVES][:4])
@pytest.mark.parametrize("closes", [False, True])
def test_a_parameter_may_be_moved_within_a_window(move: str, closes: bool, place: Place) -> None:
    found = []
    for backend in (ReferenceBackend(), place.backend):
        param = random_params([(8, 8)])[0]
        optimizer = case_named("sgd_momentum").make([param], backend)
        for seed in range(2):
            for micro in range(3):
                set_grads([param], random_grads([param], 10 * seed + micro))
                optimizer.accumulate(micro + 1.0, last=closes and micro == 2)
                if micro == 1 and backend is place.backend:
                    MOVES[move](optimizer, param)
                elif micro == 1 and "transposed" in move:
                    param.data = param.data.t().contiguous()
            optimizer.step()
        found.append(param.detach().clone())
    assert_same_bits(found[1], found[0])


def test_the_norm_of_a_window_that_is_laid_out_anew_is_in_its_new_order(place: Place) -> None:
    norms = []
    for at in (0, 2):
        (param,) = random_params([(64, 64)])
        optimizer = case_named("sgd").make([param], place.backend)
        for micro in range(3):
            if micro == at:
                MOVES["another order"](optimizer, param)
            if micro < 2:
                set_grads([param], random_grads([param], micro))
                optimizer.accumulate()
        optimizer.step()
        norms.append(optimizer.grad_norm)
    assert_same_bits(norms[1], norms[0])


def test_a_step_count_beyond_fp32_is_the_last_that_it_counts(place: Place) -> None:
    found = []
    for backend, count in ((ReferenceBackend(), 2.0**24), (place.backend, 1e30)):
        (param,) = random_params([(6,)])
        optimizer = ADAMW_CASE.make([param], backend)
        for _ in range(2):
            set_grads([param], random_grads([param], 0))
            optimizer.step()
            optimizer.state[param]["step"].fill_(count)
        found.append(param.detach().clone())
    assert_same_bits(found[1], found[0])


@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_a_state_of_another_shape_is_refused(shape: tuple[int, ...], place: Place) -> None:
    param = torch.zeros(6, requires_grad=True)
    optimizer = ADAMW_CASE.make([param], place.backend)
    param.grad = torch.ones(6)
    optimizer.step()
    state = optimizer.state[param]["exp_avg"]
    memory, before = state.data, state.detach().clone()
    state.data = memory[: torch.Size(shape).numel()].view(shape)  # the same address
    with refused(optimizer, RuntimeError, "state 'exp_avg' has shape"):
        optimizer.step()
    assert_same_bits(memory, before)


def test_a_tensor_that_a_module_of_tests_makes_at_import_is_seen() -> None:
    before = len(tensors_alive())
    held = torch.ones(3)
    assert len(tensors_alive()) == before + 1, held


def test_a_generators_numbers_are_those_of_the_cpu_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    inside.forget_constructors()
    with on_device("meta", monkeypatch):
        drawn, other = torch.randn(5, generator=generator), torch.randn(5)
    assert drawn.is_meta
    assert other.is_meta
    after = generator.get_state()
    torch.randn(5, generator=generator.set_state(before), device="cpu")
    assert torch.equal(generator.get_state(), after)
