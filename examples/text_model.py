"""A small GPT over bytes, in plain PyTorch."""

from __future__ import annotations

import torch
from text_data import IGNORED, VOCABULARY, Batch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a LayerNorm and a residual connection.

    No biases: the loss does not depend on a key's bias, so its gradient is rounding noise, and Adam, which divides by
    the gradient's size, makes full-sized updates of it. Runs that are equal up to rounding would drift apart.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [samples, heads, length, width / heads]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """A decoder-only transformer; the head shares the embedding's weight."""

    def __init__(self, context: int, width: int = 256, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Args: tokens: [samples, length]. Returns: logits [samples, length, VOCABULARY]."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return F.linear(self.norm(self.blocks(x)), self.embedding.weight)

    def loss(self, batch: Batch) -> Tensor:
        """The mean cross-entropy over the batch's tokens; padding does not count."""
        return F.cross_entropy(self(batch.inputs).flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
