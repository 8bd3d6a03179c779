"""windows() cuts any iterable as if it knew the whole list, and reads ahead by one item, within a window only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accumfused as af

Steps = Any  # an int, or a function of the update's index


def specification(items: list[Any], steps: Steps, start: int = 0) -> list[tuple[Any, bool]]:
    """Cuts the list into pieces, window by window."""
    pairs: list[tuple[Any, bool]] = []
    while items:
        size = steps(start) if callable(steps) else steps
        window, items, start = items[:size], items[size:], start + 1
        pairs += [(item, i == len(window) - 1) for i, item in enumerate(window)]
    return pairs


class Unsized:
    """Iterable many times, without a len(); writes down when an item is pulled."""

    def __init__(self, count: int) -> None:
        self.count, self.pulled = count, list[int]()

    def __iter__(self) -> Iterator[int]:
        for item in range(self.count):
            self.pulled.append(item)
            yield item


class Sized(Unsized):
    """With a len(), which may be wrong."""

    def __init__(self, count: int, length: int | None = None) -> None:
        super().__init__(count)
        self.length = count if length is None else length

    def __len__(self) -> int:
        return self.length


class Refusing(Unsized):
    """Has a __len__ that raises, as a DataLoader over an iterable dataset has."""

    def __len__(self) -> int:
        raise TypeError("no length")


def generator(count: int) -> Iterator[int]:
    yield from range(count)


schedules = st.lists(st.integers(1, 9), min_size=1, max_size=5).map(
    lambda sizes: lambda update: sizes[update % len(sizes)]
)


@given(
    count=st.integers(0, 40), steps=st.integers(1, 45) | schedules, start=st.integers(0, 9),
    kind=st.sampled_from([Sized, Unsized, Refusing, generator, lambda count: list(range(count))]),
)  # fmt: skip
def test_windows_are_those_of_the_specification(count: int, steps: Steps, start: int, kind: Any) -> None:
    asked: list[int] = []
    wanted = specification(list(range(count)), steps, start)
    for given_steps in (steps, lambda update: asked.append(update) or (steps(update) if callable(steps) else steps)):
        cut = af.windows(kind(count), given_steps, start=start)
        if kind is Sized:
            assert len(cut) == count
        elif kind in (Unsized, Refusing, generator):
            with pytest.raises(TypeError):
                len(cut)
        assert list(cut) == wanted
        if kind is not generator:
            assert list(cut) == wanted  # every iteration is a new epoch
    epochs = 1 if kind is generator else 2
    assert asked == [*range(start, start + sum(last for _, last in wanted))] * epochs  # once a window, never beyond


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 3, 9, lambda update: 1 + update % 3])
@pytest.mark.parametrize("kind", [Sized, Unsized, Refusing])
def test_an_iterable_without_a_length_is_read_one_item_ahead_but_never_over_an_update(
    kind: Any, steps: Steps, epochs: int
) -> None:
    items, total = kind(5), 5 * epochs
    cut = iter(af.windows(items, steps, epochs=epochs))
    assert items.pulled == []
    for count, (item, last) in enumerate(cut, start=1):
        assert item == (count - 1) % 5
        assert len(items.pulled) == min(count + (kind is not Sized and not last), total)


def trained(loop: str, steps: int, per_epoch: int) -> tuple[list[float], list[float], float]:
    """Trains on data that the model makes: the weights that made them, those evaluated after epochs, those at the end.

    The generator's code between two yields runs when the loop over it asks for the next item.
    """
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = (torch.optim.SGD if loop == "torch" else af.SGD)([param], lr=0.125)
    made, evaluated = list[float](), list[float]()

    def rollouts() -> Iterator[torch.Tensor]:
        for _ in range(3):
            for _ in range(per_epoch):
                made.append(param.item())
                yield param.detach().clone()
            evaluated.append(param.item())

    pairs = af.windows(rollouts(), steps)
    if loop == "torch":
        pairs = ((x, index % steps == 0) for index, x in enumerate(rollouts(), 1))  # type: ignore[assignment]
    for x, last in pairs:
        ((param * x).sum() / steps).backward()
        if loop == "af":
            optimizer.accumulate()  # type: ignore[attr-defined]
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return made, evaluated, param.item()


@pytest.mark.parametrize(("steps", "per_epoch"), [(1, 3), (2, 4), (3, 3)])
def test_data_of_the_current_policy_and_evaluations_in_a_generator_are_those_of_a_plain_loop(
    steps: int, per_epoch: int
) -> None:
    made, evaluated, end = trained("af", steps, per_epoch)
    assert (made, evaluated, end) == trained("torch", steps, per_epoch)
    assert len(set(made)) == 3 * per_epoch // steps  # each window's data are made after the update before
    assert len(set(evaluated)) == 3


@pytest.mark.parametrize(
    ("count", "length", "steps", "closed"), [(3, 5, 2, [1]), (6, 3, 4, [2]), (7, 3, 2, [1, 2, 4, 6])]
)
def test_a_wrong_length_warns_at_the_end(count: int, length: int, steps: int, closed: list[int]) -> None:
    pairs: list[Any] = []
    text = rf"after {count} items, its len\(\) says {length}: .*call optimizer\.step\(\) once more"
    with pytest.warns(UserWarning, match=text):
        pairs.extend(af.windows(Sized(count, length), steps))
    assert [item for item, _ in pairs] == list(range(count))
    assert [item for item, last in pairs if last] == closed  # as far as anybody could know
    for _ in af.windows(Sized(count, length), steps):
        break  # stopping early is no reason to warn


@pytest.mark.parametrize("steps", [0, -1, 2.0, "2", None, True])
def test_a_number_of_steps_or_a_start_that_is_no_whole_number_is_refused(steps: Any) -> None:
    text = "gradient_accumulation_steps must be a whole number >= 1, got"
    with pytest.raises(ValueError, match=text):  # at once
        af.windows([1, 2], steps)
    seen: list[Any] = []
    with pytest.raises(ValueError, match=text):  # when the function is asked
        seen.extend(af.windows(range(5), lambda update: 2 if update == 0 else steps))
    assert seen == [(0, False), (1, True)]
    if steps != 0:
        with pytest.raises(ValueError, match="start must be a whole number >= 0, got"):
            af.windows([1, 2], 2, start=steps)


@pytest.mark.parametrize("done", range(1, 10))
def test_a_resumed_loop_goes_on_in_the_middle_of_a_window(done: int) -> None:
    """The update that closes a window, and its micro-batches, are those of the uninterrupted loop."""

    def run(optimizer: Any, param: torch.Tensor, items: Any) -> list[tuple[int, float]]:
        updates = []
        for item, last in items:
            (param * (item + 1.0)).sum().backward()
            optimizer.accumulate(weight=item + 1)
            if last:
                optimizer.step()
                updates.append((item, float(param.detach())))
        return updates

    def made() -> tuple[Any, torch.Tensor]:
        param = torch.zeros((), requires_grad=True)
        return af.SGD([param], lr=0.5), param

    whole = run(*made(), af.windows(range(10), 4))
    assert len({value for _, value in whole}) == 3  # every update moves the parameter
    optimizer, param = made()
    updates = run(optimizer, param, [*af.windows(range(10), 4)][:done])
    other, restored = made()
    with torch.no_grad():
        restored.copy_(param)
    other.load_state_dict(optimizer.state_dict())
    updates += run(other, restored, af.windows(range(done, 10), 4, resumed=other))
    assert updates == whole
    assert [last for _, last in af.windows(range(8), 4, resumed=other)] == [False, False, False, True] * 2


def test_an_optimizer_that_is_not_fused_is_refused_as_resumed() -> None:
    with pytest.raises(TypeError, match="windows"):
        af.windows([1, 2], 2, resumed=torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))  # type: ignore[arg-type]


def test_a_window_goes_on_over_an_epochs_end() -> None:
    cut = af.windows([0, 1, 2], 2, epochs=3)
    assert len(cut) == 9
    expected = [(i % 3, i % 2 == 1 or i == 8) for i in range(9)]  # the last window is shorter
    assert list(cut) == expected
    assert list(af.windows(Unsized(3), 2, epochs=3)) == expected


def test_epochs_of_an_iterator_are_refused() -> None:
    with pytest.raises(TypeError, match="epochs=2 needs an iterable that can begin again, got list_iterator"):
        af.windows(iter([1, 2]), 2, epochs=2)
    with pytest.raises(ValueError, match="epochs"):
        af.windows([1, 2], 2, epochs=0)
