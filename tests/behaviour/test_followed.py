"""What changes between two steps is followed; what a call no longer needs is let go."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import accumfused as af


def stepped(optimizer: torch.optim.Optimizer, param: Tensor, grads: list[float]) -> None:
    for grad in grads:
        param.grad = torch.full_like(param, grad)
        optimizer.step()


@pytest.mark.parametrize("momentum", [(0.0, 0.9), (0.9, 0.0)])
def test_momentum_that_is_switched_by_a_schedule(backend: str, momentum: tuple[float, float]) -> None:
    ours, theirs = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    optimizer = af.SGD([ours], lr=0.1, momentum=momentum[0], backend=backend)
    peer = torch.optim.SGD([theirs], lr=0.1, momentum=momentum[0])
    for value in momentum:
        for group in (*optimizer.param_groups, *peer.param_groups):
            group["momentum"] = value
        stepped(optimizer, ours, [1.0, 2.0])
        stepped(peer, theirs, [1.0, 2.0])
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_amsgrad_that_is_switched_on(backend: str) -> None:
    param = Parameter(torch.ones(3))
    optimizer = af.Adam([param], lr=0.1, betas=(0.5, 0.7), backend=backend)
    stepped(optimizer, param, [4.0])
    optimizer.param_groups[0]["amsgrad"] = True
    stepped(optimizer, param, [3.0, 0.5])
    largest = optimizer.state[param]["max_exp_avg_sq"]
    second = 0.3 * 16  # after the first step; the maximum is kept from the second on
    second = 0.7 * second + 0.3 * 9
    torch.testing.assert_close(largest, torch.full((3,), second), rtol=1e-6, atol=0)


def test_a_parameter_that_moves_to_the_next_group(backend: str) -> None:
    first, second = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    optimizer = af.SGD([{"params": [first, second], "lr": 1.0}, {"params": [], "lr": 10.0}], backend=backend)
    stepped(optimizer, second, [1.0])
    optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())
    stepped(optimizer, second, [1.0])
    assert second.tolist() == [-10.0, -10.0]


def test_one_gradient_of_two_parameters_is_not_adopted(backend: str) -> None:
    params = [Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = af.SGD(params, lr=1.0, backend=backend)
    params[1].grad = torch.full((2,), 1.0)
    optimizer.accumulate(weight=1.0)
    params[0].grad = params[1].grad = torch.full((2,), 2.0)
    optimizer.accumulate(weight=3.0, last=True)
    assert [param.grad.tolist() for param in params] == [[1.5, 1.5], [1.75, 1.75]]


def test_accumulators_follow_a_parameter_that_was_resized_between_windows(backend: str) -> None:
    param = Parameter(torch.zeros(4))
    optimizer = af.SGD([param], lr=1.0, backend=backend)
    for size in (4, 6, 1):
        param.data, param.grad = torch.zeros(size), None
        param.grad_dtype = torch.bfloat16
        for _ in range(2):
            param.grad = torch.ones(size, dtype=torch.bfloat16)
            optimizer.accumulate()
        optimizer.step()
        assert param.tolist() == [-2.0] * size


def test_numbers_of_an_earlier_step_are_not_those_of_a_step_without_gradients(backend: str) -> None:
    param = Parameter(torch.ones(2))
    optimizer = af.SGD([param], max_grad_norm=1.0, backend=backend)
    stepped(optimizer, param, [float("nan")])
    assert bool(optimizer.step_was_skipped)
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.grad_norm is None
    assert not bool(optimizer.step_was_skipped)
    assert int(optimizer.skipped_steps) == 1


@pytest.mark.parametrize("count", [2.0**24, 2.0**25, 2.0**30, -3.0, float("nan")])
def test_step_counts_beyond_what_fp32_counts_agree(count: float) -> None:
    results = []
    for backend in ("torch", "cpu"):
        param = Parameter(torch.ones(3))
        optimizer = af.Adam([param], lr=0.1, backend=backend)
        stepped(optimizer, param, [1.0])
        optimizer.state[param]["step"].fill_(count)
        stepped(optimizer, param, [2.0])
        assert param.isfinite().all()
        results.append(param.detach())
    assert torch.equal(*results)


def test_a_lazily_negated_parameter_is_refused(backend: str) -> None:
    with pytest.raises(RuntimeError, match="resolve_neg"):
        af.SGD([Parameter(torch._neg_view(torch.ones(2)))], backend=backend)


@pytest.mark.parametrize("call", ["accumulate and zero_grad", "step", "raise"])
def test_gradients_are_let_go(backend: str, call: str) -> None:
    param = Parameter(torch.ones(2))
    optimizer = af.SGD([param], backend=backend, nonfinite="raise" if call == "raise" else None)
    param.grad = torch.full((2,), float("nan") if call == "raise" else 1.0)
    grad = weakref.ref(param.grad)
    if call == "accumulate and zero_grad":
        optimizer.accumulate()
    elif call == "step":
        optimizer.step()
    else:
        with pytest.raises(RuntimeError, match="nothing was updated"):
            optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert grad() is None


def test_a_step_that_zeroes_its_own_gradients_drops_no_window(backend: str) -> None:
    class Tidy(torch.optim.RMSprop):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            super().step(closure)
            self.zero_grad()

    param = Parameter(torch.ones(2))
    optimizer = af.fuse(Tidy([param], lr=0.1), backend=backend)
    for _ in range(3):  # a second dropped window in a row would warn, and warnings are errors
        param.grad = torch.ones(2)
        optimizer.accumulate()  # type: ignore[attr-defined]
        optimizer.step()
    assert param.grad is None


def test_accumulators_count_their_versions(backend: str) -> None:
    param = Parameter(torch.ones(2))
    optimizer = af.SGD([param], backend=backend)
    param.grad = torch.ones(2)
    before = param.grad._version
    optimizer.accumulate()
    param.grad = torch.ones(2)
    optimizer.accumulate(last=True)
    assert param.grad._version > before


def test_max_grad_norm_may_be_changed_between_steps(backend: str) -> None:
    param = Parameter(torch.zeros(4))
    optimizer = af.SGD([param], lr=1.0, max_grad_norm=0.5, backend=backend)
    stepped(optimizer, param, [3.0])
    torch.testing.assert_close(param.norm(), torch.tensor(0.5), rtol=1e-5, atol=0)
    optimizer.max_grad_norm = 0.25
    stepped(optimizer, param, [3.0])
    torch.testing.assert_close(param.norm(), torch.tensor(0.75), rtol=1e-5, atol=0)
    for wrong in (-1.0, 0):
        with pytest.raises(ValueError, match=f"max_grad_norm must be > 0, got {wrong}; None is off"):
            optimizer.max_grad_norm = wrong
    assert optimizer.max_grad_norm == 0.25
    with pytest.raises(ValueError, match="one for all groups"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(1))], "max_grad_norm": 1.0})


def test_a_checkpoint_is_not_loaded_into_an_open_window(backend: str) -> None:
    param = Parameter(torch.zeros(4))
    optimizer = af.SGD([param], lr=1.0, backend=backend)
    checkpoint = optimizer.state_dict()
    param.grad = torch.ones(4)
    optimizer.accumulate()
    with pytest.raises(RuntimeError, match=r"call step\(\) or zero_grad\(\) before load_state_dict\(\)"):
        optimizer.load_state_dict(checkpoint)
    optimizer.zero_grad()
    optimizer.load_state_dict(checkpoint)


def test_closed_windows_that_a_scaler_skips_draw_no_warning(backend: str) -> None:
    param = Parameter(torch.zeros(4))
    optimizer = af.SGD([param], lr=1.0, backend=backend)
    for _ in range(3):  # warnings are errors
        param.grad = torch.full((4,), float("inf"))
        optimizer.accumulate(last=True)
        optimizer.zero_grad()
