"""One optimizer, or two that are clipped together, and every move that a walk may make."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import accumfused as af
from walks.copies import Copies
from walks.hands import Hands
from walks.numbers import UNIT, Bounded, norm_of
from walks.scalers import Scalers
from walks.steps import Side
from walks.subject import DTYPES


class World(Hands, Copies, Scalers):
    """One optimizer, or two that are clipped together, with a GradScaler."""

    def __init__(self, config: dict[str, Any], known: frozenset[str]) -> None:
        self.config, self.known = config, known
        self.sides: list[Side] = []
        self.sides.append(Side(config, known, self.sides))
        if config["together"] is not None:
            self.sides.append(Side(config["mate"], known, self.sides))
            self.group = af.clip_together([side.optimizer for side in self.sides], config["together"])
        self.taken: dict[Side, tuple[Any, ...]] = {}  # of members that have not stepped yet
        self.scalers: dict[str, Any] = {}

    def call(self, name: str, arguments: dict[str, Any]) -> None:
        arguments = dict(arguments)
        side = self.sides[arguments.pop("side", 0) % len(self.sides)]
        default = arguments.pop("default_dtype", None)
        if default is not None:
            torch.set_default_dtype(DTYPES[default])
        try:
            getattr(self, f"do_{name}")(side, **arguments)
            for each in self.sides:
                each.check_unwritten()
        finally:
            torch.set_default_dtype(torch.float32)

    def is_finite(self) -> bool:
        states = [v for side in self.sides for state in side.states for v in state.values() if isinstance(v, Tensor)]
        return all(bool(v.isfinite().all()) for v in [*states, *(full for side in self.sides for full in side.full)])

    # ---- the calls of a loop ---------------------------------------------------------------------------------------

    def do_backward(self, side: Side, rows: list[int], seed: int, poison: str | None = None) -> None:
        side.backward(rows, seed, poison)

    def do_accumulate(self, side: Side, weight: Any = None, last: bool = False) -> None:
        side.accumulate(weight, last)

    def do_micro_batch(self, side: Side, rows: list[int], seed: int, weight: Any = None, last: bool = False) -> None:
        side.backward(rows, seed)
        side.accumulate(weight, last)

    def do_own_backward(self, side: Side, **arguments: Any) -> None:
        side.own_backward(**arguments)

    def do_step(
        self, side: Side, normalizer: Any = None, grad_scale: Any = None, found_inf: Any = None, only: bool = False
    ) -> None:
        if self.is_alone:
            side.step(normalizer, grad_scale, found_inf)
            return
        number = float(normalizer) if isinstance(normalizer, (int, float)) else None
        for each in [side] if only else [side, *(other for other in self.sides if other is not side)]:
            if not self.step_together(each, number):
                for member in self.sides:
                    self.do_zero_grad(member)
                return

    def step_together(self, side: Side, normalizer: float | None) -> bool:
        """A member's step: the first one measures all, and leaves for each what it will step with."""
        call = functools.partial(side.optimizer.step, normalizer=normalizer)
        is_bad = normalizer is not None and not 0 < normalizer < float("inf")
        untouched = ("param", "state", "grad", "skipped")  # (A window may have got its pending weight: the same sums.)
        if side in self.taken:
            waiting = [(*known, member) for member, known in self.taken.items()]
            changed = any(known != member.fingerprint() for _, _, known, _, member in waiting)
            if changed or is_bad or any(before != normalizer for _, _, _, before, _ in waiting):
                side.attempt(call, (RuntimeError, ValueError), only=untouched)
                return False
        else:
            parts = [(member, *member.taken()) for member in self.sides]
            refusals = [refusal for *_, refusal in parts if refusal is not None] + [ValueError] * is_bad
            if refusals:
                self.taken.clear()
                if any(member.entered for member in self.sides) and "refused after release" in self.known:
                    return False
                kinds = tuple({kind for r in refusals for kind in (r if isinstance(r, tuple) else (r,))})
                side.attempt(call, kinds, only=untouched)
                return False
            self._measure(parts, normalizer)
        found, common, seen, _ = self.taken.pop(side)
        made = side.expected_step(call, [normalizer], common=common, given=found)
        for member, known in self.taken.items() if seen is None else ():  # the first has just measured all of them
            self.taken[member] = (*known[:2], member.fingerprint(), normalizer)
        return made

    def _measure(self, parts: list[tuple[Side, dict[int, Bounded], Any]], normalizer: float | None) -> None:
        factor = 1.0 if normalizer is None else 1.0 / normalizer
        grads = [g.times(factor).rounded(8 * UNIT[torch.float32]) for _, found, _ in parts for g in found.values()]
        norm, error = norm_of(grads)
        for member, found, _ in parts:
            if member.phase == "closed" and not found:
                member._end()
            is_bad = member.phase == "open" and member.weighted and not 0 < member.total < float("inf")
            norm = float("nan") if is_bad and found else norm
            if member.entered:  # its micro-batch ends here
                member.sums, member.count, member.entered, member.part = dict(found), 1, False, {}
        skip = self.config["settings"].get("nonfinite") != "propagate" and not norm < float("inf")
        for member, found, _ in parts:
            self.taken[member] = found, (norm, error, skip), None, normalizer

    def do_zero_grad(self, side: Side, set_to_none: bool = True) -> None:
        side.zero_grad(set_to_none)
        self.taken.pop(side, None)
        if not any(found for found, *_ in self.taken.values()):
            self.taken.clear()

    def do_setting(
        self, side: Side, lr: float | None = None, max_grad_norm: Any = "same", options: dict[str, Any] | None = None
    ) -> None:
        group = side.optimizer.param_groups[-1]
        if lr is not None:
            group["lr"] = lr
        for name, value in (options or {}).items():
            if name in side.config["options"] and not side.foreign:  # torch's RMSprop makes its buffer at first only
                group[name] = value
        if max_grad_norm != "same" and self.is_alone:
            side.optimizer.max_grad_norm = max_grad_norm
