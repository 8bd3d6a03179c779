"""Real text of variable length that every CPython carries: the help texts of the language reference, as bytes."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

VOCABULARY = 256  # a token is a byte
START = 0  # stands before each sample, and pads its end
IGNORED = -100  # the target of padding


class Batch(NamedTuple):
    """Samples, padded to the longest: inputs and targets are [samples, length], int64."""

    inputs: Tensor
    targets: Tensor
    num_tokens: int  # targets that count: what the loss is a mean over


def paragraphs(longest: int) -> list[Tensor]:
    """Every paragraph of the help texts as a sample of 1 to `longest` bytes; a longer one becomes several samples."""
    texts = [text.strip("\n").encode() for topic in sorted(topics) for text in topics[topic].split("\n\n")]
    pieces = [text[begin : begin + longest] for text in texts for begin in range(0, len(text), longest)]
    return [torch.tensor(list(piece)) for piece in pieces]


def collate(samples: list[Tensor]) -> Batch:
    """Makes samples of different lengths a batch that predicts each byte from those before it."""
    targets = pad_sequence(samples, batch_first=True, padding_value=IGNORED)
    inputs = torch.full_like(targets, START)
    inputs[:, 1:] = targets[:, :-1].clamp(min=START)
    return Batch(inputs, targets, num_tokens=sum(len(sample) for sample in samples))
