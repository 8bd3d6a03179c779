"""Linear layers that add their weight's gradient to the accumulator: against autograd's bits, and against fp64."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import inside
import pytest
import torch
import torch.nn.functional as F
from compare import assert_all_same_bits, assert_close, everything
from models import WAYS, WIDTH, Net, assert_same_gradients, backward, batch, fused, loss_of, mlp
from torch import Tensor, nn

import accumfused as af
from accumfused.loop import linears

Loss = Callable[[Any, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _small_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "SMALLEST", 1)


# ---- the same loop without it, bit for bit --------------------------------------------------------------------------


def plain(model: Any, optimizer: Any, window: int) -> None:
    backward(model, window)
    optimizer.step()
    optimizer.zero_grad()


def sums(model: Any, optimizer: Any, window: int) -> None:
    for number in range(4):
        backward(model, 4 * window + number)
        optimizer.accumulate()
    optimizer.step()


def weighted(
    model: Any, optimizer: Any, window: int, weights: Any = (3, 5.5, 2), last: bool = False, on_device: bool = False
) -> None:
    weights = [*map(torch.tensor, weights)] if on_device else weights
    for number, weight in enumerate(weights):
        loss = loss_of(model, batch(model, 4 * window + number))
        optimizer.backward(loss * torch.nan if weight == 0 else loss, weight, last and number == len(weights) - 1)
    optimizer.step()


def several_passes(model: Any, optimizer: Any, window: int) -> None:
    for number in range(3):
        loss = loss_of(model, batch(model, 4 * window + number))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.accumulate()
    optimizer.step()


def dropped(model: Any, optimizer: Any, window: int) -> None:
    backward(model, 99)
    optimizer.zero_grad()
    sums(model, optimizer, window)


def overflow(model: Any, optimizer: Any, window: int) -> None:
    loss = loss_of(model, batch(model, window))
    optimizer.backward(loss * torch.inf if window == 1 else loss)
    optimizer.step()


def scaled(model: Any, optimizer: Any, window: int) -> None:
    scaler = af.GradScaler("cpu", init_scale=16.0)
    for number in range(2):
        optimizer.backward(scaler.scale(loss_of(model, batch(model, 4 * window + number))))
    scaler.step(optimizer)


def saved(model: Any, optimizer: Any, window: int) -> None:
    for number in range(2):
        optimizer.backward(loss_of(model, batch(model, 4 * window + number)), 2)
    held = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    optimizer.load_state_dict(held)
    optimizer.backward(loss_of(model, batch(model, 4 * window + 3)), 3)
    optimizer.step()


LOOPS: dict[str, Callable[..., None]] = {
    **{loop.__name__: loop for loop in (plain, sums, weighted, several_passes, dropped, overflow, scaled, saved)},
    "closed": functools.partial(weighted, last=True), "empty": functools.partial(weighted, weights=(0, 2, 0, 1)),
    "on the device": functools.partial(weighted, weights=(2.0, 0.0, 1.0), on_device=True),
}  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("releases", [False, True], ids=["", "released"])
@pytest.mark.filterwarnings("ignore:two accumulation windows:accumfused.AccumulationWarning")
@pytest.mark.filterwarnings("ignore:accumulation windows were dropped:accumfused.AccumulationWarning")
def test_a_loop_has_the_bits_of_the_same_loop_without_it(backend: str, loop: str, releases: bool) -> None:
    results = []
    for fuses in (False, True):
        model = mlp()
        optimizer = af.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.01, nonfinite="skip", backend=backend)
        if releases:
            af.release_gradients(optimizer, 1)
        if fuses:
            handle = af.fuse_linears(model, optimizer)
            assert (handle.fused, handle.left) == (["0", "3", "5"], {})
        for window in range(3):
            LOOPS[loop](model, optimizer, window)
        found = everything(optimizer)
        found |= {"skipped": optimizer.skipped_steps, "norm": optimizer.grad_norm}
        results.append(found)
    if loop in (
        "several_passes",
        "closed",
    ):  # one adds two passes up first, the other scales the last gradient by itself
        for name, value in results[0].items():
            assert_close(results[1][name], value, "model", name)
    else:
        assert_all_same_bits(results[1], results[0])


def test_a_window_takes_the_memory_of_its_sums(backend: str) -> None:
    """Of three layers of a quarter of a megabyte each; autograd's sums and ours without it take up to twice that."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    optimizer = fused(model, backend)
    backward(nn.Linear(256, 256), 0, 2, 256)  # a GPU's first products take memory that they keep
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        for number in range(3):
            backward(model, number, 2, 256)
            parts = af.memory_report(optimizer).total.parts
            assert (parts["accumulators"], parts["gradients"]) == (3 * (256 + (number > 0)) * 1024, 3 * 1024)
            optimizer.accumulate()
    live = peak = 0
    for size in inside.allocations(profiler):
        live += size
        peak = max(peak, live)
    sums = 3 * 256 * 256 * 4
    assert sums < peak < 1.1 * sums


# ---- models of every kind, against fp64 -----------------------------------------------------------------------------


def hold_to_fp64(model: nn.Module, backend: str, weights: Any, loss: Loss = loss_of) -> Any:
    exact = copy.deepcopy(model).double()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = af.SGD(trained, lr=0.1, backend=backend)
    handle = af.fuse_linears(model, optimizer)
    total = sum(1 if weight is None else weight for weight in weights)
    for number, weight in enumerate(weights):
        x, exact_x = (batch(each, number).requires_grad_() for each in (model, exact))
        optimizer.backward(loss(model, x), weight, last=number == len(weights) - 1)
        (loss(exact, exact_x) * (1 if weight is None else weight)).backward()
        if exact_x.grad is not None:
            assert x.grad is not None
            assert_close(x.grad, exact_x.grad, "model", "input")
    assert_same_gradients(model, exact, 1 if weights[0] is None else total)
    return handle


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(x.sum(-1).long() % 7)))


def conv1d() -> nn.Module:
    made = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    return nn.Sequential(made(40, WIDTH), nn.Tanh(), made(WIDTH, 40))


def laid_out(lay: Callable[[Tensor], Tensor]) -> nn.Module:
    net = Net("twice")
    net.a.weight = nn.Parameter(lay(net.a.weight.detach()))
    assert not net.a.weight.is_contiguous()
    return net


KINDS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {  # and the layers that are fused
    "tied": (Tied, ["head"]),  # its embedding's part comes through autograd
    "Conv1D": (conv1d, ["0", "2"]),
    "columns first": (lambda: laid_out(lambda weight: weight.t().contiguous().t()), ["a", "b"]),
    "with holes": (lambda: laid_out(lambda weight: weight.repeat(1, 2)[:, :WIDTH]), ["a", "b"]),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # the outer's first pass
@pytest.mark.parametrize("kind", [*KINDS, *WAYS])
@pytest.mark.parametrize("weights", [(None, None, None), (3, 1, 2)], ids=["sums", "weights"])
def test_weights_of_every_kind_and_whatever_a_model_does_with_its_layers(backend: str, kind: str, weights: Any) -> None:
    make, names = KINDS.get(kind, (lambda: Net(kind), ["a", "b"]))
    assert hold_to_fp64(make(), backend, weights).fused == names


def second_order(model: Any, x: Tensor) -> Tensor:
    """A gradient penalty: double backward."""
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return slope.square().mean() + model(x).mean()


def of_weights(model: Any, x: Tensor) -> Tensor:
    """Gradients that torch.autograd.grad returns."""
    slopes = torch.autograd.grad(model(x).square().sum(), [model.a.weight, x], allow_unused=True)
    assert all(slope is not None and slope.norm() > 0 for slope in slopes)
    return model(x).square().mean() * slopes[0].norm().item()  # type: ignore[no-any-return]


def of_a_transform(model: Any, x: Tensor) -> Tensor:
    """An input that torch.func.grad has wrapped, and left."""
    found: list[Tensor] = []
    torch.func.grad(lambda x: found.append(x) or x.sum())(x.detach())  # type: ignore[func-returns-value]
    return loss_of(model, found[0])


@pytest.mark.parametrize("loss", [second_order, of_weights, of_a_transform])
def test_gradients_that_somebody_else_takes_are_autograds(backend: str, loss: Loss) -> None:
    assert hold_to_fp64(Net("twice"), backend, (2, 3, 1), loss).fused == ["a", "b"]


def of_inputs(model: Any, x: Tensor) -> Tensor:
    """Backward passes that ask for no gradient of the weights, or of one of them."""
    y = x.detach().requires_grad_()
    torch.autograd.grad(model(y).square().sum(), y)
    model(y).square().sum().backward(inputs=[y])
    (model(y).square().sum() / 8).backward(inputs=[model.a.weight])
    return loss_of(model, x)


def differentiated_again(model: Any, x: Tensor) -> Tensor:
    """First gradients, and those of a penalty on them, of the input and of a weight."""
    model(x).square().mean().backward(create_graph=True)
    slope, x.grad = x.grad, None
    assert slope is not None
    assert model.a.weight.grad is not None
    return slope.square().sum() + model.a.weight.grad.square().sum()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.parametrize("loss", [of_inputs, differentiated_again])
def test_several_backward_passes_of_other_kinds(backend: str, loss: Loss) -> None:
    net = Net("twice")
    exact, optimizer = copy.deepcopy(net).double(), af.SGD(net.parameters(), lr=0.1, backend=backend)
    af.fuse_linears(net, optimizer)
    for each in (net, exact):
        loss(each, batch(each, 0).requires_grad_()).backward()
    optimizer.accumulate(last=True)
    assert_same_gradients(net, exact)


@pytest.mark.parametrize("kind", ["tensor hook", "hook after accumulation"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_on_a_weight_see_its_gradient(backend: str, kind: str, when: str) -> None:
    model, seen = mlp(), []

    def register() -> None:
        weight: Any = model[3].weight
        if kind == "tensor hook":
            weight.register_hook(lambda grad: seen.append(grad is not None))
        else:
            weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad is not None))

    optimizer = af.SGD(model.parameters(), lr=0.1, backend=backend)
    if when == "before":
        register()
    handle = af.fuse_linears(model, optimizer)
    if when == "after":
        register()
    assert handle.left == ({"3": "its weight has hooks, which expect a gradient"} if when == "before" else {})
    backward(model)
    assert seen == [True]


def test_a_layer_saves_what_its_backward_reads_and_notices_a_write(backend: str) -> None:
    model = mlp()
    optimizer = fused(model, backend)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor
    ):
        backward(model)
    optimizer.accumulate()
    assert [any(tensor is model[layer].weight for tensor in packed) for layer in (0, 3)] == [False, True]
    loss = loss_of(model, batch(model, 0))
    with torch.no_grad():
        model[3].weight.add_(1.0)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("weights", [(None, None, None), (1.5, 5, 2)], ids=["sums", "weights"])
def test_a_window_takes_gradients_and_products_in_turn(backend: str, weights: Any) -> None:
    """Two micro-batches through autograd, whose weights come after them, then one by the layers; and the norm."""
    net, rate = Net(lambda net, x: F.linear(torch.tanh(F.linear(x, net.a.weight)), net.b.weight)), 0.5
    exact = copy.deepcopy(net).double()
    optimizer = af.SGD(net.parameters(), lr=rate, max_grad_norm=1e3, backend=backend)
    af.fuse_linears(net, optimizer)
    for folds in (0, 1, 2):  # folded before the layers bring theirs
        for number, weight in enumerate(weights):
            if number == folds:
                net.way = exact.way = WAYS["twice"]
            (loss_of(exact, batch(exact, number)) * (weight or 1)).backward()
            if number < folds:
                backward(net, number)
                optimizer.accumulate(weight)
            else:
                optimizer.backward(loss_of(net, batch(net, number)), weight)
        optimizer.step()
        grads = [
            param.grad / (sum(weights) if weights[0] else 1) for param in exact.parameters() if param.grad is not None
        ]
        assert_close(optimizer.grad_norm, torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads])), "model")  # type: ignore
        for (name, param), right, grad in zip(net.named_parameters(), exact.parameters(), grads, strict=True):
            right.data.sub_(rate * grad)
            right.grad = None
            assert_close(param, right, "model", name)
        net.way = exact.way = lambda net, x: F.linear(torch.tanh(F.linear(x, net.a.weight)), net.b.weight)
