"""The benchmark's peers: who is compared with, checked before it is timed; and every suite on a CPU at tiny sizes."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("rich")

from accumfused.loop import linears
from bench import exact, peer_adapters, shapes
from bench.ceilings import Ceilings
from bench.loops import PIECE, CpuLoops
from bench.peers import KNOWN, REFERENCES, fold_gaps, peers, selected, step_gaps
from bench.suites import Bench, accumulate, all_suites, backward, lean, scale, tail, train
from bench.workload import Workload

SMALL = [(40, 30), (64,), (1,)]
STOCK = ["fused", "grad_scale", "foreach", "for-loop"]


@pytest.fixture(scope="module")
def ceilings() -> Ceilings:
    return Ceilings(lambda: CpuLoops(4 * PIECE))  # compiles


@pytest.fixture
def bench(ceilings: Ceilings) -> Bench:
    return Bench(ceilings, quick=True, rounds=1, peers=())


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
    assert [row["name"] for row in step_gaps(found.errors)] == ["optimi"]


def test_a_peer_that_is_one_percent_off_has_no_time(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    install(monkeypatch, Off)
    found = peers(Workload(SMALL), ["optimi"])
    assert "clip + optimi" not in found.errors
    (gap,) = found.gaps
    assert gap["name"] == "clip + optimi"
    assert 0.5e-6 < gap["error"] < 5e-6  # a hundredth of updates of about lr
    assert gap["cannot"].startswith("cannot: wrong, so not timed")

    bench.peers, bench.model_shapes = ("optimi",), [*SMALL]
    (table,) = tail.run(bench)  # the references can all in one step: no table of gaps
    row = next(row for row in table.rows if row["name"] == "clip + optimi")
    assert "median" not in row
    assert row["error"] == pytest.approx(gap["error"], rel=0.5)


@pytest.mark.parametrize("reason", ["missing", "fails"])
def test_a_peer_that_does_not_run_is_left_out_with_its_reason(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "missing":
        monkeypatch.setitem(sys.modules, "optimi", None)
    else:
        install(monkeypatch, Fails)
    work = Workload(SMALL)
    before = bits(work)
    found = peers(work, ["optimi"])
    (note,) = found.notes
    assert note.startswith("left out: clip + optimi: ")
    assert ("ModuleNotFoundError" if reason == "missing" else "ValueError: this card is too old") in note
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
    assert "Error" in found.notes[0]


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
    monkeypatch.setattr(peer_adapters.shutil, "which", lambda name: None)
    found = peers(Workload(SMALL), ["compiled"])
    assert "torch.compile needs a C++ compiler" in found.notes[0]


def test_who_is_selected() -> None:
    assert selected([], compiling=True) == [*REFERENCES]
    assert selected(["for-loop"], compiling=False) == [*REFERENCES, "for-loop"]
    assert set(selected(None, compiling=True)) == set(KNOWN)
    compiling = {name for name, adapter in KNOWN.items() if adapter.compiles}
    assert set(selected(None, compiling=False)) == set(KNOWN) - compiling
    with pytest.raises(ValueError, match="unknown peer adam; choose from fused"):
        selected(["adam"], compiling=False)
    assert {row["name"] for row in fold_gaps(["optimi", "for-loop"])} == {"optimi"}


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


def test_a_format_that_is_further_off_than_its_bits_has_no_time(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    def wrong(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1.05 * exact.LR, weight_decay=exact.WEIGHT_DECAY)

    named = lean.Lean("wrong by 5%", torch.float32, wrong, 0.02, clips=False, peer="torchao")
    monkeypatch.setattr(lean, "peers", lambda real=lean.peers: [*real()[:2], named])
    bench.peers = ("torchao",)
    (table,) = lean.run(bench)
    (row,) = [row for row in table.rows if row["name"] == "wrong by 5%"]
    assert 0.03 < row["error"] < 0.07
    assert "milliseconds" not in row
    assert all(row["deviation"] < 0.6 for row in table.rows if "milliseconds" in row)


def test_formats_that_do_not_fit_are_rows_with_what_they_need(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    count = shapes.count(bench.shapes(shapes.GPT2_BLOCKS))
    monkeypatch.setattr("bench.suites.available_bytes", lambda device: 40 * count)  # bf16 needs 32, fp32 44
    made: list[torch.dtype] = []
    monkeypatch.setattr(
        lean, "_made", lambda each, *rest, real=lean._made: (made.append(each.dtype), real(each, *rest))[1]
    )
    (table,) = lean.run(bench)
    rows = {row["name"]: row for row in table.rows}
    assert rows["accumfused, fp32"]["cannot"].startswith("skipped: needs")
    assert rows["accumfused, bf16 + split16, fp32 states"]["milliseconds"] > 0
    assert rows["accumfused, bf16 + split16, fp32 states"]["over_fp32"] is None
    assert set(made) == {torch.bfloat16}
    monkeypatch.setattr("bench.suites.available_bytes", lambda device: 0)
    (table,) = lean.run(bench)
    assert len(table.rows) == len(rows)
    assert all("cannot" in row for row in table.rows)


def test_a_table_that_runs_out_of_memory_leaves_the_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each backend has one: all variants together are too much for a GPU."""

    def made(each: lean.Lean, *rest: Any, real: Any = lean._made) -> Any:
        if each.name.startswith("accumfused,"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it.")
        return real(each, *rest)

    monkeypatch.setattr(lean, "_made", made)
    bench.backends = ["auto", "torch"]
    lost, whole = lean.run(bench)
    assert lost.rows == [
        {"name": "all variants", "cannot": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."}
    ]
    assert lost.title != whole.title
    assert [row["name"] for row in whole.rows if "milliseconds" in row][:3] == [
        "clip + AdamW(fused), fp32", "clip + AdamW(fused), bf16 throughout", "accumfused torch, fp32",
    ]  # fmt: skip


def test_a_sum_that_lacks_a_micro_batch_is_found(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    added = torch._foreach_add_
    monkeypatch.setattr(torch, "_foreach_add_", lambda kept, grads: added(kept[1:], grads[1:]))
    bench.model_shapes = [(300,), (20, 20)]
    with pytest.raises(exact.WrongError, match="_foreach_add_ into kept fp32 buffers: a sum of gradients is"):
        accumulate.run(bench)


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_accumulate_in_every_dtype(dtype: torch.dtype | None, bench: Bench) -> None:
    bench.model_shapes, bench.dtype = [(300,), (20, 20)], dtype
    tables = accumulate.run(bench)
    assert [("fp16" in table.title) for table in tables] == ([False, False] if dtype is None else [True])


def test_recipes_that_learn_something_else_are_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "MAX_GRAD_NORM", 1e-6)  # ours clips to that
    with pytest.raises(exact.WrongError, match="a loss is"):
        train.run(bench)


def test_train_has_both_losses_and_shares(bench: Bench) -> None:
    (table,) = train.run(bench)
    stock, *both = table.rows
    assert [row["name"] for row in both] == ["accumfused", "accumfused, fuse_linears"]
    for ours in both:
        assert len(stock["losses"]) == len(ours["losses"]) == 3
        assert ours["losses"] == pytest.approx(stock["losses"], abs=1e-4)
    assert all(0 < row["tail_share"] < 1 for row in table.rows)
    assert stock["over_stock"] == 1


def test_backward_has_layers_with_weights_of_their_own_and_sums_that_take_less(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "SMALLEST", 1)
    mlp, blocks = backward.run(bench)
    assert "GELU-MLP of 16,704 parameters" in mlp.title  # two pairs of layers, of 32 and 128 outputs
    for table in (mlp, blocks):
        _, ours, fused = table.rows
        assert fused["peak_bytes"] < ours["peak_bytes"]


def test_sizes_that_do_not_fit_are_rows_with_what_they_need(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.suites.available_bytes", lambda device: 50_000_000)
    (table,) = scale.run(bench)
    assert [row["parameters"] for row in table.rows if "median_ms" in row] == [100_000, 500_000, 1_000_000, 2_500_000]
    assert table.rows[-1]["cannot"] == "skipped: needs 0.2 GB, 0.1 are free"
    monkeypatch.setattr("bench.suites.available_bytes", lambda device: None)
    assert bench.fits(10**15)


def test_the_shapes_are_the_models() -> None:
    assert (len(shapes.vit()), shapes.count(shapes.vit())) == (152, 86_567_656)


@pytest.mark.parametrize("name", [name for name in all_suites() if name not in ("memory", "processes", "train")])
def test_every_suite_runs(name: str, bench: Bench) -> None:
    """Those with processes of their own run in the benchmark's --quick; train above."""
    tables = all_suites()[name](bench)
    assert tables
    for table in tables:
        names = [row["name"] for row in table.rows]
        assert len(names) == len(set(names)), table.title
