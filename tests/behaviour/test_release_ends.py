"""Gradient release: backward passes that fail, copies, and the way it ends; other processes."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from snapshot import refused, writes_nothing
from test_release_calls import every_bucket, loss_of, two, values
from torch import Tensor, nn
from torch import distributed as dist

import accumfused as af
from accumfused.accumulation import Phase

# ---- a backward that fails ------------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise MemoryError("there is no more")


@every_bucket
@pytest.mark.parametrize("how", ["loss.backward", "optimizer.backward"])
@pytest.mark.parametrize("verb", ["accumulate", "step", "backward"])
def test_a_backward_that_fails_midway_is_not_counted(backend: str, bucket: int, how: str, verb: str) -> None:
    a, b = params = [nn.Parameter(torch.full((4,), 8.0)) for _ in range(2)]
    optimizer = af.SGD(params, lr=0.5, backend=backend)
    af.release_gradients(optimizer, bucket)
    optimizer.backward(loss_of(params, 50.0))
    x = Fails.apply(a) * b  # b's gradient comes first
    with pytest.raises(MemoryError):
        x.sum().backward() if how == "loss.backward" else optimizer.backward(x.sum())
    loss_of(params).backward()  # a retry, without having dropped the part
    with refused(optimizer, RuntimeError, r"ended early, by an exception.*call optimizer\.zero_grad\(\)"):
        optimizer.backward(loss_of(params)) if verb == "backward" else getattr(optimizer, verb)()
    optimizer.zero_grad()
    optimizer.backward(loss_of(params))
    optimizer.step()
    assert values(params) == [7.5, 7.0]


@pytest.mark.parametrize("entered", [False, True])
def test_an_exception_in_the_block_ends_the_release_in_any_case(backend: str, entered: bool) -> None:
    params, optimizer, release = two(backend)
    optimizer.backward(loss_of(params))

    def interrupted() -> None:
        with release:
            if entered:
                loss_of(params, 100.0).backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert optimizer._runtime.window.phase is (Phase.IDLE if entered else Phase.OPEN)
    loss_of(params).backward()
    assert values([param.grad for param in params]) == [1.0, 2.0]
    optimizer.accumulate()
    optimizer.step()
    assert values(params) == ([7.5, 7.0] if entered else [7.0, 6.0])


# ---- saving and copies ----------------------------------------------------------------------------------------------

SAVES = {"state_dict": lambda optimizer: optimizer.state_dict(), "deepcopy": copy.deepcopy, "pickle": pickle.dumps}


@every_bucket
@pytest.mark.parametrize("how", SAVES)
def test_a_part_of_a_micro_batch_is_not_saved(backend: str, bucket: int, how: str) -> None:
    params, optimizer, _ = two(backend, bucket)
    loss_of(params).backward()
    with refused(optimizer, RuntimeError, r"a micro-batch is in progress.*call accumulate\(\)"):
        SAVES[how](optimizer)
    optimizer.accumulate()
    SAVES[how](optimizer)


def test_a_window_that_is_saved_between_micro_batches_goes_on_elsewhere(backend: str) -> None:
    params, optimizer, _ = two(backend)
    optimizer.backward(loss_of(params), 3)
    saved = copy.deepcopy(optimizer.state_dict())
    others, other, _ = two(backend)
    other.load_state_dict(saved)
    other.backward(loss_of(others, 5.0), 1)
    other.step()
    assert values(others) == [8 - 0.5 * 2, 8 - 0.5 * 4]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_do_not_release(backend: str, how: str) -> None:
    params, optimizer, _ = two(backend)
    optimizer.backward(loss_of(params))
    twin = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    copies = twin.param_groups[0]["params"]
    loss_of(copies).backward()
    assert values([param.grad for param in copies]) == [1.0, 2.0]
    twin.accumulate()
    twin.step()
    assert values(copies) == [7.0, 6.0]
    af.release_gradients(twin)
    with writes_nothing(optimizer):
        loss_of(copies).backward()
        twin.step()


def test_an_optimizer_that_is_gone_takes_its_hooks_along(backend: str) -> None:
    params, optimizer, release = two(backend)
    loss_of(params).backward()
    gone = weakref.ref(optimizer), weakref.ref(release)
    del optimizer, release
    gc.collect()
    assert [each() for each in gone] == [None, None]
    loss_of(params).backward()
    assert values([param.grad for param in params]) == [1.0, 2.0]
    af.release_gradients(af.SGD(params, lr=0.5, backend=backend))


def test_parameters_that_are_gone_are_not_kept(backend: str) -> None:
    params, optimizer, release = two(backend)
    gone = [weakref.ref(param) for param in params]
    loss_of(params).backward()
    optimizer.step()
    del params, optimizer, release
    gc.collect()
    assert [each() for each in gone] == [None, None]


# ---- several processes ----------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Mine(nn.parallel.DistributedDataParallel):
    pass


@pytest.mark.parametrize("kind", [nn.parallel.DistributedDataParallel, Mine])
def test_a_model_in_ddp_is_refused(group: None, kind: Any) -> None:
    model, other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), nn.Linear(3, 4)
    wrapped = kind(model)
    optimizer = af.SGD([model[1].bias], lr=0.1)
    with refused(optimizer, RuntimeError, rf"belongs to {kind.__name__}, .*would reduce zeros"):
        af.release_gradients(optimizer)
    af.release_gradients(af.SGD(other.parameters(), lr=0.1))  # not in it
    wrapped(torch.ones(2, 3)).sum().backward()
    assert model[1].bias.grad.tolist() == [2.0]


@every_bucket
@pytest.mark.parametrize("when", ["at once", "after a window"])
def test_a_model_that_comes_into_ddp_later_is_refused_in_backward(group: None, bucket: int, when: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = af.SGD(model.parameters(), lr=0.1)
    release = af.release_gradients(optimizer, bucket)
    if when == "after a window":
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    wrapped = nn.parallel.DistributedDataParallel(model)
    loss = wrapped(torch.ones(2, 3)).sum()
    with refused(optimizer, RuntimeError, r"belongs to DistributedDataParallel, .*Call remove\(\)"):
        loss.backward()
    assert all(param.grad is None for param in model.parameters())
    release.remove()
    again = nn.parallel.DistributedDataParallel(model)  # the old one's backward was cut short
    again(torch.ones(2, 3)).sum().backward()
    assert model.bias.grad.tolist() == [2.0]


def test_without_ddp_a_process_group_is_no_obstacle(group: None) -> None:
    params, optimizer, _ = two("torch")
    loss_of(params).backward()
    optimizer.step()
    assert values(params) == [7.5, 7.0]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["fully_shard", "FullyShardedDataParallel"])
def test_fsdp_is_refused(group: None, kind: str) -> None:
    from torch.distributed import fsdp
    from torch.distributed.tensor import init_device_mesh

    model: nn.Module = nn.Linear(3, 1)
    if kind == "fully_shard":
        fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    else:
        model = fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    optimizer = af.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="DTensor" if kind == "fully_shard" else kind):
        af.release_gradients(optimizer)
    assert optimizer._runtime.release is None
