"""torch's own lists of an optimizer's inputs and errors, for ours.

They come with torch and are private: where a torch version has them in another form, this file is skipped.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from itertools import cycle
from typing import Any

import pytest
import torch
from compare import assert_like, params_of, train
from table import OPTIMIZERS, Optimizer, random_params, set_grads
from torch import Tensor
from torch.utils._pytree import tree_map_only

import accumfused as af
from accumfused.optimizers import schedule_free


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
        from torch.testing._internal.common_optimizers import get_error_inputs_for_all_optims, optim_db
    INFOS = {name: info_of(row) for name, row in OPTIMIZERS.items()}
except (ImportError, AttributeError, TypeError, ValueError, Warning) as error:
    pytest.skip(f"torch {torch.__version__} tests its optimizers in another form: {error!r}", allow_module_level=True)

SHAPES = [(5, 3), (), (0,), (7,)]
FLAGS = ("foreach", "fused", "capturable")  # differentiable is refused
every_optimizer = pytest.mark.parametrize("info", INFOS.values(), ids=INFOS)


def arguments_of(info: Any, *names: str) -> set[str]:
    """Which of the names the optimizer takes."""
    return {*names} & inspect.signature(info.optim_cls).parameters.keys()


def inputs_of(info: Any) -> list[dict[str, Any]]:
    """Also those for GPUs, such as capturable=True and betas in tensors, which ours takes everywhere."""
    given = [each.kwargs for each in info.optim_inputs_func(device="cuda")]
    count = len(inspect.signature(info.optim_cls).parameters["betas"].default) if arguments_of(info, "betas") else 0
    given = [each | {"betas": (*each["betas"], 0.999)[:count]} if "betas" in each else each for each in given]
    taken = [{name: each[name] for name in each if arguments_of(info, name)} for each in given]
    return copy.deepcopy([*{repr(options): options for options in taken}.values()])


def pair_of(info: Any, options: dict[str, Any], backend: str) -> tuple[af.FusedOptimizer, torch.optim.Optimizer]:
    """Ours, and torch's plain loop on the CPU, where capturable=True is refused; it changes no number."""
    for_loop = {name: tree_map_only(Tensor, Tensor.cpu, options[name]) for name in options if name not in FLAGS}
    with torch.device("cpu"):
        peer = info.row.peer(random_params(SHAPES), **for_loop)
    return info.optim_cls(random_params(SHAPES), **options, backend=backend), peer


@every_optimizer
def test_what_torch_refuses_is_refused(info: Any) -> None:
    for given in info.optim_error_inputs_func(torch.get_default_device().type, torch.float32):
        params, options = given.optimizer_error_input.params, given.optimizer_error_input.kwargs
        error, text = given.error_type, given.error_regex
        if error is UserWarning:  # torch warns that a parameter listed twice will be an error; here it is one
            error, text = ValueError, "holds the same parameter twice"
        with pytest.raises(error, match=text):
            info.optim_cls(random_params([(2,)]) if params is None else params, **options)


@every_optimizer
def test_defaults_groups_and_the_printed_form_are_torchs(info: Any) -> None:
    for options in inputs_of(info):
        params = random_params([(3,), (2,)])
        ours = info.optim_cls(params, **options)
        counted = schedule_free.SUMS if isinstance(ours, schedule_free.ScheduleFree) else ()
        group = {name: value for name, value in ours.param_groups[0].items() if name not in counted}
        assert {**ours.defaults, "params": params} == group
        if info.row.torch_class is not None:
            theirs = info.row.torch_class(params, **options)
            assert [*ours.defaults.items()] == [*theirs.defaults.items()]
            assert repr(ours).partition("\naccumfused.")[0] == repr(theirs)


@every_optimizer
def test_numbers_are_those_of_torchs_plain_loop(backend: str, info: Any) -> None:
    for options in inputs_of(info):
        ours, peer = pair_of(info, options, backend)
        for is_zero in (True, False, True):  # a first gradient of zeros, too
            for optimizer in (ours, peer):
                set_grads(params_of(optimizer), [torch.zeros_like(param) for param in params_of(optimizer)])
                optimizer.step() if is_zero else train(optimizer)
            assert_like(peer, ours, options)
        moved = (params_of(ours)[0] - random_params(SHAPES)[0]).abs().max()
        assert moved > 2e-4 or info.row.ours is af.Adadelta  # far above the tolerance; Adadelta begins slowly


@every_optimizer
def test_checkpoints_of_older_versions_are_read(backend: str, info: Any) -> None:
    """Step counts were numbers, or of another dtype, as the states may be; or a flag was on."""
    flags = arguments_of(info, *FLAGS)
    later = {*info.not_og_supported_flags, *flags, "decoupled_weight_decay"}
    forms, inputs = [float, int, Tensor.int, Tensor.double, *flags], inputs_of(info)
    for form, options in itertools.islice(zip(cycle(forms), cycle(inputs), strict=True), max(len(forms), len(inputs))):
        ours, peer = pair_of(info, options, backend)
        train(ours, peer, steps=2)
        older = copy.deepcopy(peer.state_dict())
        (group,) = older["param_groups"]
        if form in flags:
            group[form] = True
        else:
            for name in later:
                if name in flags or not options.get(name):
                    group.pop(name, None)
            for state in older["state"].values():
                state |= {"step": form(torch.as_tensor(state["step"]))} if "step" in state else {}
                state |= {"exp_avg": state["exp_avg"].double()} if "exp_avg" in state else {}
        ours.load_state_dict(older)
        loaded = ours.param_groups[0]
        assert {name for name in flags if loaded[name]} == flags & {form}
        assert all(loaded[name] == ours.defaults[name] for name in later & loaded.keys() - flags)
        train(ours, peer, steps=1, seed=1)
        assert_like(peer, ours, (form, options))


@every_optimizer
def test_names_of_parameters_are_kept_and_loaded_as_torch_does(info: Any) -> None:
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
