"""Problems that every backend solves with the same bits: an optimizer, its tensors, and a few updates.

`play` solves one on a backend; `expected` on the reference, with contiguous tensors whose elements have the order of
the problem's memory, which is the order of the norm and of the noise.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import inside
import torch
from compare import assert_all_same_bits, everything
from harness import pairwise
from layouts import EDGES, LAYOUTS, OFFSETS, PIECE, STREAMS, Layout, edges, same, shifted, with_holes
from reference import ReferenceBackend
from table import CASES, EACH_RULE, STATES, WEIGHTS, Case, case_named, kept, random_grads, random_params
from torch import Tensor

from accumfused.clip import Clip, RunningMean
from accumfused.core import plans
from accumfused.core.plan import Plan
from accumfused.formats import codecs
from accumfused.optimizers import RULES
from accumfused.settings import Settings

GRADS = (torch.float32, torch.float16, torch.bfloat16)
Number = float | str | None  # a str: a tensor on the device
Found = dict[str, Tensor]


def on_device(number: Number) -> Any:
    return torch.tensor(float(number)) if isinstance(number, str) else number


def bare_plan(backend: Any, params: Sequence[Tensor], origins: Sequence[int] = ()) -> Plan:
    """For calls of the backend's verbs: of these parameters, without an optimizer."""
    holder = SimpleNamespace(param_groups=[{"params": [*params]}], state={})
    plan = plans.build(lambda: holder, [RULES[0]], Settings())
    for row, origin in zip(plan.rows, origins, strict=False):
        row.origin = origin
    backend.prepare(plan)
    return plan


# ---- what happens ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """Updates, each with the weights of its micro-batches; (): from p.grad."""

    updates: tuple[tuple[Number, ...], ...]
    closed: bool = False  # by last=True, not by step()


@dataclass(frozen=True)
class Tail:
    """What happens between the gradients and the rule."""

    max_grad_norm: float | None = 0.5
    normalizer: Number = None
    grad_scale: Number = None
    found_inf: Number = None  # at the second update
    bad: tuple[float, ...] = ()  # in the gradients of the second update
    nonfinite: str | None = None
    clip: Clip | None = None
    skip_above: float | RunningMean | None = None
    of_groups: float | None = None  # the limit of the first group


LOOPS = {
    "steps": Loop(((), (), ())),
    "mean": Loop(((3.0, 0.7, 5.0), (2.0,))),
    "closed mean": Loop(((3.0, 0.7, 5.0), (2.0,)), closed=True),
    "sum": Loop(((None, None, None), (None,))),
    "device weights": Loop((("3", "0.7", "5"), ("2",)), closed=True),
    "both kinds": Loop(((3.0, "0.7", 5.0), ())),
    "empty": Loop(((0.0, 3.0, "0", 0.7), (2.0, 0.0))),
    "empty on the device": Loop((("0", "0", 3.0, 0.0, "0.7"), ("2", "0")), closed=True),
    "bad weight": Loop((("-1", 3.0), (2.0,), (0.5,))),
}
INF = float("inf")
(NAN,) = struct.unpack("<f", b"\xff\xff\xff\x7f")  # a GPU's own: to add noise to these bits makes a number
TAILS = {
    "clip": Tail(),
    "below the limit": Tail(1e6),
    "none": Tail(None),
    "normalizer": Tail(normalizer=1.7),
    "device normalizer": Tail(2.0, normalizer="3.7"),
    "scaled": Tail(grad_scale="4", found_inf="0", normalizer=0.3),
    "found inf": Tail(None, grad_scale="8", found_inf="1"),
    "inf": Tail(bad=(-INF,)),
    "propagate": Tail(None, bad=(NAN, INF, -INF), nonfinite="propagate"),
}


def usual(values: Tensor, update: int, is_half: bool) -> Tensor:
    return values


def tiny(values: Tensor, update: int, is_half: bool) -> Tensor:
    """Around the smallest normal number of fp32 (2^-126), or of fp16 (2^-14)."""
    at = torch.arange(values.numel()).view(values.shape) % 39
    return values * torch.exp2(at % 14 - 24.0 if is_half else at - 149.0)


def far_apart(values: Tensor, update: int, is_half: bool) -> Tensor:
    """Blocks from what fp32 can square down to what it cannot."""
    at = torch.arange(values.numel()).view(values.shape) // 128
    return values * torch.exp2(at % 9 * 2.0 - 12 if is_half else at % 61 * 2.0 - 70)


def sparse(values: Tensor, update: int, is_half: bool) -> Tensor:
    """Zeros of both signs, and nothing else from the second update on."""
    at = torch.arange(values.numel()).view(values.shape)
    zeros = torch.where(at % 2 < 1, 0.0, -0.0)
    return torch.where(at % 7 < 3, values, zeros) if update < 1 else zeros


def every_size(values: Tensor, update: int, is_half: bool) -> Tensor:
    """Blocks from below the smallest scale to above the largest, and within one of all sizes too."""
    at = torch.arange(values.numel()).view(values.shape)
    return values * torch.exp2(at // 128 % 24 * 11.9 - 148) * torch.exp2(at % 21 * -1.0)


VALUES = {"usual": usual, "tiny": tiny, "far apart": far_apart, "sparse": sparse, "every size": every_size}


@dataclass(frozen=True)
class Problem:
    case: str
    grads: torch.dtype = torch.float32
    weights: str = "fp32"
    states: str = "fp32"
    loop: Loop = LOOPS["mean"]
    tail: Tail = TAILS["clip"]
    tensors: str = "edges"  # or "off the boundaries", "any layout"
    groups: int = 1
    flushes: bool = False  # the calling thread's float mode
    reads_all: bool = False  # of second moments codes too that stand for 0, whatever they are
    lr: torch.dtype | None = None  # of a tensor, which is halved in place after each update
    values: str = "usual"
    edges: tuple[Layout, ...] = EDGES["usual"]
    origins: tuple[int, ...] = ()  # where each tensor begins in the one that it is a part of; with `part`
    part: tuple[int, int] | None = None  # elements of every tensor
    seed: int = 0
    special: tuple[tuple[int, float], ...] = ()  # at these places of gradients
    special_params: tuple[tuple[int, float], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()  # in place of the case's
    is_measured: bool = False  # metrics and the noise scale are taken
    sums: torch.dtype | None = None
    offload: bool = False

    def __str__(self) -> str:
        return f"{self.case}-{self.weights}-{self.states}"

    @property
    def layouts(self) -> Sequence[Layout]:
        if self.tensors == "edges":
            return self.edges
        if self.tensors == "any layout":
            return (*LAYOUTS, *self.edges[:2])
        return edges(*[PIECE + 150] * (len(OFFSETS) + 1 if self.edges is EDGES["tiny"] else 2 * len(OFFSETS)))

    @property
    def is_shifted(self) -> bool:
        return self.tensors == "off the boundaries"


# The rules with loops or kernels of their own; all others share theirs and stand in turn in the place of three.
COMMON = [case.rule for case in EACH_RULE if case.is_common]
AXES: dict[str, Sequence[Any]] = {
    "weights": [*WEIGHTS], "tail": [*TAILS.values()], "loop": [*LOOPS.values()], "case": [*COMMON, *[None] * 3],
    "values": [*VALUES][:4], "lr": [None, torch.float32, torch.float64],
    "states": [*STATES], "grads": GRADS, "tensors": ["edges", "off the boundaries", "any layout"], "groups": (1, 2),
}  # fmt: skip


def problems(axes: dict[str, Sequence[Any]], cases: Sequence[Case] = CASES) -> list[Problem]:
    """A covering array over these axes, with a rule's cases in turn.

    Where a row has no rule, or None, it takes the next of the rules that are not on the axis; each is there.
    """
    of_rule = defaultdict(list)
    for case in cases:
        of_rule[case.rule].append(case.name)
    names = {rule: itertools.cycle(own) for rule, own in of_rule.items()}
    others = [rule for rule in names if rule not in axes.get("case", ())]
    left = itertools.cycle(others)
    found = []
    for values in pairwise(axes):
        row = dict(zip(axes, values, strict=True))
        case = row.pop("case", None) or next(left)
        found.append(Problem(next(names[case]) if case in names else case, **row))
    if None in axes.get("case", [None]):
        seen = {case_named(problem.case).rule for problem in found}
        found += (Problem(next(names[rule])) for rule in others if rule not in seen)
    return found


# ---- playing it -----------------------------------------------------------------------------------------------------


def tensors_on(device: str, default: str = "cpu") -> contextlib.AbstractContextManager[Any]:
    """New tensors lie there; nothing where they do anyway, since torch.device() makes all calls slower."""
    return contextlib.nullcontext() if device == default else torch.device(device)


class Watched:
    """A backend whose outcomes are kept, for tensors that begin within larger ones."""

    def __init__(self, inner: Any, origins: Sequence[int] = ()) -> None:
        self._inner, self._origins, self.outcomes = inner, [*origins], list[Tensor]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def prepare(self, plan: Any) -> None:
        for row, origin in zip(plan.rows, self._origins, strict=False):
            row.origin = origin
        self._inner.prepare(plan)

    def norm(self, *args: Any) -> Any:
        outcome = self._inner.norm(*args)
        self.outcomes.append(outcome.values.clone())  # clipping may write into it
        return outcome


class Run:
    """One problem on one backend. Args: plain: contiguous tensors, in the order of the problem's memory."""

    def __init__(self, problem: Problem, backend: Any, device: str, *, plain: bool) -> None:
        self.problem, self.device, self.plain, self.layouts = problem, device, plain, problem.layouts
        self.watched = Watched(backend, problem.origins)
        dtype, options = WEIGHTS[problem.weights]
        self.params = [
            self.placed(index, values, layout.place, 0).detach().requires_grad_()
            for index, (values, layout) in enumerate(
                zip(self.draw(0, 0, dtype, problem.special_params), self.layouts, strict=True)
            )
        ]
        case = case_named(problem.case)
        own: dict[str, Any] = {**case.options, **dict(problem.options)}
        if problem.lr is not None:
            own["lr"] = torch.tensor(own["lr"], dtype=problem.lr, device=device)
        groups: list[dict[str, Any]] = [{"params": self.params[:: problem.groups]}]
        if problem.groups == 2:
            groups.append({"params": self.params[1::2], **case.of.other_options})
        if problem.tail.of_groups is not None:
            groups[0]["max_grad_norm"] = problem.tail.of_groups
        fewest = 0 if problem.part else 2 if problem.groups == 1 else 200
        self.optimizer: Any = replace(case, options=own).make(
            groups, self.watched, max_grad_norm=problem.tail.max_grad_norm, rounding_seed=17,
            state_dtype=STATES[kept(problem.states, case, *groups)], state_dtype_min_numel=fewest, **options,
            clip=problem.tail.clip, skip_above=problem.tail.skip_above, metrics=problem.is_measured,
            noise_scale=problem.is_measured, sum_dtype=problem.sums, offload=problem.offload,
            **({} if problem.tail.nonfinite is None else {"nonfinite": problem.tail.nonfinite}),
        )  # fmt: skip
        self.lr = own["lr"]
        self.errors = list[str]()
        self.found = Found()

    def draw(self, update: int, seed: int, dtype: torch.dtype, special: Sequence[tuple[int, float]]) -> list[Tensor]:
        """Contiguous values, made on the CPU; seed 0: the parameters'."""
        problem = self.problem
        with tensors_on("cpu", self.device):
            shapes = [layout.shape for layout in self.layouts]
            params = [param.detach() for param in random_params(shapes, problem.seed)]
            drawn = random_grads(params, problem.seed + seed) if seed else params
            values = [VALUES[problem.values](each, update, dtype == torch.float16) for each in drawn]
            for each, (at, value) in itertools.product(values, special):
                if at < each.numel():
                    each.view(-1)[at] = value
            begin, end = problem.part or (0, None)
            return [each[begin:end] if problem.part else each for each in (v.to(dtype) for v in values)]

    def placed(self, index: int, values: Tensor, place: Callable[[Tensor], Tensor], stream: int) -> Tensor:
        values = values.to(self.device)
        if self.plain:
            return self.layouts[index].in_memory(values).clone()
        return place(self.shift(index, values, stream))

    def shift(self, index: int, values: Tensor, stream: int) -> Tensor:
        """Values of one of the streams of a parameter, of which another one each lies off the boundaries."""
        if self.problem.is_shifted and not self.plain and index % STREAMS == stream:
            return shifted(values, OFFSETS[index % len(OFFSETS)])
        return values.clone()

    def set_grads(self, update: int, micro: int, weight: Number) -> None:
        """Of one micro-batch: a parameter has none in an update's first, which may be its only one."""
        problem, tail = self.problem, self.problem.tail
        special = problem.special
        if update == 1:
            special += tuple((at, value) for at, value in zip((0, 900, 2), tail.bad, strict=False))
        if weight in (0.0, "0"):
            special += ((0, NAN), (127, INF))
        drawn = self.draw(update, 1 + 10 * update + micro, problem.grads, special)
        for index, (param, values) in enumerate(zip(self.params, drawn, strict=True)):
            if micro == 0 and len(self.params) > 1 and index == (update * 2 + problem.seed) % len(self.params):
                param.grad = None
                continue
            own = self.layouts[index].place
            place = (own, same, with_holes, shifted)[(index + update + micro) % 4 if problem.tensors != "edges" else 1]
            param.grad_dtype = problem.grads
            param.grad = self.placed(index, values, own if problem.is_shifted else place, 1)

    def update(self, number: int) -> None:
        tail, weights = self.problem.tail, self.problem.loop.updates[number]
        for micro, weight in enumerate(weights or (None,)):
            self.set_grads(number, micro, weight)
            if weights:
                last = self.problem.loop.closed and micro == len(weights) - 1
                self.call(self.optimizer.accumulate, on_device(weight), last=last)
        if weights and self.problem.loop.closed:
            sums = {f"p.grad of {number} {i}": p.grad for i, p in enumerate(self.params) if p.grad is not None}
            self.found |= {name: value.detach().clone() for name, value in sums.items()}
        if tail.grad_scale is not None:
            self.optimizer.grad_scale = on_device(tail.grad_scale)
        if tail.found_inf is not None:
            self.optimizer.found_inf = torch.tensor(float(tail.found_inf) if number == 1 else 0.0)
        try:
            self.call(self.optimizer.step, normalizer=on_device(tail.normalizer))
        except RuntimeError as error:
            if tail.nonfinite != "raise":
                raise
            self.errors.append(str(error))
        outcome = inside.outcome(self.optimizer)
        if outcome is not None:  # behind the policies
            each = [] if outcome.coefficients is None else [outcome.coefficients]
            self.watched.outcomes += [values.clone() for values in (outcome.values, *each)]
        if self.problem.is_measured:
            noise = self.optimizer.noise_scale()
            self.found[f"metrics {number}"] = self.optimizer.metrics().values
            self.found[f"noise {number}"] = torch.stack([noise.signal, noise.noise, noise.windows])
        for name in ("grad_scale", "found_inf"):
            if hasattr(self.optimizer, name):
                delattr(self.optimizer, name)
        self.optimizer.zero_grad()
        if isinstance(self.lr, Tensor):
            self.lr.mul_(0.5)
        if number == 0:
            self.shift_states()

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        if not self.problem.flushes:
            function(*args, **options)
            return
        torch.set_flush_denormal(True)
        function(*args, **options)
        flushes = bool(torch.tensor(2.0**-126).mul(0.5).eq(0))
        torch.set_flush_denormal(False)
        assert flushes, "it left another float mode behind"

    def shift_states(self) -> None:
        for index, param in enumerate(self.params):
            entries = self.optimizer.state[param]
            streams = [name for name, value in entries.items() if isinstance(value, Tensor) and value.dim() > 0]
            for stream, name in enumerate(streams, start=2):
                if self.problem.is_shifted:
                    entries[name] = self.shift(index, entries[name], 2 + (stream - 2) % (STREAMS - 2))

    def result(self) -> Found:
        """All that is stored, in the order of memory, and the outcomes; on the CPU."""
        index_of = {id(param): index for index, param in enumerate(self.params)}
        order = [index_of[id(param)] for group in self.optimizer.param_groups for param in group["params"]]
        found = Found()
        for name, value in [*everything(self.optimizer).items(), *self.found.items()]:
            what, _, place = name.rpartition(" ")
            index = order[int(place)] if name not in self.found else int(place)
            if value.dim() > 0 and not self.plain and not what.endswith("scale"):
                value = self.layouts[index].in_memory(value)
            found[f"{what} {index}"] = value.detach().cpu().flatten()
        second_moments = case_named(self.problem.case).second_moments
        for name in [name for name in found if "_scale " in name]:  # codes of what is NaN, or 0, have no meaning
            codes, scales = found[name.replace("_scale ", " ")], found[name]
            is_second = name.partition("_scale ")[0] in second_moments
            unread = (scales == 255) | (scales == 0) & (is_second and not self.problem.reads_all)
            codes[unread.repeat_interleave(codecs.BLOCK)[: len(codes)]] = 0
        history = inside.memories(self.optimizer)["history"]
        if history is not None:
            found["history"] = history.cpu()
        words = inside.words(self.optimizer)
        if words is not None:
            found["words"] = words.cpu()
        outcomes = {f"outcome {i}": values.cpu() for i, values in enumerate(self.watched.outcomes)}
        return found | outcomes | {"skipped": self.optimizer.skipped_steps.cpu()}


def play(problem: Problem, backend: Any, device: str = "cpu", *, plain: bool = False) -> tuple[Found, list[str]]:
    """What there is in the end, and the errors on the way."""
    with tensors_on(device):
        run = Run(problem, backend, device, plain=plain)
        for number in range(len(problem.loop.updates)):
            run.update(number)
        return run.result(), run.errors


@functools.lru_cache(500)
def expected(problem: Problem) -> tuple[Found, list[str]]:
    return play(replace(problem, flushes=False, offload=False), ReferenceBackend(), plain=True)


def assert_conforms(problem: Problem, backend: Any, device: str = "cpu", threads: int = 1) -> None:
    """It solves the problem with the reference's bits, on so many threads of the CPU."""
    wanted = expected(problem)
    torch.set_num_threads(threads)
    found = play(problem, backend, device)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(1)
    assert found[1] == wanted[1]
    assert_all_same_bits(found[0], wanted[0])
