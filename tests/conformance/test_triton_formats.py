"""Parameters, states and accumulators in fewer bits: the Triton kernels store the bits of the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import test_layouts
import test_triton  # first: it imports the kernels to be interpreted
import torch
from compare import everything
from table import STATES, WEIGHTS, Case, case_named, random_grads, random_params, set_grads
from test_formats import GRADS, RULES, assert_agree, make, run
from torch import Tensor
from triton_interpreter import DEVICE, interpreting

from accumfused import codecs
from accumfused.backends import triton as backend
from accumfused.backends.reference import ReferenceBackend
from accumfused.backends.triton import TritonBackend
from accumfused.backends.triton_formats import INT8_STATES, store_state
from accumfused.numeric import CHUNK
from accumfused.triton_codecs import noise, noise_keys

pytestmark = test_triton.pytestmark
_interpreted = test_triton._interpreted
triton, tl = test_triton.triton, test_triton.tl

PIECE = 2048  # goes as a whole where it is aligned
SIZES = (0, 3, 128, PIECE + 129)


def run_both(run: Callable[[Any, str], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Compares what `run(backend, device)` finds with the reference's, on the CPU, and returns that."""
    actual, expected = run(TritonBackend(), DEVICE), run(ReferenceBackend(), "cpu")
    assert_agree({name: value.cpu() for name, value in actual.items()}, expected)
    return expected


def compare(rule: str, weights: str, states: str, grad: torch.dtype, sizes: Any = SIZES, **settings: Any) -> None:
    def train(backend: Any, device: str) -> dict[str, Tensor]:
        with torch.device(device):
            return run(case_named(rule), backend, weights, states, grad, sizes, **settings)

    run_both(train)


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_format_gives_the_reference_bits(weights: str, states: str) -> None:
    """With one of the rules and of the gradients' dtypes each; every rule has int8 states once."""
    number = list(WEIGHTS).index(weights) + list(STATES).index(states)
    compare(RULES[number % len(RULES)], weights, states, GRADS[number % len(GRADS)])


def test_noise_and_scales_go_on_in_the_next_chunk() -> None:
    compare("adamw", "split8", "int8", torch.bfloat16, (5, CHUNK + 130))


@pytest.mark.parametrize("place_param", [test_layouts.misaligned, test_layouts.same], ids=["parameter", "gradient"])
def test_misaligned_tensors_give_the_reference_bits(place_param: Any) -> None:
    place_grad = test_layouts.same if place_param is test_layouts.misaligned else test_layouts.misaligned
    case = case_named("adamw_amsgrad")

    def train(backend: Any, device: str) -> dict[str, Tensor]:
        param = place_param(random_params([(PIECE + 7,)])[0].detach().bfloat16().to(device)).requires_grad_()
        optimizer = case.make(
            [param], backend, master_weights="split8", state_dtype="int8", state_dtype_min_numel=1, rounding_seed=3,
        )  # fmt: skip
        for step in range(2):
            for seed in range(2):
                (grad,) = random_grads([param], 2 * step + seed, torch.bfloat16)
                param.grad = place_grad(grad.to(device))
                optimizer.accumulate(3.0 - seed)
            optimizer.step()
        return everything(optimizer)

    run_both(train)


@pytest.mark.parametrize("weights", [name for name in WEIGHTS if name != "fp32"])
def test_every_16_bit_parameter_is_read_and_rounded(weights: str) -> None:
    """Zeros, subnormals, infinities and NaN among them; updates of about half a unit."""
    dtype, options = WEIGHTS[weights]
    bits = torch.arange(2**16, dtype=torch.int32)
    values = bits.to(torch.int16).view(dtype)
    neighbours = (bits + 1).to(torch.int16).view(dtype)
    grad = (neighbours.float() - values.float()) * torch.rand(len(bits), generator=torch.Generator().manual_seed(4))

    def train(backend: Any, device: str) -> dict[str, Tensor]:
        param = values.to(device).clone().requires_grad_()
        sgd = Case("", case_named("sgd").of, {"lr": 1.0})
        optimizer = sgd.make([param], backend, nonfinite="propagate", rounding_seed=5, **options)
        set_grads([param], [grad.to(device)])
        optimizer.step()
        return everything(optimizer)

    found = run_both(train)
    moved = found["param 0"].isfinite() & (found["param 0"] != values)
    assert moved.sum() > 1000 or "split" in weights or weights.endswith("master")


@pytest.mark.parametrize("weights", [name for name in WEIGHTS if "split" in name or "master" in name])
def test_every_16_bit_parameter_that_is_written_from_outside_counts(weights: str) -> None:
    """Each beside what another one lacked."""
    dtype, options = WEIGHTS[weights]
    written = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)

    def train(backend: Any, device: str) -> dict[str, Tensor]:
        param = torch.randn(2**16, generator=torch.Generator().manual_seed(6)).to(device, dtype).requires_grad_()
        sgd = Case("", case_named("sgd").of, {"lr": 1e-3})
        optimizer = sgd.make([param], backend, nonfinite="propagate", rounding_seed=5, **options)
        set_grads([param], random_grads([param], 1, dtype))
        optimizer.step()
        param.data.copy_(written)
        set_grads([param], [torch.zeros_like(param)])
        optimizer.step()
        return everything(optimizer)

    found = run_both(train)["param 0"]
    assert torch.equal(found.isnan(), written.isnan())
    torch.testing.assert_close(found, written, rtol=2.0**-7, atol=1e-38, equal_nan=True)


def test_far_below_the_smallest_float16_rounding_is_still_in_proportion() -> None:
    exponents = torch.linspace(-25, -45, 4096)

    def train(backend: Any, device: str) -> dict[str, Tensor]:
        param = torch.zeros(4096, dtype=torch.float16, device=device, requires_grad=True)
        optimizer = case_named("sgd").make([param], backend, **WEIGHTS["fp16_stochastic"][1], rounding_seed=8)
        set_grads([param], [torch.exp2(exponents).to(device)])
        optimizer.step()
        return everything(optimizer)

    assert run_both(train)["param 0"].count_nonzero() > 0


@pytest.mark.parametrize(("rule", "states"), [("sgd_nesterov", "bf16"), ("sgd_nesterov", "int8"), ("adamw", "int8")])
def test_states_of_every_size_give_the_reference_bits(rule: str, states: str) -> None:
    """Blocks from below the smallest scale to above the largest; within one they are of all sizes too."""
    generator = torch.Generator().manual_seed(6)
    exponents = torch.linspace(-148, 126, 24).repeat_interleave(128)
    if rule == "adamw":
        exponents = exponents / 2 - 4  # of what is squared
    grad = torch.randn(len(exponents), generator=generator) * torch.exp2(exponents)
    grad = grad * torch.exp2(-20 * torch.rand(len(grad), generator=generator))

    def train(backend: Any, device: str) -> dict[str, Tensor]:
        param = torch.zeros(len(grad), device=device, requires_grad=True)
        optimizer = case_named(rule).make(
            [param], backend, state_dtype=STATES[states], state_dtype_min_numel=1, rounding_seed=7,
            nonfinite="propagate",
        )  # fmt: skip
        for _ in range(3):
            set_grads([param], [grad.to(device)])
            optimizer.step()
        return everything(optimizer)

    found = run_both(train)
    for name, value in found.items():
        if name.startswith(("momentum_buffer_scale", "exp_avg_sq_scale")):
            assert value.min() == 0
            assert value.max() > 240


def test_a_nonfinite_gradient_is_skipped_or_spreads_through_its_block() -> None:
    def train(backend: Any, device: str) -> dict[str, Tensor]:
        with torch.device(device):
            optimizer, params = make(case_named("adamw"), backend, "split8", "int8", (PIECE + 300,))
        found = {}
        for step, nonfinite in enumerate(("skip", "skip", "propagate")):
            (grad,) = (g.to(device) for g in random_grads(params, step))
            if step > 0:
                grad[200], grad[-1] = torch.nan, torch.inf
            optimizer._settings.nonfinite = nonfinite
            if nonfinite == "propagate":
                optimizer._settings.max_grad_norm = None
            set_grads(params, [grad])
            optimizer.step()
            found |= {f"{name} after {step}": value for name, value in everything(optimizer).items()}
        for name in ("exp_avg", "exp_avg_sq"):  # which codes stand for NaN depends on the machine's NaN
            scales = found[f"{name}_scale 0 after 2"].repeat_interleave(128)[: PIECE + 300]
            found[f"{name} 0 after 2"][scales == 255] = 0
        return found

    found = run_both(train)
    assert int(found["step 0 after 1"]) == 1
    assert found["exp_avg_scale 0 after 2"].eq(255).nonzero().flatten().tolist() == [1, (PIECE + 299) // 128]


def test_each_kind_of_row_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Any] = []
    launch = backend._launch

    def counted(kernel: Any, *args: Any, **options: Any) -> None:
        launches.append(kernel)
        launch(kernel, *args, **options)

    monkeypatch.setattr(backend, "_launch", counted)

    def train(backend: Any, device: str) -> dict[str, Tensor]:
        dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float16, torch.float32)
        values = random_params([(size,) for size in (300, 301, 302, 303, 4)])
        params = [v.detach().to(device, d).requires_grad_() for v, d in zip(values, dtypes, strict=True)]
        optimizer = case_named("adamw").make(
            params, backend, master_weights="fp32", state_dtype="int8", state_dtype_min_numel=300, rounding_seed=1
        )
        for step in range(2):
            set_grads(params, [g.to(device) for g in random_grads(params, step)])
            optimizer.step()
        return everything(optimizer)

    run_both(train)
    assert (
        launches.count(backend.step_kernel) == 2 * 4
    )  # three dtypes with int8 states, and one parameter too small for them


with interpreting():

    @triton.jit
    def store_numbers(state: Any, scale: Any, n: Any) -> None:
        """0, 1, 2, ... up to 1023, of which the first n exist."""
        values = tl.arange(0, 1024).to(tl.float32)
        store_state((state, scale), values, tl.zeros([1024], tl.uint32), 0, n, 1024, INT8_STATES, False, False)

    @triton.jit
    def store_noise(out: Any, seed: Any, step: Any, row: Any, offset: Any) -> None:
        keys = noise_keys(seed.to(tl.int64), step, row, offset.to(tl.int64))
        element = tl.arange(0, 1024)
        tl.store(out + element, noise(keys, element).to(tl.int32, bitcast=True))


def test_what_lies_behind_the_end_of_a_tensor_has_no_part_in_a_scale() -> None:
    state = torch.full((1024,), 77, dtype=torch.uint8, device=DEVICE)
    scale = torch.full((8,), 77, dtype=torch.uint8, device=DEVICE)
    store_numbers[(1,)](state, scale, 130)
    values = torch.arange(130.0)
    expected = codecs.scale_of(values)
    codes = codecs.encode(values, expected, torch.zeros(130, dtype=torch.int32), second_moment=False)
    assert scale.tolist() == [*expected.tolist(), *[77] * 6]
    assert state.tolist() == [*codes.tolist(), *[77] * (1024 - 130)]


@pytest.mark.parametrize("offset", [0, CHUNK, 2**32, 2**33 + 3 * CHUNK, 4097, 2**40 + 4097])
def test_noise_of_any_chunk_is_that_of_the_reference(offset: int) -> None:
    out = torch.empty(1024, dtype=torch.int32, device=DEVICE)
    store_noise[(1,)](out, 2**62 + 5, 7, 11, offset)
    key = codecs.key(torch.tensor(2**62 + 5), torch.tensor(7), 11)
    assert torch.equal(out.cpu(), codecs.noise(key, 1024, offset))
