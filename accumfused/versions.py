"""What the installed torch can do. One that is too old is refused on import."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

OLDEST_TORCH = (2, 8)  # as in pyproject.toml
HAS_GRAD_DTYPE = hasattr(Tensor, "grad_dtype")  # torch 2.10: p.grad may have another dtype than p

if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
    raise ImportError(
        f"accumfused needs torch {'.'.join(map(str, OLDEST_TORCH))} or newer, and {torch.__version__} is installed; "
        "pip install --upgrade torch"
    )

if TYPE_CHECKING or hasattr(torch.optim, "Muon"):  # torch 2.9
    TorchMuon = torch.optim.Muon
else:

    class TorchMuon(torch.optim.Optimizer):
        """Stands where an older torch has no Muon, whose checks and checkpoints are ours, too."""

        def __init__(self, *_: Any) -> None:
            raise RuntimeError(f"Muon needs torch 2.9 or newer, and {torch.__version__} is installed")


def refuse_wide_sums(params: Iterable[Tensor]) -> None:
    """Refuses to put fp32 sums into `p.grad` of 16-bit parameters where torch has no room for them.

    Raises:
        RuntimeError: the text has the remedy.
    """
    if not HAS_GRAD_DTYPE and any(param.dtype in (torch.float16, torch.bfloat16) for param in params):
        raise RuntimeError(
            f"last=True puts fp32 sums into p.grad, which has 16 bits for these parameters with torch "
            f"{torch.__version__}; leave it out, and step() closes the window, or install torch 2.10 or newer"
        )


def incrementing(tensors: Iterable[Tensor]) -> partial[Any]:
    """The call of a C function that does what `torch.autograd.graph.increment_version` does in Python."""
    return partial(torch._C._increment_version, tensors)  # noqa: SLF001
