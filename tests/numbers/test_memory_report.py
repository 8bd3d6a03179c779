"""The memory report counts the bytes of every tensor, and announces those that the first step will make."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from compare import params_of
from models import Model, build, grads_of, train, trained
from table import STATES, WEIGHTS, Own
from torch import Tensor
from torch.nn import Parameter

import accumfused as af
from accumfused.loop.report import PARTS
from accumfused.warn import say_once

ELEMENTS = 37 * 11 + 130 + 1 + 6 * 4 * 3 * 2
OF_A_MASTER = {"split16": 2, "split8": 1, "fp16_master": 4}


def bytes_of_states(optimizer: Any) -> int:
    return sum(v.nbytes for entries in optimizer.state.values() for v in entries.values() if isinstance(v, Tensor))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("states", STATES)
def test_the_first_step_makes_the_bytes_that_the_report_announces(backend: str, weights: str, states: str) -> None:
    _, optimizer = build(weights, states, backend, state_dtype_min_numel=130)  # the vector's
    before, said = af.memory_report(optimizer).total, str(af.memory_report(optimizer))
    assert said.endswith(f"\n{before.not_made:,} B of masters and states will be made by the first step.")
    train(optimizer, 1)
    total = af.memory_report(optimizer).total
    assert (total.parts, total.not_made) == (before.parts, 0)
    assert "will be made" not in str(af.memory_report(optimizer))
    assert (total.tensors, total.elements) == (4, ELEMENTS)
    assert before.not_made == sum(total.parts[part] for part in PARTS[1:4]) == bytes_of_states(optimizer)
    assert total.parts["parameters"] == sum(param.nbytes for param in params_of(optimizer))
    assert total.parts["masters"] == OF_A_MASTER.get(weights, 0) * ELEMENTS
    assert total.parts["scales"] == (2 * (4 + 2 + 2) if states == "8bit" else 0)  # the scalar's states are fp32


def test_gradients_and_accumulators_are_counted_as_they_are_now(backend: str) -> None:
    def parts() -> list[int]:
        return [af.memory_report(optimizer).total.parts[part] // ELEMENTS for part in PARTS[4:]]

    for weights, arena in (("split16", 4), ("fp32", 0)):
        _, optimizer = trained(weights, "fp32", backend)
        found = []
        for last in (False, True):
            grads_of(optimizer, 0, torch.bfloat16 if arena else None)
            found.append(parts())
            optimizer.accumulate(1.0, last=last)
            found.append(parts())  # p.grad of a closed window is the accumulator
        size = 2 if arena else 4
        assert found == [[0, size], [4, 0], [4, size], [4, 0]]
        optimizer.step()
        assert parts() == [arena, 0]  # which 16-bit gradients are summed in; others are adopted


def test_frozen_and_empty_parameters_and_those_of_other_steps_are_counted(backend: str) -> None:
    frozen = [Parameter(torch.zeros(10, dtype=dtype), requires_grad=False) for dtype in (torch.float32, torch.float64)]
    report = af.memory_report(af.AdamW(frozen, backend=backend))
    assert report.as_dict()["total"]["total"] == 120
    assert list(report.formats) == ["fp32, fp32 states", "fp64, fp64 states"]
    optimizer = af.fuse(Own(Model(torch.bfloat16).parameters()), backend=backend)
    holes = af.AdamW([torch.zeros(99, 99).bfloat16()[:, ::2].requires_grad_()], backend=backend, state_dtype="8bit")
    for steps, each in ((0, optimizer), (1, optimizer), (1, holes)):
        train(each, steps)
        total = af.memory_report(each).total
        assert (sum(total.parts[part] for part in PARTS[1:4]), total.not_made) == (bytes_of_states(each), 0)
    assert list(af.memory_report(optimizer).formats) == ["bf16, its own states"]
    empty = af.memory_report(af.SGD([Parameter(torch.zeros(0))], backend=backend))
    assert str(empty).splitlines()[1].split() == ["fp32,", "no", "states", "1", "0", *"-------", "0.00"]


TABLE = """\
                              tensors   elements  parameters  masters    states    scales  accumulators  gradients     total  bytes/element
bf16 + split16, 8-bit states        1  1,048,576     2.0 MiB  2.0 MiB   2.0 MiB  16.0 KiB             -          -   6.0 MiB           6.02
bf16 + split16, fp32 states         2      2,048     4,096 B  4,096 B  16.0 KiB         -             -          -  24.0 KiB          12.00
total                               3  1,050,624     2.0 MiB  2.0 MiB   2.0 MiB  16.0 KiB             -          -   6.0 MiB           6.03
"""  # noqa: E501


def test_the_table_and_the_dictionary(backend: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False), torch.nn.LayerNorm(1024)).bfloat16()
    optimizer = af.AdamW(model.parameters(), backend=backend, state_dtype="8bit")
    train(optimizer, 1)
    report = af.memory_report(optimizer)
    assert f"{report}\n" == TABLE
    sizes = dict(zip(PARTS, (2**21, 2**21, 2**21 + 12, 2**14, 0, 0), strict=True))
    assert json.loads(json.dumps(report.as_dict()))["formats"]["bf16 + split16, 8-bit states"] == {
        "tensors": 1, "elements": 2**20, **sizes, "total": sum(sizes.values()),
        "bytes_per_element": sum(sizes.values()) / 2**20, "not_made_yet": 0, "kept_for_the_next_window": 0,
        "on_host": 0,
    }  # fmt: skip


def fuse_and_hear(caplog: pytest.LogCaptureFixture, optimizer: torch.optim.Optimizer, **settings: Any) -> str:
    """The log of converting an optimizer."""
    say_once.cache_clear()
    caplog.clear()
    af.fuse(optimizer, backend="reference", **settings)
    return caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scalars", [0, 32])  # in which step counts and seeds show
@pytest.mark.parametrize(("name", "options"), [
    ("AdamW", {}), ("AdamW", {"amsgrad": True}), ("SGD", {}), ("SGD", {"momentum": 0.9}),
], ids=str)  # fmt: skip
def test_bytes_that_grow_are_told_and_right(
    caplog: Any, name: str, options: dict[str, Any], scalars: int, dtype: torch.dtype
) -> None:
    params = [Parameter(torch.ones(shape, dtype=dtype)) for shape in ((64, 128), *[()] * scalars)]

    def kept(optimizer: torch.optim.Optimizer) -> str:
        train(optimizer, 1)
        return f"{(sum(p.nbytes for p in params) + bytes_of_states(optimizer)) / (2**13 + scalars):.2f}"

    stock, fused, other, plain = (getattr(torch.optim, name)(params, lr=0.1, **options) for _ in range(4))
    said = fuse_and_hear(caplog, fused)
    if dtype == torch.float16 and (name, options) == ("SGD", {}):
        assert said == ""  # there is no smaller master
        return
    arguments, least = re.search(r"; an open window adds 4\. (.*) takes (.*?)\. ", said).groups()  # type: ignore[union-attr]
    assert f"will take {kept(fused)} bytes each (" in said
    assert f"where torch's optimizer takes {kept(plain)} (" in said
    assert fuse_and_hear(caplog, other, **eval(f"dict({arguments})")) == ""
    assert kept(other) == least
    is_bound = dtype == torch.bfloat16 and not scalars
    assert float(least) <= float(kept(stock)) or (not is_bound and float(least) < float(kept(fused)))


def test_a_setting_that_serves_bf16_and_fp16_is_named_for_both(caplog: Any) -> None:
    params = [Parameter(torch.ones(64, 128, dtype=dtype)) for dtype in (torch.bfloat16, torch.float16)]
    said = fuse_and_hear(caplog, torch.optim.AdamW(params))
    assert said.endswith("4. state_dtype='8bit' takes 7.02\n")


def test_bytes_that_do_not_grow_or_were_chosen_are_not_told(caplog: Any) -> None:
    full, half = (Parameter(torch.ones(64, 128, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    frozen, empty = Parameter(half.detach().clone(), requires_grad=False), Parameter(torch.ones(0).bfloat16())
    assert fuse_and_hear(caplog, torch.optim.AdamW([full, frozen, empty])) == ""
    assert fuse_and_hear(caplog, Own([half])) == ""
    assert fuse_and_hear(caplog, torch.optim.AdamW([half]), master_weights="split16") == ""
    said = fuse_and_hear(caplog, torch.optim.AdamW([half, full]))
    assert said.count("Pass master_weights='split16' to keep this and silence the line\n") == said.count("\n") == 1
