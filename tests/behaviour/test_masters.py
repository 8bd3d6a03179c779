"""Parameters overwritten from outside: their masters follow, and only theirs; our own steps are not mistaken."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_same_bits
from stored import MASTERS, Model, assert_same, build, grads_of, skip_a_step, train, trained
from table import WEIGHTS
from torch import Tensor
from torch.nn import Parameter

import accumfused as af

each_master = pytest.mark.parametrize("weights", MASTERS)


def assign(model: Model, values: Tensor) -> None:
    model.load_state_dict({**model.state_dict(), "matrix": values, "tied": values})


@torch.no_grad()
def copy_into(model: Model, values: Tensor) -> None:
    model.matrix.copy_(values)


@torch.no_grad()
def multiply(model: Model, values: Tensor) -> None:
    model.matrix.mul_(0).add_(values)


def swap_in_an_average(model: Model, values: Tensor) -> None:
    average = torch.optim.swa_utils.AveragedModel(model)
    with torch.no_grad():
        average.module.matrix.copy_(values)
        for param, mean in zip(model.parameters(), average.module.parameters(), strict=True):
            param.copy_(mean)


WRITES: list[Callable[[Model, Tensor], None]] = [assign, copy_into, multiply, swap_in_an_average]


def step_of(optimizer: Any, seed: int) -> None:
    grads_of(optimizer, seed)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("write", WRITES)
@each_master
def test_a_parameter_that_was_overwritten_is_stepped_from_what_it_is(
    backend: str, weights: str, write: Callable[[Model, Tensor], None]
) -> None:
    model, optimizer = trained(weights, "fp32", backend)
    values = (8 + torch.rand(37, 11)).to(model.matrix.dtype)  # no element is by chance what it was
    write(model, values)
    whole = optimizer.full_precision_state_dict(model)
    assert torch.equal(whole["matrix"], values.float())
    # A twin whose master is made anew from these values, and whose other masters and states are the same.
    twin_model, twin = build(weights, "fp32", backend)
    twin_model.load_state_dict(model.state_dict())
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.load_full_precision_state_dict(twin_model, whole)
    step_of(optimizer, 9)
    step_of(twin, 9)
    assert_same(optimizer, twin)
    step_of(optimizer, 10)
    step_of(twin, 10)
    assert_same(optimizer, twin)


@each_master
def test_other_masters_and_those_of_our_own_steps_are_kept(backend: str, weights: str) -> None:
    model, optimizer = trained(weights, "fp32", backend)
    before = optimizer.full_precision_state_dict(model)
    assert not torch.equal(before["vector"], model.vector.float())
    with torch.no_grad():
        model.matrix.mul_(2)
    skip_a_step(optimizer)
    after = optimizer.full_precision_state_dict(model)
    assert torch.equal(after["matrix"], model.matrix.float())
    for name in ("vector", "scalar", "kernel"):
        assert_same_bits(after[name], before[name])


@each_master
def test_skipped_and_partial_steps_and_windows_are_our_own(backend: str, weights: str) -> None:
    model, optimizer = trained(weights, "fp32", backend)
    twin_model, twin = copy.deepcopy((model, optimizer))
    skip_a_step(optimizer)
    for each, own in ((optimizer, model), (twin, twin_model)):
        own.vector.grad = torch.ones_like(own.vector)
        each.step()
        each.zero_grad()
        for seed in range(2):
            grads_of(each, seed)
            each.accumulate(1.0)
        each.step()
    assert_same(optimizer, twin)


@pytest.mark.parametrize("weights", ["bf16_master", "fp16_master"])
def test_an_fp32_master_serves_again_when_its_weights_come_back(backend: str, weights: str) -> None:
    model, optimizer = trained(weights, "fp32", backend)
    _, twin = copy.deepcopy((model, optimizer))
    kept = [param.detach().clone() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.25)
        optimizer.state_dict(), copy.deepcopy(optimizer)  # neither of which may take the average for the weights
        assert optimizer.full_precision_state_dict(model)["vector"].unique().tolist() == [0.25]
        for param, values in zip(model.parameters(), kept, strict=True):
            param.copy_(values)
    step_of(optimizer, 5)
    step_of(twin, 5)
    assert_same(optimizer, twin)


@each_master
def test_a_checkpoint_of_an_overwritten_parameter_goes_on_as_its_optimizer(backend: str, weights: str) -> None:
    model, optimizer = trained(weights, "fp32", backend)
    with torch.no_grad():
        model.matrix.mul_(0.7)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for order in ((0, 1), (1, 0)):
        twin_model, twin = build(weights, "fp32", backend)
        for index in order:
            (twin_model, twin)[index].load_state_dict(copy.deepcopy(saved[index]))
        step_of(twin, 5)
        reference = copy.deepcopy(optimizer)
        step_of(reference, 5)
        assert_same(reference, twin)
        after = twin.full_precision_state_dict(twin_model)["matrix"]
        with torch.no_grad():  # what was loaded is done with: now an overwrite is one again
            twin_model.matrix.mul_(0.5)
        assert not torch.equal(after * 0.5, twin.full_precision_state_dict(twin_model)["matrix"])


@pytest.mark.parametrize("weights", ["bf16_master", "fp16_master"])
def test_an_fp32_master_of_other_weights_does_not_bring_its_own_back(backend: str, weights: str) -> None:
    _, optimizer = trained(weights, "fp32", backend)
    model, twin = build(weights, "fp32", backend)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        model.vector.add_(8)
    values = model.vector.detach().clone()
    skip_a_step(twin)
    assert torch.equal(model.vector, values)
    assert torch.equal(whole(twin, model.vector), values.float())


@each_master
def test_writes_through_data_count_to_half_a_unit(backend: str, weights: str) -> None:
    param = Parameter(torch.full((3,), 1.0).to(WEIGHTS[weights][0]))
    optimizer = af.SGD([param], lr=0.001, backend=backend, **WEIGHTS[weights][1])
    param.grad = torch.ones_like(param)
    optimizer.step()  # 0.999, whose bfloat16 is 1 with a negative remainder
    param.data.fill_(8.0)
    param.grad.zero_()
    optimizer.step()
    # An fp32 master is compared with its parameter; a remainder cannot be, and is half a unit at most.
    rtol = 0 if weights.endswith("fp32") else 2.0**-8
    torch.testing.assert_close(param.detach().float(), torch.full((3,), 8.0), rtol=rtol, atol=0)


@each_master
def test_a_parameter_with_holes_keeps_its_remainder_when_another_gets_its_first_state(
    backend: str, weights: str
) -> None:
    dtype, settings = WEIGHTS[weights]
    values = torch.randn(64).to(dtype)
    dense, strided = Parameter(values.clone()), Parameter(torch.zeros(128, dtype=dtype)[::2].copy_(values))
    others = [Parameter(torch.zeros(3, dtype=dtype)) for _ in range(2)]
    pairs = [(param, other) for param, other in zip((dense, strided), others, strict=True)]
    optimizers = [af.SGD(pair, lr=1e-4, rounding_seed=1, backend=backend, **settings) for pair in pairs]
    for step in range(3):
        grad = torch.randn(64).to(dtype)
        for optimizer, (param, other) in zip(optimizers, pairs, strict=True):
            param.grad = torch.empty_like(param).copy_(grad)
            other.grad = torch.ones_like(other) if step > 0 else None
            optimizer.step()
        assert torch.equal(whole(optimizers[0], dense), whole(optimizers[1], strided))


@each_master
def test_other_memory_through_data_counts_for_fp32_masters(backend: str, weights: str) -> None:
    param = Parameter(torch.full((3,), 1.0).to(WEIGHTS[weights][0]))
    optimizer = af.SGD([param], lr=0.001, backend=backend, **WEIGHTS[weights][1])
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.grad.zero_()
    moved = param.detach().clone()
    param.data = moved  # the same values elsewhere, as model.to() does
    optimizer.step()
    torch.testing.assert_close(whole(optimizer, param), torch.full((3,), 0.999), rtol=1e-5, atol=0)
    param.data = torch.full_like(moved, 8.0)
    optimizer.step()
    torch.testing.assert_close(param.detach().float(), torch.full((3,), 8.0), rtol=2.0**-8, atol=0)


def whole(optimizer: Any, param: Parameter) -> Tensor:
    module = torch.nn.Module()
    module.p = param
    value: Tensor = optimizer.full_precision_state_dict(module)["p"]
    return value


@pytest.mark.parametrize("weights", ["split16", "split8"])
def test_remainders_that_are_dropped_before_every_step_draw_one_warning(backend: str, weights: str) -> None:
    embedding = torch.nn.Embedding(4, 8, max_norm=1000.0, dtype=torch.bfloat16)  # never reached
    other = Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = af.AdamW([embedding.weight, other], lr=1e-6, backend=backend, **WEIGHTS[weights][1])

    def steps(count: int) -> list[str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(count):
                (embedding(torch.arange(4)).sum() + other.sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert [warning.filename for warning in seen] == [__file__] * len(seen)
        return [str(warning.message) for warning in seen]

    assert steps(4) == []  # the first had no remainder to drop
    grads_of(optimizer, 0)
    optimizer.step()  # nothing was written before this one
    optimizer.zero_grad()
    assert steps(3) == []
    (message,) = steps(4)
    assert "before each of the last 4 steps (by Embedding(max_norm=...), clamp_()" in message
    assert "master_weights='fp32' keeps every element" in message
    assert steps(9) == []


def test_an_fp32_master_keeps_the_elements_that_were_not_written(backend: str) -> None:
    param = Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    optimizer = af.SGD([param], lr=0.001, backend=backend, master_weights="fp32")
    for _ in range(6):
        param.grad = torch.ones_like(param)
        optimizer.step()
        with torch.no_grad():
            param.clamp_(max=1.5)
    torch.testing.assert_close(whole(optimizer, param), torch.tensor([0.994, 1.495]))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@each_master
def test_a_copy_notices_what_is_written_before_its_first_step(
    backend: str, weights: str, copied: Callable[[Any], Any]
) -> None:
    model, optimizer = copied(trained(weights, "fp32", backend))
    with torch.no_grad():
        model.matrix.fill_(3.0)
    assert whole(optimizer, model.matrix).unique().tolist() == [3.0]
    skip_a_step(optimizer)
    assert whole(optimizer, model.matrix).unique().tolist() == [3.0]


@each_master
def test_weights_that_go_back_with_an_empty_checkpoint_bring_no_remainder(backend: str, weights: str) -> None:
    model, optimizer = build(weights, "fp32", backend)
    empty, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    model.vector.grad = torch.ones_like(model.vector)
    optimizer.step()
    optimizer.load_state_dict(empty)
    model.load_state_dict(before)
    model.vector.grad = None
    model.matrix.grad = torch.ones_like(model.matrix)  # another one gets its first state
    optimizer.step()
    assert torch.equal(whole(optimizer, model.vector), before["vector"].float())


@each_master
def test_a_write_is_noticed_after_the_state_was_converted(backend: str, weights: str) -> None:
    """To another layout, and with a checkpoint in between."""
    dtype, settings = WEIGHTS[weights]
    param = Parameter(torch.randn(40, 30).to(dtype))
    optimizer = af.Lion([param], lr=0.05, backend=backend, rounding_seed=1, **settings)
    step_of(optimizer, 0)
    param.data = torch.empty(30, 40, dtype=dtype).t().copy_(param.data)
    grads_of(optimizer, 1)
    optimizer.accumulate(0.3)
    with torch.no_grad():
        param.fill_(3.0)
    optimizer.state_dict()
    assert whole(optimizer, param).unique().tolist() == [3.0]


@each_master
def test_a_write_is_noticed_after_a_second_checkpoint_that_brings_no_master(backend: str, weights: str) -> None:
    model, optimizer = build(weights, "fp32", backend)
    empty, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(optimizer, 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict(empty)
    model.load_state_dict(before)
    assert torch.equal(whole(optimizer, model.matrix), before["matrix"].float())


# ---- parameters that come later --------------------------------------------------------------------------------------


@each_master
def test_a_group_that_is_added_later_gets_its_masters(backend: str, weights: str) -> None:
    model, optimizer = trained(weights, "int8", backend)
    before = optimizer.full_precision_state_dict(model)
    added = Parameter(torch.randn(200).to(WEIGHTS[weights][0]))
    optimizer.add_param_group({"params": [added]})
    with torch.no_grad():
        added.fill_(3.0)
    skip_a_step(optimizer)
    assert whole(optimizer, added).unique().tolist() == [3.0]
    for name, value in before.items():
        assert_same_bits(optimizer.full_precision_state_dict(model)[name], value)
    train(optimizer, 1)
    assert not torch.equal(whole(optimizer, added), added.float())
    if weights == "split16":
        with pytest.raises(ValueError, match=r"torch\.float16, which master_weights='split16' does not serve"):
            optimizer.add_param_group({"params": [Parameter(torch.ones(3).half())]})


@each_master
def test_a_frozen_parameter_is_stepped_from_what_it_is_when_it_is_unfrozen(backend: str, weights: str) -> None:
    model, optimizer = build(weights, "fp32", backend)
    model.vector.requires_grad_(False)
    for seed in range(2):
        grads_of(optimizer, seed)
        model.vector.grad = None
        optimizer.step()
    assert model.vector not in optimizer.state
    with torch.no_grad():
        model.vector.fill_(0.5)
    model.vector.requires_grad_(True)
    optimizer.zero_grad()
    model.vector.grad = torch.ones_like(model.vector)
    optimizer.step()
    # AdamW's first step is lr, and its decay is 0.01 * lr.
    torch.testing.assert_close(whole(optimizer, model.vector), torch.full((130,), 0.5 * 0.999 - 0.1), rtol=1e-4, atol=0)


@each_master
def test_a_parameter_that_was_written_before_its_first_gradient(backend: str, weights: str) -> None:
    model, optimizer = build(weights, "fp32", backend)
    model.matrix.grad = torch.ones_like(model.matrix)
    optimizer.step()
    with torch.no_grad():
        model.vector.fill_(0.5)
        model.matrix.fill_(0.25)
    assert whole(optimizer, model.vector).unique().tolist() == [0.5]
    optimizer.zero_grad()
    model.vector.grad = torch.ones_like(model.vector)
    optimizer.step()  # matrix has no gradient this time
    torch.testing.assert_close(whole(optimizer, model.vector), torch.full((130,), 0.5 * 0.999 - 0.1), rtol=1e-4, atol=0)
    assert whole(optimizer, model.matrix).unique().tolist() == [0.25]


@each_master
def test_a_write_is_noticed_between_the_laying_out_anew_and_the_conversion(backend: str, weights: str) -> None:
    """Its state is converted with its next gradient; the other parameter steps before that."""
    model, optimizer = build(weights, "fp32", backend)
    grads_of(optimizer, 0)
    optimizer.step()
    model.matrix.data = model.matrix.detach().t().contiguous().t()
    optimizer.zero_grad()
    model.vector.grad = torch.ones_like(model.vector)
    optimizer.step()
    with torch.no_grad():
        model.matrix.fill_(0.25)
    grads_of(optimizer, 1)
    skip_a_step(optimizer)
    assert whole(optimizer, model.matrix).unique().tolist() == [0.25]
