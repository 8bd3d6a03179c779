"""Predictions written without a GPU, for one H200. A run puts what it has measured beside them.

They come from counted bytes, the instructions in the machine code for compute capability 9.0 (CUDA 13.0, November
2026), and 132 multiprocessors at 1.98 GHz over 4.3 TB/s.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prediction:
    """Args: bytes: an element; share: from..to, of the rate of a copy; reason: where it is not memory alone."""

    bytes: float
    share: tuple[float, float]
    reason: str = ""

    def verdict(self, share: float) -> str:
        low, high = self.share
        return "as predicted" if low <= share <= high else "slower" if share < low else "faster"


_ANY = Prediction(0, (0.75, 0.92), "108 instructions an element")

SHARES = {
    "norm, fp32": Prediction(4, (0.97, 1.02)),
    "norm, bf16": Prediction(2, (0.90, 0.97)),
    "accumulate, fp32": Prediction(12, (0.92, 0.96)),
    "accumulate, bf16": Prediction(10, (0.92, 0.96)),
    "first accumulate, bf16": Prediction(6, (0.88, 0.94), "20 KB in flight on a multiprocessor"),
    "AdamW, fp32, fp32 states, fp32 gradients": Prediction(28, (0.90, 0.95)),
    "AdamW, fp32, fp32 states, bf16 gradients": Prediction(26, (0.90, 0.95)),
    "AMSGrad, fp32, fp32 states, fp32 gradients": Prediction(36, (0.90, 0.95)),
    "Lion, fp32, fp32 states, fp32 gradients": Prediction(20, (0.90, 0.95)),
    "SGD-m, fp32, fp32 states, fp32 gradients": Prediction(20, (0.90, 0.95)),
    "AdamW, split16, fp32 states, bf16 gradients": Prediction(26, (0.90, 0.94)),
    "AdamW, split8, int8 states, bf16 gradients": Prediction(12, (0.70, 0.85), "70 instructions an element"),
    "AdamW, split16, int8 states, bf16 gradients": Prediction(14, (0.80, 0.90), "68 instructions an element"),
    "AdamW, bf16 stochastic, int8 states, bf16 gradients": Prediction(10, (0.65, 0.78), "67 instructions an element"),
    "AdamW, bf16 + fp32 master, bf16 states, bf16 gradients": _ANY,
    "Lion, bf16 stochastic, bf16 states, bf16 gradients": _ANY,
    "AdamW, fp16 + fp32 master, fp32 states, fp16 gradients": _ANY,
    "AdamW, fp32, fp32 states, fp32 gradients, 4 bytes off": Prediction(28, (0.75, 0.92), "the gradient by element"),
}

# Clip and AdamW step, replayed from a graph.
MICROSECONDS = {"one tensor of 2M": 45, "1000 tensors of 64": 28, "10,000 tensors of 64": 115, "GPT-2 124M": 1010}
