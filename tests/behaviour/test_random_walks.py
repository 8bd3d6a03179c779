"""The short form of random_walks.py: the same walks in every run."""

from __future__ import annotations

import pytest
from harness import need_native
from random_walks import differing, report, walked
from walks.draw import drawn
from walks.moves import KNOWN

WALKS = 10  # of one test


@pytest.mark.parametrize("first", range(0, 100, WALKS))
def test_every_call_of_a_random_walk_does_what_the_model_says(first: int) -> None:
    need_native()
    for seed in range(first, first + WALKS):
        walk = drawn(seed, length=40)
        found = walked(walk)
        assert found is None, report(seed, walk, found, KNOWN)
    assert differing(drawn(first, length=40)) is None
