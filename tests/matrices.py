"""What Muon is tested with: matrices, parameters that AdamW has beside them, and how near two matrices must be."""

from __future__ import annotations

from typing import Any

import torch
from compare import assert_close
from table import random_params
from torch import Tensor

import accumfused as af

# Squares and rectangles of both kinds, small ones in batches, and large ones in panels of 256 rows.
SHAPES = [(24, 24), (24, 24), (40, 64), (64, 40), (300, 300), (300, 700), (520, 270), (1, 5), (5, 1), (0, 3)]
OTHERS = [(7,), (), (9, 4)]
ADAMW: dict[str, Any] = {"lr": 0.1, "betas": (0.5, 0.7), "weight_decay": 0.4}
MUON: dict[str, Any] = {"lr": 0.7, "weight_decay": 0.3}


def assert_near(actual: Tensor, truth: Tensor) -> None:
    """Within the rounding of bf16 matrices, of which an update is made."""
    size = truth.double().norm()
    assert_close(
        (actual.double() - truth.double()).norm() / size if size else size, torch.zeros(()), "bf16 Newton-Schulz"
    )


def weights(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """About as large as an update, so that the decay shows."""
    return [(p.detach() / max((1, *p.shape)) ** 0.5).requires_grad_() for p in random_params(shapes)]


def both(**settings: Any) -> af.Muon:
    """Matrices and AdamW's parameters, in two groups."""
    torch.manual_seed(0)
    groups = [{"params": weights(SHAPES[:4])}, {"params": weights(OTHERS), "use_muon": False, **ADAMW}]
    return af.Muon(groups, **MUON, **settings)
