"""Settings, parameters and gradients that nothing can be made of: refused wherever they are, before a write."""

from __future__ import annotations

import copy
import dataclasses
import mmap
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from math import nan
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from compare import Errors, refused, stepped
from table import OPTIMIZERS, Own
from torch import Tensor
from torch.nn import Parameter
from torch.testing._internal.two_tensor import TwoTensor

import accumfused as af
from accumfused.clip import LIMIT
from accumfused.core.rows import check_gradient
from accumfused.settings import Settings

OURS = [optimizer.ours for optimizer in OPTIMIZERS.values()]
FORMATS = r"torch\.float32, torch\.float16, torch\.bfloat16"
CLONED = r"put Parameter\(param\.detach\(\)\.clone\(\)\) in its place"
R, V, T = RuntimeError, ValueError, TypeError

# fmt: off
SETTINGS: list[tuple[dict[str, Any], Errors, str]] = [
    ({"backend": "gpu"}, V, "backend must be one of auto, cuda, triton, cpu, torch.*, got 'gpu'"),
    ({"nonfinite": "ignore"}, V, "nonfinite must be one of skip, drop, propagate, raise or None, got 'ignore'"),
    ({"max_grad_norm": 0}, V, r"max_grad_norm must be > 0, got 0; None is off \(elsewhere 0 often is\)"),
    ({"max_grad_norm": nan}, V, "max_grad_norm must be > 0, got nan"),
    ({"max_grad_norm": True}, T, "max_grad_norm must be a number, got True"),
    ({"max_grad_norm": "1.0"}, T, "max_grad_norm must be a number, got '1.0'"),
    ({"master_weights": "bf16"}, V, "master_weights must be one of auto, fp32, split16, split8 or None, got 'bf16'"),
    ({"master_weights": torch.float32}, V, r"master_weights must be one of .*torch\.float32"),
    ({"state_dtype": torch.float16}, V, r"one of torch\.float32, torch\.bfloat16, '8bit', got torch\.float16"),
    ({"state_dtype": ["8bit"]}, V, r"state_dtype must be one of .*, got \['8bit'\]"),
    ({"state_dtype_min_numel": -1}, V, r"state_dtype_min_numel must be >= 0 .*got -1"),
    ({"state_dtype_min_numel": 0.5}, T, "state_dtype_min_numel must be a whole number, got float"),
    ({"rounding_seed": 2**63}, V, r"rounding_seed must be >= 0 and below 2\^63"),
    ({"rounding_seed": True}, T, "rounding_seed must be a whole number, got bool"),
    ({"norm_group": 1}, T, r"norm_group must be a torch\.distributed\.ProcessGroup"),
    ({"norm_group": 1, "nonfinite": "drop"}, V, "decides in each process alone, and norm_group= has one norm"),
    ({"norm_group": 1, "noise_scale": True}, V, "noise_scale= measures the parameters of one process"),
    ({"differentiable": True}, (V, T), "differentiable=True is not supported|unexpected .* 'differentiable'"),
    *[({"metrics": bad}, V, f"metrics must be True, False, or every how many .*, got {bad}") for bad in (-1, 0.5)],
    *[({"noise_scale": bad}, V, f"or a decay > 0 and < 1, got {bad!r}") for bad in (1.5, "yes")],
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
    for stock in (torch.optim.AdamW([param]), Own([param])):
        kind = type(stock)
        with pytest.raises(error, match=text):
            af.fuse(stock, **settings)
        assert type(stock) is kind


@pytest.mark.parametrize("make", [af.AdamW, lambda params: af.fuse(Own(params))], ids=["a class", "fused"])
def test_a_setting_that_would_do_nothing_is_refused_as_an_attribute(make: Callable[[list[Tensor]], Any]) -> None:
    optimizer = make([Parameter(torch.ones(4))])
    for setting in {setting.name for setting in dataclasses.fields(Settings)} - {"max_grad_norm"}:
        with pytest.raises(AttributeError, match=f"{setting} is fixed when the optimizer is made"):
            setattr(optimizer, setting, None)
    for name in ("max_norm", "clip_grad_norm", "max_gradient_norm"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; did you mean 'max_grad_norm'"):
            setattr(optimizer, name, 3.0)
    for name in ("grad_scale", "found_inf", "step", "zero_grad", "state_dict", "_process_group", "lr", "scheduler"):
        setattr(optimizer, name, None)  # torch, frameworks and users do


@pytest.mark.parametrize("make", [af.AdamW, lambda params, **settings: af.fuse(Own(params), **settings)])
def test_all_settings_may_be_read_as_they_are_now_and_not_be_written(make: Callable[..., Any]) -> None:
    optimizer = make([Parameter(torch.ones(4))], rounding_seed=3)
    settings = optimizer.settings
    optimizer.max_grad_norm = 2.0
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    assert settings == optimizer.settings == defaults | {"rounding_seed": 3, "max_grad_norm": 2.0}
    with pytest.raises(TypeError):
        settings["clip"] = None
    with pytest.raises(AttributeError):
        optimizer.settings = {}


MAXIMUM = "amsgrad=True, whose maximum .*; use state_dtype=torch.float32 or torch.bfloat16, or amsgrad=False"
# fmt: off
OPTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "two betas": (af.Adan, {"betas": (0.9, 0.9)}, "betas must be 3 numbers, got 2"),
    "a third beta of 1": (af.AdEMAMix, {"betas": (0.9, 0.9, 1.0)}, "Invalid beta parameter at index 2: 1.0"),
    "alpha": (af.AdEMAMix, {"alpha": -1.0}, "Invalid alpha value: -1.0"),
    "a warmup of beta3": (af.AdEMAMix, {"beta3_warmup": -1}, "Invalid beta3_warmup value: -1"),
    "momentum of 1": (af.Signum, {"momentum": 1.0}, "Invalid momentum value: 1.0"),
    "amsgrad": (af.AdamW, {"amsgrad": True, "cautious": True}, "amsgrad=True has no cautious form"),
    "L2": (af.Adam, {"cautious_weight_decay": True}, "needs decoupled_weight_decay=True"),
    "lr": (af.SGDScheduleFree, {"lr": -1.0}, "Invalid learning rate: -1.0"),
    "momentum of 0": (af.SGDScheduleFree, {"momentum": 0.0}, "Invalid momentum value: 0.0"),
    "warmup": (af.SGDScheduleFree, {"warmup_steps": -1}, "Invalid warmup_steps value: -1"),
    "beta": (af.AdamWScheduleFree, {"betas": (0.0, 0.9)}, "parameter at index 0: 0.0"),
    "inner": (af.AdamWScheduleFree, {"inner_momentum": 1.0}, "inner_momentum value: 1.0"),
    "r": (af.AdamWScheduleFree, {"r": -1.0}, "Invalid r value: -1.0"),
    "8bit": (af.SGDScheduleFree, {"state_dtype": "8bit"}, "z is a copy of the weights"),
    "adamax": (af.Adamax, {"state_dtype": "8bit"}, r"go with adamax, whose maximum .*; use .* or torch\.bfloat16$"),
    "amsgrad of Adam": (af.Adam, {"amsgrad": True, "state_dtype": "8bit"}, MAXIMUM),
    "amsgrad of AdamW": (af.AdamW, {"amsgrad": True, "state_dtype": "8bit"}, MAXIMUM),
}
# fmt: on


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_one_optimizer_is_refused(name: str) -> None:
    make, options, text = OPTIONS[name]
    with pytest.raises(ValueError, match=text):
        make([Parameter(torch.ones(3))], **options)


def test_an_option_of_one_group_is_refused() -> None:
    optimizer = af.AdamW([Parameter(torch.ones(4))])
    own = {setting.name: setting.default for setting in dataclasses.fields(Settings) if setting.name != LIMIT}
    for name, value in {**own, "differentiable": True}.items():
        group = {"params": [Parameter(torch.ones(4))], name: value}
        text = f"group [01] has '{name}', which is one for all groups|differentiable=True is not supported"
        with refused(optimizer, ValueError, text):
            optimizer.add_param_group(group)
        group["params"] = [Parameter(torch.ones(4, 4))]
        for make in (af.AdamW, af.Muon, lambda groups: af.fuse(torch.optim.AdamW(groups))):
            with pytest.raises(ValueError, match=text):
                make([group])
        checkpoint = optimizer.state_dict()
        checkpoint["param_groups"][0][name] = value
        with refused(optimizer, ValueError, text):
            optimizer.load_state_dict(checkpoint)
    assert len(optimizer.param_groups) == 1


TAKES_OURS: list[Callable[[Any], Any]] = [
    af.NoiseScale, af.release_gradients, af.memory_report, lambda given: af.ClipGroup([given, given], 1.0),
    lambda given: af.fuse_linears(torch.nn.Linear(2, 2), given),
    lambda given: af.FusedLinears(torch.nn.Linear(2, 2), given),
]  # fmt: skip


@pytest.mark.parametrize("takes", TAKES_OURS)
def test_what_is_no_optimizer_of_ours_is_named_with_the_remedy(takes: Callable[[Any], Any]) -> None:
    param = Parameter(torch.ones(2))
    wrapper = mock.Mock(optimizer=af.AdamW([param]))
    wrong = (
        (torch.optim.SGD([param]), "SGD; convert it with"),
        (None, "NoneType"),
        (torch.nn.Linear(2, 2), "Linear; give it the optimizer of this model"),
        (wrapper, r"Mock; .* the \.optimizer"),
    )
    for given, text in wrong:
        with pytest.raises(T, match=f"takes an optimizer of this package, got {text}"):
            takes(given)


def test_other_things_in_the_place_of_a_list_a_matrix_or_a_checkpoint_are_refused_in_words() -> None:
    optimizer = af.AdamW([Parameter(torch.ones(4))])
    with pytest.raises(T, match="ClipGroup takes a list of optimizers, got AdamW; write"):
        af.ClipGroup(optimizer, 1.0)
    with pytest.raises(T, match="can only optimize Tensors"):
        af.Muon(["weight"])
    for given in (None, [1], optimizer):
        with refused(optimizer, T, "takes what state_dict.* returns, got"):
            optimizer.load_state_dict(given)


def test_a_group_that_has_lost_its_learning_rate_is_refused_by_that_name() -> None:
    optimizer = af.AdamW([Parameter(torch.ones(4))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(4)
    optimizer.step()
    del optimizer.param_groups[0]["lr"]
    with pytest.raises(KeyError, match="'lr'"):
        optimizer.step()


@pytest.mark.parametrize("settings", [{"master_weights": "split16"}, {"state_dtype": "8bit"}], ids=str)
def test_an_optimizer_with_its_own_step_keeps_its_own_formats(settings: dict[str, Any]) -> None:
    stock = Own([Parameter(torch.ones(4, dtype=torch.bfloat16))])
    with pytest.raises(ValueError, match=f"keeps its own step, parameters and states, so {next(iter(settings))}="):
        af.fuse(stock, **settings)
    assert type(stock) is Own
    af.fuse(stock, master_weights=None)


def test_a_maximum_that_a_group_asks_for_is_not_kept_in_8_bits(backend: str) -> None:
    group, param = {"params": [Parameter(torch.ones(4))], "amsgrad": True}, Parameter(torch.ones(4))
    for ours in (af.Adam, af.AdamW):
        with pytest.raises(ValueError, match=MAXIMUM):
            ours([group], state_dtype="8bit")
    optimizer = stepped([param], backend, state_dtype="8bit", state_dtype_min_numel=2)
    with refused(optimizer, ValueError, MAXIMUM):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    for verb, loss in (("backward", [param.sum()]), ("step", []), ("accumulate", [])):
        param.grad = None if loss else torch.ones(4)
        optimizer.param_groups[0]["amsgrad"] = True  # after all
        with refused(optimizer, ValueError, MAXIMUM):
            getattr(optimizer, verb)(*loss)
        optimizer.param_groups[0]["amsgrad"] = False
        getattr(optimizer, verb)(*loss)
        optimizer.step()
    stock = torch.optim.AdamW([group])
    with pytest.raises(ValueError, match=MAXIMUM):
        af.fuse(stock, state_dtype="8bit")
    assert type(stock) is torch.optim.AdamW
    af.fuse(stock, state_dtype=torch.bfloat16)


# ---- parameters ------------------------------------------------------------------------------------------------------


def freed() -> Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


NOT_SPLIT = r"torch\.float16, which master_weights='split{}' does not serve.*use master_weights='fp32'"
# fmt: off
PARAMETERS: dict[str, tuple[Callable[[], Tensor], Errors, str]] = {
    "float8": (
        lambda: torch.ones(4).to(torch.float8_e4m3fn), T, rf"float8_e4m3fn; supported are {FORMATS}, torch\.float64"
    ),
    "complex": (lambda: torch.ones(4) * 1j, R, "give them to an optimizer of torch's own, and the others to this"),
    "negated": (lambda: (torch.ones(4) * 1j).conj().imag, R, r"lazily negated, .*\(param\.detach\(\)\.resolve_neg"),
    "expanded": (lambda: torch.ones(1, 3).expand(4, 3), R, rf"overlaps itself .*{CLONED}"),
    "overlapping": (lambda: torch.ones(6).as_strided((3, 3), (1, 1)), R, r"strides \[1, 1\] overlaps itself"),
    "freed": (freed, R, "no memory to update .*; materialize it first"),
    "wrapper": (lambda: TwoTensor(*[torch.ones(4)] * 2), T, "is a TwoTensor, whose memory is that of other tensors"),
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


REMEDIES: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": lambda param: Parameter(param.detach().resolve_neg()),
    "expanded": lambda param: Parameter(param.detach().clone()),
    "overlapping": lambda param: Parameter(param.detach().clone()),
}


@pytest.mark.parametrize("kind", REMEDIES)
def test_the_remedy_that_the_refusal_names_works(backend: str, kind: str) -> None:
    param = REMEDIES[kind](Parameter(PARAMETERS[kind][0]()))
    before = param.detach().clone()
    optimizer = af.SGD([param], lr=0.5, backend=backend)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(param, before - 0.5)


def test_complex_parameters_in_an_optimizer_of_torchs_own_beside_ours(backend: str) -> None:
    param, other = Parameter(torch.ones(2) * 1j), Parameter(torch.full((2,), 8.0))
    optimizers = torch.optim.SGD([param], lr=0.5), af.SGD([other], lr=0.5, backend=backend)
    ((param.abs().square() / 2).sum() + other.sum()).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert (param.tolist(), other.tolist()) == ([0.5j, 0.5j], [7.5, 7.5])


@pytest.mark.parametrize("make", [
    *(make for make, *_ in PARAMETERS.values()),
    *(lambda dtype=dtype: torch.ones(4, dtype=dtype) for dtype in (torch.int32, torch.float64)),
    lambda: torch.ones(4, device="meta"),
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


@pytest.mark.parametrize(
    ("what", "size", "verb", "micro_batches"),
    [
        ("parameter", 44, "step", 0), ("gradient", 44, "accumulate", 0), ("gradient", 0, "step", 0),
        ("gradient", 0, "accumulate", 0), ("gradient", 0, "accumulate", 1), ("gradient", 44, "step", 0),
        ("gradient", 2**18 - 2, "step", 0), ("gradient", 44, "accumulate", 1), ("closed gradient", 44, "step", 1),
        ("exp_avg", 0, "step", 0), ("exp_avg_sq", 64, "step", 0), ("master_remainder", 0, "step", 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("place", ["native", "torch"])
def test_a_storage_that_has_become_too_small_is_refused(
    backend: str, place: str, max_grad_norm: float | None, what: str, size: int, verb: str, micro_batches: int
) -> None:
    backend = "torch" if place == "torch" else backend
    param = Parameter(torch.ones(1024, 128, dtype=torch.bfloat16))
    optimizer = stepped([param], backend, max_grad_norm=max_grad_norm)
    for _ in range(micro_batches):
        param.grad = torch.ones_like(param)
        optimizer.accumulate(last=what == "closed gradient")
    if what != "closed gradient":
        param.grad = torch.ones_like(param)
    known = {"parameter": param, "gradient": param.grad, "closed gradient": param.grad, **optimizer.state[param]}
    known[what].untyped_storage().resize_(size)
    kind = what.removeprefix("closed ") if what in ("parameter", "gradient", "closed gradient") else "state"
    with pytest.raises(RuntimeError, match=rf"a {kind} of shape \[1024, 128\] lies in a storage of {size} bytes"):
        getattr(optimizer, verb)()


def test_a_short_storage_among_states_of_another_format_is_refused_before_they_are_converted(backend: str) -> None:
    param = Parameter(torch.ones(1 << 20))
    saved = stepped([param], backend).state_dict()
    optimizer = af.AdamW([param], lr=0.1, backend=backend, state_dtype=torch.bfloat16)
    optimizer.load_state_dict(saved)
    optimizer.state[param]["exp_avg"].untyped_storage().resize_(64)
    param.grad = torch.ones_like(param)
    with refused(af.SGD([param], lr=0.1), RuntimeError, "a state of shape .* lies in a storage of 64 bytes"):
        optimizer.step()


def test_gradients_that_lie_in_one_storage_are_long_enough(backend: str) -> None:
    """A bucket of gradients, as DistributedDataParallel has them, and gradients that autograd has expanded."""
    size = 1 << 17
    params = [Parameter(torch.zeros(size)) for _ in range(3)]
    optimizer = af.SGD(params, lr=1.0, backend=backend)
    for bucket in (torch.ones(3 * size), torch.ones(3 * size), torch.ones(4 * size)):
        for param, part in zip(params, bucket.split(size), strict=False):
            param.grad = part
        optimizer.step()
    for param in params:
        param.grad = torch.ones(()).expand(size)
    optimizer.step()
    assert all(param.unique().tolist() == [-4.0] for param in params)
    short = torch.ones(3 * size)
    for param, part in zip(params, short.split(size), strict=True):
        param.grad = part
    short.untyped_storage().resize_(12 * size - 4)
    with refused(af.SGD(params[:1], lr=1.0), RuntimeError, "a gradient of shape .* storage of 1572860 bytes"):
        optimizer.step()


def test_a_small_gradient_that_is_too_short_is_refused_in_the_first_call(backend: str) -> None:
    param = Parameter(torch.ones(64))
    param.grad = torch.ones(64)
    param.grad.untyped_storage().resize_(44)
    optimizer = af.SGD([param], lr=1.0, backend=backend)
    for _ in range(2):  # it stays so
        with pytest.raises(RuntimeError, match=r"a gradient of shape \[64\] lies in a storage of 44 bytes"):
            optimizer.step()


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
        with refused(optimizer, R, rf"mapped read-only .*{CLONED}") if param is read_only else nullcontext():
            optimizer.step()
    assert private.unique().tolist() == [7.5]


# ---- gradients, and what parameters become ---------------------------------------------------------------------------


def put(grad: Callable[[], Tensor], data: Callable[[], Tensor] | None = None) -> Callable[[Any], None]:
    def spoil(param: Any) -> None:
        param.grad_dtype, param.grad = None, grad()  # of any dtype
        param.data = param.data if data is None else data()

    return spoil


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
    return lambda: torch.ones(shape, dtype=dtype)


EXPANDED = rf"overlaps itself in memory \(expanded\?\); {CLONED}"
SPARSE = r"use Embedding\(sparse=False\), or .* an optimizer of torch's own"
SPOILED: list[tuple[Callable[[Any], None], Errors, str]] = [
    (put(lambda: torch.ones(4, 3).to_sparse(1)), R, SPARSE),
    (put(ones(4, 3, dtype=torch.complex64)), R, rf"a gradient is torch\.complex64; supported are {FORMATS}"),
    (put(ones(4, 3, dtype=torch.float64)), T, rf"a gradient is torch\.float64; supported are {FORMATS}"),
    (put(ones(4, 3), ones(2, 3)), R, r"a gradient has shape \[4, 3\], its parameter \[2, 3\]"),
    (put(ones(4, 3), ones(4, 3, dtype=torch.float64)), (R, T), r"a parameter (is|became) torch\.float64"),
    (put(ones(4, 3), lambda: torch.ones(1, 3).expand(4, 3)), R, EXPANDED),
]


@pytest.mark.parametrize(("spoil", "error", "remedy"), SPOILED)
@pytest.mark.parametrize("given", ["", "open", "empty"])
@pytest.mark.parametrize("position", [0, 1])
def test_what_kernels_cannot_use_is_refused(
    backend: str, given: str, spoil: Callable[[Any], None], error: Errors, remedy: str, position: int
) -> None:
    params = [Parameter(torch.randn(4, 3)) for _ in range(2)]
    optimizer, other = stepped(params, backend), params[1 - position]
    if given:
        other.grad = torch.randn(4, 3)
        optimizer.accumulate(2.0 if given == "open" else 0)
    other.grad = torch.randn(4, 3)
    spoil(params[position])
    for last in (False, True):
        with refused(optimizer, error, remedy):
            optimizer.accumulate(2.0, last=last)
    if not given:
        with refused(optimizer, error, remedy):
            optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_in_place_of_its_parameters_is_refused(name: str) -> None:
    cls = OPTIMIZERS[name].ours
    for model in (torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2))):
        with pytest.raises(TypeError, match=rf"got a model; write {cls.__name__}\(model\.parameters\(\)\)"):
            cls(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_list_of_parameters_is_taken_though_it_is_a_module(name: str) -> None:
    cls, params = OPTIMIZERS[name].ours, torch.nn.ParameterList([Parameter(torch.full((2, 2), 8.0)) for _ in range(2)])
    for given in (params, [{"params": params}]):
        optimizer = cls(given, lr=0.1)
        assert optimizer.param_groups[0]["params"] == [*params]
    optimizer = cls(params=torch.nn.ParameterList([torch.ones(2, 2)]), lr=0.1)
    optimizer.add_param_group({"params": params})
    for param in params:
        param.grad = torch.ones(2, 2)
    optimizer.step()
    assert all(bool((param < 8.0).all()) for param in params)
    for model in (torch.nn.ModuleList([torch.nn.Linear(2, 2)]), torch.nn.ParameterDict({"a": torch.ones(2, 2)})):
        with pytest.raises(TypeError, match=rf"got a model; write {cls.__name__}\(model\.parameters\(\)\)"):
            cls(model)


# ---- parameters of lazy modules, whose shape the first forward pass tells --------------------------------------------


class Lazy(torch.nn.Module):
    """Every second micro-batch goes through one of two layers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(4, 4, dtype=dtype)
        self.heads = torch.nn.ModuleList([torch.nn.LazyLinear(width, dtype=dtype) for width in (3, 2)])

    def forward(self, index: int) -> Tensor:
        x = torch.arange(20.0).reshape(5, 4).sin() + index
        return self.heads[index % 2](self.first(x.to(self.first.weight.dtype)).tanh()).square().mean()  # type: ignore[no-any-return]


def train_lazily(model: Lazy, optimizer: Any, accumulates: bool) -> None:
    torch.manual_seed(1)  # for what the first forward pass draws
    optimizer.step()  # there is nothing to do yet
    optimizer.zero_grad()
    for index in range(6):
        model(index).backward()
        if accumulates:
            optimizer.accumulate()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adadelta", "Adamax", "RAdam"])
@pytest.mark.parametrize("way", ["class", "fuse", "windows", "released"])
def test_parameters_of_lazy_modules_train_as_with_torch(backend: str, name: str, way: str) -> None:
    model, twin = Lazy(), Lazy()
    stock_class: Any = OPTIMIZERS[name].torch_class
    stock, cls = stock_class(twin.parameters(), lr=0.1), OPTIMIZERS[name].ours
    if way == "fuse":
        optimizer = af.fuse(stock_class(model.parameters(), lr=0.1), backend=backend)
    else:
        optimizer = cls(model.parameters(), lr=0.1, backend=backend)
    if way == "released":
        af.release_gradients(optimizer)
    copied = copy.deepcopy(optimizer)
    assert (repr(copied), copied.state_dict()) == (repr(optimizer), optimizer.state_dict())
    assert af.memory_report(optimizer)
    train_lazily(model, optimizer, accumulates=way in ("windows", "released"))
    train_lazily(twin, stock, accumulates=False)
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=4e-6)
    resumed = Lazy()
    again = cls(resumed.parameters(), lr=0.1, backend=backend)
    again.load_state_dict(optimizer.state_dict())  # before its parameters have a shape
    resumed.load_state_dict(model.state_dict())
    train_lazily(resumed, again, accumulates=False)
    train_lazily(twin, stock, accumulates=False)
    for param, other in zip(resumed.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_parameters_of_lazy_modules_get_their_masters(backend: str, dtype: torch.dtype) -> None:
    model, whole = Lazy(dtype), Lazy()
    for half, param in zip(model.first.parameters(), whole.first.parameters(), strict=True):
        param.data.copy_(half.data)
    optimizers = [af.fuse(torch.optim.SGD(each.parameters(), lr=0.1), backend=backend) for each in (model, whole)]
    for each, optimizer in zip((model, whole), optimizers, strict=True):
        train_lazily(each, optimizer, accumulates=True)
        assert af.memory_report(optimizer)
    key = "master_weight" if dtype is torch.float16 else "master_remainder"
    assert all(optimizers[0].state[param][key].shape == param.shape for param in model.parameters())


def test_a_gradient_on_another_device_is_refused() -> None:
    # torch lets nobody assign one, so the check is called by itself.
    with pytest.raises(RuntimeError, match="a gradient is on meta, its parameter on cpu; move one of them"):
        check_gradient(torch.ones(4, 3), torch.ones(4, 3, device="meta"))


@pytest.mark.parametrize("move", [Tensor.double, lambda data: torch.ones(2, 2)], ids=["float64", "another shape"])
@pytest.mark.parametrize("verb", ["accumulate", "close", "step", "backward"])
def test_a_parameter_moved_within_a_window_is_refused_and_may_come_back(
    move: Callable[[Tensor], Tensor], verb: str
) -> None:
    param: Any = Parameter(torch.randn(4, 3))
    optimizer = stepped([param], "auto")
    param.grad = torch.ones_like(param)
    optimizer.accumulate(2.0)
    before, param.data = param.data, move(param.data)
    param.grad = torch.ones_like(param) if verb in ("accumulate", "close") else None
    with refused(optimizer, RuntimeError, r"a parameter became .*Move the model back, or call zero_grad\(\) and begin"):
        {
            "accumulate": lambda: optimizer.accumulate(2.0), "close": lambda: optimizer.accumulate(2.0, last=True),
            "step": optimizer.step, "backward": lambda: optimizer.backward(param.sum(), 2),
        }[verb]()  # fmt: skip
    param.grad, param.data = None, before
    optimizer.step()
    assert not optimizer.step_was_skipped


@pytest.mark.parametrize("call", [af.release_gradients, lambda given: af.fuse_linears(torch.nn.Linear(2, 2), given)])
def test_what_enters_during_backward_cannot_be_dropped(call: Callable[[Any], Any]) -> None:
    optimizer = af.SGD([Parameter(torch.ones(3))], lr=1.0, nonfinite="drop")
    with refused(optimizer, V, "looks at a whole micro-batch before it enters"):
        call(optimizer)


# ---- an eps beside second moments that are stored as 0 ---------------------------------------------------------------

TOO_SMALL = "is too small: second moments below 2\\^-126 .* give eps=0 or one of at least"
EPS = dict.fromkeys(("Adam", "AdamW", "RMSprop", "Adagrad", "RAdam", "Adan", "AdEMAMix", "AdamWScheduleFree"), 1e-16)
EPS["Adadelta"] = 1e-32  # which adds it to squares
EIGHT: dict[str, Any] = {"state_dtype": "8bit", "state_dtype_min_numel": 0}


def test_every_optimizer_with_an_eps_is_judged() -> None:
    with_eps = {name for name, row in OPTIMIZERS.items() if "eps" in row.ours([Parameter(torch.ones(2))]).defaults}
    assert with_eps == {*EPS, "Adamax"}  # whose maximum is no square


@pytest.mark.parametrize("name", EPS)
def test_an_eps_that_second_moments_stored_as_0_would_outweigh_is_refused_everywhere(name: str, backend: str) -> None:
    make, least, param = OPTIMIZERS[name].ours, EPS[name], Parameter(torch.ones(3))
    for eps in (least * 0.99, 1e-40, torch.tensor(least / 2), torch.tensor([least / 2], dtype=torch.float64)):
        with pytest.raises(ValueError, match=TOO_SMALL):
            make([param], eps=eps, backend=backend)
        with pytest.raises(ValueError, match=TOO_SMALL):
            make([{"params": [param], "eps": eps}], backend=backend)
        optimizer = make([param], lr=0.1, backend=backend)
        with refused(optimizer, ValueError, TOO_SMALL):
            optimizer.add_param_group({"params": [Parameter(torch.ones(3))], "eps": eps})
        saved = optimizer.state_dict()
        saved["param_groups"][0]["eps"] = eps
        with refused(optimizer, ValueError, TOO_SMALL):
            optimizer.load_state_dict(saved)
        allowed, optimizer.param_groups[0]["eps"] = optimizer.param_groups[0]["eps"], eps
        param.grad = torch.ones(3)
        with refused(optimizer, ValueError, TOO_SMALL):
            optimizer.step()
        optimizer.accumulate()
        with refused(optimizer, ValueError, TOO_SMALL):
            optimizer.step()
        optimizer.param_groups[0]["eps"] = allowed
        optimizer.step()  # the window is still there
        assert optimizer.grad_norm.item() == pytest.approx(3**0.5)
    for eps in (0.0, 0, least, torch.tensor(0.0), 1e-3):
        make([param], eps=eps, backend=backend)
    if OPTIMIZERS[name].torch_class is not None:
        theirs = OPTIMIZERS[name].torch_class([param], eps=least / 2)  # type: ignore[misc]
        with pytest.raises(ValueError, match=TOO_SMALL):
            af.fuse(theirs)
        assert not isinstance(theirs, af.FusedOptimizer)


def test_of_8_bit_states_a_larger_eps_is_asked_for_and_of_fp64_none() -> None:
    large, small = Parameter(torch.ones(256)), Parameter(torch.ones(4))
    for eps in (1e-16, 0.99e-11):
        with pytest.raises(ValueError, match="at least 1e-11"):
            af.AdamW([small, large], eps=eps, state_dtype="8bit", state_dtype_min_numel=256)
        af.AdamW([small], eps=eps, state_dtype="8bit", state_dtype_min_numel=256)  # whose states are fp32
    af.AdamW([large], eps=1e-11, **EIGHT)
    af.AdamW([Parameter(torch.ones(3, dtype=torch.float64))], eps=1e-30)
    mixed = [{"params": [Parameter(torch.ones(3, dtype=torch.float64))], "eps": 1e-30}, {"params": [small]}]
    optimizer = af.AdamW(mixed)
    for group in mixed:
        group["params"][0].grad = torch.ones_like(group["params"][0])
    optimizer.step()


def test_muon_judges_the_groups_of_adamw_alone() -> None:
    hidden, other = Parameter(torch.ones(3, 3)), Parameter(torch.ones(3))
    af.Muon([{"params": [hidden], "eps": 1e-30}, {"params": [other], "use_muon": False}])
    with pytest.raises(ValueError, match=TOO_SMALL):
        af.Muon([{"params": [hidden]}, {"params": [other], "use_muon": False, "eps": 1e-30}])


def test_a_cautious_or_amsgrad_rule_asks_for_the_same_eps() -> None:
    for options in ({"amsgrad": True}, {"cautious": True}):
        with pytest.raises(ValueError, match=TOO_SMALL):
            af.AdamW([Parameter(torch.ones(3))], eps=1e-20, **options)  # type: ignore[arg-type]
