"""Parameters and states in fewer bits through the CUDA kernels, over the emulation: the bits of the reference."""

# ruff: noqa: F811  # fixtures of another file are arguments here
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from compare import everything
from table import ADAMW_CASE, STATES, WEIGHTS, case_named, random_grads, random_params, set_grads
from test_cuda_emulated import cuda, machine  # noqa: F401  # fixtures
from test_formats import (
    CHUNK,
    GRADS,
    RULES,
    assert_agree,
    each_rule,
    each_states,
    each_weights,
    make,
    reference_run,
    run,
)
from torch import Tensor

import accumfused.backends.cuda
from accumfused import _native
from accumfused.backends.cuda import CudaBackend
from accumfused.backends.reference import ReferenceBackend

pytestmark = pytest.mark.skipif(_native._C is None, reason=_native.unavailable or "")

ROW = 2048  # elements that a block takes at once in the loops for packed formats
SIZES = (0, 3, 129, 2 * ROW + 130)

each_packed = pytest.mark.parametrize("weights", ["bf16_stochastic", "split16", "split8"])


@each_states
@each_weights
@each_rule
def test_every_format_gives_the_reference_bits(rule: str, weights: str, states: str, cuda: CudaBackend) -> None:
    """With one of the gradients' dtypes each; every pair of formats has each with one of the rules."""
    number = RULES.index(rule) + list(WEIGHTS).index(weights) + list(STATES).index(states)
    grad_dtype = GRADS[number % len(GRADS)]
    actual = run(case_named(rule), cuda, weights, states, grad_dtype, SIZES)
    assert_agree(actual, reference_run(rule, weights, states, grad_dtype, SIZES))


@pytest.mark.parametrize("name", ["adam_weight_decay", "adamw_no_decay", "adam_maximize"])
@each_packed
def test_adam_in_its_other_forms_agrees(name: str, weights: str, cuda: CudaBackend) -> None:
    actual = run(case_named(name), cuda, weights, "int8", torch.bfloat16, SIZES)
    assert_agree(actual, reference_run(name, weights, "int8", torch.bfloat16, SIZES))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("blocks", [1, 2, 64])
@each_packed
def test_the_grid_and_the_order_of_threads_change_nothing(
    weights: str, blocks: int, seed: int, machine: Any, cuda: CudaBackend
) -> None:
    machine.multiprocessors(blocks)
    machine.seed(seed)
    sizes = (CHUNK + ROW + 5, 5000, 40)
    expected = reference_run("adamw", weights, "int8", torch.bfloat16, sizes)
    assert_agree(run(ADAMW_CASE, cuda, weights, "int8", torch.bfloat16, sizes), expected)


@pytest.mark.parametrize(
    "weights", [(None, None, None), (3.0, 0.7, 5.0), (0.0, 3.0, 0.0, 0.7), (torch.tensor(0.0), 3.0)], ids=str
)
def test_windows_agree(weights: Any, cuda: CudaBackend) -> None:
    """Rescaled, overwritten, of no weight: what the accumulators hold before the step, and the norm of that."""
    found = []
    for backend in (cuda, ReferenceBackend()):
        optimizer, params = make(ADAMW_CASE, backend, "split8", "int8", (CHUNK + 9, 77))
        for step in range(2):
            for micro, weight in enumerate(weights):
                set_grads(params, random_grads(params, 10 * step + micro, torch.bfloat16))
                optimizer.accumulate(weight)
            optimizer.step()
        found.append(everything(optimizer) | {"norm": optimizer.grad_norm})
    assert_agree(found[0], found[1])


# ---- memory and launches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("states", ["fp32", "int8"])
@pytest.mark.parametrize("weights", ["fp32", "bf16_stochastic", "split16", "split8", "fp16_master"])
def test_memory_off_the_boundaries_gives_the_same_bits(
    weights: str, states: str, offset: int, cuda: CudaBackend
) -> None:
    """One stream after the other lies `offset` elements behind a boundary."""

    def shifted(values: Tensor) -> Tensor:
        memory = values.new_empty(values.numel() + offset)
        memory[offset:] = values
        return memory[offset:]

    found = []
    for backend in (cuda, ReferenceBackend()):
        optimizer, params = make(ADAMW_CASE, backend, weights, states, (ROW + 150,) * 6)
        set_grads(params, random_grads(params, 0, torch.bfloat16))
        optimizer.step()
        entries = [name for name, value in optimizer.state[params[0]].items() if value.dim() > 0]
        for param, name in zip(params, entries, strict=False):
            optimizer.state[param][name] = shifted(optimizer.state[param][name])
        params[-1].data = shifted(params[-1].data)
        params[-2].grad = shifted(params[-2].grad)
        optimizer.step()
        optimizer.step()
        found.append(everything(optimizer))
    assert_agree(found[0], found[1])


def test_any_mix_of_formats_goes_in_one_launch_per_verb(cuda: CudaBackend, machine: Any) -> None:
    """Small states stay in fp32, and not all parameters are of one dtype."""
    found = []
    for backend in (cuda, ReferenceBackend()):
        optimizer, params = make(ADAMW_CASE, backend, "split8", "int8", (5000, 70, 3000), state_dtype_min_numel=100)
        extra = random_params([(3000,), (60,)], seed=1)
        extra[1] = extra[1].detach().bfloat16().requires_grad_()
        optimizer.add_param_group({"params": extra})
        params += extra
        set_grads(params, random_grads(params, 0))
        for _ in range(3):
            before = machine.launches()
            optimizer.step()
        launches = machine.launches() - before
        assert launches == (2 if backend is cuda else 0), "one for the coefficient, one for the step"
        found.append(everything(optimizer))
    assert_agree(found[0], found[1])


def test_groups_of_different_rules_agree(cuda: CudaBackend) -> None:
    found = []
    for backend in (cuda, ReferenceBackend()):
        optimizer, params = make(ADAMW_CASE, backend, "split16", "int8", (5000, 300))
        params += [p.detach().bfloat16().requires_grad_() for p in random_params([(4000,)], seed=3)]
        optimizer.add_param_group({"params": params[2:], "amsgrad": True})
        for seed in range(2):
            set_grads(params, random_grads(params, seed, torch.bfloat16))
            optimizer.step()
        found.append(everything(optimizer))
    assert_agree(found[0], found[1])


# ---- numbers --------------------------------------------------------------------------------------------------------


def zeros(grad: Tensor, step: int) -> Tensor:
    return grad * (torch.arange(grad.numel()) % 7 < step)


def far_apart(grad: Tensor, step: int) -> Tensor:
    """Blocks from what fp32 can square down to what it cannot."""
    return grad * 2.0 ** (torch.arange(grad.numel()) // 128 % 61 * 2 - 70)


def nothing(grad: Tensor, step: int) -> Tensor:
    return grad * (step < 1)


def negative_zeros(grad: Tensor, step: int) -> Tensor:
    return -grad.abs() * (step < 1)


@pytest.mark.parametrize("spread", [zeros, far_apart, nothing, negative_zeros])
@each_packed
def test_moments_far_from_the_usual_agree(
    weights: str, spread: Callable[[Tensor, int], Tensor], cuda: CudaBackend
) -> None:
    found = []
    for backend in (cuda, ReferenceBackend()):
        optimizer, params = make(ADAMW_CASE, backend, weights, "int8", (8 * ROW,), max_grad_norm=None)
        with torch.no_grad():
            params[0][::5] = -0.0
            params[0][77] = torch.nan
            params[0][3000] = torch.inf
        for step in range(4):
            set_grads(params, [spread(grad, step) for grad in random_grads(params, step, torch.bfloat16)])
            optimizer.step()
        found.append(everything(optimizer))
    assert_agree(found[0], found[1])


@pytest.mark.parametrize(
    "options",
    [{"lr": 0.0}, {"lr": 1e-20}, {"eps": 1e30}, {"eps": 0.0}, {"betas": (0.9, 0.9999999)}, {"weight_decay": 20.0}],
    ids=str,
)
def test_hyper_parameters_far_from_the_usual_agree(options: dict[str, Any], cuda: CudaBackend) -> None:
    case = replace(ADAMW_CASE, options={**ADAMW_CASE.options, **options})
    actual = run(case, cuda, "split8", "int8", torch.bfloat16, SIZES)
    assert_agree(actual, run(case, ReferenceBackend(), "split8", "int8", torch.bfloat16, SIZES))


# ---- graphs ---------------------------------------------------------------------------------------------------------


class Window:
    """Two micro-batches and a step, with gradients that stay where they are, as a graph's do."""

    def __init__(self, optimizer: Any, params: list[Tensor]) -> None:
        self.optimizer, self.params = optimizer, params
        self.values = [random_grads(params, micro, torch.bfloat16) for micro in range(2)]
        self.grads = [[torch.empty_like(value) for value in values] for values in self.values]

    def write_grads(self) -> None:
        """As backward would: a window's first gradients may have become its accumulators."""
        for grads, values in zip(self.grads, self.values, strict=True):
            for grad, value in zip(grads, values, strict=True):
                grad.copy_(value)

    def __call__(self) -> None:
        self.write_grads()
        for grads in self.grads:
            for param, grad in zip(self.params, grads, strict=True):
                param.grad_dtype = grad.dtype
                param.grad = grad
            self.optimizer.accumulate()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("states", ["bf16", "int8"])
@pytest.mark.parametrize("weights", ["bf16_stochastic", "split8"])
def test_a_replay_rounds_with_new_noise(
    weights: str, states: str, cuda: CudaBackend, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured window that is replayed twice gives the bits of three eager ones."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    found = []
    for captured in (True, False):
        optimizer, params = make(ADAMW_CASE, cuda, weights, states, (5000, 70), max_grad_norm=None)
        window = Window(optimizer, params)
        window()
        if captured:
            monkeypatch.setattr(accumfused.backends.cuda, "current_stream", lambda device: (0, 77))
            machine.capture(7)
        window()
        for _ in range(2):
            window.write_grads()
            machine.replay() if captured else window()
        machine.capture(0)
        monkeypatch.setattr(accumfused.backends.cuda, "current_stream", lambda device: (0, 0))
        found.append(everything(optimizer))
    assert_agree(found[0], found[1])
    assert int(optimizer.state[params[0]]["step"]) == 4


# ---- these tests bite -----------------------------------------------------------------------------------------------


def test_another_seed_gives_other_bits(cuda: CudaBackend) -> None:
    expected = reference_run("adamw", "split8", "int8", torch.bfloat16, SIZES)
    with pytest.raises(AssertionError):
        assert_agree(run(ADAMW_CASE, cuda, "split8", "int8", torch.bfloat16, SIZES, rounding_seed=18), expected)
