"""Settings, and parameters, that nothing can be made of: refused wherever they are given."""

from __future__ import annotations

import dataclasses
import mmap
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot import Errors, refused, trained
from table import OPTIMIZERS
from torch import Tensor
from torch.nn import Parameter

import accumfused as af
from accumfused.settings import Settings

OURS = [optimizer.ours for optimizer in OPTIMIZERS.values()]
FORMATS = r"torch\.float32, torch\.float16, torch\.bfloat16"
R, V, T = RuntimeError, ValueError, TypeError

# fmt: off
SETTINGS: list[tuple[dict[str, Any], Errors, str]] = [
    ({"backend": "gpu"}, V, "backend must be one of auto, cuda, triton, cpu, foreach, torch, got 'gpu'"),
    ({"backend": None}, V, "backend must be one of auto, .*, got None"),
    ({"nonfinite": "ignore"}, V, "nonfinite must be one of skip, propagate, raise or None, got 'ignore'"),
    ({"max_grad_norm": 0}, V, r"max_grad_norm must be > 0, got 0; None is off \(elsewhere 0 often is\)"),
    ({"max_grad_norm": -1.0}, V, "max_grad_norm must be > 0, got -1.0"),
    ({"max_grad_norm": nan}, V, "max_grad_norm must be > 0, got nan"),
    ({"max_grad_norm": "1.0"}, T, "max_grad_norm must be a number, got '1.0'"),
    ({"max_grad_nrom": 1.0}, T, "unexpected keyword argument 'max_grad_nrom'; did you mean 'max_grad_norm'"),
    ({"master_weights": "bf16"}, V, "master_weights must be one of auto, fp32, split16, split8 or None, got 'bf16'"),
    ({"master_weights": torch.float32}, V, r"master_weights must be one of .*torch\.float32"),
    ({"rounding": "nearest"}, T, "unexpected keyword argument 'rounding'; leave it out: .* always rounded stochastic"),
    ({"state_dtype": torch.float16}, V, r"one of torch\.float32, torch\.bfloat16, 'int8', got torch\.float16"),
    ({"state_dtype": torch.int8}, V, r"state_dtype must be one of .* 'int8', got torch\.int8"),
    ({"state_dtype": ["int8"]}, V, r"state_dtype must be one of .*, got \['int8'\]"),
    ({"state_dtype_min_numel": -1}, V, r"state_dtype_min_numel must be >= 0 .*got -1"),
    ({"state_dtype_min_numel": 0.5}, T, "state_dtype_min_numel must be a whole number, got float"),
    ({"state_dtype_min_numel": None}, T, "state_dtype_min_numel must be a whole number, got NoneType"),
    ({"rounding_seed": 2**63}, V, r"rounding_seed must be >= 0 and below 2\^63"),
    ({"rounding_seed": True}, T, "rounding_seed must be a whole number, got bool"),
    ({"differentiable": True}, (V, T), "differentiable=True is not supported|unexpected .* 'differentiable'"),
    ({"reduce_dtype": torch.float16}, V, r"reduce_dtype must be torch\.float32, .* got torch\.float16"),
    ({"reduce_dtype": torch.float32}, V, "reduce_dtype is for gradients that .*; give one"),
    *[
        ({"backend": name}, R, f"backend='{name}' cannot run: .*; use backend='auto' or 'torch'")
        for name in ("cuda", "triton") if not torch.cuda.is_available()
    ],
]
# fmt: on


@pytest.mark.parametrize(("settings", "error", "text"), SETTINGS, ids=lambda value: str(value)[:40])
def test_a_wrong_setting_is_refused_wherever_it_is_given(settings: dict[str, Any], error: Errors, text: str) -> None:
    param = Parameter(torch.ones(4, dtype=torch.bfloat16))
    for ours in OURS:
        with pytest.raises(error, match=text):
            ours([param], lr=0.1, **settings)
    for stock in (torch.optim.AdamW([param]), torch.optim.RMSprop([param])):
        kind = type(stock)
        with pytest.raises(error, match=text):
            af.fuse(stock, **settings)
        assert type(stock) is kind


def test_an_option_of_one_group_is_refused() -> None:
    optimizer = af.AdamW([Parameter(torch.ones(4))])
    rows = [
        (setting.name, setting.default, f"{setting.name} is one for all") for setting in dataclasses.fields(Settings)
    ]
    for name, value, text in [*rows, ("differentiable", True, "differentiable=True is not supported")]:
        group = {"params": [Parameter(torch.ones(4))], name: value}
        with refused(optimizer, ValueError, text):
            optimizer.add_param_group(group)
        with pytest.raises(ValueError, match=text):
            af.AdamW([group])
    assert len(optimizer.param_groups) == 1
    stock = torch.optim.AdamW([Parameter(torch.ones(4))], differentiable=True)
    with pytest.raises(ValueError, match="differentiable=True is not supported"):
        af.fuse(stock)
    assert type(stock) is torch.optim.AdamW


def test_a_maximum_is_not_kept_in_8_bits() -> None:
    text = "amsgrad=True, whose maximum .*; use state_dtype=torch.float32 or torch.bfloat16, or amsgrad=False"
    group = {"params": [Parameter(torch.ones(4))], "amsgrad": True}
    for ours in (af.Adam, af.AdamW):
        with pytest.raises(ValueError, match=text):
            ours(group["params"], amsgrad=True, state_dtype="int8")
        with pytest.raises(ValueError, match=text):
            ours([group], state_dtype="int8")
    optimizer = trained([Parameter(torch.ones(4))], "auto", state_dtype="int8")
    with refused(optimizer, ValueError, text):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    stock = torch.optim.AdamW([group])
    with pytest.raises(ValueError, match=text):
        af.fuse(stock, state_dtype="int8")
    assert type(stock) is torch.optim.AdamW
    af.fuse(stock, state_dtype=torch.bfloat16)


@pytest.mark.parametrize("settings", [
    {"master_weights": "fp32"}, {"master_weights": "split16"}, {"state_dtype": "int8"},
], ids=str)  # fmt: skip
def test_an_optimizer_with_its_own_step_keeps_its_own_formats(settings: dict[str, Any]) -> None:
    stock = torch.optim.RMSprop([Parameter(torch.ones(4, dtype=torch.bfloat16))])
    with pytest.raises(
        ValueError, match=f"RMSprop keeps its own step, parameters and states, so {next(iter(settings))}="
    ):
        af.fuse(stock, **settings)
    assert type(stock) is torch.optim.RMSprop
    af.fuse(stock, master_weights=None)


# ---- parameters ------------------------------------------------------------------------------------------------------


def freed() -> Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


NOT_SPLIT = r"torch\.float16, which master_weights='split{}' does not serve.*use master_weights='fp32'"
# fmt: off
PARAMETERS: dict[str, tuple[Callable[[], Tensor], Errors, str]] = {
    "float64": (lambda: torch.ones(4).double(), T, rf"a parameter is torch\.float64; supported are {FORMATS}"),
    "float8": (lambda: torch.ones(4).to(torch.float8_e4m3fn), T, rf"float8_e4m3fn; supported are {FORMATS}"),
    "complex": (lambda: torch.ones(4) * 1j, R, r"optimize torch\.view_as_real"),
    "negated": (lambda: (torch.ones(4) * 1j).conj().imag, R, r"lazily negated, .* use param\.resolve_neg\(\)"),
    "expanded": (lambda: torch.ones(1, 3).expand(4, 3), R, r"overlaps itself .*clone\(\) it first"),
    "overlapping": (lambda: torch.ones(6).as_strided((3, 3), (1, 1)), R, r"strides \[1, 1\] overlaps itself"),
    "freed": (freed, R, "no memory to update .*; materialize it first"),
    "split16": (lambda: torch.ones(4).half(), V, NOT_SPLIT.format(16)),
    "split8": (lambda: torch.ones(4).half(), V, NOT_SPLIT.format(8)),
}
# fmt: on


@pytest.mark.parametrize("kind", PARAMETERS)
def test_a_parameter_that_cannot_be_updated_is_refused_at_once(kind: str) -> None:
    make, error, remedy = PARAMETERS[kind]
    settings: Any = {"master_weights": kind} if "split" in kind else {}
    good, bad = Parameter(torch.ones(4)), Parameter(make())
    for ours in OURS:
        for params in ([good, bad], [("good", good), ("bad", bad)], [{"params": [good]}, {"params": bad}]):
            with pytest.raises(error, match=remedy):
                ours(params, **settings)
        with pytest.raises(ValueError, match="the same parameter twice; remove one of them"):
            ours([good, good], **settings)
    optimizer, stock = af.AdamW([good], **settings), torch.optim.AdamW([good, bad])
    with refused(optimizer, error, remedy):
        optimizer.add_param_group({"params": [bad]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(error, match=remedy):
        af.fuse(stock, **settings)
    assert type(stock) is torch.optim.AdamW


@pytest.mark.parametrize("make", [
    *(make for make, *_ in PARAMETERS.values()),
    lambda: torch.ones(4, device="meta"), lambda: torch.ones(4, dtype=torch.int32),
])  # fmt: skip
def test_a_frozen_parameter_may_be_anything(backend: str, make: Callable[[], Tensor]) -> None:
    frozen, param = Parameter(make(), requires_grad=False), Parameter(torch.full((4,), 8.0))
    optimizer = af.SGD([frozen, param], lr=0.5, max_grad_norm=1.0, backend=backend)
    param.grad = torch.full((4,), 2.0)
    optimizer.accumulate()
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((4,), 7.75), rtol=1e-6, atol=0)  # clipping adds 1e-6 to 4


# ---- their memory ----------------------------------------------------------------------------------------------------

PAIRS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "the same memory": lambda square: (square[:], square[:]),
    "a common part": lambda square: (square.view(-1)[:5], square.view(-1)[3:]),
    "one within the other": lambda square: (square, square.view(-1)[3:5]),
    "columns and a row": lambda square: (square[:, ::2], square[0]),
    "two pieces with holes": lambda square: (square[:, :3], square[:, 2:]),
    "neighbours": lambda square: (square.view(-1)[:5], square.view(-1)[5:]),
    "columns between columns": lambda square: (square[:, ::2], square[:, 1::2]),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_two_parameters_that_share_memory_are_refused(backend: str, pair: str) -> None:
    params = [Parameter(view) for view in PAIRS[pair](torch.full((4, 4), 8.0))]
    optimizer = af.SGD([{"params": [param]} for param in params], lr=0.5, backend=backend)
    for param in params:
        param.grad = torch.ones(param.shape)
    if pair in ("neighbours", "columns between columns"):
        optimizer.step()
        assert all(param.unique().tolist() == [7.5] for param in params)
        return
    for verb in (optimizer.step, optimizer.accumulate, lambda: optimizer.accumulate(last=True)):
        with refused(optimizer, RuntimeError, "share memory.*assigning one Parameter object to both places"):
            verb()


def test_a_storage_that_has_become_too_small_is_refused(backend: str) -> None:
    param: Any = Parameter(torch.ones(4, 3))
    param.grad = torch.ones(4, 3)
    optimizer = af.SGD([param], lr=0.5, backend=backend)
    param.untyped_storage().resize_(44)
    with pytest.raises(RuntimeError, match="a storage of 44 bytes, which is too small"):
        optimizer.step()
    param.untyped_storage().resize_(48)
    param.grad.untyped_storage().resize_(44)
    with pytest.raises(RuntimeError, match=r"a gradient of shape \[4, 3\] lies in a storage of 44"):
        optimizer.accumulate()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped read-only")
def test_memory_that_is_mapped_read_only_is_refused_and_a_private_mapping_works(backend: str, tmp_path: Path) -> None:
    if torch.get_default_device().type != "cpu":
        pytest.skip("files are mapped into the CPU's memory")
    torch.save(torch.full((4096,), 8.0), tmp_path / "weights")
    with (tmp_path / "weights").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # as long as a tensor lies in it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the memory is not writable
        read_only = Parameter(torch.frombuffer(mapped, dtype=torch.uint8)[:4096].view(torch.float32))
    private = Parameter(torch.load(tmp_path / "weights", mmap=True))
    for param in (read_only, private):
        param.grad = torch.ones_like(param)
        optimizer = af.SGD([param], lr=0.5, backend=backend)
        with refused(optimizer, R, r"mapped read-only .* clone\(\) it first") if param is read_only else nullcontext():
            optimizer.step()
    assert private.unique().tolist() == [7.5]
