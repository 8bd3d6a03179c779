"""How fast is each kernel, rule and format on this GPU, as a share of a copy's? Sizes are far beyond the caches.

`python -m bench.gpu.probe "8-bit states"` measures the parts with this in their name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import accumfused as af
from bench.ceilings import MIXES
from bench.gpu.card import card, elements, run
from bench.measure import Variant
from bench.suites import Bench
from bench.suites.kernels import Kernels
from bench.workload import random_tensors, state_bytes

LARGE = 1_200_000_000
_BYTES = 32  # an element, at most: AMSGrad's, and its gradients
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def of_bf16(masters: str | None, states: Any, optimizer: Callable[..., Any] = af.AdamW) -> Case:
    return BF16, BF16, partial(optimizer, master_weights=masters, state_dtype=states)


# As docs/internals/gpu.md calls them: dtypes of parameters and gradients, and what makes the optimizer. What matters
# most comes first: the time may be up.
Case = tuple[torch.dtype, torch.dtype, Callable[..., af.FusedOptimizer]]
FP32_ADAMW = "AdamW"
CASES: dict[str, Case] = {
    FP32_ADAMW: (FP32, FP32, af.AdamW),
    "split8, 8-bit states": of_bf16("split8", "8bit"),
    "stochastic bf16, bf16 states": of_bf16(None, BF16),
    "AdamW, bf16 gradients": (FP32, BF16, af.AdamW),
    "split16, 8-bit states": of_bf16("split16", "8bit"),
    "split16, fp32 states": of_bf16("split16", FP32),
    "split16, bf16 states": of_bf16("split16", BF16),
    "stochastic bf16, 8-bit states": of_bf16(None, "8bit"),
    "Lion": (FP32, FP32, af.Lion),
    "AMSGrad": (FP32, FP32, partial(af.AdamW, amsgrad=True)),
    "SGD with momentum": (FP32, FP32, partial(af.SGD, momentum=0.9)),
    "Lion, stochastic bf16, bf16 states": of_bf16(None, BF16, af.Lion),
    "fp16 with fp32 masters": (FP16, FP16, partial(af.AdamW, master_weights="fp32")),
}


class Probe:
    """Measures the parts, and prints a line for each."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.elements = elements(bench, LARGE, _BYTES)

    def parts(self) -> dict[str, Callable[[], None]]:
        steps = {name: partial(self.step, name) for name in CASES}
        first = {FP32_ADAMW: steps.pop(FP32_ADAMW)}
        dtypes = {"fp32": FP32, "bf16": BF16, "fp16": FP16}
        folds = {f"folds of {name}": partial(self.folds, name, dtype) for name, dtype in dtypes.items()}
        return {**first, **folds, **steps, "off its boundary": partial(self.step, FP32_ADAMW, off=1)}

    def _time(self, what: str, moved: float, run: Callable[[], Any]) -> None:
        """Args: moved: bytes."""
        self.bench.release()
        (timing,) = self.bench.interleave([Variant(what, run, passes=("scale",))])  # a copy in the same rounds
        share = (timing.share_of_ceiling(1) or 0.0) * moved / MIXES["scale"].bytes
        print(
            f"{what}: {moved / self.elements:.4g} B an element, {timing.median * 1e6:.5g} us "
            f"(best {timing.best * 1e6:.5g}), {moved / timing.median / 1e12:.3g} TB/s, {share:.2f} of a copy"
        )

    def _random(self, dtype: torch.dtype, more: int = 0, scale: float = 1e-3) -> list[Tensor]:
        return random_tensors([(self.elements + more,)], scale, dtype, self.bench.device)

    def _optimizer(self, case: Case, grads: list[Tensor]) -> Any:
        """Makes the optimizer, and its first step, which makes its states."""
        dtype, grad_dtype, make = case
        (param,) = self._random(dtype, scale=0.02)
        param.requires_grad_()
        if grad_dtype != dtype:
            param.grad_dtype = grad_dtype
        (param.grad,) = grads
        optimizer = make([param], lr=0.01, max_grad_norm=1.0, backend=self.bench.backends[0])
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    def folds(self, name: str, dtype: torch.dtype) -> None:
        """Times the norm, and the two ways into a sum, of gradients of this dtype."""
        grads, sums = self._random(dtype), self._random(FP32)
        kernels = Kernels(self._optimizer((FP32, dtype, af.SGD), grads))
        self._time(f"norm, {name}", grads[0].nbytes, partial(kernels.norm, grads))
        for first, title in ((True, "first accumulate"), (False, "accumulate")):
            moved = grads[0].nbytes + (1 if first else 2) * sums[0].nbytes
            self._time(f"{title}, {name}", moved, partial(kernels.accumulate, grads, sums, first=first))

    def step(self, name: str, off: int = 0) -> None:
        """Times a step; `off`: elements by which its gradients lie off their boundary."""
        grads = [self._random(CASES[name][1], off)[0][off:]]
        optimizer = self._optimizer(CASES[name], grads)
        kernels = Kernels(optimizer)
        run = partial(kernels.step, grads, kernels.norm(grads))
        what = f"{name}{', gradients off their boundary' if off else ''}"
        (param,) = optimizer.state
        # Gradients go in; parameters, masters and states in and out.
        self._time(what, grads[0].nbytes + 2 * (param.nbytes + state_bytes(optimizer)), run)


if __name__ == "__main__":
    parts, wanted = Probe(card()).parts(), "".join(sys.argv[1:])
    sys.exit(run({name: part for name, part in parts.items() if wanted in name}))
