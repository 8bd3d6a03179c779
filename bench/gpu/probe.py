"""How fast is each kernel, rule and format on this GPU, as a share of a copy's rate?

Sizes are far beyond the caches. Small models are replayed from graphs, also without each mechanism of the launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accumfused.core.protocol import Fold, Outcome, Scaling
from accumfused.core.rows import Grads
from accumfused.formats.kinds import MASTER
from bench.gpu.cases import BF16, DTYPES, FP16, FP32, MAX_GRAD_NORM, PACKED, PURE, Case, using
from bench.gpu.journal import Journal
from bench.gpu.target import Target
from bench.measure import Variant, interleave
from bench.shapes import Shapes, flat, gpt2, small
from bench.workload import Workload, random_tensors

LARGE = 1_200_000_000
_BYTES = 32  # an element, at most: AMSGrad's, and its gradients
OTHERS = (
    Case(grads=BF16), *PACKED[1:], Case("AdamW", "split16", "bf16", BF16), Case("Lion"), Case("AMSGrad"),
    Case("SGD-m"), Case("Lion", "bf16 stochastic", "bf16", BF16), Case("AdamW", "fp16 + fp32 master", "fp32", FP16),
)  # fmt: skip


class Kernels:
    """An optimizer's kernels, each called alone, after a first step from these gradients, which makes its states."""

    def __init__(self, case: Case, params: Sequence[Tensor], grads: Sequence[Tensor], backend: Any) -> None:
        for param, grad in zip(params, grads, strict=True):
            if grad.dtype != param.dtype:
                param.grad_dtype = grad.dtype
            param.grad = grad
        self.optimizer = case.optimizer(params, backend)
        self.optimizer.step()
        self.optimizer.zero_grad()
        current = self.optimizer._engine.plans.current()
        self.plan, self.backend = current.plan, current.backend
        self.partials = torch.zeros(self.plan.chunks, device=self.plan.device)
        self._hypers = self.plan.hypers(self.optimizer.param_groups)

    @torch.no_grad()
    def norm(self, grads: Sequence[Tensor]) -> Outcome:
        scaling = Scaling(self.plan.device, max_grad_norm=MAX_GRAD_NORM, skips_nonfinite=True)
        outcome: Outcome = self.backend.norm(self.plan, Grads(grads), self.partials, scaling)
        return outcome

    @torch.no_grad()
    def accumulate(self, grads: Sequence[Tensor], sums: Sequence[Tensor], *, first: bool = False) -> None:
        self.backend.accumulate(self.plan, Fold(Grads(grads), Grads(sums), 1.0, overwrites=first), self.partials)

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], outcome: Outcome) -> None:
        self.backend.step(self.plan, Grads(grads), self._hypers, outcome)

    def step_bytes(self, grads: Sequence[Tensor]) -> int:
        """What a step has to move: gradients in; parameters and states in and out.

        A 16-bit parameter that has an fp32 master only goes out.
        """
        total = sum(grad.nbytes for grad in grads)
        for param in self.plan.params:
            state = self.optimizer.state[param]
            total += param.nbytes * (1 if MASTER in state else 2)
            total += 2 * sum(value.nbytes for value in state.values() if value.dim() > 0)
        return total


class Probe:
    def __init__(self, target: Target, own: Journal) -> None:
        self.target, self.own = target, own
        self.copy, self.elements = target.copy_rate(), target.elements(LARGE, _BYTES)

    def run(self) -> None:
        """What matters most comes first: the time may be up."""
        self.own.write("copy", **{"TB/s": self.copy / 1e12})
        parts: list[tuple[str, Callable[[], None]]] = [(Case().name, partial(self.step, Case()))]
        parts += [("fp32", partial(self.folds, FP32))]
        parts += [(name, partial(self.replay, name, shapes)) for name, shapes in self._models().items()]
        parts += [(case.name, partial(self.step, case)) for case in (PACKED[0], PURE)]
        parts += [(DTYPES[dtype], partial(self.folds, dtype)) for dtype in (BF16, FP16)]
        parts += [(case.name, partial(self.step, case)) for case in OTHERS]
        parts += [("a gradient off its boundary", partial(self.step, Case(), off=1))]
        for what, run in parts:
            with self.own.section("probe", what=what):
                run()
            self.target.release()
        self.own.write("copy", **{"TB/s": self.target.copy_rate() / 1e12})  # is it as fast as at first?

    def _models(self) -> dict[str, Shapes]:
        if self.target.is_dry:
            return {"20 tensors of 64": small(20)}
        several = {f"{tensors} tensors of 64": small(tensors) for tensors in (1000, 10_000)}
        return several | {f"one tensor of {n}M": flat(n * 1_000_000) for n in (2, 8, 32)} | {"GPT-2 124M": gpt2()}

    def _time(self, kind: str, moved: float, runs: Mapping[str, tuple[Callable[[], Any], dict[str, Any]]]) -> None:
        """Times these in turn. Args: moved: bytes; runs: by name, each with more facts."""
        variants = [Variant(name, run) for name, (run, _) in runs.items()]
        rounds = self.target.rounds * (5 if kind == "replay" else 1)  # replays take microseconds
        for timing in interleave(variants, rounds, clock=self.target.clock):
            facts = {"what": timing.variant.name, "us": timing.median * 1e6, "best us": timing.best * 1e6}
            rate = moved / timing.median
            rates = {"TB/s": rate / 1e12, "of copy": rate / self.copy}
            self.own.write(kind, **facts, **runs[timing.variant.name][1], **rates)

    def _random(self, dtype: torch.dtype, more: int = 0, scale: float = 1e-3) -> list[Tensor]:
        return random_tensors(flat(self.elements + more), scale, dtype, self.target.device)

    def _kernels(self, case: Case, grads: list[Tensor]) -> Kernels:
        params = [tensor.requires_grad_() for tensor in self._random(case.param_dtype, scale=0.02)]
        return Kernels(case, params, grads, self.target.backend)

    def folds(self, dtype: torch.dtype) -> None:
        """The norm, and the two ways into an accumulator, of gradients of this dtype."""
        grads, sums = self._random(dtype), self._random(FP32)
        work, read, name = self._kernels(Case("SGD", grads=dtype), grads), grads[0].nbytes, DTYPES[dtype]
        self._time("norm", read, {f"norm, {name}": (partial(work.norm, grads), {})})
        for first, title in ((True, "first accumulate"), (False, "accumulate")):
            run = partial(work.accumulate, grads, sums, first=first)
            self._time("accumulate", read + (1 if first else 2) * sums[0].nbytes, {f"{title}, {name}": (run, {})})

    def step(self, case: Case, off: int = 0) -> None:
        """A step. Args: off: elements by which its gradients lie off their boundary."""
        grads = [self._random(case.grads, off)[0][off:]]
        work = self._kernels(case, grads)
        moved, name = work.step_bytes(grads), f"{case.name}{', off its boundary' if off else ''}"
        run = partial(work.step, grads, work.norm(grads))
        self._time("step", moved, {name: (run, {"B/el": moved / self.elements})})

    def replay(self, name: str, shapes: Shapes) -> None:
        """Clip and AdamW step of a small model, captured; also without each mechanism."""
        runs, count, on = {}, 0, self.target.mechanisms
        for without in ("", *on):
            work = Workload(shapes, self.target.device)
            work.set_grads()
            self.target.allow({*on} - {without})
            replay, launches = self.target.captured(using(self.target.backend, work.ours).step)
            runs[f"{name}, no {without}" if without else name] = replay, {"launches": launches}
            count = work.count
        self.target.allow(on)
        self._time("replay", 32 * count, runs)


def main() -> None:
    Probe(Target(), Journal("probe")).run()


if __name__ == "__main__":
    main()
