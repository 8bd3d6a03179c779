"""The numbers bite: their tests fail where the kernels do nothing, and where a coefficient is 1e-3 off."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from harness import BROKEN

HERE = Path(__file__).parent
NO_NUMBERS = {  # what says something else than what parameters, states or sums are
    "test_every_optimizer_of_the_package_and_every_rule_is_in_the_table",
    "test_a_coefficient_beyond_fp32_skips_the_step",
    "test_a_step_without_a_window_leaves_the_gradients_as_they_are",
    "test_every_step_has_its_own_norm",
    "test_two_open_windows_dropped_in_a_row_warn_once_and_no_more",
    "test_steps_that_keep_being_skipped_warn",
}
STEPS, SUMS = ["test_rules.py"], ["test_accumulation.py", "test_accumulation_numbers.py"]  # sums have no coefficient


@pytest.mark.parametrize("how", BROKEN)
def test_every_number_shows_what_is_broken(how: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    files = [str(HERE / name) for name in (STEPS if how == "coefficient" else STEPS + SUMS)]
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", f"--broken={how}"]
    command += ["--full"] * request.config.getoption("--full")
    subprocess.run([*command, f"--junitxml={report}", *files], stdout=subprocess.DEVNULL, check=False)
    cases = [*ElementTree.parse(report).iter("testcase")]
    assert len(cases) > 10
    passed = {case.get("name", "").split("[")[0] for case in cases if len(case) == 0}
    assert passed <= NO_NUMBERS
