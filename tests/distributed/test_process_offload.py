"""offload=True in several processes: their sums are added up on the host, with the bits of sums on the card."""

from __future__ import annotations

import contextlib
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from compare import everything, params_of
from spread import Net, loss_of, sharded
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import accumfused as af
from accumfused.backends import offload


def trained(offloads: bool, settings: dict[str, Any], attaches: bool) -> dict[str, Tensor]:
    """In a worker: what there is after windows of unequal weights, released gradients among them."""
    offload.RUN_BYTES = 64
    model: Any = Net(torch.bfloat16)
    group = {} if attaches else {"process_group": dist.group.WORLD}
    optimizer = af.AdamW(model.parameters(), lr=0.1, max_grad_norm=0.3, offload=offloads, **group, **settings)
    if attaches:
        ddp = DistributedDataParallel(model)
        af.attach_ddp(ddp, optimizer)
        model = ddp
    rank = dist.get_rank()
    for window in range(3):
        for number, weight in enumerate((3.0, 1.0 + rank)):
            with model.no_sync() if attaches else contextlib.nullcontext():
                seed, uses_all = 10 * window + 2 * number + rank, rank == 0 or number == 0
                loss_of(model, 4, seed, uses_all, torch.bfloat16).backward()  # type: ignore[no-untyped-call]
            optimizer.accumulate(weight, last=window == 1 and number == 1)
        optimizer.step()
    assert all(param.isfinite().all() for param in params_of(optimizer))
    return everything(optimizer) | {"norm": optimizer.grad_norm}


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "8 bits": {"state_dtype": "8bit", "state_dtype_min_numel": 2, "master_weights": None, "rounding_seed": 3},
    "sums in bf16": {"sum_dtype": torch.bfloat16, "rounding_seed": 3},
}  # fmt: skip


@pytest.mark.parametrize("attaches", [False, True], ids=["process_group", "attached"])
@pytest.mark.parametrize("name", SETTINGS)
def test_processes_that_offload_have_the_bits_of_others(name: str, attaches: bool) -> None:
    found = processes.agreed(2, trained, True, SETTINGS[name], attaches)
    expected = processes.agreed(2, trained, False, SETTINGS[name], attaches)
    assert found.keys() == expected.keys()
    assert not [key for key, value in expected.items() if not torch.equal(found[key].nan_to_num(), value.nan_to_num())]


def refused() -> str:
    """In a worker: the refusal of parameters that are spread over processes."""
    model = sharded(Net())
    with pytest.raises(ValueError, match="one is spread over processes") as refusal:
        af.AdamW(model.parameters(), offload=True)
    return str(refusal.value)


def test_spread_parameters_are_refused() -> None:
    assert "takes whole parameters" in processes.agreed(2, refused)
