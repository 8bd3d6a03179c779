"""GPUs, a card or an emulation, and windows that are run again and again on them, eagerly or as a graph."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import inside
import pytest
import torch
from compare import everything
from device import DeviceMemory, Launches
from table import random_grads, random_params
from torch import Tensor

import accumfused as af
import accumfused.backends.cuda
import accumfused.core.graphs
import accumfused.core.streams
from accumfused.backends.cpu import CpuBackend
from accumfused.backends.cuda import CudaBackend
from accumfused.formats.numeric import CHUNK

DEVICE = torch.device("cuda", 0)
SIDE, APART, OTHERS = 77, 78, 79  # streams


def backend_named(gpu: str) -> Any:
    """A new backend object."""
    if gpu == "triton":
        return importlib.import_module("accumfused.backends.triton.backend").TritonBackend()
    return CudaBackend()


class Card:
    """A GPU: its side stream, graphs, and memory that goes to others."""

    device = DEVICE

    def __init__(self, name: str) -> None:
        self.name = name
        self._side, self._others = torch.cuda.Stream(DEVICE), list[Tensor]()

    @property
    def backend(self) -> Any:
        return backend_named(self.name)

    @contextlib.contextmanager
    def on_side_stream(self) -> Iterator[None]:
        self._side.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.cuda.stream(self._side):
            inside.sleep_on_the_gpu(50_000_000)  # so that kernels on another stream would run first
            yield
        torch.cuda.current_stream(DEVICE).wait_stream(self._side)

    def delay(self) -> None:
        """What the current stream gets from here on waits a while."""
        inside.sleep_on_the_gpu(50_000_000)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[Callable[[], None]]:
        """Its replay."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.zeros(1, device=DEVICE)  # torch warns of graphs with nothing in them
            yield graph.replay

    def synchronize(self) -> None:
        torch.cuda.synchronize(DEVICE)
        self._others.clear()

    def give_away(self, *, on_side_stream: bool = False) -> None:
        """Others on the default (or side) stream get memory that nobody has any more, and write NaN there."""
        gc.collect()
        with torch.cuda.stream(self._side if on_side_stream else torch.cuda.default_stream(DEVICE)):
            self._others += [torch.full((n,), torch.nan, device=DEVICE) for n in (5000, 30) for _ in range(20)]


class Emulation(DeviceMemory):
    """A GPU as torch.cuda shows it; launches wait until the test synchronizes, or replays a captured graph.

    What torch's own operations write is not put off. While it is entered, new tensors lie on the device.
    """

    device = torch.device("cpu")

    def __init__(self, name: str, machine: Any, backend: Any, module: Any, patch: pytest.MonkeyPatch) -> None:
        super().__init__(machine)
        self.name, self.machine, self.backend, self.synchronize = name, machine, backend, machine.synchronize
        self._graphs, self._captures, self._pool = 0, False, list[torch.UntypedStorage]()
        patch.setattr(module, "current_stream", lambda device: (0, self.stream))
        for owner in (accumfused.core.graphs, module):
            patch.setattr(owner, "is_capturing", lambda device: self._captures and self.stream == SIDE)
        patch.setattr(accumfused.core.streams, "has_streams", lambda device: True)
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=self.stream))
        # torch has a few that it gives again and again: the captured one, too.
        streams = itertools.cycle([SimpleNamespace(cuda_stream=SIDE), SimpleNamespace(cuda_stream=APART)])
        patch.setattr(torch.cuda, "Stream", lambda device: next(streams))
        patch.setattr(torch.cuda, "stream", lambda stream: self.on(stream.cuda_stream))
        patch.setattr(Tensor, "record_stream", lambda tensor, to: self.record_stream(tensor, to.cuda_stream))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._captures and func is torch.ops.aten.empty.memory_format:
            if self.stream == SIDE:
                self._pool.append(result.untyped_storage())  # what torch computes there, no replay computes again
            elif not self.machine.is_relaxed():  # torch asks for permission on the captured stream alone
                raise RuntimeError("operation not permitted when stream is capturing")
        return result

    @classmethod
    def of_triton(cls, backend: Any, patch: pytest.MonkeyPatch) -> Emulation:
        """Interpreted kernels, whose launches wait."""
        module = sys.modules[type(backend).__module__]
        return cls("interpreted", Launches(module, patch, wait=True), backend, module, patch)

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def on_side_stream(self) -> contextlib.AbstractContextManager[None]:
        return self.on(SIDE)

    def delay(self) -> None:
        """All launches wait."""

    @contextlib.contextmanager
    def capturing(self) -> Iterator[Callable[[], None]]:
        """Its replay, after one of another graph in its pool."""
        self._graphs += 1
        pool = self._pool = list[torch.UntypedStorage]()

        def replay() -> None:
            for storage in pool:
                ctypes.memset(storage.data_ptr(), 0xFF, storage.nbytes())
            self.machine.replay()

        with self.on_side_stream():
            self.machine.capture(self._graphs, SIDE)
            self._captures = True
            try:
                yield replay
            finally:
                self._captures = False
                self.machine.capture(0, SIDE)

    def costs(self, call: Callable[[], Any]) -> tuple[int, int]:
        """Launches, and copies to the device, of which the CUDA backend makes none: its launches carry what is new."""
        counts = [self.machine.launches, getattr(self.machine, "tables", lambda: 0)]
        before = [count() for count in counts]
        call()
        launched, copied = (count() - known for count, known in zip(counts, before, strict=True))
        return launched, copied

    def give_away(self, *, on_side_stream: bool = False) -> None:
        """Memory that nobody has any more, and the current stream's launches do not hold, whosever it was."""
        gc.collect()
        self.poison(self.stream)


class Windows:
    """Micro-batches and a step. All that they read is on the device, and may change between two windows.

    Args:
        weights: of the micro-batches; None: none, "device": tensors.
        bucket: gradients are released in buckets of so many elements.
        streams: how many others compute the losses.
    """

    shapes = ((40, 7), (2 * CHUNK + 3,), (5,), (300, 20))

    def __init__(
        self, gpu: str, weights: Any = (1.0, 2.0, 3.0), *, bucket: int | None = None, streams: int = 0,
        device: torch.device = DEVICE, dtype: torch.dtype = torch.float32, **options: Any,
    ) -> None:  # fmt: skip
        self.params = [p.detach().to(device, dtype).requires_grad_() for p in random_params(self.shapes)]
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

    def backward(self, micro: int) -> None:
        self.loss(micro).backward()

    def follow(self, factor: float, lr: float) -> None:
        """The next window's."""
        self.factor.fill_(factor)
        self.lr.fill_(lr)

    def window(self) -> None:
        (optimizer,) = self.optimizers
        for micro, weight in enumerate(self.weights):
            if self.bucket is not None:
                optimizer.backward(self.loss(micro), weight)
            else:
                self.backward(micro)
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


class EmulatedWindows(Windows):
    """Their gradients stay where they are, as a graph's do: an emulation puts off no backward pass."""

    shapes = ((5000,), (70,))

    def __init__(self, gpu: Emulation, backend: Any, **options: Any) -> None:
        super().__init__("reference", device=gpu.device, **options)
        self.gpu = gpu
        inside.use_backend(self.optimizers[0], backend)
        self.values = [random_grads(self.params, micro, torch.bfloat16) for micro in range(3)]
        self.grads = [[value.clone() for value in values] for values in self.values]

    def backward(self, micro: int) -> None:
        for param, grad in zip(self.params, self.grads[micro], strict=True):
            param.grad_dtype = grad.dtype
            param.grad = grad

    def follow(self, factor: float, lr: float) -> None:
        """A window's first gradients may have become its accumulators."""
        self.gpu.synchronize()
        super().follow(factor, lr)
        for grads, values in zip(self.grads, self.values, strict=True):
            for grad, value in zip(grads, values, strict=True):
                grad.copy_(value * factor)


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


def windows_on(gpu: Card | Emulation, *, is_eager: bool = False, **options: Any) -> Windows:
    """A run there; of an emulation the eager one on the CPU."""
    if isinstance(gpu, Emulation):
        return EmulatedWindows(gpu, CpuBackend() if is_eager else gpu.backend, **options)
    return (Scaled if "kind" in options else Windows)(gpu.name, **options)
