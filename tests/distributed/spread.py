"""A small model in several processes, spread over them or whole in each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from compare import params_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import accumfused as af
from accumfused.formats.shards import local

ADAMW: dict[str, Any] = {"lr": 0.1, "betas": (0.5, 0.7), "weight_decay": 0.4}


class Net(nn.Module):
    """With a layer that only some processes use, and one that none does. Neither 2 nor 4 divides its rows."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(7, 5), nn.Linear(5, 3)
        self.sometimes, self.never = nn.Linear(5, 3), nn.Linear(2, 2)
        self.to(dtype)

    def forward(self, x: Tensor, uses_all: bool = True) -> Tensor:
        hidden = self.first(x).tanh()
        return self.second(hidden) + self.sometimes(hidden) if uses_all else self.second(hidden)


def loss_of(model: Any, rows: int, seed: int, uses_all: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    """A mean over a micro-batch of random rows: NaN if there are none."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, columns, generator=generator).to(dtype) for columns in (7, 3))
    return (model(x, uses_all) - y).square().mean()


def mesh_over(*shape: int) -> Any:
    """Of all processes; its dimensions are named a, b, ..."""
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("ab"[: len(shape)]))


def sharded(model: Any, mesh: Any = None, **policy: Any) -> Any:
    """`fully_shard` of every layer and the whole; the layer that nobody uses is frozen."""
    if isinstance(model, Net):
        model.never.requires_grad_(False)
    mesh = mesh_over() if mesh is None else mesh
    for module in (*model.children(), model):
        fully_shard(module, mesh=mesh, **policy)
    return model


def tensor_parallel(model: Net, mesh: Any) -> Net:
    model.never.requires_grad_(False)
    parallelize_module(model.first, mesh, ColwiseParallel(output_layouts=Replicate()))
    parallelize_module(model.second, mesh, RowwiseParallel(input_layouts=Replicate()))
    return model


def placed(value: Tensor, like: Any) -> Any:
    """As another tensor lies: spread over its mesh, or plain."""
    return distribute_tensor(value, like.device_mesh, like.placements) if hasattr(like, "placements") else value.clone()


def whole(tensor: Tensor) -> Tensor:
    """Of a DTensor, gathered; in memory of its own."""
    given: Any = tensor.detach()
    if hasattr(given, "full_tensor"):
        wide = given.to(torch.int32) if given.dtype == torch.int16 else given  # gloo has none of 16 bits
        given = wide.full_tensor().to(given.dtype)
    return given.clone()


def everything_whole(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and states by name, gathered."""
    return {
        f"{name} {index}": whole(value)
        for index, param in enumerate(params_of(optimizer))
        for name, value in {"param": param, **optimizer.state.get(param, {})}.items()
    }


def adamw(model: nn.Module, **settings: Any) -> af.AdamW:
    """Of all that a model trains."""
    return af.AdamW([param for param in model.parameters() if param.requires_grad], **{**ADAMW, **settings})


def give_random_gradients(seed: int, *optimizers: torch.optim.Optimizer) -> None:
    """The same to all of them, in all processes, each placed as its parameter."""
    for optimizer in optimizers:
        generator = torch.Generator().manual_seed(seed)
        for param in params_of(optimizer):
            param.grad = placed(torch.randn(param.shape, generator=generator).to(param.dtype), param)


def take_steps(seeds: range, *optimizers: torch.optim.Optimizer) -> None:
    """From random gradients, the same for all of them; every parameter moves."""
    before = [[local(param).detach().clone() for param in params_of(optimizer)] for optimizer in optimizers]
    for seed in seeds:
        give_random_gradients(seed, *optimizers)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for optimizer, old in zip(optimizers, before, strict=True):
        for param, start in zip(params_of(optimizer), old, strict=True):
            few = start.numel() < 2  # one bf16 number may come back to where it was
            assert not seeds or few or not torch.equal(local(param), start), "it did not move"


def differing(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> list[str]:
    """The names of parameters and states that two optimizers have not in common, bit for bit."""
    found, truth = everything_whole(one), everything_whole(other)
    both = found.keys() & truth.keys()
    return sorted((found.keys() ^ truth.keys()) | {name for name in both if not torch.equal(found[name], truth[name])})
