"""Words from which the rounding noise of sums in bf16 comes: see csrc/rows.h's Fold.

Each chunk has a word, which the device counts up with each addition that it rounds; all chunks of a row have the same.
Words go on from window to window, dropped and skipped ones too, so no two additions have one noise. A count on the
host would stand still in a captured graph.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from accumfused.core import graphs
from accumfused.core.plan import Plan
from accumfused.formats.codecs import mix
from accumfused.formats.numeric import chunk_count

_OF_SUMS = 0x73756D73  # parts their noise from a step's, which has the same seed


class SumNoise:
    """The words of one optimizer's windows."""

    def __init__(self) -> None:
        self._words: Tensor | None = None  # int64 [chunks]
        self._plan: Any = None  # a weak reference to the plan that they fit
        self._chunks: list[int] = []  # of its rows

    def words(self, plan: Plan) -> Tensor:
        """Returns the words for a plan: int64 [plan.chunks]. Rows keep theirs, and new ones begin."""
        if self._words is not None and self._plan is not None and self._plan() is plan:
            return self._words
        chunks = [chunk_count(row.tensor.numel()) for row in plan.rows]
        words = self._words
        if words is None or words.device != plan.device or chunks != self._chunks:
            graphs.refuse_new_tensors({plan.device})
            own, begun = self.of_rows(), begin(plan.seed, len(chunks)).to(plan.device)
            if own is not None:
                begun[: len(own)] = own.to(plan.device)[: len(chunks)]
            words = begun.repeat_interleave(torch.tensor(chunks), output_size=plan.chunks)
        self._words, self._chunks, self._plan = words, chunks, weakref.ref(plan)
        return words

    def of_rows(self) -> Tensor | None:
        """Returns each row's word, for a checkpoint: int64 [rows], a copy; None: no sum was rounded yet.

        Rows without elements have the word of another one, which nothing reads.
        """
        if self._words is None:
            return None
        firsts = torch.tensor([0, *self._chunks[:-1]]).cumsum(0).clamp(max=max(0, len(self._words) - 1))
        return self._words[firsts.to(self._words.device)]

    def resume(self, of_rows: Tensor | None) -> None:
        """Goes on from a checkpoint's words, one for each row; None: they begin anew."""
        self._words, self._plan = of_rows, None
        self._chunks = [] if of_rows is None else [1] * len(of_rows)


def begin(seed: int, rows: int) -> Tensor:
    """Makes the first words of an optimizer's rows: int64 [rows]."""
    seeds = torch.full((rows,), seed ^ _OF_SUMS, dtype=torch.int64, device="cpu")
    return mix(mix(seeds) ^ torch.arange(rows, device="cpu"))
