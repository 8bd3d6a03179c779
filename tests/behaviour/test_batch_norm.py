"""The warning of BatchNorm: who is named, who is not, and that an optimizer gives it once."""

from __future__ import annotations

import dataclasses
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import accumfused as af
from accumfused.batch_norm import BatchNormWarning, warn_of_batch_norm


def warned(params: Any) -> list[str]:
    """The texts of the warnings for these parameters."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_batch_norm(list(params))
    assert all(warning.category is BatchNormWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def named(params: Any) -> str:
    """What the one warning names."""
    (text,) = warned(params)
    return text.split("training mode: ")[1].split(". Its statistics")[0]


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), norm


def net(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"block": Block(norm)}))


# ---- who is named --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_a_batch_norm_is_named_by_its_path_and_class(kind: type[nn.Module]) -> None:
    model = net(kind(4))
    assert named(model.parameters()) == f"1.block.norm ({kind.__name__})"


def test_the_path_begins_at_the_outermost_module() -> None:
    outer = nn.ModuleDict({"teacher": nn.Linear(4, 4), "student": net(nn.BatchNorm1d(4))})
    assert named(outer["student"].parameters()) == "student.1.block.norm (BatchNorm1d)"


def test_one_of_its_two_parameters_is_enough() -> None:
    norm = nn.BatchNorm1d(4)
    model = net(norm)
    assert named([norm.bias]) == named([norm.weight]) == "1.block.norm (BatchNorm1d)"
    assert warned([nn.Parameter(norm.weight.detach()), model[0].bias]) == []  # equal, but not the same parameter


def test_a_batch_norm_without_a_model_is_named_by_its_class() -> None:
    norm = nn.BatchNorm1d(4)
    assert named(norm.parameters()) == "BatchNorm1d"


def test_a_subclass_is_a_batch_norm() -> None:
    class Mine(nn.BatchNorm2d):
        pass

    model = net(Mine(4))
    assert named(model.parameters()) == "1.block.norm (Mine)"


def test_only_those_in_training_mode_are_named() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model[0].eval()
    assert named(model.parameters()) == "1 (BatchNorm1d)"


def test_a_batch_norm_that_stands_in_two_places_is_named_once() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.ModuleDict({"a": norm, "b": nn.Sequential(norm)})
    assert named(model.parameters()) == "a (BatchNorm1d)"
    other = nn.ModuleDict({"a": norm})
    assert named(other.parameters()) == "a (BatchNorm1d)"


@pytest.mark.parametrize(("count", "end"), [(5, "4 (BatchNorm1d)"), (6, "4 (BatchNorm1d) and 1 more"), (53, "48 more")])
def test_of_many_the_first_five_are_named(count: int, end: str) -> None:
    model = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(count)))
    assert named(model.parameters()).startswith("0 (BatchNorm1d), 1 (BatchNorm1d), 2 (BatchNorm1d), 3 (BatchNorm1d), 4")
    assert named(model.parameters()).endswith(end)


@pytest.mark.parametrize("kind", ["affine=False", "frozen"])
def test_one_that_trains_nothing_is_named_for_the_model_it_is_in(kind: str) -> None:
    norm = nn.BatchNorm1d(4, affine=kind == "frozen").requires_grad_(False)
    model, other = net(norm), nn.Linear(4, 4)
    assert named([model[0].weight, model[0].bias]) == "1.block.norm (BatchNorm1d)"
    assert warned(other.parameters()) == []


def test_a_model_of_one_optimizer_in_a_module_of_two_is_not_named_for_the_other() -> None:
    both = nn.ModuleDict({"generator": nn.Linear(4, 4), "discriminator": net(nn.BatchNorm1d(4))})
    assert warned(both["generator"].parameters()) == []


# ---- who is not ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.GroupNorm(2, 4),
        lambda: nn.LayerNorm(4),
        lambda: nn.InstanceNorm1d(4, affine=True),
        lambda: nn.SyncBatchNorm(4),
    ],
    ids=["GroupNorm", "LayerNorm", "InstanceNorm", "SyncBatchNorm"],
)
def test_other_norms_are_silent(make: Callable[[], nn.Module]) -> None:
    model = net(make())
    assert warned(model.parameters()) == []


def test_eval_mode_is_silent() -> None:
    model = net(nn.BatchNorm1d(4)).eval()
    assert warned(model.parameters()) == []


@pytest.mark.parametrize("affine", [False, True])
def test_the_batch_norm_of_another_model_is_silent(affine: bool) -> None:
    other = net(nn.BatchNorm1d(4, affine=affine))
    assert warned(nn.Linear(4, 4).parameters()) == []
    assert warned(other.parameters()) != []


def test_without_a_parameter_of_one_dimension_nothing_is_sought(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(nn.BatchNorm1d(4))

    def scan() -> list[Any]:
        raise AssertionError("the objects were asked for")

    monkeypatch.setattr(gc, "get_objects", scan)
    assert warned([model[0].weight]) == []
    with pytest.raises(AssertionError, match="asked for"):
        warned([model[0].bias])


# ---- the scan ------------------------------------------------------------------------------------------------------


class Proxy:
    """Stands for an object that is made, or fails, at the first touch."""

    @property
    def __class__(self) -> Any:
        raise AssertionError("a proxy was woken")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("a proxy was woken")


def test_foreign_objects_are_not_touched() -> None:
    model, proxy = net(nn.BatchNorm1d(4)), Proxy()
    assert any(thing is proxy for thing in gc.get_objects())
    assert len(warned(model.parameters())) == 1


def test_modules_that_were_never_finished_or_have_no_hash_do_not_stop_it() -> None:
    @dataclasses.dataclass
    class Unhashable(nn.Module):
        size: int

        def __post_init__(self) -> None:
            super().__init__()

    class Ajar(nn.BatchNorm1d):
        def __init__(self) -> None:
            pass

    strangers = [Unhashable(1), Ajar(), nn.Sequential(None)]
    model = net(nn.BatchNorm1d(4))
    assert named(model.parameters()) == "1.block.norm (BatchNorm1d)"
    assert len(strangers) == 3


@pytest.mark.parametrize("action", ["always", "error"])
def test_no_module_is_kept(action: Any) -> None:
    model = net(nn.BatchNorm1d(4))
    gone = weakref.ref(model)
    error = None
    with warnings.catch_warnings(record=True):
        warnings.simplefilter(action)
        try:
            warn_of_batch_norm([model[0].bias, model[1]["block"].norm.bias])
        except BatchNormWarning as warning:
            error = warning  # with a traceback, and so with the frames of the scan
    assert (error is not None) == (action == "error")
    del model
    gc.collect()
    assert gone() is None


# ---- through an optimizer ------------------------------------------------------------------------------------------


def micro_batch(model: nn.Module, optimizer: Any, weight: float | None = None) -> None:
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.accumulate(weight)


def flat(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), norm)


def test_the_second_micro_batch_warns_once_for_an_optimizer() -> None:
    model = flat(nn.BatchNorm1d(4))
    optimizer = af.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # windows of one are not accumulation
        micro_batch(model, optimizer)
        optimizer.step()
    micro_batch(model, optimizer)
    with pytest.warns(BatchNormWarning, match=r"1 \(BatchNorm1d\)") as caught:
        micro_batch(model, optimizer)
    assert [warning.filename for warning in caught] == [__file__]
    for _ in range(2):
        micro_batch(model, optimizer)
        optimizer.step()
        micro_batch(model, optimizer)


def test_an_empty_micro_batch_is_not_a_second_one() -> None:
    model = flat(nn.BatchNorm1d(4))
    optimizer = af.SGD(model.parameters(), lr=0.1)
    micro_batch(model, optimizer, 3)
    micro_batch(model, optimizer, 0)
    with pytest.warns(BatchNormWarning):
        micro_batch(model, optimizer, 3)


def test_the_advice_in_the_text_silences_it() -> None:
    model = flat(nn.BatchNorm1d(4))
    optimizer = af.SGD(model.parameters(), lr=0.1)
    (text,) = warned(model.parameters())
    with warnings.catch_warnings():
        exec(text.split("To silence this: ")[1], {"warnings": warnings, "af": af})
        micro_batch(model, optimizer)
        micro_batch(model, optimizer)


def test_where_the_warning_is_an_error_the_window_is_whole() -> None:
    model = flat(nn.BatchNorm1d(4))
    twin = flat(nn.BatchNorm1d(4))
    twin.load_state_dict(model.state_dict())
    batches = torch.randn(2, 3, 4)
    optimizer, stock = af.SGD(model.parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    model(batches[0]).square().mean().backward()
    optimizer.accumulate()
    model(batches[1]).square().mean().backward()
    with pytest.raises(BatchNormWarning):  # as pytest is set up here
        optimizer.accumulate()
    optimizer.step()
    for batch in batches:
        twin(batch).square().mean().backward()
    stock.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
