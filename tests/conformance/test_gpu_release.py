"""Gradient release on a GPU, where hooks run in autograd's threads, each on the stream of its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_same_bits, everything
from table import random_params

import accumfused as af
from accumfused.backends import why_not

DEVICE = torch.device("cuda")
every_bucket = pytest.mark.parametrize("bucket", [1, 2000, 2**30], ids=["each", "some", "all"])


@pytest.fixture(params=["cuda", "triton"])
def gpu(request: pytest.FixtureRequest) -> str:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    reason = why_not(request.param, DEVICE)
    if reason is not None:
        pytest.skip(reason)
    return request.param


class Run:
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
                        torch.cuda._sleep(3_000_000 * (1 + index % 2))  # so that they do not keep step by chance
                    losses.append((param * self.factor * (micro + 1)).square().sum())
            for stream in self.streams:
                current.wait_stream(stream)
            self.optimizer.backward(sum(losses), micro + 1.0)
        self.optimizer.step()


def assert_alike(one: Run, other: Run) -> None:
    found = everything(other.optimizer)
    for name, value in everything(one.optimizer).items():
        assert_same_bits(found[name], value, name)


@every_bucket
@pytest.mark.parametrize("streams", [0, 3])
def test_gradients_from_several_streams(gpu: str, streams: int, bucket: int) -> None:
    plain, released = Run(gpu, None), Run(gpu, bucket, streams)
    for _ in range(4):
        plain.window()
        released.window()
    assert_alike(plain, released)


@every_bucket
def test_a_captured_window(gpu: str, bucket: int) -> None:
    plain, released = Run(gpu, None), Run(gpu, bucket)
    stream = torch.cuda.Stream(DEVICE)
    stream.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(stream):
        released.window()
    torch.cuda.current_stream(DEVICE).wait_stream(stream)
    plain.window()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        released.window()
    for factor in (1.0, 0.5, 2.0):
        for run, play in ((plain, plain.window), (released, graph.replay)):
            run.factor.fill_(factor)
            play()
    assert_alike(plain, released)


def test_the_host_never_waits(gpu: str, never_waits: Any) -> None:
    run = Run(gpu, 2000)
    run.window()
    torch.cuda.synchronize(DEVICE)
    with never_waits():
        for _ in range(3):
            run.window()
