"""Parameters spread over processes: `fully_shard`, tensor parallelism and DTensors of any placement, over gloo."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import sharded_models as models
import torch
import torch.distributed as dist
from compare import assert_close, assert_same_bits
from sharded_models import mesh_over, names_of_backends, sharded, small_model, train, whole
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import accumfused as af

CHECKS = check = models.Checks(__name__)
MAX_NORM = 0.1
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def adamw(params: Iterable[Tensor], **settings: Any) -> af.AdamW:
    return af.AdamW(params, **OPTIONS, max_grad_norm=MAX_NORM, **settings)


@functools.cache
def expected(ranks: int, weighted: bool = True, counts: Any = models.COUNTS) -> Any:
    def make(params: Iterable[Tensor]) -> torch.optim.AdamW:
        return torch.optim.AdamW(params, **OPTIONS)

    return models.stock(ranks, make, MAX_NORM, weighted=weighted, counts=counts)


def assert_trained(params: Iterable[Tensor], norms: list[float], truth: Any, what: str) -> None:
    """Against stock torch in fp64, and the same on all ranks, bit for bit."""
    found = [whole(param) for param in params]
    for actual, wanted in zip(found, truth[0], strict=True):
        assert_close(actual, wanted, "model", what)
    assert_close(torch.tensor(norms), torch.tensor(truth[1]), "model", f"{what}: norm")
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, ([param.tolist() for param in found], norms))
    assert all(other == every[0] for other in every), f"{what}: ranks differ"


WINDOWS = list(itertools.product([True, False], repeat=3))


@check(2, 4)
def windows_of_fully_shard() -> None:
    for weighted, last, sync_each in WINDOWS if dist.get_world_size() == 2 else WINDOWS[1::3]:
        model = sharded(small_model())
        optimizer = adamw(model.parameters())
        norms = train(model, optimizer, weighted=weighted, last=last, sync_each=sync_each)
        truth = expected(dist.get_world_size(), weighted)
        assert_trained(model.parameters(), norms, truth, f"{weighted=} {last=} {sync_each=}")


@check(4)
def windows_of_hsdp() -> None:
    for weighted, last, sync_each in WINDOWS[::3]:
        model = sharded(small_model(), mesh_over(2, 2))
        optimizer = adamw(model.parameters())
        norms = train(model, optimizer, weighted=weighted, last=last, sync_each=sync_each)
        assert_trained(model.parameters(), norms, expected(4, weighted), f"{weighted=} {last=} {sync_each=}")


@check(2)
def a_rank_with_nothing_in_its_window() -> None:
    counts = ((3, 5), (0, 0))
    for last, weight in itertools.product([True, False], [float, torch.tensor]):
        given = tuple(tuple(weight(count) for count in row) for row in counts)
        model = sharded(small_model())
        optimizer, norms = adamw(model.parameters()), []
        for step in range(models.STEPS):
            for part, count in enumerate(counts[dist.get_rank()]):
                loss = models.loss_of(model, step, part, dist.get_rank(), count)
                optimizer.backward(loss, weight=given[dist.get_rank()][part], last=last and part == 1)
            optimizer.step()
            norms.append(float(optimizer.grad_norm))
        assert_trained(model.parameters(), norms, expected(2, True, counts), f"{last=} {weight=}")


@check(2)
def nothing_anywhere_is_skipped() -> None:
    model = sharded(small_model())
    optimizer = adamw(model.parameters())
    before = models.everything_whole(optimizer)
    for part in range(2):
        optimizer.backward(models.loss_of(model, 0, part, 0, 0), weight=0.0)
    optimizer.step()
    assert int(optimizer.skipped_steps) == 1
    for name, value in before.items():
        assert_same_bits(models.everything_whole(optimizer)[name], value, name)


@check(2)
def every_backend() -> None:
    for backend in names_of_backends():
        model = sharded(small_model())
        optimizer = adamw(model.parameters(), backend=backend)
        norms = train(model, optimizer, last=backend == "cpu")
        assert_trained(model.parameters(), norms, expected(2), backend)


# ---- DTensors of any placement ---------------------------------------------------------------------------------------


def placed(value: Tensor, mesh: Any, *placements: Any) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(value, mesh, list(placements)) if placements else value.clone())


def give_gradients(ours: list[Any], plain: list[Tensor], step: int) -> None:
    """The same random gradients to both, each placed as its parameter."""
    generator = torch.Generator().manual_seed(step)
    for param, twin in zip(ours, plain, strict=True):
        twin.grad = torch.randn(twin.shape, generator=generator).to(twin.dtype)
        mesh = getattr(param, "device_mesh", None)
        param.grad = twin.grad.clone() if mesh is None else distribute_tensor(twin.grad, mesh, param.placements)


def values_of(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@check(2, 4)
def placements_norms_and_clipping() -> None:
    mesh = mesh_over()
    cuts = [(Shard(0),), (Shard(1),), (Replicate(),), (Shard(0),), (Shard(0),), (Replicate(),), (Shard(1),)]
    compare_with_stock([mesh] * 7, cuts, [(6, 5), (6, 5), (6, 5), (1, 3), (5,), (), (3, 2)])


@check(4)
def several_meshes_and_plain_parameters() -> None:
    one, two = mesh_over(4), mesh_over(2, 2)
    meshes = [one, two, two, one, two, two["b"], one]
    cuts = [(Shard(0),), (Shard(0), Shard(1)), (Replicate(), Shard(0)), (), (Shard(0), Shard(0)), (Shard(1),), ()]
    compare_with_stock(meshes, cuts, [(6, 5), (6, 5), (3, 5), (7,), (9, 2), (4, 3), (2, 2)])


def compare_with_stock(meshes: list[Any], cuts: list[tuple[Any, ...]], shapes: list[tuple[int, ...]]) -> None:
    """Params, the norm over the whole in fp64, and the clip, on every backend."""
    for backend in names_of_backends():
        rows = zip(values_of(shapes), meshes, cuts, strict=True)
        ours = [placed(value, mesh, *cut) for value, mesh, cut in rows]
        plain = [nn.Parameter(value.clone()) for value in values_of(shapes)]
        optimizer, stock = adamw(ours, backend=backend), torch.optim.AdamW(plain, **OPTIONS)
        norms, truth = [], []
        for step in range(models.STEPS):
            give_gradients(ours, plain, step)
            squares = sum(param.grad.double().square().sum() for param in plain if param.grad is not None)
            truth.append(float(torch.as_tensor(squares).sqrt()))
            optimizer.step()
            assert optimizer.grad_norm is not None
            norms.append(float(optimizer.grad_norm))
            nn.utils.clip_grad_norm_(plain, MAX_NORM)
            stock.step()
        assert_close(torch.tensor(norms), torch.tensor(truth), "norm", backend)
        assert_trained(ours, norms, (plain, truth), backend)


@check(2, 4)
def tensor_parallelism() -> None:
    model = small_model()
    parallelize_module(model[0], mesh_over(), ColwiseParallel(output_layouts=Replicate()))
    parallelize_module(model[3], mesh_over(), RowwiseParallel(input_layouts=Replicate()))
    for param in model[2].parameters():  # its gradients are the same everywhere, without a word between processes
        assert not isinstance(param, DTensor)
    optimizer = adamw(model.parameters(), grads_are_reduced=True)
    norms = train(model, optimizer, rank=0)
    assert_trained(model.parameters(), norms, expected(1), "tensor parallelism")


@check(4)
def tensor_parallelism_within_fully_shard() -> None:
    mesh = mesh_over(2, 2)
    model = small_model()
    parallelize_module(model[0], mesh["b"], ColwiseParallel(output_layouts=Replicate()))
    parallelize_module(model[3], mesh["b"], RowwiseParallel(input_layouts=Replicate()))
    sharded(model, mesh["a"])
    optimizer = adamw(model.parameters())
    norms = train(model, optimizer, rank=mesh.get_local_rank("a"))
    assert_trained(model.parameters(), norms, expected(2), "fully_shard and tensor parallelism")


# ---- rules and formats, bit for bit ----------------------------------------------------------------------------------

ROWS = [(6, 128), (5, 256), (3, 128), (7,), (2, 5)]
EXACT: dict[str, tuple[Any, torch.dtype, dict[str, Any]]] = {
    "adamw": (af.AdamW, torch.float32, {"lr": 0.1}),
    "amsgrad": (af.Adam, torch.float32, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
    "sgd": (af.SGD, torch.float32, {"lr": 0.1}),
    "momentum": (af.SGD, torch.float32, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "lion": (af.Lion, torch.float32, {"lr": 0.1}),
    "split16": (af.AdamW, torch.bfloat16, {"lr": 0.1}),
    "fp32 masters": (af.Lion, torch.bfloat16, {"lr": 0.1, "master_weights": "fp32"}),
    "fp16": (af.AdamW, torch.float16, {"lr": 0.1}),
    "no masters": (af.AdamW, torch.bfloat16, {"lr": 0.1, "master_weights": None}),
}
INT8 = {"state_dtype": "int8", "state_dtype_min_numel": 0, "rounding_seed": 3}
NOISY: dict[str, tuple[Any, torch.dtype, dict[str, Any]]] = {
    "split8": (af.AdamW, torch.bfloat16, {"lr": 0.1, "master_weights": "split8", "rounding_seed": 3}),
    "stochastic": (
        af.AdamW, torch.bfloat16, {"lr": 0.1, "master_weights": None, "rounding": "stochastic", "rounding_seed": 3}
    ),
    "bf16 states": (af.AdamW, torch.float32, {"lr": 0.1, **INT8, "state_dtype": torch.bfloat16}),
    "int8": (af.AdamW, torch.float32, {"lr": 0.1, **INT8}),
    "int8 of lion, split16": (af.Lion, torch.bfloat16, {"lr": 0.1, **INT8}),
}  # fmt: skip


@check(2)
def rules_and_formats() -> None:
    for name in EXACT:
        assert_bits_of_one_process(*EXACT[name], [Shard(0), Shard(1), Replicate()], name)


@check(2)
def formats_with_noise() -> None:
    for name in NOISY:
        assert_bits_of_one_process(*NOISY[name], [Shard(0), Replicate()], name)


def assert_bits_of_one_process(kind: Any, dtype: torch.dtype, options: Any, cuts: list[Any], what: str) -> None:
    """A parameter of each shape and cut; no norm, whose last bit depends on how it is cut."""
    for backend in names_of_backends() if what in ("adamw", "split16", *NOISY) else ["auto"]:
        shapes = [(shape, cut) for shape in ROWS for cut in cuts if getattr(cut, "dim", 0) < len(shape)]
        if "state_dtype" in options and options["state_dtype"] == "int8":  # others fall back to fp32 states
            shapes = [(shape, cut) for shape, cut in shapes if len(shape) == 2 and shape[1] % 128 == 0]
        values = values_of([shape for shape, _ in shapes], dtype)
        starts = [value.clone() for value in values]
        ours = [placed(value, mesh_over(), cut) for value, (_, cut) in zip(values, shapes, strict=True)]
        plain = [nn.Parameter(value.clone()) for value in values]
        one, other = kind(ours, backend=backend, **options), kind(plain, backend=backend, **options)
        for step in range(models.STEPS):
            give_gradients(ours, plain, step)
            one.step()
            other.step()
        found, truth = models.everything_whole(one), models.everything_whole(other)
        assert found.keys() == truth.keys(), what
        for name in truth:
            assert_same_bits(found[name], truth[name], f"{what}, {backend}, {name}")
        for param, start in zip(plain, starts, strict=True):
            assert not param.numel() or not torch.equal(param, start), f"{what}, {backend}: a parameter did not move"


@check(2)
def states_in_8_bits_fall_back_where_blocks_are_cut() -> None:
    mesh = mesh_over()
    cases = [((4, 128), Shard(0), True), ((4, 128), Shard(1), False), ((4, 64), Shard(0), False),
             ((4, 64), Replicate(), True), ((256,), Shard(0), False)]  # fmt: skip
    for shape, cut, in_8_bits in cases:
        param = placed(*values_of([shape]), mesh, cut)
        optimizer = af.AdamW([param], **INT8)
        param.grad = torch.ones_like(param)
        optimizer.step()
        state = optimizer.state[param]
        assert (state["exp_avg"].dtype == torch.uint8) == in_8_bits, (shape, cut)
        if in_8_bits and cut == Shard(0):
            assert state["exp_avg_scale"].shape == (4, 1)
            assert state["exp_avg_scale"].placements == param.placements


# ---- what tests read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "name"), CHECKS.every)
def test_over_processes(size: int, name: str) -> None:
    CHECKS.assert_passed(size, name)
