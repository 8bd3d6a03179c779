"""Parts of a tensor get the bits of the whole: an element's noise depends on its place there, whatever the backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from compare import assert_same_bits, everything
from table import STATES, WEIGHTS, case_named, random_grads, random_params, set_grads
from test_formats import CHUNK
from torch import Tensor
from triton_interpreter import DEVICE, interpreting

from accumfused import _native, codecs, plan
from accumfused.backends.cpu import CpuBackend
from accumfused.backends.cuda import CudaBackend
from accumfused.backends.reference import ReferenceBackend
from accumfused.rules import RULES
from accumfused.settings import Settings

SIZES = (CHUNK + 4500, 300)
# Where the parts begin: off every boundary, or at a block of states in int8. The second one has two chunks of its own.
CUTS = (0, 1, CHUNK + 3, CHUNK + 4097)
BLOCK_CUTS = (0, codecs.BLOCK, CHUNK + 2 * codecs.BLOCK, CHUNK + 4096 + codecs.BLOCK)

FORMATS = [
    ("split8", "fp32"), ("bf16_stochastic", "fp32"), ("fp16_stochastic", "fp32"), ("fp32", "bf16"), ("split8", "bf16"),
    ("fp32", "int8"), ("split8", "int8"), ("bf16_stochastic", "int8"),
]  # fmt: skip
each_format = pytest.mark.parametrize(("weights", "states"), FORMATS, ids=["-".join(pair) for pair in FORMATS])

INSTRUCTION_SETS = [] if _native._C is None else _native._C.instruction_sets()
GPU = ["cuda"] if torch.cuda.is_available() else []


class Place(NamedTuple):
    backend: Any
    device: str


@pytest.fixture(params=["torch", *INSTRUCTION_SETS, "emulated", *GPU])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Each backend that can run here, and the device of its tensors."""
    name = request.param
    if name == "torch":
        yield Place(ReferenceBackend(), "cpu")
    elif name == "emulated":
        if _native._C is None:
            pytest.skip(_native.unavailable or "")
        machine = request.getfixturevalue("emulated")
        yield Place(CudaBackend(machine, machine.Table), "cpu")
    elif name == "cuda":
        yield Place(CudaBackend(), "cuda")
    else:
        yield Place(CpuBackend(name), "cpu")


@pytest.fixture
def triton_place() -> Iterator[Place]:
    """By itself: its interpreter takes seconds for what others do in milliseconds."""
    with interpreting(), np.errstate(all="ignore"):
        import test_triton  # where Triton cannot run, it skips, and this test with it

        yield Place(test_triton.TritonBackend(), DEVICE)


class Placed:
    """A backend for parts that begin at these elements."""

    def __init__(self, backend: Any, origins: list[int]) -> None:
        self._backend, self._origins = backend, origins

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def prepare(self, plan: Any, param_groups: Any, state: Any) -> None:
        plan.origins = self._origins
        self._backend.prepare(plan, param_groups, state)


class Part(NamedTuple):
    """Elements begin .. end of every tensor: what one of several ranks has. Of some there may be none."""

    begin: int
    end: int

    def of(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor[self.begin : self.end].clone() for tensor in tensors]


def parts(cuts: tuple[int, ...], sizes: tuple[int, ...] = SIZES) -> list[Part]:
    return [Part(begin, end) for begin, end in zip(cuts, (*cuts[1:], max(sizes)), strict=True)]


def run(
    place: Place, weights: str, states: str, part: Part, grad_dtype: torch.dtype = torch.bfloat16, *,
    sizes: tuple[int, ...] = SIZES, origin: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """Two steps, then a window and its step; without clipping, since each part would have a norm of its own.

    Args:
        origin: where the tensors that the parts are cut from begin themselves.
    """
    with torch.device(place.device):
        dtype, options = WEIGHTS[weights]
        whole = [param.detach().to(dtype) for param in random_params([(size,) for size in sizes])]
        params = [param.requires_grad_() for param in part.of(whole)]
        optimizer = case_named("adamw").make(
            params, Placed(place.backend, [origin + min(part.begin, size) for size in sizes]), max_grad_norm=None,
            rounding_seed=17, state_dtype=STATES[states], state_dtype_min_numel=0,
            **options,
        )  # fmt: skip
        for seed in range(2):
            set_grads(params, part.of(random_grads(whole, seed, grad_dtype)))
            optimizer.step()
        optimizer.zero_grad()
        for seed, weight in enumerate((3.0, 0.7, 5.0), start=2):
            set_grads(params, part.of(random_grads(whole, seed, grad_dtype)))
            optimizer.accumulate(weight, last=seed == 4)
        sums = {f"sum {index}": param.grad.detach().clone() for index, param in enumerate(params)}
        optimizer.step()
        return {name: value.cpu() for name, value in (everything(optimizer) | sums).items()}


def run_whole(*args: Any, sizes: tuple[int, ...] = SIZES, **options: Any) -> dict[str, Tensor]:
    """The reference's."""
    weights, states, *rest = args
    return run(Place(ReferenceBackend(), "cpu"), weights, states, Part(0, max(sizes)), *rest, sizes=sizes, **options)


def assert_joined(found: list[dict[str, Tensor]], whole: dict[str, Tensor]) -> None:
    """Whether the parts' numbers, one after the other, are the whole tensors'; each has the step count and the seed."""
    for name, expected in whole.items():
        if expected.dim() == 0:
            assert all(torch.equal(part[name], expected) for part in found), name
        else:
            assert_same_bits(torch.cat([part[name] for part in found]), expected, name)


@each_format
def test_parts_are_rounded_as_the_whole(weights: str, states: str, place: Place) -> None:
    cuts = BLOCK_CUTS if states == "int8" else CUTS
    found = [run(place, weights, states, part) for part in parts(cuts)]
    assert_joined(found, run_whole(weights, states))


@pytest.mark.parametrize("states", ["fp32", "int8"])
def test_beyond_4g_elements_parts_of_whole_chunks_are_rounded_as_the_whole(states: str, place: Place) -> None:
    """Across the boundary, behind which noise has another key."""
    options: dict[str, Any] = {"sizes": (CHUNK + 130,), "origin": 2**33 - CHUNK}
    found = [run(place, "split8", states, part, **options) for part in parts((0, CHUNK), options["sizes"])]
    assert_joined(found, run_whole("split8", states, **options))


@pytest.mark.parametrize("origin", [2**32 - 5, 2**40 + 2**32 - 5 - CHUNK])
def test_a_chunk_across_4g_elements_is_rounded_as_by_the_reference(origin: int, place: Place) -> None:
    sizes = (CHUNK + 130,)
    options: dict[str, Any] = {"sizes": sizes, "origin": origin}
    found = run(place, "split8", "bf16", Part(0, max(sizes)), **options)
    assert_joined([found], run_whole("split8", "bf16", **options))


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # as in test_triton.py
@pytest.mark.parametrize(("weights", "states"), [("split8", "int8"), ("fp16_stochastic", "bf16")])
def test_parts_are_rounded_as_the_whole_in_triton(weights: str, states: str, triton_place: Place) -> None:
    options: dict[str, Any] = {
        "sizes": (CHUNK + 4500,), "origin": 2**32 - CHUNK
    }  # fmt: skip
    found = [run(triton_place, weights, states, part, **options) for part in parts((0, CHUNK), options["sizes"])]
    assert_joined(found, run_whole(weights, states, **options))


# ---- the noise itself -----------------------------------------------------------------------------------------------

KEY = codecs.key(torch.tensor(5), torch.tensor(7), 11)


@pytest.mark.parametrize("begin", [0, 1, 4097, CHUNK + 3, 2 * CHUNK])
def test_noise_of_a_part_is_that_of_its_elements_in_the_whole(begin: int) -> None:
    whole = codecs.noise(KEY, 3 * CHUNK)
    assert torch.equal(codecs.noise(KEY, 3 * CHUNK - begin, begin), whole[begin:])
    assert torch.equal(codecs.noise(KEY, 5, begin), whole[begin : begin + 5])


def test_a_chunk_keeps_the_key_of_its_first_element() -> None:
    found = codecs.noise(KEY, CHUNK + 100, 2**32 - 5)
    assert torch.equal(found[5:CHUNK], codecs.noise(KEY, CHUNK - 5))
    assert torch.equal(found[CHUNK:], codecs.noise(KEY ^ 1, CHUNK + 95)[CHUNK - 5 :])
    assert torch.equal(codecs.noise(KEY, 100, 2**32 + 7), codecs.noise(KEY ^ 1, 107)[7:])


@pytest.mark.parametrize("numel", [0, 1, CHUNK, CHUNK + 1])
def test_there_is_noise_for_every_element(numel: int) -> None:
    assert codecs.noise(KEY, numel, 3).shape == (numel,)


# ---- these tests bite -----------------------------------------------------------------------------------------------


@each_format
def test_another_origin_gives_other_bits(weights: str, states: str) -> None:
    one, other = (run_whole(weights, states, origin=origin, sizes=(3000,)) for origin in (0, codecs.BLOCK))
    with pytest.raises(AssertionError):
        assert_joined([one], other)


def test_a_plan_is_of_whole_tensors() -> None:
    params = random_params([(3,), (0,), (CHUNK + 1,)])
    assert plan.build([{"params": params}], {}, [RULES[0]], Settings()).origins == [0, 0, 0]
