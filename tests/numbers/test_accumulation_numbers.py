"""Accumulation against truth in float64: many small micro-batches against one batch, weights of every kind, 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from compare import assert_close, assert_same_bits
from oracle import Oracle, window_mean
from table import ADAMW_CASE, CASES, Case, case_named, random_grads, random_params, set_grads  # fmt: skip
from torch import Tensor, nn

import accumfused as af

VOCABULARY, WIDTH, CONTEXT = 11, 8, 3
SHAPES = ((4,), (7, 5), (), (300,))


class TokenModel(nn.Module):
    """Predicts the next of a few symbols: an embedding, two layers, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(
            nn.Linear(CONTEXT * WIDTH, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, VOCABULARY)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.embedding(tokens).flatten(1))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(tokens), targets)  # a mean over the tokens: NaN where there is none


def token_model(dtype: torch.dtype = torch.float32) -> TokenModel:
    torch.manual_seed(1)
    return TokenModel().to(dtype)


def micro_batches(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    generator, device = torch.Generator().manual_seed(2), torch.get_default_device()
    return [
        (
            torch.randint(VOCABULARY, (size, CONTEXT), generator=generator, device="cpu").to(device),
            torch.randint(VOCABULARY, (size,), generator=generator, device="cpu").to(device),
        )
        for size in sizes
    ]


def as_one(batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    tokens, targets = zip(*batches, strict=True)
    return torch.cat(tokens), torch.cat(targets)


UNEQUAL, EMPTY = (5, 1, 9, 3), (0, 5, 0, 3, 0)


@pytest.mark.pairwise(
    case=CASES,
    loop=[
        ((4, 4, 4), "none"), (UNEQUAL, "host"), (UNEQUAL, "device"), (UNEQUAL, "in the loss"), (EMPTY, "host"),
        (EMPTY, "device"), (EMPTY, "in the loss"),
    ],
)  # fmt: skip
def test_micro_batches_equal_one_batch(case: Case, loop: tuple[tuple[int, ...], str], backend: str) -> None:
    """One update from micro-batches against one from all their tokens at once, in float64."""
    sizes, weights = loop
    batches = micro_batches(sizes)
    truth = token_model(torch.float64)
    truth.loss(*as_one(batches)).backward()
    oracle = Oracle(case.of.oracle, case.options, [*truth.parameters()], max_grad_norm=0.5)
    oracle.step([p.grad for p in truth.parameters()])

    model = token_model()
    optimizer = case.make(model.parameters(), backend, max_grad_norm=0.5)
    for size, batch in zip(sizes, batches, strict=True):
        loss = model.loss(*batch)
        if weights == "in the loss":
            optimizer.backward(loss, size)
            continue
        loss.backward()
        optimizer.accumulate({"host": size, "device": torch.tensor(size), "none": None}[weights])
    optimizer.step(normalizer=len(sizes) if weights == "none" else None)
    assert_close(optimizer.grad_norm, oracle.norm, "model", "grad_norm")
    for (name, param), expected, states in zip(model.named_parameters(), oracle.params, oracle.states, strict=True):
        assert_close(param, expected, "model", name)
        for state, value in states.items():
            assert_close(optimizer.state[param][state], torch.as_tensor(value), "model", f"{state} of {name}")


def test_remainder_windows_equal_their_batches_over_an_epoch(backend: str) -> None:
    sizes = (5, 1, 9, 3, 4, 2, 7)
    batches = micro_batches(sizes)
    case = case_named("sgd_momentum")
    model, truth = token_model(), token_model(torch.float64)
    optimizer = case.make(model.parameters(), backend, max_grad_norm=0.5)
    oracle = Oracle(case.of.oracle, case.options, [*truth.parameters()], max_grad_norm=0.5)
    updates, window = 0, []
    for batch, last in af.windows(batches, gradient_accumulation_steps=3):
        model.loss(*batch).backward()
        optimizer.accumulate(weight=len(batch[1]), last=last)
        window.append(batch)
        if last:
            optimizer.step()
            truth.zero_grad()
            truth.loss(*as_one(window)).backward()
            oracle.step([p.grad for p in truth.parameters()])
            for param, value in zip(truth.parameters(), oracle.params, strict=True):
                param.data = value
            updates, window = updates + 1, []
    assert updates == 3
    for (name, param), expected in zip(model.named_parameters(), oracle.params, strict=True):
        assert_close(param, expected, "model", name)


def close_window(
    optimizer: af.FusedOptimizer, params: list[Tensor], micro: Sequence[Sequence[Tensor]], weights: Sequence[Any]
) -> list[Tensor]:
    for k, (grads, weight) in enumerate(zip(micro, weights, strict=True)):
        set_grads(params, grads)
        optimizer.accumulate(weight, last=k == len(micro) - 1)
    return [p.grad.clone() for p in params]


def kinds(weights: Sequence[float]) -> dict[str, list[Any]]:
    device = [torch.tensor(w, dtype=torch.float32) for w in weights]
    return {
        "host": [*weights],
        "device": device,
        "mixed": [h if k % 2 else d for k, (h, d) in enumerate(zip(weights, device, strict=True))],
    }


@pytest.mark.parametrize("kind", ["host", "device", "mixed"])
@pytest.mark.parametrize("weights", [(3.0,), (0.5, 2.0), (1e-3, 7.0, 4096.0), tuple(range(1, 21))], ids=len)
def test_a_closed_window_is_the_weighted_mean(weights: tuple[float, ...], kind: str, backend: str) -> None:
    params = random_params(SHAPES)
    micro = [random_grads(params, k) for k in range(len(weights))]
    optimizer = ADAMW_CASE.make(params, backend)
    found = close_window(optimizer, params, micro, kinds(weights)[kind])
    for index, (grad, expected) in enumerate(zip(found, window_mean(micro, weights), strict=True)):
        assert_close(grad, expected, "window", f"gradient {index}")


def test_a_sum_equals_autograd_accumulation(backend: str) -> None:
    batches = micro_batches((4, 3, 6, 1))
    model, stock = token_model(), token_model()
    optimizer = ADAMW_CASE.make(model.parameters(), backend)
    for k, batch in enumerate(batches):
        stock.loss(*batch).backward()
        model.loss(*batch).backward()
        optimizer.accumulate(last=k == 3)
    for (name, param), other in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert_same_bits(param.grad, other.grad, name)  # the same fp32 additions in the same order


@pytest.mark.parametrize("kind", ["host", "device", "mixed"])
@pytest.mark.parametrize("empty", [(0,), (1,), (3,), (0, 1), (0, 2, 3)], ids=str)
def test_an_empty_micro_batch_leaves_no_trace(empty: tuple[int, ...], kind: str, backend: str) -> None:
    weights = tuple(0.0 if k in empty else 1.5 + k for k in range(4))
    params = random_params(SHAPES)
    micro = [random_grads(params, k) for k in range(4)]
    truth = window_mean([m for k, m in enumerate(micro) if k not in empty], [w for w in weights if w])
    for k in empty:
        for grad in micro[k]:
            grad.fill_(torch.nan)  # a mean over no tokens
    given_weights = kinds(weights)[kind]
    closed = close_window(ADAMW_CASE.make(params, backend), params, micro, given_weights)
    for index, (grad, expected) in enumerate(zip(closed, truth, strict=True)):
        assert_close(grad, expected, "window", f"gradient {index}")

    case = case_named("sgd")
    params = random_params(SHAPES)
    oracle = Oracle(case.of.oracle, case.options, params, max_grad_norm=0.5)
    oracle.step(truth)
    optimizer = case.make(params, backend, max_grad_norm=0.5)
    for grads, weight in zip(micro, given_weights, strict=True):
        set_grads(params, grads)
        optimizer.accumulate(weight)
    optimizer.step()
    assert_close(optimizer.grad_norm, oracle.norm, "norm")
    for index, (param, expected) in enumerate(zip(params, oracle.params, strict=True)):
        assert_close(param, expected, "fp64 oracle", f"parameter {index}")


@pytest.mark.parametrize("count", [4, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_16_bit_gradients_are_summed_in_fp32(dtype: torch.dtype, count: int, backend: str) -> None:
    params = random_params([(2000,)])
    micro = [random_grads(params, k, dtype) for k in range(count)]
    (truth,) = window_mean(micro, None)
    (found,) = close_window(ADAMW_CASE.make(params, backend), params, micro, [None] * count)
    assert found.dtype == torch.float32
    in_16_bits = torch.zeros(2000, dtype=dtype)
    for (grad,) in micro:
        in_16_bits += grad  # what autograd does

    def error(value: Tensor) -> float:
        return float((value.double() - truth).norm() / truth.norm())

    assert error(found) < 1e-6
    assert error(found) < error(in_16_bits) / 500


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autograds_16_bit_gradients_update_as_their_fp32_sum(dtype: torch.dtype, backend: str) -> None:
    case = case_named("adamw")
    params = random_params(SHAPES)
    for param in params:
        param.grad_dtype = dtype
    oracle = Oracle(case.of.oracle, case.options, params, max_grad_norm=0.5)
    optimizer = case.make(params, backend, max_grad_norm=0.5)
    for seed in range(3):
        micro = [random_grads(params, 10 * seed + k) for k in range(3)]
        for grads in micro:
            sum((p * g).sum() for p, g in zip(params, grads, strict=True)).backward()
            assert all(p.grad.dtype == dtype for p in params)
            optimizer.accumulate()
        optimizer.step()
        oracle.step(window_mean([[g.to(dtype) for g in grads] for grads in micro], None))
    for param, expected in zip(params, oracle.params, strict=True):
        assert_close(param, expected, "fp64 oracle")
        assert param.dtype == torch.float32


def test_a_large_16_bit_gradient_does_not_overflow_the_sum(backend: str) -> None:
    params = [torch.zeros(4, requires_grad=True)]
    largest = torch.full((4,), torch.finfo(torch.float16).max, dtype=torch.float16)
    (found,) = close_window(ADAMW_CASE.make(params, backend), params, [[largest]] * 8, [None] * 8)
    assert_close(found, largest.double() * 8, "window")


@pytest.mark.parametrize("weights", [(None, None, None), (2.0, 0.5, 3.0)], ids=["sum", "mean"])
def test_the_first_fp32_gradient_becomes_the_accumulator(weights: tuple[float | None, ...], backend: str) -> None:
    params = random_params(SHAPES)
    micro = [random_grads(params, k) for k in range(3)]
    optimizer = ADAMW_CASE.make(params, backend)
    set_grads(params, micro[0])
    addresses = [p.grad.data_ptr() for p in params]
    for k, weight in enumerate(weights):
        if k > 0:
            set_grads(params, micro[k])
        optimizer.accumulate(weight, last=k == 2)
    assert [p.grad.data_ptr() for p in params] == addresses, "a gradient was copied"
    for param, expected in zip(params, window_mean(micro, None if weights[0] is None else weights), strict=True):
        assert_close(param.grad, expected, "window")


def test_a_gradient_that_two_parameters_share_is_not_counted_twice(backend: str) -> None:
    params = random_params([(6,), (6,)])
    optimizer = ADAMW_CASE.make(params, backend)
    shared = torch.arange(6.0)
    for param in params:
        param.grad = shared
    optimizer.accumulate()
    params[0].grad = torch.ones(6)
    optimizer.accumulate(last=True)
    assert_close(params[0].grad, torch.arange(6.0) + 1, "window")
    assert_close(params[1].grad, torch.arange(6.0), "window")


@pytest.mark.parametrize("weights", [(0.25, 0.75), (0.5, 0.5), (1.0, 1.0), (3.0, 5.0), (0.25, 0.25, 0.5)], ids=str)
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("tensors", [False, True])
def test_a_parameter_without_a_gradient_in_the_last_micro_batch_has_its_weight(
    backend: str, weights: tuple[float, ...], closed: bool, tensors: bool
) -> None:
    """Also where the weights add up to 1, so that closing has nothing to divide by."""
    often, once = (torch.zeros(4).requires_grad_() for _ in range(2))
    optimizer = af.SGD([often, once], lr=1.0, backend=backend)
    for index, weight in enumerate(weights):
        often.grad = torch.ones(4)
        once.grad = torch.full((4,), 8.0) if index == 0 else None
        last = closed and index == len(weights) - 1
        optimizer.accumulate(torch.tensor(weight) if tensors else weight, last=last)
    optimizer.step()
    expected = torch.tensor([-1.0, -8.0 * weights[0] / sum(weights)])
    assert_close(torch.stack([often[0], once[0]]), expected, "window")
