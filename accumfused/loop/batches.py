"""Cuts an epoch, or several, into windows; the last one may be shorter."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Generic, TypeVar, cast

from accumfused.arguments import checked_whole
from accumfused.core.habits import Habits
from accumfused.optimizer import FusedOptimizer, check_fused
from accumfused.warn import warn

Item = TypeVar("Item")
_END, _UNREAD = object(), object()


class Windows(Generic[Item]):
    """Iterates over (item, last), with the iterable's length; `windows` returns it."""

    def __init__(
        self,
        iterable: Iterable[Item],
        steps: int | Callable[[int], int],
        start: int,
        resumed: FusedOptimizer | None,
        epochs: int,
    ) -> None:
        if not callable(steps):
            _checked(steps)
        self._iterable = iterable
        self._steps: Callable[[int], int] = steps if callable(steps) else lambda _: steps
        self._start = checked_whole(start, "start", 0)
        self._epochs = checked_whole(epochs, "epochs")
        if self._epochs > 1 and isinstance(iterable, Iterator):
            raise TypeError(f"epochs={epochs} needs an iterable that can begin again, got {type(iterable).__name__}")
        if resumed is not None:
            check_fused(resumed, "windows(resumed=)")
        self._resumed = resumed

    def __len__(self) -> int:
        if not isinstance(self._iterable, Sized):
            raise TypeError(f"{type(self._iterable).__name__} has no len()")
        return self._epochs * len(self._iterable)

    def __iter__(self) -> Iterator[tuple[Item, bool]]:
        try:
            length: int | None = len(self)
        except TypeError:  # a DataLoader over an iterable dataset has a __len__ that raises
            length = None
        return self._cut(itertools.chain.from_iterable(self._iterable for _ in range(self._epochs)), length)

    def _cut(self, items: Iterator[Item], length: int | None) -> Iterator[tuple[Item, bool]]:
        iteration, update, left, count = object(), self._start, 0, 0
        begun = self._begun()  # of the first window
        try:
            following: Item | object = _UNREAD
            while (item := next(items, _END) if following is _UNREAD else following) is not _END:
                if left == 0:
                    left = max(1, _checked(self._steps(update)) - begun)
                    update, begun = update + 1, 0
                left, count = left - 1, count + 1
                # Only within a window: an update comes after the last micro-batch, and the next item may depend on it.
                following = next(items, _END) if left and length is None else _UNREAD
                if following is _END or count == length:
                    left = 0
                Habits.count_item(iteration, update)
                yield cast(Item, item), left == 0
        finally:
            Habits.iterations.pop(iteration, None)
        if length not in (None, count):
            warn(
                f"the iterable ended after {count} items, its len() says {length}: the last window may not be closed; "
                "call optimizer.step() once more, or pass an iterable without len()"
            )

    def _begun(self) -> int:
        """Returns how many micro-batches the first window has already."""
        if self._resumed is None or not self._resumed._engine.window.is_open:
            return 0
        window = self._resumed._engine.window
        window.habits.resumed()
        return window.weights.count


def windows(
    iterable: Iterable[Item],
    gradient_accumulation_steps: int | Callable[[int], int],
    *,
    start: int = 0,
    resumed: FusedOptimizer | None = None,
    epochs: int = 1,
) -> Windows[Item]:
    """Cuts an iterable of micro-batches into windows: yields (item, last), `last` at the end of each.

    The iterable's end closes the last window, even a shorter one. An iterable with `len()` passes its items on as they
    come. One without is read one item ahead within a window, to see its end, and never over the update after it: what
    it computes from the weights (a rollout, an evaluation between epochs) is computed from the updated ones.

    Args:
        iterable: micro-batches, a DataLoader for instance.
        gradient_accumulation_steps: micro-batches in a window, or a function that returns them for an update's index.
        start: the index of the first update in every iteration; a resumed run gives it for such a function.
        resumed: an optimizer that may have loaded a checkpoint of an open window: the first window then lacks the
            micro-batches that it has, and the iterable begins with the next one. Step a complete one before.
        epochs: how often the iterable is gone through. A window goes on over an epoch's end; the last one's closes it.
            Nothing calls a sampler's `set_epoch`: where there is one, pass a generator that calls it.
            `schedule.updates` counts the updates.

    Returns:
        An iterable of (item, last), with the len() of all epochs if the iterable has one.

    Raises:
        ValueError: a number of steps or epochs below 1, or `start` below 0.
        TypeError: `resumed` is not an optimizer of accumfused; several epochs of an iterator, which ends once.

    Warns:
        AccumulationWarning: `len()` was wrong. (`accumulate()` warns if an earlier iteration has left its window open.)

    Examples:
        >>> list(windows("abcde", 2))
        [('a', False), ('b', True), ('c', False), ('d', True), ('e', True)]
        >>> list(windows("abc", 2, epochs=2))
        [('a', False), ('b', True), ('c', False), ('a', True), ('b', False), ('c', True)]
    """
    return Windows(iterable, gradient_accumulation_steps, start, resumed, epochs)


def _checked(steps: int) -> int:
    return checked_whole(steps, "gradient_accumulation_steps")
