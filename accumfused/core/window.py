"""The window: the micro-batches between two updates, as one sum in fp32 (or fp64, or bf16) for each parameter.

In: fresh `p.grad`s with their factors (weights.py). Out: sums, which become `p.grad` when `last=True` closes the
window, or go to the step with their divisor. An engine never changes the window that it has. It changes a draft, which
a `Commit` (protocol.py) puts in the window's place together with the launch that writes the sums.
docs/internals/state-machine.md draws the states, and the calls that each refuses.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accumfused.core import graphs
from accumfused.core.arena import Arena, keep_freed
from accumfused.core.habits import Habits
from accumfused.core.plan import Plan
from accumfused.core.protocol import ALONE, Agreement, Commit, Fold, Number, moved
from accumfused.core.reader import adoptable, setting_grads
from accumfused.core.rounding import SumNoise
from accumfused.core.rows import Grads, Row, check_size
from accumfused.core.weights import MicroBatch, WindowWeights
from accumfused.formats import shards
from accumfused.settings import Settings


class Phase(Enum):
    IDLE = "idle"  # no window; step() works on p.grad
    OPEN = "open"  # the sums are here, p.grad is None between micro-batches
    SEALED = "sealed"  # open, with the sums of all processes: it waits for its step
    CLOSED = "closed"  # p.grad is the sum
    BROKEN = "broken"  # a call of several launches ended between two of them: see protocol.Commit


OPEN_PHASES = (Phase.OPEN, Phase.SEALED)  # the window holds the sums, p.grad does not


@dataclass(frozen=True)
class Squares:
    """What the noise scale takes of a window's micro-batches: see noise.py."""

    sums: Tensor  # [plan.chunks], in the plan's dtype: of w |g|^2
    micro_batches: int = 0
    parts: Number = 0  # those whose weight is not 0
    added_up: Tensor | None = None  # the numbers of all processes, once these have added up their sums


@dataclass(eq=False)
class Window:
    """The state of one optimizer's gradients, from the first micro-batch to the step."""

    # Kept between windows.
    arena: Arena = field(default_factory=Arena)  # memory of sums that are no adopted gradients
    habits: Habits = field(default_factory=Habits)
    grad_dtypes: dict[Tensor, torch.dtype] = field(default_factory=dict)  # of exposed parameters with others in p.grad
    noise: SumNoise = field(default_factory=SumNoise)
    # [chunks], in the plan's dtype: folds and the norm write them.
    partials: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32, device="cpu"))

    phase: Phase = Phase.IDLE
    plan: Plan | None = None
    params: list[Tensor] = field(default_factory=list)  # of an open window
    sums: Grads = field(default_factory=Grads)  # one per parameter, each in its own dtype; None: no gradient yet
    rounds: bool = False  # some sums may be in bf16
    is_measured: list[bool] = field(default_factory=list)  # a sum's squares are in `partials`
    lacking: int = 0  # rows without a sum
    weights: WindowWeights = field(default_factory=WindowWeights)
    in_progress: MicroBatch | None = None
    agreed: Agreement | None = None  # of the processes
    divided: Number = 1.0  # by what the sums have been divided
    squares: Squares | None = None  # None: none are taken, or not of all micro-batches

    @property
    def is_open(self) -> bool:
        """Whether the window holds the sums, and p.grad does not."""
        return self.phase in OPEN_PHASES

    @property
    def holds_micro_batches(self) -> bool:
        """Whether a micro-batch is complete: a loop without accumulate() has only one in progress."""
        return self.is_open and not (self.in_progress is not None and self.weights.count <= 1)

    @property
    def present(self) -> int:
        """The number of sums."""
        return len(self.sums) - self.lacking

    def draft(self) -> Window:
        """Copies the window, to be changed: lists and numbers are replaced, never changed in place.

        `contribute` alone writes into the window itself, while a backward pass runs. Drafts share what is kept between
        windows, `partials` among it.
        """
        return copy.copy(self)

    # ---- a micro-batch ---------------------------------------------------------------------------------------------

    def refuse_broken(self) -> None:
        """Refuses any call but zero_grad() after one that was interrupted."""
        if self.phase is Phase.BROKEN:
            raise RuntimeError(
                "an accumulate() or step() ended between two of its launches (by Ctrl-C, or out of memory), so some "
                "tensors have it and some have not; call optimizer.zero_grad(), which drops the window, and go on"
            )

    def check(self, plan: Plan, grads: Grads, weight: Number | None, *, in_loss: bool) -> Window:
        """Refuses a wrong micro-batch before anything is written; returns the window that goes on."""
        self.refuse_broken()
        window = self
        if self.phase is Phase.CLOSED:
            if self.is_exposed(grads):
                raise RuntimeError(
                    "p.grad is still the previous window's accumulator; call optimizer.step() or optimizer.zero_grad() "
                    "after a window was closed, before the next backward() (a GradScaler that skips calls neither)"
                )
            window = self.ended()  # model.zero_grad() has released its gradients
        if self.phase is Phase.SEALED:
            raise RuntimeError(
                "the window is complete and waits for its step; call step() or zero_grad() before the next backward()"
            )
        if self.phase is Phase.OPEN:
            window = self.following(plan)
        window.weights.check(weight, plan, in_loss=in_loss)
        return window

    def is_exposed(self, grads: Grads) -> bool:
        """Tells whether p.grad is still a sum of a closed window."""
        exposed = {id(accumulator) for accumulator in self.sums if accumulator is not None}
        return any(id(grad) in exposed for grad in grads if grad is not None)

    def fitted(self, plan: Plan) -> Window:
        """Returns this window, or an empty one with memory that fits the plan."""
        arena, partials = self.arena.fitted(plan), self.partials
        if (partials.device, partials.dtype, partials.numel()) != (plan.device, plan.dtype, plan.chunks):
            partials = torch.empty(plan.chunks, dtype=plan.dtype, device=plan.device)
        if arena is self.arena and partials is self.partials:
            return self
        return Window(arena, self.habits, self.grad_dtypes, self.noise, partials)

    def opened(self, plan: Plan) -> Window:
        """Opens a window without micro-batches."""
        window, count = self.fitted(plan).ended(), len(plan.rows)
        window.phase, window.plan, window.params = Phase.OPEN, plan, plan.params
        window.rounds = plan.rounds_sums
        window.sums, window.is_measured, window.lacking = Grads([None] * count), [False] * count, count
        if plan.device.type == "cpu":  # a micro-batch's gradients, and as much for what lies between them
            keep_freed(2 * 4 * plan.numel)
        window.habits.see(plan)
        window.habits.begin()
        return window

    def borrowing(self, plan: Plan) -> Window:
        """Makes a window for one step, which takes p.grad as it is: an ordinary loop's, or a closed window's."""
        window = self.ended()
        if self.phase is Phase.CLOSED:  # `partials` keeps the squares of its sums: p.grad may have changed since
            window.partials = torch.empty(plan.chunks, dtype=plan.dtype, device=plan.device)
        window.plan, (window.sums, present) = plan, plan.reader.read_grads()
        window.is_measured, window.lacking = [False] * len(window.sums), len(window.sums) - present
        return window

    def entered(self, plan: Plan, weight: Number | None, *, in_loss: bool, is_finite: Tensor | None = None) -> Window:
        """Returns the window with one more micro-batch: it is in progress, counted, and has its factor."""
        window = self.opened(plan) if self.phase is Phase.IDLE else self.draft()
        window.weights, window.in_progress = self.weights.entered(weight, plan, in_loss=in_loss, is_finite=is_finite)
        return window

    def add(self, grads: Grads, commit: Commit, *, has_all_grads: bool, ends: bool) -> None:
        """Adds matched gradients of the micro-batch in progress to this draft's sums, and commits.

        Args:
            has_all_grads: every parameter has a gradient.
            ends: no more of its gradients will come.
        """
        plan, micro_batch = self.plan, self.in_progress
        assert plan is not None
        assert micro_batch is not None
        factor, folds = micro_batch.factor, list[Fold]()
        is_one = not isinstance(factor, Tensor) and factor == 1.0
        if is_one and not self.present and plan.reader.adopt_all(grads):  # nearly always, for a window's first
            self.sums, self.lacking, self.is_measured = grads, 0, [False] * len(grads)
        elif factor is not None and has_all_grads and not self.lacking and micro_batch.before is None:  # for others
            folds = [self._fold(grads, self.sums, factor)]
        elif factor is not None:
            folds = self._folds(plan, grads, micro_batch, factor, ends)
        if ends:
            self.in_progress = None
        if not folds:
            commit.end()
        for fold in folds:
            self._note(plan, fold, everywhere=has_all_grads and fold.sums is self.sums)
            # After each launch but the last the window is BROKEN.
            of_launch = commit if fold is folds[-1] else Commit(commit.begins, commit.begins)
            self._launch(plan, fold, of_launch)

    def _folds(self, plan: Plan, grads: Grads, micro_batch: MicroBatch, factor: Number, ends: bool) -> list[Fold]:
        """Returns the launches that add gradients; it makes those that copy first gradients to new memory itself."""
        before, again = micro_batch.before, micro_batch.indices
        first = Grads([g if s is None else None for g, s in zip(grads, self.sums, strict=True)])
        targets = Grads([None if g is None else s for g, s in zip(grads, self.sums, strict=True)])
        folds = list[Fold]()
        if before is not None:
            if ends:  # sums without a gradient, too: they become 0 if `before` is 0
                both = enumerate(zip(targets, self.sums, strict=True))
                targets = Grads([t if index in again else s for index, (t, s) in both])
            if again:  # a second part of a gradient
                added = Grads([t if index in again else None for index, t in enumerate(targets)])
                folds.append(self._fold(grads, added, factor))
                targets = Grads([None if index in again else t for index, t in enumerate(targets)])
            fresh = frozenset(index for index, grad in enumerate(grads) if grad is not None)
            self.in_progress = replace(micro_batch, indices=again | fresh)
        adds = any(accumulator is not None for accumulator in targets)
        if any(grad is not None for grad in first):  # into spare memory: a failure after it costs nothing
            folds = [*self._adopt_or_copy(plan, first, factor, may_scale=not adds), *folds]
        if adds:
            folds.append(self._fold(grads, targets, factor, before))
        return folds

    def _adopt_or_copy(self, plan: Plan, grads: Grads, factor: Number, *, may_scale: bool) -> list[Fold]:
        """Adopts first gradients of some parameters as their sums if nothing else refers to them, else copies them.

        Args:
            may_scale: an adopted gradient may be multiplied where it lies.

        Returns:
            The launch that multiplies adopted gradients, if there is one.
        """
        is_one = not isinstance(factor, Tensor) and factor == 1.0
        adopts = (is_one or may_scale) and not graphs.has_static_memory(plan.device)
        copied, adopted = Grads([None] * len(grads)), Grads([None] * len(grads))
        rows = zip(plan.rows, grads, self.arena.places, plan.reader.held(), strict=True)
        for index, (row, grad, place, is_held) in enumerate(rows):
            if grad is None:
                continue
            if grad is place or (adopts and not is_held and not row.is_bundled and adoptable(grad, row)):
                adopted[index] = grad
            else:
                check_size(grad, "gradient")
                copied[index] = grad
        first_sums = adopted
        self.is_measured = [m and g is None for m, g in zip(self.is_measured, grads, strict=True)]
        if any(grad is not None for grad in copied):
            copied = self.arena.apart(copied)
            fold = self._fold(copied, self.arena.places_for(plan, copied), factor, overwrites=True)
            first_sums = Grads([p if a is None else a for a, p in zip(adopted, fold.sums, strict=True)])
            self._note(plan, fold)
            self._launch(plan, fold)
        self.sums = Grads([s if n is None else n for s, n in zip(self.sums, first_sums, strict=True)])
        self.lacking = sum(s is None for s in self.sums)
        scales = not is_one and any(grad is not None for grad in adopted)
        return [self._fold(adopted, adopted, factor, overwrites=True)] if scales else []

    def _fold(
        self, grads: Grads, sums: Grads, factor: Number, before: Tensor | None = None, *, overwrites: bool = False
    ) -> Fold:
        """Makes a fold, which rounds sums in bf16 stochastically."""
        assert self.plan is not None
        words = self.noise.words(self.plan) if self.rounds else None
        return Fold(grads, sums, factor, before, overwrites, words, self.plan.exchange.rank)

    def _launch(self, plan: Plan, fold: Fold, commit: Commit = ALONE) -> None:
        """Launches a fold, and keeps what it reads: the commit releases the gradients, and any end drops the sums."""
        plan.record(fold.grads, fold.sums, Grads(fold.tensors()))
        plan.backend.accumulate(plan, fold, self.partials, commit)

    def _note(self, plan: Plan, fold: Fold, *, everywhere: bool = False) -> None:
        """Notes which sums a launch measures; `everywhere`: every row has a sum and a gradient."""
        measures = plan.backend.measures_folds and not fold.copies
        if everywhere:
            self.is_measured = [measures] * len(fold.sums)
        else:
            pairs = zip(fold.grads, fold.sums, self.is_measured, strict=True)
            self.is_measured = [m if s is None or g is None else measures for g, s, m in pairs]

    def contribute(self, index: int) -> tuple[Tensor, bool] | None:
        """Lets a backward add a row's gradient of the micro-batch to its sum directly; `add` needs none then.

        Returns:
            The sum, and whether it holds anything (else it is to be overwritten). None: a factor is to be
            applied, so the gradient must come by `add`.
        """
        micro_batch, plan = self.in_progress, self.plan
        assert plan is not None
        assert micro_batch is not None
        factor = micro_batch.factor
        if isinstance(factor, Tensor) or factor != 1.0 or micro_batch.before is not None:
            return None
        accumulator = self.sums[index]
        if accumulator is not None and accumulator.dtype is not plan.rows[index].form.dtype:
            return None  # a product would be rounded to the nearest
        holds = accumulator is not None
        if accumulator is None:
            plan.reader.forget_sums()
            accumulator = self.sums[index] = self.arena.place(plan, index)
            self.lacking -= 1
        self.is_measured[index] = False
        return accumulator, holds

    # ---- its end ---------------------------------------------------------------------------------------------------

    def divisor(self) -> Number:
        """Returns the number by which the sums are still to be divided."""
        return (self.weights.divisor if self.agreed is None else self.agreed.divisor) / self.divided

    def scale(self, factor: Number, commit: Commit) -> None:
        """Multiplies the sums of a draft in place, in a pass of its own: 8 bytes a parameter.

        Sums in bf16 are rounded to the nearest, in all processes alike.
        """
        plan = self.plan
        assert plan is not None
        if self.present:
            fold = Fold(self.sums, self.sums, factor, overwrites=True)
            self._note(plan, fold, everywhere=not self.lacking)
            self._launch(plan, fold, commit)
        else:
            commit.end()

    def agree(self, grads: Grads, *, seed: int, last: bool) -> Tensor | None:
        """Agrees with other processes, before a draft closes, on its weight, and on parameters with a sum or gradient.

        A parameter that has them elsewhere only gets a sum of zeros.

        Returns:
            Whether other processes close the window with `last`, if this one has no micro-batch: bool, shape [].
        """
        plan = self.plan
        assert plan is not None
        plan.wait()  # `bundle` moves sums
        is_empty = self.in_progress is not None and self.in_progress.factor is None
        present = [s is not None or (g is not None and not is_empty) for s, g in zip(self.sums, grads, strict=True)]
        weights = self.weights
        agreement = plan.exchange.agree(plan, weights.total, weights.is_weighted, present, seed=seed, last=last)
        if agreement is None:
            return None
        self.agreed, missing = agreement, agreement.missing
        sums = self.arena.bundle(plan, self.sums)
        if True in missing:
            zeros = Grads([row.tensor if m else None for row, m in zip(plan.rows, missing, strict=True)])
            for index, place in enumerate(self.arena.places_for(plan, zeros)):
                if place is not None:
                    sums[index] = place.zero_()
        self.sums, self.lacking = sums, sum(s is None for s in sums)
        return agreement.others_close

    def memory(self, plan: Plan) -> list[Tensor]:
        """Lists the memory that processes add up, which is that of the sums; empty if none of them has a sum."""
        plan.wait()
        if self.agreed is not None and self.agreed.stand_ins is not None:
            return self.agreed.stand_ins
        return self.arena.memory_of(plan, self.sums) if self.present else []

    def sealed(self) -> Window:
        """Returns the window with the sums of all processes; their sums of squares are unknown."""
        return replace(self, phase=Phase.SEALED, is_measured=[False] * len(self.sums))

    def exposed(self) -> tuple[Window, partial[Any]]:
        """Closes the window; returns it, and the call that makes its sums p.grad, even if autograd's dtype differs."""
        assert self.plan is not None
        self.plan.wait()
        window = replace(self, phase=Phase.CLOSED, sums=Grads(self.sums))
        params, grads = list[Tensor](), list[Tensor]()
        for index, (row, accumulator) in enumerate(zip(self.plan.rows, self.sums, strict=True)):
            if accumulator is None:
                continue
            param = row.param
            if param.grad_dtype not in (accumulator.dtype, None):
                self.grad_dtypes[param], param.grad_dtype = param.grad_dtype, None
            accumulator = moved(accumulator, row.tensor.device)  # from the host, where autograd takes no gradient
            grad = accumulator if row.shard is None else row.shard.whole(accumulator)
            window.sums[index] = shards.local(grad)  # `is_exposed` looks for this object
            params.append(param)
            grads.append(grad)
        torch.autograd.graph.increment_version(grads)  # kernels have written them
        return window, setting_grads(params, grads)

    def unmeasured(self, plan: Plan, grads: Grads) -> Grads | None:
        """Returns the sums (as kernels read them) without squares in `partials`, where rows without a sum get 0.

        None: all have squares.
        """
        if self.lacking and True not in self.is_measured:
            self.partials.zero_()
        elif self.lacking:
            bounds = [*(row.first_chunk for row in plan.rows), plan.chunks]
            rows = zip(self.sums, bounds, bounds[1:], strict=False)
            torch._foreach_zero_([self.partials[begin:end] for s, begin, end in rows if s is None])
        if False not in self.is_measured:
            return None
        if True not in self.is_measured:
            return grads
        return Grads([None if is_measured else grad for grad, is_measured in zip(grads, self.is_measured, strict=True)])

    def ended(self) -> Window:
        """Makes an empty window, which has the memory and habits of this one."""
        return Window(self.arena, self.habits, self.grad_dtypes, self.noise, self.partials)

    def restore_grad_dtypes(self) -> None:
        """Restores the dtypes of p.grad that `exposed` has replaced, once the sums there are released."""
        for param, dtype in list(self.grad_dtypes.items()):
            if param.grad is None:
                param.grad_dtype = dtype
                del self.grad_dtypes[param]

    # ---- plans, copies ---------------------------------------------------------------------------------------------

    def following(self, plan: Plan) -> Window:
        """Returns the window with a newer plan: added parameters become new rows, others must be unchanged."""
        if plan is self.plan:
            return self
        if self.plan is not None:
            self.plan.wait()
        params, count = plan.params, len(self.params)
        if len(params) < count or any(a is not b for a, b in zip(self.params, params, strict=False)):
            raise RuntimeError(
                "parameters were removed or reordered while a window is open; call step() or zero_grad() first"
            )
        for row, accumulator in zip(plan.rows, self.sums, strict=False):
            _refuse_moved(row, accumulator)
        added = len(plan.rows) - count
        sums, is_measured = Grads([*self.sums, *[None] * added]), [*self.is_measured, *[False] * added]
        for index, (row, accumulator) in enumerate(zip(plan.rows, self.sums, strict=False)):
            if accumulator is not None and accumulator.stride() != row.tensor.stride():
                laid_out = torch.empty_like(row.tensor, dtype=accumulator.dtype, device=row.sum_device)
                sums[index] = laid_out.copy_(accumulator)
                is_measured[index] = False  # the norm's order is that of memory
        self.arena.add_rows(plan)
        old_rows = [] if self.plan is None else self.plan.rows
        partials = self.partials.to(plan.device, plan.dtype)
        if any(old.first_chunk != new.first_chunk for old, new in zip(old_rows, plan.rows, strict=False)):  # resized
            partials, is_measured = partials.new_zeros(plan.chunks), [False] * len(plan.rows)
        if len(partials) < plan.chunks:
            partials = torch.cat([partials, partials.new_zeros(plan.chunks - len(partials))])
        both = zip(old_rows, plan.rows, strict=False)
        if self.plan is None or any(new.is_initialized and not old.is_initialized for old, new in both):
            self.habits.see(plan)  # a lazy module's first forward pass has written its parameters
        else:
            self.habits.see_new(plan, count)
        return replace(
            self, plan=plan, params=params, sums=sums, is_measured=is_measured,
            lacking=self.lacking + added, weights=self.weights.on(plan.device), partials=partials,
            rounds=self.rounds or plan.rounds_sums,
        )  # fmt: skip

    @classmethod
    def resumed(cls, params: list[Tensor], sums: Grads, numbers: Sequence[float]) -> Window:
        """Makes an open window of a checkpoint's sums and numbers."""
        habits = Habits()
        habits.loaded()
        return cls(
            Arena(len(params)), habits, phase=Phase.OPEN, params=params, sums=Grads(sums),
            is_measured=[False] * len(sums), lacking=sum(s is None for s in sums),
            weights=WindowWeights.resumed(numbers),
            rounds=any(s is not None and s.dtype is torch.bfloat16 for s in sums),
        )  # fmt: skip

    def copied(self) -> Window:
        """Copies an open window and its sums, for a copy of the optimizer."""
        sums = Grads([None if s is None else s.clone() for s in self.sums])
        return replace(
            self, plan=None, params=list(self.params), sums=sums, is_measured=[False] * len(sums),
            arena=Arena(len(sums)), partials=self.partials[:0], habits=Habits(), grad_dtypes={}, noise=SumNoise(),
        )  # fmt: skip


DROPS_AND_SCALER = (
    'nonfinite="drop" leaves overflows out before torch.amp.GradScaler can see them, so its scale would grow until the '
    "largest micro-batches never count; take accumfused.GradScaler, which backs off for them, or leave nonfinite= out"
)


def refuse_stock_scaler(window: Window, settings: Settings) -> None:
    """Refuses torch's GradScaler where it cannot unscale gradients, or would not hear of overflows."""
    if settings.nonfinite == "drop" and window.phase is not Phase.IDLE:
        raise RuntimeError(DROPS_AND_SCALER)
    refuse_unscaling(window, settings.process_group)


def refuse_unscaling(window: Window, process_group: Any) -> None:
    """Refuses to unscale gradients that are not in p.grad, or not added up."""
    is_idle = window.phase is Phase.IDLE
    if window.is_open or (process_group is not None and is_idle):
        what = "a GradScaler cannot see into an open window"
        if is_idle:
            what = "gradients are not added up over the processes yet, so a GradScaler would decide on its own"
        raise RuntimeError(
            f"{what}; close it with accumulate(..., last=True) before "
            "scaler.unscale_() or scaler.step() (accumfused.GradScaler.step() needs no closed one)"
        )


def _refuse_moved(row: Row, accumulator: Tensor | None) -> None:
    """Refuses a parameter that no longer fits its sum."""
    if accumulator is None:
        return
    param, home, place = row.owned, row.sum_device, (accumulator.device, accumulator.shape)
    dtypes = (row.form.dtype, torch.bfloat16 if row.form.dtype is torch.float32 else row.form.dtype)
    if place != (home, param.shape) or accumulator.dtype not in dtypes:
        raise RuntimeError(
            f"a parameter became {param.dtype} of shape {list(param.shape)} on {param.device} while a window "
            f"is open; its accumulator has shape {list(accumulator.shape)} and is on {accumulator.device}. "
            "Move the model back, or call zero_grad() and begin the window again"
        )
