"""A checkpoint that does not fit is refused, and leaves everything as it was: one table of them."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import inside
import pytest
import torch
from compare import differences, params_of, refused, snapshot
from models import train
from table import OPTIMIZERS, Own
from torch.nn import Parameter

import accumfused as af

Edit = Callable[[dict[str, Any]], Any]
Make = Callable[[], Any]
CHANNELS_LAST, CONTIGUOUS = torch.channels_last, torch.contiguous_format
FORMATTED = {"master_weights": "split16", "state_dtype": "8bit", "state_dtype_min_numel": 2, "lr": 0.1}


def stepped(cls: Any, *shapes: tuple[int, ...], **options: Any) -> Any:
    optimizer = cls([Parameter(torch.ones(shape)) for shape in shapes or ((3,), (2, 2))], **{"lr": 0.1, **options})
    train(optimizer, 1)
    return optimizer


def of(cls: Any, *shapes: tuple[int, ...], **options: Any) -> Make:
    return lambda: stepped(OPTIMIZERS[cls].ours if isinstance(cls, str) else cls, *shapes, **options)


def adamw() -> Any:
    return stepped(af.AdamW, max_grad_norm=0.5, weight_decay=0.3)


def in_groups(**options: Any) -> Any:
    return af.AdamW([{"params": [Parameter(torch.ones(shape))]} for shape in ((3,), (2, 2))], **options)


def rmsprop() -> Any:
    return af.fuse(stepped(Own))


def muon(is_muon: bool = False) -> Any:
    matrices = [Parameter(torch.ones(2, 2)) for _ in range(2)]
    optimizer = af.Muon([{"params": matrices[:1]}, {"params": matrices[1:], "use_muon": is_muon}])
    train(optimizer, 1)
    return optimizer


def limited(*limits: float, **options: Any) -> Any:
    optimizer = in_groups(**options)
    for group, limit in zip(optimizer.param_groups, limits, strict=False):
        group["max_grad_norm"] = limit
    train(optimizer, 1)
    return optimizer


def averaging() -> Any:
    return stepped(af.SGDScheduleFree)


def zscore() -> Any:
    return stepped(af.AdamW, clip=af.ZScore())


def accumulated(optimizer: Any, weight: float) -> Any:
    for param in params_of(optimizer):
        param.grad = torch.ones_like(param)
    optimizer.accumulate(weight)
    return optimizer


def noise() -> Any:
    optimizer = accumulated(accumulated(stepped(af.AdamW, noise_scale=True), 1.0), 2.0)
    optimizer.step()
    return optimizer


def window() -> Any:
    return accumulated(adamw(), 3.0)


def halves(state_dtype: Any = "8bit", form: torch.memory_format = CONTIGUOUS) -> Any:
    """In bfloat16 with a remainder, the states in 8 bits or not."""
    params = [torch.ones(37, 11), torch.ones(8, 16, 4, 4).to(memory_format=form)]
    optimizer = af.AdamW([Parameter(p.bfloat16()) for p in params], **{**FORMATTED, "state_dtype": state_dtype})
    train(optimizer, 1)
    return optimizer


def in_fp32() -> Any:
    return halves(torch.float32)


def state(row: int, **entries: Any) -> Edit:
    return lambda saved: saved["state"][row].update(copy.deepcopy(entries))


def changed(row: int, **changes: Callable[[Any], Any]) -> Edit:
    def edit(saved: dict[str, Any]) -> None:
        for name, change in changes.items():
            saved["state"][row][name] = change(saved["state"][row].get(name))

    return edit


def without(row: int, name: str, *edits: Edit) -> Edit:
    return lambda saved: (saved["state"][row].pop(name), *(edit(saved) for edit in edits))


def older(row: int, change: Callable[[Any], Any]) -> Edit:
    """Puts codes under their states' names."""

    def edit(saved: dict[str, Any]) -> None:
        entries = saved["state"][row]
        for name in ("exp_avg", "exp_avg_sq"):
            entries[name] = change(entries.pop(f"{name}_8bit"))

    return edit


def two(value: Any) -> Any:
    return torch.cat([value.reshape(1)] * 2)


BAD: dict[str, tuple[Make, Edit | None, Make, str]] = {
    # of something else
    "a model's": (lambda: torch.nn.Linear(2, 2), None, adamw, "no 'state'"),
    "nothing": (adamw, lambda saved: saved.clear(), adamw, "no 'state'"),
    "SGD's": (of(torch.optim.SGD, momentum=0.9), None, adamw, "groups have no 'betas', which AdamW needs"),
    "Adamax's": (of(torch.optim.Adamax), None, adamw, "has no 'exp_avg_sq', only exp_avg, exp_inf, step"),
    "Lion's": (of("Lion"), None, adamw, "groups have no 'eps', which AdamW needs"),
    "Adam's into Lion": (of("Adam"), None, of("Lion"), "has 'exp_avg_sq', which Lion has not"),
    "SGD's into another's": (of("SGD"), None, rmsprop, "groups have no 'alpha', which Own needs"),
    "more parameters": (of("AdamW", (3,), (2, 2), (1,)), None, adamw, "doesn't match the size"),
    "more groups": (in_groups, None, adamw, "different number of parameter groups"),
    "fewer groups": (adamw, None, in_groups, "different number of parameter groups"),
    "other shapes": (of("AdamW", (3,), (4,)), None, adamw, r"'exp_avg' of parameter 1 has shape \[4\], .* \[2, 2\]"),
    # damaged
    "no state": (adamw, lambda saved: saved.pop("state"), adamw, "no 'state'"),
    "no lr": (adamw, lambda saved: saved["param_groups"][0].pop("lr"), adamw, "groups have no 'lr', which AdamW needs"),
    "no params": (adamw, lambda saved: saved["param_groups"][0].pop("params"), adamw, "no 'params'"),
    "no exp_avg_sq": (adamw, without(1, "exp_avg_sq"), adamw, "state of parameter 1 has no 'exp_avg_sq'"),
    "no step": (adamw, without(1, "step"), adamw, "state of parameter 1 has no 'step'"),
    "a state of nobody": (adamw, lambda saved: saved["state"].update({7: {}}), adamw, "a state of parameter 7, which"),
    "a state that is none": (adamw, lambda saved: saved["state"].update({0: 3.0}), adamw, "'float' object has no"),
    "two steps": (adamw, changed(1, step=two), adamw, "'step' of parameter 1 is to be one number"),
    "two sums": (
        averaging, lambda s: s["param_groups"][0].update(weight_sum=torch.ones(2)), averaging,
        "'weight_sum' of a group is to be one number",
    ),
    "two counts": (
        averaging, lambda s: s["param_groups"][0].update(k=torch.ones(2)), averaging, "'k' of a group is to be one",
    ),
    "no count": (averaging, lambda s: s["param_groups"][0].pop("lr_max"), averaging, "no 'lr_max'"),
    "no maximum": (adamw, lambda s: s["param_groups"][0].update(amsgrad=True), adamw, "has no 'max_exp_avg_sq'"),
    "a maximum into 8 bits": (of("AdamW", amsgrad=True), None, of("AdamW", state_dtype="8bit"), "go with amsgrad=True"),
    # of groups
    "Muon's": (muon, lambda saved: saved["param_groups"][1].update(use_muon=True), muon, "group 1 is Muon's in one of"),
    "not Muon's": (lambda: muon(True), None, muon, "group 1 is Muon's in one of checkpoint and optimizer"),
    "AdamW's": (muon, None, lambda: muon(True), "group 1 is Muon's in one of checkpoint and optimizer"),
    "limits": (lambda: limited(0.5, 0.25), None, lambda: limited(clip=af.PerTensor(1.0)), "does not clip groups"),
    "a limit of NaN": (
        lambda: limited(0.5, 0.25), lambda saved: saved["param_groups"][1].update(max_grad_norm=math.nan),
        lambda: limited(0.5, 0.25), "max_grad_norm of parameter group 1 must be > 0",
    ),
    # of what is remembered
    "a short history": (zscore, state(0, clip_history=torch.zeros(2)), zscore, "'clip_history' of parameter 0 has not"),
    "a history of one": (zscore, state(0, clip_history=4.0), zscore, "'float' object has no"),
    "a mean below 0": (zscore, changed(0, clip_history=lambda h: h - 500.0), zscore, "'clip_history' .* holds -"),
    "windows below 0": (noise, changed(0, noise_scale=lambda n: n - 500.0), noise, "'noise_scale' .* holds -"),
    "means of a weight below 0": (
        noise, changed(0, noise_scale=lambda n: n * torch.tensor([1, 1, -1, 1])), noise, "'noise_scale' .* holds -",
    ),
    "short means": (noise, state(0, noise_scale=torch.zeros(2)), noise, "'noise_scale' of parameter 0 has not"),
    # with an open window
    "no weights": (window, without(1, "grad_accumulator_weights"), adamw, "window of parameter 1 is incomplete"),
    "no sum": (window, without(1, "grad_accumulator"), adamw, "window of parameter 1 is incomplete"),
    "cut weights": (window, changed(0, grad_accumulator_weights=lambda w: w[:2]), adamw, "parameter 0 is incomplete"),
    "listed weights": (window, changed(0, grad_accumulator_weights=list), adamw, "window of parameter 0 is incomplete"),
    "a weight below 0": (
        window, changed(0, grad_accumulator_weights=lambda w: w * torch.tensor([1.0, -0.1, 1.0, 1.0])), adamw,
        "window of parameter 0 has .* micro-batches of the weight -",
    ),
    "a factor of 0": (
        window, changed(0, grad_accumulator_weights=lambda w: w * torch.tensor([1.0, 1.0, 0.0, 1.0])), adamw,
        "window of parameter 0 has 1 micro-batches of the weight 3",
    ),
    "half a micro-batch": (
        window, changed(0, grad_accumulator_weights=lambda w: w + 0.5), adamw, r"window of parameter 0 has \d\.5 micro",
    ),
    "a cut sum": (window, changed(0, grad_accumulator=lambda a: a[:2]), adamw, r"'grad_accumulator' .* shape \[2\]"),
}  # fmt: skip
FORMATS: dict[str, tuple[Edit, str]] = {
    "no scales": (without(0, "exp_avg_scale"), "'exp_avg_8bit' of parameter 0 is .*'exp_avg_scale'"),
    "two scales": (changed(0, exp_avg_scale=lambda s: s[:2]), r"shape \[2\], .* make \[4\].* another block size"),
    "a matrix": (changed(0, exp_avg_sq_scale=lambda s: s.view(2, 2)), r"'exp_avg_sq_8bit' .* scales of shape \[2, 2\]"),
    "scales in fp32": (changed(0, exp_avg_scale=torch.Tensor.float), r"is torch\.uint8 with scales in torch\.float32"),
    "signed codes": (changed(0, exp_avg_8bit=torch.Tensor.char), r"is torch\.int8 with scales"),
    "cast codes": (  # as torch's optimizers do
        changed(0, exp_avg_8bit=torch.Tensor.float, exp_avg_scale=torch.Tensor.float), "as accumfused has saved it"
    ),
    "whole numbers": (without(0, "exp_avg_scale", changed(0, exp_avg_8bit=torch.Tensor.int)), r"torch\.int32 without"),
    "flat codes": (changed(0, exp_avg_8bit=torch.Tensor.flatten), r"'exp_avg_8bit' .* shape \[407\], .* \[37, 11\]"),
    "a cut remainder": (changed(0, master_remainder=lambda r: r[:-1]), r"'master_remainder' .* has shape \[36, 11\]"),
    "a master of one": (state(0, master_weight=torch.ones(())), r"'master_weight' of parameter 0 has shape \[\]"),
    "a remainder of 0": (state(0, master_remainder=0), "'master_remainder' of parameter 0 is a int"),
    "two seeds": (changed(0, rounding_seed=two), "'rounding_seed' of parameter 0 is to be one number"),
    "a seed that is a word": (state(0, rounding_seed="17"), "'rounding_seed' of .* one number, must be real number"),
    "codes beside numbers": (changed(0, exp_avg=lambda _: torch.ones(37, 11)), "8 bits, and 'exp_avg' is there"),
    "cast codes under their states' names, as older checkpoints have them": (
        older(0, torch.Tensor.float), "another optimizer has cast 8-bit codes"
    ),
    "codes without scales under their state's name": (
        without(0, "exp_avg_scale", older(0, lambda codes: codes)), "'exp_avg' of .*'exp_avg_scale' are missing"
    ),
    "a state that is a number": (state(0, exp_avg_8bit=0.5), "'exp_avg_8bit' of parameter 0 is a float, not"),
    "codes copied by index": (
        changed(1, exp_avg_8bit=lambda codes: codes.contiguous(memory_format=CHANNELS_LAST)),
        "parameter 1 is not contiguous, and its scales, .* are those of codes that were contiguous",
    ),
}  # fmt: skip
BAD |= {name: (halves, edit, halves, text) for name, (edit, text) in FORMATS.items()}
BAD |= {f"{name}, into fp32": (halves, edit, in_fp32, text) for name, (edit, text) in FORMATS.items()}
BAD["codes copied by index, the other way"] = (
    lambda: halves(form=CHANNELS_LAST), changed(1, exp_avg_8bit=torch.Tensor.contiguous),
    lambda: halves(form=CHANNELS_LAST),
    "parameter 1 is contiguous, and its scales, .* are those of codes that were not contiguous",
)  # fmt: skip


# Not in words of their own: a lookup has failed, or torch has refused, and the cause is chained.
LOOKUPS = [
    "a model's", "nothing", "no state", "no params", "a state that is none", "two steps", "two sums", "two counts",
    "no count", "a history of one", "more parameters", "more groups", "fewer groups", "two seeds",
    "a seed that is a word",
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("has_state", [True, False])
def test_it_raises_and_nothing_has_changed(bad: str, has_state: bool) -> None:
    make, edit, into, text = BAD[bad]
    saved = copy.deepcopy(make().state_dict())
    if edit is not None:
        edit(saved)
    optimizer, twin = into(), into()
    if not has_state:
        optimizer.state.clear()
        twin.state.clear()
    said, given = repr(optimizer), pickle.dumps(saved)
    is_lookup = bad.removesuffix(", into fp32") in LOOKUPS
    generic = "not a checkpoint of this optimizer: "
    with refused(optimizer, ValueError, f"^{generic}.*{text}" if is_lookup else f"^(?!{generic}).*{text}"):
        optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match=text) as raised:
        optimizer.load_state_dict(saved)
    assert (raised.value.__cause__ is not None) is is_lookup
    assert (repr(optimizer), pickle.dumps(saved)) == (said, given)
    for each in (optimizer, twin):
        train(each, 1)
    assert differences(snapshot(twin), snapshot(optimizer)) == []


JUNK = [None, -1, math.nan, "x", [], {}, (1, 2), object(), lambda: torch.ones(()), lambda: torch.ones(7)]
DAMAGED: list[Make] = [
    of(af.AdamW, amsgrad=True), of(af.SGD, momentum=0.9), of(af.Lion), of(af.AdamW, **FORMATTED), of(af.Adagrad),
    of(af.AdamW, clip=af.ZScore(warmup=2)), window,
]  # fmt: skip


def places(node: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all entries of nested dictionaries and lists."""
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [found for key, value in entries for found in [(*way, key), *places(value, (*way, key))]]


@pytest.mark.parametrize("make", DAMAGED)
def test_a_damaged_checkpoint_is_loaded_or_changes_nothing(make: Make) -> None:
    """One entry, wherever it is, is gone or something else; what fails raises where it is loaded."""
    for seed in range(30):
        chance = random.Random(seed)
        saved = copy.deepcopy(make().state_dict())
        *way, last = chance.choice(places(saved))
        node: Any = saved
        for key in way:
            node = node[key]
        if chance.random() < 0.3:
            del node[last]
        else:
            junk = chance.choice(JUNK)
            node[last] = junk() if callable(junk) else junk
        optimizer = make()
        optimizer.zero_grad()
        before, said = snapshot(optimizer), repr(optimizer)
        try:
            optimizer.load_state_dict(saved)
        except ValueError:
            assert differences(before, snapshot(optimizer)) == [], f"{way} {last}"
            assert repr(optimizer) == said
            continue
        if not inside.open_window(optimizer):
            train(optimizer, 1)
        optimizer.zero_grad()


@pytest.mark.parametrize("place", ["cast", "restored", "user's hook before", "user's hook after"])
def test_a_load_that_fails_within_torch_changes_nothing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own hook raises its own error; after the load it finds all of it loaded."""
    optimizer, other = adamw(), stepped(af.AdamW, lr=0.7)
    train(other, 2)
    saved, error = copy.deepcopy(other.state_dict()), RuntimeError("the disk is gone")

    def fails(*_: Any) -> None:
        raise error

    if place == "cast":
        saved["state"][1]["unknown"] = {}.items()  # torch makes another of its type, and cannot
    elif place == "restored":
        monkeypatch.setattr(torch.optim.AdamW, "__setstate__", lambda self, state: {}["gone"])
    elif place == "user's hook before":
        optimizer.register_load_state_dict_pre_hook(fails)
    else:
        optimizer.register_load_state_dict_post_hook(fails)
    before = snapshot(optimizer)
    is_ours = "hook" not in place
    text = "not a checkpoint of this optimizer" if is_ours else "the disk is gone"
    with pytest.raises(ValueError if is_ours else RuntimeError, match=text):
        optimizer.load_state_dict(saved)
    if place == "user's hook after":
        assert optimizer.param_groups[0]["lr"] == 0.7
        assert [optimizer.state[param]["step"] for param in params_of(optimizer)] == [3, 3]
        train(optimizer, 1)  # the plan of before is not used again
    else:
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert differences(before, snapshot(optimizer)) == []
