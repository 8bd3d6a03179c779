"""Gradients and parameters that cannot be used: an error that says what to do, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from snapshot import differences, refused, snapshot, trained
from torch import Tensor
from torch.nn import Parameter

import accumfused as af
from accumfused.plan import check_gradient

VERBS: dict[str, Callable[[torch.optim.Optimizer], None]] = {
    "step": lambda optimizer: optimizer.step(),
    "accumulate": lambda optimizer: optimizer.accumulate(2.0),
    "close": lambda optimizer: optimizer.accumulate(2.0, last=True),
    "accumulate into a window": lambda optimizer: optimizer.accumulate(),
}


# ---- gradients -----------------------------------------------------------------------------------------------------


def sparse(param: Parameter) -> None:
    param.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, *param.shape[1:]), param.shape, check_invariants=True)


def complex_numbers(param: Parameter) -> None:
    param.grad_dtype = torch.complex64
    param.grad = torch.ones(param.shape, dtype=torch.complex64)


def double(param: Parameter) -> None:
    param.grad_dtype = torch.float64
    param.grad = torch.ones(param.shape, dtype=torch.float64)


def another_shape(param: Parameter) -> None:
    param.grad = torch.ones_like(param)
    param.data = torch.ones(2, 3)


def parameter_in_float64(param: Parameter) -> None:
    param.data = param.data.double()
    param.grad = torch.ones_like(param)


def expanded_parameter(param: Parameter) -> None:
    param.data = torch.ones(1, 3).expand(4, 3)
    param.grad = torch.ones(4, 3)


BAD_GRADIENTS = [
    (sparse, RuntimeError, r"use Embedding\(sparse=False\), or keep .* in an optimizer of torch's own"),
    (complex_numbers, RuntimeError, r"complex64; supported are torch\.float32, torch\.float16, torch\.bfloat16"),
    (double, TypeError, r"float64; supported are torch\.float32, torch\.float16, torch\.bfloat16"),
    (another_shape, RuntimeError, r"a gradient has shape \[4, 3\], its parameter \[2, 3\]"),
    (
        parameter_in_float64,
        (TypeError, RuntimeError),
        r"a parameter (is torch\.float64; supported|became torch\.float64)",
    ),
    (expanded_parameter, RuntimeError, r"overlaps itself in memory \(expanded\?\); clone\(\) it first"),
]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("spoil", "error", "remedy"), BAD_GRADIENTS, ids=[bad[0].__name__ for bad in BAD_GRADIENTS])
@pytest.mark.parametrize("position", [0, 1], ids=["first", "second"])
def test_a_gradient_that_cannot_be_used_is_refused(
    backend: str, verb: str, spoil: Callable[[Parameter], None], error: type[Exception], remedy: str, position: int
) -> None:
    params = [Parameter(torch.randn(4, 3)) for _ in range(2)]
    optimizer = trained(params, backend)
    if verb == "accumulate into a window":
        params[1 - position].grad = torch.randn(4, 3)
        optimizer.accumulate()
    params[1 - position].grad = torch.randn(4, 3)
    spoil(params[position])
    with refused(optimizer, error, remedy):
        VERBS[verb](optimizer)


def test_a_gradient_on_another_device_is_refused() -> None:
    # torch lets nobody assign one, so the check is called by itself.
    with pytest.raises(RuntimeError, match="a gradient is on meta, its parameter on cpu; move one of them"):
        check_gradient(torch.ones(4, 3), torch.ones(4, 3, device="meta"))


def test_a_window_goes_on_after_a_refused_gradient(backend: str) -> None:
    param = Parameter(torch.full((4, 3), 8.0))
    optimizer = af.SGD([param], lr=0.5, backend=backend)
    param.grad = torch.full((4, 3), 2.0)
    optimizer.accumulate()
    sparse(param)
    with refused(optimizer, RuntimeError, "sparse"):
        optimizer.accumulate()
    param.grad = torch.full((4, 3), 4.0)
    optimizer.accumulate()
    optimizer.step()
    assert param.unique().tolist() == [8.0 - 0.5 * 6.0]


# ---- parameters ----------------------------------------------------------------------------------------------------

BAD_PARAMETERS = {
    "float64": (
        lambda: torch.ones(4, dtype=torch.float64), TypeError,
        r"a parameter is torch\.float64; supported are torch\.float32, torch\.float16, torch\.bfloat16",
    ),
    "complex": (lambda: torch.ones(4, dtype=torch.complex64), RuntimeError, r"optimize torch\.view_as_real"),
    "expanded": (lambda: torch.ones(1, 3).expand(4, 3), RuntimeError, r"overlaps itself .*clone\(\) it first"),
    "overlapping": (
        lambda: torch.ones(6).as_strided((3, 3), (1, 1)), RuntimeError, r"strides \[1, 1\] overlaps itself in memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_PARAMETERS)
def test_a_parameter_that_cannot_be_updated_is_refused_at_once(kind: str) -> None:
    make, error, remedy = BAD_PARAMETERS[kind]
    good, bad = Parameter(torch.ones(4)), Parameter(make())
    with pytest.raises(error, match=remedy):
        af.AdamW([good, bad])
    with pytest.raises(error, match=remedy):
        af.AdamW([("good", good), ("bad", bad)])
    optimizer = af.AdamW([good])
    with refused(optimizer, error, remedy):
        optimizer.add_param_group({"params": [bad]})
    assert len(optimizer.param_groups) == 1
    stock = torch.optim.AdamW([good, bad])
    with pytest.raises(error, match=remedy):
        af.fuse(stock)
    assert type(stock) is torch.optim.AdamW


@pytest.mark.parametrize("kind", [*BAD_PARAMETERS, "meta"])
def test_a_frozen_parameter_may_be_anything(backend: str, kind: str) -> None:
    make = BAD_PARAMETERS[kind][0] if kind in BAD_PARAMETERS else lambda: torch.ones(4, device="meta")
    frozen, param = Parameter(make(), requires_grad=False), Parameter(torch.full((4,), 8.0))
    optimizer = af.SGD([frozen, param], lr=0.5, max_grad_norm=1.0, backend=backend)
    param.grad = torch.full((4,), 2.0)
    optimizer.accumulate()
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((4,), 7.75), rtol=1e-6, atol=0)  # clipping adds 1e-6 to 4


def overlapping_pairs() -> dict[str, tuple[Tensor, Tensor]]:
    flat, square = torch.ones(8), torch.ones(4, 4)
    return {
        "the same memory": (flat[:], flat[:]),
        "a common part": (flat[:5], flat[3:]),
        "one within the other": (flat, flat[3:5]),
        "columns and a row": (square[:, ::2], square[0]),
        "two pieces with holes": (square[:, :3], square[:, 2:]),
    }


@pytest.mark.parametrize("pair", list(overlapping_pairs()))
@pytest.mark.parametrize("verb", ["step", "accumulate", "close"])
def test_two_parameters_that_share_memory_are_refused(backend: str, verb: str, pair: str) -> None:
    first, second = map(Parameter, overlapping_pairs()[pair])
    optimizer = af.SGD([{"params": [first]}, {"params": [second]}], lr=0.5, backend=backend)
    first.grad, second.grad = torch.ones(first.shape), torch.ones(second.shape)
    with refused(optimizer, RuntimeError, "two parameters share memory.*assigning one Parameter object to both places"):
        VERBS[verb](optimizer)


def test_neighbours_in_one_piece_of_memory_are_not_refused(backend: str) -> None:
    flat, square = torch.full((8,), 8.0), torch.full((4, 4), 8.0)
    params = [Parameter(view) for view in (flat[:5], flat[5:], square[:, ::2], square[:, 1::2])]
    optimizer = af.SGD(params, lr=0.5, backend=backend)
    for slope, param in enumerate(params):
        param.grad = torch.full(param.shape, float(slope))
    optimizer.step()
    assert flat.tolist() == [8.0] * 5 + [7.5] * 3
    assert square.tolist() == [[7.0, 6.5, 7.0, 6.5]] * 4


def test_one_parameter_listed_twice_is_refused() -> None:
    param = Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="the same parameter twice; remove one of them"):
        af.SGD([param, param], lr=0.1)
    groups = [{"params": [param]}, {"params": [param]}]
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        af.SGD(groups, lr=0.1)


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "float64": lambda data: data.double(),
    "another shape": lambda data: torch.ones(2, 2),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("move", MOVES)
def test_a_parameter_moved_within_a_window_is_refused(backend: str, verb: str, move: str, with_gradient: bool) -> None:
    params = [Parameter(torch.randn(4, 3)), Parameter(torch.randn(2))]
    optimizer = trained(params, backend)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.accumulate(2.0)
    params[0].data = MOVES[move](params[0].data)
    if with_gradient and verb != "step":
        params[0].grad = torch.ones_like(params[0])
    with refused(optimizer, RuntimeError, r"Move the model back, or call zero_grad\(\) and begin the window again"):
        VERBS[verb](optimizer)
    params[0].grad = None
    with refused(optimizer, RuntimeError, "Move the model back"):
        optimizer.backward(params[1].sum(), 2.0)


def test_a_parameter_moved_within_a_window_that_is_still_empty_is_refused_by_its_dtype(backend: str) -> None:
    param = Parameter(torch.randn(4))
    optimizer = trained([param], backend)
    optimizer.accumulate(0)
    param.data = param.data.double()
    param.grad = torch.ones_like(param)
    with refused(optimizer, (RuntimeError, TypeError), r"a parameter (is|became) torch\.float64"):
        optimizer.accumulate(1)


def test_a_model_moved_within_a_window_and_back_goes_on(backend: str) -> None:
    param = Parameter(torch.full((4,), 8.0))
    optimizer = af.SGD([param], lr=0.5, backend=backend)
    param.grad = torch.full((4,), 2.0)
    optimizer.accumulate()
    param.data = param.data.double()
    with refused(optimizer, RuntimeError, r"Move the model back, or call zero_grad\(\) and begin the window again"):
        optimizer.step()
    param.data = param.data.float()
    optimizer.step()
    assert param.tolist() == [7.0] * 4


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": lambda data: data.to(memory_format=torch.channels_last),
    "transposed in place": lambda data: data.transpose(0, 1),  # the same address, other strides
}


@pytest.mark.parametrize("change", LAYOUTS)
@pytest.mark.parametrize("like_the_parameter", [False, True], ids=["old gradient layout", "new gradient layout"])
def test_a_layout_changed_between_steps_is_followed(backend: str, change: str, like_the_parameter: bool) -> None:
    param = Parameter(torch.randn(4, 4, 3, 5))
    optimizer = af.SGD([param], lr=0.5, backend=backend)
    for _ in range(2):
        grad = torch.randn(4, 4, 3, 5)
        expected = param.detach() - 0.5 * grad
        param.grad = torch.empty_like(param).copy_(grad) if like_the_parameter else grad
        optimizer.step()
        assert torch.equal(param, expected)
        param.data = LAYOUTS[change](param.data)


@pytest.mark.parametrize("change", LAYOUTS)
def test_a_layout_changed_within_a_window_is_followed_or_refused(backend: str, change: str) -> None:
    param = Parameter(torch.randn(4, 4, 3, 5))
    optimizer = af.SGD([param], lr=0.5, backend=backend)
    param.grad = torch.randn(4, 4, 3, 5)
    first = param.grad.clone()
    optimizer.accumulate()
    param.data = LAYOUTS[change](param.data)
    second = torch.randn(4, 4, 3, 5)
    expected = param.detach() - 0.5 * (first + second)
    param.grad = second.clone()
    before = snapshot(optimizer)
    try:
        optimizer.accumulate()
    except RuntimeError as error:
        assert "Move the model back" in str(error)  # noqa: PT017  either is right, silence is not
        assert differences(before, snapshot(optimizer)) == []
    else:
        optimizer.step()
        assert torch.equal(param, expected)
