"""Released gradients, as autograd brings them: how often, for which parameters, and what of them is alive."""

from __future__ import annotations

import weakref
from typing import Any

import inside
import pytest
import torch
from snapshot import refused
from torch import Tensor, _dynamo, nn
from torch.utils.checkpoint import checkpoint

import accumfused as af

EACH, ALL = 1, 2**30


def sgd(count: int, backend: str, bucket: int = EACH, size: int = 4) -> tuple[list[nn.Parameter], af.SGD]:
    """Args: bucket: 0: not released."""
    params = [nn.Parameter(torch.zeros(size)) for _ in range(count)]
    optimizer = af.SGD(params, lr=1.0, backend=backend)
    if bucket:
        af.release_gradients(optimizer, bucket)
    return params, optimizer


def first(*params: Tensor) -> list[float]:
    assert all((param == param[0]).all() for param in params)
    return [param[0].item() for param in params]


@pytest.mark.pairwise(
    bucket=[EACH, ALL], reentrant=[False, True], weights=[(None, None), (1, 3), (2, 0, 2), (4,)], closed=[False, True],
    tensors=[False, True],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # the outer's first pass
def test_a_hook_that_comes_twice_is_one_micro_batch(
    backend: str, reentrant: bool, weights: tuple[Any, ...], closed: bool, tensors: bool, bucket: int
) -> None:
    """Nested checkpoints, over whole numbers, so that every order is exact."""

    def inner(x: Tensor) -> Tensor:
        return (x * a + b) * 2

    def outer(x: Tensor) -> Tensor:
        return checkpoint(inner, x * a, use_reentrant=reentrant) + b

    found = []
    for released in (0, bucket):
        (a, b), optimizer = sgd(2, backend, released)
        with torch.no_grad():
            a += 2
        for index, weight in enumerate(weights):
            loss = checkpoint(outer, torch.full((4,), index + 1.0, requires_grad=True), use_reentrant=reentrant).sum()
            weight = torch.tensor(float(weight)) if tensors and weight is not None else weight
            optimizer.backward(loss, weight, last=closed and index == len(weights) - 1)
        found.append(first(a.grad, b.grad) if closed else [])
        optimizer.step()
        found.append(first(a, b))
    assert found[:2] == found[2:]
    assert found[1][1] == (-6.0 if weights[0] is None else -3.0)


def test_only_the_loop_ends_a_micro_batch(backend: str) -> None:
    (a, b), optimizer = sgd(2, backend)
    for _ in range(2):
        (a * 2).sum().backward()
        (a * 3 + b).sum().backward()
        optimizer.accumulate()
    assert "micro-batches: 2" in repr(optimizer)
    optimizer.step()
    assert first(a, b) == [-10.0, -2.0]


def test_a_gradient_that_cannot_be_used_is_refused_in_backward(backend: str) -> None:
    (other,), optimizer = sgd(1, backend, ALL)
    table = nn.Parameter(torch.zeros(2, 2))
    optimizer.add_param_group({"params": [table]})
    with pytest.raises(RuntimeError, match="sparse gradients are not supported"):
        (nn.functional.embedding(torch.tensor([1]), table, sparse=True).sum() * other).sum().backward()
    with refused(optimizer, RuntimeError, r"ended early.*call optimizer\.zero_grad\(\)"):
        optimizer.step()


@pytest.mark.parametrize("between", [False, True], ids=["in a window", "between windows"])
def test_parameters_that_come_later_are_released_too(backend: str, between: bool) -> None:
    """A group at once; what is unfrozen, from its second micro-batch on; what was removed no longer."""
    (a, frozen, removed), optimizer = sgd(3, backend, bucket=0)
    frozen.requires_grad_(False)
    added = nn.Parameter(torch.zeros(4))
    with af.release_gradients(optimizer, EACH):
        optimizer.param_groups[0]["params"] = [a, frozen]
        (a + removed).sum().backward()
        assert [param.grad is None for param in (a, removed)] == [True, False]
        optimizer.accumulate()
        if between:
            optimizer.step()
        optimizer.add_param_group({"params": [added]})
        frozen.requires_grad_()
        for micro_batch in range(2):
            (a * 3 + added * 5 + frozen * 7).sum().backward()
            assert [param.grad is None for param in (a, added, frozen)] == [True, True, micro_batch == 1]
            optimizer.accumulate()
        optimizer.step()
        assert first(a, added, frozen) == [-7.0, -10.0, -14.0]
    (a + added + frozen).sum().backward()
    assert first(a.grad, added.grad, frozen.grad) == [1.0] * 3


def test_a_step_takes_the_gradients_of_what_was_frozen_alone(backend: str) -> None:
    (a, frozen), optimizer = sgd(2, backend, bucket=0)
    frozen.requires_grad_(False)
    af.release_gradients(optimizer, EACH)
    frozen.requires_grad_().sum().backward()
    optimizer.step()
    assert (first(a, frozen), frozen.grad) == ([0.0, -1.0], None)


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bucket", "expected"), [(1, [1] * 8), (16, [1] * 8), (48, [1, 1, 2, 3, 1, 2, 3, 1])])
def test_no_more_than_a_bucket_is_alive(backend: str, bucket: int, expected: list[int]) -> None:
    """In p.grad or elsewhere, beside the accumulators. A gradient counts once, and each micro-batch begins anew."""
    (a, *others), optimizer = sgd(7, backend, bucket=0)  # of 16 bytes each
    seen: list[Any] = []
    alive: list[int] = []

    def look(param: Tensor) -> None:
        seen.append(weakref.ref(param.grad))
        kept = {id(accumulator) for accumulator in inside.accumulators(optimizer)}
        alive.append(len({id(grad) for ref in seen if (grad := ref()) is not None} - kept))

    for param in (a, *others):
        param.register_post_accumulate_grad_hook(look)  # before those of the release
    with af.release_gradients(optimizer, bucket):
        for _ in range(3):
            for loss in (a.sum(), a.sum(), sum(param.sum() for param in others)):
                loss.backward()
            optimizer.accumulate()
        optimizer.step()
    assert alive == expected * 3
    assert first(a, *others) == [-6.0] + [-3.0] * 6


@pytest.mark.parametrize("weight", [2, torch.full((), 2.0)], ids=["number", "tensor"])
def test_closing_is_no_pass_of_its_own(backend: str, weight: Any) -> None:
    """Each write of an accumulator counts in its version."""
    versions = []
    for bucket in (0, 20):
        params, optimizer = sgd(3, backend, bucket)
        for last in (False, False, True):
            optimizer.backward(sum(param.sum() for param in params), weight, last=last)
        versions.append([inside.version(param.grad) for param in params])
    assert versions[0] == versions[1]


def test_the_bucket_is_32_mib_unless_said_otherwise() -> None:
    params, optimizer = sgd(5, "auto", bucket=0, size=2**21)  # 8 MiB each
    af.release_gradients(optimizer)
    for count, param in enumerate(params, 1):
        param.sum().backward()
        assert sum(p.grad is not None for p in params) == count % 4


@pytest.mark.parametrize("autograd", [False, True], ids=["forward", "backward too"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_loop(autograd: bool) -> None:
    def window(a: nn.Parameter, optimizer: Any) -> None:
        for slope in (1.0, 2.0, 3.0):
            ((a + 1) * slope).sum().backward()
            optimizer.accumulate()
        optimizer.step()

    (a,), optimizer = sgd(1, "auto")
    try:
        with _dynamo.config.patch(compiled_autograd=autograd):
            for _ in range(2):
                torch.compile(window, backend="aot_eager")(a, optimizer)
    finally:
        _dynamo.reset()
    assert first(a) == [-12.0]
