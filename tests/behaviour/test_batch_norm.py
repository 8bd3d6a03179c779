"""The warning of BatchNorm: check_model() names layers, and who is given the model calls it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import accumfused as af


def warned(call: Callable[[], Any]) -> list[str]:
    """What the call's warnings say of layers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert {(each.category, each.filename) for each in caught} <= {(af.BatchNormWarning, __file__)}
    return [str(each.message).split("training mode: ")[1].split(". Its statistics")[0] for each in caught]


class Mine(nn.BatchNorm2d):
    """A subclass is one, too."""


def net(norm: nn.Module) -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"block": nn.ModuleDict({"norm": norm})}))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, Mine])
def test_a_batch_norm_is_named_by_its_path_and_class(kind: Any) -> None:
    for norm in (kind(4), kind(4, affine=False), kind(4).requires_grad_(False)):
        assert warned(lambda norm=norm: af.check_model(net(norm))) == [f"1.block.norm ({kind.__name__})"]
    assert warned(lambda: af.check_model(kind(4))) == [kind.__name__]
    others = nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True), nn.SyncBatchNorm(4), kind(4).eval()
    assert [warned(lambda norm=norm: af.check_model(net(norm))) for norm in others] == [[]] * 4


def test_each_one_is_named_once_and_of_many_the_first_five() -> None:
    many = [nn.BatchNorm1d(2) for _ in range(8)]
    many[1].eval()
    model = nn.Sequential(*many[:3], nn.Sequential(many[2]), *many[3:], nn.Sequential(None))  # type: ignore[arg-type]
    five = ", ".join(f"{place} (BatchNorm1d)" for place in (0, 2, 4, 5, 6))
    assert warned(lambda: af.check_model(model)) == [f"{five} and 2 more"]


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"check_model takes a torch\.nn\.Module, got SGD"):
        af.check_model(af.SGD(nn.Linear(1, 1).parameters()))  # type: ignore[arg-type]


# ---- by those who are given the model --------------------------------------------------------------------------------


def test_linear_layers_are_fused_with_the_warning_or_not_at_all_where_that_is_an_error() -> None:
    model = net(nn.BatchNorm1d(4))
    optimizer = af.SGD(model.parameters(), lr=0.1)
    with pytest.raises(af.BatchNormWarning, match=r"1\.block\.norm"):  # as pytest is set up here
        af.fuse_linears(model, optimizer)
    assert warned(lambda: af.fuse_linears(model, optimizer)) == ["1.block.norm (BatchNorm1d)"]
