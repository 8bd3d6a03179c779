"""The CUDA backend's launches over the emulation: what they send to the device, and launches that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import inside
import pytest
import torch
from compare import assert_all_same_bits, everything
from device import Kernels
from table import ADAMW_CASE, random_grads, random_params, set_grads
from torch import Tensor

import accumfused as af
from accumfused.backends.cpu import CpuBackend
from accumfused.backends.cuda import CudaBackend
from accumfused.backends.several import SeveralDevices
from accumfused.core.protocol import Outcome
from accumfused.core.rows import Grads
from accumfused.formats.numeric import CHUNK


def make(backend: Any, **options: Any) -> tuple[Any, list[Tensor]]:
    """An optimizer and its two parameters, which have gradients."""
    params = random_params([(CHUNK + 20,), (30,)])
    optimizer = ADAMW_CASE.make(params, backend, **options)
    set_grads(params, [torch.ones_like(p) for p in params])
    return optimizer, params


def launches(machine: Any, call: Callable[[], Any]) -> int:
    before = machine.launches()
    call()
    return int(machine.launches() - before)


@pytest.mark.parametrize(("groups", "steps"), [(1, 1), (21, 1), (22, 2), (43, 3)])
def test_a_step_of_many_groups_is_several_launches(groups: int, steps: int, cuda: CudaBackend, machine: Any) -> None:
    """One carries 150 hyper-parameters, and AdamW has 7. Each learning rate is new."""
    found = []
    for backend in (cuda, CpuBackend()):
        optimizer = ADAMW_CASE.make(random_params([(20,), (CHUNK + 5,)]), backend, max_grad_norm=1.0)
        for index in range(1, groups):
            optimizer.add_param_group({"params": random_params([(3000,), (3,)][: (index + 1) % 3], seed=index)})
        every = [param for group in optimizer.param_groups for param in group["params"]]
        set_grads(every, random_grads(every, 0))
        for number in range(3):
            for index, group in enumerate(optimizer.param_groups):
                group["lr"] = 0.1 * index + number
            made = launches(machine, optimizer.step)
        assert made == (1 + steps if backend is cuda else 0)
        found.append(everything(optimizer))
    assert_all_same_bits(found[0], found[1])


def with_two_rules(optimizer: Any) -> None:
    extra = random_params([(20,)])
    optimizer.add_param_group({"params": extra, "amsgrad": True})
    set_grads(extra, random_grads(extra, 0))


def with_more_formats(optimizer: Any) -> None:
    """All of a rule's go in one launch."""
    extra = random_params([(3000,), (60,)], seed=1)
    extra[1] = extra[1].detach().bfloat16().requires_grad_()
    optimizer.add_param_group({"params": extra, "amsgrad": True})
    set_grads(extra, random_grads(extra, 0))


def few_of_many(optimizer: Any, count: int = 1021) -> None:
    """Most tensors of the model then have no gradient."""
    extra = [torch.ones(1, requires_grad=True) for _ in range(count)]
    optimizer.add_param_group({"params": extra})
    set_grads(extra[-13:], [torch.ones(1) for _ in range(13)])


def folded(optimizer: Any) -> None:
    """Two micro-batches a window; the other cases step from `p.grad`."""


def not_finite(optimizer: Any) -> None:
    """The steps are skipped, and each counts once."""
    optimizer.param_groups[0]["params"][0].grad[5] = torch.inf


def in_a_clip_group(optimizer: Any) -> None:
    other = ADAMW_CASE.make(random_params([(9,)], seed=1), inside.backend(optimizer))
    set_grads(other.param_groups[0]["params"], [torch.ones(9)])
    optimizer.step = af.ClipGroup([optimizer, other], max_grad_norm=1.0).step


@pytest.mark.parametrize(
    ("settings", "change", "count"),
    [
        ({}, None, 2),
        ({"max_grad_norm": None, "nonfinite": "propagate"}, None, 2),
        ({}, folded, 2),
        ({}, not_finite, 2),
        ({}, few_of_many, 2),
        ({"state_dtype": torch.bfloat16, "state_dtype_min_numel": 2}, None, 2),
        ({}, with_two_rules, 3),
        ({"state_dtype": torch.bfloat16, "state_dtype_min_numel": 100, "rounding_seed": 1}, with_more_formats, 3),
        ({"nonfinite": "raise"}, None, 2),
        ({"max_grad_norm": None}, in_a_clip_group, 5),
        ({"skip_above": 50.0}, None, 2),
        ({"clip": af.clip.PerTensor(0.5), "max_grad_norm": None}, None, 3),
        ({"noise_scale": 0.9}, folded, 3),
        ({"metrics": 1}, None, 8),
    ],
)
def test_a_step_is_a_norm_and_a_launch_for_each_rule(
    settings: dict[str, Any], change: Callable[[Any], None] | None, count: int, cuda: CudaBackend, machine: Any
) -> None:
    found, made = [], []
    for backend in (cuda, CpuBackend()):
        optimizer, params = make(backend, **{"max_grad_norm": 1.0, **settings})
        grads = random_grads(params, 0), random_grads(params, 1)
        for number in range(3):  # the second step sends what the first one, with new states, had not
            for kept in grads if change is folded else grads[:1]:  # where they are, so that nothing is sent
                for param, grad in zip(params, kept, strict=True):
                    param.grad = grad
                if change is folded:
                    optimizer.accumulate()
            if change is not None and change is not folded and number == 0:
                change(optimizer)
            before = machine.launches()
            optimizer.step()
        made.append(machine.launches() - before)
        found.append(everything(optimizer) | {"skipped": optimizer.skipped_steps})
    assert_all_same_bits(found[0], found[1])
    assert made == [count, 0]


@torch.no_grad()
def test_a_step_without_a_norm_in_front_counts_too(cuda: CudaBackend, machine: Any) -> None:
    found = []
    for backend in (cuda, CpuBackend()):
        optimizer, params = make(backend)
        optimizer.step()
        plan = inside.plan(optimizer)
        outcome = Outcome(torch.tensor([1.0, 0.0, 0.0]))
        for _ in range(2):
            before = machine.launches()
            backend.step(plan, Grads(p.grad for p in params), plan.hypers(optimizer.param_groups), outcome)
            assert machine.launches() - before in (0, 2), "the step counts, and the step"
        found.append(everything(optimizer))
    assert_all_same_bits(found[0], found[1])
    assert int(found[0]["step 0"]) == 3


def test_a_chunk_occupies_many_blocks(cuda: CudaBackend, machine: Any) -> None:
    machine.multiprocessors(64)
    optimizer, params = make(cuda, max_grad_norm=1.0)
    optimizer.step()
    assert machine.grid() == 16 + 1 + 1, "of a chunk, of 20 elements, and of 30"
    optimizer.zero_grad()
    set_grads(params, [torch.ones_like(p, dtype=torch.bfloat16) for p in params])
    optimizer.accumulate()
    assert machine.grid() == 16 + 1 + 1, "a copy"
    set_grads(params, [torch.ones_like(p, dtype=torch.bfloat16) for p in params])
    optimizer.accumulate()
    assert machine.grid() == 3, "a sum"


@pytest.mark.parametrize("queue", [True, False])
def test_chunks_queue_for_room_and_units_take_turns(queue: bool, cuda: CudaBackend, machine: Any) -> None:
    machine.multiprocessors(1)  # room for one thread block
    machine.allow(queue=queue)
    found = []
    for backend in (cuda, CpuBackend()):
        optimizer, _ = make(backend, max_grad_norm=1.0)
        optimizer.step()
        grids = [machine.grid()]
        few_of_many(optimizer, 13)
        every = [param for group in optimizer.param_groups for param in group["params"]]
        for call in (optimizer.step, optimizer.accumulate, optimizer.accumulate):
            for param in every:
                param.grad = None
            set_grads(every, random_grads(every, 0, torch.bfloat16))
            call()
            grids.append(machine.grid())
        found.append(everything(optimizer))
        if backend is cuda:
            assert grids == [1] + [16 if queue else 1] * 3
    assert_all_same_bits(found[0], found[1])


class Loop:
    """Windows of four micro-batches, whose gradients stay where they are; the parameter `missing` has none."""

    def __init__(self, backend: Any, weights: list[Any], missing: int | None = None) -> None:
        self.optimizer, self.params = make(backend, max_grad_norm=1.0)
        self.weights, self.missing = weights, missing
        self.grads = random_grads(self.params, 0)

    def run(self) -> None:
        for weight in self.weights:
            for index, (param, grad) in enumerate(zip(self.params, self.grads, strict=True)):
                param.grad = None if index == self.missing else grad
            self.optimizer.accumulate(weight)
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("weights", [[None] * 4, [3.0, 1.0, 5.0, 2.0]])
def test_a_window_is_its_folds_a_norm_and_a_step_and_clears_only_sums_without_gradients(
    weights: list[Any], cuda: CudaBackend, machine: Any
) -> None:
    ours, theirs = Loop(cuda, weights), Loop(CpuBackend(), weights)
    ours.run(), theirs.run()  # makes the states
    for missing, wanted in ((None, []), (1, ["_foreach_zero_"]), (1, ["_foreach_zero_"]), (None, [])):
        ours.missing = theirs.missing = missing
        with Kernels() as torchs:
            assert launches(machine, ours.run) == 4 + 2, "the first fold copies, because the test keeps the gradients"
        theirs.run()
        assert torchs.seen == wanted
    assert_all_same_bits(everything(ours.optimizer), everything(theirs.optimizer))


@pytest.mark.parametrize("count", range(6))
def test_a_launch_that_fails_leaves_the_optimizer_usable(count: int, cuda: CudaBackend, machine: Any) -> None:
    """A norm that was not taken is told to nobody."""
    (ours, _), (theirs, _) = make(cuda, max_grad_norm=1.0), make(CpuBackend(), max_grad_norm=1.0)
    for _ in range(2):
        machine.fail_after(count)
        try:
            ours.step()
        except RuntimeError as error:
            assert "CUDA, " in str(error)  # noqa: PT017
            assert "too many resources requested for launch" in str(error)  # noqa: PT017
            assert count > 0 or ours.grad_norm.isnan()
            ours.step()
        machine.fail_after(-1)
        theirs.step()
    assert_all_same_bits(everything(ours), everything(theirs))


def test_several_devices_have_a_norm_of_their_own(
    cuda: CudaBackend, devices_apart: tuple[torch.device, torch.device]
) -> None:
    other, leading = devices_apart
    found = []
    for backend in (SeveralDevices({leading: cuda, other: CpuBackend()}), CpuBackend()):
        optimizer, _ = make(backend, max_grad_norm=1.0)
        optimizer.step()
        found.append(everything(optimizer))
    assert_all_same_bits(found[0], found[1])
