"""The question that starts every article on gradient accumulation: are 4 micro-batches of 2 samples one batch of 8?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from text_data import Batch, collate
from text_model import GPT
from torch import Tensor

import accumfused as af

SAMPLES = 8
MICRO_BATCHES = 4
LEARNING_RATE = 0.1
ROUNDING = 1e-4  # of the largest update; fp32 sums over tokens in another order are some 1e-6 apart

Accumulate = Callable[[af.SGD, Tensor, Batch], None]


def plain_sum(optimizer: af.SGD, loss: Tensor, batch: Batch) -> None:
    loss.backward()
    optimizer.accumulate()


def divided_loss(optimizer: af.SGD, loss: Tensor, batch: Batch) -> None:
    (loss / MICRO_BATCHES).backward()
    optimizer.accumulate()


def weighted_by_tokens(optimizer: af.SGD, loss: Tensor, batch: Batch) -> None:
    loss.backward()
    optimizer.accumulate(weight=batch.num_tokens)


class Answer(NamedTuple):
    """One way to accumulate: the largest difference of a weight from the update with one batch, and why."""

    way: str
    equal_lengths: float
    real_lengths: float
    why: str


class Answers(NamedTuple):
    rows: list[Answer]
    largest_update: float  # of a weight, by the update with one batch

    @property
    def exact(self) -> bool:
        """Whether weighting by tokens, the last row, is the one batch up to rounding."""
        weighted = self.rows[-1]
        return all(apart <= ROUNDING * self.largest_update for apart in (weighted.equal_lengths, weighted.real_lengths))


def one_batch_or_four(samples: list[Tensor], seed: int) -> Answers:
    """Answers it by SGD updates of a model, for samples of equal length and for samples as they come.

    Args:
        samples: to draw from; at least 8 of them are as long as the longest.
        seed: of the model and the draw.
    """
    torch.manual_seed(seed)
    longest = max(len(sample) for sample in samples)
    model = GPT(longest)
    drawn = [samples[i] for i in torch.randperm(len(samples)).tolist()]
    equal = [sample for sample in drawn if len(sample) == longest][:SAMPLES]
    real = drawn[:SAMPLES]

    before = weights(model)
    one_batch = {"equal": after_one_batch(model, equal), "real": after_one_batch(model, real)}

    def answer(way: str, accumulate: Accumulate, why: str) -> Answer:
        apart = {
            lengths: float((after_four(model, drawn, accumulate) - one_batch[lengths]).abs().max())
            for lengths, drawn in {"equal": equal, "real": real}.items()
        }
        return Answer(way, apart["equal"], apart["real"], why)

    rows = [
        answer("the loss as it is", plain_sum, "Four means are summed: the gradient is four times too large."),
        answer("loss / 4", divided_loss, "The mean of four means: right if all hold as many tokens, else not."),
        answer("weight=num_tokens", weighted_by_tokens, "The mean over all tokens, as in one batch."),
    ]
    return Answers(rows, float((one_batch["real"] - before).abs().max()))


def after_one_batch(model: GPT, samples: list[Tensor]) -> Tensor:
    """The weights after torch's own update with all samples at once."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model.loss(collate(samples)).backward()
    optimizer.step()
    return weights(model)


def after_four(model: GPT, samples: list[Tensor], accumulate: Accumulate) -> Tensor:
    """The weights after one update with four micro-batches."""
    model = copy.deepcopy(model)
    optimizer = af.SGD(model.parameters(), lr=LEARNING_RATE)
    size = SAMPLES // MICRO_BATCHES
    for begin in range(0, SAMPLES, size):
        batch = collate(samples[begin : begin + size])
        accumulate(optimizer, model.loss(batch), batch)
    optimizer.step()
    return weights(model)


def weights(model: GPT) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
