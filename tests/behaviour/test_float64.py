"""fp64 parameters: torch's own kernels take them, and nothing between their gradients and their update is rounded."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import inside
import pytest
import torch
from compare import assert_close, everything
from table import OF_TORCH, Case
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_

import accumfused as af
from accumfused.backends import torch_kernels, torch_step
from accumfused.formats.numeric import CHUNK

SIZES = (3, 17, 1, 10)  # samples in a window's micro-batches
WIDTH = 300
STRICT: dict[str, Any] = {"rtol": 1e-15, "atol": 1e-15}  # some roundings of fp64, of numbers around 1


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernels, "_CACHED", 4 * CHUNK)  # a fourth of it for fp64
    monkeypatch.setattr(torch_kernels, "_LARGE", 4 * CHUNK)


@pytest.fixture(params=[True, False], ids=["reads", "does not read"])
def reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the host reads the device's values, as it does on a CPU, or does not, as on a GPU."""
    if not request.param:
        monkeypatch.setattr(torch_kernels, "_can_read", lambda plan: False)
    return bool(request.param)


def network(dtype: torch.dtype = torch.float64) -> torch.nn.Sequential:
    """Its first weight is so large that torch's kernels update it in two pieces."""
    generator = torch.Generator().manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(WIDTH, 120), torch.nn.Tanh(), torch.nn.Linear(120, 7)).to(dtype)
    for param in net.parameters():
        values = torch.randn(param.shape, generator=generator, dtype=torch.float64, device="cpu")
        param.data.copy_(values / 32)
    return net


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        x, y = (torch.randn(sum(SIZES), n, generator=generator, dtype=torch.float64, device="cpu") for n in (WIDTH, 7))
        yield x, y


def steps(net: torch.nn.Module, optimizer: Any, clip: float | None = None) -> None:
    """Steps of whole batches; torch clips them."""
    for x, y in batches():
        optimizer.zero_grad()
        mse_loss(net(x), y).backward()
        if clip is not None:
            clip_grad_norm_(net.parameters(), clip)
        optimizer.step()


def windows(net: torch.nn.Module, optimizer: Any) -> None:
    for x, y in batches():
        for part, target in zip(x.split(SIZES), y.split(SIZES), strict=True):
            optimizer.backward(mse_loss(net(part), target), weight=len(part))
        optimizer.step()


def assert_equal(net: torch.nn.Module, other: torch.nn.Module, rtol: float = 0.0, atol: float = 0.0) -> None:
    for own, expected in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=rtol, atol=atol)


def one(*values: float, dtype: torch.dtype = torch.float64) -> Parameter:
    """A parameter with these gradients."""
    param = Parameter(torch.ones(len(values), dtype=dtype))
    param.grad = torch.tensor(values, dtype=dtype)
    return param


KERNELS = [case for case in OF_TORCH if case.rule in torch_step.FUSED]
RULES = [case for case in OF_TORCH if case.rule not in torch_step.FUSED]


@pytest.mark.parametrize("case", KERNELS, ids=lambda case: case.name)
def test_a_step_has_the_bits_of_torchs_fused_kernel(case: Case, reads: bool) -> None:
    rounding = 0.0 if reads or "dampening" not in case.options else 1e-15  # there the rule runs
    net, other = network(), network()
    optimizer, stock = case.make(net.parameters()), case.of.torch_class(other.parameters(), fused=True, **case.options)  # type: ignore
    steps(net, optimizer)
    steps(other, stock)
    assert_equal(net, other, atol=rounding)
    assert inside.backend(optimizer).name == "torch"
    entries = [entry for own in optimizer.state.values() for entry in own.items()]
    assert all(value.dtype == torch.float64 for name, value in entries if name != "step")


@pytest.mark.parametrize("case", RULES, ids=lambda case: case.name)
def test_rules_without_a_kernel_of_torchs_compute_in_fp64_too(case: Case, reads: bool) -> None:
    param, other = one(1.0, 1.0), one(1.0, 1.0)
    optimizer, stock = case.make([param]), case.of.peer([other], **case.options)
    for grad in ((1 / 3, -1e-3), (0.5, 1e-3), (1.0, 7.0)):
        param.grad, other.grad = one(*grad).grad, one(*grad).grad
        optimizer.step()
        stock.step()
    torch.testing.assert_close(param, other, rtol=0.0, atol=4e-15)
    for value in (param, *(own for name, own in optimizer.state[param].items() if name != "step")):
        assert not torch.equal(value, value.float().double())


WEIGHTS: list[Any] = [[3.0, 17.0, 0.0, 1 / 3], [1 / 3, 3e11, 7.0, 1e-9]]


@pytest.mark.parametrize("weights", [*WEIGHTS, [0.1, 0.0, 7.3]], ids=["with 0", "far apart", "on the device"])
def test_factors_of_micro_batches_are_not_rounded(
    weights: Sequence[Any], reads: bool, request: pytest.FixtureRequest
) -> None:
    if "on the device" in request.node.name:
        weights = [torch.tensor(weight, dtype=torch.float64) for weight in weights]
    param = one(1.0, 2.0)
    optimizer = af.SGD([param], lr=1.0)
    grads = torch.randn(len(weights), 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for weight, grad in zip(weights, grads, strict=True):
        param.grad = grad  # of a larger tensor, so the sum has memory of its own
        optimizer.accumulate(weight)
    numbers = torch.tensor([float(weight) for weight in weights], dtype=torch.float64)
    optimizer.step()
    mean = (numbers[:, None] * grads).sum(0) / numbers.sum()
    torch.testing.assert_close(1 - param.detach(), mean, **STRICT)


def test_norms_and_limits_are_not_rounded(reads: bool) -> None:
    small = [1 / 3, 1 / 7]
    for clip in ({"max_grad_norm": 0.1}, {"clip": af.PerTensor(0.1)}):
        param, norm = one(*small), torch.tensor(small, dtype=torch.float64).norm()
        optimizer = af.SGD([param], lr=1.0, **clip)
        optimizer.step(normalizer=3.0)
        torch.testing.assert_close(optimizer.grad_norm, norm / 3, **STRICT)
        expected = torch.tensor(small, dtype=torch.float64) / 3 * (0.1 / (norm / 3 + 1e-6))
        torch.testing.assert_close(1 - param.detach(), expected, **STRICT)
    huge = one(1e200, 1.0)  # its square overflows fp64, its neighbour's fp32
    optimizer = af.SGD([huge], lr=1e-150, nonfinite="skip")
    optimizer.step()
    assert optimizer.step_was_skipped
    huge.grad = torch.tensor([1e150, 1.0], dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(huge.detach(), torch.tensor([0.0, 1.0], dtype=torch.float64), **STRICT)


def test_a_window_that_began_in_fp32_takes_an_fp64_group() -> None:
    single, double = one(1.0, 2.0, dtype=torch.float32), one(1 / 3, 2.0)
    optimizer = af.SGD([single], lr=0.1)
    for _ in range(2):
        optimizer.accumulate()
        single.grad = torch.tensor([1.0, 2.0])
    optimizer.add_param_group({"params": [double]})
    optimizer.accumulate()
    optimizer.step()
    expected = torch.tensor(9.0 + 36.0 + 1 / 9 + 4.0, dtype=torch.float64).sqrt()
    torch.testing.assert_close(optimizer.grad_norm, expected, **STRICT)


def test_the_windows_of_a_parameter_that_becomes_fp64_are_fp64() -> None:
    param = one(1.0, 2.0, dtype=torch.float32)
    optimizer = af.SGD([param], lr=0.1)
    for dtype in (torch.float32, torch.float64):
        param.data, param.grad = torch.ones(2, dtype=dtype), None
        for scale in (1.0, 2.0):  # gradients are parts of a larger tensor, so the sum has memory of its own
            param.grad = torch.tensor([scale / 3, scale / 7, 0.0], dtype=dtype)[:2]
            optimizer.accumulate()
        optimizer.step()
    expected = torch.tensor([1.0, 3 / 7], dtype=torch.float64)
    torch.testing.assert_close(optimizer.grad_norm, expected.norm(), **STRICT)
    torch.testing.assert_close(param.detach(), 1 - 0.1 * expected, **STRICT)


def test_fp64_gradients_become_the_sum_and_fp32_ones_are_added_in_fp64() -> None:
    param = one(1 / 3, 1 / 7)
    optimizer, place = af.SGD([param], lr=1.0), param.grad.data_ptr()  # type: ignore[union-attr]
    optimizer.accumulate(last=True)
    assert param.grad is not None
    assert param.grad.data_ptr() == place
    optimizer.zero_grad()
    param.data.fill_(1.0)
    param.grad_dtype = None
    for value in (1.0, 2.0**-30):
        param.grad = torch.full((2,), value)
        optimizer.accumulate()
    optimizer.step()
    assert (1 - param.detach()).tolist() == [1.0 + 2.0**-30] * 2


def test_a_large_micro_batch_is_not_dropped() -> None:
    param = one(1e100)
    optimizer = af.SGD([param], lr=1e-100, nonfinite="drop")
    optimizer.accumulate()
    optimizer.step()
    assert int(optimizer.dropped_micro_batches) == 0
    assert abs(param.item()) < 1e-15


def test_an_optimizer_of_fp32_and_fp64_parameters_sums_each_in_its_dtype_and_has_one_norm() -> None:
    single, double, half = one(1.0, 2.0, dtype=torch.float32), one(1 / 3, 2.0), one(1.0, dtype=torch.bfloat16)
    alone = copy.deepcopy(single)
    alone.grad = single.grad.clone()  # type: ignore[union-attr]
    optimizer = af.AdamW([single, double, half], backend="torch")
    optimizer.accumulate(2)
    optimizer.accumulate(0, last=True)
    assert [p.grad.dtype for p in (single, double, half)] == [torch.float32, torch.float64, torch.float32]
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, torch.tensor(10 + 1 / 9, dtype=torch.float64).sqrt(), **STRICT)
    af.AdamW([alone], backend="torch").step()
    assert torch.equal(single, alone)
    assert optimizer.state[half].keys() == {"step", "exp_avg", "exp_avg_sq", "master_remainder"}
    assert "formats: bf16 + split16, fp32 states; fp64, fp64 states" in repr(optimizer)


def test_checkpoints_copies_and_open_windows_lose_no_bit() -> None:
    net, other = network(), network()
    optimizer = af.AdamW(net.parameters())
    windows(net, optimizer)
    for part, target in zip(*(each.split(SIZES) for each in next(batches())), strict=True):
        optimizer.backward(mse_loss(net(part), target), weight=len(part))
    other.load_state_dict(net.state_dict())
    loaded = af.AdamW(other.parameters())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, loaded):
        each.step()
    assert_equal(net, other)
    for name, value in everything(optimizer).items():
        assert torch.equal(value, everything(loaded)[name]), name
    stock = torch.optim.AdamW(other.parameters(), fused=True)
    stock.load_state_dict(loaded.state_dict())
    steps(net, optimizer)
    steps(other, stock)
    assert_equal(net, other, **STRICT)


def test_a_model_that_becomes_fp64_goes_on_with_its_states_and_so_it_does_back_in_fp32(native: None) -> None:
    net, exact = network(torch.float32), network(torch.float32)
    optimizer, stock = af.AdamW(net.parameters()), torch.optim.AdamW(exact.parameters())
    for own, other in zip(net.parameters(), exact.parameters(), strict=True):
        own.grad = other.grad = torch.full_like(own, 0.01)
    optimizer.step()
    stock.step()
    net.double().zero_grad()
    exact.double().zero_grad()
    state = stock.state_dict()
    stock.load_state_dict(state)  # casts the states
    windows(net, optimizer)
    steps(exact, stock)
    for own, other in zip(net.parameters(), exact.parameters(), strict=True):
        assert own.dtype == optimizer.state[own]["exp_avg"].dtype == torch.float64
        assert_close(own, other, "model")
    assert inside.backend(optimizer).name == "torch"
    net.float().zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    for param in net.parameters():
        param.grad = torch.full_like(param, 0.01)
    optimizer.step()
    assert {own["exp_avg"].dtype for own in optimizer.state.values()} == {torch.float32}
    assert inside.backend(optimizer).name == "cpu"


def test_bf16_weights_with_remainders_are_loaded_whole() -> None:
    param = Parameter(torch.tensor([1 / 3, 7.0], dtype=torch.bfloat16))
    optimizer, param.grad = af.AdamW([param]), torch.ones_like(param)
    optimizer.step()
    whole = torch.nn.Module()
    whole.weight = param
    weights = optimizer.full_precision_state_dict(whole)["weight"]
    double = Parameter(param.detach().double())
    loaded = af.AdamW([double])
    loaded.load_state_dict(optimizer.state_dict())
    loaded.param_groups[0]["lr"] = 0.0
    double.grad = torch.zeros_like(double)
    loaded.step()
    assert torch.equal(double, weights.double())
    assert loaded.state[double].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_states_in_8_bits_are_decoded() -> None:
    param = one(*torch.linspace(-1.0, 1.0, 300).tolist(), dtype=torch.float32)
    optimizer = af.AdamW([param], state_dtype="8bit", state_dtype_min_numel=0)
    optimizer.step()
    states = []
    for dtype in (torch.float32, torch.float64):
        other = one(*[0.0] * 300, dtype=dtype)
        loaded = af.AdamW([other])
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        loaded.step()
        states.append(loaded.state[other])
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(states[1][name], states[0][name].double(), rtol=1e-6, atol=0.0)


def test_schedule_free_keeps_its_weights_from_evaluation_to_training() -> None:
    param = one(1 / 3, 1 / 7)
    optimizer = af.AdamWScheduleFree([param], lr=0.1)
    optimizer.step()
    before = param.detach().clone()
    optimizer.eval()
    optimizer.train()
    torch.testing.assert_close(param.detach(), before, **STRICT)


@pytest.mark.parametrize("name", ["cpu", "triton", "cuda"])
def test_native_kernels_refuse_fp64_by_name(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"accumfused.backends._why_not_{name}", lambda device: None)
    text = f"backend='{name}' cannot run: a parameter is torch.float64; use backend='auto' or 'torch'"
    double, single = one(1.0), one(1.0, dtype=torch.float32)
    stock = torch.optim.SGD([double])
    optimizer = af.SGD([single], backend=name)
    for call in (
        lambda: af.SGD([double], backend=name),
        lambda: af.fuse(stock, backend=name),
        lambda: optimizer.add_param_group({"params": [double]}),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()
    assert type(stock) is torch.optim.SGD
    assert len(optimizer.param_groups) == 1
    single.data, single.grad = single.data.double(), None
    single.grad = torch.ones_like(single)
    with pytest.raises(RuntimeError, match=text):
        optimizer.step()
    assert single.item() == 1.0


def test_an_optimizer_of_another_package_keeps_its_own_step() -> None:
    net, other = network(), network()
    windows(net, af.fuse(torch.optim.NAdam(net.parameters()), max_grad_norm=0.5))
    steps(other, torch.optim.NAdam(other.parameters()), 0.5)
    assert_equal(net, other, rtol=1e-12, atol=1e-12)


def test_windows_of_unequal_micro_batches_are_whole_batches(reads: bool) -> None:
    """With all that goes with windows: dropped micro-batches, metrics, noise, a ClipGroup with an fp32 member."""
    net, other, single = network(), network(), one(0.0, dtype=torch.float32)
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    optimizer = af.SGD(net.parameters(), nonfinite="drop", metrics=True, noise_scale=True, **options)
    group = af.ClipGroup([af.SGD([single], lr=0.1), optimizer], max_grad_norm=0.5)
    for x, y in batches():
        for part, target in zip(x.split(SIZES), y.split(SIZES), strict=True):
            optimizer.backward(mse_loss(net(part), target), weight=len(part))
        net[0].bias.grad = torch.full_like(net[0].bias, torch.inf)
        optimizer.accumulate(5.0)
        single.grad = torch.zeros(1)
        group.step()
    steps(other, torch.optim.SGD(other.parameters(), **options), 0.5)
    assert_equal(net, other, **STRICT)
    assert int(optimizer.dropped_micro_batches) == 4
    metrics = optimizer.metrics().as_dict()
    assert metrics["grad_norm"] == pytest.approx(float(optimizer.grad_norm), rel=1e-15)
    assert metrics["clip"] == pytest.approx(0.5 / (metrics["grad_norm"] + 1e-6), rel=1e-15)
    assert optimizer.noise_scale().windows == 4


def test_members_of_a_clip_group_get_the_coefficient_in_their_dtype() -> None:
    for weight in (1.0, 2.0):  # one divisor for both windows, or one each
        params = one(3.0, dtype=torch.float32), one(4.0)
        optimizers = [af.SGD([param], lr=1.0) for param in params]
        for optimizer, param in zip(optimizers, params, strict=True):
            optimizer.accumulate(1.0)
            param.grad = torch.full_like(param, 3.0 if param is params[0] else 4.0)
            optimizer.accumulate(weight if param is params[0] else 1.0)
        af.ClipGroup(optimizers, max_grad_norm=0.1).step()
        assert [optimizer.grad_norm.dtype for optimizer in optimizers] == [torch.float32, torch.float64]
        torch.testing.assert_close(params[0].detach(), torch.tensor([1 - 0.06]), rtol=1e-6, atol=0.0)
        expected = torch.tensor([1 - 4.0 * (0.1 / (5.0 + 1e-6))], dtype=torch.float64)
        torch.testing.assert_close(params[1].detach(), expected, **STRICT)


@pytest.mark.parametrize("normalizer", [3.0, torch.tensor], ids=["number", "on the device"])
def test_a_divisor_is_no_clip_and_equal_micro_batches_have_no_noise(normalizer: Any) -> None:
    param = one(1 / 3, 1 / 7)
    grad = param.grad.clone()  # type: ignore[union-attr]
    optimizer = af.SGD([param], lr=0.1, max_grad_norm=100.0, metrics=True, noise_scale=True)
    optimizer.accumulate()
    param.grad = grad
    optimizer.accumulate()
    optimizer.step(normalizer=normalizer if isinstance(normalizer, float) else normalizer(3.0))
    found = optimizer.metrics().as_dict()
    assert (found["clip"], found["clip_share"]) == (1.0, 0.0)
    assert abs(float(optimizer.noise_scale().noise)) < 1e-15
