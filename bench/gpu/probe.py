"""How fast is each kernel, rule and format on this GPU, as a share of a copy's rate?

Sizes are far beyond the caches; small models are replayed from graphs, also without each mechanism of the launches.
`--against MODULE` times a second native module in turn with this one's, over the same kind of tensors, in one process.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accumfused.backends.cuda import CudaBackend
from bench.gpu.cases import BF16, FP16, FP32, Case, Kernels, text, using
from bench.gpu.journal import Journal
from bench.gpu.target import Target
from bench.measure import Variant, interleave
from bench.shapes import Shapes, flat, gpt2, small
from bench.workload import Workload, random_tensors

LARGE = 1_200_000_000
_BYTES = 32  # an element, at most: AMSGrad's, and its gradients
STEPS = (
    Case("AdamW", "split8", "int8", BF16),
    Case("AdamW", "bf16 stochastic", "bf16", BF16),
    Case(grads=BF16),
    Case("AdamW", "split16", "int8", BF16),
    Case("AdamW", "bf16 stochastic", "int8", BF16),
    Case("AdamW", "split16", "fp32", BF16),
    Case("AdamW", "bf16 + fp32 master", "bf16", BF16),
    Case("Lion"),
    Case("AMSGrad"),
    Case("SGD-m"),
    Case("Lion", "bf16 stochastic", "bf16", BF16),
    Case("AdamW", "fp16 + fp32 master", "fp32", FP16),
)


class Probe:
    """Args: subjects: backends by name, timed in turn."""

    def __init__(self, target: Target, own: Journal, subjects: Mapping[str, Any]) -> None:
        self.target, self.own, self.subjects = target, own, subjects
        self.copy, self.elements = target.copy_rate(), target.elements(LARGE, _BYTES * len(subjects))

    def run(self) -> None:
        self.own.write("copy", **{"TB/s": self.copy / 1e12})
        self._do("step", Case().name, partial(self.step, Case()))
        self._do("norm", "fp32", partial(self.folds, FP32))
        for name, shapes in self._models().items():
            self._do("replay", name, partial(self.replay, name, shapes))
        for case in STEPS[:2]:
            self._do("step", case.name, partial(self.step, case))
        for dtype in (BF16, FP16):
            self._do("norm", text(dtype), partial(self.folds, dtype))
        for case in STEPS[2:]:
            self._do("step", case.name, partial(self.step, case))
        self._do("step", "a gradient off its boundary", partial(self.step, Case(), off=1))
        self.own.write("copy", **{"TB/s": self.target.copy_rate() / 1e12})

    def _do(self, kind: str, what: str, run: Callable[[], None]) -> None:
        with self.own.section(kind, what=what):
            run()
        self.target.release()

    def _models(self) -> dict[str, Shapes]:
        if self.target.is_dry:
            return {"20 tensors of 64": small(20)}
        several = {f"{n} tensors of 64": small(n) for n in (1000, 10_000)}
        return several | {f"one tensor of {n}M": flat(n * 1_000_000) for n in (2, 8, 32)} | {"GPT-2 124M": gpt2()}

    def time(
        self, kind: str, what: str, moved: float, runs: Mapping[str, Callable[[], Any]], often: int = 1,
        launches: Mapping[str, int | None] | None = None,
    ) -> None:  # fmt: skip
        """Times these in turn. Args: moved: bytes; often: times as many rounds; launches: of a replay."""
        variants = [Variant(name, run) for name, run in runs.items()]
        timings = interleave(variants, often * self.target.rounds, clock=self.target.clock)
        for name, timing in zip(runs, timings, strict=True):
            facts: dict[str, Any] = {"what": what, "by": name, "us": timing.median * 1e6, "best us": timing.best * 1e6}
            facts |= {"B/el": moved / self.elements} if launches is None else {"launches": launches[name]}
            facts |= {"TB/s": moved / timing.median / 1e12, "of copy": moved / timing.median / self.copy}
            facts |= {"times as fast as the first": timing.times_as_fast_as(timings[0])} if len(timings) > 1 else {}
            self.own.write(kind, **facts)

    def _random(self, dtype: torch.dtype, more: int = 0, scale: float = 1e-3) -> list[torch.Tensor]:
        return random_tensors(flat(self.elements + more), scale, dtype, self.target.device)

    def _kernels(self, case: Case, grads: list[torch.Tensor]) -> dict[str, Kernels]:
        made = {}
        for name, backend in self.subjects.items():
            params = [tensor.requires_grad_() for tensor in self._random(case.param_dtype, scale=0.02)]
            made[name] = Kernels(case, params, grads, backend)
        return made

    def folds(self, dtype: torch.dtype) -> None:
        """The norm, and the two ways into an accumulator, of gradients of this dtype."""
        grads, name, read = self._random(dtype), text(dtype), dtype.itemsize * self.elements
        works = self._kernels(Case("SGD", grads=dtype), grads)
        self.time("norm", f"norm, {name}", read, {by: partial(work.norm, grads) for by, work in works.items()})
        sums = self._random(FP32)
        for first, moved in ((True, read + sums[0].nbytes), (False, read + 2 * sums[0].nbytes)):
            runs = {by: partial(work.accumulate, grads, sums, first=first) for by, work in works.items()}
            self.time("accumulate", f"{'first ' if first else ''}accumulate, {name}", moved, runs)

    def step(self, case: Case, off: int = 0) -> None:
        """A step. Args: off: elements by which its gradients lie off their boundary."""
        grads = [self._random(case.grads, off)[0][off:]]
        works = self._kernels(case, grads)
        runs = {by: partial(work.step, grads, work.norm(grads)) for by, work in works.items()}
        what = f"{case.name}{f', {off * case.grads.itemsize} bytes off' if off else ''}"
        self.time("step", what, next(iter(works.values())).step_bytes(grads), runs)

    def replay(self, name: str, shapes: Shapes) -> None:
        """Clip and AdamW step of a small model, captured; also without each mechanism."""
        runs, launches, count, everything = {}, {}, 0, self.target.mechanisms
        ways = {by: (backend, "") for by, backend in self.subjects.items()}
        by, backend = next(iter(self.subjects.items()))
        ways |= {f"{by}, not {mechanism}": (backend, mechanism) for mechanism in everything}
        for way, (backend, without) in ways.items():
            work = Workload(shapes, self.target.device)
            work.set_grads()
            self.target.allow({*everything} - {without})
            runs[way], launches[way] = self.target.captured(using(backend, work.ours).step)
            count = work.count
        self.target.allow(everything)
        self.time("replay", name, 32 * count, runs, often=5, launches=launches)


def module_at(path: Path) -> Any:
    """The backend of another native module, built from sources with the same rules."""
    spec = importlib.util.spec_from_file_location(path.name.split(".")[0], path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return CudaBackend(getattr(module, "cuda", module), module.Table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.probe", description=__doc__)
    parser.add_argument("--against", type=Path, metavar="MODULE", help="another _C*.so, timed in turn with this one's")
    asked = parser.parse_args()
    target = Target.here()
    subjects = {"this": target.backend} | ({"that": module_at(asked.against)} if asked.against else {})
    Probe(target, Journal("probe"), subjects).run()


if __name__ == "__main__":
    main()
