"""Any sequence of calls does what docs/internals/state-machine.md says: a short run, and with --full a long one.

    FUZZ_MINUTES=60 python -m pytest tests/behaviour/test_fuzz.py --full

looks for an hour, each time elsewhere. A finding comes as the shortest sequence of Python calls that shows it.
"""

from __future__ import annotations

import os
import time

import pytest
from fuzz.machine import Machine
from harness import need_native
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

COMMON = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck), "report_multiple_bugs": False}


MINUTES = float(os.environ.get("FUZZ_MINUTES", "3"))


@pytest.mark.parametrize("minutes", [0.0, pytest.param(MINUTES, marks=pytest.mark.full)])
def test_any_sequence_of_calls_does_what_the_model_says(minutes: float) -> None:
    need_native()
    end = time.monotonic() + 60 * minutes
    short = settings(max_examples=60, stateful_step_count=40, derandomize=minutes == 0, **COMMON)
    run_state_machine_as_test(Machine, settings=short)
    while time.monotonic() < end:
        run_state_machine_as_test(Machine, settings=settings(short, max_examples=500, stateful_step_count=60))
