"""Muon's two rules, and what lies between them, on all backends of a CPU."""

from __future__ import annotations

import itertools

import inside
import pytest
from compare import assert_all_same_bits, everything, params_of
from places import INSTRUCTION_SETS, interpreted
from table import STATES, WEIGHTS, random_grads, random_params, set_grads

import accumfused as af
from accumfused.backends.cpu import CpuBackend
from accumfused.backends.reference import ReferenceBackend


@pytest.mark.parametrize("masters", WEIGHTS)
@pytest.mark.parametrize("states", STATES)
def test_all_backends_have_the_same_bits_in_all_formats(masters: str, states: str) -> None:
    dtype, settings = WEIGHTS[masters]
    found = []
    slow = interpreted() if (masters, states) in (("split8", "int8"), ("fp32", "fp32")) else iter(())
    for backend in itertools.chain(
        [ReferenceBackend()], map(CpuBackend, INSTRUCTION_SETS), (place.backend for place in slow)
    ):
        params = [p.detach().to(dtype).requires_grad_() for p in random_params([(48, 48), (48, 48), (90, 60), (7,)])]
        groups = [{"params": params[:3], "weight_decay": 0.3}, {"params": params[3:], "use_muon": False}]
        settings = settings | {"state_dtype": STATES[states], "state_dtype_min_numel": 0, "rounding_seed": 1}
        optimizer = af.Muon(groups, lr=0.1, **settings, max_grad_norm=1.0)
        inside.use_backend(optimizer, backend)
        for seed in range(3):
            set_grads(params_of(optimizer), random_grads(params, seed, dtype))
            optimizer.step()
        found.append(everything(optimizer))
    assert len(found) > 1
    for other in found[1:]:
        assert_all_same_bits(other, found[0])
    assert {float(value) for name, value in found[0].items() if name.startswith("step")} <= {3.0}
