"""The window: the micro-batches between two updates, summed in fp32.

In: fresh `p.grad`s and their weights. Out: one accumulator per parameter, exposed as `p.grad` when the window is closed
with `last=True`, or handed to the step. docs/state-machine.md draws the states and what is refused in each.
"""

from __future__ import annotations

import contextlib
import copy
import math
import operator
from collections.abc import Iterable, Iterator
from enum import Enum

import torch
from torch import Tensor

from accumfused.core import graphs, memory
from accumfused.core.arena import Arena, adoptable
from accumfused.core.heap import Pin
from accumfused.core.plan import Grads, Plan
from accumfused.core.protocol import OVERWRITE, Backend, Exchange, Fold, on_device
from accumfused.formats import shards
from accumfused.formats.kinds import PARAM_DTYPES
from accumfused.loop.batch_norm import warn_of_batch_norm
from accumfused.warn import warn

_EXPONENT = 0x7FF << 52  # those bits of an fp64 number
_READY = 0  # index of the weight 1: what an accumulator holds under it is already weighted


class Phase(Enum):
    IDLE = "idle"  # no window; step() works on p.grad
    OPEN = "open"  # the sums are here, p.grad is None between micro-batches
    CLOSED = "closed"  # p.grad is the accumulator


class Window:
    """The accumulators of one optimizer, from the first micro-batch to the step."""

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self._plan: Plan | None = None
        self.params: list[Tensor] = []
        self.accumulators: Grads = []
        self.partials = torch.empty(0, dtype=torch.float32)  # their sums of squares, per chunk
        self._held: list[int] = []  # see Fold.held
        self._summed: list[bool] = []  # the row's partials are those of its accumulator
        self._weights = torch.empty(0, dtype=torch.float64)  # see Fold.weights
        self.is_weighted: bool | None = None  # None: no micro-batch yet
        self.total: float | Tensor = 0.0  # of the weights
        self._unit: float | Tensor = 1.0  # the power of two that weights are divided by, or squares leave fp32's range
        self._count = 0  # micro-batches that were folded
        self.entered = False  # a micro-batch is in progress: it counts already, and more of its gradients may come
        self._index: int | None = None  # of its weight; None: it is left out
        self._divisor: float | Tensor | None = None  # what processes have agreed on; else the total
        self.is_reduced = False  # they are sums over processes
        self._closed: int | None = None  # index under which rows are held that are divided already
        self.arena = Arena(0)  # for gradients that cannot be adopted; kept between windows
        self._pin = Pin()
        self._grad_dtypes: dict[int, torch.dtype] = {}  # of exposed parameters whose p.grad has another one
        self._launches = 0
        self._versions: list[int] = []  # of the parameters, when the window began
        self._warned_of_writes = False
        self._drops = 0  # open windows since the last step
        self._steps_after_drops = 0  # in a row
        self._warned_of_drops = False
        self._sought_batch_norm = False

    def begin(self, plan: Plan, grads: Grads, weight: float | Tensor | None) -> None:
        """Refuses a micro-batch that cannot be right, before anything is written."""
        if self.phase is Phase.CLOSED:
            if self.is_exposed(grads):
                raise RuntimeError(
                    "p.grad is still the previous window's accumulator; call optimizer.step() or optimizer.zero_grad() "
                    "after a window was closed, before the next backward() (a GradScaler that skips calls neither)"
                )
            self.drop()  # model.zero_grad() has released it
        if self.is_reduced:
            raise RuntimeError(
                "the window is complete and waits for its step; call step() or zero_grad() before the next backward()"
            )
        if self.phase is Phase.OPEN:
            self.follow(plan)
        if self.is_weighted is not None and self.is_weighted != (weight is not None):
            raise ValueError(
                "weights for some micro-batches of a window only; this one began "
                f"{'with' if self.is_weighted else 'without'} weights: give one to every micro-batch, or to none"
            )

    @property
    def micro_batches(self) -> int:
        """How many were folded."""
        return self._count

    @property
    def is_first_entered(self) -> bool:
        """Whether the micro-batch in progress is the window's first: a loop without accumulate() has no other."""
        return self.entered and self._count <= 1

    def is_exposed(self, grads: Grads) -> bool:
        """Whether p.grad is still an accumulator of a closed window."""
        exposed = {id(accumulator) for accumulator in self.accumulators if accumulator is not None}
        return any(id(grad) in exposed for grad in grads if grad is not None)

    def watch_writes(self) -> None:
        """Before a window closes: its micro-batches were to have the same weights. Writes through `.data` pass."""
        if self._warned_of_writes or self._versions == [param._version for param in self.params]:
            return
        warn(
            "a parameter was written while a window was open (by Embedding(max_norm=...), another step, load_state_dict"
            "?), so the gradients in its sum are those of different weights; write parameters between step() and the "
            "next backward()"
        )
        self._warned_of_writes = True

    def see_weights(self) -> None:
        """The parameters are what our own writes have made of them."""
        self._versions = [param._version for param in self.params]

    def follow(self, plan: Plan) -> None:
        """Goes on with a newer plan: added parameters come in as new rows, others must be what they were."""
        if plan is self._plan:
            return
        if self._plan is None:  # it was resumed
            self._weights, self.partials = self._weights.to(plan.device), self.partials.to(plan.device)
        known = len(self.params)
        if len(plan.params) < known or any(a is not b for a, b in zip(self.params, plan.params, strict=False)):
            raise RuntimeError(
                "parameters were removed or reordered while a window is open; call step() or zero_grad() first"
            )
        for param, accumulator in zip((row.owned for row in plan.rows), self.accumulators, strict=False):
            if accumulator is not None and (
                (param.device, param.shape) != (accumulator.device, accumulator.shape)
                or param.dtype not in PARAM_DTYPES
            ):
                raise RuntimeError(
                    f"a parameter became {param.dtype} of shape {list(param.shape)} on {param.device} while a window "
                    f"is open; its accumulator has shape {list(accumulator.shape)} and is on {accumulator.device}. "
                    "Move the model back, or call zero_grad() and begin the window again"
                )
        for row, accumulator in enumerate(self.accumulators):
            if accumulator is not None and accumulator.stride() != plan.rows[row].tensor.stride():
                self.accumulators[row] = _laid_out(accumulator, plan.rows[row].tensor)
                self._summed[row] = False  # the norm's order is that of memory
        if self._plan is not None and any(
            old.first_chunk != new.first_chunk for old, new in zip(self._plan.rows, plan.rows, strict=False)
        ):  # one was resized
            self.partials, self._summed = self.partials.new_zeros(plan.chunks), [False] * known
        new = len(plan.params) - known
        self._plan, self.params = plan, list(plan.params)
        self._versions += [param._version for param in plan.params[len(self._versions) :]]
        self.accumulators += [None] * new
        self._held += [OVERWRITE] * new
        self._summed += [False] * new
        self.arena.add_rows(new)
        self.partials = torch.cat([self.partials, self.partials.new_zeros(plan.chunks - len(self.partials))])

    def weights_held(self, total: float | Tensor) -> list[Tensor]:
        """What `resumed` needs with each accumulator: fp64 [4], see checkpoint.py. Args: total: of the weights."""
        unit = (-self._unit if isinstance(self.total, Tensor) else self._unit) if self.is_weighted else 0.0
        numbers = [torch.as_tensor(n, dtype=torch.float64).to(self._weights) for n in (total, self._count, unit)]
        factors = {index: self._weights[max(index, _READY)] for index in set(self._held)}
        rows = {index: torch.stack([factor, *(n.reshape(()) for n in numbers)]) for index, factor in factors.items()}
        return [rows[index] for index in self._held]

    @classmethod
    def resumed(cls, rows: list[tuple[Tensor, Tensor | None, list[float] | None]]) -> Window:
        """An open window from parameters, their accumulators, and `weights_held()` of each, on the host."""
        window, known = cls(), {1.0: _READY}
        window.phase, window.arena = Phase.OPEN, Arena(len(rows))
        for param, accumulator, weights in rows:
            factor, total, count, unit = weights or (1.0, 0.0, 0.0, 0.0)
            factor = math.nan if math.isnan(factor) else factor  # one NaN equals itself in a dictionary
            window.params.append(param)
            window.accumulators.append(accumulator)
            window._held.append(OVERWRITE if accumulator is None else known.setdefault(factor, len(known)))
            window._summed.append(False)
            if weights is not None:
                is_read = unit >= 0 and math.isfinite(total)  # else it is for the step to skip, and not for us to raise
                window.total = total if is_read else torch.tensor(total, dtype=torch.float64, device="cpu")
                window._count, window.is_weighted, window._unit = int(count), unit != 0, abs(unit) or 1.0
        window._weights = torch.tensor([*known, *[1.0] * (window._count + 1)], dtype=torch.float64, device="cpu")
        return window

    def copied(self) -> Window:
        """The same sums in memory of their own, for a copy of the optimizer."""
        twin, rows = copy.copy(self), len(self.params)
        twin.params, twin._held, twin._weights = list(self.params), list(self._held), self._weights.clone()
        twin.accumulators = [None if a is None else a.clone() for a in self.accumulators]
        twin._plan, twin.arena, twin._grad_dtypes, twin._versions = None, Arena(rows), {}, []
        twin.partials, twin._summed = self.partials[:0], [False] * rows
        return twin

    def check_total(self, weight: float | Tensor | None) -> None:
        """Refuses to close a window whose weights, this one included, are all zero."""
        if self.is_weighted is False or weight is None or isinstance(self.total, Tensor) or isinstance(weight, Tensor):
            return
        if self._divisor is not None:  # other processes have weights too
            return
        if self.total + weight == 0:
            raise ValueError(
                "the weights of this window are all zero, so it has no mean; call zero_grad() in place of the step"
            )

    def enter(self, plan: Plan, weight: float | Tensor | None, exchange: Exchange, *, in_loss: bool) -> None:
        """Begins a micro-batch: it and its weight count once, however many folds bring its gradients.

        Args:
            weight: None: a plain sum.
            in_loss: the loss was multiplied by the weight, so the gradients are already.
        """
        is_own = not (in_loss and exchange.has_means)  # others' weights may be others
        if self.phase is Phase.IDLE:
            self.open(plan)
        self.entered, self.is_weighted, self._index = True, weight is not None, _READY
        if isinstance(weight, Tensor):
            weight = _on_device(weight, plan.device)
        is_first = not isinstance(self.total, Tensor) and self.total == 0
        if is_first and weight is not None and not in_loss and exchange.is_alone:
            self._unit = _power_of_two(weight)
        is_empty = not isinstance(weight, Tensor) and weight == 0
        if weight is not None and not is_empty:
            weight = weight / self._unit
            self.total = self.total + weight
        if is_own and is_empty:
            self._index = None
            return
        self._count += 1
        if not in_loss and weight is not None:
            self._index = self._weigh(weight, self._count)
        elif is_own and isinstance(weight, Tensor):
            # A masked mean of nothing is NaN, also times 0.
            self._index = self._weigh((weight != 0) / self._unit, self._count)
        elif isinstance(self._unit, Tensor) or self._unit != 1.0:
            self._index = self._weigh(1.0 / self._unit, self._count)

    def fold(self, plan: Plan, backend: Backend, grads: Grads, complete: bool, *, last: bool, ends: bool) -> None:
        """Adds matched gradients of the micro-batch that was entered.

        Args:
            complete: there is a gradient for every parameter.
            last: the micro-batch closes the window; to be said with each of its folds.
            ends: no more of its gradients will come: `p.grad` is released.
        """
        if self._index is None:
            grads, complete = [None] * len(grads), False
        self._add(plan, backend, grads, complete, self._closing_scale() if last else None, ends)
        if plan.device.type == "cpu":
            self._pin.hold(grads)
        if not ends:
            return
        self.entered = False
        plan.release_gradients()
        if self._count == 2 and not self._sought_batch_norm:  # last, so that all is well where a warning is an error
            self._sought_batch_norm = True
            warn_of_batch_norm(self.params)

    def settle(self, plan: Plan, backend: Backend) -> float | Tensor:
        """Brings every accumulator under one common factor, for the step to divide by, and returns it."""
        if not self.is_weighted and self._divisor is None:
            return 1.0
        alone = self._only_weight()
        if alone is not None:
            return self.total / self._weights[alone] if isinstance(self.total, Tensor) else 1.0
        if max(self._held, default=OVERWRITE) > _READY:
            pending: Grads = [a if h > _READY else None for a, h in zip(self.accumulators, self._held, strict=True)]
            self._launch(plan, backend, [None] * len(pending), pending, _READY, 1.0)
        return self.total if self._divisor is None else self._divisor

    def agree(self, plan: Plan, divisor: Tensor, missing: list[bool]) -> None:
        """What processes have told each other before they close the window: see `reduction.Reduction.exchange`.

        Args:
            divisor: of the sums of all processes, fp64, shape [].
            missing: which parameters have a gradient elsewhere only: they get an accumulator of zeros.
        """
        self._divisor = divisor
        self.accumulators = self.arena.bundle(plan, self.accumulators)
        if True in missing:
            self.arena.extend(plan, [row.tensor if m else None for row, m in zip(plan.rows, missing, strict=True)])
        for row, is_missing in enumerate(missing):
            zeros = self.arena.places[row]
            if is_missing and zeros is not None:
                self.accumulators[row] = zeros.zero_()
                self._held[row] = _READY

    def present(self, grads: Grads) -> list[bool]:
        """Which parameters have a sum, or get one by these gradients."""
        grads = [None] * len(grads) if self._index is None else grads
        return [a is not None or g is not None for a, g in zip(self.accumulators, grads, strict=True)]

    def reduced(self) -> None:
        """The accumulators are sums over processes now, and their sums of squares are not known."""
        self._summed, self.is_reduced = [False] * len(self._summed), True
        torch.autograd.graph.increment_version([a for a in self.accumulators if a is not None])

    def expose(self) -> None:
        """Closes the window: p.grad becomes the accumulator, also where autograd's gradient has another dtype."""
        self.phase = Phase.CLOSED
        for index, (param, accumulator) in enumerate(zip(self.params, self.accumulators, strict=True)):
            if accumulator is None:
                continue
            dtype = getattr(param, "grad_dtype", torch.float32)
            if dtype not in (accumulator.dtype, None):
                self._grad_dtypes[index] = dtype
                param.grad_dtype = None
            assert self._plan is not None
            shard = self._plan.rows[index].shard
            if shard is None:
                param.grad = accumulator
            else:
                param.grad = shard.whole(accumulator)
                self.accumulators[index] = shards.local(param.grad)  # by which it is known again

    def cast(self) -> None:
        """p.grad of a closed window in the dtype of its parameter, for a step of torch's: some refuse another."""
        for index, (param, accumulator) in enumerate(zip(self.params, self.accumulators, strict=True)):
            grad, dtype = param.grad, getattr(param, "grad_dtype", None)
            if grad is None or grad.dtype == param.dtype or dtype not in (None, param.dtype):
                continue
            param.grad = grad.to(param.dtype)
            if shards.local(grad) is accumulator:
                self.accumulators[index] = shards.local(param.grad)

    def stale(self, grads: Grads) -> Grads | None:
        """Those accumulators whose sums of squares are not in `partials`, if any."""
        if False not in self._summed:
            return None
        return [None if summed else grad for grad, summed in zip(grads, self._summed, strict=True)]

    def consume(self, params: Iterable[Tensor]) -> None:
        """A step was made, or skipped: the window is over, and what it took of these parameters is released."""
        if self.phase is Phase.CLOSED:
            for param in params:
                param.grad = None
        self._steps_after_drops = self._steps_after_drops + 1 if self._drops else 0
        self._drops = 0
        self._end()

    def watch_drops(self) -> None:
        """Before a window is dropped: warns, once, where that happens again and again."""
        if self._warned_of_drops or not self._holds_micro_batches:
            return
        if self._drops:
            what = "two accumulation windows in a row were dropped without a step"
        elif self._steps_after_drops >= 2:
            what = "accumulation windows were dropped before each of the last steps"
        else:
            return
        warn(
            f"{what}; zero_grad() drops the window: call it (if at all) after optimizer.step(), not between the "
            "micro-batches of a window"
        )
        self._warned_of_drops = True

    @property
    def _holds_micro_batches(self) -> bool:
        """A closed window a GradScaler may have skipped; and a plain zero_grad() is lawful as often as one likes."""
        return self.phase is Phase.OPEN and not self.is_first_entered

    def drop(self) -> None:
        """The window is over without a step."""
        self.watch_drops()
        self._drops += self._holds_micro_batches
        if self.phase is not Phase.IDLE:
            self._end()

    @contextlib.contextmanager
    def undone_by_an_error(self) -> Iterator[None]:
        """A micro-batch that comes to nothing (out of memory, say) does not count: what it brought stays in p.grad.

        It counts from its first launch on. One that goes on with a micro-batch that was begun before is not undone.
        """
        before = dict(vars(self))
        accumulators, held, summed = list(self.accumulators), list(self._held), list(self._summed)
        try:
            yield
        except BaseException:
            if not before["entered"] and self._launches == before["_launches"]:
                vars(self).update(before)
                self.accumulators, self._held, self._summed = accumulators, held, summed
            raise

    # ---- parts -----------------------------------------------------------------------------------------------------

    def open(self, plan: Plan) -> None:
        """Begins a window, with no micro-batch yet."""
        same = len(self.params) == len(plan.params) and all(map(operator.is_, self.params, plan.params))
        if not same:
            self.params, self.arena = list(plan.params), Arena(len(plan.params))
            self._grad_dtypes.clear()
        self._plan = plan
        rows = len(plan.params)
        self.accumulators, self._held, self._summed = [None] * rows, [OVERWRITE] * rows, [False] * rows
        self.partials = torch.zeros(plan.chunks, dtype=torch.float32, device=plan.device)
        self._weights = torch.ones(8, dtype=torch.float64, device=plan.device)
        self.phase = Phase.OPEN
        self.see_weights()

    def _end(self) -> None:
        for index, dtype in list(self._grad_dtypes.items()):
            if self.params[index].grad is None:
                self.params[index].grad_dtype = dtype
                del self._grad_dtypes[index]
        self.phase = Phase.IDLE
        self._plan = None
        self.accumulators, self._held, self._summed = [], [], []
        self.is_weighted, self.total, self._unit, self._count, self.entered = None, 0.0, 1.0, 0, False
        self._closed, self._divisor, self.is_reduced = None, None, False

    def _weigh(self, weight: float | Tensor, index: int) -> int:
        while index >= len(self._weights):
            self._weights = torch.cat([self._weights, torch.ones_like(self._weights)])
        place = self._weights[index]
        if isinstance(weight, Tensor):
            place.copy_(weight)
        else:
            place.fill_(weight)  # `self._weights[index] = number` would wait for a GPU
        return index

    def _only_weight(self) -> int | None:
        """The index of the weight that all accumulators wait for, if one micro-batch was all: its mean is itself."""
        pending = set(self._held) - {OVERWRITE}
        if self._divisor is not None or self._closed is not None:
            return None
        return pending.pop() if self._count == 1 and len(pending) == 1 and _READY not in pending else None

    def _waits_for_closing(self, scale: float) -> bool:
        """Whether accumulators that this fold adds nothing to must change too: by the scale, or by their own weight."""
        return self._only_weight() is None and (scale != 1.0 or max(self._held, default=OVERWRITE) > _READY)

    def _closing_scale(self) -> float | Tensor:
        if self._divisor is not None:
            return 1.0 / self._divisor
        return 1.0 / self.total if self.is_weighted else 1.0

    def _add(
        self, plan: Plan, backend: Backend, grads: Grads, complete: bool, scale: float | Tensor | None, ends: bool
    ) -> None:
        """Args: scale: of the folds that close the window; ends: this is the last of them."""
        added, rows, index = grads, self.accumulators, self._index or _READY
        if OVERWRITE in self._held or not complete:
            first: Grads = [g if a is None else None for g, a in zip(grads, self.accumulators, strict=True)]
            added = [g if a is not None else None for g, a in zip(grads, self.accumulators, strict=True)]
            self._take_first(plan, backend, first, index)
            rows = [None if g is None else a for a, g in zip(self.accumulators, added, strict=True)]
        closes = isinstance(scale, Tensor) or (scale is not None and self._waits_for_closing(scale))
        if closes:  # it rescales them all, each once
            both = zip(self.accumulators, grads, self._held, strict=True)
            rows = [a if g is not None or (ends and h != self._closed) else None for a, g, h in both]
        self._launch(plan, backend, added, rows, index, 1.0 if scale is None else scale)
        if closes and not ends:
            self._closed = self._weigh(self.total, self._count + 1)  # times the scale it is 1
            self._held = [h if g is None else self._closed for g, h in zip(grads, self._held, strict=True)]

    def _launch(
        self,
        plan: Plan,
        backend: Backend,
        grads: Grads,
        rows: Grads,
        index: int,
        scale: float | Tensor,
    ) -> None:
        folded = [accumulator for accumulator in rows if accumulator is not None]
        if not folded:
            return
        backend.accumulate(plan, Fold(grads, rows, self._held, self._weights, index, scale), self.partials)
        self._launches += 1
        if len(folded) == len(rows):
            self._held, self._summed = [_READY] * len(rows), [backend.measures_folds] * len(rows)
        else:
            self._held = [h if a is None else _READY for a, h in zip(rows, self._held, strict=True)]
            self._summed = [s if a is None else backend.measures_folds for a, s in zip(rows, self._summed, strict=True)]
        torch.autograd.graph.increment_version(folded)

    def _take_first(self, plan: Plan, backend: Backend, grads: Grads, index: int) -> None:
        """The window's first gradients of some parameters: adopted where nobody else has them, else copied.

        Either way they are held as they came; their weight is applied with the next fold.
        """
        if all(grad is None for grad in grads):
            return
        adopts = not graphs.has_static_memory(plan.device)
        copied: Grads = [None] * len(grads)
        taken = list(self.accumulators)
        rows = zip(grads, self.arena.places, plan.held(), strict=True)
        for row, (grad, place, is_held) in enumerate(rows):
            if grad is None:
                continue
            if grad is place or (adopts and not is_held and not plan.rows[row].is_bundled and adoptable(grad)):
                taken[row] = grad
            else:
                memory.check_size(grad, "gradient")
                copied[row] = grad
        if any(grad is not None for grad in copied):
            copied = self.arena.apart(copied)
            self.arena.extend(plan, copied)
            copies: Grads = [None if g is None else a for g, a in zip(copied, self.arena.places, strict=True)]
            self._launch(plan, backend, copied, copies, _READY, 1.0)
            taken = [a if copy is None else copy for a, copy in zip(taken, copies, strict=True)]
        self.accumulators = taken
        for row, grad in enumerate(grads):
            if grad is not None:
                self._held[row], self._summed[row] = index, False


def _on_device(weight: Tensor, device: torch.device) -> Tensor:
    """fp64, shape []; a negative weight becomes NaN: the norm is then non-finite and the step is skipped."""
    weight = on_device(weight, device, torch.float64)
    return torch.where(weight >= 0, weight, torch.nan)


def _power_of_two(weight: float | Tensor) -> float | Tensor:
    """The one at or below a weight (1 for 0, inf and NaN): dividing by it changes no bit of a mantissa."""
    if not isinstance(weight, Tensor):
        return math.ldexp(1.0, math.frexp(weight)[1] - 1) if weight > 0 else 1.0
    is_usual = (weight >= torch.finfo(weight.dtype).smallest_normal) & weight.isfinite()
    usual = torch.where(is_usual, weight, torch.ones_like(weight))
    return (usual.view(torch.int64) & _EXPONENT).view(torch.float64)


def _laid_out(accumulator: Tensor, tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, dtype=accumulator.dtype, requires_grad=False).copy_(accumulator)
