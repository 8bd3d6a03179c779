"""How large can a window be, and does it help: the gradient noise scale of the trained model, in micro-batches."""

from __future__ import annotations

import math
from itertools import islice
from typing import NamedTuple

from text_data import Batch
from text_model import GPT
from torch.utils.data import DataLoader

import accumfused as af


class Noise(NamedTuple):
    """The gradient noise scale (McCandlish et al. 2018), and the window that the training had."""

    tokens: float  # inf: the micro-batches show no common gradient
    tokens_of_micro_batch: float
    measured: int  # micro-batches
    window: int  # micro-batches of an update

    @property
    def micro_batches(self) -> float:
        """The N of a window as large as the noise scale."""
        return self.tokens / self.tokens_of_micro_batch

    def updates(self, n: float) -> float:
        """How many updates windows of n micro-batches need, as a multiple of the fewest."""
        return 1 + self.micro_batches / n

    def samples(self, n: float) -> float:
        """The same of samples."""
        return 1 + n / self.micro_batches

    def in_words(self) -> str:
        if not math.isfinite(self.tokens):
            return f"noise scale: {self.measured} micro-batches do not show it; a window of N > {self.window} helps"
        ratio = self.window / self.micro_batches
        helps = "still saves updates" if ratio < 0.5 else "saves few updates" if ratio < 2 else "only takes more text"
        about = f"{float(f'{self.tokens:.2g}'):,.0f} tokens, a window of N = {self.micro_batches:.2g} micro-batches"
        return f"noise scale: about {about}; this training had N = {self.window}: a larger one {helps}"


def noise_of(model: GPT, loader: DataLoader[Batch], measured: int, window: int) -> Noise:
    """Measures one long window; the model stays as it is."""
    optimizer = af.SGD(model.parameters(), lr=0.0, noise_scale=True)
    tokens = 0
    for batch in islice(loader, measured):
        model.loss(batch).backward()
        optimizer.accumulate(weight=batch.num_tokens)
        tokens += batch.num_tokens
    optimizer.step()
    return Noise(float(optimizer.noise_scale().noise_scale), tokens / measured, measured, window)
