"""windows(): against a specification that knows the whole list, and without reading ahead where that can be avoided."""

from __future__ import annotations

import doctest
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

import accumfused as af

Steps = Any  # an int, or a function of the update's index


def specification(items: list[Any], steps: Steps, start: int = 0) -> list[tuple[Any, bool]]:
    """Cuts the list into pieces, window by window."""
    pairs: list[tuple[Any, bool]] = []
    update = start
    while items:
        size = steps(update) if callable(steps) else steps
        window, items = items[:size], items[size:]
        pairs += [(item, i == len(window) - 1) for i, item in enumerate(window)]
        update += 1
    return pairs


class Sized:
    """Iterable many times, with a len() that may be wrong; writes down when an item is pulled."""

    def __init__(self, count: int, length: int | None = None) -> None:
        self.count = count
        self.length = count if length is None else length
        self.pulled: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for item in range(self.count):
            self.pulled.append(item)
            yield item


class Unsized:
    """Iterable many times, without a len()."""

    def __init__(self, count: int) -> None:
        self.sized = Sized(count)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sized)


class Refusing(Unsized):
    """Has a __len__ that raises, as a DataLoader over an iterable dataset has."""

    def __len__(self) -> int:
        raise TypeError("no length")


def generator(count: int) -> Iterator[int]:
    yield from range(count)


counts = st.integers(min_value=0, max_value=40)
schedules = st.lists(st.integers(min_value=1, max_value=9), min_size=1, max_size=5).map(
    lambda sizes: lambda update: sizes[update % len(sizes)]
)


@given(
    count=counts,
    steps=st.integers(min_value=1, max_value=45) | schedules,
    start=st.integers(min_value=0, max_value=9),
    kind=st.sampled_from([Sized, Unsized, Refusing, generator, range, lambda count: list(range(count))]),
)
def test_windows_are_those_of_the_specification(count: int, steps: Steps, start: int, kind: Any) -> None:
    assert list(af.windows(kind(count), steps, start=start)) == specification(list(range(count)), steps, start)


@given(count=counts, steps=st.integers(min_value=1, max_value=10))
def test_the_number_of_windows_is_rounded_up(count: int, steps: int) -> None:
    assert sum(last for _, last in af.windows(range(count), steps)) == math.ceil(count / steps)


@pytest.mark.parametrize("kind", [Sized, Unsized])
def test_every_iteration_is_a_new_epoch(kind: Any) -> None:
    epoch = af.windows(kind(5), lambda update: update, start=2)
    for _ in range(2):
        assert list(epoch) == [(0, False), (1, True), (2, False), (3, False), (4, True)]


def test_a_sized_iterable_is_not_read_ahead() -> None:
    items = Sized(5)
    for count, (item, _) in enumerate(af.windows(items, 2), start=1):
        assert item == count - 1
        assert items.pulled == list(range(count))


def test_an_iterable_without_a_length_is_read_one_item_ahead() -> None:
    items = Unsized(5)
    for count, _ in enumerate(af.windows(items, 2), start=1):
        assert items.sized.pulled == list(range(min(count + 1, 5)))


@pytest.mark.parametrize("kind", [Sized, Unsized])
def test_nothing_is_pulled_before_the_iteration(kind: Any) -> None:
    items = kind(5)
    iter(af.windows(items, 2))
    assert getattr(items, "sized", items).pulled == []


@pytest.mark.parametrize("kind", [Sized, Unsized])
@pytest.mark.parametrize("count", [0, 3, 6])
def test_the_function_is_asked_once_for_each_window_and_never_beyond(kind: Any, count: int) -> None:
    asked: list[int] = []

    def steps(update: int) -> int:
        asked.append(update)
        return 3

    assert len(list(af.windows(kind(count), steps, start=4))) == count
    assert asked == list(range(4, 4 + count // 3))


def test_a_schedule_that_is_just_long_enough() -> None:
    assert [last for _, last in af.windows("abcde", [2, 3].__getitem__)] == [False, True, False, False, True]


# ---- len() ---------------------------------------------------------------------------------------------------------


def test_the_length_is_the_iterables() -> None:
    assert len(af.windows(range(7), 3)) == 7
    assert len(af.windows([], 3)) == 0


@pytest.mark.parametrize("kind", [Unsized, Refusing, generator])
def test_what_has_no_length_gives_none(kind: Any) -> None:
    with pytest.raises(TypeError):
        len(af.windows(kind(3), 2))


def test_a_length_that_is_too_large_warns_at_the_end() -> None:
    pairs: list[Any] = []
    with pytest.warns(UserWarning, match=r"after 3 items, its len\(\) says 5: .*call optimizer\.step\(\) once more"):
        pairs.extend(af.windows(Sized(3, length=5), 2))
    assert pairs == [(0, False), (1, True), (2, False)]


def test_a_length_that_is_too_small_warns_at_the_end() -> None:
    pairs: list[Any] = []
    with pytest.warns(UserWarning, match=r"after 6 items, its len\(\) says 3"):
        pairs.extend(af.windows(Sized(6, length=3), 4))
    assert [item for item, _ in pairs] == list(range(6))
    assert pairs[2] == (2, True)  # as far as anybody could know


def test_stopping_early_is_no_reason_to_warn() -> None:
    for item, _ in af.windows(Sized(5), 2):
        if item == 2:
            break


# ---- DataLoader ----------------------------------------------------------------------------------------------------


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(11))


@pytest.mark.parametrize("dataset", [Numbers, Stream])
@pytest.mark.parametrize(("drop_last", "batches"), [(False, 4), (True, 3)])
def test_windows_of_a_dataloader(dataset: type[Dataset[int]], drop_last: bool, batches: int) -> None:
    loader = DataLoader(dataset(), batch_size=3, drop_last=drop_last)
    pairs = [(batch.tolist(), last) for batch, last in af.windows(loader, 2)]
    whole = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]][:batches]
    assert pairs == specification(whole, 2)


def test_an_epoch_of_windows_is_the_mean_over_each_windows_samples(backend: str) -> None:
    param = torch.nn.Parameter(torch.full((2,), 8.0))
    optimizer = af.SGD([param], lr=0.5, backend=backend)
    truth = 8.0
    for batch, last in af.windows(DataLoader(Numbers(), batch_size=3), 3):
        (param * batch.float().mean()).sum().backward()
        optimizer.accumulate(len(batch), last=last)
        if last:
            optimizer.step()
    for samples in (range(9), range(9, 11)):  # the remainder is a window of its own
        truth -= 0.5 * sum(samples) / len(samples)
    assert param.tolist() == [truth] * 2


# ---- bad arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, -1, 2.0, 2.5, "2", None, True])
def test_a_number_of_steps_that_is_none_is_refused_at_once(steps: Any) -> None:
    with pytest.raises(ValueError, match="gradient_accumulation_steps must be a whole number >= 1, got"):
        af.windows([1, 2], steps)


@pytest.mark.parametrize("steps", [0, -1, 2.0, None])
def test_a_function_that_returns_no_number_of_steps_is_refused_when_it_is_asked(steps: Any) -> None:
    pairs: Iterable[Any] = af.windows(range(5), lambda update: 2 if update == 0 else steps)
    seen: list[Any] = []
    with pytest.raises(ValueError, match="gradient_accumulation_steps must be a whole number >= 1, got"):
        seen.extend(pairs)
    assert seen == [(0, False), (1, True)]


@pytest.mark.parametrize("start", [-1, 1.0, "0", None, True])
def test_a_start_that_is_no_index_is_refused(start: Any) -> None:
    with pytest.raises(ValueError, match="start must be a whole number >= 0, got"):
        af.windows([1, 2], 2, start=start)


def test_the_example_in_the_docstring_is_true() -> None:
    result = doctest.testmod(sys.modules["accumfused.windows"])  # the name in the package is the function's
    assert result.attempted > 0
    assert result.failed == 0
