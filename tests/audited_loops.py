"""Training loops for the audit, as people write them: each has the one fault that names it, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import accumfused as af

Batch = tuple[Tensor, Tensor]
Loss = Callable[..., Tensor]  # of a model, x and y
Body = Callable[..., None]  # what a loop does for each micro-batch, with a model, an optimizer, its number, x and y
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


def mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def count(y: Tensor) -> Tensor:
    """The tokens that count."""
    return (y != -100).sum()


def adamw(params: Any, **_: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def watched(
    body: Body, model: nn.Module | None = None, make: Any = torch.optim.SGD, steps: int = K,
    batches: Sequence[Batch] | None = None,
) -> Any:  # fmt: skip
    """The report of two windows."""
    model = net() if model is None else model
    optimizer = make(model.parameters(), lr=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=steps) as report:
        for i, (x, y) in enumerate(batches or samples(2 * K)):
            body(model, optimizer, i, x, y)
    return report


def folded(
    loss: Loss = mean, weight: Callable[[Tensor], Any] = len, model: nn.Module | None = None,
    batches: Sequence[Batch] | None = None, **options: Any,
) -> Any:  # fmt: skip
    """The report of this package's windows."""
    model = model or net()
    optimizer = af.AdamW(model.parameters(), lr=0.01, **options)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for (x, y), last in af.windows(batches or samples(2 * K), K):
            loss(model, x, y).backward()
            optimizer.accumulate(weight=weight(y))
            if last:
                optimizer.step()
    return report


def ends(i: int) -> bool:
    """Whether a micro-batch is the last of its window."""
    return (i + 1) % K == 0


def update(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def end(optimizer: Any, i: int) -> None:
    if ends(i):
        update(optimizer)


def dividing(loss: Loss = mean) -> Body:
    """The loop of every tutorial."""

    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (loss(model, x, y) / K).backward()
        end(optimizer, i)

    return body


# ---- faults ----------------------------------------------------------------------------------------------------------


def not_divided(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    mean(model, x, y).backward()
    if ends(i):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    end(optimizer, i)


def remainder(count: int, at_the_end: str, make: Any = torch.optim.SGD) -> Any:
    """Two epochs of two whole windows and so many micro-batches, which a loop zeroes, steps with, or forgets."""
    model, batches = net(), samples(2 * K + count)
    optimizer = make(model.parameters(), lr=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for _ in range(2):
            for i, (x, y) in enumerate(batches):
                dividing()(model, optimizer, i, x, y)
            if at_the_end == "step":
                update(optimizer)
            elif at_the_end == "zero_grad":
                optimizer.zero_grad()
    return report


def batch_norm() -> Any:
    batch, model = samples(1, 4 * K)[0], net(nn.BatchNorm1d(16), nn.ReLU())
    return af.audit(model, lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]), batch, K)


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


def balanced(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, balance = model(x)
    return F.cross_entropy(out, y) + 0.1 * balance


def auxiliary() -> Any:
    return af.audit(Experts(), lambda model, batch: balanced(model, *batch), samples(1, 8 * K)[0], K)


def never_arrived(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    """A framework that takes the first micro-batch of each window, and divides by all."""
    if i % K == 0:
        (mean(model, x, y) / K).backward()
        update(optimizer)


def clip(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    (mean(model, x, y) / K).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    end(optimizer, i)


def unscale() -> Any:
    """Clips what is still multiplied by the scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        scaler.scale(mean(model, x, y) / K).backward()
        if ends(i):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return watched(body, make=adamw)


def zero_grad(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    (mean(model, x, y) / K).backward()
    if ends(i):
        optimizer.step()


def in_16_bits(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x.bfloat16()).float(), y)


def weights_changed() -> Any:
    """An average of the weights is swapped in for a look at it, and stays."""
    model = net()
    average = {name: 0.9 * tensor for name, tensor in model.state_dict().items()}

    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (mean(model, x, y) / K).backward()
        if i % K == 1:
            for name, param in model.named_parameters():
                param.data.copy_(average[name])
        end(optimizer, i)

    return watched(body, model, af.SGD)


# ---- sound loops -----------------------------------------------------------------------------------------------------


def plain(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    """A window's clip is at its end."""
    (mean(model, x, y) / K).backward()
    if ends(i):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    end(optimizer, i)


def token_sums() -> Any:
    """A masked sum of losses, divided by the tokens of the whole window, as newer trainers do."""
    batches = tokens(3 * K)

    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        window = batches[i - i % K :][:K]
        losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
        ((losses * (y != -100).flatten()).sum() / sum(count(y) for _, y in window)).backward()
        end(optimizer, i)

    return watched(body, Language(), adamw, batches=batches)


def scaled() -> Any:
    """A stock scaler, its calls in the order of torch's manual."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x).float(), y) / K
        scaler.scale(loss).backward()
        if ends(i):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return watched(body, make=adamw)


def two_optimizers() -> Any:
    """Tied weights; the matrices have an optimizer of their own, and both step at a window's end."""
    model = Language()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizers = [af.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]
    with af.audit.watch(model, optimizers, gradient_accumulation_steps=K) as report:
        for i, (x, _) in enumerate(tokens(2 * K)):
            (token_loss(model, x[:, :-1].repeat(1, 2)[:, :12], x) / K).backward()
            for optimizer in optimizers:
                end(optimizer, i)
    return report


def remainder_of_a_plain_loop() -> Any:
    """The last micro-batch has fewer samples, the last window fewer micro-batches, and the loop counts both."""
    model, batches = net(), [*samples(K + 1), *samples(1, 3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for window in (batches[:K], batches[K:]):
            optimizer.zero_grad(set_to_none=False)
            total = sum(len(y) for _, y in window)
            for x, y in window:
                (F.mse_loss(model(x), F.one_hot(y, 3).float()) * len(y) / total).backward()
            optimizer.step()
    return report


def one_batch() -> Any:
    """Nothing is watched: a model with a buffer, and a batch of equal samples."""
    model = Language()
    batch = torch.randint(16, (2 * K, 12), generator=torch.Generator().manual_seed(3))
    return af.audit(model, lambda net, text: token_loss(net, text[:, :-1].repeat(1, 2)[:, :12], text), batch, K)


FAULTS: dict[str, Loop] = {
    "not_divided": lambda: watched(not_divided, make=adamw),
    "divided_twice": lambda: folded(lambda model, x, y: mean(model, x, y) / K, lambda y: 1.0),
    "mean_of_means": lambda: watched(dividing(token_loss), Language(), adamw, batches=tokens(2 * K)),
    "remainder_dropped": lambda: remainder(2, "zero_grad"),
    "remainder_under_weighted": lambda: remainder(2, "step"),
    "remainder_leaked": lambda: remainder(1, "nothing", adamw),
    "batch_norm": batch_norm,
    "negatives": negatives,
    "auxiliary": auxiliary,
    "never_arrived": lambda: watched(never_arrived, make=adamw),
    "clip": lambda: watched(clip),
    "unscale": unscale,
    "zero_grad": lambda: watched(zero_grad, make=adamw),
    "sums_in_16_bits": lambda: watched(dividing(in_16_bits), net().bfloat16()),
    "weights_changed": weights_changed,
}
SOUND: dict[str, Loop] = {
    "plain": lambda: watched(plain, net(nn.BatchNorm1d(16).eval(), nn.Tanh()), adamw, batches=samples(3 * K)),
    "token_sums": token_sums,
    "weighted_windows": lambda: folded(token_loss, count, Language(), tokens(2 * K + 3), max_grad_norm=0.1),
    "scaled": scaled,
    "two_optimizers": two_optimizers,
    "half_parameters": lambda: folded(in_16_bits, model=net().bfloat16()),
    "remainder_of_a_plain_loop": remainder_of_a_plain_loop,
    "one_batch": one_batch,
}
