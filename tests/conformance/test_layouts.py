"""Tensors that are not contiguous, not aligned, empty or without memory: the same bits as for contiguous ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compare import assert_same_bits
from table import Case, case_named, every_case, random_grads, random_params, set_grads
from torch import Tensor

from accumfused.backends.reference import ReferenceBackend

GAP = 99.0  # between the elements of a parameter with holes: nobody's business


def same(values: Tensor) -> Tensor:
    return values


def with_holes(values: Tensor) -> Tensor:
    base = values.new_full((*values.shape[:-1], 2 * values.shape[-1]), GAP)
    base[..., ::2] = values
    return base[..., ::2]


def every_third_row(values: Tensor) -> Tensor:
    base = values.new_full((3 * values.shape[0], *values.shape[1:]), GAP)
    base[::3] = values
    return base[::3]


def transposed(values: Tensor) -> Tensor:
    return values.t().contiguous().t()


def channels_last(values: Tensor) -> Tensor:
    return values.contiguous(memory_format=torch.channels_last)


def permuted_with_holes(values: Tensor) -> Tensor:
    return with_holes(values.permute(1, 2, 0).contiguous()).permute(2, 0, 1)


def misaligned(values: Tensor) -> Tensor:
    return torch.cat([values.new_full((1,), GAP), values.flatten()])[1:].view(values.shape)


def strides_of_one_size(values: Tensor) -> Tensor:
    return values.as_strided(values.shape, (17, values.stride(1), 5))


@dataclass(frozen=True)
class Layout:
    """Where a parameter's elements lie."""

    shape: tuple[int, ...]
    place: Callable[[Tensor], Tensor]  # contiguous values -> the same values in this layout
    in_memory: Callable[[Tensor], Tensor] = same  # a logical tensor -> contiguous, in the order of this layout's memory

    @property
    def name(self) -> str:
        return f"{self.place.__name__} {self.shape}"


LAYOUTS = (
    Layout((70, 9), same),
    Layout((70, 9), with_holes),
    Layout((70, 9), every_third_row),
    Layout((70, 9), transposed, lambda t: t.t().contiguous()),
    Layout((6, 5, 4, 3), channels_last, lambda t: t.permute(0, 2, 3, 1).contiguous()),
    Layout((7, 6, 5), permuted_with_holes, lambda t: t.permute(1, 2, 0).contiguous()),
    Layout((1, 37, 1), strides_of_one_size),
    Layout((33, 3), misaligned),
    Layout((), same),
    Layout((0,), same),
    Layout((0, 6), with_holes),
    Layout((3, 0), same),
)
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)


def results(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
    states = {name: value.clone() for name, value in optimizer.state[param].items()}
    return {"param": param.detach().clone(), **states, "grad_norm": optimizer.grad_norm.clone()}


def train(case: Case, backend: Any, values: Tensor, place: Any, place_grad: Any, in_memory: Any) -> dict[str, Tensor]:
    """Steps from autograd's gradient, from one that is set, from windows in 32 and 16 bits."""
    param, other = place(in_memory(values).clone()).detach().requires_grad_(), random_params([(40,)])[0]
    params = [param, other]
    optimizer = case.make(params, backend, max_grad_norm=0.5)
    shapes = [values, other]

    def grads(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        first, second = random_grads(shapes, seed, dtype)
        return [in_memory(first), second]

    sum((p * g).sum() for p, g in zip(params, grads(0), strict=True)).backward()
    optimizer.step()

    def put(seed: int, dtype: torch.dtype) -> None:
        first, second = grads(seed, dtype)
        set_grads(params, [None, second])
        if dtype != torch.float32:
            param.grad_dtype = dtype
        param.grad = place_grad(first)

    put(1, torch.float32)
    optimizer.step()
    for seed, dtype in ((2, torch.float32), (4, torch.bfloat16)):
        optimizer.zero_grad()
        put(seed, dtype)
        optimizer.accumulate(3.0)
        put(seed + 1, dtype)
        optimizer.accumulate(0.5)
        optimizer.step()
    return results(optimizer, param)


def compare_with_contiguous(case: Case, backend: Any, layout: Layout, place_grad: Callable[[Tensor], Tensor]) -> None:
    """Against a contiguous parameter whose elements have the order of this one's memory, which is the norm's order."""
    values = random_params([layout.shape])[0].detach()
    found = train(case, backend, values, layout.place, place_grad, same)
    expected = train(case, ReferenceBackend(), values, same, same, layout.in_memory)
    for name, value in expected.items():
        actual = found[name] if value.dim() == 0 else layout.in_memory(found[name])
        assert_same_bits(actual, value, name)


COMPARISONS: list[Any] = [
    (layout.name, lambda c, b, layout=layout: compare_with_contiguous(c, b, layout, layout.place), lambda case: True)
    for layout in LAYOUTS
    if 0 not in layout.shape
]


@every_case
@layouts
def test_any_layout_gives_the_bits_of_a_contiguous_one(case: Case, layout: Layout, backend: str) -> None:
    compare_with_contiguous(case, backend, layout, layout.place)


@layouts
@pytest.mark.parametrize("place_grad", [same, with_holes, misaligned], ids=lambda place: place.__name__)
def test_a_gradient_may_have_another_layout(layout: Layout, place_grad: Any, backend: str) -> None:
    if layout.shape == () and place_grad is with_holes:
        place_grad = same

    def keep_dtype(grad: Tensor) -> Tensor:
        return place_grad(grad.float()).to(grad.dtype)

    compare_with_contiguous(case_named("adamw_amsgrad"), backend, layout, keep_dtype)


@pytest.mark.parametrize("place", [with_holes, every_third_row, misaligned])
def test_memory_between_a_parameters_elements_is_left_alone(place: Any, backend: str) -> None:
    param = place(torch.zeros(20, 6))
    base = param._base
    before = base.clone()
    leaf = param.detach().requires_grad_()
    optimizer = case_named("adamw").make([leaf], backend, max_grad_norm=1.0)
    leaf.grad = torch.ones(20, 6)
    optimizer.step()
    gaps = before == GAP
    assert gaps.any()
    assert (base[gaps] == GAP).all()
    assert (base[~gaps] != 0).all()


@pytest.mark.parametrize("accumulates", [False, True])
def test_an_expanded_gradient_is_taken_at_its_values(accumulates: bool, backend: str) -> None:
    param = torch.zeros(4, 3, requires_grad=True)
    optimizer = case_named("sgd").make([param], backend)
    row = torch.tensor([1.0, 2.0, 3.0])
    param.grad = row.expand(4, 3)
    if accumulates:
        optimizer.accumulate()
        param.grad = row.expand(4, 3)
        optimizer.accumulate()
    optimizer.step()
    assert_same_bits(param, -((row * (2 if accumulates else 1)).expand(4, 3) * torch.tensor(0.3)))
    assert row.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_lazily_negated_gradient_is_taken_at_its_values(accumulates: bool, backend: str) -> None:
    param = torch.zeros(3, requires_grad=True)
    optimizer = case_named("sgd").make([param], backend)
    grad = torch._neg_view(torch.tensor([1.0, 2.0, -3.0]))
    param.grad = grad
    if accumulates:
        optimizer.accumulate()
    optimizer.step()
    assert_same_bits(param, torch.tensor([1.0, 2.0, -3.0]) * torch.tensor(0.3))


def test_a_gradient_that_takes_the_place_of_another_may_be_lazily_negated(backend: str) -> None:
    """Its object and its memory may be those of the one before, which was freed."""
    values, param = torch.randn(64), torch.zeros(64, requires_grad=True)
    optimizer = case_named("sgd").make([param], backend)
    for _ in range(3):
        for make, sign in ((values.detach, 1.0), (lambda: torch._neg_view(values), -1.0)):
            before = param.detach().clone()
            param.grad = make()
            optimizer.step()
            param.grad = None
            assert_same_bits(param, before - sign * values * torch.tensor(0.3))


@every_case
def test_frozen_and_unused_parameters_are_left_alone(case: Case, backend: str) -> None:
    used, unused, frozen = random_params([(5,), (6,), (7,)])
    frozen.requires_grad_(False)
    before = [p.detach().clone() for p in (used, unused, frozen)]
    optimizer = case.make([frozen, used, unused], backend, max_grad_norm=1.0)
    alone = before[0].clone().requires_grad_()
    expected = case.make([alone], ReferenceBackend(), max_grad_norm=1.0)
    for seed in range(3):
        (grad,) = random_grads([used], seed)
        set_grads([used, alone], [grad, grad])
        if seed == 2:
            optimizer.accumulate(2.0)
        optimizer.step()
        expected.step()
    assert_same_bits(used, alone)
    assert_same_bits(unused, before[1])
    assert_same_bits(frozen, before[2])
    assert unused not in optimizer.state
    assert frozen not in optimizer.state


class Wrapper(Tensor):
    """A tensor without memory of its own, as DTensor is."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        wrapper = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = [a.inner if isinstance(a, Wrapper) else a for a in args]
        return function(*unwrapped, **(kwargs or {}))


def zeros_without_memory() -> Tensor:
    return torch._efficientzerotensor(3, device=torch.get_default_device())


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize(
    ("make", "value"), [(lambda: Wrapper(torch.ones(3)), 1.0), (zeros_without_memory, 0.0)], ids=["wrapper", "zero"]
)
def test_a_gradient_without_memory_is_refused_or_taken_at_its_values(
    make: Any, value: float, accumulates: bool, backend: str
) -> None:
    params = random_params([(3,), (3,)])
    before = [p.detach().clone() for p in params]
    optimizer = case_named("sgd_weight_decay").make(params, backend)
    params[0].grad, params[1].grad = make(), torch.ones(3)
    try:
        if accumulates:
            optimizer.accumulate()
        optimizer.step()
    except (RuntimeError, TypeError):
        expected = before
    else:
        step = [torch.full((3,), value), torch.ones(3)]
        expected = [b - (g + b * torch.tensor(0.2)) * torch.tensor(0.3) for b, g in zip(before, step, strict=True)]
    for param, want in zip(params, expected, strict=True):
        assert_same_bits(param, want)
