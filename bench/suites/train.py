"""A small GPT on real text, end to end: what share of an update the tail is, and what is gained in all.

The demo's model and text, from the same weights, over the same micro-batches; an update of each recipe in turn.
Forward, backward and the tail are timed apart. Autograd accumulates within backward(); ours in the tail.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import accumfused as af
from bench import stock
from bench.exact import ADAMW, LR, MAX_GRAD_NORM, WrongError
from bench.suites import Bench
from bench.tables import Table, quartiles

FOLLOWS = ("backend",)
_MICRO_BATCHES, _SAMPLES, _LONGEST, _UPDATES = 4, 4, 128, 16
_LARGEST_DIFFERENCE = 5e-3  # of an update's loss, between the recipes: rounding, grown over the updates
_PARTS = ("forward", "backward", "tail")
_ADAMW = {**ADAMW, "lr": 10 * LR}  # so that it learns in few updates


class Run:
    """One recipe's model, optimizer, losses, and seconds of every update by part."""

    def __init__(
        self, name: str, model: Any, device: torch.device, make: Callable[[Any], Any], *, fuses: bool = False
    ) -> None:
        self.name, self._device, self._model = name, device, copy.deepcopy(model)
        self._optimizer = make(self._model.parameters())
        if fuses:
            af.fuse_linears(self._model, self._optimizer)
        self._ours = isinstance(self._optimizer, af.AdamW)
        clips = stock.clip_and_step([*self._model.parameters()], self._optimizer)
        self._step = self._optimizer.step if self._ours else clips
        self.losses: list[float] = []
        self.updates: list[Counter[str]] = []

    def update(self, window: list[Any]) -> None:
        """Makes one update from a window of micro-batches."""
        self.updates.append(Counter())
        losses = []
        for batch in window:
            loss = self._timed("forward", lambda batch=batch: self._model.loss(batch) / len(window))
            self._timed("backward", loss.backward)
            if self._ours:
                self._timed("tail", self._optimizer.accumulate)
            losses.append(loss.detach())
        self._timed("tail", lambda: (self._step(), self._optimizer.zero_grad()))
        self.losses.append(float(torch.stack(losses).sum()))

    def _timed(self, part: str, call: Callable[[], Any]) -> Any:
        """Adds up seconds; on a GPU a part ends when its work is done."""
        start = time.perf_counter()
        result = call()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.updates[-1][part] += time.perf_counter() - start  # type: ignore[assignment]
        return result

    def milliseconds(self, *parts: str) -> list[float]:
        """Returns every update's parts, without the first update, which allocates."""
        return [1e3 * sum(update[part] for part in parts) for update in self.updates[1:]]


def demo() -> tuple[Any, Any]:
    """Imports the modules text_data and text_model of examples/, which is a folder of scripts and no package."""
    folder = str(Path(__file__).parents[2] / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    import text_data
    import text_model

    return text_data, text_model


def run(bench: Bench) -> list[Table]:
    data, text_model = demo()
    updates, width, depth = (3, 32, 1) if bench.quick else (_UPDATES, 256, 4)
    torch.manual_seed(0)
    model = text_model.GPT(_LONGEST, width=width, depth=depth).to(bench.device)
    fused = partial(torch.optim.AdamW, fused=True, **_ADAMW)
    runs = [Run("autograd + clip + AdamW(fused)", model, bench.device, fused)]
    for backend in bench.backends:
        make = partial(af.AdamW, max_grad_norm=MAX_GRAD_NORM, backend=backend, **_ADAMW)
        runs.append(Run(bench.label(backend), model, bench.device, make))
        runs.append(Run(f"{bench.label(backend)}, fuse_linears", model, bench.device, make, fuses=True))
    order = torch.Generator().manual_seed(0)
    texts = data.paragraphs(_LONGEST)
    loader = DataLoader(texts, _SAMPLES, shuffle=True, collate_fn=data.collate, generator=order, drop_last=True)
    batches = (
        batch._replace(inputs=batch.inputs.to(bench.device), targets=batch.targets.to(bench.device)) for batch in loader
    )
    for number in range(updates):
        window, first = [next(batches) for _ in range(_MICRO_BATCHES)], number % len(runs)
        for each in runs[first:] + runs[:first]:
            each.update(window)
    return [_table(runs, sum(param.numel() for param in model.parameters()))]


def _table(runs: list[Run], parameters: int) -> Table:
    """Raises: WrongError: the recipes do not learn the same."""
    size = f"a GPT of {parameters:,} parameters on text, {_MICRO_BATCHES} micro-batches of {_SAMPLES} samples"
    table, largest = Table(f"train: {size}"), 0.0
    stock_ms = runs[0].milliseconds(*_PARTS)
    for each in runs:
        difference = max(abs(a - b) for a, b in zip(runs[0].losses, each.losses, strict=True))
        if not difference <= _LARGEST_DIFFERENCE:
            raise WrongError(f"{each.name}: a loss is {difference:.1e} from that of {runs[0].name}", difference)
        largest = max(largest, difference)
        in_all, tail = each.milliseconds(*_PARTS), each.milliseconds("tail")
        table.rows.append({
            "name": each.name, "update ms": quartiles(in_all),
            **{f"{part} (ms)": statistics.median(each.milliseconds(part)) for part in _PARTS},
            "% tail": 100 * statistics.median(a / b for a, b in zip(tail, in_all, strict=True)),
            "x stock": statistics.median(a / b for a, b in zip(stock_ms, in_all, strict=True)),
            "last loss": each.losses[-1],
        })  # fmt: skip
    table.notes += [
        f"largest difference of a loss between the recipes: {largest:.1e} in {len(runs[0].losses)} updates",
        "the tail is clip and step; ours accumulates there too, which autograd does within backward; with fuse_linears "
        "backward adds the gradients of the linear layers",
        "a larger batch or longer text makes the tail's share smaller, a larger model with the same batch a larger one",
    ]
    return table
