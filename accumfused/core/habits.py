"""Bad habits of a training loop: windows dropped or left open, parameters written within one, gradients never reset."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from accumfused.core.plan import Plan
from accumfused.core.rows import Grads
from accumfused.warn import names_of, names_of_caller, warn

_WATCHED = 64  # parameters whose versions a window watches: what a loop does in each window comes to light soon


class Habits:
    """Warns of each habit once.

    Attributes:
        from_windows: how many micro-batches all loops of this process have got from `windows` so far.
        iterations: iterations of `windows` that have not ended, by their latest items; each with its window's number.
    """

    from_windows: ClassVar[int] = 0
    iterations: ClassVar[dict[object, int]] = {}

    def __init__(self) -> None:
        # Of the window's parameters, those from the first on, every so many: the sum of their versions when it began.
        self._versions = self._first = 0
        self._every = 1
        self._drops = 0  # open windows since the last step
        self._steps_after_drops = 0  # in a row
        self._warned_of_drops = self._warned_of_writes = self._warned_of_sums = False
        self._warned_of_hooks = self._saw_loop = False
        # Of a p.grad that the last step has taken: its id and version (a weak reference would forbid torch to swap it),
        # and `from_windows` at that step. A new gradient at that id has another version: its window's writes alone.
        self._taken = self._taken_version = self._taken_at = 0
        self._begun_in: dict[object, int] = {}  # `iterations` when the open window began; empty: it may go on anywhere
        self._warned_of_leaks = self._warned_of_nothing = False

    @classmethod
    def count_item(cls, iteration: object, window: int) -> None:
        """Counts an item of an iteration of `windows`, which is the latest one now."""
        cls.from_windows += 1
        cls.iterations.pop(iteration, None)
        cls.iterations[iteration] = window

    def begin(self) -> None:
        """Notes in which iterations of `windows` a window begins."""
        self._begun_in = self.iterations.copy()

    def loaded(self) -> None:
        """Notes that the window comes from a checkpoint: later iterations of `windows` go on with it on purpose."""
        self._begun_in = self.iterations.copy() or {object(): 0}

    def resumed(self) -> None:
        """Notes that the open window goes on in another iteration on purpose."""
        self._begun_in = {}

    def watch_leaks(self) -> None:
        """Warns, before a micro-batch enters an open window, if the iteration that began it has left it open.

        All that it began in have ended or gone on to other windows, and this micro-batch is of an iteration that began
        later. So an inner loop's iterations may come and go while the window of an outer one is open, and a loop may
        pass over the end of a window on purpose.
        """
        if self._warned_of_leaks or not self._begun_in or not self.iterations:
            return
        if next(reversed(self.iterations)) in self._begun_in or self._begun_in.items() & self.iterations.items():
            return
        warn(
            "this micro-batch enters a window that an earlier iteration of windows() has left open (by a break, an "
            "exception, a continue before step(), a checkpoint?), so the step will take micro-batches of both; call "
            "optimizer.zero_grad() after such a loop, or optimizer.step(); if the window is to go on, "
            "windows(resumed=optimizer) completes it"
        )
        self._warned_of_leaks = True

    def see(self, plan: Plan) -> None:
        """Notes the versions of some parameters, others in each window: all writes so far are our own."""
        self._every = max(1, -(-len(plan.rows) // _WATCHED))
        self._first = (self._first + 1) % self._every
        self._versions = plan.reader.versions(self._first, self._every)

    def see_new(self, plan: Plan, count: int) -> None:
        """Notes the versions of parameters added since `see`: those after the first `count`."""
        first = -(-(count - self._first) // self._every) * self._every + self._first
        self._versions += sum(param._version for param in plan.params[first :: self._every])

    def watch_writes(self, plan: Plan) -> None:
        """Warns, before a window closes, of parameters written since it began. Writes through `.data` go unseen."""
        if self._warned_of_writes or self._versions == plan.reader.versions(self._first, self._every):
            return
        warn(
            "a parameter was written while a window was open (by Embedding(max_norm=...), another step, load_state_dict"
            "?), so the gradients in its sum are those of different weights; write parameters between step() and the "
            "next backward()"
        )
        self._warned_of_writes = True

    def watch_drops(self) -> None:
        """Warns, before an open window is dropped, of a loop that does so again and again."""
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

    def watch_sums(self, grads: Grads) -> None:
        """Warns, before a step of p.grad, if the gradients still hold those that the last step has taken.

        Each backward that adds to it is one write, and so is a reset in place: their number tells, where `windows`
        has counted the micro-batches.
        """
        grad = next((gradient for gradient in grads if gradient is not None), None)
        if self._warned_of_sums or grad is None or grad.is_inference():
            return
        window = self.from_windows - self._taken_at  # an iterator that stands still elsewhere gives none
        if window and id(grad) == self._taken and grad._version - self._taken_version == window:
            warn(
                "p.grad still holds the previous windows' gradients: the loop calls neither accumulate() nor "
                "zero_grad(); call optimizer.accumulate(weight) after each backward()"
            )
            self._warned_of_sums = True
        self._taken, self._taken_version, self._taken_at = id(grad), grad._version, self.from_windows

    def watch_clips(self) -> None:
        """Warns of clip_grad_norm_ in the caller's code, before the first step of a window without a limit."""
        if self._saw_loop:
            return
        self._saw_loop = True
        if "clip_grad_norm_" in names_of_caller():
            warn(
                "the code that calls step() names clip_grad_norm_, which finds no gradient in an open window and clips "
                "nothing; give the optimizer max_grad_norm=, or close the window by accumulate(weight, last=True)"
            )

    def watch_nothing(self, micro_batches: int) -> None:
        """Warns at the step of a window without any gradient: only a module that keeps them has let it begin."""
        if micro_batches and not self._warned_of_nothing:
            self._warned_of_nothing = True
            warn(
                f"no gradient has come in a window of {micro_batches} micro-batches, so step() updates nothing; call "
                "set_requires_gradient_sync(True) of fully_shard before the last forward of each window, which "
                "delivers what it has kept"
            )

    def watch_hooks(self, hooks: Iterable[Callable[..., Any]]) -> None:
        """Warns, before a step of an open window, of hooks before it that look for gradients.

        Where the window's last micro-batch closed it, they find its mean in `p.grad`.
        """
        if self._warned_of_hooks:
            return
        for hook in hooks:
            found = {"grad", "clip_grad_norm_"}.intersection(names_of(hook))
            if found:
                warn(
                    f"a hook before step() ({getattr(hook, '__qualname__', type(hook).__name__)}) names {min(found)}, "
                    "and finds no gradient in an open window; close the window before step(), by accumulate(weight, "
                    "last=True), and the hook gets its mean in p.grad"
                )
                self._warned_of_hooks = True
                return

    def dropped(self) -> None:
        """Counts an open window that ends without a step."""
        self._drops += 1

    def stepped(self) -> None:
        """Counts a window that ends with a step, made or skipped."""
        self._steps_after_drops = self._steps_after_drops + 1 if self._drops else 0
        self._drops = 0
