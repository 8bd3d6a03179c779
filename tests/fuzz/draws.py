"""What the machine draws, and how it becomes tensors. Hypothesis shrinks towards the first of each list."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
SHAPES = ([3, 4], [5], [17], [], [0], [3, 0], [1], [1, 6], [2, 3, 2, 2], [1, 2, 1, 3], [40, 30], [1025])
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "SGD": (
        {}, {"momentum": 0.6}, {"momentum": 0.6, "nesterov": True, "weight_decay": 0.2},
        {"momentum": 0.5, "dampening": 0.3, "weight_decay": 0.1}, {"weight_decay": 0.2, "maximize": True},
    ),
    "AdamW": ({"betas": (0.5, 0.7), "weight_decay": 0.4, "eps": 1e-3}, {"eps": 1e-3, "amsgrad": True}),
    "Adam": ({"betas": (0.5, 0.7), "weight_decay": 0.3, "eps": 1e-3},),
    "Lion": ({"betas": (0.6, 0.8), "weight_decay": 0.5}, {"betas": (0.6, 0.8)}),
    "own RMSprop": ({"alpha": 0.7, "eps": 1e-3}, {"alpha": 0.7, "eps": 1e-3, "momentum": 0.5}),
    "own Adagrad": ({"eps": 1e-3},),
}  # fmt: skip
MASTERS = {"bf16": ("auto", "split16", "split8", None), "fp16": ("auto", "fp32")}
STATES = [{}] * 5 + [{"state_dtype": kind, "state_dtype_min_numel": 4} for kind in (torch.bfloat16, "8bit")]


@st.composite
def configurations(draw: st.DrawFn, mate_of: dict[str, Any] | None = None) -> dict[str, Any]:
    """Of one optimizer; or of the one that is clipped together with another."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    rule = pick("SGD", "SGD", "AdamW", "AdamW", "Adam", "Lion", "own RMSprop", "own Adagrad")
    foreign = rule.startswith("own ")
    kind = "fp32" if foreign else pick("fp32", "fp32", "bf16", "bf16", "fp16", "mixed")
    first = mate_of or {"style": pick(*WEIGHTS), "together": pick(*[None] * 7, 0.5, 3.0)}
    first["nonfinite"] = (
        pick(*[None] * 5, "skip", "raise", "propagate", "drop", "drop") if mate_of is None else first["nonfinite"]
    )
    settings = {"backend": pick("cpu", "cpu", "reference", "torch"), "nonfinite": first["nonfinite"]}
    if settings["backend"] == "cpu" and not foreign and settings["nonfinite"] != "drop":
        settings["offload"] = pick(False, False, False, True)
    settings |= {} if first["together"] else {"max_grad_norm": pick(None, None, None, 0.5, 3.0, 50.0)}
    options = pick(*OPTIONS[rule])
    settings |= {} if foreign else pick(*(STATES[:-1] if "amsgrad" in options else STATES))  # which 8 bits do not serve
    settings |= {"master_weights": pick(*MASTERS[kind])} if kind in MASTERS else {}
    dtypes, layouts = ("fp32", "bf16", "fp16") if kind == "mixed" else (kind,), ("dense", "dense", *LAYOUTS, "offset")
    config = first | {
        "rule": rule, "options": {"lr": pick(0.3, 0.05), **options}, "settings": settings,
        "params": [(pick(*SHAPES), pick(*layouts), pick(*dtypes), draw(SEEDS)) for _ in range(pick(1, 2, 3, 4, 5))],
        "cut": pick(0, 0, 1, 2), "fuse": rule in ("SGD", "AdamW", "Adam") and pick(False, False, False, True),
        "trained": pick(0, 0, 1, 2),
    }  # fmt: skip
    if mate_of is None:
        config["default_dtype"] = pick(*["fp32"] * 8, "bf16", "fp16", "fp64")
        config["mate"] = draw(configurations(first)) if first["together"] else None
    return config


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _of_tensor(numbers: list[float], seed: int) -> list[Any]:
    rng = Random(seed)
    return [(n, rng.choice(["fp32", "fp32", "fp64", "bf16"]), rng.choice([(), (1,), (1, 1)])) for n in numbers]


_numbers, _bad = [1.0, 2.0, 3.0, 0.3, 7, 1003, 0.0] * 4, [-1.0, math.nan, math.inf]
WEIGHTS = {  # those of one machine are mostly of one style
    "sum": [None] * 20 + [2.0],
    "numbers": [*_numbers, -1.0, math.nan],
    "tensors": _of_tensor([*_numbers, *_bad, -1.0, -1.0], 1),
    "mixed": [None] * 20 + _numbers[:7] + _of_tensor(_numbers[:7], 2),
    "tiny": [n * 1e-20 for n in _numbers],  # (by the first weight that is not a device's 0 all others are measured)
    "huge": _of_tensor([n * 1e20 for n in _numbers if n], 3),
}
_divisors = [1.0, 2.0, 5.0, 0.3, 1024.0] * 3 + [0.0, -1.0, math.nan, *_of_tensor([2.0, 5.0, 0.3, 1e3] * 3 + _bad, 4)]
weights = st.runner().flatmap(lambda machine: st.sampled_from(WEIGHTS[machine.config["style"]]))
normalizers = st.sampled_from([None] * 60 + _divisors)
grad_scales = st.sampled_from([None] * 240 + _divisors)
found_infs = st.sampled_from([None] * 40 + _of_tensor([0.0, 1.0, 2.0], 5))
poisons = st.sampled_from([None] * 40 + [math.inf, -math.inf, math.nan])
overflows = st.lists(st.sampled_from([False] * 4 + [True]), min_size=5, max_size=5)  # of micro-batches
SIDES = st.integers(0, 1)  # of two optimizers that are clipped together; where there is one, it is meant
BACKENDS = st.sampled_from([None] * 3 + ["cpu", "reference", "torch"])  # None: the same optimizer goes on
SEEDS, ROW, flags = st.integers(0, 2**16), st.integers(0, 6), st.booleans()
lasts = st.sampled_from([False] * 3 + [True])
losses = st.sampled_from([torch.float32] * 2 + [torch.bfloat16, torch.float16])
_samples = [sorted(Random(k).sample(range(7), k)) for k in (2, 3, 4, 5, 6)]
rows = st.sampled_from([[0], [1, 0], list(range(7)), *_samples])


def number_of(drawn: Any) -> Any:
    """A weight or divisor as it is drawn: None, a number, or (number, dtype, shape) of a tensor."""
    number, dtype, shape = drawn if isinstance(drawn, tuple) else (drawn, None, ())
    return number if dtype is None else torch.full(shape, number, dtype=DTYPES[dtype], device="cpu")


# ---- memory ----------------------------------------------------------------------------------------------------------


def random(shape: Sequence[int], seed: int, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


def transposed(values: Tensor) -> Tensor:
    if values.dim() < 2:
        return values
    return values.transpose(0, 1).contiguous(memory_format=torch.contiguous_format).transpose(0, 1)


def _with_holes(values: Tensor) -> Tensor:
    """Every second row of a wider tensor."""
    if not values.dim():
        return values
    return torch.zeros((2 * len(values), *values.shape[1:]), dtype=values.dtype)[::2].copy_(values)


def _behind(values: Tensor) -> Tensor:
    """One element into its memory, so aligned to nothing."""
    return torch.zeros(values.numel() + 1, dtype=values.dtype)[1:].view(values.shape).copy_(values)


LAYOUTS = {
    "offset": _behind, "transposed": transposed, "holes": _with_holes,
    "channels_last": lambda v: v.contiguous(memory_format=torch.channels_last) if v.dim() == 4 else v,
}  # fmt: skip
GRADS = {  # what a gradient may be that somebody sets by hand
    **LAYOUTS,
    "fresh": lambda v: v,
    "expanded": lambda v: v.flatten()[:1].expand(v.shape) if v.numel() and v.dim() else v,
    "graph": lambda v: v.requires_grad_() * 2.0,
    "negative": lambda v: torch.complex(v, -v).conj().imag if v.dtype == torch.float32 else v,  # is read so
    "other": lambda v: v.to(torch.bfloat16 if v.dtype == torch.float32 else torch.float32),
    "half": lambda v: v.half(),
    "fp64": lambda v: v.double(),
    "sparse": lambda v: v.to_sparse() if v.numel() and v.dim() else v,
    "nan": lambda v: torch.full_like(v, math.nan),
}


def parameter(shape: Sequence[int], layout: str, dtype: str, seed: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(LAYOUTS.get(layout, lambda v: v)(random(shape, seed).to(DTYPES[dtype])))
