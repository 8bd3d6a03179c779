"""The parameter shapes that the suites run on."""

from __future__ import annotations

import math

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


def small(tensors: int = 1000, elements: int = 64) -> Shapes:
    """Many small tensors: what counts is the cost of a call and of a tensor."""
    return [(elements,)] * tensors


def flat(elements: int) -> Shapes:
    """One tensor."""
    return [(elements,)]


def count(shapes: Shapes) -> int:
    """How many parameters these are."""
    return sum(math.prod(shape) for shape in shapes)


def _convolution(channels: int, filters: int, size: int) -> Shapes:
    """Its weight, and the batch normalization's weight and bias."""
    return [(filters, channels, size, size), (filters,), (filters,)]
