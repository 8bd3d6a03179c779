"""What fits on a card, and what is left for activations: python examples/what_fits.py

`af.memory_report` counts the bytes of a small model in an open window of two micro-batches, with released gradients.
Bytes per parameter do not depend on the size, so the tables multiply them. GB are 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

import accumfused as af
from accumfused.backends.offload import RUN_BYTES
from accumfused.backends.transfer import SLOTS
from accumfused.loop.release import CARD_BUCKET_BYTES
from accumfused.settings import SettingArguments

GB = 10**9
CARDS = (8, 12, 16, 24, 48, 80)  # GB
OFFLOAD_CARDS = CARDS[:-1]  # with offload=True, which the largest needs least
MODELS = {0.5: 1024, 1: 2048, 3: 3072, 7: 4096, 13: 5120}  # 10^9 parameters: elements in a row of the embedding
TOKENS = 128_256  # rows of the embedding, whose gradient is the largest
RESERVE = 1.0  # GB for CUDA's context, the workspaces of its libraries, and fragmentation
LEAST = 1.0  # GB for activations; where less is left, nothing fits
MICRO_BATCHES = 4  # of a window, for the bytes that it moves
ADAPTERS = 40e6 / 7e9  # of the parameters: LoRA of rank 16 on all linear layers
WIDEST = 4  # a layer's largest matrix has at most this times the square of the width (Llama: 2.7 to 3.5)
HOST_RATE = 60  # GB/s that the host's kernels read and write, assumed
BUS_RATE = 25  # GB/s each way, assumed

# The settings of AdamW, from the most accurate to the leanest.
SETTINGS: dict[str, SettingArguments] = {
    "A": {},
    "B": {"state_dtype": torch.bfloat16},
    "C": {"state_dtype": "8bit"},
    "D": {"state_dtype": "8bit", "master_weights": "split8"},
    "E": {"state_dtype": "8bit", "master_weights": None},
}
TWO_BYTES: SettingArguments = {"sum_dtype": torch.bfloat16}
OFFLOAD: SettingArguments = {"offload": True}
RUNGS: dict[str, SettingArguments] = SETTINGS | {
    f"{name}2": settings | TWO_BYTES for name, settings in SETTINGS.items()
}


class Cost(NamedTuple):
    """Bytes per parameter."""

    stays: float  # at the peak of a window
    moves: float | None  # in a window of MICRO_BATCHES and its step, without forward and backward; None: not here
    is_whole: bool = True  # the embedding is trained, too
    on_host: float = 0.0  # of `stays`
    fold: float = 0.0  # moved on the host by a micro-batch, but the first
    step: float = 0.0  # and by a step

    @property
    def on_card(self) -> float:
        return self.stays - self.on_host


def small_model(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512, bias=False, dtype=dtype) for _ in range(4)))


def backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weight = next(model.parameters())
    loss = model(torch.ones_like(weight[:1])).float().square().mean()
    if isinstance(optimizer, af.FusedOptimizer):
        optimizer.backward(loss, weight=1)
    else:
        loss.backward()


def windows(settings: SettingArguments, dtype: torch.dtype = torch.bfloat16) -> Cost:
    """Reads the report of an open window with released gradients."""
    model = small_model(dtype)
    optimizer = af.AdamW(model.parameters(), max_grad_norm=1.0, **settings)
    with af.release_gradients(optimizer):
        for _ in range(2):
            backward(model, optimizer)
        total = af.memory_report(optimizer).total
        optimizer.step()
    stays, grads, summed = total.per_element, dtype.itemsize, total.parts["accumulators"] / total.elements
    on_host, fold, step = total.on_host / total.elements, grads + 2 * summed, 2 * (stays - summed) + summed
    first = 0 if summed == grads and not on_host else grads + summed  # the first gradients are the sums, or are copied
    return Cost(stays, first + (MICRO_BATCHES - 1) * fold + step, True, on_host, fold, step)


def plain(dtype: torch.dtype) -> Cost:
    """Counts torch's tensors after a step on p.grad."""
    model = small_model(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    backward(model, optimizer)
    optimizer.step()
    params = list(model.parameters())
    tensors = [*params, *(param.grad for param in params), *(t for s in optimizer.state.values() for t in s.values())]
    elements = sum(param.numel() for param in params)
    return Cost(sum(tensor.nbytes for tensor in tensors if tensor is not None) / elements, None)


def costs() -> dict[str, Cost]:
    """All rows, by name: ours, then others."""
    adapters = windows({}, torch.float32)
    return {name: windows(settings) for name, settings in RUNGS.items()} | {
        "torch AdamW, fp32": plain(torch.float32),
        "torch AdamW, all bf16": plain(torch.bfloat16),
        "8-bit AdamW on `p.grad`": Cost(2 + 2 + 2 * (1 + 4 / 256), None),  # blocks of 256 with an fp32 scale
        "LoRA over bf16": Cost(2 + ADAPTERS * adapters.stays, None, False),
    }


def left(cost: Cost, card: float, billions: float) -> float:
    """GB for activations; below 0 if weights, states and sums alone are too large.

    Backward makes the largest gradient, in bf16, while a bucket is nearly full. With offload a bucket, or a larger
    gradient of a layer, is on its way into each slot.
    """
    largest = largest_of(billions) if cost.is_whole else 0
    under_way = SLOTS * max(CARD_BUCKET_BYTES, 2 * WIDEST * MODELS[billions] ** 2) if cost.on_host else 0
    return card - RESERVE - billions * cost.on_card - (largest + CARD_BUCKET_BYTES + under_way) / GB


def largest_of(billions: float) -> int:
    """Bytes of the largest gradient, and of the largest parameter."""
    return 2 * TOKENS * MODELS[billions]


def slots(largest: int) -> int:
    """Bytes of the host's slots; torch takes pinned memory in powers of two."""
    return SLOTS * 2 ** (max(RUN_BYTES, largest) - 1).bit_length()


def host(cost: Cost, billions: float) -> float:
    """GB of the host's memory."""
    return billions * cost.on_host + slots(largest_of(billions)) / GB


def best(found: dict[str, Cost], card: float, billions: float) -> str:
    """The most accurate settings that fit, exact sums first, and the leanest, each with the GB that they leave."""
    fitting = [name for name in RUNGS if left(found[name], card, billions) >= LEAST]
    if not fitting and left(found["LoRA over bf16"], card, billions) >= LEAST:
        fitting = ["LoRA over bf16"]
    names = dict.fromkeys((fitting[0], fitting[-1])) if fitting else {}
    return ", ".join(f"{name.split()[0]}: {left(found[name], card, billions):.1f}" for name in names) or "-"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)])


def tables() -> list[str]:
    """What the page has: GB by settings, and settings by card; the same with offload, on the card and on the host."""
    found = costs()
    offloaded = {name: windows(settings | OFFLOAD) for name, settings in RUNGS.items()}
    taken = [
        [
            name, f"{cost.stays:.2f}", "-" if cost.moves is None else f"{cost.moves:.0f}",
            *(f"{billions * cost.stays:.1f}" for billions in MODELS),
        ]
        for name, cost in found.items()
    ]  # fmt: skip
    chosen = [[f"{billions}B", *(best(found, card, billions) for card in CARDS)] for billions in MODELS]
    free = [
        [f"{billions}B", f"{billions * offloaded['A'].on_card:.0f}", *(
            f"{gigabytes:.1f}" if gigabytes >= LEAST else "-"
            for gigabytes in (left(offloaded["A"], card, billions) for card in OFFLOAD_CARDS)
        )]
        for billions in MODELS
    ]  # fmt: skip
    on_host = [
        [
            name, f"{cost.on_host:.2f}", f"{cost.fold:.0f}", f"{cost.step:.0f}",
            *(f"{host(cost, billions):.1f}" for billions in MODELS),
        ]
        for name, cost in offloaded.items()
    ]  # fmt: skip
    return [
        table(["AdamW", "bytes", "moved", *(f"{billions}B" for billions in MODELS)], taken),
        table(["parameters", *(f"{card} GB" for card in CARDS)], chosen),
        table(["parameters", "weights", *(f"{card} GB" for card in OFFLOAD_CARDS)], free),
        table(["on the host", "bytes", "a fold", "a step", *(f"{billions}B" for billions in MODELS)], on_host),
    ]


def times() -> str:
    """What the page on offload has: GB of the host's memory, and seconds of 7 billion parameters at assumed rates."""
    settings = {"fp32 states": "A", '`state_dtype="8bit"`': "C", "the same, `sum_dtype=torch.bfloat16`": "C2"}
    found = {words: windows(RUNGS[name] | OFFLOAD) for words, name in settings.items()}
    rows = [
        [
            words, *(f"{host(cost, billions):.0f}" for billions in (7, 3, 1)),
            f"{7 * cost.fold / HOST_RATE:.1f} s", f"{7 * cost.step / HOST_RATE:.1f} s",
        ]
        for words, cost in found.items()
    ]  # fmt: skip
    return table(["bf16 weights", "7B", "3B", "1B", "7B: a fold", "7B: a step"], rows)


if __name__ == "__main__":
    print(*tables(), times(), sep="\n\n")
