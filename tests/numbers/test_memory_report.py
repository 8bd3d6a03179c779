"""The memory report against what the tensors themselves say."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from stored import Model, build, grads_of, train, trained
from table import STATES, WEIGHTS
from torch import Tensor
from torch.nn import Parameter

import accumfused as af
from accumfused.memory_report import PARTS
from accumfused.warn import say_once

ELEMENTS = 37 * 11 + 130 + 1 + 6 * 4 * 3 * 2


def bytes_of_states(optimizer: Any) -> int:
    return sum(v.nbytes for entries in optimizer.state.values() for v in entries.values() if isinstance(v, Tensor))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("states", STATES)
def test_what_will_be_made_is_what_is_made(backend: str, weights: str, states: str) -> None:
    model, optimizer = build(weights, states, backend, state_dtype_min_numel=100)
    before = af.memory_report(optimizer)
    assert before.total.not_made > 0
    assert f"{before.total.not_made:,} B of masters and states will be made by the first step." in str(before)
    train(optimizer, 1)
    after = af.memory_report(optimizer)
    assert after.total.not_made == 0
    assert "will be made" not in str(after)
    assert {name: memory.parts for name, memory in before.formats.items()} == {
        name: memory.parts for name, memory in after.formats.items()
    }
    total = after.total
    assert before.total.not_made == total.parts["masters"] + total.parts["states"] + total.parts["scales"]
    assert before.total.not_made == bytes_of_states(optimizer)
    assert (total.tensors, total.elements) == (4, ELEMENTS)
    assert total.parts["parameters"] == sum(param.nbytes for param in model.parameters())
    of_an_element = {"split16": 2, "split8": 1, "bf16_master": 4, "fp16_master": 4}.get(weights, 0)
    assert total.parts["masters"] == of_an_element * ELEMENTS
    assert total.parts["scales"] == (2 * (4 + 2 + 2) if states == "int8" else 0)  # the scalar's states are fp32


def test_states_of_a_parameter_with_holes_in_memory_are_made_once(backend: str) -> None:
    param = Parameter(torch.zeros(100, 100, dtype=torch.bfloat16)[:, ::2])
    optimizer = af.AdamW([param], backend=backend, state_dtype="int8")
    train(optimizer, 1)
    memory = af.memory_report(optimizer).total
    assert memory.not_made == 0
    assert sum(memory.parts[part] for part in ("masters", "states", "scales")) == bytes_of_states(optimizer)


def test_the_names_of_the_formats(backend: str) -> None:
    def names(weights: str, states: str, cls: Any = af.AdamW) -> list[str]:
        return list(af.memory_report(build(weights, states, backend, cls=cls, state_dtype_min_numel=100)[1]).formats)

    assert names("split16", "fp32") == ["bf16 + split16, fp32 states"]
    assert names("fp32", "int8") == ["fp32, int8 states", "fp32, fp32 states"]
    assert names("bf16_stochastic", "bf16")[0] == "bf16 stochastic, bf16 states"
    assert names("fp16_master", "bf16")[0] == "fp16 + fp32 master, bf16 states"
    assert names("split8", "int8", af.SGD) == ["bf16 + split8, no states"]
    stock = af.fuse(torch.optim.RMSprop(Model(torch.bfloat16).parameters()), backend=backend)
    assert list(af.memory_report(stock).formats) == ["bf16, its own states"]


def test_gradients_and_accumulators_are_those_of_now(backend: str) -> None:
    def parts() -> tuple[int, int]:
        found = af.memory_report(optimizer).total.parts
        return found["accumulators"], found["gradients"]

    _, optimizer = trained("split16", "fp32", backend)
    assert parts() == (0, 0)
    grads_of(optimizer, 0)
    assert parts() == (0, 2 * ELEMENTS)
    optimizer.accumulate(1.0)
    assert parts() == (4 * ELEMENTS, 0)
    grads_of(optimizer, 1)
    assert parts() == (4 * ELEMENTS, 2 * ELEMENTS)
    optimizer.accumulate(1.0, last=True)
    assert parts() == (4 * ELEMENTS, 0)  # p.grad is the accumulator
    optimizer.step()
    assert parts() == (4 * ELEMENTS, 0)  # 16-bit gradients are summed in an arena, which is kept for the next window
    _, optimizer = trained("fp32", "fp32", backend)
    grads_of(optimizer, 0)
    optimizer.accumulate(1.0)
    assert parts() == (4 * ELEMENTS, 0)
    optimizer.step()
    assert parts() == (0, 0)  # these were adopted


def test_a_frozen_parameter_will_have_no_state(backend: str) -> None:
    frozen = Parameter(torch.zeros(10), requires_grad=False)
    double = Parameter(torch.zeros(10, dtype=torch.float64), requires_grad=False)
    report = af.memory_report(af.AdamW([frozen, double], backend=backend))
    assert report.as_dict()["total"]["total"] == 120
    assert list(report.formats) == ["fp32, fp32 states", "float64, fp32 states"]


def test_of_an_optimizer_without_kernels_the_states_of_now_count(backend: str) -> None:
    optimizer = af.fuse(torch.optim.RMSprop(Model(torch.bfloat16).parameters()), backend=backend)
    assert af.memory_report(optimizer).total.parts["states"] == 0
    assert af.memory_report(optimizer).total.not_made == 0
    train(optimizer, 1)
    assert af.memory_report(optimizer).total.parts["states"] == bytes_of_states(optimizer)


def test_the_table_and_the_dictionary() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False), torch.nn.LayerNorm(1024)).bfloat16()
    optimizer = af.AdamW(model.parameters(), backend="torch", state_dtype="int8")
    train(optimizer, 1)
    report = af.memory_report(optimizer)
    assert str(report).splitlines() == [
        "                             tensors   elements  parameters  masters    states    scales"
        "  accumulators  gradients     total  bytes/element",
        "bf16 + split16, int8 states        1  1,048,576     2.0 MiB  2.0 MiB   2.0 MiB  16.0 KiB"
        "             -          -   6.0 MiB           6.02",
        "bf16 + split16, fp32 states        2      2,048     4,096 B  4,096 B  16.0 KiB         -"
        "             -          -  24.0 KiB          12.00",
        "total                              3  1,050,624     2.0 MiB  2.0 MiB   2.0 MiB  16.0 KiB"
        "             -          -   6.0 MiB           6.03",
    ]
    plain = report.as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["formats"]["bf16 + split16, int8 states"] == {
        "tensors": 1, "elements": 2**20, "parameters": 2**21, "masters": 2**21, "states": 2**21 + 12, "scales": 2**14,
        "accumulators": 0, "gradients": 0, "total": 3 * 2**21 + 2**14 + 12,
        "bytes_per_element": (3 * 2**21 + 2**14 + 12) / 2**20, "not_made_yet": 0,
    }  # fmt: skip
    assert plain["total"]["total"] == sum(plain["total"][part] for part in PARTS)


def test_an_optimizer_without_parameters_that_take_anything() -> None:
    report = af.memory_report(af.SGD([torch.nn.Parameter(torch.zeros(0))], lr=0.1, backend="torch"))
    assert report.total.per_element == 0.0
    assert str(report).splitlines()[1].split() == ["fp32,", "no", "states", "1", "0", *"-------", "0.00"]


def test_another_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes an optimizer of this package, got SGD; fuse\(\) it"):
        af.memory_report(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))  # type: ignore[arg-type]


# ---- what fuse() says of it ---------------------------------------------------------------------------------------


def fuse_and_hear(caplog: pytest.LogCaptureFixture, optimizer: torch.optim.Optimizer, **settings: Any) -> str:
    """The log of converting an optimizer."""
    say_once.cache_clear()
    caplog.clear()
    af.fuse(optimizer, backend="torch", **settings)
    return caplog.text


STOCK: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "SGD": (torch.optim.SGD, {}),
    "SGD, momentum": (torch.optim.SGD, {"momentum": 0.9}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", STOCK)
def test_bytes_that_grow_are_told_and_right(caplog: pytest.LogCaptureFixture, name: str, dtype: torch.dtype) -> None:
    make, options = STOCK[name]
    params = [Parameter(torch.ones(64, 128, dtype=dtype)) for _ in range(2)]
    elements = sum(param.numel() for param in params)

    def kept(optimizer: torch.optim.Optimizer) -> str:
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        own = sum(param.nbytes for param in params) + bytes_of_states(optimizer)
        return f"{own / elements:.2f}"

    stock = kept(make(params, **options))
    said = fuse_and_hear(caplog, make(params, **options))
    arguments, least = re.search(r"; an open window adds 4\. (.*) takes (.*?)\. ", said).groups()  # type: ignore[union-attr]
    assert f"where torch's optimizer takes {stock} (" in said
    assert f"will take {kept(af.fuse(make(params, **options)))} bytes each (" in said
    settings = eval(f"dict({arguments})")
    fused = make(params, **options)
    assert fuse_and_hear(caplog, fused, **settings) == ""
    assert kept(fused) == least
    assert float(least) <= float(stock)


def test_bytes_that_do_not_grow_or_were_chosen_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    full, half = (Parameter(torch.ones(64, 128, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    frozen = Parameter(half.detach().clone(), requires_grad=False)
    empty = Parameter(torch.ones(0, dtype=torch.bfloat16))
    assert fuse_and_hear(caplog, torch.optim.AdamW([full, frozen, empty])) == ""
    assert fuse_and_hear(caplog, torch.optim.RMSprop([half])) == ""
    assert fuse_and_hear(caplog, torch.optim.AdamW([half]), master_weights="split16") == ""
    said = fuse_and_hear(caplog, torch.optim.AdamW([half, full]))
    assert "master_weights='split16' keeps what it is, without this line" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("weights", ["split16", "fp32"])
def test_a_picture(tmp_path: Path, weights: str) -> None:
    pytest.importorskip("matplotlib")
    _, optimizer = trained(weights, "int8", "torch", state_dtype_min_numel=100)
    af.memory_report(optimizer).plot(tmp_path / "memory.svg")
    text = (tmp_path / "memory.svg").read_text()
    assert "<svg" in text
    af.memory_report(optimizer).plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = trained("split16", "fp32", "torch")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"matplotlib, which does not load: .*pip install matplotlib"):
        af.memory_report(optimizer).plot(tmp_path / "memory.png")
