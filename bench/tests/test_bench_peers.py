"""The benchmark's peers: nobody is timed who does not come out at the same step as fp64."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import exact
from bench import peers as module
from bench.peers import KNOWN, REFERENCES, peers
from bench.workload import Workload

SMALL = [(40, 30), (64,), (1,)]


class Fake(torch.optim.AdamW):
    """DeepSpeed's AdamW, whose count is a number in each state, or NVIDIA's, whose count is the group's."""

    factor = 1.0  # of lr

    def __init__(self, params: Any, lr: float, adam_w_mode: bool = False, adamw_mode: bool = False, **others: Any):
        self._in_group = adam_w_mode
        assert adam_w_mode is not adamw_mode
        super().__init__(params, lr=self.factor * lr, foreach=False, **others)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        places = [group] if self._in_group else [self.state[param] for param in group["params"]]
        counts = {place["step"] for place in places}
        for state in self.state.values():
            state["step"] = torch.tensor(float(next(iter(counts))))
        super().step()
        for place in places:
            place["step"] = next(iter(counts)) + 1


class Off(Fake):
    factor = 1.01


class Fails(Fake):
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["params"][0].data.zero_()
        raise ValueError("this machine is too old\nfor several reasons")


def install(monkeypatch: pytest.MonkeyPatch, optimizer: type, package: str = "deepspeed.ops.adam") -> None:
    fake: Any = ModuleType(package)
    fake.DeepSpeedCPUAdam = fake.FusedAdam = optimizer
    for end in range(1, package.count(".") + 1):
        monkeypatch.setitem(sys.modules, ".".join(package.split(".")[:end]), ModuleType("parent"))
    monkeypatch.setitem(sys.modules, package, fake)


def bits(work: Workload) -> list[Tensor]:
    return [t.detach().clone() for t in (*work.params, *work.grads, *(s["exp_avg_sq"] for s in work.states))]


def test_a_peer_that_is_right_is_a_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Fake)
    work = Workload(SMALL)
    before = bits(work)
    found = peers(work, ["deepspeed"])
    assert [variant.name for variant in found.variants] == [KNOWN[n].label for n in (*REFERENCES, "deepspeed")]
    assert found.errors["clip + DeepSpeedCPUAdam"] < 1e-8
    assert not found.gaps
    assert not found.notes
    assert all(torch.equal(a, b) for a, b in zip(before, bits(work), strict=True))


def test_a_peer_that_is_one_percent_off_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Off)
    found = peers(Workload(SMALL), ["deepspeed"])
    assert [*found.errors] == [KNOWN[name].label for name in REFERENCES]
    (gap,) = found.gaps
    assert gap["name"] == "clip + DeepSpeedCPUAdam"
    assert 0.5e-6 < gap["error"] < 5e-6  # a hundredth of updates of about lr
    assert gap["cannot"].startswith("cannot: wrong, so not timed")


def test_a_peer_that_does_not_run_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Fails)
    work = Workload(SMALL)
    before = bits(work)
    found = peers(work, ["deepspeed"])
    assert found.notes == ["left out: clip + DeepSpeedCPUAdam: ValueError: this machine is too old"]
    assert set(found.errors) == {KNOWN[name].label for name in REFERENCES}
    assert all(torch.equal(a, b) for a, b in zip(before, bits(work), strict=True))  # whatever it did half-way


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("deepspeed", "deepspeed.ops.adam"),
        ("apex", "apex.optimizers"),
        ("transformer_engine", "transformer_engine.pytorch.optimizers"),
    ],
)
def test_a_count_that_is_a_plain_number_is_put_back(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Fake, package)
    work = Workload(SMALL)
    if name != "deepspeed":
        with pytest.raises(RuntimeError, match="it steps on a GPU"):
            KNOWN[name].make(work)
        work.device = torch.device("cuda")  # as far as the recipe is concerned
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


@pytest.mark.parametrize("name", ["fused", "grad_scale", "foreach", "for-loop"])
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
