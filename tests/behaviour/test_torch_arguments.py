"""Our constructors beside torch's: the same arguments, flags, printed form and errors; what ours alone refuses."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from compare import params_of, refused, train
from table import OPTIMIZERS, Optimizer, Own, random_params
from torch.nn import Parameter

import accumfused as af
from accumfused.settings import Settings

OF_TORCH = {name: row for name, row in OPTIMIZERS.items() if row.torch_class is not None}
of_torch = pytest.mark.parametrize("row", OF_TORCH.values(), ids=OF_TORCH)
every_optimizer = pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=OPTIMIZERS)


def takes(row: Optimizer, *names: str) -> list[str]:
    """Which of the names its constructor takes."""
    return [name for name in names if name in inspect.signature(row.ours).parameters]


def outcome(make: Callable[[], torch.optim.Optimizer]) -> Any:
    """What a constructor makes, or its error."""
    try:
        optimizer = make()
    except Exception as error:
        return type(error), str(error)
    return optimizer.defaults, [{**group, "params": len(group["params"])} for group in optimizer.param_groups]


def both(row: Optimizer, params: Callable[[], Any], *args: Any, **options: Any) -> list[Any]:
    """What ours makes and what torch's makes; where torch has no such optimizer, AdamW."""
    makers = row.ours, row.torch_class or torch.optim.AdamW
    return [outcome(lambda make=make: make(params(), *args, **options)) for make in makers]


@of_torch
def test_every_argument_of_torch_has_its_place_and_its_default(row: Optimizer) -> None:
    theirs, ours = (inspect.signature(each).parameters for each in (row.torch_class, row.ours))
    assert [(p.name, p.kind, repr(p.default)) for p in ours.values() if p.name in theirs] == [
        (p.name, p.kind, repr(p.default)) for p in theirs.values()
    ]
    added = {name for name in ours if name not in theirs and not name.startswith("cautious")}
    assert added == {setting.name for setting in fields(Settings)}


@of_torch
def test_flags_are_stored_or_refused_as_in_torch(row: Optimizer) -> None:
    flags, stored = takes(row, "foreach", "fused", "capturable", "differentiable"), 0
    for rate, *values in itertools.product((0.1, torch.tensor(0.1)), *[(None, False, True)] * len(flags)):
        options = {flag: value for flag, value in zip(flags, values, strict=True) if value is not None}
        ours, theirs = both(row, lambda: [Parameter(torch.ones(3))], rate, **options)
        if options.get("differentiable") and isinstance(theirs[0], dict):
            theirs = ValueError, "differentiable=True is not supported: the step is not recorded by autograd"
        assert ours == theirs, options
        stored += isinstance(ours[0], dict)
    assert 18 < stored < 2 * 3 ** len(flags) - 6
    a, *bc = random_params([(3,)] * 3)
    ours, theirs = both(row, lambda: [{"params": [a], "foreach": True}, {"params": iter(bc), "maximize": True}])
    assert ours == theirs  # a group has flags of its own


@every_optimizer
def test_a_scaler_unscales_and_skips_itself(row: Optimizer) -> None:
    """torch's fused optimizers do that in their step: the scaler then hides what it skips from windows and clipping."""
    param, steps = Parameter(torch.ones(3)), []
    optimizer = row.ours([param], **dict.fromkeys(takes(row, "fused"), True))
    optimizer.register_step_pre_hook(lambda *args: steps.append(param.grad.tolist()))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for value in (torch.inf, 1.0):
        param.grad = scaler.scale(torch.full((3,), value))
        scaler.step(optimizer)
        scaler.update(4.0)
    assert steps == [[1.0] * 3]


BAD_PARAMS: list[Callable[[], Any]] = [  # beside those of torch's own list
    lambda: [],
    lambda: [torch.ones(3, requires_grad=True) * 2],  # not a leaf
    lambda: [{"lr": 0.1}],
    lambda: [{"params": [torch.ones(3)]}, [torch.ones(3)]],
    lambda: [{"params": [tensor]} for tensor in [torch.ones(3)] * 2],  # one tensor in two groups
]
BAD_OPTIONS: list[dict[str, Any]] = [
    *({name: value} for name in ("lr", "eps", "weight_decay", "momentum") for value in (-1e-30, torch.nan)),
    *({"betas": betas} for betas in ((1.0, 0.5), (0.5, 1.0), (-0.1, 0.5), (0.5, torch.nan))),
    *({"lr": torch.ones(2)}, {"nesterov": True}, {"nesterov": True, "momentum": 0.5, "dampening": 0.5}),
]


@every_optimizer
def test_what_torch_refuses_is_refused_with_its_text(row: Optimizer) -> None:
    for params in BAD_PARAMS:
        ours, theirs = both(row, params)
        assert ours == theirs
        assert issubclass(theirs[0], Exception)
    taken = set(takes(row, *inspect.signature(row.torch_class or torch.optim.AdamW).parameters))
    for options in (options for options in BAD_OPTIONS if options.keys() <= taken):
        ours, theirs = both(row, lambda: [torch.ones(3)], **options)
        assert ours == theirs, options
    optimizer = row.ours([Parameter(torch.ones(3))])
    for group, text in (
        ([Parameter(torch.ones(3))], "must be a dict"),
        ({"params": [3.0]}, "can only optimize Tensors"),
    ):
        with refused(optimizer, TypeError, text):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


@every_optimizer
def test_a_parameter_may_get_its_memory_before_the_first_step(backend: str, row: Optimizer) -> None:
    model = torch.nn.Linear(5, 4, device="meta")
    optimizer = row.ours(model.parameters(), lr=0.1, backend=backend)
    peer = row.ours([Parameter(torch.ones(4, 5)), Parameter(torch.ones(4))], lr=0.1)
    model.weight.grad = torch.ones_like(model.weight)
    with refused(optimizer, RuntimeError, "has no memory to update .*meta.*; materialize it first"):
        optimizer.step()
    for param in model.parameters():
        torch.utils.swap_tensors(param, Parameter(torch.ones(param.shape)))
    train(optimizer, peer)
    assert all(map(torch.equal, model.parameters(), params_of(peer)))


def printed(optimizer: torch.optim.Optimizer) -> list[str]:
    """The lines that follow torch's text."""
    theirs, _, ours = repr(optimizer).partition("\n)\n")
    assert theirs.startswith(f"{type(optimizer).__name__} (\nParameter Group 0\n")
    return [line.strip() for line in ours.splitlines()[:-1]]


def test_it_prints_what_runs_and_the_window(backend: str) -> None:
    param = Parameter(torch.ones(3))
    fused = af.fuse(torch.optim.AdamW([param]), max_grad_norm=0.5, nonfinite="raise", backend=backend)
    chosen = ["accumfused.AdamW (", "max_grad_norm: 0.5", "nonfinite: raise", f"backend: {backend}"]
    assert printed(fused) == chosen
    for count, phase in ((1, "open"), (2, "closed")):
        param.grad = torch.ones(3)
        fused.accumulate(last=phase == "closed")
        assert printed(fused) == [*chosen, f"window: {phase}, micro-batches: {count}"]
    fused.step()
    assert printed(fused) == chosen


def test_it_prints_the_backend_that_was_chosen_and_how_numbers_are_kept() -> None:
    unknown = torch.ones(3, dtype=torch.float64)  # frozen, and in no format
    users = type("Mine", (af.SGD,), {})
    assert printed(users([Parameter(torch.ones(3)), unknown])) == ["accumfused.SGD (", "backend: not chosen yet"]
    params = [Parameter(torch.ones(64, 64, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    optimizer = af.Lion(params, 0.1, state_dtype="8bit", state_dtype_min_numel=0)
    lines = ["accumfused.Lion (", "state_dtype: 8bit", "state_dtype_min_numel: 0"]
    formats = "formats: bf16 + split16, 8-bit states; fp32, 8-bit states"
    assert printed(optimizer) == [*lines, "backend: not chosen yet", formats]
    train(optimizer, steps=1)
    *found, backend, last = printed(optimizer)
    assert (found, last) == (lines, formats)
    assert backend in ("backend: cpu", "backend: torch", "backend: foreach")
    own = printed(af.fuse(Own(params[:1])))
    assert own == ["accumfused.FusedOwn (", "backend: not chosen yet", "formats: bf16, its own states"]
