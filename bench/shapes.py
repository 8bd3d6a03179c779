"""The parameter shapes that the suites run on."""

from __future__ import annotations

import math
from collections.abc import Callable

Shapes = list[tuple[int, ...]]


def gpt2(width: int = 768, layers: int = 12, vocabulary: int = 50257, context: int = 1024) -> Shapes:
    """GPT-2 with a tied head; the defaults are GPT-2 124M: 148 tensors, 124,439,808 parameters."""
    shapes: Shapes = [(vocabulary, width), (context, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [*shapes, (width,), (width,)]


def resnet50(width: int = 64, classes: int = 1000) -> Shapes:
    """ResNet-50: 161 tensors, 25,557,032 parameters."""
    shapes: Shapes = [*_convolution(3, width, 7)]
    channels = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = width * 2**stage
        for block in range(blocks):
            shapes += _convolution(channels, inner, 1) + _convolution(inner, inner, 3)
            shapes += _convolution(inner, 4 * inner, 1)
            if block == 0:
                shapes += _convolution(channels, 4 * inner, 1)
            channels = 4 * inner
    return [*shapes, (classes, channels), (classes,)]


def llama(
    width: int = 2048, inner: int = 8192, layers: int = 16, key_values: int = 512, vocabulary: int = 128256
) -> Shapes:
    """Llama with a tied head; the defaults are Llama-3.2-1B: 146 tensors, 1,235,814,400 parameters.

    Args:
        key_values: width of keys and values, which several query heads share.
    """
    shapes: Shapes = [(vocabulary, width)]
    for _ in range(layers):
        shapes += [(width, width), (key_values, width), (key_values, width), (width, width)]
        shapes += [(inner, width), (inner, width), (width, inner), (width,), (width,)]
    return [*shapes, (width,)]


def count(shapes: Shapes) -> int:
    """How many parameters these are."""
    return sum(math.prod(shape) for shape in shapes)


GPT2, LLAMA_1B, RESNET50 = "GPT-2 124M", "Llama-3.2-1B", "ResNet-50"
LLAMA_02B = "Llama-style, 0.2B"  # 200,039,424 parameters in 101 tensors
ONE_TENSOR = "one tensor"  # as large as ResNet-50: what compiles for every shape compiles once
GPT2_BLOCKS = "GPT-2, 4 blocks"  # 28,353,024 parameters: many copies of them fit in a small machine

_MODELS: dict[str, tuple[Callable[[], Shapes], Callable[[], Shapes]]] = {  # whole, and in small
    GPT2_BLOCKS: (lambda: gpt2(layers=4, vocabulary=0)[2:], lambda: gpt2(64, 2, 512, 64)),
    GPT2: (gpt2, lambda: gpt2(64, 2, 512, 64)),
    LLAMA_1B: (llama, lambda: llama(64, 128, 2, 16, 512)),
    LLAMA_02B: (lambda: llama(1024, 4096, 11, 256, 32000), lambda: llama(64, 128, 2, 16, 512)),
    ONE_TENSOR: (lambda: [(25_557_032,)], lambda: [(100_000,)]),
    RESNET50: (resnet50, lambda: resnet50(8, 10)),
}


def model(name: str, quick: bool = False) -> Shapes:
    """The shapes of a model; `quick`: of a tiny one of its kind."""
    return _MODELS[name][quick]()


def _convolution(channels: int, filters: int, size: int) -> Shapes:
    """Its weight, and the batch normalization's weight and bias."""
    return [(filters, channels, size, size), (filters,), (filters,)]
