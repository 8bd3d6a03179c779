"""torch's own lists of what its optimizers are tested with, pointed at ours.

They come with torch, as `torch.testing._internal.common_optimizers`, and are private: modules that import this one are
skipped where a torch version has them in another form.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from compare import assert_close, assert_same_bits, everything
from table import random_grads, set_grads
from torch import Tensor

import accumfused as af
from accumfused import _native


class LoopLion(torch.optim.Optimizer):
    """What torch's Lion would be: one tensor after the other, in float32."""

    def __init__(self, params: Any, lr: Any = 1e-4, betas: Any = (0.9, 0.99), weight_decay: Any = 0.0, **flags: Any):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": False, **flags})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, beta1, beta2 = (float(number) for number in (group["lr"], *group["betas"]))
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = -param.grad if group["maximize"] else param.grad
                momentum = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                param.mul_(1 - lr * group["weight_decay"])
                param.sub_(lr * (beta1 * momentum + (1 - beta1) * grad).sign())
                momentum.mul_(beta2).add_((1 - beta2) * grad)
        return loss


STOCK = {
    af.SGD: functools.partial(torch.optim.SGD, foreach=False),
    af.Adam: functools.partial(torch.optim.Adam, foreach=False),
    af.AdamW: functools.partial(torch.optim.AdamW, foreach=False),
    af.Lion: LoopLion,
}


def _lion_inputs(lists: Any) -> list[Any]:
    options: dict[str, dict[str, Any]] = {
        "default": {},
        "non-default lr": {"lr": 0.01},
        "tensor lr": {"lr": torch.tensor(0.001)},
        "nonzero weight_decay": {"weight_decay": 0.1},
        "maximize": {"weight_decay": 0.1, "maximize": True},
        "betas": {"betas": (0.5, 0.8)},
        "tensor betas": {"betas": (torch.tensor(0.5), torch.tensor(0.8))},
    }
    return [lists.OptimizerInput(params=None, kwargs=kwargs, desc=name) for name, kwargs in options.items()]


def _lion_error_inputs(lists: Any, device: str, dtype: torch.dtype) -> list[Any]:
    options = {
        "Invalid learning rate: -0.01": {"lr": -1e-2},
        "Invalid beta parameter at index 0: 1.0": {"betas": (1.0, 0.0)},
        "Invalid beta parameter at index 1: -0.1": {"betas": (0.5, -0.1)},
        "Invalid weight_decay value: -1": {"weight_decay": -1},
        r"Tensor betas\[1\] must be 1-element": {"betas": (torch.tensor(0.5), torch.tensor([0.5, 0.8]))},
    }
    return lists.get_error_inputs_for_all_optims(device, dtype) + [
        lists.ErrorOptimizerInput(
            lists.OptimizerInput(params=None, kwargs=kwargs, desc=text), error_type=ValueError, error_regex=text
        )
        for text, kwargs in options.items()
    ]


def _infos(lists: Any) -> list[Any]:
    """An OptimizerInfo for each of our classes: torch's, with the class exchanged."""
    infos = []
    for optimizer in (af.SGD, af.Adam, af.AdamW):
        (theirs,) = (info for info in lists.optim_db if info.optim_cls is optimizer._torch_class)
        ours = copy.copy(theirs)
        ours.optim_cls = optimizer
        infos.append(ours)
    lion = lists.OptimizerInfo(
        af.Lion,
        optim_inputs_func=lambda device, dtype=None: _lion_inputs(lists),
        optim_error_inputs_func=functools.partial(_lion_error_inputs, lists),
        supported_impls=(),
        not_og_supported_flags=(),
        supports_complex=False,  # the sign of a complex number is not that of its parts
    )
    return [*infos, lion]


try:
    with pytest.MonkeyPatch.context() as patch:
        # The import would forbid the whole process to set flags such as torch.backends.cudnn.deterministic.
        patch.setattr(torch.backends, "disable_global_flags", lambda: None)
        from torch.testing._internal import common_device_type, common_optimizers, common_utils
    instantiate_device_type_tests = common_device_type.instantiate_device_type_tests
    optims, TestCase = common_optimizers.optims, common_utils.TestCase
    INFOS = _infos(common_optimizers)
    # With the inputs for GPUs, such as capturable=True and betas in tensors: ours takes them everywhere.
    INPUTS = [(info, given) for info in INFOS for given in info.optim_inputs_func(device="cuda")]
    ERROR_INPUTS = [(info, given) for info in INFOS for given in info.optim_error_inputs_func("cpu", torch.float32)]
    for info in INFOS:  # what else the tests read
        operator.attrgetter("scheduler_inputs", "supported_impls", "not_og_supported_flags", "supports_complex")(info)
except (ImportError, AttributeError, TypeError, ValueError, Warning) as error:
    pytest.skip(
        f"torch {torch.__version__} keeps its optimizers' test inputs in another form: {error!r}",
        allow_module_level=True,
    )

# The tests' own fixture, with one backend per device: that all of them give the same bits is tested elsewhere.
on_each_device = pytest.mark.parametrize(
    "backend",
    ["torch" if _native.unavailable else "cpu", *(["cuda"] if torch.cuda.is_available() else [])],
    indirect=True,
)
every_optimizer = pytest.mark.parametrize("info", INFOS, ids=lambda info: info.name)
every_input = pytest.mark.parametrize(
    ("info", "given"), INPUTS, ids=[f"{info.name}, {given.desc}" for info, given in INPUTS]
)


def options_of(given: Any, **changed: Any) -> dict[str, Any]:
    """A copy, for schedulers write into learning rates that are tensors."""
    return copy.deepcopy({**given.kwargs, **changed})


def make(info: Any, given: Any, params: Any, **changed: Any) -> af.FusedOptimizer:
    optimizer: af.FusedOptimizer = info.optim_cls(params, **options_of(given, **changed))
    return optimizer


def make_stock(info: Any, given: Any, params: Any, **changed: Any) -> torch.optim.Optimizer:
    """torch's for-loop; capturable=True is refused there without a GPU, and changes no number."""
    options = options_of(given, **changed)
    options.pop("capturable", None)
    optimizer: torch.optim.Optimizer = STOCK[info.optim_cls](params, **options)
    return optimizer


def copies(params: Iterable[Tensor]) -> list[Tensor]:
    return [param.detach().clone().requires_grad_() for param in params]


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def train(*optimizers: torch.optim.Optimizer, steps: int = 3, seed: int = 0) -> None:
    """The same random gradients for all, on each one's devices; every step moves something."""
    for step in range(steps):
        for optimizer in optimizers:
            params = [param for param in params_of(optimizer) if param.requires_grad]
            before = params[0].detach().clone()
            grads = random_grads(params, 10 * seed + step)
            set_grads(params, [grad.to(param.device) for grad, param in zip(grads, params, strict=True)])
            optimizer.step()
            assert not torch.equal(params[0], before)


def assert_same(ours: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """The same parameters and states, bit for bit."""
    found, expected = everything(ours), everything(other)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert_same_bits(found[name], value, name)


def assert_like_stock(ours: torch.optim.Optimizer, stock: torch.optim.Optimizer) -> None:
    """The same parameters and states, up to roundings; ours also counts steps with momentum."""
    for param, truth in zip(params_of(ours), params_of(stock), strict=True):
        assert_close(param, truth, "torch.optim", "parameter")
        mine = ours.state.get(param, {})
        theirs = {name: value for name, value in stock.state.get(truth, {}).items() if value is not None}
        assert set(mine) - set(theirs) <= {"step"}
        assert set(theirs) <= set(mine)
        for name, value in theirs.items():
            assert_close(mine[name], value, "torch.optim", name)
