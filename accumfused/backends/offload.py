"""Offload: sums and states lie on the host, whose CPU folds and steps; the card holds weights and activations.

In: gradients on a card. `accumulate` sends them to the host, run by run of the plan's rows, and returns; a thread folds
them while the loop goes on. Out: `step` brings each run's weights to the host, steps there, and sends them back. The
host keeps no copy of the weights, so whatever else writes them is seen. The kernels are those of the CPU, and all
backends have one arithmetic: an offloaded run has the bits of one that is not.

Tensors on the host belong to a task: it has a plan of its own, of the rows of its run, as its slot holds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from accumfused.backends.cpu import CpuBackend
from accumfused.backends.transfer import Copies, Slot, Wait, Worker
from accumfused.core import graphs
from accumfused.core.norm import finish_norm
from accumfused.core.plan import Plan
from accumfused.core.protocol import ALONE, Commit, Fold, Hypers, Outcome, Scaling, at_hand
from accumfused.core.reader import has_own_memory
from accumfused.core.rows import HOST, Grads, Row
from accumfused.formats.numeric import ieee

# Of the tensors that travel together; a larger one travels alone. With what aligns them it is below 32 MiB, because
# torch rounds pinned memory up to a power of two.
RUN_BYTES = 31 * 2**20


class Offload:
    """Runs the three verbs on the host."""

    name = "cpu, offloaded"
    measures_folds = True
    is_captured = False

    def __init__(self) -> None:
        self.worker, self.copies = Worker(), Copies()
        self._cpu = CpuBackend()  # of the worker alone

    def prepare(self, plan: Plan) -> None:
        plan.reader.remember()
        plan.pending = self.worker

    def accumulate(self, plan: Plan, fold: Fold, partials: Tensor, commit: Commit = ALONE) -> None:
        self._check(plan)
        threads = max(1, torch.get_num_threads() - 1)  # the loop goes on meanwhile
        held = plan.reader.held()
        commit.begin()
        for run in _runs(plan, fold.sums):
            grads, sums, words = run.of(fold.grads), run.of(fold.sums), fold.words
            is_sum = [grad is accumulator for grad, accumulator in zip(grads, sums, strict=True)]
            stay = [
                is_held or (g is not None and _may_be_written(g))
                for g, is_held in zip(grads, held[run.span], strict=True)
            ]
            slot, arrived, grads = self._brought(grads, is_sum, stays=True in stay)
            part = fold.part(grads, sums, words=None if words is None else words[run.chunks])
            self.worker.submit(slot, self._accumulate, run, part, partials[run.chunks], threads, arrived)
        commit.end()

    def _accumulate(self, run: _Run, fold: Fold, partials: Tensor, threads: int, arrived: Wait) -> None:
        arrived()
        self._cpu.threads = threads
        self._cpu.accumulate(run.plan_with(self._cpu, fold.sums), fold, partials)

    def norm(self, plan: Plan, grads: Grads | None, partials: Tensor | None, scaling: Scaling) -> Outcome:
        self._check(plan)
        self.worker.wait()
        squares = None
        threads = torch.get_num_threads()
        if partials is not None and grads is not None:
            for run in _runs(plan, grads):
                slot, arrived, here = self._brought(run.of(grads), _are_here(run.of(grads)))
                self.worker.submit(slot, self._norm, run, here, partials[run.chunks], threads, arrived)
            self.worker.wait()
        if partials is not None:
            squares = self.segment_norms(plan, partials, torch.tensor([0, plan.chunks], device=HOST))[0]
        with ieee():
            return finish_norm(squares, scaling)

    def _norm(self, run: _Run, grads: Grads, partials: Tensor, threads: int, arrived: Wait) -> None:
        arrived()
        self._cpu.threads = threads
        self._cpu.norm(run.plan_with(self._cpu, grads), grads, partials, Scaling(HOST))

    def segment_norms(self, plan: Plan, partials: Tensor, bounds: Tensor) -> Tensor:
        return self._cpu.segment_norms(plan, partials, bounds)

    def step(self, plan: Plan, grads: Grads, hypers: Hypers, outcome: Outcome, commit: Commit = ALONE) -> None:
        self._check(plan)
        self.worker.wait()
        numbers = [tuple([at_hand(number, HOST) for number in group]) for group in hypers]
        commit.begin()
        for run in [] if bool(outcome.skipped) else _runs(plan, grads):
            rows, here = run.rows, run.of(grads)
            weights = Grads([row.tensor.detach() for row in rows])
            slot, arrived, both = self._brought(Grads([*weights, *here]), [False] * len(rows) + _are_here(here))
            places, here = Grads(both[: len(rows)]), Grads(both[len(rows) :])
            step = _Step(run, here, numbers, outcome, places, weights, torch.get_num_threads())
            self.worker.submit(slot, self._step, step, slot, arrived)
        self.worker.wait()
        self.copies.join()
        commit.end()

    def _step(self, step: _Step, slot: Slot, arrived: Wait) -> None:
        arrived()
        self._cpu.threads = step.threads
        part = step.run.plan_with(self._cpu, step.places, has_states=True)
        self._cpu.step(part, step.grads, step.hypers, step.outcome)
        slot.sent = self.copies.up(_there(step.places), _there(step.weights))

    def _check(self, plan: Plan) -> None:
        """Refuses a call that could not be made, before anything is written.

        Raises:
            RuntimeError: a task has failed; the process was forked; a graph is being captured, whose replay would copy,
                and nobody would fold or step.
        """
        self.worker.check()
        if any(map(graphs.is_capturing, plan.devices)):
            raise RuntimeError(
                "a CUDA graph is being captured, and offload=True works on the host, where a replay does nothing; "
                "capture forward and backward alone, and call accumulate() and step() after the replay"
            )

    def _brought(self, tensors: Grads, are_here: Sequence[bool], *, stays: bool = False) -> tuple[Slot, Wait, Grads]:
        """Takes a slot, and begins to copy tensors into it, but those that are here; returns all as they are here.

        Args:
            stays: the loop may write their memory again, so it waits there for the copies.
        """
        pairs = list(zip(tensors, are_here, strict=True))
        slot = self.worker.take()
        travelling = [tensor for tensor, is_here in pairs if tensor is not None and not is_here]
        places = slot.places_for(travelling)
        slot.filled = self.copies.down(travelling, places, stays=stays)
        arriving = iter(places)
        return slot, slot.filled, Grads([t if t is None or is_here else next(arriving) for t, is_here in pairs])


@dataclass(frozen=True)
class _Step:
    """The operands of a run's step, but its slot."""

    run: _Run
    grads: Grads
    hypers: Hypers
    outcome: Outcome
    places: Grads  # the weights here
    weights: Grads  # and on their card
    threads: int


@dataclass(frozen=True)
class _Run:
    """Consecutive rows of a plan, whose tensors travel together."""

    plan: Plan
    begin: int
    end: int

    @property
    def span(self) -> slice:
        return slice(self.begin, self.end)

    @property
    def rows(self) -> list[Row]:
        return self.plan.rows[self.span]

    def of(self, values: Sequence[Tensor | None]) -> Grads:
        """Takes the values of its rows."""
        return Grads(values[self.span])

    @property
    def chunks(self) -> slice:
        """Its chunks among those of the plan."""
        ends = [*(row.first_chunk for row in self.plan.rows[self.end : self.end + 1]), self.plan.chunks]
        return slice(self.rows[0].first_chunk, ends[0])

    def plan_with(self, backend: CpuBackend, tensors: Grads, *, has_states: bool = False) -> Plan:
        """Makes a plan of its rows, with these tensors in place of the parameters, and their states if they matter."""
        rows, chunks = list[Row](), self.chunks
        for row, tensor in zip(self.rows, tensors, strict=True):
            assert tensor is not None
            source = _AtHost(tensor, row.entries if has_states else {})
            chunk, has_state = row.first_chunk - chunks.start, has_states and row.has_state
            rows.append(replace(row, source=source, first_chunk=chunk, copy=None, shard=None, has_state=has_state))
        part = Plan(rows, self.plan.rules, chunks.stop - chunks.start, HOST)
        backend.prepare(part)
        part.table_reader.table.first_row = self.begin
        return part


@dataclass(frozen=True)
class _AtHost:
    """The place of a row's tensors while a task works on them."""

    param: Tensor
    entries: Mapping[str, Any]


def _runs(plan: Plan, tensors: Sequence[Tensor | None]) -> Iterator[_Run]:
    """Cuts the rows that have a tensor into runs of at most RUN_BYTES, or of one row."""
    begin, size = 0, 0
    for index, tensor in enumerate(tensors):
        if size and (tensor is None or size + tensor.nbytes > RUN_BYTES):
            yield _Run(plan, begin, index)
            size = 0
        if tensor is not None:
            begin, size = (index, tensor.nbytes or 1) if not size else (begin, size + tensor.nbytes)
    if size:
        yield _Run(plan, begin, len(tensors))


def _may_be_written(grad: Tensor) -> bool:
    """Tells whether others may write a gradient's memory after it is released: a bucket's, a graph's replay."""
    return not has_own_memory(grad) or graphs.has_static_memory(grad.device)


def _are_here(tensors: Grads) -> list[bool]:
    return [tensor is not None and tensor.device == HOST for tensor in tensors]


def _there(tensors: Grads) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]
