"""Printed by tools/print_stubs.py from the rules and their docstrings."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from accumfused.optimizer import FusedOptimizer
from accumfused.optimizers.adam import Adam as Adam
from accumfused.optimizers.adam import AdamW as AdamW
from accumfused.optimizers.adan import LoadsTheAuthors as LoadsTheAuthors
from accumfused.optimizers.muon import Muon as Muon
from accumfused.optimizers.schedule_free import ScheduleFree as ScheduleFree
from accumfused.optimizers.sgd import SGD as SGD
from accumfused.rules import Rule
from accumfused.settings import SettingArguments

ALL: tuple[type[FusedOptimizer], ...]
PEERS: dict[type[torch.optim.Optimizer], type[FusedOptimizer]]
RULES: tuple[type[Rule], ...]

class AdEMAMix(FusedOptimizer):
    """AdEMAMix, with accumulation, unscaling and clipping in the same pass.

    Names, defaults and order of the arguments are those of the authors' code, and so are the states; a checkpoint of
    theirs loads. With betas[0] = 0 they keep no `exp_avg_fast`, and this class does.

    Second moments below 2^-126 (in 8-bit blocks 2^-94) are stored as 0, so eps is 0 or at least 1e-16 (1e-11 with 8-bit
    states; fp64 parameters take any). With eps=0 gradients whose squares are smaller make steps that are too large.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr: the learning rate.
        betas: the decays of the fast mean, of the second moment, and of the slow mean.
        alpha: the weight of the slow mean.
        beta3_warmup: steps in which the slow mean's half-life grows from that of betas[0] to that of betas[2].
        alpha_warmup: steps in which alpha grows from 0. None: no warmup, for each of both.
        eps: added to the root of the second moment.
        weight_decay: decoupled, multiplied by lr.
        maximize: True ascends instead of descending.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.001,
        betas: tuple[float | Tensor, float | Tensor, float | Tensor] = (0.9, 0.999, 0.9999),
        alpha: float = 2.0,
        beta3_warmup: int | None = None,
        alpha_warmup: int | None = None,
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None: ...

class Adadelta(FusedOptimizer, torch.optim.Adadelta):
    """Adadelta, with accumulation, unscaling and clipping in the same pass.

    Second moments below 2^-126 (in 8-bit blocks 2^-94) are stored as 0, so eps is 0 or at least 1e-32 (1e-22 with 8-bit
    states; fp64 parameters take any). With eps=0 gradients whose squares are smaller make steps that are too large.

    It replaces `torch.optim.Adadelta`: same arguments, group keys, state names and checkpoints.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr, rho, eps, weight_decay: as in torch.
        foreach, capturable: unused; groups have them for torch's own optimizer.
        maximize: True ascends instead of descending.
        differentiable: not supported.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-06,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None: ...

class Adagrad(FusedOptimizer, torch.optim.Adagrad):
    """Adagrad, with accumulation, unscaling and clipping in the same pass.

    A parameter gets its state at its first step, not when the optimizer is made.

    Second moments below 2^-126 (in 8-bit blocks 2^-94) are stored as 0, so eps is 0 or at least 1e-16 (1e-11 with 8-bit
    states; fp64 parameters take any). With eps=0 gradients whose squares are smaller make steps that are too large.

    It replaces `torch.optim.Adagrad`: same arguments, group keys, state names and checkpoints.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps: as in torch.
        foreach, fused: unused; groups have them for torch's own optimizer.
        maximize: True ascends instead of descending.
        differentiable: not supported.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.01,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **settings: Unpack[SettingArguments],
    ) -> None: ...

class AdamWScheduleFree(ScheduleFree):
    """Schedule-Free AdamW, with accumulation, unscaling and clipping in the same pass.

    Arguments (but `foreach`), group keys and state names are those of the authors' `schedulefree.AdamWScheduleFree`,
    and its checkpoints load. Parameters are those to train with until eval() puts the trained model into them; train()
    goes back.

    Second moments below 2^-126 (in 8-bit blocks 2^-94) are stored as 0, so eps is 0 or at least 1e-16 (1e-11 with 8-bit
    states; fp64 parameters take any). With eps=0 gradients whose squares are smaller make steps that are too large.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr: the learning rate; no schedule is needed.
        betas: beta above, > 0, and the decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: times lr and y.
        warmup_steps: steps in which the learning rate rises linearly.
        r, weight_lr_power: the powers of the step's number and of the learning rate in the weights of the average.
        inner_momentum: the decay of a mean of the gradients; 0: no mean is kept.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.0025,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        inner_momentum: float = 0.0,
        **settings: Unpack[SettingArguments],
    ) -> None: ...

class Adamax(FusedOptimizer, torch.optim.Adamax):
    """Adamax, with accumulation, unscaling and clipping in the same pass.

    It replaces `torch.optim.Adamax`: same arguments, group keys, state names and checkpoints.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr, betas, eps, weight_decay: as in torch.
        foreach, capturable: unused; groups have them for torch's own optimizer.
        maximize: True ascends instead of descending.
        differentiable: not supported.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.002,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None: ...

class Adan(LoadsTheAuthors):
    """Adan, with accumulation, unscaling and clipping in the same pass.

    Names, defaults and order of the arguments are those of the authors' code, and so are the states; a checkpoint of
    theirs loads. The state also counts steps, for each parameter.

    Second moments below 2^-126 (in 8-bit blocks 2^-94) are stored as 0, so eps is 0 or at least 1e-16 (1e-11 with 8-bit
    states; fp64 parameters take any). With eps=0 gradients whose squares are smaller make steps that are too large.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr: the learning rate.
        betas: the decays of the gradient's mean, of its change's mean, and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled, multiplied by lr.
        no_prox: True decays before the update, as AdamW does; False decays by a division after it.
        maximize: True ascends instead of descending.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.001,
        betas: tuple[float | Tensor, float | Tensor, float | Tensor] = (0.98, 0.92, 0.99),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        *,
        no_prox: bool = False,
        maximize: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None: ...

class Lion(FusedOptimizer):
    """Lion, with accumulation, unscaling and clipping in the same pass.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr: the size of every element's update; three to ten times smaller than AdamW's.
        betas: the update's interpolation factor and the momentum's decay.
        weight_decay: decoupled, multiplied by lr; three to ten times larger than AdamW's.
        cautious, cautious_weight_decay: as `accumfused.AdamW`.
        maximize: True ascends instead of descending.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.0001,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        cautious: bool = False,
        cautious_weight_decay: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None: ...

class RAdam(FusedOptimizer, torch.optim.RAdam):
    """RAdam, with accumulation, unscaling and clipping in the same pass.

    Second moments below 2^-126 (in 8-bit blocks 2^-94) are stored as 0, so eps is 0 or at least 1e-16 (1e-11 with 8-bit
    states; fp64 parameters take any). With eps=0 gradients whose squares are smaller make steps that are too large.

    It replaces `torch.optim.RAdam`: same arguments, group keys, state names and checkpoints.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr, betas, eps, weight_decay, decoupled_weight_decay: as in torch.
        foreach, capturable: unused; groups have them for torch's own optimizer.
        maximize: True ascends instead of descending.
        differentiable: not supported.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None: ...

class RMSprop(FusedOptimizer, torch.optim.RMSprop):
    """RMSprop, with accumulation, unscaling and clipping in the same pass.

    A centered variance that roundings make negative is 0 here, and NaN in torch; the smaller the format of the states,
    the larger eps should be.

    Second moments below 2^-126 (in 8-bit blocks 2^-94) are stored as 0, so eps is 0 or at least 1e-16 (1e-11 with 8-bit
    states; fp64 parameters take any). With eps=0 gradients whose squares are smaller make steps that are too large.

    It replaces `torch.optim.RMSprop`: same arguments, group keys, state names and checkpoints.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr, alpha, eps, weight_decay, momentum, centered: as in torch.
        capturable, foreach: unused; groups have them for torch's own optimizer.
        maximize: True ascends instead of descending.
        differentiable: not supported.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.01,
        alpha: float = 0.99,
        eps: float = 1e-08,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None: ...

class SGDScheduleFree(ScheduleFree):
    """Schedule-Free SGD, with accumulation, unscaling and clipping in the same pass.

    Arguments (but `foreach`), group keys and state names are those of the authors' `schedulefree.SGDScheduleFree`, and
    its checkpoints load. Parameters are those to train with until eval() puts the trained model into them; train() goes
    back.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr: the learning rate; no schedule is needed.
        momentum: beta above, > 0 and < 1.
        weight_decay: times lr and y.
        warmup_steps: steps in which the learning rate rises linearly.
        r, weight_lr_power: the powers of the step's number and of the learning rate in the weights of the average.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        **settings: Unpack[SettingArguments],
    ) -> None: ...

class Signum(FusedOptimizer):
    """Signum, with accumulation, unscaling and clipping in the same pass.

    `Lion` with two equal betas is Signum with decoupled weight decay.

    Args:
        params: parameters or parameter groups, fp32, bf16, fp16 or fp64; gradients may have another of these dtypes.
        lr: the size of every element's update.
        momentum: the decay of the gradient's mean; 0 is signSGD, which still keeps the state.
        weight_decay: L2, added to the gradient.
        maximize: True ascends instead of descending.
        **settings: those of `accumfused.settings.Settings`.

    Raises:
        ValueError, TypeError: wrong hyper-parameters; wrong settings; parameters of other dtypes.
        RuntimeError: a backend asked for by name cannot run.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **settings: Unpack[SettingArguments],
    ) -> None: ...
