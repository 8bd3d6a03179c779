"""Training loops for the audit, as people write them: each has the one fault that names it, or none.

The audit was tuned on half of them. The other half was drawn before it was written, and looked at when it was done:
remainder_under_weighted, dropout, not_divided, auxiliary, sums_in_16_bits, mean_of_means, divided_twice,
remainder_leaked; token_sums, one_batch, weighted_windows, plain. At first sight it named seven of these eight faults,
and raised no alarm. It missed dropout: one layer on a CPU draws the same masks for a batch and for its micro-batches,
so there was no difference. It names random numbers since, whether or not they happen to be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import processes
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import accumfused as af

Batch = tuple[Tensor, Tensor]
Loop = Callable[[], Any]  # its report
K = 4


def samples(count: int, size: int = 4, seed: int = 1) -> list[Batch]:
    torch.manual_seed(seed)
    return [(torch.randn(size, 6), torch.randint(3, (size,))) for _ in range(count)]


def tokens(count: int, seed: int = 2) -> list[Batch]:
    """Sequences with padding: the micro-batches differ in the number of tokens that count."""
    torch.manual_seed(seed)
    lengths = torch.randint(1, 12, (count, 4, 1))
    text = torch.randint(16, (count, 4, 12))
    return [(t, ((t * 7 + 3) % 16).where(torch.arange(12) < n, -100)) for t, n in zip(text, lengths, strict=True)]


def net(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *(between or [nn.Tanh()]), nn.Linear(16, 3))


class Language(nn.Module):
    """A small GPT-like model: its embedding and its head are one tensor, its mask a buffer."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.full((12, 12), -torch.inf).triu(1))

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        return self.head(self.norm(x + self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0]))


def token_loss(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction)


def watched(
    body: Callable[..., Any], model: nn.Module | None = None, make: Any = torch.optim.SGD, steps: int = K
) -> Any:
    """The report of two windows: `body(model, optimizer, index, x, y)` runs for each micro-batch."""
    model = model or net()
    optimizer = make(model.parameters(), lr=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=steps) as report:
        for i, (x, y) in enumerate(samples(2 * K)):
            body(model, optimizer, i, x, y)
    return report


def end(optimizer: Any, i: int) -> None:
    if (i + 1) % K == 0:
        optimizer.step()
        optimizer.zero_grad()


# ---- faults ----------------------------------------------------------------------------------------------------------


def not_divided() -> Any:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for i, (x, y) in enumerate(samples(2 * K)):
            F.cross_entropy(model(x), y).backward()
            if (i + 1) % K == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return report


def divided_twice() -> Any:
    model = net()
    optimizer = af.AdamW(model.parameters(), lr=0.01)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for (x, y), last in af.windows(samples(2 * K), K):
            (F.cross_entropy(model(x), y) / K).backward()
            optimizer.accumulate(weight=1.0)
            if last:
                optimizer.step()
    return report


def mean_of_means() -> Any:
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for i, (x, y) in enumerate(tokens(2 * K)):
            (token_loss(model, x, y) / K).backward()
            if (i + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad()
    return report


def remainder_dropped() -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for _ in range(2):
            optimizer.zero_grad()
            for i, (x, y) in enumerate(samples(2 * K + 2)):
                (F.cross_entropy(model(x), y) / K).backward()
                if (i + 1) % K == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    return report


def remainder_under_weighted() -> Any:
    model, batches = net(), samples(2 * K + 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for i, (x, y) in enumerate(batches):
            loss = F.cross_entropy(model(x), y) / K
            loss.backward()
            if (i + 1) % K == 0 or i + 1 == len(batches):
                optimizer.step()
                optimizer.zero_grad()
    return report


def remainder_leaked() -> Any:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for _ in range(2):
            for i, (x, y) in enumerate(samples(2 * K + 1)):
                (F.cross_entropy(model(x), y) / K).backward()
                if (i + 1) % K == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    return report


def batch_norm() -> Any:
    model = net(nn.BatchNorm1d(16), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for i, (x, y) in enumerate(samples(2 * K)):
            (F.cross_entropy(model(x), y) / K).backward()
            if (i + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad()
    return report


def dropout() -> Any:
    model = net(nn.ReLU(), nn.Dropout(0.3))
    x, y = samples(1, 4 * K)[0]
    return af.audit(model, lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]), (x, y), K)


def negatives() -> Any:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        a, b = (F.normalize(model(batch[name]), dim=1) for name in ("image", "text"))
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))

    image = torch.randn(16, 6)
    return af.audit(model, loss, {"image": image, "text": image + 0.1 * torch.randn(16, 6)}, K)


class Experts(nn.Module):
    """A mixture of experts: the loss that balances them is a product of two means over the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(6, 4), nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.router(x).softmax(1)
        chosen = chances.argmax(1)
        out = torch.stack([expert(x) for expert in self.experts], 1)[torch.arange(len(x)), chosen]
        balance = 4 * (F.one_hot(chosen, 4).float().mean(0) * chances.mean(0)).sum()
        return out * chances.gather(1, chosen[:, None]), balance


def auxiliary() -> Any:
    model = Experts()
    optimizer = af.AdamW(model.parameters(), lr=0.01)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for (x, y), last in af.windows(samples(2 * K, 8), K):
            out, balance = model(x)
            (F.cross_entropy(out, y) + 0.1 * balance).backward()
            optimizer.accumulate(weight=len(x))
            if last:
                optimizer.step()
    return report


def never_arrived() -> Any:
    """A framework that takes the first micro-batch of each window, and divides by all."""
    model, batches = net(), iter(samples(4 * K))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for window in zip(*[batches] * K, strict=True):
            x, y = window[0]
            (F.cross_entropy(model(x), y) / K).backward()
            optimizer.step()
            optimizer.zero_grad()
    return report


def clip() -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for i, (x, y) in enumerate(samples(2 * K)):
            (F.cross_entropy(model(x), y) / K).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if (i + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad()
    return report


def unscale() -> Any:
    """Clips what is still multiplied by the scale."""
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for i, (x, y) in enumerate(samples(2 * K)):
            scaler.scale(F.cross_entropy(model(x), y) / K).backward()
            if (i + 1) % K == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return report


def zero_grad() -> Any:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for i, (x, y) in enumerate(samples(2 * K)):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) / K).backward()
            if (i + 1) % K == 0:
                optimizer.step()
    return report


def ranks_of_one() -> Any:
    """A process of DDP, which divides by the number of processes, whatever the number of their tokens."""
    model = DistributedDataParallel(Language())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(x, y if dist.get_rank() else y.where(torch.arange(12) < 2, -100)) for x, y in tokens(1) * 2 * K]
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K, process_group=dist.group.WORLD) as report:
        for i, (x, y) in enumerate(batches):
            loss = token_loss(model, x, y) / K
            if (i + 1) % K:
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return report


def ranks() -> Any:
    return processes.run(2, ranks_of_one)[0]


def sums_in_16_bits() -> Any:
    model = net().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for i, (x, y) in enumerate(samples(2 * K)):
            (F.cross_entropy(model(x.bfloat16()).float(), y) / K).backward()
            if (i + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad()
    return report


def weights_changed() -> Any:
    """An average of the weights is swapped in for a look at it, and stays."""
    model = net()
    average = {name: 0.9 * tensor for name, tensor in model.state_dict().items()}
    optimizer = af.SGD(model.parameters(), lr=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for i, (x, y) in enumerate(samples(2 * K)):
            (F.cross_entropy(model(x), y) / K).backward()
            if i % K == 1:
                for name, param in model.named_parameters():
                    param.data.copy_(average[name])
            if (i + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad()
    return report


# ---- sound loops -----------------------------------------------------------------------------------------------------


def plain() -> Any:
    """The loop of every tutorial; a BatchNorm in it is frozen, and a window's clip is at its end."""
    model = net(nn.BatchNorm1d(16).eval(), nn.Tanh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for i, (x, y) in enumerate(samples(3 * K)):
            loss = F.cross_entropy(model(x), y) / K
            loss.backward()
            if (i + 1) % K == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    return report


def token_sums() -> Any:
    """A masked sum of losses, divided by the tokens of the whole window, as newer trainers do."""
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = tokens(3 * K)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for start in range(0, len(batches), K):
            window = batches[start : start + K]
            count = sum((y != -100).sum() for _, y in window)
            for x, y in window:
                losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
                ((losses * (y != -100).flatten()).sum() / count).backward()
            optimizer.step()
            optimizer.zero_grad()
    return report


def weighted_windows() -> Any:
    """This package's windows: unequal numbers of tokens, a remainder, a clip."""
    model = Language()
    optimizer = af.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for (x, y), last in af.windows(tokens(2 * K + 3), K):
            token_loss(model, x, y).backward()
            optimizer.accumulate(weight=(y != -100).sum())
            if last:
                optimizer.step()
    return report


def scaled() -> Any:
    """A stock scaler, its calls in the order of torch's manual."""
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for i, (x, y) in enumerate(samples(2 * K)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y) / K
            scaler.scale(loss).backward()
            if (i + 1) % K == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return report


def two_optimizers() -> Any:
    """Tied weights; the matrices have an optimizer of their own, and both step at a window's end."""
    model = Language()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    first, second = af.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)
    with af.audit.watch(model, [first, second], gradient_accumulation_steps=K) as report:
        for i, (x, _) in enumerate(tokens(2 * K)):
            (token_loss(model, x[:, :-1].repeat(1, 2)[:, :12], x) / K).backward()
            if (i + 1) % K == 0:
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad()
    return report


def half_parameters() -> Any:
    """Parameters in bf16, and sums in fp32."""
    model = net().bfloat16()
    optimizer = af.AdamW(model.parameters(), lr=0.01)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for (x, y), last in af.windows(samples(2 * K), K):
            F.cross_entropy(model(x.bfloat16()).float(), y).backward()
            optimizer.accumulate(weight=len(y))
            if last:
                optimizer.step()
    return report


def remainder_of_a_plain_loop() -> Any:
    """The last micro-batch has fewer samples, the last window fewer micro-batches, and the loop counts both."""
    model, batches = net(), [*samples(K + 1), *samples(1, 3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def windows() -> Iterator[list[Batch]]:
        for start in range(0, len(batches), K):
            yield batches[start : start + K]

    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for window in windows():
            optimizer.zero_grad(set_to_none=False)
            count = sum(len(y) for _, y in window)
            for x, y in window:
                (F.mse_loss(model(x), F.one_hot(y, 3).float()) * len(y) / count).backward()
            optimizer.step()
    return report


def one_batch() -> Any:
    """Nothing is watched: a model with a buffer, and a batch of equal samples."""
    model = Language()
    batch = torch.randint(16, (2 * K, 12), generator=torch.Generator().manual_seed(3))
    return af.audit(model, lambda net, text: token_loss(net, text[:, :-1].repeat(1, 2)[:, :12], text), batch, K)


FAULTS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        not_divided, divided_twice, mean_of_means, remainder_dropped, remainder_under_weighted, remainder_leaked,
        batch_norm, dropout, negatives, auxiliary, never_arrived, clip, unscale, zero_grad, ranks, sums_in_16_bits,
        weights_changed,
    )
}  # fmt: skip
SOUND: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        plain, token_sums, weighted_windows, scaled, two_optimizers, half_parameters, remainder_of_a_plain_loop,
        one_batch,
    )
}  # fmt: skip
