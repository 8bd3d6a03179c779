"""How fast is each verb, rule and format on this GPU, beside the rate of a copy and what was predicted?

Each figure goes to the report at once. Sizes are far beyond the caches; small models are replayed from graphs.
`--against MODULE` times a second native module in turn with this one's, over the same kind of tensors, in one process.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accumfused import compiled
from accumfused.backends import why_not
from accumfused.backends.cuda import CudaBackend
from bench.ceilings import MIXES, Ceilings
from bench.clock import Clock, CudaClock, EnqueueClock, HostClock
from bench.gpu import counters, predictions
from bench.gpu.journal import Journal
from bench.gpu.verbs import BF16, FP16, FP32, Case, Verbs, text
from bench.loops import CUDA_PIECE, PIECE, CpuLoops, CudaLoops
from bench.measure import Variant, interleave
from bench.shapes import Shapes, flat, gpt2, small
from bench.workload import Workload, random_tensors

_LARGE = 1_200_000_000
_SPARE = 0.8  # of the memory that is free
_PER_ELEMENT = 28  # bytes, at most: AMSGrad's, and what lies beside
_ROUNDS = 9

STEPS = (
    Case(),
    Case(grads=BF16),
    Case("AdamW", "split8", "int8", BF16),
    Case("AdamW", "split16", "int8", BF16),
    Case("AdamW", "bf16 stochastic", "int8", BF16),
    Case("AdamW", "split16", "fp32", BF16),
    Case("AdamW", "bf16 + fp32 master", "bf16", BF16),
    Case("AMSGrad"),
    Case("Lion"),
    Case("SGD-m"),
    Case("Lion", "bf16 stochastic", "bf16", BF16),
    Case("AdamW", "fp16 + fp32 master", "fp32", FP16),
    Case(grads=FP16),
)


# What a step's launches may do (csrc/cuda/launch.h, `allow`), and the name of a step where they may not. The first
# shows up to which size one launch is faster (csrc/cuda/policy.h has the limit).
SWITCHES = {"one_launch": "norm apart", "queue": "no queue"}


@dataclass
class Probe:
    """Args: subjects: backends by name, timed in turn; copy: bytes a second, measured first; allow: `_C.cuda.allow`."""

    journal: Journal
    device: torch.device
    subjects: Mapping[str, Any]
    elements: int
    clock: Clock
    host_clock: Clock
    rounds: int = _ROUNDS
    copy: float = 0.0
    allow: Callable[..., None] | None = None

    def time(
        self, kind: str, what: str, moved: float, runs: Mapping[str, Callable[[], Any]], *, often: int = 1, **facts: Any
    ) -> None:
        """Times what each subject does, in turn, and writes a line for each.

        Args:
            moved: bytes.
            often: times as many rounds as usual: for what takes microseconds.
        """
        timings = interleave([Variant(name, run) for name, run in runs.items()], often * self.rounds, clock=self.clock)
        for name, timing in zip(runs, timings, strict=True):
            rate = moved / timing.median
            line = {
                "what": what,
                "by": name,
                "us": timing.median * 1e6,
                "best_us": timing.best * 1e6,
                "TB/s": rate / 1e12,
            }
            if self.copy:
                line["of_copy"] = rate / self.copy
            if what in predictions.SHARES and self.copy:
                known = predictions.SHARES[what]
                low, high = known.share
                line |= {
                    "predicted": f"{low:.2f} to {high:.2f}",
                    "so": known.verdict(rate / self.copy),
                    "why": known.reason,
                }
            if len(timings) > 1:
                line["times_as_fast_as_the_first"] = timing.times_as_fast_as(timings[0])
            self.journal.write(kind, **line, **facts)

    def section(self, kind: str, what: str, run: Callable[[], None]) -> None:
        """What fails is written, and the next one follows."""
        try:
            run()
        except Exception as error:
            says = f"{type(error).__name__}: {error}".split("\n")[0]
            self.journal.write(kind, ok=False, what=what, error=says, trace=traceback.format_exc())
        gc.collect()  # optimizers are cycles, and hold tensors
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def random(self, dtype: torch.dtype, scale: float = 1e-3, shapes: Shapes | None = None) -> list[torch.Tensor]:
        return random_tensors(shapes or flat(self.elements), scale, dtype, self.device)

    def verbs(self, case: Case, grads: list[torch.Tensor]) -> dict[str, Verbs]:
        """Each subject's own."""
        made = {}
        for name, backend in self.subjects.items():
            params = [tensor.requires_grad_() for tensor in self.random(case.param_dtype, 0.02)]
            made[name] = Verbs(case, params, grads, backend)
        return made

    def without(self, switch: str | None, run: Callable[[], Any]) -> Callable[[], Any]:
        """The same, or the graph that captures it, by launches that may not do that."""

        def switched() -> None:
            assert self.allow is not None
            self.allow(**{switch: False})
            try:
                run()
            finally:
                self.allow()

        return run if switch is None else switched

    def measure_copy(self) -> None:
        a, b = self.random(FP32)[0], torch.empty(self.elements, device=self.device)
        timing = interleave([Variant("copy", lambda: b.copy_(a))], self.rounds, clock=self.clock)[0]
        self.copy = 8 * self.elements / timing.median
        self.journal.write("ceilings", mix="copy_ of fp32", **{"TB/s": self.copy / 1e12}, elements=self.elements)

    def measure_ceilings(self) -> None:
        """Of each mix of reads and writes, by loops with next to no arithmetic."""
        on_gpu = self.device.type == "cuda"
        size = min(2048, max(self.elements // CUDA_PIECE, 1)) * CUDA_PIECE
        ceilings = Ceilings(lambda: CudaLoops(self.device, size) if on_gpu else CpuLoops(PIECE), self.clock)
        if ceilings.reason is not None:
            self.journal.write("ceilings", ok=False, reason=ceilings.reason)
        for mix in MIXES if ceilings.reason is None else ():
            for _ in range(3):
                ceilings.measure([mix])
            rate = ceilings.median_rates()[mix]
            facts = {"TB/s": rate / 1e12, "of_copy": rate / self.copy, "loop": ceilings.fastest_loops()[mix]}
            self.journal.write("ceilings", mix=f"{mix}: {MIXES[mix].read} + {MIXES[mix].written} bytes", **facts)

    def measure_folds(self, dtype: torch.dtype) -> None:
        """The norm, and the two ways into an accumulator, of gradients of this dtype."""
        grads = self.random(dtype)
        works = self.verbs(Case("SGD", grads=dtype), grads)
        name, read = text(dtype), dtype.itemsize * self.elements
        self.time("norm", f"norm, {name}", read, {who: partial(work.norm, grads) for who, work in works.items()})
        sums, written = self.random(FP32), 4 * self.elements
        for first in (True, False):
            moved = read + written * (1 if first else 2)
            runs = {who: partial(work.accumulate, grads, sums, first=first) for who, work in works.items()}
            self.time("accumulate", f"{'first ' if first else ''}accumulate, {name}", moved, runs)

    def measure_step(self, case: Case, off: int = 0) -> None:
        """A step. Args: off: elements by which its gradients lie off their boundary."""
        memory = self.random(case.grads, shapes=flat(self.elements + off))[0]
        grads = [memory[off:]]
        works = self.verbs(case, grads)
        runs = {who: partial(work.step, grads, work.norm(grads)) for who, work in works.items()}
        moved = next(iter(works.values())).step_bytes(grads)
        what = f"{case.name}{f', {off * case.grads.itemsize} bytes off' if off else ''}"
        self.time("step", what, moved, runs, bytes_an_element=round(moved / self.elements, 2))

    def measure_replay(self, name: str, shapes: Shapes) -> None:
        """Clip and AdamW step of a small model, captured; and what the host needs for it without a graph."""
        from bench.suites.graph import captured  # with rich, which the rest does not need

        runs, host, count = {}, {}, 0
        ways: list[tuple[str, Any, str | None]] = [(who, backend, None) for who, backend in self.subjects.items()]
        if self.allow is not None:
            first, backend, _ = ways[0]
            ways += [(f"{first}, {says}", backend, switch) for switch, says in SWITCHES.items()]
        for who, backend, switch in ways:
            work = Workload(shapes, self.device)
            optimizer = work.ours("auto" if not isinstance(backend, str) else backend)
            if not isinstance(backend, str):
                optimizer.engine.plans.backend = backend
            work.set_grads()
            step = self.without(switch, optimizer.step)
            runs[who] = captured(step) if self.device.type == "cuda" else step
            eager = interleave([Variant(who, step)], self.rounds, clock=self.host_clock)[0]
            host[who], count = eager.median * 1e6, work.count
        facts = {"predicted_us": predictions.MICROSECONDS.get(name), "host_us_without_graph": host}
        self.time("graph replay", name, 32 * count, runs, often=5, **facts)

    def measure_overlap(self, name: str, shapes: Shapes) -> None:
        """A window of four, captured: with launches that begin while the one in front ends, and without."""
        from bench.suites.graph import captured  # with rich, which the rest does not need
        from bench.suites.window import window

        if self.allow is None:
            return
        runs, count = {}, 0
        for who, switch in (("overlapping", None), ("one after another", "overlap")):
            work = Workload(shapes, self.device)
            run = self.without(switch, window(work, work.ours(), [work.random() for _ in range(4)]))
            runs[who] = captured(run) if self.device.type == "cuda" else run
            count = work.count
        self.time("graph replay", f"{name}, window of 4", (8 + 3 * 12 + 28) * count, runs, often=5)

    def measure_all(self, models: Mapping[str, Shapes]) -> None:
        self.section("ceilings", "copy", self.measure_copy)
        self.section("ceilings", "mixes", self.measure_ceilings)
        for case in STEPS[:3]:
            self.section("step", case.name, partial(self.measure_step, case))
        for dtype in (FP32, BF16, FP16):
            self.section("accumulate", text(dtype), partial(self.measure_folds, dtype))
        for name, shapes in models.items():
            self.section("graph replay", name, partial(self.measure_replay, name, shapes))
            self.section("graph replay", f"{name}, window of 4", partial(self.measure_overlap, name, shapes))
        self.section("step", "a gradient off its boundary", partial(self.measure_step, Case(), off=1))
        for case in STEPS[3:]:
            self.section("step", case.name, partial(self.measure_step, case))
        self.section("ceilings", "copy, again", self.measure_copy)


def models(quick: bool = False) -> dict[str, Shapes]:
    """By the names of the predictions."""
    few = 50 if quick else 1000
    large: Shapes = gpt2(64, 2, 512, 64) if quick else gpt2()
    names = list(predictions.MICROSECONDS)
    found = dict(zip(names, (flat(2_000_000), small(few), small(10 * few), large), strict=True))
    return found if quick else {**found, "one tensor of 8M": flat(8_000_000), "one tensor of 32M": flat(32_000_000)}


def module_at(path: Path) -> Any:
    """The backend of another native module, built from sources with the same rules."""
    spec = importlib.util.spec_from_file_location(path.name.split(".")[0], path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return CudaBackend(getattr(module, "cuda", module), module.Table)


def count(journal: Journal) -> None:
    """The GPU's own counters: of each format, then of GPT-2's window; where they cannot be read, a line says so."""
    counters.count(journal)
    done = subprocess.run([sys.executable, "-m", "bench.counters"], capture_output=True, text=True)
    said = done.stdout if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason"])[-1]
    journal.write("counters of GPT-2", says=said)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.probe", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny, to see that it runs")
    parser.add_argument("--backend", default="cuda", help="cuda (the default), triton...")
    parser.add_argument("--against", type=Path, metavar="MODULE", help="another _C*.so, timed in turn with this one's")
    parser.add_argument("--elements", type=float, help=f"default: {_LARGE:.1e}, or as many as the memory holds")
    parser.add_argument("--counters", action="store_true", help="at the end, by ncu")
    asked = parser.parse_args()
    journal, on_gpu = Journal.of_this_process("probe"), asked.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    name = asked.backend if on_gpu else "cpu"
    if on_gpu and (reason := why_not(name, device)) is not None:
        journal.write("left out", ok=False, backend=name, reason=reason)
        sys.exit(1)
    subjects: dict[str, Any] = {name: name}
    if asked.against is not None:
        subjects[str(asked.against)] = module_at(asked.against)
    elements = int(asked.elements or (_LARGE if on_gpu else 100_000))
    if on_gpu:
        room = _SPARE * torch.cuda.mem_get_info(device)[0] / (_PER_ELEMENT * len(subjects))
        elements = min(elements, int(room))
    clock: Clock = CudaClock(device) if on_gpu else HostClock()
    host_clock: Clock = EnqueueClock(device) if on_gpu else HostClock()
    rounds = _ROUNDS if on_gpu else 1
    allow = compiled.module.cuda.allow if name == "cuda" else None
    probe = Probe(journal, device, subjects, elements, clock, host_clock, rounds, allow=allow)
    probe.measure_all(models(quick=not on_gpu))
    if asked.counters:
        count(journal)


if __name__ == "__main__":
    main()
