"""Weights in fp32, whatever they are kept in: out of the masters, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_same_bits, bits
from oracle import Oracle
from snapshot import differences, refused, snapshot
from stored import MASTERS, Model, build, grads_of, through_a_file, train, trained
from table import ADAMW_CASE, WEIGHTS
from torch import Tensor
from torch.nn import Parameter

import accumfused as af

each_weights = pytest.mark.parametrize("weights", WEIGHTS)
PARAMETERS = ("matrix", "tied", "vector", "scalar", "kernel")


@each_weights
def test_it_is_the_models_state_dict_with_parameters_in_fp32(backend: str, weights: str) -> None:
    model, optimizer = trained(weights, "int8", backend)
    plain, whole = model.state_dict(), optimizer.full_precision_state_dict(model)
    assert list(whole) == list(plain)
    assert getattr(whole, "_metadata", None) == getattr(plain, "_metadata", None)
    assert [whole[name].dtype for name in PARAMETERS] == [torch.float32] * 5
    assert (
        whole["tied"] is whole["matrix"] if weights != "fp32" else whole["tied"].data_ptr() == model.matrix.data_ptr()
    )
    assert not any(value.requires_grad for value in whole.values())
    for name in ("mean", "count"):
        assert_same_bits(whole[name], plain[name])
        assert whole[name].data_ptr() == plain[name].data_ptr()
    for name in PARAMETERS:
        assert whole[name].stride() == plain[name].stride()
        if weights.endswith("fp32"):
            assert_same_bits(whole[name].to(plain[name].dtype), plain[name])
        else:  # a tie of split16 may have gone the other way
            torch.testing.assert_close(whole[name].to(plain[name].dtype), plain[name], rtol=2.0**-7, atol=0)
        if weights not in MASTERS:
            assert_same_bits(whole[name], plain[name].float())
        else:
            assert not torch.equal(whole[name], plain[name].float())


@pytest.mark.parametrize("weights", ["split16", "bf16_master", "fp16_master"])
def test_it_is_what_training_in_fp32_arrives_at(backend: str, weights: str) -> None:
    model, optimizer = build(weights, "fp32", backend, max_grad_norm=None, **{**ADAMW_CASE.options, "eps": 1e-3})
    params = list(model.parameters())
    truth = Oracle(ADAMW_CASE.of.oracle, {**ADAMW_CASE.options, "eps": 1e-3}, params)
    for step in range(8):
        grads_of(optimizer, step)
        truth.step([param.grad for param in params])
        optimizer.step()
    whole = optimizer.full_precision_state_dict(model)
    for (name, _), expected in zip(model.named_parameters(), truth.params, strict=True):
        torch.testing.assert_close(whole[name].double(), expected, rtol=5e-6, atol=2e-6)


@each_weights
@pytest.mark.parametrize("stepped", [False, True])
def test_a_round_trip_through_a_file_is_exact(backend: str, weights: str, stepped: bool) -> None:
    model, optimizer = trained(weights, "fp32", backend)
    whole = optimizer.full_precision_state_dict(model)
    twin_model, twin = trained(weights, "fp32", backend, steps=1) if stepped else build(weights, "fp32", backend)
    assert (
        str(twin.load_full_precision_state_dict(twin_model, through_a_file(whole))) == "<All keys matched successfully>"
    )
    for name, value in model.state_dict().items():
        assert_same_bits(twin_model.state_dict()[name], value, name)
    for name, value in twin.full_precision_state_dict(twin_model).items():
        assert_same_bits(value, whole[name], name)
    if weights in MASTERS:
        key = "master_weight" if weights.endswith("_master") else "master_remainder"
        for param, other in zip(model.parameters(), twin_model.parameters(), strict=True):
            assert_same_bits(twin.state[other][key], optimizer.state[param][key])


@each_weights
def test_any_fp32_weights_are_loaded_to_nearest_and_trained_from(backend: str, weights: str) -> None:
    model, optimizer = trained(weights, "fp32", backend)
    given = {name: torch.randn(model.state_dict()[name].shape) for name in PARAMETERS}
    given["tied"] = given["matrix"]
    optimizer.load_full_precision_state_dict(model, {**model.state_dict(), **given})
    whole = optimizer.full_precision_state_dict(model)
    rtol = {
        "split8": 2.0**-16,
        "bf16": 2.0**-8,
        "bf16_stochastic": 2.0**-8,
        "fp16": 2.0**-11,
        "fp16_stochastic": 2.0**-10,
    }.get(weights, 0.0)
    for name in PARAMETERS:
        torch.testing.assert_close(whole[name], given[name], rtol=rtol, atol=2.0**-25 if weights == "fp16" else 0.0)
    before = [param.detach().clone() for param in model.parameters()]
    train(optimizer, 1)
    for param, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(param.detach().float(), old.float(), rtol=0.01, atol=0.4)  # steps of 0.1
        assert not torch.equal(param, old)


def test_a_tie_is_rounded_as_a_step_would(backend: str) -> None:
    values = torch.tensor([1.00390625, -1.00390625, 1.01171875])  # halfway between two bfloat16
    for weights, near in (("split16", [1.0078125, -1.0078125, 1.015625]), ("bf16_master", [1.0, -1.0, 1.015625])):
        param = Parameter(torch.zeros(3, dtype=torch.bfloat16))
        module = torch.nn.Module()
        module.p = param
        optimizer = af.SGD([param], lr=0.1, backend=backend, **WEIGHTS[weights][1])
        optimizer.load_full_precision_state_dict(module, {"p": values})
        assert param.tolist() == near
        param.grad = torch.zeros_like(param)
        optimizer.step()
        assert param.tolist() == near
        assert torch.equal(optimizer.full_precision_state_dict(module)["p"], values)


@pytest.mark.parametrize("weights", MASTERS)
def test_infinity_nan_subnormals_and_zeros(backend: str, weights: str) -> None:
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-40, -1e-45, 3.4e38, 2.0**-126])
    for flush in (False, True):
        torch.set_flush_denormal(flush)
        module = torch.nn.Module()
        module.p = Parameter(torch.zeros(9, dtype=WEIGHTS[weights][0]))
        optimizer = af.SGD(module.parameters(), lr=0.1, backend=backend, **WEIGHTS[weights][1])
        optimizer.load_full_precision_state_dict(module, {"p": values})
        whole = optimizer.full_precision_state_dict(module)["p"]
        torch.set_flush_denormal(False)
        expected = values
        if weights == "split8":  # 16 bits of a mantissa
            expected = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-40, -0.0, 3.4e38, 2.0**-126])
            torch.testing.assert_close(whole, expected, rtol=2.0**-10, atol=0, equal_nan=True)
        else:
            assert torch.equal(bits(whole), bits(expected))
        assert module.p.isnan().tolist() == values.isnan().tolist()


def test_a_parameter_with_holes_in_memory(backend: str) -> None:
    for weights in MASTERS:
        dtype, options = WEIGHTS[weights]
        param = Parameter(torch.randn(6, 8).to(dtype)[:, ::2])
        module = torch.nn.Module()
        module.p = param
        optimizer = af.AdamW([param], lr=0.1, backend=backend, **options)
        param.grad = torch.randn(6, 4).to(dtype)
        optimizer.step()
        whole = optimizer.full_precision_state_dict(module)["p"].clone()
        kept = param.detach().clone()
        with torch.no_grad():
            param.fill_(7)
        optimizer.load_full_precision_state_dict(module, {"p": whole})
        assert torch.equal(param, kept)
        assert torch.equal(optimizer.full_precision_state_dict(module)["p"], whole)


def test_parameters_of_others_are_upcast_and_loaded(backend: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).bfloat16()
    model[0].requires_grad_(False)
    optimizer = af.AdamW(model[1].parameters(), lr=0.1, backend=backend)
    train(optimizer, 2)
    whole = optimizer.full_precision_state_dict(model)
    assert torch.equal(whole["0.weight"], model[0].weight.float())
    assert not torch.equal(whole["1.weight"], model[1].weight.float())
    twin_model = copy.deepcopy(model)
    twin = af.AdamW(twin_model[1].parameters(), lr=0.1, backend=backend)
    with torch.no_grad():
        twin_model[0].weight.zero_()
    twin.load_full_precision_state_dict(twin_model, whole)
    assert torch.equal(twin_model[0].weight, model[0].weight)
    assert torch.equal(twin.full_precision_state_dict(twin_model)["1.weight"], whole["1.weight"])


@pytest.mark.parametrize("weights", MASTERS)
def test_two_optimizers_of_one_model_load_it_one_after_the_other(backend: str, weights: str) -> None:
    dtype, options = WEIGHTS[weights]

    def made() -> tuple[torch.nn.Module, list[Any]]:
        model = torch.nn.Sequential(torch.nn.Linear(5, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 5)).to(dtype)
        return model, [af.AdamW(model[part].parameters(), lr=1e-3, backend=backend, **options) for part in (0, 2)]

    model, optimizers = made()
    whole: dict[str, Tensor] = {}
    for index, optimizer in enumerate(optimizers):
        train(optimizer, 3)
        saved = optimizer.full_precision_state_dict(model)
        whole |= {name: value for name, value in saved.items() if name[0] == str(2 * index) or index == 0}
    twin_model, twins = made()
    for _ in range(2):
        for twin in twins:
            result = twin.load_full_precision_state_dict(twin_model, whole)
            assert str(result) == "<All keys matched successfully>"
    for index, twin in enumerate(twins):
        for name, value in twin.full_precision_state_dict(twin_model).items():
            if name[0] == str(2 * index):
                assert_same_bits(value, whole[name], name)
    part = {name: value for name, value in whole.items() if name != "2.bias"}
    result = twins[0].load_full_precision_state_dict(twin_model, {**part, "more": torch.ones(1)}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["2.bias"], ["more"])
    assert_same_bits(twins[1].full_precision_state_dict(twin_model)["2.weight"], whole["2.weight"])


def test_an_optimizer_without_kernels_has_no_masters(backend: str) -> None:
    model = Model(torch.bfloat16)
    optimizer = af.fuse(torch.optim.RMSprop(model.parameters(), lr=0.1), backend=backend)
    train(optimizer, 2)
    whole = optimizer.full_precision_state_dict(model)
    assert torch.equal(whole["matrix"], model.matrix.float())
    optimizer.load_full_precision_state_dict(model, {**whole, "vector": torch.full((130,), 0.3)})
    assert torch.equal(model.vector, torch.full((130,), 0.3).bfloat16())
    assert set(optimizer.state[model.vector]) == {"step", "square_avg"}


def test_other_formats_and_models_of_fp32_take_it(backend: str) -> None:
    model, optimizer = trained("split16", "fp32", backend)
    whole = optimizer.full_precision_state_dict(model)
    plain = Model(torch.float32)
    plain.load_state_dict(whole)
    assert torch.equal(plain.matrix, whole["matrix"])
    for weights in ("bf16_master", "fp16_master"):
        other_model, other = build(weights, "fp32", backend)
        other.load_full_precision_state_dict(other_model, whole)
        assert torch.equal(other.full_precision_state_dict(other_model)["matrix"], whole["matrix"])


def test_not_all_of_it_may_be_loaded(backend: str) -> None:
    model, optimizer = trained("split16", "fp32", backend)
    before = optimizer.full_precision_state_dict(model)
    before = {name: value.clone() for name, value in before.items()}
    values = torch.randn(130)
    result = optimizer.load_full_precision_state_dict(model, {"vector": values, "other": values}, strict=False)
    assert (sorted(result.missing_keys), result.unexpected_keys) == (
        ["count", "kernel", "matrix", "mean", "scalar", "tied"],
        ["other"],
    )
    after = optimizer.full_precision_state_dict(model)
    assert torch.equal(after.pop("vector"), values)
    for name, value in after.items():
        assert_same_bits(value, before[name], name)


@pytest.mark.parametrize("weights", MASTERS)
def test_what_was_overwritten_before_and_is_not_loaded_stays_what_it_is(backend: str, weights: str) -> None:
    model, optimizer = trained(weights, "fp32", backend)
    with torch.no_grad():
        model.matrix.add_(8)
    optimizer.load_full_precision_state_dict(model, {"vector": torch.randn(130)}, strict=False)
    assert torch.equal(optimizer.full_precision_state_dict(model)["matrix"], model.matrix.float())


# ---- windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", MASTERS)
def test_reading_within_a_window_changes_nothing(backend: str, weights: str) -> None:
    model, optimizer = trained(weights, "int8", backend)
    expected = optimizer.full_precision_state_dict(model)
    grads_of(optimizer, 7)
    optimizer.accumulate(2.0)
    before = snapshot(optimizer)
    for name, value in optimizer.full_precision_state_dict(model).items():
        assert_same_bits(value, expected[name], name)
    assert differences(before, snapshot(optimizer)) == []
    with refused(optimizer, RuntimeError, r"a window is open.*before load_full_precision_state_dict\(\)"):
        optimizer.load_full_precision_state_dict(model, expected)
    optimizer.step()
    optimizer.load_full_precision_state_dict(model, expected)


# ---- what is refused -------------------------------------------------------------------------------------------------

Edit = Callable[[dict[str, Tensor]], Any]
BAD: dict[str, tuple[Edit, type[Exception], str]] = {
    "a name is missing": (lambda s: s.pop("vector"), ValueError, r"has no 'vector' \(1 are missing\)"),
    "a name too many": (lambda s: s.update(more=torch.ones(1)), ValueError, r"has 'more' \(1 too many\)"),
    "another shape": (
        lambda s: s.update(vector=torch.ones(3)),
        ValueError,
        r"'vector' has shape \[3\], that of the model \[130\]; load the same model's",
    ),
    "a buffer of another shape": (lambda s: s.update(mean=torch.ones(4)), ValueError, r"'mean' has shape \[4\]"),
    "not a tensor": (lambda s: s.update(vector=[1.0] * 130), TypeError, "'vector' in the state_dict is a list"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_before_anything_is_written(backend: str, name: str) -> None:
    edit, error, text = BAD[name]
    model, optimizer = trained("split16", "fp32", backend)
    saved = {key: value * 2 for key, value in optimizer.full_precision_state_dict(model).items()}
    edit(saved)
    buffers = [buffer.clone() for buffer in model.buffers()]
    with refused(optimizer, error, text):
        optimizer.load_full_precision_state_dict(model, saved)
    assert all(map(torch.equal, buffers, model.buffers()))


def test_another_model_and_what_is_none(backend: str) -> None:
    model, optimizer = trained("split16", "fp32", backend)
    other = Model(torch.bfloat16)
    calls: list[Callable[[Any], Any]] = [
        optimizer.full_precision_state_dict,
        lambda given: optimizer.load_full_precision_state_dict(given, other.state_dict()),
    ]
    for call in calls:
        with refused(optimizer, ValueError, "none of the model's parameters is in this optimizer"):
            call(other)
        with refused(optimizer, TypeError, r"takes the model first, a torch\.nn\.Module, got (dict|Ordered)"):
            call(model.state_dict())
    with refused(optimizer, TypeError, "a state_dict is a dictionary of names and tensors, got list"):
        optimizer.load_full_precision_state_dict(model, [])
