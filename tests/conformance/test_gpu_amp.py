"""Loss scaling and common clipping on a GPU: nothing waits, and all of it can be in one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_same_bits
from table import random_params

import accumfused as af
from accumfused.backends import why_not

DEVICE = torch.device("cuda")


@pytest.fixture(params=["cuda", "triton"])
def gpu(request: pytest.FixtureRequest) -> str:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    reason = why_not(request.param, DEVICE)
    if reason is not None:
        pytest.skip(reason)
    return request.param


class Run:
    """Two optimizers that are clipped together, a scaler of ours, and a window of two micro-batches."""

    def __init__(self, gpu: str, kind: Any) -> None:
        self.params = [p.detach().to(DEVICE).requires_grad_() for p in random_params([(40, 7), (70_000,)])]
        self.optimizers = [af.AdamW([p], lr=0.05, backend=gpu) for p in self.params]
        af.clip_together(self.optimizers, 0.5)
        self.scaler = kind("cuda", init_scale=2.0**8, growth_interval=3)
        self.factor = torch.ones((), device=DEVICE)

    def window(self) -> None:
        for micro in range(2):
            loss = sum((p * self.factor * (micro + 1)).square().sum() for p in self.params)
            self.scaler.scale(loss).backward()
            for optimizer in self.optimizers:
                optimizer.accumulate(weight=micro + 1.0, last=micro == 1)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        for param in self.params:
            param.grad = None


FACTORS = (1.0, float("inf"), 0.5, 2.0, 1.0, 1.0)


def test_a_captured_window_skips_grows_and_backs_off_as_a_stock_scaler_does_eagerly(gpu: str) -> None:
    ours, stock = Run(gpu, af.GradScaler), Run(gpu, torch.amp.GradScaler)
    stream = torch.cuda.Stream(DEVICE)
    stream.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(stream):
        ours.window()
    torch.cuda.current_stream(DEVICE).wait_stream(stream)
    stock.window()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.window()
    for factor in FACTORS:
        for run, play in ((ours, graph.replay), (stock, stock.window)):
            run.factor.fill_(factor)
            play()
    for mine, theirs in zip(ours.params, stock.params, strict=True):
        assert_same_bits(mine, theirs)
    assert ours.scaler.get_scale() == stock.scaler.get_scale()
    assert [int(optimizer.skipped_steps) for optimizer in ours.optimizers] == [1, 1]


def test_no_step_under_our_scaler_waits(gpu: str, never_waits: Any) -> None:
    run = Run(gpu, af.GradScaler)
    run.window()
    torch.cuda.synchronize(DEVICE)
    with never_waits():
        for _ in range(3):
            run.window()
