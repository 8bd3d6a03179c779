"""How fast is each kernel, rule and format on this GPU, as a share of a copy's? Sizes are far beyond the caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import accumfused as af
from accumfused.formats.kinds import MASTER
from bench.gpu.card import card, copy_rate, elements
from bench.gpu.journal import Journal
from bench.measure import Variant
from bench.shapes import flat
from bench.suites import Bench
from bench.suites.kernels import Kernels
from bench.workload import random_tensors

LARGE = 1_200_000_000
_BYTES = 32  # an element, at most: AMSGrad's, and its gradients
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}


@dataclass(frozen=True)
class Case:
    """An optimizer, how its weights and states are stored, and the dtype of its gradients."""

    optimizer: Callable[..., af.FusedOptimizer] = af.AdamW
    params: torch.dtype = FP32
    masters: str | None = "split16"  # of 16-bit parameters
    states: Any = FP32
    grads: torch.dtype = FP32
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        weights = DTYPES[self.params] if self.params is FP32 else f"{DTYPES[self.params]} + {self.masters or 'noise'}"
        options = "".join(f", {name}" for name in self.options)
        states = DTYPES.get(self.states, self.states)
        called = getattr(self.optimizer, "__name__", "")
        return f"{called}{options}: {weights}, {states} states, {DTYPES[self.grads]} gradients"

    def make(self, params: list[Tensor], grads: list[Tensor], backend: str) -> Any:
        """Makes the optimizer and its first step, which makes its states."""
        masters = {} if self.params is FP32 else {"master_weights": self.masters}
        for param, grad in zip(params, grads, strict=True):
            if grad.dtype != param.dtype:
                param.grad_dtype = grad.dtype
            param.grad = grad
        optimizer = self.optimizer(
            params, lr=0.01, max_grad_norm=1.0, state_dtype=self.states, backend=backend, **masters, **self.options
        )
        optimizer.step()
        optimizer.zero_grad()
        return optimizer


# What matters most comes first: the time may be up.
FIRST = (Case(), Case(params=BF16, masters="split8", states="8bit", grads=BF16),
         Case(params=BF16, masters=None, states=BF16, grads=BF16))  # fmt: skip
OTHERS = (
    Case(grads=BF16), *(Case(params=BF16, states=states, grads=BF16) for states in ("8bit", FP32, BF16)),
    Case(params=BF16, masters=None, states="8bit", grads=BF16), Case(af.Lion), Case(options={"amsgrad": True}),
    Case(af.SGD, options={"momentum": 0.9}), Case(af.Lion, BF16, None, BF16, BF16),
    Case(params=FP16, masters="fp32", grads=FP16),
)  # fmt: skip


class Probe:
    """Measures the parts, and writes a line for each."""

    def __init__(self, bench: Bench, own: Journal) -> None:
        self.bench, self.own = bench, own
        self.copy, self.elements = copy_rate(bench), elements(bench, LARGE, _BYTES)

    def run(self) -> None:
        self.own.write("copy", **{"TB/s": self.copy / 1e12})
        parts: list[tuple[str, Callable[[], None]]] = [("first", partial(self.step, FIRST[0]))]
        parts += [("fp32", partial(self.folds, FP32))]
        parts += [(case.name, partial(self.step, case)) for case in FIRST[1:]]
        parts += [(DTYPES[dtype], partial(self.folds, dtype)) for dtype in (BF16, FP16)]
        parts += [(case.name, partial(self.step, case)) for case in OTHERS]
        parts += [("off its boundary", partial(self.step, FIRST[0], off=1))]
        for what, run in parts:
            with self.own.section("probe", what=what):
                run()
            self.bench.release()
        self.own.write("copy", **{"TB/s": copy_rate(self.bench) / 1e12})  # is it as fast as at first?

    def _time(self, kind: str, what: str, moved: float, run: Callable[[], Any], **facts: Any) -> None:
        """Args: moved: bytes."""
        (timing,) = self.bench.interleave([Variant(what, run)])
        rate = moved / timing.median
        facts |= {"us": timing.median * 1e6, "best us": timing.best * 1e6, "TB/s": rate / 1e12}
        self.own.write(kind, what=what, **facts, **{"of copy": rate / self.copy})

    def _random(self, dtype: torch.dtype, more: int = 0, scale: float = 1e-3) -> list[Tensor]:
        return random_tensors(flat(self.elements + more), scale, dtype, self.bench.device)

    def optimizer(self, case: Case, grads: list[Tensor]) -> Any:
        params = [tensor.requires_grad_() for tensor in self._random(case.params, scale=0.02)]
        return case.make(params, grads, self.bench.backends[0])

    def folds(self, dtype: torch.dtype) -> None:
        """Times the norm, and the two ways into a sum, of gradients of this dtype."""
        grads, sums = self._random(dtype), self._random(FP32)
        kernels, name = Kernels(self.optimizer(Case(af.SGD, grads=dtype), grads)), DTYPES[dtype]
        self._time("norm", f"norm, {name}", grads[0].nbytes, partial(kernels.norm, grads))
        for first, title in ((True, "first accumulate"), (False, "accumulate")):
            moved = grads[0].nbytes + (1 if first else 2) * sums[0].nbytes
            self._time("accumulate", f"{title}, {name}", moved, partial(kernels.accumulate, grads, sums, first=first))

    def step(self, case: Case, off: int = 0) -> None:
        """Times a step; `off`: elements by which its gradients lie off their boundary."""
        grads = [self._random(case.grads, off)[0][off:]]
        optimizer = self.optimizer(case, grads)
        kernels, moved = Kernels(optimizer), step_bytes(optimizer, grads)
        name = f"{case.name}{', off their boundary' if off else ''}"
        run = partial(kernels.step, grads, kernels.norm(grads))
        self._time("step", name, moved, run, **{"B/el": moved / self.elements})


def step_bytes(optimizer: Any, grads: list[Tensor]) -> int:
    """Returns the bytes that a step has to move: gradients in; parameters and states in and out.

    A 16-bit parameter that has an fp32 master only goes out.
    """
    total = sum(grad.nbytes for grad in grads)
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        state = optimizer.state[param]
        total += param.nbytes * (1 if MASTER in state else 2)
        total += 2 * sum(value.nbytes for value in state.values() if value.dim() > 0)
    return total


def main() -> None:
    Probe(card(), Journal("probe")).run()


if __name__ == "__main__":
    main()
