"""A small model spread over processes, what trains it, and stock torch in one process beside it.

Its rows do not divide by 2 or 4: some processes have fewer than others, or none.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import emulation
import processes
import torch
import torch.distributed as dist
from compare import assert_same_bits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import accumfused as af
from accumfused import _native, backends
from accumfused.backends.cuda import CudaBackend

COUNTS = ((3, 5), (1, 0), (6, 2), (0, 7))  # examples in the micro-batches of each rank; some are empty
STEPS = 3
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def small_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).to(dtype)


def mesh_over(*shape: int) -> Any:
    """Of all processes; dimensions are named a, b, ..."""
    return init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=tuple("ab"[: len(shape or (1,))]))


def sharded(model: nn.Sequential, mesh: Any = None, **policy: Any) -> Any:
    """`fully_shard` of every layer and the whole."""
    mesh = mesh_over() if mesh is None else mesh
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, **policy)
    return fully_shard(model, mesh=mesh, **policy)


def loss_of(model: Any, step: int, part: int, rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The mean over a micro-batch, 0 of an empty one."""
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    inputs, targets = torch.randn(count, 7, generator=generator), torch.randn(count, 3, generator=generator)
    return ((model(inputs.to(dtype)) - targets.to(dtype)) ** 2).sum() / max(count, 1)


def train(
    model: Any,
    optimizer: Any,
    *,
    weighted: bool = True,
    last: bool = False,
    sync_each: bool = True,
    counts: tuple[tuple[int, ...], ...] = COUNTS,
    steps: Iterable[int] = range(STEPS),
    rank: int | None = None,
) -> list[float]:
    """Steps from windows of all micro-batches of a rank; their norms."""
    norms, rank = [], dist.get_rank() if rank is None else rank
    for step in steps:
        for part, count in enumerate(counts[rank]):
            ends = part == len(counts[rank]) - 1
            if not sync_each:
                model.set_requires_gradient_sync(ends)
            loss = loss_of(model, step, part, rank, count)
            if weighted:
                optimizer.backward(loss, weight=count, last=last and ends)
                continue
            loss.backward()
            if sync_each or ends:
                optimizer.accumulate(last=last and ends)
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
    return norms


def stock(
    ranks: int,
    make: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    max_norm: float,
    *,
    weighted: bool = True,
    counts: tuple[tuple[int, ...], ...] = COUNTS,
    steps: int = STEPS,
) -> tuple[list[Tensor], list[float], list[Tensor]]:
    """The same in one process, in fp64: parameters, norms, and the gradients of the last step before the clip."""
    model, norms, grads = small_model(torch.float64), [], list[Tensor]()
    optimizer = make(model.parameters())
    for step in range(steps):
        for rank in range(ranks):
            for part, count in enumerate(counts[rank]):
                (loss_of(model, step, part, rank, count, torch.float64) * (count if weighted else 1)).backward()
        divisor = sum(map(sum, counts[:ranks])) if weighted else ranks
        for param in model.parameters():
            param.grad /= divisor
        grads = [param.grad.clone() for param in model.parameters()]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()], norms, grads


def whole(tensor: Tensor) -> Tensor:
    """Of a DTensor, gathered; in memory of its own."""
    given: Any = tensor.detach()
    if not hasattr(given, "full_tensor"):
        return given.clone()  # type: ignore[no-any-return]
    wide = given.to(torch.int32) if given.dtype == torch.int16 else given  # gloo has none of 16 bits
    return wide.full_tensor().to(given.dtype).clone()  # type: ignore[no-any-return]


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def everything_whole(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and states by name, gathered."""
    found = {}
    for index, param in enumerate(params_of(optimizer)):
        found[f"param {index}"] = whole(param)
        for name, value in optimizer.state.get(param, {}).items():
            found[f"{name} {index}"] = whole(value)
    return found


def twin_of(optimizer: Any, **settings: Any) -> tuple[list[nn.Parameter], af.AdamW]:
    """Plain copies of an optimizer's parameters, and an AdamW of them."""
    params = [nn.Parameter(whole(param)) for param in params_of(optimizer)]
    return params, af.AdamW(params, **ADAMW, **settings)


def give_whole_gradients(optimizer: Any, plain: list[nn.Parameter]) -> None:
    """Gathers gradients for the twin."""
    for param, twin in zip(params_of(optimizer), plain, strict=False):  # more may be added later
        twin.grad = None
        twin.grad_dtype = param.grad.dtype
        twin.grad = whole(param.grad)


def adamw(model: nn.Module, **settings: Any) -> af.AdamW:
    return af.AdamW(model.parameters(), **ADAMW, **settings)


def backward(model: Any, step: int = 0, dtype: torch.dtype = torch.float32) -> None:
    loss_of(model, step, 0, dist.get_rank(), 4, dtype).backward()


def assert_unchanged(optimizer: torch.optim.Optimizer, before: dict[str, Tensor]) -> None:
    now = everything_whole(optimizer)
    assert now.keys() == before.keys()
    for name, value in before.items():
        assert_same_bits(now[name], value, name)


class Checks:
    """Functions of a test module that every worker runs, all of them in one go for each number of processes.

    The module has them in `CHECKS`; a test reads what became of one.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._functions: dict[int, dict[str, Callable[[], None]]] = {}
        self._found: dict[int, list[dict[str, str]]] = {}

    def __call__(self, *sizes: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
        """Adds a function, to be run in so many workers."""

        def add(function: Callable[[], None]) -> Callable[[], None]:
            for size in sizes:
                self._functions.setdefault(size, {})[function.__name__] = function
            return function

        return add

    @property
    def every(self) -> list[tuple[int, str]]:
        return [(size, name) for size, functions in self._functions.items() for name in functions]

    def assert_passed(self, size: int, name: str) -> None:
        if size not in self._found:
            if emulation.why_not() is None:
                emulation.load()  # builds it once, and not in every worker
            self._found[size] = processes.run(size, run_checks, self._module, size)
        failed = [f"rank {rank}: {found[name]}" for rank, found in enumerate(self._found[size]) if found[name]]
        assert not failed, "\n".join(failed)

    def run(self, size: int) -> dict[str, str]:
        """In a worker: what each raises, as text; none where it passes."""
        found = {}
        for name, function in self._functions[size].items():
            try:
                function()
                found[name] = ""
            except BaseException:
                found[name] = traceback.format_exc()
        return found


def run_checks(module: str, size: int) -> dict[str, str]:
    checks: Checks = importlib.import_module(module).CHECKS
    return checks.run(size)


def names_of_backends() -> list[str]:
    """In a worker: the backends of this machine; "cuda" is its emulation on the CPU, from here on."""
    if _native.unavailable is not None:
        return ["torch"]
    if emulation.why_not() is not None:
        return ["torch", "cpu"]
    if backends._why_not_cuda.__module__ != __name__:
        emulated: Any = emulation.load()
        select, cuda = backends._select, CudaBackend(emulated, emulated.Table)
        backends._why_not_cuda = _nothing
        backends._select = lambda name, device: cuda if name == "cuda" else select(name, device)
    return ["torch", "cpu", "cuda"]


def _nothing(device: Any) -> None:
    """Stands in the way of the emulation."""
