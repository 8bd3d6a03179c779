"""Covering arrays: every pair of values is there, in far fewer rows than there are combinations."""

from __future__ import annotations

import itertools

from harness import MOST_ROWS, combinations, in_turn, pairwise
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(1, 6), min_size=2, max_size=5))
def test_every_pair_of_values_is_in_a_row(sizes: list[int]) -> None:
    axes = {str(axis): range(size) for axis, size in enumerate(sizes)}
    rows = pairwise(axes)
    for one, other in itertools.combinations(range(len(sizes)), 2):
        assert {(row[one], row[other]) for row in rows} == {*itertools.product(range(sizes[one]), range(sizes[other]))}


def test_they_are_few() -> None:
    assert len(pairwise({name: range(5) for name in "abcdef"})) <= 45 < 5**6


def test_all_combinations_are_taken_unless_they_are_too_many() -> None:
    assert combinations({"a": range(3), "b": "xy"}) == [*itertools.product(range(3), "xy")]
    assert len(combinations({name: range(9) for name in "abcdef"})) < MOST_ROWS


def test_values_in_turn_are_all_taken_and_so_are_all_rows() -> None:
    assert in_turn(["ab"], [(0,), (1,), (2,)]) == [("a", 0), ("b", 1), ("a", 2)]
    assert in_turn(["abc"], [(0,), (1,)]) == [("a", 0), ("b", 1), ("c", 0)]
