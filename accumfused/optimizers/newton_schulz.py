"""Newton-Schulz iterations: they make a matrix's singular values about 1, and keep its singular vectors.

In: matrices of one shape, fp32. Out: the same in bf16, as torch's Muon has them; a CPU that multiplies no bf16 numbers
computes in fp32. ns_steps times, with G = X X^T:

    X <- a X + (b G + c G^2) X

A large rectangle's first three steps work on G alone: with P = a I + b G + c G^2 the next G is P G P, and X meets only
the product of the P. That rounds more often: the error is about one and a half times torch's for Gaussian matrices, and
below torch's where singular values are small. More such steps would lose those, as their squares drown in G's rounding.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_TOGETHER = 3  # a rectangle's first steps, which work on G alone
_LARGE = 128  # its shorter side: small matrices save no time, and average over fewer roundings
_PANEL = 256  # rows of a symmetric product on a CPU, see `_symmetric`


def orthogonalized(matrices: Tensor, steps: int, coefficients: Sequence[float], eps: float) -> Tensor:
    """Makes the singular values of matrices about 1.

    Args:
        matrices: [matrices, rows, columns], fp32.
        steps, coefficients: how many iterations, and their a, b, c.
        eps: the least norm by which a matrix is divided.

    Returns:
        bf16, of the same shape.
    """
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp(min=eps)
    is_cpu = matrices.device.type == "cpu"
    dtype = torch.float32 if is_cpu and not _multiplies_bf16() else torch.bfloat16
    result = torch.div(matrices, norms, out=torch.empty_like(matrices, dtype=dtype))
    for x in result if is_cpu and min(result.shape[1:]) > _PANEL else [result]:
        x.copy_(_iterated(x, steps, coefficients))
    return result.bfloat16()


@functools.cache
def _multiplies_bf16() -> bool:
    """Tells whether this CPU multiplies bf16 numbers by instructions. Without, they take some 30 times as long as fp32.

    An x86 CPU is asked for AVX512-BF16 and AMX, another one torch.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    checks = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return any(check is not None and check() for check in checks)


def _iterated(x: Tensor, steps: int, coefficients: Sequence[float]) -> Tensor:
    """Iterates on one matrix, or on a batch."""
    if x.shape[-2] > x.shape[-1]:
        return _iterated(x.mT, steps, coefficients).mT
    a, b, c = coefficients
    short, long = x.shape[-2:]
    if short >= _LARGE and 2 * long >= 3 * short and steps > 1:
        together = min(_TOGETHER, steps)
        gram = _symmetric(x, x.mT)
        rest = _symmetric(gram, gram, gram, b, c)  # P is a I + rest
        product = rest.clone()  # of the P of these steps
        product.diagonal(dim1=-2, dim2=-1).add_(a)
        for _ in range(together - 1):
            gram = _symmetric(rest, gram, gram, a)
            gram = _symmetric(rest, gram, gram, a)
            rest = _symmetric(gram, gram, gram, b, c)
            product = _symmetric(rest, product, product, a)
        x, steps = product @ x, steps - together
    for _ in range(steps):
        gram = _symmetric(x, x.mT)
        x = _product(_symmetric(gram, gram, gram, b, c), x, x, a)
    return x


def _product(left: Tensor, right: Tensor, added: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    if added is None:
        return left @ right
    add: Any = torch.addmm if left.dim() == 2 else torch.baddbmm
    result: Tensor = add(added, left, right, beta=beta, alpha=alpha)
    return result


def _symmetric(
    left: Tensor, right: Tensor, added: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """Computes `_product` where it is symmetric: for a single matrix the panels above the diagonal, copied below it.

    0.7 to 0.8 of the time for 768 rows (one core of an EPYC with AVX-512). A GPU gains nothing from small products.
    """
    if left.dim() == 3:
        return _product(left, right, added, beta, alpha)
    size = left.shape[0]
    result = left.new_empty(size, size)
    for begin in range(0, size, _PANEL):
        end = min(begin + _PANEL, size)
        part = None if added is None else added[begin:end, begin:]
        result[begin:end, begin:] = _product(left[begin:end], right[:, begin:], part, beta, alpha)
        result[end:, begin:end] = result[begin:end, end:].mT
    return result
