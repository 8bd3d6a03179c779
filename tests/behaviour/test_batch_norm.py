"""The warning of BatchNorm: check_model() names layers, and backward(loss) finds them in the loss's graph, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


# ---- by the model ----------------------------------------------------------------------------------------------------


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


# ---- by the loss -----------------------------------------------------------------------------------------------------


SEEN = "seen in the graph of the loss, af.check_model(model) names the layers"


def images(*norms: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 1), *norms)


def fold(optimizer: Any, model: nn.Module, weight: float | None = None, size: int = 2) -> None:
    optimizer.backward(model(torch.randn(size, 3, 2, 2)).square().sum(), weight)


@pytest.mark.parametrize(("norms", "size", "found"), [
    (lambda: [nn.BatchNorm2d(4)], 2, True), (lambda: [nn.BatchNorm2d(4), nn.ReLU(), Mine(4).eval()], 2, True),
    (lambda: [nn.BatchNorm2d(4)], 1, True), (lambda: [nn.BatchNorm2d(4).eval()], 2, False),
    (lambda: [nn.BatchNorm2d(4, track_running_stats=False).eval()], 2, True),  # which has no other statistics
    (lambda: [nn.InstanceNorm2d(4, affine=True)], 2, False), (lambda: [nn.GroupNorm(2, 4)], 2, False),
    # check_model() sees these:
    (lambda: [nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4).requires_grad_(False)], 2, False),
])  # fmt: skip
def test_the_graph_tells_layers_whose_weights_are_trained(
    norms: Callable[[], list[nn.Module]], size: int, found: bool
) -> None:
    model = images(*norms())
    optimizer = af.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    fold(optimizer, model, size=size)
    assert warned(lambda: fold(optimizer, model, size=size)) == [SEEN] * found


def test_the_layers_of_another_optimizer_are_its_own() -> None:
    teacher, student = images(), nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    optimizer, other = af.SGD(teacher.parameters(), lr=0.1), af.SGD(student.parameters(), lr=0.1)
    for _ in range(2):
        fold(optimizer, nn.Sequential(teacher, student))
        other.zero_grad()


def test_a_graph_of_any_depth_is_looked_at_and_freed() -> None:
    param = nn.Parameter(torch.ones(1))
    optimizer = af.SGD([param], lr=0.1)
    optimizer.backward(param.sum())
    loss = param.sum()
    for _ in range(60_000):
        loss = loss * 1.0
    optimizer.backward(loss)


def test_a_reentrant_checkpoint_hides_its_layers() -> None:
    model = images(nn.BatchNorm2d(4))
    optimizer = af.SGD(model.parameters(), lr=0.1)

    def loss() -> Tensor:
        x = torch.randn(2, 3, 2, 2, requires_grad=True)
        return checkpoint(model, x, use_reentrant=True).sum()  # type: ignore[no-any-return]

    for _ in range(2):
        optimizer.backward(loss())


def test_the_second_micro_batch_warns_once_and_is_in_the_window_where_that_is_an_error() -> None:
    model = images(nn.BatchNorm2d(4))
    optimizer, other = af.SGD(model.parameters(), lr=0.5), af.SGD(model.parameters(), lr=0.5)
    fold(optimizer, model, 1)
    optimizer.step()  # windows of one are not accumulation
    fold(optimizer, model, 1)
    fold(optimizer, model, 0)  # nor is an empty micro-batch a second one
    with pytest.raises(af.BatchNormWarning, match=SEEN.split(",")[0]) as caught:  # as pytest is set up here
        fold(optimizer, model, 3)
    assert "micro-batches: 3" in repr(optimizer)
    optimizer.step()
    for _ in range(3):
        fold(optimizer, model)
    with warnings.catch_warnings():
        exec(str(caught.value).split("To silence this: ")[1], {"warnings": warnings, "af": af})
        for _ in range(2):
            fold(other, model)
