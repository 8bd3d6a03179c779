"""Muon: matrices, orthogonalized in bf16 between two rules, and AdamW's parameters beside them."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from compare import assert_all_same_bits, assert_close, everything
from peers import params_of
from table import random_grads, random_params, set_grads
from torch import Tensor
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.distributed.tensor import Shard as ByRows
from torch.optim import lr_scheduler

import accumfused as af
from accumfused.optimizers import muon

# Squares and rectangles of both kinds, small ones in batches, and large ones in panels of 256 rows.
SHAPES = [(24, 24), (24, 24), (40, 64), (64, 40), (300, 300), (300, 700), (520, 270), (1, 5), (5, 1), (0, 3)]
OTHERS = [(7,), (), (9, 4)]
ADAMW: dict[str, Any] = {"lr": 0.1, "betas": (0.5, 0.7), "weight_decay": 0.4}
MUON: dict[str, Any] = {"lr": 0.7, "weight_decay": 0.3}


def assert_near(actual: Tensor, truth: Tensor) -> None:
    """Within the rounding of bf16 matrices, of which an update is made."""
    size = truth.double().norm()
    assert_close(
        (actual.double() - truth.double()).norm() / size if size else size, torch.zeros(()), "bf16 Newton-Schulz"
    )


def weights(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """About as large as an update, so that the decay shows."""
    return [(p.detach() / max((1, *p.shape)) ** 0.5).requires_grad_() for p in random_params(shapes)]


def both(**settings: Any) -> af.Muon:
    """Matrices and AdamW's parameters, in two groups."""
    torch.manual_seed(0)
    groups = [{"params": weights(SHAPES[:4])}, {"params": weights(OTHERS), "use_muon": False, **ADAMW}]
    return af.Muon(groups, **MUON, **settings)


def peers() -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return torch.optim.Muon(weights(SHAPES[:4]), **MUON), torch.optim.AdamW(weights(OTHERS), foreach=False, **ADAMW)


@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": False, "momentum": 0.6}, {"ns_steps": 2}, {"adjust_lr_fn": "match_rms_adamw", "eps": 1e-2}],
    ids=str,
)
def test_numbers_are_the_formulas_and_torchs_within_the_rounding_of_bf16(backend: str, options: dict[str, Any]) -> None:
    ours = af.Muon(weights(SHAPES), **MUON, **options, backend=backend)
    theirs = torch.optim.Muon(weights(SHAPES), **MUON, **options)
    truth = oracle.Oracle(oracle.muon, {**MUON, **options}, weights(SHAPES))
    for seed in range(3):
        grads = random_grads(params_of(ours), seed)
        for optimizer in (ours, theirs):
            set_grads(params_of(optimizer), grads)
            optimizer.step()
        truth.step(grads)
    rows = zip(params_of(ours), params_of(theirs), truth.params, truth.states, strict=True)
    for param, peer, true_param, state in rows:
        assert_near(param, true_param)
        assert_near(param, peer)
        assert_close(ours.state[param]["momentum_buffer"], state["momentum_buffer"], "fp64 oracle")
        assert ours.state[param].keys() == theirs.state[peer].keys() == {"momentum_buffer"}


@pytest.mark.parametrize("shape", [(128, 128), (128, 500), (300, 1000), (700, 260)])
@pytest.mark.parametrize("kind", ["gaussian", "decaying", "of low rank", "12 steps"])
def test_the_error_is_of_the_size_of_torchs(shape: tuple[int, int], kind: str) -> None:
    """About one and a half times torch's; less where singular values are small. More steps make both err more."""
    rows, columns = shape
    grad, options = torch.randn(shape), {"lr": 1.0, "ns_steps": 12 if kind == "12 steps" else 5}
    if kind == "decaying":
        grad = torch.randn(rows, rows) * torch.logspace(0, -3, rows) @ grad
    if kind == "of low rank":
        grad = torch.randn(rows, 8) @ torch.randn(8, columns) + 1e-3 * grad
    truth, errors = oracle.muon(torch.zeros(shape).double(), grad.double(), {}, **options), []
    for optimizer_class in (af.Muon, torch.optim.Muon):
        param = torch.zeros(shape).requires_grad_()
        param.grad = grad.clone()
        optimizer_class([param], **options).step()
        errors.append((param.detach() - truth).norm() / truth.norm())
    assert errors[0] <= errors[1] * {"gaussian": 1.6, "12 steps": 1.8}.get(kind, 1.0)


def test_one_norm_clips_matrices_and_others_over_windows_with_a_schedule_and_a_scaler(backend: str) -> None:
    ours, theirs = both(max_grad_norm=0.5, backend=backend), peers()
    params, peer_params = params_of(ours), [p for optimizer in theirs for p in params_of(optimizer)]
    schedules = [lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (ours, *theirs)]
    scaler = af.GradScaler("cpu", init_scale=64.0)
    for seed in range(3):
        micro = [random_grads(params, 2 * seed + i) for i in range(2)]
        for grads, weight, last in zip(micro, (1, 3), (False, True), strict=True):
            set_grads(params, [64.0 * grad for grad in grads])
            ours.accumulate(weight, last=last)
        set_grads(peer_params, [(a + 3 * b) / 4 for a, b in zip(*micro, strict=True)])
        norm = torch.nn.utils.clip_grad_norm_(peer_params, 0.5)
        scaler.scale(norm)  # as a loss: it makes the scale
        scaler.step(ours)
        scaler.update()
        assert ours.grad_norm is not None
        assert_close(ours.grad_norm, norm, "norm")
        for optimizer in theirs:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    for param, peer in zip(params[:4], peer_params[:4], strict=True):
        assert_near(param, peer)
        assert_close(ours.state[param]["momentum_buffer"], theirs[0].state[peer]["momentum_buffer"], "torch.optim")
    for param, peer in zip(params[4:], peer_params[4:], strict=True):
        assert_close(param, peer, "torch.optim")
        assert ours.state[param].keys() == theirs[1].state[peer].keys()


@pytest.mark.parametrize("reason", ["a gradient of a matrix", "a gradient of AdamW's", "found_inf"])
def test_a_skip_leaves_all_parameters_and_states(backend: str, reason: str) -> None:
    optimizer = both(max_grad_norm=1.0, backend=backend)
    params = params_of(optimizer)
    for seed in range(2):
        kept = everything(optimizer)
        set_grads(params, random_grads(params, seed))
        if seed:
            if reason == "found_inf":
                optimizer.found_inf = torch.ones(())
            else:
                params[0 if "matrix" in reason else 4].grad.view(-1)[0] = torch.inf  # type: ignore[union-attr]
        optimizer.step()
    assert optimizer.step_was_skipped
    assert_all_same_bits(everything(optimizer), kept)


def test_checkpoints_are_torchs_both_ways_and_copies_go_on(backend: str) -> None:
    ours, theirs = af.Muon(weights(SHAPES), **MUON, backend=backend), torch.optim.Muon(weights(SHAPES), **MUON)
    for seed in range(2):
        for optimizer in (ours, theirs):
            set_grads(params_of(optimizer), random_grads(params_of(optimizer), seed))
            optimizer.step()
    assert ours.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]
    other = af.Muon(weights(SHAPES), lr=9.0, backend=backend)
    other.load_state_dict(copy.deepcopy(theirs.state_dict()))
    fresh = torch.optim.Muon(weights(SHAPES), lr=9.0)
    fresh.load_state_dict(copy.deepcopy(ours.state_dict()))
    twin = copy.deepcopy(ours)
    for param, *same in zip(params_of(ours), *map(params_of, (twin, theirs, other, fresh)), strict=True):
        for own in same:
            own.data.copy_(param)
    for optimizer in (ours, twin, theirs, other, fresh):
        set_grads(params_of(optimizer), random_grads(params_of(optimizer), 5))
        optimizer.step()
    assert_all_same_bits(everything(twin), everything(ours))
    for param, *same in zip(params_of(ours), *map(params_of, (theirs, other, fresh)), strict=True):
        for own in same:
            assert_near(own, param)


def test_fuse_converts_torchs(backend: str) -> None:
    ours, theirs = torch.optim.Muon(weights(SHAPES), **MUON), torch.optim.Muon(weights(SHAPES), **MUON)
    assert type(af.fuse(ours, backend=backend)) is af.Muon
    for optimizer in (ours, theirs):
        set_grads(params_of(optimizer), random_grads(params_of(optimizer), 0))
        optimizer.step()
    for param, peer in zip(params_of(ours), params_of(theirs), strict=True):
        assert_near(param, peer)


def test_groups_of_adamws_have_its_defaults_and_options(backend: str) -> None:
    params = weights([(4, 4), (3,), (2,)])
    optimizer = af.Muon([{"params": params[:1]}, {"params": params[1:2], "use_muon": False}], backend=backend)
    optimizer.add_param_group({"params": params[2], "use_muon": False, "amsgrad": True, "lr": 0.5})
    defaults = torch.optim.AdamW(weights([(3,)])).defaults
    assert defaults.items() <= optimizer.param_groups[1].items()
    assert (defaults | {"amsgrad": True, "lr": 0.5}).items() <= optimizer.param_groups[2].items()
    set_grads(params, random_grads(params, 0))
    optimizer.step()
    assert [*optimizer.state[params[2]]] == ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]


def test_layouts_stacks_and_missing_gradients_do_not_matter(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = weights([(40, 24), (40, 24), (40, 24)])

    def stepped(params: list[Tensor]) -> list[Tensor]:
        optimizer = af.Muon([p.requires_grad_() for p in params], **MUON, backend=backend)
        for seed, left_out in itertools.product(range(2), (None, 1)):
            grads: list[Tensor | None] = [*random_grads(params, seed)]
            if left_out is not None:
                grads[left_out] = None
            set_grads(params, grads)
            optimizer.step()
        return params

    plain = stepped([p.detach().clone() for p in start])
    assert not torch.equal(plain[0], plain[1])
    holes = torch.zeros(80, 24)[::2].copy_(start[2].detach())
    laid_out = stepped([start[0].detach().clone(), start[1].detach().mT.contiguous().mT, holes])
    monkeypatch.setattr(muon, "STACK", 1)
    alone = stepped([p.detach().clone() for p in start])
    for first, *others in zip(plain, laid_out, alone, strict=True):
        for other in others:
            assert_near(other, first)


def test_what_is_no_whole_matrix_is_refused(backend: str) -> None:
    with pytest.raises(ValueError, match=r"only supports 2D .* size: torch.Size\(\[3\]\); .* use_muon=False"):
        af.Muon(weights([(2, 2), (3,)]), backend=backend)
    optimizer = af.Muon(weights([(2, 2)]), backend=backend)
    kept = len(optimizer.param_groups)
    with pytest.raises(ValueError, match="only supports 2D"):
        optimizer.add_param_group({"params": weights([(3, 2, 1)])})
    assert len(optimizer.param_groups) == kept
    late = both(backend=backend)
    set_grads(params_of(late), random_grads(params_of(late), 0))
    late.param_groups[1]["use_muon"] = True
    before = everything(late)
    with pytest.raises(ValueError, match="only supports 2D"):
        late.step()
    assert_all_same_bits({name: value for name, value in everything(late).items() if name in before}, before)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"ns_steps": 100}, "less than 100"), ({"ns_coefficients": (1.0, 2.0)}, "exactly 3 values")], ids=str,
)  # fmt: skip
def test_an_iteration_that_torch_refuses_is_refused(backend: str, options: dict[str, Any], text: str) -> None:
    optimizer = af.Muon(weights([(2, 2)]), **options, backend=backend)
    set_grads(params_of(optimizer), random_grads(params_of(optimizer), 0))
    with pytest.raises(ValueError, match=text):
        optimizer.step()


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"momentum": -1.0}, {"weight_decay": -1.0}, {"adjust_lr_fn": "x"}])
def test_options_that_torch_refuses_are_refused_with_its_text(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as theirs:  # noqa: PT011
        torch.optim.Muon(weights([(2, 2)]), **options)
    with pytest.raises(ValueError) as ours:  # noqa: PT011
        af.Muon(weights([(2, 2)]), **options)
    assert str(ours.value) == str(theirs.value)


def test_a_spread_matrix_is_refused_and_a_whole_one_is_not(backend: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole, spread = (
            torch.nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [placement]))
            for placement in (Replicate(), ByRows(0))
        )
        with pytest.raises(
            ValueError, match=r"whole matrices, .* \[4, 4\] is a DTensor, .*; leave it out of fully_shard"
        ):
            af.Muon([whole, spread])
        groups = [{"params": [whole]}, {"params": [spread], "use_muon": False}]
        optimizer = af.Muon(groups, backend=backend)
        for param in (whole, spread):
            param.grad = torch.ones_like(param)
        before = whole.full_tensor().clone()
        optimizer.step()
        assert not torch.equal(before, whole.full_tensor())
    finally:
        dist.destroy_process_group()


def test_a_checkpoint_with_other_kinds_of_groups_is_refused(backend: str) -> None:
    mixed, all_muon = (
        af.Muon(
            [{"params": weights(SHAPES[:1])}, {"params": weights(SHAPES[1:2]), "use_muon": is_muon}], backend=backend
        )
        for is_muon in (False, True)
    )
    for ours, other in ((mixed, all_muon), (all_muon, mixed)):
        with pytest.raises(ValueError, match="group 1 is Muon's in one of checkpoint and optimizer"):
            ours.load_state_dict(other.state_dict())
