"""torch's own test machinery, run as it stands: its lists of inputs and errors, one test per optimizer and device.

It comes with torch and is private: where a torch version has it in another form, this file is skipped. Class and tests
are named as in torch's suite, so that the skips of each OptimizerInfo apply.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import everything
from peers import assert_like, params_of, train
from table import OPTIMIZERS, Optimizer, random_params, set_grads

import accumfused as af

# ruff: noqa: PT027 (unittest's assertions)


def info_of(row: Optimizer) -> Any:
    """torch's OptimizerInfo with the class exchanged; of what torch has not, that of AdamW."""
    (theirs,) = (info for info in optim_db if info.optim_cls is (row.torch_class or torch.optim.AdamW))
    ours = copy.copy(theirs)
    ours.optim_cls, ours.row = row.ours, row
    if row.torch_class is None:
        ours.optim_error_inputs_func, ours.not_og_supported_flags = get_error_inputs_for_all_optims, ()
    return ours


try:
    with pytest.MonkeyPatch.context() as patch:
        # The import would forbid the whole process to set flags such as torch.backends.cudnn.deterministic.
        patch.setattr(torch.backends, "disable_global_flags", lambda: None)
        from torch.testing._internal.common_device_type import instantiate_device_type_tests
        from torch.testing._internal.common_optimizers import get_error_inputs_for_all_optims, optim_db, optims
        from torch.testing._internal.common_utils import TestCase
    INFOS = [info_of(row) for row in OPTIMIZERS.values()]
except (ImportError, AttributeError, TypeError, ValueError, Warning) as error:
    pytest.skip(f"torch {torch.__version__} tests its optimizers in another form: {error!r}", allow_module_level=True)

SHAPES = [(5, 3), (), (0,), (7,)]
FLAGS = ("foreach", "fused", "capturable")  # differentiable is refused


def arguments_of(info: Any, *names: str) -> set[str]:
    """Which of the names the optimizer takes."""
    return {*names} & inspect.signature(info.optim_cls).parameters.keys()


def inputs_of(info: Any) -> list[dict[str, Any]]:
    """Also those for GPUs, such as capturable=True and betas in tensors, which ours takes everywhere."""
    given = [each.kwargs for each in info.optim_inputs_func(device="cuda")]
    taken = [{name: each[name] for name in each if arguments_of(info, name)} for each in given]
    return copy.deepcopy([*{repr(options): options for options in taken}.values()])


def pair_of(info: Any, options: dict[str, Any]) -> tuple[af.FusedOptimizer, torch.optim.Optimizer]:
    """Ours, and torch's plain loop on the CPU, where capturable=True is refused; it changes no number."""
    for_loop = {name: value for name, value in options.items() if name not in FLAGS}
    with torch.device("cpu"):
        peer = info.row.peer(random_params(SHAPES), **for_loop)
    return info.optim_cls(random_params(SHAPES), **options), peer


def each_optimizer(test: Callable[[Any, Any], None]) -> Any:
    def on_the_device(self: TestCase, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        with torch.device(device):
            test(self, optim_info)

    on_the_device.__name__ = test.__name__
    return optims(INFOS)(on_the_device)


class TestOptimRenewed(TestCase):
    @each_optimizer
    def test_errors(self, info: Any) -> None:
        for given in info.optim_error_inputs_func(self.device_type, torch.float32):
            params, options = given.optimizer_error_input.params, given.optimizer_error_input.kwargs
            error, text = given.error_type, given.error_regex
            if error is UserWarning:  # torch warns that a parameter listed twice will be an error; here it is one
                error, text = ValueError, "holds the same parameter twice"
            with self.assertRaisesRegex(error, text):
                info.optim_cls(random_params([(2,)]) if params is None else params, **options)

    @each_optimizer
    def test_defaults_groups_and_the_printed_form_are_torchs(self, info: Any) -> None:
        for options in inputs_of(info):
            params = random_params([(3,), (2,)])
            ours = info.optim_cls(params, **options)
            assert {**ours.defaults, "params": params} == ours.param_groups[0]
            if info.row.torch_class is not None:
                theirs = info.row.torch_class(params, **options)
                assert [*ours.defaults.items()] == [*theirs.defaults.items()]
                assert repr(ours).partition("\naccumfused.")[0] == repr(theirs)

    @each_optimizer
    def test_fused_matches_forloop(self, info: Any) -> None:
        for options in inputs_of(info):
            ours, peer = pair_of(info, options)
            for is_zero in (True, False, True):  # a first gradient of zeros, too
                for optimizer in (ours, peer):
                    set_grads(params_of(optimizer), [torch.zeros_like(param) for param in params_of(optimizer)])
                    optimizer.step() if is_zero else train(optimizer)
                assert_like(peer, ours, options)
            assert (params_of(ours)[0] - random_params(SHAPES)[0]).abs().max() > 2e-4  # far above the tolerance

    @each_optimizer
    def test_can_load_older_state_dict(self, info: Any) -> None:
        flags = arguments_of(info, *FLAGS)
        later = {*info.not_og_supported_flags, *flags, "decoupled_weight_decay"}
        for options in inputs_of(info):
            for form in (float, int, *flags):  # step counts were numbers; or a flag was on
                ours, peer = pair_of(info, options)
                train(ours, peer, steps=2)
                older = copy.deepcopy(peer.state_dict())
                (group,) = older["param_groups"]
                if form in flags:
                    group[form] = True
                else:
                    for name in later - {"maximize"} if group["maximize"] else later:
                        group.pop(name, None)
                    for state in older["state"].values():
                        state |= {"step": form(state["step"])} if "step" in state else {}
                ours.load_state_dict(older)
                loaded = ours.param_groups[0]
                assert {name for name in flags if loaded[name]} == flags & {form}
                assert all(loaded[name] == ours.defaults[name] for name in later & loaded.keys() - flags)
                train(ours, peer, steps=1, seed=1)
                assert_like(peer, ours, (form, options))

    @each_optimizer
    def test_can_load_from_to_named_state_dict(self, info: Any) -> None:
        def make(optimizer: Any, name: str | None) -> torch.optim.Optimizer:
            params: Any = [(f"{name}{i}", p) if name else p for i, p in enumerate(random_params(SHAPES))]
            return optimizer([{"params": params[:1]}, {"params": params[1:], "lr": 0.5}], lr=0.1)

        for names in itertools.product((None, "w"), (None, "v")):
            found = []
            for optimizer in (info.optim_cls, info.row.peer):
                saved, loaded = (make(optimizer, name) for name in names)
                loaded.load_state_dict(saved.state_dict())
                found.append([group.get("param_names") for group in loaded.state_dict()["param_groups"]])
            assert found[0] == found[1]
            assert (found[0][0] is None) == (names == (None, None))

    @each_optimizer
    def test_deepcopy_copies_all_public_attrs(self, info: Any) -> None:
        for options in inputs_of(info):
            ours = info.optim_cls(random_params(SHAPES), **options, max_grad_norm=0.5)
            train(ours, steps=1)
            original = everything(ours)
            for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
                for each in (ours, twin):
                    assert {name for name in vars(each) if name[0] != "_"} == {"defaults", "state", "param_groups"}
                assert twin.defaults == {**ours.defaults, "differentiable": False}  # torch adds it to every copy
                train(twin, steps=1, seed=1)
                assert all(torch.equal(value, original[name]) for name, value in everything(ours).items())
                assert repr(twin) == repr(ours)


instantiate_device_type_tests(TestOptimRenewed, globals(), only_for=("cpu", "cuda"))
