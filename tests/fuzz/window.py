"""Micro-batches and windows: what docs/internals/state-machine.md promises of them, in float64.

Each method is a call of a training loop. It says from the model's state what must come of the call (numbers within a
bound, or a refusal after which nothing has changed), makes the call, and compares.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor

from fuzz.bounds import FP32, SMALLEST, UNIT, Bounded
from fuzz.draws import number_of
from fuzz.subject import Refusal, Subject


class Windows(Subject):
    def backward(self, rows: list[int], seed: int, poison: float | None = None) -> None:
        slopes = {r: s for r, s in self.slopes(rows, seed, poison).items() if self.is_plain(r)}
        if self.handle is not None and not self.entered and any(map(self.is_hooked, slopes)):
            if self.phase == "closed" and not self.is_exposed():
                self.end_window()
            if self.phase != "closed":
                if self.weighted:
                    if all(map(self.is_hooked, slopes)) and all(self.params[r].grad is None for r in slopes):
                        self.attempt(lambda: self.loss(slopes).backward(), ValueError)
                    return
                self.enter()
        before = {r: None if self.params[r].grad is None else self.params[r].grad.detach().double() for r in slopes}
        self.attempt(lambda: slopes and self.loss(slopes).backward())
        for row, slope in slopes.items():
            want, known = Bounded.exact(slope).rounded(self.grad_unit(row)), before[row]
            if self.entered:
                self._add_part(row, want, known)
                continue
            grad = self.params[row].grad
            unit = max(UNIT[slope.dtype], UNIT[grad.dtype])  # a closed window's may be in another dtype
            if known is not None:
                want = (want.rounded(unit) + Bounded.exact(known)).rounded(unit)
                want.error += unit * known.abs()
            want.error += 4 * SMALLEST.get(slope.dtype, 0.0)
            if bool((want.value.abs() < 6e4).all()):  # beyond it is not fp16's
                want.check(grad, f"gradient {row} after backward()")

    def enter(self) -> None:
        """A micro-batch without a weight is folded during backward, or by a step that has no other."""
        self.entered, self.phase, self.weighted = True, "open", False

    def _add_part(self, row: int, want: Bounded, known: Tensor | None) -> None:
        """Parts may be added to the sum one by one."""
        if known is not None and row not in self.part:
            want = want + Bounded.exact(known)
        total = self.part[row] + want if row in self.part else want
        size = want.value.abs() + (total.value - want.value).abs()
        self.part[row] = Bounded(total.value, total.error + 4 * max(self.grad_unit(row), UNIT[FP32]) * size)

    def fold_refusal(self, weight: Any, *, last: bool, in_loss: bool) -> Refusal:
        """What the table says of a micro-batch that is folded now; gradients that were replaced end a closed window."""
        is_number = weight is not None and not isinstance(weight, Tensor)
        if is_number and not 0 <= weight < math.inf:
            return ValueError
        if in_loss and (self.entered or (self.live() and not self.is_exposed())):
            if self.phase == "closed":
                self.end_window()
            return (RuntimeError, ValueError)
        if (self.entered and weight is not None) or self.is_exposed():
            return RuntimeError
        if self.phase == "closed":
            self.end_window()
        if self.weighted is not None and self.weighted != (weight is not None):
            return (ValueError, RuntimeError)
        factor = 1.0 if in_loss else weight
        is_known = bool(self.weighted and self.total) and not (self.of_tensors or isinstance(factor, Tensor))
        if is_known and factor > 2.0**40 * self.unit:
            return (ValueError, RuntimeError)
        if not in_loss and not self.live() and not self.entered and not (is_number and weight == 0):
            return RuntimeError
        if last and is_number and not self.of_tensors and self.total + weight == 0:
            return (ValueError, RuntimeError, TypeError)
        return None if in_loss or self.is_readable() else (TypeError, RuntimeError)

    @property
    def drops(self) -> bool:
        """Whether a micro-batch that is not finite is left out."""
        return self.settings.get("nonfinite") == "drop"

    def is_lost(self, grads: dict[int, Bounded], weight: Any) -> bool:
        """Whether a micro-batch is left out as not finite, and not by its weight of 0 already."""
        is_finite = all(bool(each.value.isfinite().all()) for each in grads.values())
        return self.drops and not is_finite and (weight is None or float(weight) != 0)

    def fold(self, grads: dict[int, Bounded], weight: Any, *, last: bool, in_loss: bool) -> None:
        """The model's fold. Gradients that are weighted in the loss come so."""
        is_number, number = not isinstance(weight, Tensor), 1.0 if weight is None else float(weight)
        if self.drops and grads and not (is_number and number == 0):  # the device knows what is left
            is_number, number = False, number if all(bool(g.value.isfinite().all()) for g in grads.values()) else 0.0
            self.has_dropped |= self.is_lost(grads, weight)
        self.phase, self.weighted, self.entered, self.part = "open", weight is not None, False, {}
        self.arrived += 1
        self.of_tensors |= not is_number
        if number and not self.total:
            self.unit = 1.0 if in_loss else number
        self.total += number if number >= 0 else math.nan
        self.count += not is_number or number != 0
        for row, grad in grads.items() if not is_number or number != 0 else ():
            term = grad if in_loss else grad.times(number).rounded(2 * UNIT[FP32])
            term = Bounded.exact(torch.zeros_like(grad.value)) if number == 0 else term
            if row in self.sums:
                slack = UNIT[FP32] * self.sums[row].value.abs()  # the pending weight of the first
                term = (self.sums[row] + term).rounded(2 * UNIT[FP32])
                term.error += slack
            self.sums[row] = term
        left = [row for row in self.live() if not (last and row in self.sums)]
        assert not left, f"p.grad of parameters {left} was left after accumulate()"
        late = [row for row, p in enumerate(self.params) if p.requires_grad and not self.is_hooked(row)]
        assert self.handle is None or not late, f"parameters {late} are not released from the next micro-batch on"
        if last:
            self.phase = "closed"
            for row in self.sums if self.total != math.inf else ():  # then some are NaN
                self.mean(row).check(self.params[row].grad, f"the closed window's p.grad {row}")
            self.exposed = [weakref.ref(self.params[row].grad) for row in self.sums]

    def mean(self, row: int) -> Bounded:
        if not self.weighted and not (self.drops and self.total == 0):
            return self.sums[row]
        if not self.weighted:
            return self.sums[row].times(math.nan)
        factor = 1.0 / self.total if self.total and math.isfinite(self.total) else math.nan
        return self.sums[row].times(factor).rounded(6 * UNIT[FP32])

    def accumulate(self, weight: Any = None, last: bool = False) -> None:
        weight = number_of(weight)
        refusal = self.fold_refusal(weight, last=last, in_loss=False)
        bits = {row: self.params[row].grad.detach().clone() for row in self.live()} if refusal is None else {}
        grads = {row: Bounded.exact(grad) for row, grad in bits.items() if row not in self.part} | self.part
        is_left = not self.is_lost(grads, weight)
        is_alone = last and self.count == 0 and not self.part
        is_itself = is_left and is_alone and not isinstance(weight, Tensor)
        dropped = int(self.optimizer.dropped_micro_batches)
        if self.attempt(lambda: self.optimizer.accumulate(weight, last=last), refusal):
            assert int(self.optimizer.dropped_micro_batches) == dropped + (not is_left), "dropped_micro_batches"
            if self.kept is not None:
                self.kept.fill_(5.0)
            self.fold(grads, weight, last=last, in_loss=False)
            for row, value in bits.items() if is_itself and weight != 0 else ():
                same = torch.equal(value.float().nan_to_num(9e9), self.params[row].grad.nan_to_num(9e9))
                assert same, f"a window of one micro-batch has changed the bits of gradient {row}"

    def own_backward(
        self, rows: list[int], seed: int, weight: Any, last: bool, poison: float | None, dtype: torch.dtype
    ) -> None:
        """Args: dtype: of the loss. One in 16 bits may round the weight, which then multiplies the gradients."""
        weight, slopes = number_of(weight), self.slopes(rows, seed, poison)
        if not slopes:
            return
        loss, number = self.loss(slopes, dtype), 1.0 if weight is None else float(weight)
        holds = not isinstance(weight, Tensor) and float(torch.tensor(number, dtype=dtype)) == number
        in_loss = dtype == FP32 or weight is None or holds
        late = None if in_loss or self.handle is None else RuntimeError  # folded before anything can multiply them
        refusal, grads = self.fold_refusal(weight, last=last, in_loss=True) or late, {}
        for row, slope in slopes.items():
            grads[row] = Bounded.exact(slope).times(number if in_loss else 1.0).rounded(3 * self.grad_unit(row))
            grads[row].error += 4 * SMALLEST.get(slope.dtype, 0.0)
        if self.drops and any(bool((g.value.abs() > 3e4).any()) for g in grads.values()):  # perhaps inf in fp16
            return
        if self.attempt(lambda: self.optimizer.backward(loss, weight, last=last), refusal):
            self.fold(grads, weight, last=last, in_loss=in_loss)

    def zero_grad(self, set_to_none: bool = True) -> None:
        before = self.live() if not set_to_none and self.handle is None else []
        self.attempt(lambda: self.optimizer.zero_grad(set_to_none))
        assert self.live() == before, "zero_grad() left None, or did not"
        for grad in (self.params[row].grad for row in before):
            assert grad.is_sparse or not grad.detach().any(), "zero_grad(set_to_none=False)"
        self.end_window()
