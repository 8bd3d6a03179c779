"""A small GPT on real text (the demo's, narrower), trained in every format: does the loss show the difference?

Products are computed in fp32 from the weights as they are stored, so that only the formats differ: 16-bit weights take
16-bit gradients, and kernels for 16-bit products play no part.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import accumfused as af
from bench.numerics.contenders import BF16, FP16, FP32

SEEDS = (0, 1, 2)
_LONGEST, _MICRO_BATCH, _ACCUMULATED = 128, 4, 2
_ADAMW: dict[str, Any] = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": 1.0}

# Name -> (parameters' dtype, bytes per parameter of weight + moments + accumulator, settings)
_INT8: dict[str, Any] = {"state_dtype": "int8"}
FORMATS: dict[str, tuple[torch.dtype, float, dict[str, Any]]] = {
    "fp32": (FP32, 16, {}),
    "bf16 + split16": (BF16, 16, {}),
    "bf16 + split8": (BF16, 15, {"master_weights": "split8"}),
    "fp16 + fp32 master": (FP16, 18, {}),
    "bf16 stochastic": (BF16, 14, {"master_weights": None}),
    "fp32, bf16 states": (FP32, 12, {"state_dtype": BF16}),
    "fp32, int8 states": (FP32, 10, _INT8),
    "split8, int8 states": (BF16, 9, {"master_weights": "split8", **_INT8}),
    "stochastic, int8 states": (BF16, 8, {"master_weights": None, **_INT8}),
}


def train(
    name: str, seed: int, updates: int = 150, every: int = 20, width: int = 128, depth: int = 2
) -> dict[str, Any]:
    """One run: its training losses, one per update, and the loss on held-out text in the end, nats per byte.

    Args:
        every: one sample of so many is held out.
    """
    data, model_module = demo()
    dtype, bytes_per_parameter, settings = FORMATS[name]
    texts = data.paragraphs(_LONGEST)
    held_out = texts[::every]
    training = [text for index, text in enumerate(texts) if index % every]

    torch.manual_seed(seed)
    model = model_module.GPT(_LONGEST, width=width, depth=depth)
    weights = {key: torch.nn.Parameter(value.detach().to(dtype)) for key, value in model.named_parameters()}
    optimizer = af.AdamW(weights.values(), rounding_seed=seed, **_ADAMW, **settings)
    scheduler = LambdaLR(optimizer, lambda update: min((update + 1) / 15, 1.0) * (1 - 0.95 * update / updates))
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(training, _MICRO_BATCH, shuffle=True, collate_fn=data.collate, generator=order, drop_last=True)

    def loss_of(batch: Any) -> torch.Tensor:
        return functional_call(
            _Loss(model), {f"model.{key}": value.float() for key, value in weights.items()}, (batch,)
        )

    losses: list[float] = []
    running = 0.0
    for batch, last in af.windows(loader, _ACCUMULATED):
        loss = loss_of(batch)
        loss.backward()
        optimizer.accumulate(weight=batch.num_tokens)
        running += loss.item() / _ACCUMULATED
        if last:
            optimizer.step()
            scheduler.step()
            losses.append(round(running, 4))
            running = 0.0
        if len(losses) == updates:
            break
    with torch.no_grad():
        batches = [data.collate(held_out[start : start + 32]) for start in range(0, len(held_out), 32)]
        tokens = sum(batch.num_tokens for batch in batches)
        final = sum(float(loss_of(batch)) * batch.num_tokens for batch in batches) / tokens
    return {"name": name, "seed": seed, "bytes": bytes_per_parameter, "losses": losses, "final": final}


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per format: final losses of all seeds, and how far they are from fp32's, beside fp32's own spread.

    `apart` is the mean over seeds of final loss minus fp32's with the same seed; `spread` is fp32's largest final loss
    minus its smallest; `within` says whether every seed's final loss is closer to fp32's than that, `mean_within` if
    the mean lies between fp32's smallest and largest.
    """
    finals: dict[str, dict[int, float]] = {}
    for run in runs:
        finals.setdefault(run["name"], {})[run["seed"]] = run["final"]
    exact = finals["fp32"]
    spread = max(exact.values()) - min(exact.values())
    rows = []
    for name, found in finals.items():
        apart = [found[seed] - exact[seed] for seed in found]
        rows.append({
            "name": name,
            "bytes": FORMATS[name][1],
            "final": list(found.values()),
            "mean": sum(found.values()) / len(found),
            "apart": sum(apart) / len(apart),
            "furthest": max(apart, key=abs),
            "spread": spread,
            "within": max(abs(each) for each in apart) <= spread,
            "mean_within": min(exact.values()) <= sum(found.values()) / len(found) <= max(exact.values()),
        })  # fmt: skip
    return rows


class _Loss(torch.nn.Module):
    """The model's loss as a module's forward, for `functional_call`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> torch.Tensor:
        return self.model.loss(batch)


def demo() -> tuple[Any, Any]:
    """The modules of examples/, which is a folder of scripts and no package."""
    folder = str(Path(__file__).parents[2] / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    import text_data
    import text_model

    return text_data, text_model
