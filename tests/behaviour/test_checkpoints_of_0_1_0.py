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
        for param, stepped in zip(params, case["stepped"], strict=True):
            near = 2.0**-7 if "split8" in name else 0  # a unit of bfloat16: its noise was another
            torch.testing.assert_close(param.detach(), stepped, rtol=near, atol=0, msg=name)


def test_a_late_gradient_that_0_1_0_held_under_a_weight_of_its_own_gets_it(backend: str) -> None:
    """Here it has had it when it is saved."""
    params = [Parameter(torch.zeros(4)) for _ in range(4)]
    optimizer, old = (af.SGD(pair, lr=1.0, backend=backend) for pair in (params[:2], params[2:]))
    for param, weight in zip(params, (3.0, 4.0), strict=False):
        param.grad = torch.ones(4)
        optimizer.accumulate(weight)
    saved = optimizer.state_dict()
    late = saved["state"][1]
    late |= {"grad_accumulator": torch.ones(4), "grad_accumulator_weights": late["grad_accumulator_weights"].clone()}
    late["grad_accumulator_weights"][0] = 2.0  # 4, in units of the power of two below the first weight
    old.load_state_dict(saved)
    for each in (optimizer, old):
        each.step()
    assert torch.equal(params[1], torch.full((4,), -4 / 7))
    assert all(map(torch.equal, params[:2], params[2:]))
