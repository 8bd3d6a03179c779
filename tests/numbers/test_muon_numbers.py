"""Muon, orthogonalized in bf16 between two rules: against its formula in float64 and against torch's."""

from __future__ import annotations

import itertools
from typing import Any

import oracle
import pytest
import torch
from compare import assert_close, params_of
from models import ADAMW, MATRICES, MUON, OTHERS, assert_near, both, matrices
from table import random_grads, set_grads
from torch import Tensor
from torch.optim import lr_scheduler

import accumfused as af
from accumfused.optimizers import muon


def peers() -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return torch.optim.Muon(matrices(MATRICES[:4]), **MUON), torch.optim.AdamW(matrices(OTHERS), foreach=False, **ADAMW)


@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": False, "momentum": 0.6}, {"ns_steps": 2}, {"adjust_lr_fn": "match_rms_adamw", "eps": 1e-2}],
    ids=str,
)
def test_numbers_are_the_formulas_and_torchs_within_the_rounding_of_bf16(backend: str, options: dict[str, Any]) -> None:
    # An option changes nothing of how large ones are cut into panels, which take most of the time.
    shapes = [shape for shape in MATRICES if not options or max(shape) < 300]
    ours = af.Muon(matrices(shapes), **MUON, **options, backend=backend)
    theirs = torch.optim.Muon(matrices(shapes), **MUON, **options)
    truth = oracle.Oracle(oracle.muon, {**MUON, **options}, matrices(shapes))
    for seed in range(3 if options else 2):
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


SHAPES = ((128, 128), (128, 500), (300, 1000), (700, 260))
KINDS = ("gaussian", "decaying", "of low rank", "12 steps")


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        pytest.param(shape, kind, marks=pytest.mark.full if (row + column) % 2 else [])  # two of each meet
        for row, shape in enumerate(SHAPES)
        for column, kind in enumerate(KINDS)
    ],
)
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


def test_layouts_stacks_and_missing_gradients_do_not_matter(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = matrices([(40, 24), (40, 24), (40, 24)])

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
    assert all((param - old).norm() > 0.5 * old.norm() for param, old in zip(plain, start, strict=True))
    holes = torch.zeros(80, 24)[::2].copy_(start[2].detach())
    laid_out = stepped([start[0].detach().clone(), start[1].detach().mT.contiguous().mT, holes])
    monkeypatch.setattr(muon, "STACK", 1)
    alone = stepped([p.detach().clone() for p in start])
    for first, *others in zip(plain, laid_out, alone, strict=True):
        for other in others:
            assert_near(other, first)
