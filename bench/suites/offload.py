"""Offload: micro-batches and steps with `offload=True`, where the card is the CPU, against the same without and others.

On this host the CPU makes the copies of each trip, and a card's engine makes them elsewhere, beside the CPU's work. So
the figures with offload are those of a machine whose bus is its memory. The last table is computed from them, for a
model of 7 billion parameters on a card.

One format's states are in memory at a time, and all variants of a table share them.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import accumfused as af
from bench import shapes, stock
from bench.exact import ADAMW, MAX_GRAD_NORM, WrongError, deviation, master
from bench.measure import Timing, Variant
from bench.peers import gap, other, quiet
from bench.shapes import Shapes
from bench.suites import Bench
from bench.tables import Row, Table, timed
from bench.workload import random_tensors

FOLLOWS = ("model",)
BF16 = torch.bfloat16
VERBS = {"first": "first micro-batch", "further": "further micro-batch", "step": "clipped AdamW step"}
BUS = 25e9  # bytes a second and way: what PCIe 4.0 x16 gives. Stated, not measured
BILLIONS = 7

_TRIP = ("copy_bf16",)  # from the card, or to it
_STEP_OF_MASTERS = (*stock.CLIP_FUSED_PASSES, "narrow_bf16")
_BUDGET = 60.0  # seconds of a table: a round takes some, and two threads of work are easily disturbed
_EXACT, _SIXTEEN_BITS = 1e-3, 0.6  # as in lean.py


@dataclass(frozen=True)
class Format:
    """A storage format of bf16 parameters.

    Args:
        settings: of our optimizer.
        passes: verb -> mixes, without trips; a mix stands for all with its numbers of bytes read and written.
        sum_error: what sums of two micro-batches may be off, of what they are.
        step_error: what two steps may be off, of what they change; see `exact.deviation`.
    """

    settings: dict[str, Any]
    passes: dict[str, tuple[str, ...]]
    sum_error: float
    step_error: float


_LEAN: dict[str, Any] = {"state_dtype": "8bit", "master_weights": None}
_FP32_FOLDS: dict[str, tuple[str, ...]] = {"first": ("overwrite_bf16",), "further": ("accumulate_bf16",)}
WITH_MASTERS = "split16, fp32 states"
FORMATS = {
    WITH_MASTERS: Format({}, {**_FP32_FOLDS, "step": ("step",)}, 1e-6, _EXACT),
    # Reads sum, parameter and states, 4 + 2 + 2 bytes, and writes 2 + 2.
    "8-bit states": Format(_LEAN, {**_FP32_FOLDS, "step": ("accumulate",)}, 1e-6, _SIXTEEN_BITS),
    "8-bit states, two-byte sums": Format(
        {**_LEAN, "sum_dtype": BF16},
        {"first": ("copy_bf16",), "further": ("accumulate_in_bf16",), "step": ("accumulate_bf16",)},
        2**-8,
        _SIXTEEN_BITS,
    ),
}


class Model:
    """bf16 parameters, and the gradients of two micro-batches."""

    def __init__(self, of: Shapes) -> None:
        self.shapes, self.count = of, shapes.count(of)
        self.params = [torch.nn.Parameter(tensor) for tensor in random_tensors(of, 0.02, BF16)]
        self.grads = random_tensors(of, 1e-3, BF16), random_tensors(of, 1e-3, BF16)
        self.before = [param.detach().clone() for param in self.params]
        self.mean = [(a.float() + b.float()) / 2 for a, b in zip(*self.grads, strict=True)]

    @torch.no_grad()
    def put_back(self) -> None:
        torch._foreach_copy_(self.params, self.before)

    def check(self, masters: list[Tensor], allowed: float) -> None:
        """Compares two clipped steps, of the mean of both gradients and of the second, with fp64.

        Raises:
            WrongError: they are further off than what is allowed.
        """
        off = deviation(self.before, masters, [self.mean, self.grads[1]])
        if not off <= allowed:
            raise WrongError(f"two steps are {off:.1%} off, more than {allowed:.1%}", off)


class Loop:
    """One of our optimizers in a training loop that brings gradients."""

    def __init__(self, model: Model, form: Format, *, offload: bool, states: Any = None) -> None:
        settings = {**ADAMW, "max_grad_norm": MAX_GRAD_NORM, "backend": "cpu", **form.settings}
        self.model, self.form, self.offload = model, form, offload
        self.optimizer = af.AdamW(model.params, offload=offload, **settings)
        self.optimizer.state.update(states or {})

    def bring(self, grads: Sequence[Tensor], *, can_be_sums: bool = False) -> None:
        """Sets p.grad, as a backward pass does.

        Args:
            can_be_sums: in memory that nothing else holds: the first gradients of a window may become its sums.
        """
        for param, grad in zip(self.model.params, grads, strict=True):
            param.grad = grad.clone() if can_be_sums and not self.offload else grad

    def fold(self) -> None:
        self.optimizer.accumulate(1.0)
        plan = self.optimizer._engine.plans.last
        assert plan is not None
        plan.wait()  # for the folds, which the loop would leave to the host

    def open(self, *sets: Sequence[Tensor]) -> None:
        """Begins a window, and drops an open one; the last set is in p.grad, those before it in the sums."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", af.AccumulationWarning)
            self.optimizer.zero_grad()
        for index, grads in enumerate(sets):
            if index:
                self.fold()
            self.bring(grads, can_be_sums=not index)

    def whole(self, *sets: Sequence[Tensor]) -> None:
        """Folds these micro-batches."""
        self.open(*sets)
        self.fold()

    def check(self) -> None:
        """Compares sums and steps with fp64, from states of zero; all is put back but the states.

        Raises:
            WrongError: they are further off than the format explains.
        """
        one, two = self.model.grads
        self.whole(one, two)
        squares = torch.zeros(2, dtype=torch.float64)
        for found, mean in zip(self.optimizer._engine.window.sums, self.model.mean, strict=True):
            right = 2 * mean.double()
            assert found is not None
            squares += torch.stack([(found.double() - right).square().sum(), right.square().sum()])
        off = float((squares[0] / squares[1]).sqrt())
        if not off <= self.form.sum_error:
            raise WrongError(f"sums are {off:.1e} off, more than {self.form.sum_error:.1e}", off)
        self.optimizer.step()
        self.whole(two, two)
        self.optimizer.step()
        masters = [master(self.optimizer, param) for param in self.model.params]
        self.model.check(masters, self.form.step_error)
        self.model.put_back()

    def variants(self, name: str) -> dict[str, Variant]:
        """Returns verb -> what is timed; a window has two micro-batches, so the norm comes with the second."""
        one, two = self.model.grads
        runs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "first": (self.fold, partial(self.open, one)),
            "further": (self.fold, partial(self.open, one, two)),
            "step": (self.optimizer.step, partial(self.whole, one, two)),
        }
        found = {}
        for verb, (run, setup) in runs.items():
            passes = (*_TRIP, *self.form.passes[verb], *(_TRIP if verb == "step" else ()))
            if not self.offload:
                is_adopted = verb == "first" and self.form.passes[verb] == _TRIP  # the gradient becomes the sum
                passes = () if is_adopted else self.form.passes[verb]
            found[verb] = Variant(name, run, setup, passes or None)
        return found


@dataclass
class Measured:
    """What was measured of a format with offload: seconds and bytes for each parameter."""

    seconds: dict[str, float]  # of each verb
    on_host: float


def run(bench: Bench) -> list[Table]:
    ((name, of),) = bench.models(shapes.LLAMA_02B).items()
    model = Model(of)
    tables = {verb: Table(f"offload, {name}, bf16: {title}") for verb, title in VERBS.items()}
    measured = {}
    for form in FORMATS:
        rows, measured[form] = _ours(bench, model, form)
        for verb, table in tables.items():
            table.rows += rows[verb]
    others = _beside_others(bench, model, f"offload, {name}, bf16: {VERBS['step']}, {WITH_MASTERS}, and others")
    for table in (*tables.values(), others):
        table.notes.append(
            "moved: what the work reads and writes, with 4 bytes for each trip that a card's engine would make; "
            "ceiling GB/s: of the same mixes, one after another, in the same rounds"
        )
    tables["first"].notes.append("two-byte sums without offload: the gradient becomes the sum, and nothing moves")
    others.notes.append("all were checked against fp64: sums of two micro-batches, and two steps")
    return [*tables.values(), others, computed(measured)]


def _loops(bench: Bench, model: Model, form: Format) -> list[Loop]:
    """Makes a loop with offload and one without, both checked, with the same states."""
    for offload in (False, True):
        bench.release()
        loop = Loop(model, form, offload=offload)
        loop.check()
    return [loop, Loop(model, form, offload=False, states=loop.optimizer.state)]


def _variants(name: str, loops: Sequence[Loop]) -> list[dict[str, Variant]]:
    return [loop.variants(f"accumfused, {name}, {'offload' if loop.offload else 'without'}") for loop in loops]


def _ours(bench: Bench, model: Model, name: str) -> tuple[dict[str, list[Row]], Measured]:
    """Returns verb -> the rows of a format, with offload and without, and its figures for `computed`."""
    loops = _loops(bench, model, FORMATS[name])
    timings = bench.interleave([each[verb] for each in _variants(name, loops) for verb in VERBS], budget=_BUDGET)
    rows, seconds = {}, {}
    for verb, mine, without in zip(VERBS, timings[: len(VERBS)], timings[len(VERBS) :], strict=True):
        rows[verb] = _rows([mine, without], model.count, {"without": without.variant.name})
        seconds[verb] = mine.median / model.count
    loops[0].whole(*model.grads)
    on_host = af.memory_report(loops[0].optimizer).total.on_host / model.count
    model.put_back()
    return rows, Measured(seconds, on_host)


def _rows(timings: Sequence[Timing], count: int, against: dict[str, str] | None = None) -> list[Row]:
    rows = timed("", timings, count, against).rows
    for row, timing in zip(rows, timings, strict=True):
        moved = row.get("moved B/param", 0) * count
        if moved and timing.at_ceiling:
            row["GB/s"] = moved / timing.median / 1e9
            row["ceiling GB/s"] = moved / count / statistics.median(timing.at_ceiling) / 1e9
    return rows


# ---- others: a clipped step of fp32 masters and gradients, and the copy to the bf16 parameters -----------------------


def _beside_others(bench: Bench, model: Model, title: str) -> Table:
    settings = {"lr": ADAMW["lr"], "weight_decay": ADAMW["weight_decay"]}
    makers: dict[str, Callable[..., Any]] = {"AdamW(fused)": partial(torch.optim.AdamW, fused=True, **settings)}
    if not bench.quick:
        makers["DeepSpeed CPUAdam"] = other("deepspeed.ops.adam", "DeepSpeedCPUAdam", adamw_mode=True, **settings)
    loops = _loops(bench, model, FORMATS[WITH_MASTERS])
    variants, gaps = [each["step"] for each in _variants(WITH_MASTERS, loops)], []
    masters = Masters(model, [loops[0].optimizer.state[param] for param in model.params])
    for name, make in makers.items():
        recipe = f"clip + {name} + bf16 copy"
        try:
            with quiet():
                variants.append(masters.variant(recipe, make))
        except Exception as error:  # of any kind, where it is somebody else's package
            gaps.append(gap(recipe, error))
        model.put_back()
    if not bench.quick:
        gaps.append(_torchao(model))
    rows = _rows(bench.interleave(variants, budget=_BUDGET), model.count, {"without": variants[1].name})
    model.put_back()
    return Table(title, rows + gaps)


class Masters:
    """fp32 masters and gradients of the model, which others step; the moments are those of ours."""

    def __init__(self, model: Model, moments: list[dict[str, Any]]) -> None:
        self.model, self.moments = model, moments
        self.params = [torch.nn.Parameter(before.float()) for before in model.before]
        self.grads = [torch.empty_like(param) for param in self.params]

    @torch.no_grad()
    def bring(self, values: Sequence[Tensor]) -> None:
        for param, value, grad in zip(self.params, values, self.grads, strict=True):
            param.grad = grad.copy_(value)  # clipping is in place

    @torch.no_grad()
    def copy(self) -> None:
        torch._foreach_copy_(self.model.params, self.params)

    @torch.no_grad()
    def variant(self, name: str, make: Callable[..., Any]) -> Variant:
        """Makes a recipe that has come out at the same two steps as fp64.

        Raises:
            WrongError: it has not. And whatever the package raises.
        """
        torch._foreach_copy_(self.params, self.model.before)
        optimizer = make(self.params)
        step = stock.clip_and_step(self.params, optimizer)
        self.bring(self.model.mean)
        step()  # makes states, which begin at zero
        for param, ours in zip(self.params, self.moments, strict=True):
            own = optimizer.state[param]
            own.update({moment: ours[moment].copy_(own[moment]) for moment in ("exp_avg", "exp_avg_sq")})
        self.bring(self.model.grads[1])
        step()
        self.model.check([param.detach() for param in self.params], _EXACT)

        def run() -> None:
            step()
            self.copy()

        return Variant(name, run, partial(self.bring, self.model.mean), _STEP_OF_MASTERS)


def _torchao(model: Model) -> Row:
    """Tries torchao's, which keeps gradients and states on the host, without sums and without a clip."""
    name = "torchao CPUOffloadOptimizer"
    make = other("torchao.optim", "CPUOffloadOptimizer", offload_gradients=True, fused=True, **ADAMW)
    try:
        with quiet():
            make(model.params, optimizer_class=torch.optim.AdamW)
    except Exception as error:
        return gap(name, error)
    return {"name": name, "cannot": "it neither accumulates nor clips, which is the work here"}


# ---- computed --------------------------------------------------------------------------------------------------------


def computed(measured: dict[str, Measured]) -> Table:
    """Computes a large model's times on a card from this host's, and a bus of a stated rate."""
    count = BILLIONS * 1e9
    trip = 2 * count / BUS
    table = Table(
        f"offload, COMPUTED, not measured: {BILLIONS}e9 bf16 parameters on a card, a bus of {BUS / 1e9:g} GB/s"
    )
    for name, each in measured.items():
        host = {verb: count * seconds for verb, seconds in each.seconds.items()}
        table.rows.append({
            "name": f"accumfused, {name}, offload",
            "bus s": trip,
            **{f"{verb} s": max(trip, seconds) for verb, seconds in host.items()},
            "kept on the card B/param": 2.0,
            "kept on the host B/param": each.on_host,
            "card GB": 2 * count / 1e9,
            "host GB": each.on_host * count / 1e9,
        })  # fmt: skip
    table.notes += [
        "bus s: one trip of gradients or weights. first, further, step: the longer one of the trip and of this host's "
        "measured time a parameter, because they go on at a time; a step has a trip each way, at a time",
        "the measured times have the trips' copies in them, which a card's engine makes: an upper bound for this host",
        "card: weights; gradients add 2 bytes until they are folded, less with release_gradients, and activations what "
        "they take. host: sums, masters and states in an open window; slots add some 0.2 GB",
    ]
    return table
