"""The arithmetic of an audit: which weights turn micro-batches' gradients into the step's, and what is left over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Grads = Sequence[Tensor | None]  # one for each parameter
_SMALLEST = 1e-9  # of the largest eigenvalue: below, gradients are too alike to be told apart in fp32


@dataclass(frozen=True)
class TensorDifference:
    """How far one tensor's gradient is from that of the large batch."""

    name: str
    factor: float  # that fits best
    difference: float  # relative, before that factor is taken out


def weights_of(pieces: Sequence[Grads], taken: Grads, likely: Sequence[bool]) -> tuple[list[float], float]:
    """Solves `taken = sum of weight * piece` by least squares.

    Where pieces are too alike to be told apart, the `likely` ones get equal weights.

    Returns:
        A weight for each piece, and the relative size of what no weights explain.
    """
    count = len(pieces)
    gram, right, square = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64), 0.0
    for _, stacked, target in _tensors(pieces, taken):
        gram += stacked @ stacked.T
        right += stacked @ target
        square += float(target @ target)
    prior = torch.tensor(likely, dtype=torch.float64)
    together = float(prior @ gram @ prior)
    prior *= float(prior @ right) / together if together > 0 else float(square == 0.0)  # nothing but zeros: all is well
    weights = prior + torch.linalg.pinv(gram, rtol=_SMALLEST, hermitian=True) @ (right - gram @ prior)
    left = max(0.0, square - float(2 * weights @ right - weights @ gram @ weights))
    return weights.tolist(), (left / square) ** 0.5 if square else 0.0


def differences(
    pieces: Sequence[Grads], weights: Sequence[float], taken: Grads, names: Sequence[str]
) -> list[TensorDifference]:
    """Compares `taken` with the sum of `weight * piece`: all tensors together (named ""), then each."""
    found, totals = [], [0.0, 0.0, 0.0]
    for index, stacked, target in _tensors(pieces, taken):
        wanted = torch.tensor(weights, dtype=torch.float64) @ stacked
        sums = [float(wanted @ wanted), float(wanted @ target), float((target - wanted).square().sum())]
        totals = [total + own for total, own in zip(totals, sums, strict=True)]
        found.append(_difference(names[index], sums))
    return [_difference("", totals), *found]


def added(pieces: Sequence[Grads], weights: Sequence[float]) -> list[Tensor | None]:
    """The sum of `weight * piece`, in fp64."""
    found: list[Tensor | None] = []
    for grads in zip(*pieces, strict=True):
        own = [weight * _wide(grad) for weight, grad in zip(weights, grads, strict=True) if grad is not None]
        found.append(torch.stack(own).sum(0) if own else None)
    return found


def _wide(grad: Tensor) -> Tensor:
    return grad.to(torch.complex128 if grad.is_complex() else torch.float64)


def _difference(name: str, sums: list[float]) -> TensorDifference:
    square, product, off = sums
    if square == 0.0:
        return TensorDifference(name, 1.0 if off == 0.0 else float("inf"), 0.0 if off == 0.0 else float("inf"))
    return TensorDifference(name, product / square, (off / square) ** 0.5)


def _tensors(pieces: Sequence[Grads], taken: Grads) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each parameter with a gradient: its index, pieces, fp64 [pieces, elements], the step's, fp64 [elements]."""
    for index, target in enumerate(taken):
        own = [None if grad is None else _flat(grad) for grad in (target, *(piece[index] for piece in pieces))]
        like = next((grad for grad in own if grad is not None), None)
        if like is not None:
            flat, *rest = [torch.zeros_like(like) if grad is None else grad for grad in own]
            yield index, torch.stack(rest), flat


def _flat(grad: Tensor) -> Tensor:
    return (torch.view_as_real(grad) if grad.is_complex() else grad).double().reshape(-1)


def on_host(grad: Tensor) -> Tensor:
    """A copy of a gradient, dense."""
    grad = grad.detach()
    return grad.to_dense().cpu() if grad.is_sparse else grad.to("cpu", copy=True)
