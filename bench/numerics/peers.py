"""Other people's optimizers over 16-bit weights and 8-bit states, where they are installed. None is required."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.numerics.contenders import BF16, FP32, Contender, Groups

_RANDOM = 1 << 16  # elements of those that draw random numbers: they take some 100 ns for each


@dataclass(frozen=True)
class Peer:
    """A package on PyPI, and the contender that it makes; calling that imports it."""

    package: str
    contender: Callable[[], Contender]
    compiles: bool = False  # some 10 s before its first step


WEIGHTS = {
    "optimi Kahan": Peer(
        "torch-optimi", lambda: Contender("optimi Kahan", BF16, _optimi(), _optimi_weight, bytes_per_parameter=4)
    ),
    "heavyball stochastic": Peer(
        "heavyball", lambda: Contender("heavyball stochastic", BF16, _heavyball(None), elements=_RANDOM), True
    ),
    "heavyball bf16+8": Peer(
        "heavyball",
        lambda: Contender("heavyball bf16+8", BF16, _heavyball("bf16+8"), _heavyball_weight, _RANDOM, 3),
        True,
    ),
    "torchao stochastic": Peer(
        "torchao", lambda: Contender("torchao stochastic", BF16, _torchao("_AdamW", True), elements=_RANDOM), True
    ),
    "torchao nearest": Peer("torchao", lambda: Contender("torchao nearest", BF16, _torchao("_AdamW", False)), True),
    "flashoptim 24 bits": Peer(
        "flashoptim", lambda: Contender("flashoptim 24 bits", BF16, _flashoptim(), bytes_per_parameter=3)
    ),
}
STATES = {
    "torchao 8-bit states": Peer(
        "torchao", lambda: Contender("torchao 8-bit states", FP32, _torchao("AdamW8bit", False)), True
    ),
    "bitsandbytes 8-bit states": Peer(
        "bitsandbytes", lambda: Contender("bitsandbytes 8-bit states", FP32, _bitsandbytes())
    ),
}


def version(package: str) -> str:
    """Raises: ImportError where it is not installed."""
    return importlib.metadata.version(package)


@contextlib.contextmanager
def quiet() -> Any:
    """Peers greet their users at import with warnings and logs of the machines that they would rather run on."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _optimi() -> Any:
    optimi: Any = importlib.import_module("optimi")

    def make(groups: Groups, **options: Any) -> torch.optim.Optimizer:
        return optimi.AdamW(groups, lr=1e-3, triton=False, foreach=False, **options)

    return make


def _optimi_weight(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    return param.detach().double() + optimizer.state[param]["kahan_comp"].double()


def _heavyball(ecc: str | None) -> Any:
    heavyball: Any = importlib.import_module("heavyball")
    importlib.import_module("heavyball.utils").compile_mode = "default"  # its default tries many kernels first

    def make(groups: Groups, **options: Any) -> torch.optim.Optimizer:
        return heavyball.AdamW(groups, param_ecc=ecc, **options)

    return make


def _heavyball_weight(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    """Parameter plus correction, in units of half an ulp / 127."""
    state = next(iter(optimizer.state[param].values()))
    utils: Any = importlib.import_module("heavyball.utils")
    correction = state["param::ecc"]
    return utils._ULPState(correction, utils._ULPState._SMAX[correction.dtype]).decode(param.detach()).double()


def _torchao(name: str, stochastic: bool) -> Any:
    optim: Any = importlib.import_module("torchao.optim")

    def make(groups: Groups, **options: Any) -> torch.optim.Optimizer:
        return getattr(optim, name)(groups, bf16_stochastic_round=stochastic, **options)

    return make


def _flashoptim() -> Any:
    flashoptim: Any = importlib.import_module("flashoptim")

    def make(groups: Groups, **options: Any) -> torch.optim.Optimizer:
        return flashoptim.FlashAdamW(groups, master_weight_bits=24, **options)

    return make


def _bitsandbytes() -> Any:
    optim: Any = importlib.import_module("bitsandbytes").optim

    def make(groups: Groups, **options: Any) -> torch.optim.Optimizer:
        return optim.AdamW8bit(groups, **options)

    return make
