"""What each format costs in accuracy, in short: `python -m bench.numerics` is the long form, and has every peer."""

from __future__ import annotations

import torch

from bench.numerics.sections import measure_briefly
from bench.report import Table
from bench.suites import Bench


def run(bench: Bench) -> list[Table]:
    found = measure_briefly(bench.quick, torch.get_num_threads(), with_peers=bench.peers != ())
    tables = [table for section in found.values() for table in section]
    tables[0].notes.append("in short: few elements, without peers that compile; `make numerics` measures all")
    return tables
