"""Loss scaling, by our GradScaler and torch's."""

from __future__ import annotations

from typing import Any

import torch

import accumfused as af
from walks.moves import Moves
from walks.numbers import UNIT, Bounded
from walks.steps import Side
from walks.subject import require

GROWTH_INTERVAL = 3


class Scalers(Moves):
    """Steps by a scaler."""

    scalers: dict[str, Any]  # by kind: "ours" or "stock"

    def do_scaled_step(self, side: Side, kind: str, unscale: bool, zero: bool) -> None:
        """unscale_() perhaps, step() and update(), over gradients of any scale."""
        if not self.is_alone or not self._can_be_scaled(side):
            return
        if kind not in self.scalers:
            cls = af.GradScaler if kind == "ours" else torch.amp.GradScaler
            self.scalers[kind] = cls("cpu", init_scale=2.0**4, growth_interval=GROWTH_INTERVAL)
            self.scalers[kind].scale(torch.ones((), dtype=torch.float32))
        scaler, optimizer = self.scalers[kind], side.optimizer
        if side.phase == "open" and (unscale or kind == "stock"):
            # (torch's unscale_() asks nobody; what it has not seen its step() refuses.)
            is_asked = unscale and kind == "ours"
            side.attempt(lambda: (scaler.unscale_ if is_asked else scaler.step)(optimizer), RuntimeError)
            del self.scalers[kind]
            return
        dtypes = {side.params[row].grad.dtype for row in side.live()}
        if (unscale or kind == "stock") and (not dtypes or torch.float16 in dtypes):
            return  # torch refuses these
        scale, tracker = scaler.get_scale(), int(scaler._get_growth_tracker())
        if unscale:
            self._unscale(side, scaler, scale)
        made, overflow = self._step(side, scaler, kind, scale, unscale)
        if not made:
            del self.scalers[kind]
            return
        side.attempt(scaler.update)
        grows = not overflow and tracker + 1 == GROWTH_INTERVAL
        want = scale * (0.5 if overflow else 2.0 if grows else 1.0)
        require(scaler.get_scale() == want, f"the scale is {scaler.get_scale()}, expected {want}")
        if zero:
            side.zero_grad()

    @staticmethod
    def _can_be_scaled(side: Side) -> bool:
        """Whether gradients can be divided in place, each once."""
        grads = [side.params[row].grad for row in side.live()]
        if not side.is_readable() or any(grad.requires_grad or not side.adds_to(grad) for grad in grads):
            return False
        addresses = [grad.data_ptr() for grad in grads if grad.numel()]
        return len(set(addresses)) == len(addresses) and not any(map(side.is_alias, side.live()))

    @staticmethod
    def _unscale(side: Side, scaler: Any, scale: float) -> None:
        before = {row: side.params[row].grad.detach().double() for row in side.live()}
        side.attempt(lambda: scaler.unscale_(side.optimizer))
        for row, known in before.items():
            grad = side.params[row].grad
            different = Bounded.exact(known / scale).rounded(2 * UNIT[grad.dtype]).differs(grad)
            require(different is None, f"unscale_(): gradient {row}: {different}")

    @staticmethod
    def _step(side: Side, scaler: Any, kind: str, scale: float, unscaled: bool) -> tuple[bool, bool]:
        """Returns: whether a step was made, or left out by the scaler, and whether that has seen an overflow."""
        is_infinite = any(not bool(side.params[row].grad.isfinite().all()) for row in side.live())
        divisors = [None, None if unscaled else torch.tensor(scale, dtype=torch.float32)]

        def call() -> None:
            scaler.step(side.optimizer)

        if kind == "ours":
            skips, found = side.skips, float(is_infinite) if unscaled else None
            made = side.expected_step(call, divisors, found=found, for_scaler=True, is_unchecked=not unscaled)
            return made, side.skips > skips
        if is_infinite:  # torch's scaler never calls step(), having unscaled in place
            side.attempt(call)
            side.check_unwritten()
            return True, True
        if not unscaled:
            Scalers._unscale(side, scaler, scale)
        return side.expected_step(call, [None, None]), False
