"""The step: from gradients, in p.grad or in a window, to what parameters and states must be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from walks.numbers import FORMULAS, SMALLEST, UNIT, Bounded, norm_of, of_oracle, of_torch, predicted
from walks.subject import FOREIGN, TINY_BF16, Refusal, divisors_given, require, weight_of
from walks.windows import Windows


class Side(Windows):
    """An optimizer under test, whole; a world has one, or two that are clipped together."""

    def taken(self) -> tuple[dict[int, Bounded], Refusal]:
        """The gradients that a step takes now, and whether it is refused."""
        live = self.live()
        unseen = [row for row in live if self.params[row].requires_grad and not self.is_hooked(row)]
        if self.handle is not None and self.phase == "idle" and unseen and self.is_readable():
            self.entered, self.phase, self.weighted = True, "open", False  # a window of one
        if self.entered and self.count:
            return {}, RuntimeError
        if self.phase == "open" and not self.entered:
            if live:
                return {}, RuntimeError
            if self.weighted and not self.of_tensors and self.total == 0:
                return {}, ValueError
            return {row: self._mean(row) for row in self.sums}, None
        if self.entered:
            if not self.is_readable():
                return {}, (TypeError, RuntimeError)
            own = {row: Bounded.exact(self.params[row].grad).rounded(0.0) for row in live if row not in self.part}
            return own | self.part, None
        if not self.is_readable():
            return {}, (TypeError, RuntimeError)
        return {row: Bounded.exact(self.params[row].grad) for row in live}, None

    def step(self, normalizer: Any = None, grad_scale: Any = None, found_inf: Any = None, closure: Any = None) -> None:
        normalizer, grad_scale, found_inf = weight_of(normalizer), weight_of(grad_scale), weight_of(found_inf)
        for name, value in (("grad_scale", grad_scale), ("found_inf", found_inf)):
            if value is not None:
                setattr(self.optimizer, name, value)
        try:
            self.expected_step(
                lambda: self.optimizer.step(normalizer=normalizer), [normalizer, grad_scale],
                found=None if found_inf is None else float(found_inf), for_scaler=found_inf is not None,
            )  # fmt: skip
        finally:
            for name in ("grad_scale", "found_inf"):
                if hasattr(self.optimizer, name):
                    delattr(self.optimizer, name)

    def expected_step(
        self,
        call: Callable[[], Any],
        divisors: list[Any],
        *,
        found: float | None = None,
        for_scaler: bool = False,
        is_unchecked: bool = False,
        common: tuple[float, float, bool] | None = None,
        given: dict[int, Bounded] | None = None,
    ) -> bool:
        """Any call that steps.

        Args:
            call: makes the step.
            divisors: numbers, tensors or None; the first is the normalizer.
            found: found_inf.
            for_scaler, is_unchecked: see `Divisors.for_scaler`; and no flag says what a scaler has seen.
            common: with clip_together the norm over all, its error, and whether all skip.
            given: the gradients, where they were measured before.

        Returns:
            Whether it was made.
        """
        grads, refusal = self.taken() if given is None else (given, None)
        bad_number = any(
            d is not None and not isinstance(d, Tensor) and not (math.isfinite(d) and d > 0) for d in divisors
        )
        if bad_number:
            refusal = ValueError  # looked at first
        if refusal is not None:
            self.attempt(call, refusal)
            return False
        if self.phase == "closed" and not grads:
            self._end()
        factor, on_device = 1.0, False
        for divisor in divisors:
            if divisor is not None:
                on_device |= isinstance(divisor, Tensor)
                value = float(divisor)
                factor = factor / value if value > 0 and math.isfinite(value) else math.nan
        unit = 8 * UNIT[torch.float32]
        grads = {row: g.times(factor).rounded(unit if divisors_given(divisors) else 0.0) for row, g in grads.items()}
        settings = self.config["settings"]
        nonfinite, clip = settings.get("nonfinite"), self.clip
        takes_norm = clip is not None or nonfinite in ("skip", "raise") or self.phase != "idle"
        takes_norm = takes_norm or common is not None or is_unchecked
        norm, error = norm_of(list(grads.values())) if common is None else common[:2]
        norm = math.nan if math.isnan(factor) else norm
        if self.phase == "open" and self.weighted and not 0 < self.total < math.inf:
            norm = math.nan
        bad = not math.isfinite(norm) if takes_norm else math.isnan(factor)
        checked = takes_norm or on_device
        skip = bool(found) or (checked and bad and (nonfinite != "propagate" or is_unchecked))
        skip = skip if common is None else common[2]
        if not grads:
            skip = False
        if skip and nonfinite == "raise" and not for_scaler:
            self.attempt(call, RuntimeError, only=("param", "skipped"))
            self.check_unwritten()
            if self.entered:  # the micro-batch has ended
                self._fold(dict(self.part), None, last=False, in_loss=True)
            return False
        phase, identities = self.phase, self.identities()
        before_grads = [None if p.grad is None else p.grad.detach().clone() for p in self.params]
        if not self.attempt(call):
            return False
        if not grads:
            self.check_unwritten()
        else:
            self._check_outcome(norm, error, takes_norm, skip)
            if skip:
                self.skips += 1
                self.check_unwritten()
            else:
                self._check_step(grads, norm, error, clip if common is None else None, takes_norm, common)
        count = int(self.optimizer.skipped_steps)
        require(count == self.skips, f"skipped_steps is {count}, not {self.skips}")
        if phase != "idle" and (grads or phase == "open"):
            require(not self.live(), f"step() left p.grad of {self.live()} after a window")
            self._end()
        elif not self.foreign:
            require(identities == self.identities(), "step() exchanged p.grad")
            for row, before in enumerate(before_grads):
                if self.is_alias(row):
                    continue
                if before is not None and before.layout == torch.strided:
                    same = torch.equal(before.nan_to_num(7e7), self.params[row].grad.nan_to_num(7e7))
                    require(same, f"step() has written gradient {row}")
        return True

    @property
    def clip(self) -> float | None:
        return self.optimizer.max_grad_norm

    def _check_outcome(self, norm: float, error: float, takes_norm: bool, skip: bool) -> None:
        require(bool(self.optimizer.step_was_skipped) is skip, f"step_was_skipped, expected {skip}; norm {norm}")
        actual = self.optimizer.grad_norm
        if not takes_norm:
            require(actual is None or bool(skip), f"grad_norm is {actual}, and none was to be taken")
            return
        if skip and math.isnan(norm):
            return  # a bad divisor's
        require(actual is not None, "grad_norm is None")
        wrong = not abs(float(actual) - norm) <= error + 1e-30 if math.isfinite(norm) else math.isfinite(float(actual))
        require(not wrong, f"grad_norm is {float(actual)!r}, expected {norm!r} +- {error:.1e}")

    def _check_step(
        self, grads: dict[int, Bounded], norm: float, error: float, clip: float | None, takes_norm: bool,
        common: tuple[float, float, bool] | None,
    ) -> None:  # fmt: skip
        coefficient, relative = 1.0, 0.0
        limit = self.config["together"] if common is not None else clip
        if limit is not None:
            coefficient = math.nan if math.isnan(norm) else min(1.0, limit / (norm + 1e-6))
            relative = (error / (norm + 1e-6) if math.isfinite(norm) else 0.0) + 8 * UNIT[torch.float32]
        for row in range(len(self.params)):
            if row not in grads:
                self.check_unwritten([row])
                continue
            grad = grads[row].times(coefficient).rounded(relative)
            if self.foreign:  # it was clipped in place
                grad = grad.rounded(3 * self.grad_unit(row))
            self._check_row(row, grad)
        self.trusted = False

    def _check_row(self, row: int, grad: Bounded) -> None:
        param, group = self.params[row], self._group(row)
        options = {key: group[key] for key in self.config["options"] if key in group} | {"lr": group["lr"]}
        state = self.states[row]
        update = of_torch(FOREIGN[self.rule], options) if self.foreign else of_oracle(FORMULAS[self.rule], options)
        want, states = predicted(update, self.full[row], grad, state, float(group.get("weight_decay", 0.0)))
        want.value[grad.value.isnan()] = math.nan  # also where the sign of NaN is none
        entries = self.optimizer.state.get(param, {})
        self.written[row] = False
        masters = self.config["settings"].get("master_weights", "auto")
        if param.dtype != torch.float32:
            if masters is None:
                want.error += UNIT[param.dtype] * want.value.abs() + SMALLEST.get(param.dtype, TINY_BF16)
            elif masters == "split8":
                want.error += 2.0**-14 * want.value.abs()
        state_unit = 2 * UNIT[torch.bfloat16] if self.config["settings"].get("state_dtype") == "bf16" else 0.0
        actual = self.actual(row)
        is_finite = bool(want.value.isfinite().all())
        if is_finite and not want.error.isfinite().all():
            want.error.nan_to_num_(math.inf)
        different = want.differs(actual)
        require(different is None, f"parameter {row} after step(): {different}")
        half = Bounded.exact(actual).rounded(UNIT[param.dtype] * 1.01)
        half.error += SMALLEST.get(param.dtype, 0.0)
        different = half.differs(param)
        require(different is None, f"parameter {row} is not its master's half: {different}")
        self.steps[row] += 1
        if self.rule == "sgd":  # which counts them with momentum only
            self.steps[row] = int(entries.get("step", 0))
        if "step" in entries:
            require(float(entries["step"]) == self.steps[row], f"step count of {row} is {entries['step']}")
        drops_nan = self.config["settings"].get("backend") == "foreach" and not is_finite  # torch's maximum of AMSGrad
        for name, bound in states.items():
            if name in entries:
                different = None if drops_nan else bound.rounded(state_unit).differs(entries[name])
                require(different is None, f"state {name} of parameter {row}: {different}")
                state[name] = entries[name].detach().double()
        self.full[row] = actual.clone()

    def fingerprint(self) -> tuple[Any, ...]:
        """What must not change between the steps of optimizers that are clipped together."""
        grads = [(row, id(self.params[row].grad), self.params[row].grad._version) for row in self.live()]
        return (self.folds, self.backwards) if self.phase == "open" else None, grads

    def _group(self, row: int) -> dict[str, Any]:
        param = self.params[row]
        return next(g for g in self.optimizer.param_groups if any(param is p for p in g["params"]))
