"""The audit's verdicts on losses within models, on several losses a micro-batch, and on loops that hide a division."""

from __future__ import annotations

import pytest
from audited_forms import FAULTY, RIGHT


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_is_not_accused(name: str) -> None:
    expected, loop = RIGHT[name]
    report = loop()
    assert (report.verdict, report.names) == (expected, []), str(report)
    assert report.steps
    assert report.matches == {"equal": True, "unknown": None}[expected]


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_loop_has_its_verdict_and_causes(name: str) -> None:
    expected, loop = FAULTY[name]
    report = loop()
    assert f"{report.verdict} {','.join(report.names)}" == expected, str(report)
    assert report.matches is False
