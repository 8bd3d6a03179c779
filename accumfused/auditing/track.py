"""One optimizer under watch: the micro-batches since its last step, and the windows that its steps have made."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from accumfused.auditing.again import Calls
from accumfused.auditing.fit import Grads, TensorDifference, added, on_host
from accumfused.auditing.graph import main_of
from accumfused.auditing.hints import expected_of
from accumfused.auditing.passes import Opened, Pass, number_losses
from accumfused.auditing.step import LOST, WORST, Part, Step, judge
from accumfused.optimizer import FusedOptimizer

_CLOSE = 1e-3  # relative: norms of one gradient in several processes
_HALF = torch.float16, torch.bfloat16


class Track:
    """Collects, for one optimizer, what `Watch` sees.

    Args:
        names: of parameters, by id.
        group: gives the process group over which gradients are averaged or summed; None: one process.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], group: Callable[[], Any]) -> None:
        self.optimizer, self._group = optimizer, group
        self.params: list[Tensor] = [param for each in optimizer.param_groups for param in each["params"]]
        self.names = [names.get(id(param), f"parameter {index}") for index, param in enumerate(self.params)]
        self._ids = {id(param) for param in self.params}
        self.expected: int | None = None
        self.windows: list[Step] = []
        self.skipped = 0  # windows whose gradients were not finite
        self.errors: list[str] = []
        self.now = Opened()
        self._losses = 1  # of a micro-batch, in windows before

    @property
    def group(self) -> Any:
        """The process group, which a script may make after its optimizer."""
        return self._group()

    def places(self) -> set[int]:
        """The addresses of p.grad."""
        return {param.grad.data_ptr() for param in self.params if param.grad is not None and not param.grad.is_sparse}

    def begin(self) -> None:
        """A backward pass begins."""
        self._see_clip()
        sums = torch.stack([_sum(param.detach()) for param in self.params])
        before = sums if self.now.sums is None else self.now.sums
        if self.now.passes and not torch.equal(sums, before):
            if not self._folds and all(p.grad is None or not bool(p.grad.any()) for p in self.params):
                self.now = Opened()  # gradients were used otherwise, to look for a sharper loss for instance
            else:
                changed = int(sums.ne(before).sum())
                where = f"{changed} tensors changed after micro-batch {len(self.now.passes)}"
                self.now.flags.setdefault("weights_changed", where)
        if not self.now.passes:
            self.now.sums = sums

    def see_before(self, micro_batch: Pass | None, param: Tensor) -> None:
        """A gradient of the micro-batch is about to be added to p.grad."""
        before = param.grad
        if id(param) not in self._ids or (before is not None and before.is_sparse):
            return
        is_later = bool(self.now.passes) and self.now.passes[0] is not micro_batch
        if before is None or not bool(before.any()):
            earlier = (each for each in self.now.passes[self.now.reset :] if each is not micro_batch)
            brought = [each.grads[id(param)] for each in earlier if id(param) in each.grads]
            if brought and bool(sum(brought[1:], brought[0]).any()) and not self._folds:  # they may cancel
                gone = len(self.now.passes) - (self.now.passes[-1] is micro_batch)
                is_for_inputs = all(each.reading.ends_beside for each in self.now.passes[:gone])
                if is_for_inputs and self.expected == 1:
                    self.now.passes = self.now.passes[gone:]
                else:
                    self.now.reset, self.now.is_for_inputs = gone, is_for_inputs
        elif not is_later:
            self.now.stale.setdefault(id(param), on_host(before))
        elif before.dtype in _HALF:
            self.now.flags["sums_in_16_bits"] = f"p.grad is {before.dtype}".replace("torch.", "")

    def add(self, micro_batch: Pass, param: Tensor) -> None:
        """A micro-batch has brought this parameter's gradient."""
        if id(param) not in self._ids or any(each is micro_batch for each in self.now.passes):
            return
        self.close_skipped()
        number = len(self.now.passes)
        if self.now.is_clipped:
            self.now.flags["clip"] = f"after micro-batch {number}"
        if self.now.is_unscaled:
            self.now.flags["unscale"] = f"after micro-batch {number}, and others follow"
        self.now.before_clip, self.now.is_clipped = None, False
        self.now.passes.append(micro_batch)

    def close_skipped(self) -> None:
        """Closes a window whose step a GradScaler has skipped."""
        if self.now.is_unscaled and not all(map(_is_finite, self.now.passes)):
            self.skipped += 1
            self._close()

    def before_clip(self) -> None:
        """Gradients may be about to be clipped."""
        if self.now.before_clip is None:
            self.now.before_clip = self._grads()

    def _see_clip(self) -> None:
        """Whether they were."""
        if self.now.before_clip is not None:
            pairs = zip(self.now.before_clip, self._grads(), strict=True)
            self.now.is_clipped |= any(
                a is not None and b is not None and not torch.equal(a, b) and bool(b.any()) for a, b in pairs
            )

    def unscale(self) -> None:
        """Gradients are about to be unscaled."""
        self._see_clip()
        self.now.is_unscaled = True
        if self.now.is_clipped:
            self.now.flags["unscale"] = "after the clip"
        else:
            self.now.before_clip = None

    def step(
        self, calls: Calls, ended: Callable[[Optimizer], None],
        optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:  # fmt: skip
        """The optimizer is about to step: its window is complete now, or when the step's closure returns."""

        def complete(result: Any = None) -> Any:
            self._complete(calls, kwargs)
            ended(optimizer)
            return result

        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return complete()  # type: ignore[no-any-return]
        others = {name: kwargs[name] for name in kwargs if name != "closure"}
        return (*args[:1], lambda: complete(closure()), *args[2:]), others

    def _complete(self, calls: Calls, kwargs: Mapping[str, Any]) -> None:
        taken = _taken(self.optimizer, self.params, kwargs, self.group) if self.now.passes else []
        if not all(grad is None or bool(grad.isfinite().all()) for grad in taken):
            self.skipped += 1
        elif self.now.passes:
            # A norm that is taken for a log looks like a clip if the gradients are divided after it.
            before = [] if self.now.before_clip is None else [self.now.before_clip]
            try:
                windows = [self._window(each, calls) for each in (*before, taken)]
            except Exception as error:  # the loop goes on
                self.errors.append(f"a step was not judged: {type(error).__name__}: {error}")
            else:
                self.windows.append(min(windows, key=lambda step: WORST.index(step.verdict)))
                self._losses = max(self._losses, self.windows[-1].losses)
                for share, micro_batch in self.windows[-1].pairs:
                    micro_batch.is_used |= abs(share) >= LOST
        elif any(grad is not None and bool(grad.any()) for grad in self._grads()):
            self.windows.append(_of_no_backward())
        self._close()

    def _close(self) -> None:
        for micro_batch, param in itertools.product(self.now.passes, self._ids):
            micro_batch.grads.pop(param, None)
            micro_batch.grads_of_others.pop(param, None)
            micro_batch.call = micro_batch.inputs = None
        self.now = Opened()

    @property
    def _folds(self) -> bool:
        """Whether p.grad is empty between micro-batches, because the sums are in the optimizer."""
        optimizer = self.optimizer
        return isinstance(optimizer, FusedOptimizer) and optimizer._engine.window.is_open

    def _grads(self) -> list[Tensor | None]:
        return [None if param.grad is None else on_host(param.grad) for param in self.params]

    def _window(self, taken: Grads, calls: Calls) -> Step:
        passes = self.now.passes
        number_losses(passes, self.expected, self._losses)
        parts = [self._parts(each) for each in passes]
        world = 1
        if self.group is not None:
            passes, parts, world = _of_all(passes, parts, self.group)
            norms = torch.tensor([0.0 if grad is None else float(grad.double().norm()) for grad in taken])
            if not all(torch.allclose(each, norms, rtol=_CLOSE) for each in _gathered(norms, self.group)):
                self.now.flags["unsynced"] = "the norms of the gradients that they take differ"
        stale: list[Grads] = [[self.now.stale.get(id(param)) for param in self.params]] if self.now.stale else []
        ids = [id(param) for param in self.params]
        expected = self.expected or (expected_of(self.windows) if self.windows else None)
        opened = replace(self.now, passes=passes, flags=dict(self.now.flags))
        step = judge(opened, parts, stale, taken, self.names, expected=expected, world=world)
        if self.now.is_for_inputs:
            step.reasons["unread"] = "a backward pass, now zeroed, may have been for the gradients of inputs"
        if self.group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            step.reasons["unread"] = "there are several processes: their gradients are compared with process_group="
        if world == 1:
            calls.judge(step, taken, ids, self.names, expected or step.arrived)
        return step

    def _parts(self, each: Pass) -> list[Part]:
        terms, main = each.reading.terms, each.main
        if not _is_finite(each):
            return [Part(terms, main, [None for _ in self.params], each.samples, each.loss)]
        whole = [each.grads.get(id(param)) for param in self.params]
        apart = [each.grads_of_others.get(id(param)) for param in self.params]
        if all(grad is None for grad in apart):
            return [Part(terms, main, whole, each.samples, each.loss)]
        rest = [term for term in terms if all(term is not other for other in each.others)]
        return [
            Part(rest, main, added([whole, apart], [1.0, -1.0]), each.samples, each.loss),
            Part(each.others, main_of(each.others) or main, apart, each.samples, each.loss),
        ]


def _of_no_backward() -> Step:
    """A step whose gradients came otherwise: there is nothing to judge them by."""
    why = "no backward() was seen before a step, as where torch.autograd.grad() gives its gradients"
    fits = [TensorDifference("", 1.0, 0.0)]
    return Step([], [], [], 0.0, 0.0, {}, 1, 0, fits=fits, reasons={"unread": why})


def _sum(param: Tensor) -> Tensor:
    part = torch.view_as_real(param) if param.is_complex() else param
    dtype = torch.float32 if param.device.type == "mps" else torch.float64  # which Apple's GPUs lack
    return part.sum(dtype=dtype).cpu().double()


def _is_finite(micro_batch: Pass) -> bool:
    """False also for one without a single target: its mean is NaN, and a weight of 0 leaves it out."""
    return all(bool(grad.isfinite().all()) for grad in micro_batch.grads.values())


def _scale_of(optimizer: Any) -> Any:
    """The factor by which the step itself divides."""
    given = optimizer._engine.scaler_divisors if isinstance(optimizer, FusedOptimizer) else None
    return given.grad_scale if given is not None else getattr(optimizer, "grad_scale", None)


def _taken(optimizer: Optimizer, params: list[Tensor], kwargs: Mapping[str, Any], group: Any) -> list[Tensor | None]:
    """The gradients that a step takes: p.grad, or an open window's mean, divided as the step divides."""
    sums: dict[int, Tensor] = {}
    divisor = 1.0
    if isinstance(optimizer, FusedOptimizer) and optimizer._engine.window.is_open:
        window = optimizer._engine.window
        sums = {
            id(param): on_host(own) for param, own in zip(window.params, window.sums, strict=True) if own is not None
        }
        divisor = float(window.divisor())
        if group is not None and optimizer._engine.settings.process_group is not None:  # the step will add them up
            everyone = _gathered(([sums.get(id(param)) for param in params], divisor), group)
            for index, param in enumerate(params):
                own = [grads[index] for grads, _ in everyone if grads[index] is not None]
                sums |= {id(param): torch.stack(own).sum(0)} if own else {}
            divisor = sum(each for _, each in everyone) if window.weights.is_weighted else 1.0
    else:
        sums = {id(param): on_host(param.grad) for param in params if param.grad is not None}
    for number in (_scale_of(optimizer), kwargs.get("normalizer")):
        divisor *= 1.0 if number is None else float(number)
    return [sums[id(param)] / divisor if id(param) in sums else None for param in params]


def _of_all(passes: list[Pass], parts: list[list[Part]], group: Any) -> tuple[list[Pass], list[list[Part]], int]:
    """The micro-batches of all processes with their gradients, and the number of processes."""
    mine = [replace(each, grads={}, grads_of_others={}, call=None, inputs=None) for each in passes]
    everyone = _gathered((mine, parts), group)
    found: list[Pass] = []
    for rank, (theirs, _) in enumerate(everyone):
        own = passes if rank == dist.get_rank(group) else theirs
        for each in own:
            each.rank = rank
        found += own
    return found, [part for _, theirs in everyone for part in theirs], len(everyone)


def _gathered(value: Any, group: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group)
    return found
