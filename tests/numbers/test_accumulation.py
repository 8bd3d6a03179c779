"""What a window adds up to: against float64, against one batch of all its micro-batches, and by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from compare import assert_close, assert_same_bits
from oracle import Oracle
from table import ADAMW_CASE, Case, case_named
from torch import Tensor, nn

import accumfused as af

LR = 0.5
VOCABULARY, CONTEXT = 11, 3
Batch = tuple[Tensor, Tensor]


# ---- many small micro-batches, and one batch of them all ------------------------------------------------------------


def token_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Predicts the next of a few symbols."""
    torch.manual_seed(1)
    layers = nn.Linear(8 * CONTEXT, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, VOCABULARY)
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Flatten(), *layers).to(dtype)


def micro_batches(sizes: Sequence[int]) -> list[Batch]:
    """Numbers of tokens that count; where there is none, of one that is masked."""
    generator, device = torch.Generator().manual_seed(2), torch.get_default_device()
    lengths = [max(size, 1) for size in sizes]
    text = torch.randint(VOCABULARY, (sum(lengths), CONTEXT + 1), generator=generator, device="cpu").to(device)
    parts = zip(text.split(lengths), sizes, strict=True)
    return [(part[:, :-1], part[:, -1] if size else torch.full_like(part[:, -1], -100)) for part, size in parts]


def loss_of(model: nn.Module, *batches: Batch) -> Tensor:
    """A mean over the tokens: NaN where there is none, and so are its gradients."""
    tokens, targets = map(torch.cat, zip(*batches, strict=True))
    losses, mask = nn.functional.cross_entropy(model(tokens), targets.clamp(min=0), reduction="none"), targets >= 0
    return (losses * mask).sum() / mask.sum()


UNEQUAL, EMPTY = (5, 1, 9, 3), (0, 5, 0, 3, 0)


@pytest.mark.pairwise(
    case=[case_named("sgd_nesterov"), ADAMW_CASE],  # test_rules.py has all others, with gradients that are given
    loop=[
        ((4, 4, 4), "none"), (UNEQUAL, "host"), (UNEQUAL, "device"), (UNEQUAL, "in the loss"), (EMPTY, "host"),
        (EMPTY, "device"), (EMPTY, "in the loss"), (EMPTY, "in the loss, device"),
    ],
)  # fmt: skip
def test_micro_batches_equal_one_batch(case: Case, loop: tuple[tuple[int, ...], str], backend: str) -> None:
    """One update from micro-batches against one from all their tokens at once, in float64."""
    sizes, weights = loop
    batches = micro_batches(sizes)
    truth, model = token_model(torch.float64), token_model()
    loss_of(truth, *batches).backward()
    oracle = Oracle(case.of.oracle, case.options, [*truth.parameters()], max_grad_norm=0.5)
    oracle.step([p.grad for p in truth.parameters()])
    optimizer = case.make(model.parameters(), backend, max_grad_norm=0.5)
    for size, batch in zip(sizes, batches, strict=True):
        weight = torch.tensor(size) if "device" in weights else None if weights == "none" else size
        if "in the loss" in weights:
            optimizer.backward(loss_of(model, batch), weight)
        else:
            loss_of(model, batch).backward()
            optimizer.accumulate(weight)
    optimizer.step(normalizer=len(sizes) if weights == "none" else None)
    assert_close(optimizer.grad_norm, oracle.norm, "model", "grad_norm")
    for (name, param), expected, states in zip(model.named_parameters(), oracle.params, oracle.states, strict=True):
        assert_close(param, expected, "model", name)
        for state, value in states.items():
            assert_close(optimizer.state[param][state], torch.as_tensor(value), "model", f"{state} of {name}")


def test_a_sum_has_the_bits_of_autograds_own(backend: str) -> None:
    """The same fp32 additions in the same order."""
    model, stock = token_model(), token_model()
    optimizer = ADAMW_CASE.make(model.parameters(), backend)
    for number, batch in enumerate(micro_batches((4, 3, 6, 1))):
        loss_of(stock, batch).backward()
        loss_of(model, batch).backward()
        optimizer.accumulate(last=number == 3)
    for (name, param), other in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert_same_bits(param.grad, other.grad, name)


def one_parameter(backend: str, **options: float) -> tuple[nn.Parameter, af.SGD]:
    param = nn.Parameter(torch.full((4,), 8.0))
    return param, af.SGD([param], lr=LR, backend=backend, **options)


# ---- accumulators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_closed_window_of_16_bit_gradients_is_fp32_and_the_next_backward_16_bit_again(
    backend: str, dtype: torch.dtype
) -> None:
    param, optimizer = one_parameter(backend)
    param.grad_dtype = dtype
    # Each is a bfloat16 and a float16. Their sum has too many bits for both, and is too large for a float16.
    slopes = (49152.0, 49152.0, 1 + 2**-7)
    for update in (1, 2):
        for number, slope in enumerate(slopes):
            (param * slope).sum().backward()
            assert param.grad.dtype == dtype
            optimizer.accumulate(last=number == 2)
        assert param.grad.dtype == torch.float32
        assert param.grad.tolist() == [sum(slopes)] * 4
        optimizer.step()
        assert param.grad is None
        assert param.grad_dtype == dtype
        assert param.tolist() == [8.0 - LR * update * sum(slopes)] * 4


@pytest.mark.parametrize("weights", [(None, None, None), (2.0, 0.5, 3.0)], ids=["sum", "mean"])
def test_the_first_fp32_gradient_becomes_the_accumulator(weights: tuple[float | None, ...], backend: str) -> None:
    param, optimizer = one_parameter(backend)
    grads = [torch.full((4,), slope) for slope in (1.0, 2.0, 3.0)]
    address = grads[0].data_ptr()
    for last in (False, False, True):
        param.grad = grads.pop(0)  # nobody else has it
        optimizer.accumulate(weights[2 - len(grads)], last=last)
    assert param.grad.data_ptr() == address, "the gradient was copied"
    assert_close(param.grad, torch.full((4,), 6.0 if None in weights else 12.0 / 5.5), "window")


def test_a_gradient_that_is_a_part_of_larger_memory_is_copied(backend: str) -> None:
    """An accumulator would keep all of that memory, which nobody else has."""
    param, optimizer = one_parameter(backend)
    param.grad = torch.empty(0).set_(torch.ones(8).untyped_storage(), 0, (4,))
    address = param.grad.data_ptr()
    optimizer.accumulate(last=True)
    assert param.grad.data_ptr() != address
    assert param.grad.tolist() == [1.0] * 4
