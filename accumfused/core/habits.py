"""Bad habits of a training loop: it drops windows, or writes parameters within them."""

from __future__ import annotations

from accumfused.core.plan import Plan
from accumfused.warn import warn


class Habits:
    """Warns of each habit once."""

    def __init__(self) -> None:
        self._versions = self._seen = 0  # the sum of the parameters', when the window began, and their number
        self._drops = 0  # open windows since the last step
        self._steps_after_drops = 0  # in a row
        self._warned_of_drops = self._warned_of_writes = False

    def see(self, plan: Plan) -> None:
        """Notes the versions of the parameters: all writes so far are our own."""
        self._versions, self._seen = plan.reader.versions(), len(plan.params)

    def see_new(self, plan: Plan) -> None:
        """As `see`, for parameters added since."""
        self._versions += sum(param._version for param in plan.params[self._seen :])
        self._seen = len(plan.params)

    def watch_writes(self, plan: Plan) -> None:
        """Before a window closes: its micro-batches must see the same parameters. Writes through `.data` go unseen."""
        if self._warned_of_writes or self._versions == plan.reader.versions():
            return
        warn(
            "a parameter was written while a window was open (by Embedding(max_norm=...), another step, load_state_dict"
            "?), so the gradients in its sum are those of different weights; write parameters between step() and the "
            "next backward()"
        )
        self._warned_of_writes = True

    def watch_drops(self) -> None:
        """Before an open window is dropped."""
        if self._warned_of_drops:
            return
        if self._drops:
            what = "two accumulation windows in a row were dropped without a step"
        elif self._steps_after_drops >= 2:
            what = "accumulation windows were dropped before each of the last steps"
        else:
            return
        warn(
            f"{what}; zero_grad() drops the window: call it (if at all) after optimizer.step(), not between the "
            "micro-batches of a window"
        )
        self._warned_of_drops = True

    def dropped(self) -> None:
        """An open window is over without a step."""
        self._drops += 1

    def stepped(self) -> None:
        """A window is over with a step, made or skipped."""
        self._steps_after_drops = self._steps_after_drops + 1 if self._drops else 0
        self._drops = 0
