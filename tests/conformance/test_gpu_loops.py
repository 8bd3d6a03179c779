"""Loss scaling, common clipping and gradient release on a GPU, in graphs too; compute-sanitizer over every kernel."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from compare import assert_same_bits, everything
from table import random_params

import accumfused as af
from accumfused.backends import why_not

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

DEVICE = torch.device("cuda")
every_bucket = pytest.mark.parametrize("bucket", [1, 2000, 2**30], ids=["each", "some", "all"])


@pytest.fixture(params=["cuda", "triton"])
def gpu(request: pytest.FixtureRequest) -> str:
    reason = why_not(request.param, DEVICE)
    if reason is not None:
        pytest.skip(reason)
    return request.param


def captured(window: Any) -> torch.cuda.CUDAGraph:
    """A graph of one window, after another one on a side stream to warm up."""
    stream = torch.cuda.Stream(DEVICE)
    stream.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(stream):
        window()
    torch.cuda.current_stream(DEVICE).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        window()
    return graph


class Scaled:
    """A ClipGroup of two optimizers, a scaler of ours, and a window of two micro-batches."""

    def __init__(self, gpu: str, kind: Any) -> None:
        self.params = [p.detach().to(DEVICE).requires_grad_() for p in random_params([(40, 7), (70_000,)])]
        self.optimizers = [af.AdamW([p], lr=0.05, backend=gpu) for p in self.params]
        self.group = af.ClipGroup(self.optimizers, 0.5)
        self.scaler = kind("cuda", init_scale=2.0**8, growth_interval=3)
        self.factor = torch.ones((), device=DEVICE)

    def window(self) -> None:
        for micro in range(2):
            loss = sum((p * self.factor * (micro + 1)).square().sum() for p in self.params)
            self.scaler.scale(loss).backward()
            for optimizer in self.optimizers:
                optimizer.accumulate(weight=micro + 1.0, last=micro == 1)
        self.scaler.step(self.group)
        self.scaler.update()
        for param in self.params:
            param.grad = None


FACTORS = (1.0, float("inf"), 0.5, 2.0, 1.0, 1.0)


def test_a_captured_window_skips_grows_and_backs_off_as_a_stock_scaler_does_eagerly(gpu: str) -> None:
    ours, stock = Scaled(gpu, af.GradScaler), Scaled(gpu, torch.amp.GradScaler)
    graph = captured(ours.window)
    stock.window()
    for factor in FACTORS:
        for run, play in ((ours, graph.replay), (stock, stock.window)):
            run.factor.fill_(factor)
            play()
    for mine, theirs in zip(ours.params, stock.params, strict=True):
        assert_same_bits(mine, theirs)
    assert ours.scaler.get_scale() == stock.scaler.get_scale()
    assert [int(optimizer.skipped_steps) for optimizer in ours.optimizers] == [1, 1]


def test_no_step_under_our_scaler_waits(gpu: str, never_waits: Any) -> None:
    run = Scaled(gpu, af.GradScaler)
    run.window()
    torch.cuda.synchronize(DEVICE)
    with never_waits():
        for _ in range(3):
            run.window()


class Released:
    """A window of three weighted micro-batches, whose losses may be on streams of their own."""

    def __init__(self, gpu: str, bucket: int | None, streams: int = 0) -> None:
        shapes = [(40, 7), (70_000,), (5,), (300, 20)]
        self.params = [p.detach().to(DEVICE).requires_grad_() for p in random_params(shapes)]
        self.optimizer = af.AdamW(self.params, lr=0.05, capturable=True, max_grad_norm=0.5, backend=gpu)
        self.streams = [torch.cuda.Stream(DEVICE) for _ in range(streams)]
        self.factor = torch.ones((), device=DEVICE)
        if bucket is not None:
            af.release_gradients(self.optimizer, bucket)

    def window(self) -> None:
        current = torch.cuda.current_stream(DEVICE)
        for micro in range(3):
            losses = []
            for index, param in enumerate(self.params):
                stream = self.streams[index % len(self.streams)] if self.streams else current
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    if self.streams and not torch.cuda.is_current_stream_capturing():
                        inside.sleep_on_the_gpu(3_000_000 * (1 + index % 2))  # so that they do not keep step by chance
                    losses.append((param * self.factor * (micro + 1)).square().sum())
            for stream in self.streams:
                current.wait_stream(stream)
            self.optimizer.backward(sum(losses), micro + 1.0)
        self.optimizer.step()


def assert_alike(one: Released, other: Released) -> None:
    found = everything(other.optimizer)
    for name, value in everything(one.optimizer).items():
        assert_same_bits(found[name], value, name)


@every_bucket
@pytest.mark.parametrize("streams", [0, 3])
def test_gradients_from_several_streams(gpu: str, streams: int, bucket: int) -> None:
    plain, released = Released(gpu, None), Released(gpu, bucket, streams)
    for _ in range(4):
        plain.window()
        released.window()
    assert_alike(plain, released)


@every_bucket
def test_a_captured_window_of_released_gradients(gpu: str, bucket: int) -> None:
    plain, released = Released(gpu, None), Released(gpu, bucket)
    graph = captured(released.window)
    plain.window()
    for factor in (1.0, 0.5, 2.0):
        for run, play in ((plain, plain.window), (released, graph.replay)):
            run.factor.fill_(factor)
            play()
    assert_alike(plain, released)


def test_no_released_gradient_waits(gpu: str, never_waits: Any) -> None:
    run = Released(gpu, 2000)
    run.window()
    torch.cuda.synchronize(DEVICE)
    with never_waits():
        for _ in range(3):
            run.window()


@functools.cache
def sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer", path="/usr/local/cuda/bin") or shutil.which("compute-sanitizer")
    if found is None:
        return None
    program = "import torch; torch.zeros(1, device='cuda')"
    probe = subprocess.run([found, "--error-exitcode", "7", sys.executable, "-c", program], capture_output=True)
    return found if probe.returncode == 0 else None


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    if sanitizer() is None:
        pytest.skip("compute-sanitizer is not there, or does not run on this machine")
    program = Path(__file__).parents[1] / "sanitized.py"
    command = [sanitizer() or "", "--tool", tool, "--error-exitcode", "7"]
    if tool != "initcheck":  # which has to see what torch's kernels write
        command += ["--kernel-name", "kns=accumfused"]
    done = subprocess.run(
        [*command, sys.executable, str(program)], capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # or an overrun stays inside torch's large blocks
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "0 errors" in done.stdout or "0 hazards" in done.stdout, done.stdout[-3000:]
    assert "stepped" in done.stdout
