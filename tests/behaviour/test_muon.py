"""Muon: matrices, and AdamW's parameters beside them. Numbers: numbers/test_muon_numbers.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import assert_all_same_bits, everything, params_of
from models import MATRICES, MUON, assert_near, both, matrices
from table import random_grads, set_grads
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.distributed.tensor import Shard as ByRows

import accumfused as af
from accumfused.optimizers import newton_schulz


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


def test_torchs_is_converted_checkpoints_go_both_ways_and_copies_go_on(backend: str) -> None:
    ours, theirs = (torch.optim.Muon(matrices(MATRICES), **MUON) for _ in range(2))
    ours = af.fuse(ours, backend=backend)
    assert type(ours) is af.Muon
    for seed in range(2):
        for optimizer in (ours, theirs):
            set_grads(params_of(optimizer), random_grads(params_of(optimizer), seed))
            optimizer.step()
    assert ours.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]
    other = af.Muon(matrices(MATRICES), lr=9.0, backend=backend)
    other.load_state_dict(copy.deepcopy(theirs.state_dict()))
    fresh = torch.optim.Muon(matrices(MATRICES), lr=9.0)
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


def test_groups_of_adamws_have_its_defaults_and_options(backend: str) -> None:
    params = matrices([(4, 4), (3,), (2,)])
    optimizer = af.Muon([{"params": params[:1]}, {"params": params[1:2], "use_muon": False}], backend=backend)
    optimizer.add_param_group({"params": params[2], "use_muon": False, "amsgrad": True, "lr": 0.5})
    defaults = torch.optim.AdamW(matrices([(3,)])).defaults
    assert defaults.items() <= optimizer.param_groups[1].items()
    assert (defaults | {"amsgrad": True, "lr": 0.5}).items() <= optimizer.param_groups[2].items()
    set_grads(params, random_grads(params, 0))
    optimizer.step()
    assert [*optimizer.state[params[2]]] == ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]


def test_what_is_no_whole_matrix_is_refused(backend: str) -> None:
    with pytest.raises(ValueError, match=r"only supports 2D .* size: torch.Size\(\[3\]\); .* use_muon=False"):
        af.Muon(matrices([(2, 2), (3,)]), backend=backend)
    optimizer = af.Muon(matrices([(2, 2)]), backend=backend)
    kept = len(optimizer.param_groups)
    with pytest.raises(ValueError, match="only supports 2D"):
        optimizer.add_param_group({"params": matrices([(3, 2, 1)])})
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
    optimizer = af.Muon(matrices([(2, 2)]), **options, backend=backend)
    set_grads(params_of(optimizer), random_grads(params_of(optimizer), 0))
    with pytest.raises(ValueError, match=text):
        optimizer.step()


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"momentum": -1.0}, {"weight_decay": -1.0}, {"adjust_lr_fn": "x"}])
def test_options_that_torch_refuses_are_refused_with_its_text(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as theirs:  # noqa: PT011
        torch.optim.Muon(matrices([(2, 2)]), **options)
    with pytest.raises(ValueError) as ours:  # noqa: PT011
        af.Muon(matrices([(2, 2)]), **options)
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


@pytest.mark.parametrize("shape", [(2, 40, 60), (2, 300, 700), (1, 300, 300)])
def test_a_cpu_without_products_of_bf16_numbers_computes_in_fp32(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nothing is rounded to bf16 but the result, by 2^-9 at most."""
    monkeypatch.setattr(newton_schulz, "_multiplies_bf16", lambda: False)
    matrices = torch.randn(shape)
    found = newton_schulz.orthogonalized(matrices, 5, (3.4445, -4.7750, 2.0315), 1e-7)
    assert found.dtype == torch.bfloat16
    monkeypatch.setattr(newton_schulz, "_multiplies_bf16", lambda: True)
    rounded = newton_schulz.orthogonalized(matrices, 5, (3.4445, -4.7750, 2.0315), 1e-7)
    for matrix, x, other in zip(matrices.double(), found.double(), rounded.double(), strict=True):
        truth = matrix / matrix.norm()
        for _ in range(5):
            gram = truth @ truth.mT
            truth = 3.4445 * truth + (-4.7750 * gram + 2.0315 * gram @ gram) @ truth
        assert (x - truth).norm() <= 2.0**-9 * truth.norm() < (other - truth).norm()
