"""Fused linear layers: who is left alone, who sees ordinary layers, and what a handle does."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import inside
import pytest
import torch
from compare import assert_all_same_bits, assert_close, everything, refused
from models import WIDTH, Net, assert_same_gradients, backward, batch, fused, loss_of, mlp, through_a_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import accumfused as af
from accumfused.loop import linears


@pytest.fixture(autouse=True)
def _small_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "SMALLEST", 1)


# ---- who is left alone ----------------------------------------------------------------------------------------------


class Own(nn.Linear):
    pass


class Wrapped(nn.Parameter):
    pass


def test_the_report_names_every_linear_layer_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "SMALLEST", 500)
    model = nn.ModuleDict({
        "fused": nn.Linear(WIDTH, WIDTH), "small": nn.Linear(WIDTH, 2), "frozen": nn.Linear(WIDTH, WIDTH),
        "norm": parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        "pruned": nn.Linear(WIDTH, WIDTH), "own": Own(WIDTH, WIDTH), "other": nn.Linear(WIDTH, WIDTH),
        "bf16": nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), "wrapped": nn.Linear(WIDTH, WIDTH),
        "tensor": nn.Linear(WIDTH, WIDTH), "attention": nn.MultiheadAttention(WIDTH, 2),
        "bilinear": nn.Bilinear(3, 3, 3),
    })  # fmt: skip
    parts: Any = model
    prune.random_unstructured(parts["pruned"], "weight", 0.5)
    parts["frozen"].weight.requires_grad_(False)
    parts["wrapped"].forward = torch.tanh
    parts["tensor"].weight = Wrapped(torch.zeros(WIDTH, WIDTH))
    others = {*parts["other"].parameters()}
    optimizer = af.SGD([p for p in model.parameters() if p not in others and p.requires_grad], lr=0.1)
    handle = af.fuse_linears(model, optimizer)
    assert handle.fused == ["fused"]
    own = "it is a {}, with a forward of its own"
    computed = "its weight is computed from other parameters"
    assert handle.left == {
        "small": "its weight has 48 elements, and below 500 the calls cost more than they save",
        "frozen": "its weight is frozen", "norm": computed, "pruned": computed, "own": own.format("Own"),
        "other": "the optimizer does not have its weight",
        "bf16": "no product of torch.bfloat16 can be added to an fp32 accumulator on cpu",
        "wrapped": "its forward was replaced, by an earlier call or by somebody else",
        "tensor": "its weight is a Wrapped",
        "attention.out_proj": own.format("NonDynamicallyQuantizableLinear"),
    }  # fmt: skip
    said = str(handle)
    assert said.startswith(
        "1 layers add their weight's gradient to the accumulator\n  fused\n10 linear layers are left"
    )
    assert "\n  frozen: its weight is frozen" in said
    assert "an earlier call" in af.fuse_linears(model, optimizer).left["fused"]


def test_a_layer_that_changes_later_goes_its_ordinary_way(backend: str) -> None:
    """Parametrized, frozen, replaced or of another dtype, after fuse_linears."""

    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    net = Net("twice")
    optimizer = fused(net, backend)
    original = net.a.weight
    parametrize.register_parametrization(net.a, "weight", Twice())
    net.b.weight.requires_grad_(False)
    exact = copy.deepcopy(net).double()
    for each in (net, exact):
        backward(each)
    assert original.grad is not None
    assert net.b.weight.grad is None
    assert_close(original.grad, exact.a.parametrizations["weight"].original.grad, "model")  # type: ignore[index, arg-type]
    optimizer.accumulate()
    net.to(torch.bfloat16)
    backward(net)
    assert original.grad is not None


def test_a_layer_frozen_after_its_forward_pass_gets_no_gradient(backend: str) -> None:
    model = mlp()
    optimizer = fused(model, backend)
    before, other = model[0].weight.detach().clone(), model[3].weight.detach().clone()
    loss = loss_of(model, batch(model, 0))
    model[0].weight.requires_grad_(False)
    optimizer.backward(loss)
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert not torch.equal(model[3].weight, other)


def test_an_output_may_be_written_in_place_and_an_input_has_its_name(backend: str) -> None:
    found = []
    for fuses in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 40), nn.ReLU(inplace=True), nn.Linear(40, 16))
        optimizer = af.SGD(model.parameters(), lr=0.1, backend=backend)
        if fuses:
            af.fuse_linears(model, optimizer)
        for shape in ((4, WIDTH), (2, 3, WIDTH), (WIDTH,), (0, 3, WIDTH)):
            model[2](input=model[1](model[0](batch(model, 0, *shape)))).sum().backward()
            optimizer.accumulate()
        optimizer.step()
        found.append(everything(optimizer))
        with pytest.raises(TypeError):
            model[0](None)
    assert_all_same_bits(*found)


def test_autocast_casts_as_it_does_for_the_layer_itself(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU no product in 16 bits is added in fp32, so the layers are left alone; here it is pretended."""
    device = torch.get_default_device().type

    def add_product(accumulator: Tensor, left: Tensor, right: Tensor, holds_sum: bool) -> None:
        assert (left.dtype, right.dtype) == (torch.bfloat16, torch.bfloat16)
        accumulator.copy_((left @ right).float() + (accumulator if holds_sum else 0.0))

    for pretends in (False, True):
        if pretends:
            monkeypatch.setattr(linears, "multiplies", lambda device, dtype: True)
            monkeypatch.setattr(linears, "add_product", add_product)
        found = []
        for fuses in (False, True):
            net = Net("outside")
            optimizer = af.SGD(net.parameters(), lr=0.1, backend=backend)
            if fuses:
                af.fuse_linears(net, optimizer)
            with torch.autocast(device, torch.bfloat16):
                loss = loss_of(net, batch(net, 0))
            loss.backward()
            assert (net.b.weight.grad is None) is (fuses and (pretends or device == "cuda"))
            optimizer.accumulate(last=True)
            found.append({name: param.grad for name, param in net.named_parameters()})
        for name, right in found[0].items():
            torch.testing.assert_close(found[1][name], right, rtol=2**-7, atol=2**-7 * right.abs().max().item())  # type: ignore


def forward_ad(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        found, slope = torch.autograd.forward_ad.unpack_dual(net(torch.autograd.forward_ad.make_dual(x, x)))
        assert slope is not None
        return found


def functional_call(net: nn.Module, x: Tensor) -> Tensor:
    others = {name: nn.Parameter(param.detach() * 1) for name, param in net.named_parameters()}
    found: Tensor = torch.func.functional_call(net, others, (x,))
    found.sum().backward()
    assert all(other.grad is not None for other in others.values())
    return found


def compiled(net: nn.Module, x: Tensor) -> Any:
    torch.compiler.reset()
    graphs: list[Any] = []
    with torch.no_grad():
        found = torch.compile(net, backend=lambda graph, _: graphs.append(graph) or graph)(x)
    assert len(graphs) == 1
    return found


TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "vmap": lambda net, x: torch.func.vmap(net)(x), "jvp": lambda net, x: torch.func.jvp(net, (x,), (x,))[0],
    "forward AD": forward_ad, "functional_call": functional_call, "no_grad": torch.no_grad()(lambda net, x: net(x)),
    "trace": lambda net, x: torch.jit.trace(net, x)(x), "compile": compiled,
    "export": lambda net, x: torch.export.export(net, (x,), strict=True).module()(x),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated")  # torch calls it for these
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_see_an_ordinary_layer(transform: str) -> None:
    net, x = Net("twice"), torch.randn(4, WIDTH)
    right = net(x).detach()
    fused(net)
    assert_close(TRANSFORMS[transform](net, x), right, "model")
    (slope,) = torch.autograd.grad(net(x.requires_grad_()).sum(), x)
    assert_close(torch.func.grad(lambda x: net(x).sum())(x), slope, "model")


# ---- handles, copies, refusals --------------------------------------------------------------------------------------


def test_another_order_of_arguments_is_refused_and_a_handle_may_be_removed_twice() -> None:
    """Calls at a wrong time: test_state_machine.py."""
    model = mlp()
    optimizer = af.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module first, got SGD"):
        af.fuse_linears(optimizer, model)  # type: ignore[arg-type]
    handle = af.fuse_linears(model, optimizer)
    handle.remove()
    handle.remove()
    af.release_gradients(optimizer).remove()


def test_a_backward_without_weight_in_a_weighted_window_is_refused(backend: str) -> None:
    model = mlp()
    optimizer = fused(model, backend)
    optimizer.backward(loss_of(model, batch(model, 0)), 2)
    with pytest.raises(ValueError, match="weights for some micro-batches of a window only"):
        backward(model, 1)
    for call in (lambda: optimizer.accumulate(2), optimizer.step):  # a part of its gradients is in p.grad
        with refused(optimizer, RuntimeError, r"ended early.*call optimizer\.zero_grad\(\)"):
            call()


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: through_a_file(model, weights_only=False),
}  # fmt: skip


@pytest.mark.parametrize("copied", COPIES)
def test_copies_of_a_model_are_ordinary_models_and_do_not_keep_it(backend: str, copied: str) -> None:
    model = mlp()
    optimizer = fused(model, backend)
    twin = COPIES[copied](model)
    with torch.no_grad():
        for param in twin.parameters():
            param.mul_(2)  # its layers compute with weights of its own
    ordinary = mlp()
    ordinary.load_state_dict(twin.state_dict())
    assert len({each[0](batch(each, 0, 4, WIDTH)).grad_fn.name() for each in (twin, ordinary)}) == 1
    for each in (twin, ordinary):
        backward(each)
    for param, right in zip(twin.parameters(), ordinary.parameters(), strict=True):
        assert torch.equal(param.grad, right.grad)  # type: ignore[arg-type]
    assert all(param.grad is None for param in model.parameters())
    assert af.fuse_linears(twin, af.SGD(twin.parameters(), lr=0.1)).fused == ["0", "3", "5"]
    original = weakref.ref(model[0])
    del model
    gc.collect()
    assert original() is None
    optimizer.zero_grad()


def test_a_model_outlives_its_optimizer_and_a_wrapper_its_handle(backend: str) -> None:
    model = mlp()
    fused(model, backend)
    gc.collect()
    backward(model)
    assert all(param.grad is not None for param in model.parameters())
    fresh = mlp()
    optimizer = af.SGD(fresh.parameters(), lr=0.1, backend=backend)
    handle = af.fuse_linears(fresh, optimizer)
    inner = fresh[0].forward
    fresh[0].forward = lambda x: inner(x)  # a wrapper of somebody's
    handle.remove()
    backward(fresh)
    assert all(param.grad is not None for param in fresh.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the compiler's
def test_a_compiled_model_leaves_its_graph_for_each_layer(backend: str) -> None:
    torch.compiler.reset()
    found = []
    for compiles in (False, True):
        model = mlp()
        optimizer = fused(model, backend)
        run: Any = torch.compile(model, backend="aot_eager") if compiles else model
        for number in range(2):
            backward(run, number)
            assert all(model[layer].weight.grad is None for layer in (0, 3, 5))
            optimizer.accumulate()
        optimizer.step()
        found.append(everything(optimizer))
    for name, value in found[0].items():
        assert_close(found[1][name], value, "model", name)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the compiler's
def test_compiled_autograd_brings_the_gradients(backend: str) -> None:
    torch.compiler.reset()
    model, stock = Net("unused"), Net("unused")
    optimizer = fused(model, backend)
    with inside.compiled_autograd():
        backward(model)
    backward(stock)
    optimizer.accumulate(last=True)
    assert_same_gradients(model, stock)
