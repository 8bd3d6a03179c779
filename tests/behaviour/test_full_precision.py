"""Weights in fp32, whatever they are kept in: out of the masters, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_same_bits, bits, params_of, refused
from models import MASTERS, Model, build, through_a_file, train, trained, whole
from table import STATES, WEIGHTS, Own
from torch import Tensor, nn
from torch.nn import Parameter, ParameterList

import accumfused as af

MATCHED = "<All keys matched successfully>"
TIES = [1.00390625, -1.00390625, 1.01171875]  # halfway between two bfloat16
EDGES = [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-40, -1e-45, 3.4e38, 2.0**-126]

each_master = pytest.mark.parametrize("weights", MASTERS)


def load(optimizer: Any, values: list[Tensor]) -> Any:
    given = {str(index): value for index, value in enumerate(values)}
    return optimizer.load_full_precision_state_dict(ParameterList(params_of(optimizer)), given)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_it_is_the_models_state_dict_with_parameters_in_fp32(backend: str, weights: str) -> None:
    model, optimizer = trained(weights, "8bit", backend)
    plain, found = model.state_dict(), optimizer.full_precision_state_dict(model)
    assert (list(found), found._metadata) == (list(plain), plain._metadata)  # not the package's
    assert found["tied"] is found["matrix"] or weights == "fp32"
    for name, value in found.items():
        known = plain[name]
        assert (value.stride(), value.requires_grad) == (known.stride(), False)
        if name in ("mean", "count") or weights == "fp32":
            assert (value.dtype, value.data_ptr()) == (known.dtype, known.data_ptr())
        else:  # to nearest, but for ties
            rtol = 2.0**-7 if weights in MASTERS else 0
            torch.testing.assert_close(value, known.float(), rtol=rtol, atol=0)
            assert torch.equal(value, known.float()) == (weights not in MASTERS)


@pytest.mark.pairwise(weights=[*WEIGHTS], states=[*STATES], stepped=[0, 1], given=["its own", "any"])
def test_what_is_loaded_is_what_is_saved(backend: str, weights: str, states: str, stepped: int, given: str) -> None:
    model, optimizer = trained(weights, states, backend)
    twin_model, twin = trained(weights, states, backend, steps=stepped)
    values = whole(optimizer) if given == "its own" else [torch.randn(param.shape) for param in model.parameters()]
    assert str(load(twin, through_a_file(values))) == MATCHED
    rtol, atol = 0.0, 0.0
    if given == "any" and weights == "split8":
        rtol = 2.0**-16
    elif given == "any" and weights not in (*MASTERS, "fp32"):  # to nearest
        rtol, atol = (2.0**-11, 2.0**-25) if "fp16" in weights else (2.0**-8, 0.0)
    for found, value in zip(whole(twin), values, strict=True):
        torch.testing.assert_close(found, value, rtol=rtol, atol=atol)
    for param, known in zip(params_of(twin), params_of(optimizer), strict=True) if given == "its own" else ():
        assert_same_bits(param, known)
        for key in {"master_weight", "master_remainder"} & optimizer.state[known].keys():
            assert_same_bits(twin.state[param][key], optimizer.state[known][key])
    before = [param.detach().clone() for param in twin_model.parameters()]
    train(twin, 1)
    for param, old in zip(twin_model.parameters(), before, strict=True):  # it is trained from there, in steps of 0.1
        assert 0 < (param - old).detach().float().abs().max() < 0.4


@each_master
@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_ties_infinities_nan_subnormals_and_zeros(backend: str, weights: str, flush: bool, stride: int) -> None:
    param = Parameter(torch.zeros(12 * stride, dtype=WEIGHTS[weights][0])[::stride])  # with holes in memory, or not
    values = torch.tensor(EDGES + TIES)
    optimizer = af.SGD([param], lr=0.1, backend=backend, **WEIGHTS[weights][1])
    torch.set_flush_denormal(flush)
    load(optimizer, [values])
    (found,) = whole(optimizer)
    torch.set_flush_denormal(False)
    if weights == "split8":  # 16 bits of a mantissa
        torch.testing.assert_close(found, values, rtol=2.0**-10, atol=1e-44, equal_nan=True)
    else:
        assert torch.equal(bits(found), bits(values))
    assert param.isnan().tolist() == values.isnan().tolist()
    near = {"split16": [1.0078125, -1.0078125, 1.015625]}  # as a step rounds
    for _ in range(2):
        assert param.tolist()[-3:] == near.get(weights, param.tolist()[-3:])
        param.grad = torch.zeros_like(param)
        optimizer.step()


@each_master
def test_optimizers_of_parts_of_a_model_load_it_one_after_the_other(backend: str, weights: str) -> None:
    """What another optimizer has is not written again, which would cost it its masters."""
    dtype, options = WEIGHTS[weights]

    def made() -> tuple[nn.Module, list[Any]]:
        model = nn.Sequential(nn.Linear(5, 40), nn.Linear(40, 5), nn.BatchNorm1d(40)).to(dtype)
        return model, [af.AdamW(model[part].parameters(), lr=1e-3, backend=backend, **options) for part in (0, 1)]

    (model, optimizers), (twin_model, twins) = made(), made()
    for optimizer in optimizers:
        params_of(optimizer)[1].detach()[0] = torch.nan
        train(optimizer, 3)
    first, second = (optimizer.full_precision_state_dict(model) for optimizer in optimizers)
    saved = {name: (second if name[0] == "1" else first)[name] for name in first}
    for twin in (*twins, *twins):
        assert str(twin.load_full_precision_state_dict(twin_model, saved)) == MATCHED
    part = {name: value for name, value in saved.items() if name != "1.bias"}
    result = twins[0].load_full_precision_state_dict(twin_model, {**part, "more": torch.ones(1)}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["1.bias"], ["more"])
    for twin, own in zip(twins, "01", strict=True):
        for name, value in twin.full_precision_state_dict(twin_model).items():
            if name[0] in (own, "2"):
                assert_same_bits(value, saved[name], name)
    with torch.no_grad():
        twin_model[1].weight.fill_(torch.nan)  # which the checkpoint has not
    twins[0].load_full_precision_state_dict(twin_model, saved)
    assert_same_bits(twin_model[1].weight, saved["1.weight"].to(dtype))


@pytest.mark.parametrize("weights", ["fp32", "fp16_master"])
def test_a_remainder_that_came_to_other_weights_gives_way_to_those_that_are_loaded(backend: str, weights: str) -> None:
    (_, optimizer), (_, twin) = trained("split16", "fp32", backend), build(weights, "fp32", backend)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    values = [value * 3 for value in whole(optimizer)]
    load(twin, values)
    train(twin, 1)
    for found, value in zip(whole(twin), values, strict=True):
        torch.testing.assert_close(found, value, rtol=0.01, atol=0.2)  # a step of 0.1


def test_an_optimizer_without_kernels_has_no_masters(backend: str) -> None:
    optimizer = af.fuse(Own(Model(torch.bfloat16).parameters(), lr=0.1), backend=backend)
    train(optimizer, 2)
    assert all(map(torch.equal, whole(optimizer), (param.float() for param in params_of(optimizer))))
    load(optimizer, [torch.full(param.shape, 0.3) for param in params_of(optimizer)])
    assert {value.unique().item() for value in whole(optimizer)} == {torch.tensor(0.3).bfloat16().item()}
    assert {*map(tuple, optimizer.state.values())} == {("step", "square_avg")}


BAD: dict[str, tuple[Callable[[Model, Any], tuple[Any, Any]], type[Exception], str]] = {
    "a missing name": (lambda m, s: (m, {k: s[k] for k in s if k != "vector"}), ValueError, r"no 'vector' \(1 are"),
    "a name too many": (lambda m, s: (m, {**s, "more": s["mean"]}), ValueError, r"has 'more' \(1 too many\)"),
    "a shape": (lambda m, s: (m, {**s, "vector": s["mean"]}), ValueError, r"shape \[3\], that of the model \[130\]"),
    "a buffer's shape": (lambda m, s: (m, {**s, "mean": s["vector"]}), ValueError, r"'mean' has shape \[130\]"),
    "no tensor": (lambda m, s: (m, {**s, "vector": [1.0] * 130}), TypeError, "'vector' in the state_dict is a list"),
    "no dictionary": (lambda m, s: (m, []), TypeError, "dictionary of names and tensors, got list"),
    "another model": (lambda m, s: (Model(torch.bfloat16), s), ValueError, "none of the model's parameters"),
    "no model": (lambda m, s: (s, s), TypeError, r"takes the model first, a torch\.nn\.Module, got (dict|Ordered)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_before_anything_is_written(backend: str, name: str) -> None:
    edit, error, text = BAD[name]
    model, optimizer = trained("split16", "fp32", backend)
    saved = {key: value * 2 for key, value in optimizer.full_precision_state_dict(model).items()}
    buffers = [buffer.clone() for buffer in model.buffers()]
    given, state_dict = edit(model, saved)
    with refused(optimizer, error, text):
        optimizer.load_full_precision_state_dict(given, state_dict)
    assert all(map(torch.equal, buffers, model.buffers()))


class Noted(nn.Linear):
    """Has an entry in its state_dict that is no tensor."""

    note = "new"

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state


def test_an_entry_that_is_no_tensor_is_loaded_and_those_after_it_are_checked(backend: str) -> None:
    model: Any = nn.Sequential(Noted(3, 2), nn.Linear(2, 2))
    optimizer = af.SGD(model.parameters(), lr=0.1, backend=backend)
    saved = {**optimizer.full_precision_state_dict(model), "0._extra_state": "old"}
    optimizer.load_full_precision_state_dict(model, saved)
    assert model[0].note == "old"
    with refused(optimizer, ValueError, r"'1\.bias' has shape \[1\]"):
        optimizer.load_full_precision_state_dict(model, {**saved, "1.bias": torch.ones(1)})
