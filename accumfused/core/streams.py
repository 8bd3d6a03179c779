"""Gradients and sums that a stream still reads when the window lets go of them.

torch's allocator gives freed memory at once to the next tensor of the stream on which it was allocated. Another
stream's launches may not have read it by then: after a backward pass on a side stream and an `accumulate()` on the
default stream, the next forward pass on the side stream would write into gradients that the fold has not read. A tensor
that is recorded for a stream (`Tensor.record_stream`) goes back to the allocator when that stream has come so far.

torch keeps a record for as long as the tensor's memory is not freed, and forgets it then. So memory is recorded anew
when it comes back, at the same address, as another gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import repeat
from weakref import ref

import torch
from torch import Tensor

from accumfused.core.rows import Grads

Stream = tuple[torch.device, int]


def has_streams(device: torch.device) -> bool:
    """Tells whether a device's work waits on streams, for which torch keeps memory."""
    return device.type == "cuda"


class StreamUses:
    """Records lists of tensors for the current streams, at up to a microsecond a tensor: so each list once.

    A list is known as long as it lives and has the same tensors. It holds them, so none of their memory can have been
    freed and have come back in the meantime. Addresses alone would not tell.
    """

    def __init__(self) -> None:
        self._known: deque[tuple[ref[Grads], list[int], Stream]] = deque(maxlen=8)  # with the ids of their tensors

    def record(self, devices: Iterable[torch.device], *lists: Grads, by_default_stream: bool = True) -> None:
        """Records the tensors of these lists, each for the current stream of its device.

        Args:
            by_default_stream: if a current stream is the default one, too.
        """
        for device in filter(has_streams, devices):
            here = torch.cuda.current_stream(device)
            if not by_default_stream and here.cuda_stream == 0:
                continue
            new = [grads for grads in lists if self._is_new(grads, (device, here.cuda_stream))]
            tensors = [tensor for grads in new for tensor in grads if tensor is not None and tensor.device == device]
            deque(map(Tensor.record_stream, tensors, repeat(here)), maxlen=0)

    def _is_new(self, grads: Grads, stream: Stream) -> bool:
        """Tells whether a list is not known for a stream, and notes it: a list may get more tensors, in its gaps."""
        ids = list(map(id, grads))
        if any(known() is grads and (of, by) == (ids, stream) for known, of, by in self._known):
            return False
        self._known.append((ref(grads), ids, stream))
        return True
