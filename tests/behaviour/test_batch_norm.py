"""The warning of BatchNorm: who is named, who is not, and that an optimizer gives it once."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accumfused as af


def fold(optimizer: Any, weight: float | None = None) -> None:
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.accumulate(weight)


def warned(params: Iterable[Tensor]) -> list[Any]:
    """Of an optimizer of these parameters, by its second micro-batch."""
    optimizer = af.SGD(params, lr=0.1)
    fold(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fold(optimizer)
    return caught


def named(params: Iterable[Tensor]) -> str:
    caught = warned(params)
    assert [(each.category, each.filename) for each in caught] == [(af.BatchNormWarning, __file__)]
    return str(caught[0].message).split("training mode: ")[1].split(". Its statistics")[0]


class Mine(nn.BatchNorm2d):
    """A subclass is one, too."""


def net(norm: nn.Module) -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"block": nn.ModuleDict({"norm": norm})}))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, Mine])
def test_a_batch_norm_is_named_by_its_path_and_class(kind: Any) -> None:
    norm = kind(4)
    model: Any = nn.ModuleDict({"teacher": nn.Linear(4, 4), "student": net(norm)})
    name = f"1.block.norm ({kind.__name__})"
    assert named(model["student"].parameters()) == named([norm.weight]) == named([norm.bias]) == f"student.{name}"
    assert warned(model["teacher"].parameters()) == []  # another optimizer's
    assert warned([nn.Parameter(norm.weight.detach())]) == []  # equal, but not the same parameter
    del model
    assert named(norm.parameters()) == kind.__name__
    for trains_nothing in (kind(4, affine=False), kind(4).requires_grad_(False)):
        model = net(trains_nothing)
        assert named(model[0].parameters()) == name  # for the model that it is in


@pytest.mark.parametrize("kind", [nn.GroupNorm, nn.InstanceNorm1d, nn.SyncBatchNorm, nn.BatchNorm1d])
def test_others_are_silent_and_so_is_one_in_eval_mode(kind: Any) -> None:
    model = net(nn.GroupNorm(2, 4) if kind is nn.GroupNorm else kind(4, affine=True).train(kind is not nn.BatchNorm1d))
    assert warned(model.parameters()) == []


def test_each_one_is_named_once_and_of_many_the_first_five_and_none_is_kept() -> None:
    many = [nn.BatchNorm1d(2) for _ in range(8)]
    many[1].eval()
    model = nn.Sequential(*many[:3], nn.Sequential(many[2]), *many[3:], nn.Sequential(None))  # type: ignore[arg-type]
    gone = weakref.ref(model)
    five = ", ".join(f"{place} (BatchNorm1d)" for place in (0, 2, 4, 5, 6))
    assert named(model.parameters()) == f"{five} and 2 more"
    del model, many
    gc.collect()
    assert gone() is None


def test_the_second_micro_batch_warns_once_and_is_in_the_window_where_that_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    start = [param.detach().clone() for param in model.parameters()]
    optimizer, other = af.SGD(model.parameters(), lr=0.5), af.SGD(model.parameters(), lr=0.5)
    fold(optimizer, 1)
    optimizer.step()  # windows of one are not accumulation
    fold(optimizer, 1)
    fold(optimizer, 0)  # nor is an empty micro-batch a second one
    with pytest.raises(af.BatchNormWarning, match=r"1 \(BatchNorm1d\)") as caught:  # as pytest is set up here
        fold(optimizer, 3)
    optimizer.step()
    assert all(torch.equal(param, begun - 1.0) for param, begun in zip(model.parameters(), start, strict=True))
    for _ in range(3):
        fold(optimizer)
    with warnings.catch_warnings():
        exec(str(caught.value).split("To silence this: ")[1], {"warnings": warnings, "af": af})
        for _ in range(2):
            fold(other)
