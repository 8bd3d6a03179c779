"""A small GPT on real text, end to end: what share of an update the tail is, and what is gained in all.

The demo's model and text, twice from the same weights, over the same micro-batches; an update of each recipe in turn.
Forward, backward and the tail are timed apart. Autograd accumulates within backward(); ours in the tail.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import accumfused as af
from bench import stock
from bench.exact import LR, MAX_GRAD_NORM, WEIGHT_DECAY, WrongError
from bench.suites import Bench
from bench.tables import Table, quartiles

FOLLOWS = ("backend",)
STOCK = "autograd + clip + AdamW(fused)"
_MICRO_BATCHES, _SAMPLES, _LONGEST, _UPDATES = 4, 4, 128, 16
_LARGEST_DIFFERENCE = 5e-3  # of an update's loss, between the recipes: rounding, grown over the updates
_PARTS = ("forward", "backward", "tail")


class Watch:
    """Adds up seconds by part; on a GPU each part ends when its work is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds[part] += time.perf_counter() - start


class Run:
    """One recipe's model, optimizer, losses, and seconds of every update by part."""

    def __init__(self, name: str, model: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.name, self._model, self._optimizer, self._device = name, model, optimizer, device
        self.losses: list[float] = []
        self.updates: list[dict[str, float]] = []

    def update(self, window: list[Any]) -> None:
        """One update from a window of micro-batches."""
        watch, ours = Watch(self._device), isinstance(self._optimizer, af.AdamW)
        losses = []
        for batch in window:
            with watch("forward"):
                loss = self._model.loss(batch) / len(window)
            with watch("backward"):
                loss.backward()
            if ours:
                with watch("tail"):
                    self._optimizer.accumulate()  # type: ignore[attr-defined]
            losses.append(loss.detach())
        with watch("tail"):
            if not ours:
                stock.clip(list(self._model.parameters()))
            self._optimizer.step()
            self._optimizer.zero_grad()
        self.losses.append(float(torch.stack(losses).sum()))
        self.updates.append(dict(watch.seconds))

    def milliseconds(self, *parts: str) -> list[float]:
        """Of every update's parts, without the first update, which allocates."""
        return [1e3 * sum(update[part] for part in parts) for update in self.updates[1:]]


def demo() -> tuple[Any, Any]:
    """The modules text_data and text_model of examples/, which is a folder of scripts and no package."""
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
    runs = [_run(STOCK, model, bench, lambda params: torch.optim.AdamW(params, fused=True, **_settings()))]
    for backend in bench.backends:

        def make(params: Any, backend: str = backend) -> torch.optim.Optimizer:
            return af.AdamW(params, max_grad_norm=MAX_GRAD_NORM, backend=backend, **_settings())

        runs.append(_run(bench.label(backend), model, bench, make))
        runs.append(_run(f"{bench.label(backend)}, fuse_linears", model, bench, make, fuses=True))
    for number, window in enumerate(_windows(data, updates, bench.device)):
        first = number % len(runs)
        for each in runs[first:] + runs[:first]:
            each.update(window)
    _compare(runs)
    return [_table(runs, sum(param.numel() for param in model.parameters()))]


def _settings() -> dict[str, Any]:
    return {"lr": 10 * LR, "weight_decay": WEIGHT_DECAY}  # so that it learns in few updates


def _run(
    name: str, model: Any, bench: Bench, make: Callable[[Any], torch.optim.Optimizer], *, fuses: bool = False
) -> Run:
    own = copy.deepcopy(model)
    optimizer = make(own.parameters())
    if fuses:
        af.fuse_linears(own, optimizer)  # type: ignore[arg-type]
    return Run(name, own, optimizer, bench.device)


def _windows(data: Any, updates: int, device: torch.device) -> Iterator[list[Any]]:
    order = torch.Generator().manual_seed(0)
    texts = data.paragraphs(_LONGEST)
    loader = DataLoader(texts, _SAMPLES, shuffle=True, collate_fn=data.collate, generator=order, drop_last=True)
    batches = iter(loader)
    for _ in range(updates):
        window = [next(batches) for _ in range(_MICRO_BATCHES)]
        yield [batch._replace(inputs=batch.inputs.to(device), targets=batch.targets.to(device)) for batch in window]


def _compare(runs: list[Run]) -> None:
    """Raises: WrongError: the recipes do not learn the same."""
    for each in runs[1:]:
        difference = max(abs(a - b) for a, b in zip(runs[0].losses, each.losses, strict=True))
        if not difference <= _LARGEST_DIFFERENCE:
            raise WrongError(f"{each.name}: a loss is {difference:.1e} from that of {runs[0].name}", difference)


def _table(runs: list[Run], parameters: int) -> Table:
    size = f"a GPT of {parameters:,} parameters on text, {_MICRO_BATCHES} micro-batches of {_SAMPLES} samples"
    table = Table(f"train: {size}")
    stock_ms = runs[0].milliseconds(*_PARTS)
    for each in runs:
        in_all, tail = each.milliseconds(*_PARTS), each.milliseconds("tail")
        table.rows.append({
            "name": each.name, "update ms": quartiles(in_all),
            **{f"{part} (ms)": statistics.median(each.milliseconds(part)) for part in _PARTS},
            "% tail": 100 * statistics.median(a / b for a, b in zip(tail, in_all, strict=True)),
            "x stock": statistics.median(a / b for a, b in zip(stock_ms, in_all, strict=True)),
            "last loss": each.losses[-1],
        })  # fmt: skip
    largest = max(abs(a - b) for each in runs for a, b in zip(runs[0].losses, each.losses, strict=True))
    table.notes += [
        f"largest difference of a loss between the recipes: {largest:.1e} in {len(runs[0].losses)} updates",
        "the tail is clip and step; ours accumulates there too, which autograd does within backward; with fuse_linears "
        "backward adds the gradients of the linear layers",
        "a larger batch or longer text makes the tail's share smaller, a larger model with the same batch a larger one",
    ]
    return table
