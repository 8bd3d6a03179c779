"""Micro-batches and windows: what docs/state-machine.md promises of them, in float64."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor

from walks.numbers import UNIT, Bounded
from walks.subject import Refusal, Subject, address, holds, require, smallest, weight_of


class Windows(Subject):
    """Each method is a call of a training loop.

    It says from the model's state what must come of the call (numbers within a bound, or a refusal after which nothing
    has changed), makes the call, and compares.
    """

    def backward(self, rows: list[int], seed: int, poison: str | None = None) -> None:
        slopes = self.slopes(rows, seed, poison)
        slopes = {r: s for r, s in slopes.items() if self.adds_to(self.params[r].grad) and not self.is_alias(r)}
        if not slopes:
            return
        if self.handle is not None and not self.entered and any(map(self.is_hooked, slopes)):
            if self.phase == "closed" and not self.is_exposed():
                self._end()
            if self.phase != "closed":
                if self.weighted:
                    if all(map(self.is_hooked, slopes)) and not any(self.params[r].grad is not None for r in slopes):
                        self.attempt(lambda: self.loss(slopes).backward(), ValueError)
                    return
                self.entered, self.phase, self.weighted = True, "open", False
        before = {r: None if self.params[r].grad is None else self.params[r].grad.detach().double() for r in slopes}
        self.attempt(lambda: self.loss(slopes).backward())
        for row, slope in slopes.items():
            want = Bounded.exact(slope).rounded(self.grad_unit(row))
            known = before[row]
            if self.entered and self.handle is not None:
                self.backwards += 1
                if known is not None and row not in self.part:
                    want = want + Bounded.exact(known)
                known_part = self.part.get(row)
                terms = [want] if known_part is None else [known_part, want]
                for term in terms:  # they may be added to the sum one by one
                    term.error += 2 * max(self.grad_unit(row), UNIT[torch.float32]) * term.value.abs()
                    term.error += 2 * max(self.grad_unit(row), UNIT[torch.float32]) * slope.double().abs()
                self.part[row] = want if known_part is None else known_part + want
                continue
            grad = self.params[row].grad
            require(grad is not None, f"backward() left no gradient of parameter {row}")
            unit = max(UNIT[slope.dtype], UNIT[grad.dtype])  # a closed window's may be in another dtype
            total = want if known is None else (want.rounded(unit) + Bounded.exact(known)).rounded(unit)
            total.error += unit * (known.abs() if known is not None else 0) + smallest(slope.dtype)
            sharers = sum(p.grad is not None and address(p.grad) == address(grad) for p in self.params)
            if sharers > 1 and grad.numel():
                continue  # memory of two gradients has got both
            if (
                bool(total.value.isfinite().all())
                and float(total.value.abs().max() if total.value.numel() else 0) < 6e4
            ):
                different = total.differs(grad)
                require(different is None, f"gradient {row} after backward(): {different}")

    def _fold_refusal(self, weight: Any, *, last: bool, in_loss: bool) -> Refusal:
        """What the table says of a micro-batch that is folded now; "replaced" gradients end the closed window."""
        if not isinstance(weight, Tensor) and weight is not None:
            if isinstance(weight, str):
                return TypeError
            if not math.isfinite(weight) or weight < 0:
                return ValueError
        elif isinstance(weight, Tensor) and weight.numel() != 1:
            return ValueError
        if in_loss and (self.entered or (self.live() and not self.is_exposed())):
            if self.phase == "closed":
                self._end()
            return (RuntimeError, ValueError)
        if self.entered and weight is not None:
            return RuntimeError
        if self.is_exposed():
            return RuntimeError
        if self.phase == "closed":
            self._end()
        if self.weighted is not None and self.weighted != (weight is not None):
            return (ValueError, RuntimeError)
        is_empty = weight is not None and not isinstance(weight, Tensor) and weight == 0
        if not in_loss and not self.live() and not self.entered and not is_empty:
            return RuntimeError
        is_known = not self.of_tensors and not isinstance(weight, Tensor)
        if last and weight is not None and is_known and self.total + weight == 0:
            return (ValueError, RuntimeError, TypeError)
        if not in_loss and not self.is_readable():
            return (TypeError, RuntimeError)
        return None

    def _fold(self, grads: dict[int, Bounded], weight: Any, *, last: bool, in_loss: bool) -> None:
        """The model's fold. Gradients that are weighted in the loss come so."""
        self.phase, self.weighted = "open", weight is not None
        self.folds += isinstance(weight, Tensor) or weight != 0
        number = 1.0 if weight is None else float(weight)
        is_number = not isinstance(weight, Tensor)
        self.of_tensors |= isinstance(weight, Tensor)
        self.total += number if number >= 0 else math.nan
        is_left_out = number == 0
        self.entered, self.part = False, {}
        unit = UNIT[torch.float32]
        if not (is_left_out and is_number):
            self.count += 1
            for row, grad in grads.items():
                term = grad if in_loss else grad.times(number).rounded(2 * unit)
                if is_left_out:
                    term = Bounded.exact(torch.zeros_like(grad.value))
                if row in self.sums:
                    term = (self.sums[row] + term).rounded(2 * unit)
                    term.error += unit * self.sums[row].value.abs()  # the pending weight of the first
                else:
                    term = term.rounded(0.0)
                self.sums[row] = term
        if last:
            self._close()

    def _mean(self, row: int) -> Bounded:
        total = self.sums[row]
        if not self.weighted:
            return total
        factor = 1.0 / self.total if self.total else math.nan
        if not math.isfinite(self.total):
            factor = math.nan
        return total.times(factor).rounded(6 * UNIT[torch.float32])

    def _close(self) -> None:
        self.phase = "closed"
        for row in self.sums:
            grad = self.params[row].grad
            require(grad is not None, f"a closed window has no p.grad of parameter {row}")
            if self.weighted and not 0 < self.total < math.inf:
                continue  # a bad weight: what it has touched is NaN, others' gradients need not be
            different = self._mean(row).differs(grad)
            require(different is None, f"closed window's p.grad {row}: {different}")
        self.exposed = {row: weakref.ref(self.params[row].grad) for row in self.sums}
        self.ever_exposed.extend(self.exposed.values())
        self.total = 0.0

    def _end(self) -> None:
        self.phase = "idle"
        self.forget_window()

    def accumulate(self, weight: Any = None, last: bool = False) -> None:
        weight = weight_of(weight)
        refusal = self._fold_refusal(weight, last=last, in_loss=False)
        grads, bits = {}, {}
        if refusal is None:  # (A reference to a gradient that is held here would keep it from being adopted.)
            bits = {row: self.params[row].grad.detach().clone() for row in self.live()}
            grads = {row: Bounded.exact(grad) for row, grad in bits.items() if row not in self.part} | self.part
        alone = self.count == 0 and not self.part
        if self.attempt(lambda: self.optimizer.accumulate(weight, last=last), refusal):
            self._fold(grads, weight, last=last, in_loss=False)
            self._check_released(last)
            if (
                last
                and alone
                and self.count == 1
                and (weight is None or (not isinstance(weight, Tensor) and weight > 0))
            ):
                for row, value in bits.items():
                    same = torch.equal(value.float().nan_to_num(9e9), self.params[row].grad.nan_to_num(9e9))
                    require(same, f"a window of one micro-batch has changed the bits of gradient {row}")

    def _check_released(self, last: bool) -> None:
        left = [row for row in self.live() if not (last and row in self.sums)]
        require(not left, f"p.grad of parameters {left} was left after accumulate()")

    def own_backward(
        self, rows: list[int], seed: int, weight: Any = None, last: bool = False, poison: str | None = None,
        narrow: bool = False,
    ) -> None:  # fmt: skip
        weight = weight_of(weight)
        slopes = self.slopes(rows, seed, poison)
        if not slopes:
            return
        loss = self.loss(slopes, narrow=narrow)
        refusal = self._fold_refusal(weight, last=last, in_loss=True)
        in_loss = weight is None or holds(loss.dtype, weight)
        if not in_loss and self.handle is not None:
            refusal = RuntimeError if refusal is None else (RuntimeError, ValueError, TypeError)
        units = {row: self.grad_unit(row) for row in slopes}
        if self.attempt(lambda: self.optimizer.backward(loss, weight, last=last), refusal):
            number = 1.0 if weight is None or not in_loss else float(weight)
            grads = {}
            for row, slope in slopes.items():
                grads[row] = Bounded.exact(slope).times(number).rounded(3 * units[row])
                grads[row].error += smallest(slope.dtype)
            self._fold(grads, weight, last=last, in_loss=in_loss)
            self._check_released(last)

    def zero_grad(self, set_to_none: bool = True) -> None:
        before = self.live()
        set_to_none = set_to_none or any(map(self.is_alias, before))
        self.attempt(lambda: self.optimizer.zero_grad(set_to_none))
        none = set_to_none or self.handle is not None
        for row, param in enumerate(self.params):
            if none or row not in before:
                require(param.grad is None, f"zero_grad() left p.grad of parameter {row}")
            else:
                zero = param.grad is not None and not param.grad.is_sparse and not param.grad.detach().any()
                require(zero or param.grad.is_sparse, f"zero_grad(set_to_none=False): p.grad {row}")
        self._end()
        self.check_unwritten()
