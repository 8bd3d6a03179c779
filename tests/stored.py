"""Small models and their optimizers in every format, for the tests of what is saved, and of what a state is kept in."""

from __future__ import annotations

import io
from typing import Any

import torch
from peers import params_of
from table import STATES, WEIGHTS
from torch import Tensor
from torch.nn import Module, Parameter, ParameterList

import accumfused as af
from accumfused.formats import codecs, numeric

MASTERS = ("split16", "split8", "bf16_master", "fp16_master")


class Model(Module):
    """Parameters of several shapes, one channels_last and one tied, and buffers."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = [(37, 11), (130,), (), (6, 4, 3, 2)]
        values = [torch.randn(shape, generator=generator, device="cpu").to(dtype=dtype) for shape in shapes]
        values[3] = values[3].to(memory_format=torch.channels_last)
        values = [value.to(torch.get_default_device()) for value in values]
        self.matrix, self.vector, self.scalar, self.kernel = map(Parameter, values)
        self.tied = self.matrix
        self.register_buffer("mean", torch.ones(3, dtype=dtype))
        self.register_buffer("count", torch.tensor(7))


def build(weights: str, states: str, backend: str, cls: Any = af.AdamW, **options: Any) -> tuple[Model, Any]:
    dtype, settings = WEIGHTS[weights]
    model = Model(dtype)
    options = {"lr": 0.1, "max_grad_norm": 5.0, "rounding_seed": 17, "state_dtype_min_numel": 2, **settings, **options}
    return model, cls(model.parameters(), backend=backend, state_dtype=STATES[states], **options)


def grads_of(optimizer: torch.optim.Optimizer, seed: int, dtype: torch.dtype | None = None) -> None:
    """Sets random gradients, the same for every dtype and layout of the parameters; of this dtype, or theirs."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params_of(optimizer):
        values = torch.randn(param.shape, generator=generator, device="cpu")
        param.grad_dtype = dtype or param.dtype
        param.grad = torch.empty_like(param, dtype=dtype or param.dtype, requires_grad=False).copy_(values)


def train(optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    for step in range(steps):
        grads_of(optimizer, seed + step)
        optimizer.step()
        optimizer.zero_grad()


def trained(weights: str, states: str, backend: str, steps: int = 3, **options: Any) -> tuple[Model, Any]:
    model, optimizer = build(weights, states, backend, **options)
    train(optimizer, steps)
    return model, optimizer


def skip_a_step(optimizer: Any) -> None:
    """A step that writes nothing, but for what every step does first: bringing loaded states into their formats."""
    grads_of(optimizer, 0)
    params_of(optimizer)[0].grad.fill_(torch.nan)
    optimizer.step()
    assert bool(optimizer.step_was_skipped)
    optimizer.zero_grad()


def through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def whole(optimizer: Any) -> list[Tensor]:
    """The parameters in fp32, each in memory of its own."""
    saved = optimizer.full_precision_state_dict(ParameterList(params_of(optimizer)))
    return [value.clone() for value in saved.values()]


def states_of(optimizer: Any) -> dict[str, Tensor]:
    """Every state in fp64, by parameter and name, whatever it is kept in."""
    found = {}
    for index, entries in enumerate(map(optimizer.state.get, params_of(optimizer))):
        for name in optimizer.rule_of(optimizer.param_groups[0]).states:
            value = entries[name]
            if value.dtype == torch.uint8:
                value, codes = torch.empty_like(value, dtype=torch.float32), numeric.memory_order(value)
                scale, second = entries[f"{name}_scale"].view(-1), name.endswith("sq")
                numeric.memory_order(value).copy_(codecs.decode(codes, scale, second_moment=second))
            found[f"{name} {index}"] = value.double()
    return found
