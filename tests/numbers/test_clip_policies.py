"""Policies of clipping against their formulas in fp64, written from the papers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import inside
import pytest
import torch
from torch import Tensor, nn

import accumfused as af

SHAPES = [(300, 200), (7,), (64, 9), (1,)]
# The norm is a sum of squares in fp32: 2^-24 times a few, and a coefficient is rounded once.
TOLERANCE = 5e-7
Coefficients = Callable[[list[Tensor], list[Tensor]], list[float]]


def optimizer_of(params: list[Any], backend: str, **settings: Any) -> af.SGD:
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    return af.SGD(groups, lr=1.0, backend=backend, **settings)


def norm_of(*tensors: Tensor) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def to(limit: float, norm: float) -> float:
    return min(1.0, limit / (norm + 1e-6))


def per_tensor(params: list[Tensor], grads: list[Tensor]) -> list[float]:
    return [to(0.5, norm_of(grad)) for grad in grads]


def per_group(params: list[Tensor], grads: list[Tensor]) -> list[float]:
    return [to(0.5, norm_of(*grads[:2]))] * 2 + [to(3.0, norm_of(*grads[2:]))] * 2


@pytest.mark.parametrize(
    ("coefficients", "settings"),
    [
        (per_tensor, {"clip": af.PerTensor(0.5)}),
        (per_group, {"max_grad_norm": 0.5}),
    ],
)
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("on", ["torch", None])
def test_tensors_and_groups_are_clipped_by_their_own_norms(
    coefficients: Coefficients, settings: dict[str, Any], windows: bool, on: str | None, backend: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = 1.0, 1e-3, 1.0, 1.0  # of one the norm is below eps
    params: list[Any] = [
        nn.Parameter(torch.randn(shape, generator=generator) * size) for shape, size in zip(SHAPES, sizes, strict=True)
    ]
    optimizer = optimizer_of(params, on or backend, **settings)
    if coefficients is per_group:
        optimizer.param_groups[1]["max_grad_norm"] = 3.0
    for _ in range(4):
        before = [param.detach().double() for param in params]
        sums = [torch.zeros_like(param) for param in before]
        for weight in (3.0, 0.5) if windows else (None,):
            for param, total in zip(params, sums, strict=True):
                param.grad = torch.randn(param.shape, generator=generator)
                total += param.grad.double() * (weight or 1.0)
            if windows:
                optimizer.accumulate(weight)
        optimizer.step(normalizer=2.0)
        grads = [total / (2.0 * (3.5 if windows else 1.0)) for total in sums]
        own = coefficients(before, grads)
        assert min(own) < 1.0
        for param, old, grad, factor in zip(params, before, grads, own, strict=True):
            torch.testing.assert_close(old - param.detach().double(), grad * factor, rtol=2e-6, atol=4e-7)


def test_muons_matrices_are_clipped_by_their_own_norms(backend: str) -> None:
    """It steps them in stacks of one shape, in another order. An orthogonalized matrix has no length; momentum has."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((7,), (20, 30), (40, 40), (20, 30), (40, 40))]
    groups = [{"params": params[:1], "use_muon": False}, {"params": params[1:]}]
    optimizer = af.Muon(groups, momentum=0.9, backend=backend, clip=af.PerTensor(2.0))
    slopes = (1.0, 0.03, 10.0, 7.0, 0.01)
    for param, slope in zip(params, slopes, strict=True):
        param.grad = torch.full_like(param, slope)
    optimizer.step()
    for param, slope in [*zip(params, slopes, strict=True)][1:]:
        wanted = 0.1 * min(slope * math.sqrt(param.numel()), 2.0)
        assert norm_of(optimizer.state[param]["momentum_buffer"]) == pytest.approx(wanted, rel=1e-5)


def spiked(steps: int, *spikes: int) -> list[float]:
    """Norms around 3, and planted ones."""
    generator = torch.Generator().manual_seed(1)
    drawn = (3.0 + 0.3 * torch.randn(steps, generator=generator, dtype=torch.float64)).tolist()
    return [norm * (8.0 if step in spikes else 1.0) for step, norm in enumerate(drawn)]


class ZClip:
    """Kumar et al. 2025, algorithm 1, with reciprocal clipping."""

    def __init__(self, threshold: float, decay: float, warmup: int) -> None:
        self.threshold, self.decay, self.warmup, self.seen = threshold, decay, warmup, list[float]()
        self.mean, self.variance = 0.0, 0.0

    def clipped(self, norm: float) -> float:
        if len(self.seen) < self.warmup:
            self.seen.append(norm)
            self.mean = sum(self.seen) / len(self.seen)
            self.variance = sum((each - self.mean) ** 2 for each in self.seen) / len(self.seen)
            return norm
        deviation = math.sqrt(self.variance)
        z = (norm - self.mean) / (deviation + 1e-6)
        limited = self.mean + self.threshold**2 / z * deviation if z > self.threshold else norm
        self.mean = self.decay * self.mean + (1 - self.decay) * limited
        self.variance = self.decay * self.variance + (1 - self.decay) * (limited - self.mean) ** 2
        return limited


def moved_by(param: Any, optimizer: Any, norm: float) -> float:
    """How far a step of SGD with this norm goes."""
    before = param.detach().double()
    param.grad = torch.full((4,), norm / 2.0)
    optimizer.step()
    return norm_of(before - param.detach().double())


def test_a_z_score_clips_spikes_and_remembers_what_it_clipped(backend: str) -> None:
    param = nn.Parameter(torch.zeros(4))
    optimizer = af.SGD([param], lr=1e-3, backend=backend, clip=af.ZScore(2.0, 0.9, 6))
    oracle, clips = ZClip(2.0, 0.9, 6), 0
    for norm in spiked(30, 3, 12, 13, 20, 29):
        wanted = oracle.clipped(norm)
        clips += wanted < norm
        assert moved_by(param, optimizer, norm) == pytest.approx(1e-3 * wanted, rel=1e-4)
        assert float(optimizer.grad_norm) == pytest.approx(norm, rel=TOLERANCE)
    count, mean, variance = inside.memories(optimizer)["history"][0].tolist()
    assert count == 30
    assert mean == pytest.approx(oracle.mean, rel=TOLERANCE)
    assert variance == pytest.approx(oracle.variance, rel=1e-5)
    assert clips >= 4
    assert int(optimizer.skipped_steps) == 0


@pytest.mark.parametrize("scaled", [False, True])
def test_norms_far_above_the_running_mean_are_skipped_and_not_remembered(scaled: bool, backend: str) -> None:
    """The mean is that of the norms before clipping; a norm that is not finite is skipped without it."""
    param = nn.Parameter(torch.zeros(4))
    optimizer: Any = af.SGD(
        [param], lr=1e-3, backend=backend, max_grad_norm=1.0, skip_above=af.RunningMean(3.0, 0.9, 5)
    )
    mean, seen, skips = 0.0, 0, 0
    for step, drawn in enumerate(spiked(30, 8, 9, 17)):
        norm = math.inf if step == 20 else drawn
        is_spike = norm == math.inf or (seen >= 5 and norm > 3.0 * mean)
        optimizer.grad_scale = torch.tensor(4.0) if scaled else None
        far = moved_by(param, optimizer, norm * (4.0 if scaled else 1.0))
        assert bool(optimizer.step_was_skipped) is is_spike
        assert far == pytest.approx(0.0 if is_spike else 1e-3 * norm * to(1.0, norm), rel=1e-4)
        skips += is_spike
        if not is_spike:
            mean += (norm - mean) * (1 / (seen + 1) if seen < 5 else 0.1)
            seen += 1
    assert inside.memories(optimizer)["history"][1, :2].tolist() == [seen, pytest.approx(mean, rel=TOLERANCE)]
    assert int(optimizer.skipped_steps) == skips == 4
