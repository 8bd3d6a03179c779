"""What processes have added up is not added up again, and other calls at odd moments."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import processes
import pytest
import torch
import torch.distributed as dist
from reads import NoReads
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accumfused as af
from accumfused.reduction import Reduction


def param() -> nn.Parameter:
    return nn.Parameter(torch.zeros(4, 3))


def give(p: nn.Parameter, value: float) -> None:
    """Rank 0 gets the value, rank 1 three times of it: their mean is twice the value."""
    p.grad = torch.full_like(p, value * (1.0 + 2.0 * dist.get_rank()))


def a_step_that_is_tried_again() -> float:
    p = param()
    optimizer = af.SGD([p], lr=1.0, process_group=dist.group.WORLD)
    give(p, 1.0)
    optimizer.accumulate()
    out_of_memory = mock.patch.object(optimizer._runtime.backend, "norm", side_effect=RuntimeError("out of memory"))
    with out_of_memory, pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    give(p, 1.0)
    with pytest.raises(RuntimeError, match="complete and waits for its step"):
        optimizer.accumulate()
    p.grad = None
    optimizer.step()
    return float(p.detach()[0, 0])


def a_member_that_is_measured_by_another() -> list[float]:
    p, q = param(), param()
    one, other = (af.SGD([x], lr=1.0, process_group=dist.group.WORLD) for x in (p, q))
    af.clip_together([one, other], max_grad_norm=1e6)
    for x, optimizer in ((p, one), (q, other)):
        give(x, 1.0)
        optimizer.accumulate()
    one.step()
    other.step()
    return [float(x.detach()[0, 0]) for x in (p, q)]


def two_optimizers_of_one_module() -> list[float]:
    model = nn.Linear(3, 4)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    ddp = DistributedDataParallel(model)
    weight, bias = af.SGD([model.weight], lr=1.0), af.SGD([model.bias], lr=1.0)
    with pytest.raises(ValueError, match="no optimizer has the parameter 'bias'"):
        af.attach_ddp(ddp, weight)
    af.attach_ddp(ddp, weight, bias, reduce_dtype=torch.bfloat16)
    for _ in range(2):
        (ddp(torch.ones(1, 3)).sum() * (1.0 + 2.0 * dist.get_rank())).backward()
        for optimizer in (weight, bias):
            optimizer.accumulate()
    for optimizer in (weight, bias):
        optimizer.step()
    return [float(x.detach().flatten()[0]) for x in (model.weight, model.bias)]


def frozen_parameters_ask_nobody() -> float:
    p, frozen = param(), param().requires_grad_(False)
    optimizer = af.SGD([p, frozen], lr=1.0, process_group=dist.group.WORLD)
    give(p, 1.0)
    optimizer.accumulate()
    read = torch.Tensor.tolist
    torch.Tensor.tolist = None  # type: ignore[assignment, method-assign]
    try:
        optimizer.step()
    finally:
        torch.Tensor.tolist = read  # type: ignore[method-assign]
    frozen.requires_grad_(True)  # the arena grows, in all processes
    for x in (p, frozen):
        give(x, 1.0)
    optimizer.step()
    return float(frozen.detach()[0, 0])


def a_window_of_all_is_not_loaded_as_ones_own() -> bool:
    alone = af.SGD([x := param()], lr=1.0, grads_are_reduced=True)
    give(x, 1.0)
    alone.accumulate()
    optimizer = af.SGD([param()], lr=1.0, process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="open window, which is the sum of all processes"):
        optimizer.load_state_dict(alone.state_dict())
    return True


def weights_of_some(last: bool) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(3, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = af.AdamW(model.parameters(), max_grad_norm=1.0)
    before = [p.full_tensor() for p in model.parameters()]
    optimizer.backward(model(torch.ones(1, 3)).sum(), weight=2.0 if dist.get_rank() else None, last=last)
    optimizer.step()
    same = [torch.equal(a, p.full_tensor()) for a, p in zip(before, model.parameters(), strict=True)]
    return all(same) and bool(optimizer.step_was_skipped)


def a_sharded_state_is_not_loaded_as_a_whole_one() -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, q = init_device_mesh("cpu", (2,)), param()
    p = nn.Parameter(distribute_tensor(param().detach(), mesh, [Shard(0)]))
    p.grad = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    optimizer = af.AdamW([p])
    optimizer.step()
    for settings in ({}, {"process_group": dist.group.WORLD}):
        with pytest.raises(ValueError, match="is a part of a state, spread over processes"):
            af.AdamW([q], **settings).load_state_dict(optimizer.state_dict())
    return True


def weights_of_gradients_that_are_reduced() -> float:
    p = param()
    optimizer = af.SGD([p], lr=1.0, grads_are_reduced=True)
    give(p, 1.0)
    with pytest.raises(RuntimeError, match="a weight would come too late"):
        optimizer.accumulate(3.0)
    p.grad = None
    weight = 1.0 + dist.get_rank()  # 1 and 2: their mean is 1.5
    handle = p.register_hook(lambda grad: (dist.all_reduce(grad := grad.clone()), grad / 2)[1])
    optimizer.backward(p.sum(), weight=weight)
    handle.remove()
    optimizer.step()
    return float(p.detach()[0, 0])


def released_where_ddp_would_look_for_gradients() -> list[bool]:
    model = nn.Linear(3, 4)
    ddp = DistributedDataParallel(model)
    optimizer = af.SGD(model.parameters(), lr=1.0)
    af.attach_ddp(ddp, optimizer)
    told = []
    with af.release_gradients(optimizer, bucket_bytes=1):
        for syncs_forward, syncs_backward in ((True, True), (True, False), (False, True)):
            before = [p.detach().clone() for p in model.parameters()]
            with nullcontext() if syncs_forward else ddp.no_sync():
                loss = ddp(torch.ones(1, 3)).sum()
            with (
                pytest.raises(RuntimeError, match=r"within ddp.no_sync\(\)"),
                nullcontext() if syncs_backward else ddp.no_sync(),
            ):
                loss.backward()
            optimizer.zero_grad()
            told.append(all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
    return told


def unfrozen_after_a_refusal() -> list[float]:
    p, late = param(), param().requires_grad_(False)
    optimizer = af.SGD([p, late], lr=1.0, process_group=dist.group.WORLD)
    for x in (p, late):
        give(x, 1.0)
    optimizer.accumulate()
    with pytest.raises(RuntimeError, match="requires no gradient has one"):
        optimizer.step()
    optimizer.zero_grad()
    late.requires_grad_(True)
    for x in (p, late):
        give(x, 1.0)
    optimizer.accumulate()
    optimizer.step()
    return [float(x.detach()[0, 0]) for x in (p, late)]


def unfrozen_within_a_window() -> list[float]:
    p, late = param(), param().requires_grad_(False)
    optimizer = af.SGD([p, late], lr=1.0, process_group=dist.group.WORLD)
    if dist.get_rank() == 0:
        give(p, 2.0)
        optimizer.accumulate()
    late.requires_grad_(True)
    for x in (p, late):
        x.grad = torch.ones_like(x)
    optimizer.accumulate()
    optimizer.step()
    return [float(x.detach()[0, 0]) for x in (p, late)]


CASES: dict[str, tuple[Any, tuple[Any, ...], Any]] = {
    "a step that is tried again": (a_step_that_is_tried_again, (), -2.0),
    "clip_together": (a_member_that_is_measured_by_another, (), [-2.0, -2.0]),
    "two optimizers of one module": (two_optimizers_of_one_module, (), [-4.0, -4.0]),
    "frozen parameters": (frozen_parameters_ask_nobody, (), -2.0),
    "a window of all": (a_window_of_all_is_not_loaded_as_ones_own, (), True),
    "a sharded state": (a_sharded_state_is_not_loaded_as_a_whole_one, (), True),
    "weights of reduced gradients": (weights_of_gradients_that_are_reduced, (), -1.0),
    "released outside no_sync": (released_where_ddp_would_look_for_gradients, (), [True] * 3),
    "unfrozen after a refusal": (unfrozen_after_a_refusal, (), [-2.0, -2.0]),
    "unfrozen within a window": (unfrozen_within_a_window, (), [-2.0, -1.0]),
    "weights of some": (weights_of_some, (False,), True),
    "weights of some, last": (weights_of_some, (True,), True),
}


@pytest.mark.parametrize("case", CASES)
def test_processes(case: str) -> None:
    function, given, expected = CASES[case]
    assert processes.run(2, function, *given) == [expected] * 2


def tell_of_a_frozen_parameter() -> tuple[float, list[bool]]:
    params = [torch.ones(2, requires_grad=True), torch.ones(2), torch.ones(3, requires_grad=True)]
    plan: Any = SimpleNamespace(params=params, device=torch.device("cpu"))
    reduction = Reduction(dist.group.WORLD, None)
    with NoReads():
        divisor, missing = reduction.exchange(plan, 3.0, True, [True, False, True], last=False)
    return float(divisor), missing


def test_processes_with_frozen_parameters_agree_without_a_read() -> None:
    assert processes.run(2, tell_of_a_frozen_parameter) == [(6.0, [False] * 3)] * 2
