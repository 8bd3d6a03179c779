"""What all kinds of moves share."""

from __future__ import annotations

from typing import Any

from walks.steps import Side

# Moves, and combinations of them, that are known not to hold yet: walks leave them out. An entry is taken out with its
# repair; `--with NAME` tries it before that.
KNOWN = frozenset(
    {
        "written after load",  # before the first step: remainders are those of weights that may come later
        "refused after release",  # a micro-batch has ended before its step() is refused (for another member, say)
    }
)


class Moves:
    """The methods `do_*` are the moves; a walk calls them by name, with arguments that it has written down."""

    known: frozenset[str]
    config: dict[str, Any]
    sides: list[Side]

    @property
    def is_alone(self) -> bool:
        return len(self.sides) == 1
