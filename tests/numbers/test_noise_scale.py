"""Noise scale and metrics against fp64."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from compare import assert_close
from torch import Tensor

import accumfused as af

SAMPLES = (2, 6, 3, 5)  # of the micro-batches of a window
SIZE = 4000


class Problem:
    """A gradient of squared norm 1, under noise whose covariance has a known trace."""

    def __init__(self, trace: float) -> None:
        self.trace = trace
        self.truth = torch.randn(SIZE, dtype=torch.float64)
        self.truth /= self.truth.norm()

    def micro_batch(self, samples: int) -> Tensor:
        """The mean of so many samples' gradients."""
        deviation = (self.trace / SIZE / samples) ** 0.5
        return self.truth + torch.randn(SIZE, dtype=torch.float64) * deviation


@pytest.mark.parametrize("how", ["weights", "weights on the device", "in the loss", "closed", "scaled", "no weights"])
def test_the_noise_scale_of_a_known_problem(backend: str, how: str) -> None:
    """In samples; without weights the unit is a micro-batch, here of 3 samples each."""
    problem, unit = Problem(trace=30.0), 3 if how == "no weights" else 1
    sizes = (unit,) * 4 if how == "no weights" else SAMPLES
    params = [torch.zeros(n, requires_grad=True) for n in (SIZE - 100, 100)]
    optimizer = af.SGD(params, lr=0.0, backend=backend, noise_scale=True)
    windows, share = [], torch.tensor(sizes, dtype=torch.float64) / unit
    for _ in range(100):
        windows.append((torch.stack([problem.micro_batch(samples) for samples in sizes]), share))
        for number, (samples, drawn) in enumerate(zip(sizes, windows[-1][0], strict=True)):
            others = {"no weights": None, "weights on the device": torch.tensor(float(samples))}
            weight: Any = others.get(how, samples)
            grads = drawn.to(params[0]).split([SIZE - 100, 100])
            if how == "in the loss":
                optimizer.backward(sum((p * g).sum() for p, g in zip(params, grads, strict=True)), weight)  # type: ignore[arg-type]
                continue
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad * {"scaled": 8.0, "no weights": 0.25}.get(how, 1.0)
            optimizer.accumulate(weight, last=how == "closed" and number == 3)
        if how == "scaled":
            optimizer.grad_scale = torch.tensor(8.0)  # type: ignore[attr-defined]
        optimizer.step()
    found = optimizer.noise_scale()
    signal, noise = oracle.noise_scale(windows, 0.99)
    assert_close(found.noise, torch.tensor(noise), "norm")
    assert float(found.signal) == pytest.approx(signal, rel=1e-4)  # a difference of sums thirty times as large
    assert float(found.noise_scale) == pytest.approx(noise / signal, rel=1e-4)
    assert float(found.noise_scale) == pytest.approx(problem.trace / unit, rel=0.05)
    assert int(found.windows) == 100
    if how == "no weights":
        growing = af.NoiseScale(optimizer, 5.0, every=1, share=1.4)
        assert [growing(update) for update in (0, 1)] == [2, 3]  # a batch of 14, in micro-batches of 5


def test_metrics_are_the_norms_of_what_the_step_did(backend: str) -> None:
    shapes = [(300, 200), (7,), (40_000,)]
    params = [torch.randn(shape, requires_grad=True) for shape in shapes]
    named = [(f"layer.{index}", param) for index, param in enumerate(params)]
    optimizer = af.AdamW(
        [{"params": named[:2]}, {"params": named[2:], "lr": 0.05}], lr=0.01, max_grad_norm=2.0, backend=backend,
        metrics=True,
    )  # fmt: skip
    for update in range(3):
        before = [param.detach().double() for param in params]
        for param in params:
            param.grad = torch.randn_like(param) * 3.0
        grads = [param.grad.double() / 1.5 for param in params if param.grad is not None]
        optimizer.step(normalizer=1.5)
        found = optimizer.metrics().as_dict()
        changes = [param.detach().double() - old for param, old in zip(params, before, strict=True)]
        parts = {"": slice(0, 3), "group0/": slice(0, 2), "group1/": slice(2, 3)}
        parts |= {f"layer.{index}/": slice(index, index + 1) for index in range(3)}
        for name, part in parts.items():
            sizes = [torch.cat([v.reshape(-1) for v in values[part]]).norm() for values in (grads, before, changes)]
            for kind, wanted in zip(("grad_norm", "param_norm", "update_norm"), sizes, strict=True):
                # Changes are differences of fp32 numbers some hundred times as large.
                rel = 1e-4 if kind == "update_norm" else 2e-6
                assert found[name + kind] == pytest.approx(float(wanted), rel=rel), (update, name, kind)
            assert found[name + "update_ratio"] == pytest.approx(float(sizes[2] / sizes[1]), rel=1e-4)
        assert found["update_norm"] > 0
        assert found["clip"] == pytest.approx(2.0 / found["grad_norm"], rel=1e-5)
        assert (found["clip_share"], found["skipped_steps"]) == (1.0, 0.0)
    assert len(found) == 4 * (1 + 2 + 3) + 3
