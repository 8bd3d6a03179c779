"""The benchmark's peers: nobody is timed who does not come out at the same step as fp64."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("rich")

from bench import exact
from bench import peers as module
from bench.peers import KNOWN, REFERENCES, peers
from bench.workload import Workload

SMALL = [(40, 30), (64,), (1,)]
STOCK = ["fused", "grad_scale", "foreach", "for-loop"]


class FakeOptimi(torch.optim.Optimizer):
    """optimi's AdamW: moments with their bias corrected, a step count in the group. `off`: what lr is multiplied by."""

    off = 1.0

    def __init__(self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float, **others: Any) -> None:
        assert others == {"triton": False, "foreach": False}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        group["step"] += 1
        beta1, beta2 = ((b ** int(group["step"]) - b) / (b ** int(group["step"]) - 1) for b in group["betas"])
        for param in group["params"]:
            state = self.state[param]
            first = state["exp_avg"].mul_(beta1).add_(param.grad, alpha=1 - beta1)
            second = state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.addcdiv_(first, second.sqrt().add_(group["eps"]), value=-group["lr"] * self.off)


class Off(FakeOptimi):
    off = 1.01


class Fails(FakeOptimi):
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["params"][0].data.zero_()
        raise ValueError("this card is too old\nfor several reasons")


def install(monkeypatch: pytest.MonkeyPatch, optimizer: type) -> None:
    module = ModuleType("optimi")
    module.AdamW = optimizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "optimi", module)


def bits(work: Workload) -> list[Tensor]:
    return [t.detach().clone() for t in (*work.params, *work.grads, *(s["exp_avg_sq"] for s in work.states))]


def test_a_peer_that_is_right_is_a_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeOptimi)
    work = Workload(SMALL)
    before = bits(work)
    found = peers(work, ["optimi"])
    assert [variant.name for variant in found.variants] == [KNOWN[n].label for n in (*REFERENCES, "optimi")]
    assert found.errors["clip + optimi"] < 1e-8
    assert not found.gaps
    assert not found.notes
    assert all(torch.equal(a, b) for a, b in zip(before, bits(work), strict=True))


def test_a_peer_that_is_one_percent_off_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Off)
    found = peers(Workload(SMALL), ["optimi"])
    assert "clip + optimi" not in found.errors
    (gap,) = found.gaps
    assert gap["name"] == "clip + optimi"
    assert 0.5e-6 < gap["error"] < 5e-6  # a hundredth of updates of about lr
    assert gap["cannot"].startswith("cannot: wrong, so not timed")


def test_a_peer_that_does_not_run_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Fails)
    work = Workload(SMALL)
    before = bits(work)
    found = peers(work, ["optimi"])
    (note,) = found.notes
    assert note.startswith("left out: clip + optimi: ")
    assert "ValueError: this card is too old" in note
    assert "\n" not in note
    assert set(found.errors) == {KNOWN[name].label for name in REFERENCES}
    assert all(torch.equal(a, b) for a, b in zip(before, bits(work), strict=True))  # whatever it did half-way


class Counting(torch.optim.Optimizer):
    """DeepSpeed's and NVIDIA's AdamW: the count is a number, in each state or in the group."""

    in_group = False

    def __init__(self, params: Any, adam_w_mode: bool = False, adamw_mode: bool = False, **defaults: Any) -> None:
        assert adam_w_mode is self.in_group
        assert adamw_mode is not self.in_group
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        for index, param in enumerate(group["params"]):
            state = self.state[param]
            counted = group if self.in_group else state
            counted["step"] += index == 0 or not self.in_group
            single(param, state, group, counted["step"])


class CountingInGroup(Counting):
    in_group = True


def single(param: Tensor, state: dict[str, Tensor], group: dict[str, Any], count: int) -> None:
    (beta1, beta2), grad = group["betas"], param.grad
    assert grad is not None
    first, second = state["exp_avg"].lerp_(grad, 1 - beta1), state["exp_avg_sq"].lerp_(grad.square(), 1 - beta2)
    denominator = (second / (1 - beta2**count)).sqrt().add_(group["eps"])
    param.mul_(1 - group["lr"] * group["weight_decay"])
    param.addcdiv_(first, denominator, value=-group["lr"] / (1 - beta1**count))


@pytest.mark.parametrize(
    ("name", "module", "attribute", "optimizer"),
    [
        ("deepspeed", "deepspeed.ops.adam", "DeepSpeedCPUAdam", Counting),
        ("apex", "apex.optimizers", "FusedAdam", CountingInGroup),
        ("transformer_engine", "transformer_engine.pytorch.optimizers", "FusedAdam", CountingInGroup),
    ],
)
def test_a_count_that_is_a_plain_number_is_put_back(
    name: str, module: str, attribute: str, optimizer: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = ModuleType(module)
    setattr(fake, attribute, optimizer)
    for end in range(1, module.count(".") + 1):
        monkeypatch.setitem(sys.modules, ".".join(module.split(".")[:end]), ModuleType("parent"))
    monkeypatch.setitem(sys.modules, module, fake)
    work = Workload(SMALL)
    if optimizer is CountingInGroup:
        with pytest.raises(RuntimeError, match="it steps on a GPU"):
            KNOWN[name].make(work)
        work.device = torch.device("cuda")  # as far as the adapter is concerned
    recipe = KNOWN[name].make(work)
    work.device = torch.device("cpu")
    for _ in range(2):  # the second time it would count further
        assert work.error(recipe.whole) < 1e-8


@pytest.mark.parametrize("package", ["optimi", "flashoptim", "torchao.optim", "bitsandbytes", "heavyball",
                                     "deepspeed.ops.adam"])  # fmt: skip
def test_none_of_the_packages_is_required(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    found = peers(Workload(SMALL), [package.split(".")[0]])
    assert len(found.variants) == len(REFERENCES)
    assert "ModuleNotFoundError" in found.notes[0]


@pytest.mark.parametrize("name", STOCK)
def test_a_stock_recipe_comes_out_at_fp64(name: str) -> None:
    work = Workload(SMALL)
    recipe = KNOWN[name].make(work)
    assert work.error(recipe.whole) < 1e-8
    with pytest.raises(exact.WrongError):
        work.error(recipe.whole, scale=0.5)


def test_a_reference_that_is_wrong_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "PARAM_TOLERANCE", 0.0)
    with pytest.raises(exact.WrongError, match="off"):
        peers(Workload(SMALL), [])


def test_without_a_compiler_there_is_no_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    found = peers(Workload(SMALL), ["compiled"])
    assert "torch.compile needs a C++ compiler" in found.notes[0]


def test_deviation_sees_settings_that_differ_and_forgives_rounding() -> None:
    """Two steps from the beginning: each of the settings shows."""

    def after(**settings: Any) -> float:
        torch.manual_seed(1)
        params = [torch.nn.Parameter(torch.randn(500) * 0.02)]
        before = [params[0].detach().clone()]
        optimizer = torch.optim.AdamW(params, **{"lr": exact.LR, "weight_decay": exact.WEIGHT_DECAY, **settings})
        sets = [[torch.randn(500)], [torch.randn(500)]]
        for (grad,) in sets:
            params[0].grad = grad.clone()
            torch.nn.utils.clip_grad_norm_(params, exact.MAX_GRAD_NORM)
            optimizer.step()
        return exact.deviation(before, params, sets)

    assert after() < 1e-4
    for wrong in ({"lr": 1.01 * exact.LR}, {"betas": (0.8, 0.999)}, {"betas": (0.9, 0.9)}, {"weight_decay": 20.0}):
        assert after(**wrong) > 5e-3, wrong
