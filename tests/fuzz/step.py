"""The step: from gradients, in p.grad or in a window, to what parameters and states must be."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuzz.bounds import BF16, FP32, SECOND_MOMENTS, SMALLEST, TINY, UNIT, Bounded, norm_of, predicted
from fuzz.draws import number_of
from fuzz.subject import KNOWN, Refusal
from fuzz.window import Windows

Common = tuple[float, float, bool, float]  # of a ClipGroup: the norm, its error, whether all skip, max_grad_norm


class Side(Windows):
    def found(self) -> tuple[dict[int, Bounded], Refusal]:
        """The gradients that a step takes now, and whether it is refused."""
        live = self.live()
        unseen = [row for row in live if self.params[row].requires_grad and not self.is_hooked(row)]
        if self.handle is not None and self.phase == "idle" and unseen and self.is_readable():
            self.enter()  # a window of one
        if self.phase == "open" and (self.count if self.entered else live):
            return {}, RuntimeError
        if self.phase == "open" and not self.entered:
            is_empty = self.weighted and not self.of_tensors and self.total == 0
            return ({}, ValueError) if is_empty else ({row: self.mean(row) for row in self.sums}, None)
        if not self.is_readable():
            return {}, (TypeError, RuntimeError)
        return {row: Bounded.exact(self.params[row].grad) for row in live if row not in self.part} | self.part, None

    def is_bad_mean(self) -> bool:
        is_divided = bool(self.weighted) or self.drops
        return self.phase == "open" and is_divided and not 0 < self.total < math.inf

    def step(self, normalizer: Any, grad_scale: Any, found_inf: Any) -> None:
        normalizer, grad_scale, found_inf = number_of(normalizer), number_of(grad_scale), number_of(found_inf)
        given = {"grad_scale": grad_scale, "found_inf": found_inf}
        vars(self.optimizer).update({name: value for name, value in given.items() if value is not None})
        try:
            found = None if found_inf is None else float(found_inf)
            call = functools.partial(self.optimizer.step, normalizer=normalizer)
            self.expected_step(call, [normalizer, grad_scale], found=found, for_scaler=found_inf is not None)
        finally:
            for name in given:
                vars(self.optimizer).pop(name, None)

    def expected_step(
        self, call: Callable[[], Any], divisors: list[Any], *, found: float | None = None, for_scaler: bool = False,
        is_unchecked: bool = False, common: Common | None = None, given: dict[int, Bounded] | None = None,
    ) -> bool:  # fmt: skip
        """Any call that steps: whether it was made.

        Args:
            for_scaler, is_unchecked: an overflow is nothing to raise for; and no flag says what a scaler has seen.
            common, given: in a ClipGroup, and the gradients, which were measured before.
        """
        grads, refusal = self.found() if given is None else (given, None)
        if any(d is not None and not isinstance(d, Tensor) and not 0 < d < math.inf for d in divisors):
            refusal = ValueError  # looked at first
        if refusal is not None:
            return self.attempt(call, refusal)
        if self.phase == "closed" and not grads:
            self.end_window()
        factor = 1.0
        for divisor in (float(d) for d in divisors if d is not None):
            factor = factor / divisor if 0 < divisor < math.inf else math.nan
        on_device, is_divided = any(isinstance(d, Tensor) for d in divisors), any(d is not None for d in divisors)
        grads = {row: g.times(factor).rounded(8 * UNIT[FP32] if is_divided else 0.0) for row, g in grads.items()}
        nonfinite, clip = self.settings.get("nonfinite"), self.optimizer.max_grad_norm
        takes_norm = clip is not None or nonfinite in ("skip", "raise", "drop") or self.phase != "idle"
        takes_norm = takes_norm or common is not None or is_unchecked
        norm, error = norm_of(grads.values()) if common is None else common[:2]
        norm = math.nan if math.isnan(factor) or self.is_bad_mean() else norm
        is_bad = not math.isfinite(norm) if takes_norm else on_device and math.isnan(factor)
        skip = bool(found) or (is_bad and (nonfinite != "propagate" or is_unchecked))
        skip = bool(grads) and (skip if common is None else common[2])
        if skip and nonfinite == "raise" and not for_scaler:
            self.attempt(call, RuntimeError, ("param", "skipped"))
            if self.entered:  # the micro-batch has ended
                self.fold(dict(self.part), None, last=False, in_loss=True)
            return False
        phase, bits = self.phase, {row: (id(self.params[row].grad), self._grad_bits(row)) for row in self.live()}
        self.attempt(call)
        self.skips += skip
        if grads:
            self._check_outcome(norm, error, takes_norm, skip)
        if grads and not skip:
            self._check_step(grads, norm, error, clip if common is None else common[3])
        count = int(self.optimizer.skipped_steps)
        assert count == self.skips, f"skipped_steps is {count}, not {self.skips}"
        if phase != "idle" and (grads or phase == "open"):
            assert not self.live(), f"step() left p.grad of {self.live()} after a window"
            self.end_window()
        elif not self.foreign:
            same = {row: (id(self.params[row].grad), self._grad_bits(row)) for row in self.live()} == bits
            assert same, "step() without a window has written or exchanged p.grad"
        return True

    def skip_converting(self) -> None:
        """A step after an overflow: it writes nothing, but brings loaded states into their formats, to nearest."""
        before = [self.state_of(row) for row in range(len(self.params))]
        halves = [param.detach().clone() for param in self.params]
        for param in self.params:
            if param.grad_dtype == torch.float64:
                param.grad_dtype = param.dtype
            param.grad = torch.zeros_like(param, dtype=param.grad_dtype or param.dtype, requires_grad=False)
        self.optimizer.found_inf = torch.ones((), dtype=FP32)
        try:
            self.attempt(self.optimizer.step)
        finally:
            del self.optimizer.found_inf
        self.skips += 1
        kind = self.settings["state_dtype"]
        for row, (param, state) in enumerate(zip(self.params, self.states, strict=True)):
            param.grad = None
            masters = self.masters if param.dtype == BF16 else "whole"
            want = Bounded.exact(halves[row] if masters is None else self.full[row])
            want = want.rounded(2.0**-16) if masters == "split8" else want  # half of one in the 16th bit
            want.check(self.actual(row), f"parameter {row}, converted")
            now = self.state_of(row)
            assert before[row].keys() <= now.keys(), f"a conversion lost states of parameter {row}"
            for name, value in before[row].items():
                bound = Bounded.exact(value)
                if name != "step" and kind == BF16:
                    bound = bound.rounded(UNIT[BF16])
                elif name != "step" and kind == "8bit" and value.numel():
                    # A code has 4 bits of mantissa over its distance from 2^-7 (a second moment's 2^-15) of its block's
                    # scale, which is not above the largest value; the smallest second moment is 2^-17 of it.
                    second, largest = name in SECOND_MOMENTS, value.abs().max()
                    size = value.abs() + largest * 2.0 ** (-15 if second else -7)
                    bound.error += size / 32 + second * largest * 2.0**-17 + TINY
                bound.check(now[name], f"state {name} of parameter {row}, converted")
                if name in state:
                    state[name] = now[name]
            self.full[row] = self.actual(row).clone()

    def _grad_bits(self, row: int) -> Any:
        grad = self.params[row].grad
        return grad.double().nan_to_num(7e7).tolist() if grad.layout == torch.strided else None

    def _check_outcome(self, norm: float, error: float, takes_norm: bool, skip: bool) -> None:
        assert bool(self.optimizer.step_was_skipped) is skip, f"step_was_skipped, expected {skip}; norm {norm}"
        actual = self.optimizer.grad_norm
        if not takes_norm:
            assert actual.isnan() or skip, f"grad_norm is {actual}, and none was to be taken"
        elif not (skip and math.isnan(norm)):  # a bad divisor's
            is_right = abs(actual - norm) <= error + 1e-30 if math.isfinite(norm) else not actual.isfinite()
            assert is_right, f"grad_norm is {float(actual)!r}, expected {norm!r} +- {error:.1e}"

    def _check_step(self, grads: dict[int, Bounded], norm: float, error: float, limit: float | None) -> None:
        coefficient, relative = 1.0, 0.0
        if limit is not None:
            coefficient = math.nan if math.isnan(norm) else min(1.0, limit / (norm + 1e-6))
            relative = (error / (norm + 1e-6) if math.isfinite(norm) else 0.0) + 8 * UNIT[FP32]
        for row, given in grads.items():
            grad = given.times(coefficient).rounded(relative)
            self._check_row(row, grad.rounded(3 * self.grad_unit(row)) if self.foreign else grad)  # clipped in place

    def _check_row(self, row: int, grad: Bounded) -> None:
        param, state, kind = self.params[row], self.states[row], self.settings.get("state_dtype")
        group = next(g for g in self.optimizer.param_groups if any(param is p for p in g["params"]))
        update, count = self.update({key: group[key] for key in ("lr", *self.config["options"])}), state.get("step", 0)
        want, states = predicted(update, self.full[row], grad, state, float(group.get("weight_decay", 0.0)))
        want.value[grad.value.isnan()] = math.nan  # also where the sign of NaN is none
        if param.dtype != FP32 and self.masters is None:
            want.error += 2 * UNIT[param.dtype] * want.value.abs() + SMALLEST.get(param.dtype, 1e-38)
        if self.masters == "split8":
            want.error += 2.0**-14 * want.value.abs()
        is_finite = all(bool(each.value.isfinite().all()) for each in (want, *states.values()))
        actual, now = self.actual(row), self.state_of(row)
        want.check(actual, f"parameter {row} after step()")
        half = Bounded.exact(actual).rounded(UNIT[param.dtype] * 1.01)
        half.error += SMALLEST.get(param.dtype, 0.0)
        half.check(param, f"parameter {row} beside its master")
        if self.rule.startswith("Adam"):  # (others count for their noise, or with momentum only)
            assert float(now["step"]) == count + 1, f"step count of {row}: {now['step']}"
        for name in states.keys() & now.keys():
            bound = states[name].rounded(2 * UNIT[BF16] if kind == BF16 else 0.0)
            if kind == "8bit" and bound.value.numel():  # a float of 4 bits below its block's largest
                largest = bound.value.abs().max().nan_to_num(math.inf) * 2.0 ** (-12 if name.endswith("sq") else -9)
                bound = Bounded(bound.value, bound.error + bound.value.abs() / 8 + largest)
            # (torch's maximum of AMSGrad drops NaN, and 8 bits share one with their block.)
            if is_finite or (kind != "8bit" and self.settings["backend"] != "torch"):
                bound.check(now[name], f"state {name} of parameter {row}")
            state[name] = now[name]
        self.full[row] = actual.clone()


def step_together(
    sides: list[Side], call: Callable[[], Any], divisor: Any, limit: float, *, for_scaler: bool = False
) -> bool:
    """A call that steps the ClipGroup of these optimizers, with this max_grad_norm."""
    calls = [call, *[lambda: None] * len(sides)]
    # The call is made for the first of them: one that has gradients, for which it may be refused.
    parts = sorted(((side, *side.found()) for side in sides), key=lambda part: not part[1])
    refusals = [ValueError] if isinstance(divisor, float | int) and not 0 < divisor < math.inf else []
    for refusal in [refusal for *_, refusal in parts if refusal is not None]:
        refusals += refusal if isinstance(refusal, tuple) else [refusal]
    entered = [side for side in sides if side.entered]
    if refusals:  # (A window may have got its pending weight: the same sums.)
        is_known = entered and "refused after release" in KNOWN
        return not is_known and sides[0].attempt(call, tuple(refusals), ("param", "state", "grad", "skipped"))
    factor = 1.0 if divisor is None else 1.0 / float(divisor)
    norm, error = norm_of(g.times(factor).rounded(8 * UNIT[FP32]) for _, found, _ in parts for g in found.values())
    for side, found, _ in parts:
        if side.phase == "closed" and not found:
            side.end_window()
        norm = math.nan if found and side.is_bad_mean() else norm
        if side.entered:  # its micro-batch ends here
            side.sums, side.count, side.entered, side.part = dict(found), 1, False, {}
            side.arrived += 1
    skips = for_scaler or sides[0].settings["nonfinite"] != "propagate"
    common = norm, error, skips and not norm < math.inf, limit
    options = {"common": common, "for_scaler": for_scaler}
    steps = zip(calls, parts, strict=False)
    return all(side.expected_step(call, [divisor], given=found, **options) for call, (side, found, _) in steps)
