"""Muon's two rules, and what lies between them, on all backends of a CPU."""

from __future__ import annotations

import itertools
from typing import Any

import inside
import pytest
from compare import assert_all_same_bits, everything, params_of
from places import INSTRUCTION_SETS, interpreted
from reference import ReferenceBackend
from table import STATES, WEIGHTS, random_grads, random_params, set_grads

import accumfused as af
from accumfused.backends.cpu import CpuBackend

# The coefficients of its matrices come from policies, too: its stacks have another order than the optimizer's rows.
POLICIES: list[dict[str, Any]] = [{"clip": af.PerTensor(0.2)}, {"max_grad_norm": 0.2}]  # and another of a group
CASES = [*itertools.product(WEIGHTS, STATES, [{"max_grad_norm": 1.0}]), *(("fp32", "fp32", each) for each in POLICIES)]


@pytest.mark.parametrize(("masters", "states", "policy"), CASES)
def test_all_backends_have_the_same_bits(masters: str, states: str, policy: dict[str, Any]) -> None:
    dtype, settings = WEIGHTS[masters]
    settings = {**settings, "state_dtype": STATES[states], "state_dtype_min_numel": 0, "rounding_seed": 1, **policy}
    found = []
    slow = interpreted() if "clip" not in policy and (masters, states) in (("split8", "8bit"), ("fp32", "fp32")) else ()
    for backend in itertools.chain(
        [ReferenceBackend()], map(CpuBackend, INSTRUCTION_SETS), (place.backend for place in slow)
    ):
        params = [p.detach().to(dtype).requires_grad_() for p in random_params([(7,), (20, 30), (90, 60), (20, 30)])]
        groups = [{"params": params[:1], "use_muon": False}, {"params": params[1:], "weight_decay": 0.3}]
        if policy == POLICIES[1]:
            groups[1]["max_grad_norm"] = 0.1
        optimizer = af.Muon(groups, lr=0.1, **settings)
        inside.use_backend(optimizer, backend)
        for seed in range(3):
            grads = random_grads(params, seed, dtype)
            set_grads(params_of(optimizer), [grad * 3**index for index, grad in enumerate(grads)])
            optimizer.step()
        found.append(everything(optimizer))
    assert len(found) > 1
    for other in found[1:]:
        assert_all_same_bits(other, found[0])
    assert {float(value) for name, value in found[0].items() if name.startswith("step")} <= {3.0}
