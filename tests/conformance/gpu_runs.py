"""Windows on a GPU that are run again and again, eagerly or as a graph, for test_gpu.py and test_gpu_graphs.py."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import inside
import torch
from compare import everything
from table import random_params
from torch import Tensor

import accumfused as af
from accumfused.backends.cuda import CudaBackend
from accumfused.formats.numeric import CHUNK

DEVICE = torch.device("cuda", 0)


def backend_named(gpu: str) -> Any:
    """A new backend object."""
    if gpu == "triton":
        return importlib.import_module("accumfused.backends.triton.backend").TritonBackend()
    return CudaBackend()


class Windows:
    """Micro-batches and a step. All that they read is on the device, and may change between two windows.

    Args:
        weights: of the micro-batches; None: none, "device": tensors.
        bucket: gradients are released in buckets of so many elements.
        streams: how many others compute the losses.
    """

    def __init__(
        self, gpu: str, weights: Any = (1.0, 2.0, 3.0), *, bucket: int | None = None, streams: int = 0,
        device: torch.device = DEVICE, dtype: torch.dtype = torch.float32, **options: Any,
    ) -> None:  # fmt: skip
        shapes = [(40, 7), (2 * CHUNK + 3,), (5,), (300, 20)]
        self.params = [p.detach().to(device, dtype).requires_grad_() for p in random_params(shapes)]
        self.device, self.bucket = device, bucket
        self.lr, self.factor, self.scale = (torch.tensor(value, device=device) for value in (0.05, 1.0, 4.0))
        on_device = [torch.tensor(value, device=device) for value in (1.0, 2.0, 3.0)]
        self.weights = on_device if weights == "device" else weights or (None, None, None)
        self.streams = [torch.cuda.Stream(device) for _ in range(streams)]
        rule = {"lr": self.lr, "betas": (0.5, 0.7), "weight_decay": 0.3}
        options = {"max_grad_norm": 0.5, **options}
        self.optimizers = [af.AdamW(self.params, **rule, backend=gpu, **options)]  # type: ignore[arg-type]
        if bucket is not None:
            af.release_gradients(self.optimizers[0], bucket)

    def loss(self, micro: int) -> Tensor:
        current, losses = torch.cuda.current_stream(self.device), []
        for index, param in enumerate(self.params):
            stream = self.streams[index % len(self.streams)] if self.streams else current
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                if self.streams:
                    inside.sleep_on_the_gpu(3_000_000 * (1 + index % 2))  # so that they do not keep step by chance
                losses.append((param * self.factor * (micro + 1)).square().sum())
        for stream in self.streams:
            current.wait_stream(stream)
        return torch.stack(losses).sum() * self.scale

    def window(self) -> None:
        (optimizer,) = self.optimizers
        for micro, weight in enumerate(self.weights):
            if self.bucket is not None:
                optimizer.backward(self.loss(micro), weight)
            else:
                self.loss(micro).backward()
                optimizer.accumulate(weight)
        optimizer.grad_scale = self.scale
        optimizer.step(normalizer=self.scale)
        del optimizer.grad_scale

    def everything(self) -> dict[str, Tensor]:
        found = {"factor": self.factor}
        for number, optimizer in enumerate(self.optimizers):
            found |= {f"{name} of {number}": value for name, value in everything(optimizer).items()}
            found[f"norm of {number}"] = optimizer.grad_norm.clone()
        return found


class Scaled(Windows):
    """Its two optimizers are clipped together, under a scaler of this class."""

    def __init__(self, gpu: str, kind: Any = af.GradScaler) -> None:
        super().__init__(gpu)
        self.optimizers = [af.AdamW([p], lr=self.lr, backend=gpu) for p in self.params[:2]]
        self.params = self.params[:2]
        self.group = af.ClipGroup(self.optimizers, 0.5)
        self.scaler = kind(self.device.type, init_scale=2.0**8, growth_interval=3)

    def window(self) -> None:
        for micro in range(2):
            self.scaler.scale(self.loss(micro)).backward()
            for optimizer in self.optimizers:
                optimizer.accumulate(weight=micro + 1.0, last=micro == 1)
        self.scaler.step(self.group)
        self.scaler.update()
        for param in self.params:
            param.grad = None

    def everything(self) -> dict[str, Tensor]:
        """Without the norms: torch's scaler leaves the last one where it skips."""
        found = {name: value for name, value in super().everything().items() if not name.startswith("norm")}
        return found | {"loss scale": torch.tensor(self.scaler.get_scale())}


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """A replay of the graph of one run, after another on a side stream to warm up."""
    stream = torch.cuda.Stream(DEVICE)
    stream.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream(DEVICE).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
