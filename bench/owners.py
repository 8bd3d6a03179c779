"""Whose a row is: the colours, the summary and what counts as a loss all ask here."""

from __future__ import annotations

import re

from bench.stored import Stored, name

OURS, TORCH, OTHERS, NOBODY = "accumfused", "PyTorch alone", "other packages", "no recipe"
COLORS = {OURS: "#0072b2", TORCH: "#9a9a9a", OTHERS: "#e69f00", NOBODY: "#dddddd"}
_PACKAGES = re.compile(
    r"\b(?:optimi|FlashAdamW|flashoptim|torchao|bitsandbytes|heavyball|DeepSpeedCPUAdam|apex|TransformerEngine"
    r"|one Triton launch per tensor)\b"
)
_BASELINES = ("backward passes alone",)


def owners(table: Stored) -> list[str]:
    """The owner of each row. A table in which nobody bears our name is about our own parts or sizes."""
    names = [name(row) for row in table.rows]
    rest = TORCH if any(OURS in called for called in names) else OURS
    return [_owner(called, rest) for called in names]


def _owner(called: str, rest: str) -> str:
    if OURS in called:
        return OURS
    if called in _BASELINES:
        return NOBODY
    if _PACKAGES.search(called):
        return OTHERS
    return TORCH if called.startswith("torch.") else rest


def rivals(table: Stored, index: int) -> list[int]:
    """The rows that a row of ours is compared with.

    "X + accumfused" is one of several ways to train under X, and is compared with the others that begin with "X + ".
    """
    found = [other for other, owner in enumerate(owners(table)) if owner in (TORCH, OTHERS)]
    around = name(table.rows[index]).partition(OURS)[0]
    return [other for other in found if name(table.rows[other]).startswith(around)] or found
