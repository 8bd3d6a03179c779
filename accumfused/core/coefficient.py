"""The coefficient, by which a step multiplies its gradients: from the norm of one plan, or of several together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from accumfused.core.norm import finish_norm
from accumfused.core.plan import Plan
from accumfused.core.protocol import Number, Outcome, Scaling, moved
from accumfused.core.rows import Grads
from accumfused.formats.numeric import ieee


@dataclass
class Measured:
    """The gradients of one step with their coefficient, ready to be applied."""

    plan: Plan
    grads: Grads  # as the step finds them: p.grad, or an open window's sums
    matched: Grads  # as the kernels read them
    complete: bool  # every parameter has a gradient
    outcome: Outcome
    scaling: Scaling
    divisor: Number | None  # the window's, which is in `scaling`, too; None: 1
    partials: Tensor | None  # the chunks' sums of squares; None: it took no norm
    is_made: bool = False

    def count(self, skips: Tensor) -> None:
        """Counts the step's skip, where `Backend.norm` has not."""
        self.scaling.skips = skips.add_(self.outcome.skipped)

    @contextlib.contextmanager
    def uncounted_by_an_error(self) -> Iterator[None]:
        """Takes back the skip of a step that fails."""
        try:
            yield
        except BaseException:
            if self.scaling.skips is not None and not self.is_made:
                self.scaling.skips.sub_(self.outcome.skipped.long())
            raise


def share(parts: Sequence[Measured], scaling: Scaling) -> None:
    """Gives several plans one norm, and coefficients that clip all of them by it.

    If their windows have one divisor, the chunks' sums of squares of all plans are added up in the order of one plan,
    so the bits are those of one optimizer with all parameters. Else each plan's sum is divided before.

    Args:
        parts: measured without a coefficient; each gets its outcome.
        scaling: what they have in common, on the first one's device and in the widest dtype: every divisor but their
            windows', and the limit.
    """
    # The backend of an fp64 plan reads the sums of others, too.
    device, leading = scaling.device, max((part.plan for part in parts), key=lambda plan: plan.dtype.itemsize)
    divisors = [1.0 if part.divisor is None else part.divisor for part in parts]
    partials = [part.partials for part in parts if part.partials is not None]
    is_common = not any(isinstance(each, Tensor) or each != divisors[0] for each in divisors)
    with ieee():
        if is_common and not any(part.plan.exchange.shares_norm(part.plan) for part in parts):
            scaling.normalize(divisors[0])
            every = torch.cat([moved(each, device) for each in partials])
            bounds = torch.arange(2, device=device) * len(every)
            common = finish_norm(leading.backend.segment_norms(leading, every, bounds)[0], scaling)
            coefficients = [common.coefficient] * len(parts)
        else:
            sums = [moved(part.plan.sum_of_squares(own), device) for part, own in zip(parts, partials, strict=True)]
            divisors = [moved(each, device) if isinstance(each, Tensor) else each for each in divisors]
            squares = [own / (each * each) for own, each in zip(sums, divisors, strict=True)]
            common = finish_norm(torch.stack(squares).sum(), scaling)
            coefficients = [(common.coefficient.double() / each).to(scaling.dtype) for each in divisors]
    for part, coefficient in zip(parts, coefficients, strict=True):
        values = torch.stack([coefficient, common.norm, common.values[2]])
        part.outcome = replace(part.outcome, values=moved(values, part.plan.device).to(part.plan.dtype), normed=True)
