"""checkpoints/0.1.0.pt was written by version 0.1.0, which then made one more step: this version makes the same one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import Parameter

import accumfused as af

FILE = Path(__file__).parent / "checkpoints" / "0.1.0.pt"


def test_checkpoints_of_0_1_0_go_on(backend: str) -> None:
    cases = torch.load(FILE, weights_only=True, map_location=torch.get_default_device())
    assert len(cases) == 11  # formats of parameters and states, windows with and without weights
    for name, case in cases.items():
        params = [Parameter(value.clone()) for value in case["params"]]
        optimizer: af.FusedOptimizer = getattr(af, case["class"])(params, **case["options"], backend=backend)
        optimizer.load_state_dict(case["state_dict"])
        for param, grad in zip(params, case["grads"], strict=True):
            param.grad = grad.clone()
        if case["is_open"]:
            optimizer.accumulate(case["weight"])
        optimizer.step()
        assert all(map(torch.equal, params, case["stepped"])), name
