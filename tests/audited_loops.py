"""Loops as people write them, to count the audit's verdicts: 65 that are right, 47 with a fault.

`RIGHT` loops make the update of the large batch, `FAULTS` do not. Every second one of the first 90 was held back until
the audit was done: at first sight of that half it accused none of 28 right loops, could not tell in 3 of them, and
found all 19 faults.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import accumfused as af

Batch = tuple[Tensor, Tensor]
Loss = Callable[..., Any]  # of a model, x and y
Body = Callable[..., None]  # what a loop does with a micro-batch: takes model, optimizer, its number, x and y
K = 4


# ---- data, models, losses --------------------------------------------------------------------------------------------


def samples(count: int = 2 * K, size: int = 6) -> list[Batch]:
    torch.manual_seed(1)
    return [(torch.randn(size, 6), torch.randint(3, (size,))) for _ in range(count)]


def tokens(count: int = 2 * K, seed: int = 2) -> list[Batch]:
    """Sequences with padding: the micro-batches differ in the number of tokens that count."""
    torch.manual_seed(seed)
    lengths = torch.randint(1, 12, (count, 4, 1))
    text = torch.randint(16, (count, 4, 12))
    return [(t, ((t * 7 + 3) % 16).where(torch.arange(12) < n, -100)) for t, n in zip(text, lengths, strict=True)]


def smaller_last() -> list[Batch]:
    """Each window's last micro-batch has fewer samples."""
    return [*samples(K - 1), *samples(1, 2), *samples(K - 1), *samples(1, 2)]


def net(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *(between or [nn.Tanh()]), nn.Linear(16, 3))


class Seeded(nn.Module):
    """Its subclasses have the same weights each time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)


class WithLoss(Seeded):
    """Returns its loss, as models of transformers do."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.net = net(*between)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.net(x)
        return {"loss": self.loss(out, labels), "logits": out}

    def loss(self, out: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(out.float(), labels)


class Language(Seeded):
    """A small GPT-like model: its embedding and its head are one tensor, its mask a buffer."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.full((12, 12), -torch.inf).triu(1))

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        return self.head(self.norm(x + self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0]))


class Experts(Seeded):
    """A mixture of experts: the loss that balances them is a product of two means over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 4), nn.ModuleList(nn.Linear(6, 3) for _ in range(4))
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        chances = self.router(x).softmax(1)
        chosen = chances.argmax(1)
        out = torch.stack([expert(x) for expert in self.experts], 1)[torch.arange(len(x)), chosen]
        self.balance = 4 * (F.one_hot(chosen, 4).float().mean(0) * chances.mean(0)).sum()
        return out * chances.gather(1, chosen[:, None])


class Towers(Seeded):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x.roll(1, 1))


class Vae(Seeded):
    """Returns the output, and each element's distance from a normal distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_var = self.encoder(x).chunk(2, 1)
        out = self.decoder(mean + torch.randn_like(mean) * (0.5 * log_var).exp())
        return out, -0.5 * (1 + log_var - mean**2 - log_var.exp())


class Policy(Seeded):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.pi, self.v = nn.Linear(6, 12), nn.Linear(12, 3), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.pi(h), self.v(h)[:, 0]


def mean(model: Any, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model(x), y, reduction=reduction)


def token_loss(model: Any, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction)


def masked(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of all tokens' losses, and their count."""
    losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten().clamp(0), reduction="none")
    mask = (y != -100).flatten().float()
    return (losses * mask).sum(), mask.sum()


def logp(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.log_softmax(model(x), 1).gather(1, y[:, None])[:, 0]


def preferred(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """The loss of preference pairs: the halves of a batch are chosen and rejected."""
    chosen, rejected = model(x).sum(1).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def contrasted(model: Any, x: Tensor, y: Any = None) -> Tensor:
    """Each sample's negatives are the others of its micro-batch."""
    a, b = (F.normalize(each, dim=1) for each in model(x))
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


def balanced(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return mean(model, x, y) + 0.1 * model.balance


def advantages(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Normalized by micro-batch."""
    advantage = (x[:, 5] - x[:, 5].mean()) / x[:, 5].std()
    return -(logp(model, x, y) * advantage).mean()


def in_16_bits(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x.bfloat16()).float(), y)


def l2(model: nn.Module, weight: float = 1e-3) -> Any:
    return weight * sum(p.square().sum() for p in model.parameters())


def count(y: Tensor) -> Tensor:
    """The tokens that count."""
    return (y != -100).sum()


def total(data: Sequence[Batch], i: int) -> Any:
    """The tokens of a micro-batch's window."""
    return sum(count(y) for _, y in data[i - i % K :][:K])


# ---- loops -----------------------------------------------------------------------------------------------------------


def ends(i: int) -> bool:
    """Whether a micro-batch is the last of its window."""
    return (i + 1) % K == 0


def update(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def end(optimizer: Any, i: int) -> None:
    if ends(i):
        update(optimizer)


def watched(
    body: Body, model: nn.Module | None = None, batches: Sequence[Any] | None = None, *, make: Any = torch.optim.SGD,
    steps: int = K,
) -> Any:  # fmt: skip
    """The report of a loop, of two windows if nothing else is said."""
    model = net() if model is None else model
    optimizer = make(model.parameters(), lr=0.05)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=steps) as report:
        for i, (x, y) in enumerate(samples() if batches is None else batches):
            body(model, optimizer, i, x, y)
    return report


def body_of(backward: Callable[[Any, int, Tensor, Tensor], Any], change: Callable[[Any], Any] = lambda _: None) -> Body:
    """A loop whose micro-batch calls `backward(model, i, x, y)` on a loss that this returns.

    Args:
        change: what happens to the model right before the step.
    """

    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        backward(model, i, x, y).backward()
        if ends(i):
            change(model)
        end(optimizer, i)

    return body


def dividing(loss: Loss = mean, by: float = K, change: Callable[[Any], Any] = lambda _: None) -> Body:
    """The loop of every tutorial."""
    return body_of(lambda model, _, x, y: loss(model, x, y) / by, change)


def with_scaler(then: Callable[..., Any], loss: Loss = mean, **options: Any) -> Any:
    """The report of a loop with a GradScaler.

    Args:
        then: what follows each backward: takes scaler, model, optimizer, and the micro-batch's number.
        options: of `watched`.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        scaler.scale(loss(model, x, y) / K).backward()
        then(scaler, model, optimizer, i)
        if ends(i):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return watched(body, **options)


def unscale_and_clip(scaler: Any, model: nn.Module, optimizer: Any, i: int) -> None:
    if ends(i):
        scaler.unscale_(optimizer)
        clip(model)


def clip(model: nn.Module, limit: float = 0.1) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), limit)


def folded(
    loss: Loss = mean, weight: Callable[[Tensor], Any] = len, model: nn.Module | None = None,
    batches: Sequence[Batch] | None = None, **options: Any,
) -> Any:  # fmt: skip
    """The report of this package's windows."""
    model = model or net()
    optimizer = af.AdamW(model.parameters(), lr=0.01, **options)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for (x, y), last in af.windows(batches or samples(), K):
            loss(model, x, y).backward()
            optimizer.accumulate(weight=weight(y))
            if last:
                optimizer.step()
    return report


def epochs(data: Sequence[Batch], *, zeroes: bool) -> Any:
    """Two epochs, whose last micro-batches make no step: the next epoch zeroes them, or goes on with them."""

    def twice() -> Iterator[Batch]:
        yield from data
        if zeroes:
            optimizer.zero_grad()
        yield from data

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for i, (x, y) in enumerate(twice()):
            dividing()(model, optimizer, i % len(data), x, y)
    return report


def once(loss: Loss, model: nn.Module | None = None, size: int = 16, **options: Any) -> Any:
    """The report of one batch, computed whole and in micro-batches."""
    return af.audit(model or net(), lambda net, batch: loss(net, *batch), samples(1, size)[0], K, **options)


RIGHT: dict[str, Callable[[], Any]] = {}
FAULTS: dict[str, Callable[[], Any]] = {}
CAUSES: dict[str, str] = {}  # the hint at each fault; "": it cannot be told


def _named(kind: str, cause: str | None, options: dict[str, Callable[[], Any]]) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        def case() -> Any:
            own = {name: option() for name, option in options.items()}
            if kind == "case":
                return function()
            return watched(dividing(function) if kind == "loss" else function, **own)

        (RIGHT if cause is None else FAULTS)[function.__name__] = case
        CAUSES.update({} if cause is None else {function.__name__: cause})
        return function

    return add


def right(kind: str, **options: Callable[[], Any]) -> Callable[[Any], Any]:
    """Adds a "loss" that each micro-batch divides by K, a "body", or a whole "case". Options are of `watched`."""
    return _named(kind, None, options)


def fault(cause: str, kind: str, **options: Callable[[], Any]) -> Callable[[Any], Any]:
    """Adds one with a fault."""
    return _named(kind, cause, options)


# ---- right: losses ---------------------------------------------------------------------------------------------------

Model = Any  # of any output


@right("loss", model=Policy)
def ppo(model: Model, x: Tensor, y: Tensor) -> Any:
    logits, value = model(x)
    log_probs = logits.log_softmax(1)
    ratio = (log_probs.gather(1, y[:, None])[:, 0] + 1.0).exp()
    gain = torch.min(ratio * x[:, 0], ratio.clamp(0.8, 1.2) * x[:, 0])
    entropy = -(log_probs.exp() * log_probs).sum(1)
    return -gain.mean() + 0.5 * F.mse_loss(value, x[:, 1]) - 0.01 * entropy.mean()


@right("case")
def dpo_in_two_calls_with_a_reference() -> Any:
    reference = net().requires_grad_(False)

    def loss(model: Model, x: Tensor, y: Tensor) -> Any:
        ours = logp(model, x, y) - logp(model, x.flip(1), y)
        theirs = logp(reference, x, y) - logp(reference, x.flip(1), y)
        return -F.logsigmoid(0.1 * (ours - theirs)).mean()

    return watched(dividing(loss))


@right("loss")
def siamese(model: Model, x: Tensor, y: Tensor) -> Any:
    a, b = model(x).chunk(2)
    return (1 - F.cosine_similarity(a, b)).mean()


@right("loss")
def margin_ranking(model: Model, x: Tensor, y: Tensor) -> Any:
    a, b = model(x)[:, 0].chunk(2)
    return F.margin_ranking_loss(a, b, torch.ones(3), margin=0.5)


@right("loss")
def reward_model_of_pairs(model: Model, x: Tensor, y: Tensor) -> Any:
    rewards = model(torch.cat([x, x.roll(2, 1)]))[:, 0]
    return -F.logsigmoid(rewards[: len(x)] - rewards[len(x) :]).mean()


@right("loss", model=Vae)
def vae(model: Model, x: Tensor, y: Tensor) -> Any:
    out, kl = model(x)
    return (F.mse_loss(out, x, reduction="sum") + 0.3 * kl.sum()) / len(x)


@right("loss", model=Vae)
def vae_of_means(model: Model, x: Tensor, y: Tensor) -> Any:
    out, kl = model(x)
    return F.mse_loss(out, x) + 0.00025 * torch.mean(torch.sum(kl, dim=1), dim=0)


@right("case")
def distillation() -> Any:
    teacher, heat = net().requires_grad_(False), 2.0

    def loss(model: Model, x: Tensor, y: Tensor) -> Any:
        out = model(x)
        with torch.no_grad():
            soft = (teacher(x.flip(1)) / heat).softmax(1)
        kl = F.kl_div((out / heat).log_softmax(1), soft, reduction="batchmean") * heat * heat
        return 0.3 * kl + 0.7 * F.cross_entropy(out, y)

    return watched(dividing(loss))


@right("loss")
def heat_squared_is_the_number_of_micro_batches(model: Model, x: Tensor, y: Tensor) -> Any:
    return F.kl_div((model(x) / 2).log_softmax(1), x[:, :3].softmax(1), reduction="batchmean") * (2.0 * 2.0)


@right("loss")
def focal(model: Model, x: Tensor, y: Tensor) -> Any:
    each = F.cross_entropy(model(x), y, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


@right("loss", model=Policy)
def two_tasks_in_one_loss(model: Model, x: Tensor, y: Tensor) -> Any:
    logits, value = model(x)
    return 0.8 * F.cross_entropy(logits, y) + 0.2 * F.mse_loss(value, x[:, 0])


@right("loss")
def wasserstein_with_gradient_penalty(model: Model, x: Tensor, y: Tensor) -> Any:
    fake = x.flip(1)
    mixed = (0.3 * x + 0.7 * fake).requires_grad_()
    (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
    penalty = (slope.norm(2, dim=1) - 1).square().mean()
    return model(fake).mean() - model(x).mean() + 10 * penalty


@right("loss")
def diffusion(model: Model, x: Tensor, y: Tensor) -> Any:
    time = torch.rand(len(x), 1)
    return F.mse_loss(model((1 - time) * x + time * torch.randn_like(x)), torch.randn(len(x), 3))


@right("loss", model=lambda: nn.Linear(6, 5), batches=lambda: [
    (torch.randn(4, 9, 6), torch.randint(1, 5, (4, 3))) for _ in range(2 * K)
])  # fmt: skip
def connectionist_temporal_classification(model: Model, x: Tensor, y: Tensor) -> Any:
    return F.ctc_loss(model(x).log_softmax(2).transpose(0, 1), y, torch.full((4,), 9), torch.full((4,), 3))


@right("loss", model=lambda: net(nn.Dropout(0.2)))
def dropout_twice(model: Model, x: Tensor, y: Tensor) -> Any:
    one, other = model(x), model(x)
    kl = F.kl_div(one.log_softmax(1), other.softmax(1), reduction="none").sum(1).mean()
    return 0.5 * (F.cross_entropy(one, y) + F.cross_entropy(other, y)) + kl


def _short(losses: dict[str, Loss]) -> None:
    for name, loss in losses.items():
        RIGHT[name] = functools.partial(watched, dividing(loss))


_short({
    "reinforce": lambda m, x, y: -(logp(m, x, y) * x[:, 5]).mean(),
    "minus_the_mean": lambda m, x, y: -logp(m, x, y).mean(),
    "dpo_in_one_batch": preferred,
    "triplets": lambda m, x, y: F.triplet_margin_loss(*m(x).chunk(3)),
    "factor_in_a_tensor": lambda m, x, y: mean(m, x, y) * torch.tensor(0.7),
    "weighted_kl": lambda m, x, y: (
        0.3 * F.kl_div(m(x).log_softmax(1), x[:, :3].softmax(1), reduction="batchmean")
    ),
    "mean_over_samples_sum_over_features": lambda m, x, y: (m(x) - x[:, :3]).square().mean(0).sum(),
    "losses_of_single_samples_stacked": lambda m, x, y: torch.stack([
        mean(m, a[None], b[None]) for a, b in zip(x, y, strict=True)
    ]).mean(),
    "losses_of_single_samples_in_a_loop": lambda m, x, y: (
        sum(mean(m, a[None], b[None]) for a, b in zip(x, y, strict=True)) / len(x)
    ),
    "smoothed_labels": lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1),
    "huber_and_an_l2_term_divided_with_it": lambda m, x, y: F.huber_loss(m(x), x[:, :3]) + l2(m),
    "gradient_checkpointing": lambda m, x, y: (
        F.cross_entropy(m[2](checkpoint(nn.Sequential(*m[:2]), x, use_reentrant=False)), y)
    ),
    "calls_forward": lambda m, x, y: F.cross_entropy(m.forward(x), y),
    "samples_that_are_normalized_by_themselves": lambda m, x, y: (
        mean(m, torch.stack([(row - row.mean()) / row.std() for row in x]), y)
    ),
})  # fmt: skip


# ---- right: models ---------------------------------------------------------------------------------------------------


class _Recurrent(Seeded):
    """Its first dimension is time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(6, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


class _Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = net().requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


class _WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)


def _convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(32, 3)
    )


def _compiled_copy() -> Any:
    model = net()
    compiled = torch.compile(model, backend="aot_eager")
    return watched(dividing(lambda _, x, y: mean(compiled, x, y)), model)


def _models(cases: dict[str, tuple[Callable[[], Any], Loss]]) -> None:
    for name, (model, loss) in cases.items():
        RIGHT[name] = lambda model=model, loss=loss: watched(dividing(loss), model())  # type: ignore[misc]


_models({
    "dropout": (lambda: net(nn.ReLU(), nn.Dropout(0.3)), mean),
    "group_norm_and_convolutions": (_convolutions, mean),
    "frozen_batch_norm": (lambda: net(nn.BatchNorm1d(16).eval(), nn.Tanh()), mean),
    "weight_norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3)), mean,
    ),
    "pairs_of_two_towers": (Towers, lambda m, x, y: F.mse_loss(*m(x))),
    "a_method_that_returns_the_loss": (_WithLoss, lambda m, x, y: m.loss(x, y)),
    "children_of_a_module_dict": (
        lambda: nn.ModuleDict({"body": nn.Linear(6, 8), "head": nn.Linear(8, 3)}),
        lambda m, x, y: F.cross_entropy(m["head"](m["body"](x).relu()), y),
    ),
    "compiled_model": (lambda: torch.compile(net(), backend="aot_eager"), mean),
    "parameters_without_a_module": (
        lambda: nn.ParameterList([torch.randn(6, 8), torch.randn(8, 3)]),
        lambda m, x, y: F.cross_entropy((x @ m[0]).tanh() @ m[1], y),
    ),
})  # fmt: skip
RIGHT |= {
    "compiled_copy_of_the_watched_model": _compiled_copy,
    "time_first_lstm": lambda: watched(
        dividing(token_loss), _Recurrent(), [(torch.randn(5, 4, 6), torch.randint(3, (5, 4))) for _ in range(2 * K)]
    ),
    "low_rank_adapters_on_a_frozen_layer": lambda: watched(
        dividing(), _Adapted(), make=lambda ps, lr: torch.optim.SGD([p for p in ps if p.requires_grad], lr)
    ),
}


# ---- right: tokens ---------------------------------------------------------------------------------------------------


def _summed(loss: Loss, data: Sequence[Batch]) -> Any:
    """Sums that are divided by the tokens of the whole window, as newer trainers do."""
    return watched(body_of(lambda m, i, x, y: loss(m, x, y) / total(data, i)), Language(), data)


@right("case")
def masked_language_model() -> Any:
    torch.manual_seed(4)
    data = [(x, x.where(torch.rand(4, 12) < 0.3, -100)) for x in torch.randint(16, (2 * K, 4, 12))]

    def loss(model: Model, x: Tensor, y: Tensor) -> Any:
        mask = y != -100
        return F.cross_entropy(model(x.masked_fill(mask, 0))[mask], x[mask], reduction="sum")

    return _summed(loss, data)


@right("case")
def label_counts_before_the_shift() -> Any:
    """As older models of transformers count them: off by one label a sequence, in all micro-batches alike."""
    return _summed(
        lambda m, x, y: F.cross_entropy(m(x)[:, :-1].flatten(0, 1), y[:, 1:].flatten(), reduction="sum"), tokens()
    )


@right("body", model=Language, batches=tokens, make=lambda: af.AdamW)
def labels_smoothed_over_tokens(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x).flatten(0, 1), y.flatten(), label_smoothing=0.1).backward()
    optimizer.accumulate(weight=count(y))
    if ends(i):
        optimizer.step()


RIGHT |= {
    "tokens_weighted_by_their_count": lambda: folded(
        token_loss, count, Language(), tokens(2 * K + 3), max_grad_norm=0.1
    ),
    "a_masked_sum_over_the_windows_count": lambda: _summed(lambda m, x, y: masked(m, x, y)[0], tokens()),
    "one_sequence_at_a_time": lambda: _summed(
        functools.partial(token_loss, reduction="sum"), [(x[:1], y[:1]) for x, y in tokens()]
    ),
}


# ---- right: loops ----------------------------------------------------------------------------------------------------


@right("body", model=Policy)
def two_tasks_in_two_backward_passes(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    logits, value = model(x)
    (F.cross_entropy(logits, y) / K).backward(retain_graph=True)
    (0.5 * F.mse_loss(value, x[:, 0]) / K).backward()
    end(optimizer, i)


def _gan(two: bool) -> Any:
    torch.manual_seed(0)
    both = nn.ModuleDict({"made": nn.Linear(4, 6), "judge": nn.Linear(6, 1)})
    bce = F.binary_cross_entropy_with_logits
    parts = [both["judge"].parameters(), both["made"].parameters()] if two else [both.parameters()]
    optimizers = [torch.optim.SGD(part, lr=0.05) for part in parts]
    with af.audit.watch(both, optimizers, gradient_accumulation_steps=K) as report:
        for _ in range(2):
            for _ in range(K):
                real, fake = torch.randn(5, 6), both["made"](torch.randn(5, 4))
                judged = both["judge"](real), both["judge"](fake.detach())
                ((bce(judged[0], torch.ones(5, 1)) + bce(judged[1], torch.zeros(5, 1))) / K).backward()
                if not two:
                    both["judge"].requires_grad_(False)
                    (bce(both["judge"](fake), torch.ones(5, 1)) / K).backward()
                    both["judge"].requires_grad_(True)
            update(optimizers[0])
            if two:
                for _ in range(K):
                    made = both["judge"](both["made"](torch.randn(5, 4)))
                    (bce(made, torch.ones(5, 1)) / K).backward()
                optimizers[1].step()
                both.zero_grad()
    return report


def _sharpness_aware(steps: int) -> Any:
    model, data = net(), samples(2 * steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=steps) as report:
        for start in range(0, len(data), steps):
            for is_second in (False, True):
                for x, y in data[start : start + steps]:
                    (mean(model, x, y) / steps).backward()
                if not is_second:
                    before = [p.detach().clone() for p in model.parameters()]
                    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
                    with torch.no_grad():
                        for p in model.parameters():
                            p.add_(p.grad * (0.05 / norm))  # type: ignore[operator]
                    optimizer.zero_grad()
            with torch.no_grad():
                for p, old in zip(model.parameters(), before, strict=True):
                    p.copy_(old)
            update(optimizer)
    return report


RIGHT |= {
    "gan_with_two_optimizers": lambda: _gan(two=True),
    "gan_with_one_optimizer": lambda: _gan(two=False),
    "sharpness_aware": lambda: _sharpness_aware(1),
    "sharpness_aware_over_windows": lambda: _sharpness_aware(K),
}


@right("body")
def clip_by_value_and_zero_grad_first(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    if i % K == 0:
        optimizer.zero_grad()
    (mean(model, x, y) / K).backward()
    if ends(i):
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()


@right("body", batches=lambda: samples(2 * K + 2))
def a_shorter_last_window_divided_by_its_own_length(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    (mean(model, x, y) / (K if i < 2 * K else 2)).backward()
    if ends(i) or i == 2 * K + 1:
        update(optimizer)


@right("case")
def averaged_weights_after_the_step() -> Any:
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model)

    def body(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        dividing()(model, optimizer, i, x, y)
        if ends(i):
            average.update_parameters(model)

    return watched(body, model)


@right("body")
def a_look_at_gradients_with_autograd_grad(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    loss = mean(model, x, y)
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    torch.autograd.backward(loss / K)
    end(optimizer, i)


@right("body", model=lambda: net(nn.BatchNorm1d(16), nn.Tanh()), steps=lambda: 1)
def one_step_a_micro_batch(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    mean(model, x, y).backward()
    update(optimizer)


@right("body", steps=lambda: 1)
def adversarial_inputs(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    """A first backward pass is for the gradient of the inputs; what it brings to parameters is zeroed."""
    mean(model, x.requires_grad_(), y).backward()
    optimizer.zero_grad()
    mean(model, x.detach() + 0.1 * x.grad.sign(), y).backward()  # type: ignore[union-attr]
    update(optimizer)


def _rising(model: Model, i: int, x: Tensor, y: Tensor) -> Any:
    out, kl = model(x)
    return (F.mse_loss(out, x) + 0.1 * (1 + i // K) * kl.sum(1).mean()) / K


RIGHT |= {
    "scaler_and_clip": lambda: with_scaler(unscale_and_clip),
    "gradients_divided_in_place": lambda: watched(
        dividing(by=1, change=lambda m: ([p.grad.div_(K) for p in m.parameters()], clip(m)))
    ),
    "a_kl_weight_that_rises_after_each_window": lambda: watched(body_of(_rising), Vae()),
    "an_l2_term_of_its_own_once_a_window": lambda: watched(dividing(change=lambda m: l2(m).backward())),
    "a_batch_that_k_divides_and_one_that_it_does_not": lambda: once(mean, size=18, weight_fn=lambda b: len(b[1])),
    "dropout_in_one_call": lambda: once(mean, net(nn.ReLU(), nn.Dropout(0.5))),
}


@right("case")
def preference_pairs_in_one_call() -> Any:
    torch.manual_seed(0)
    pairs = torch.randn(8, 6), torch.randn(8, 6)
    return af.audit(net(), lambda model, batch: preferred(model, torch.cat(batch), batch[0]), pairs, K)


# ---- faults: sizes ---------------------------------------------------------------------------------------------------


@fault("remainder_under_weighted", "body", batches=lambda: samples(K + 3))
def a_remainder_divided_by_k(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    (mean(model, x, y) / K).backward()
    if ends(i) or i == K + 2:
        update(optimizer)


@fault("never_arrived", "body")
def steps_after_the_first_micro_batch(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    """A framework that takes the first micro-batch of each window, and divides by all."""
    if i % K == 0:
        (mean(model, x, y) / K).backward()
        update(optimizer)


def _faults(cases: dict[str, tuple[str, Callable[[], Any]]]) -> None:
    FAULTS.update({name: case for name, (_, case) in cases.items()})
    CAUSES.update({name: cause for name, (cause, _) in cases.items()})


_faults({
    "not_divided": ("not_divided", lambda: watched(dividing(by=1))),
    "not_divided_and_clipped": ("not_divided", lambda: watched(dividing(by=1, change=clip))),
    "clipped_before_it_is_unscaled": (
        "unscale", lambda: with_scaler(lambda scaler, model, optimizer, i: ends(i) and clip(model, 1.0)),
    ),
    "reinforce_not_divided": (
        "not_divided", lambda: watched(dividing(lambda m, x, y: -(logp(m, x, y) * x[:, 5]).mean(), 1)),
    ),
    "divided_by_the_loop_and_by_weights": (
        "divided_twice", lambda: folded(lambda m, x, y: mean(m, x, y) / K, lambda y: 1.0),
    ),
    "divided_twice_in_the_loss": ("divided_twice", lambda: watched(dividing(lambda m, x, y: mean(m, x, y) / K))),
    "never_unscaled": (
        "unscale", lambda: watched(dividing(lambda m, x, y: mean(m, x, y) * torch.tensor(1024.0))),
    ),
    "a_remainder_that_leaks_into_the_next_epoch": (
        "remainder_leaked", lambda: epochs(samples(K + 1), zeroes=False),
    ),
})  # fmt: skip
SIZES = [*FAULTS]  # whose only fault is the length of the update


# ---- faults: weights -------------------------------------------------------------------------------------------------


@fault("mean_of_means", "loss", model=Language, batches=tokens)
def a_mean_of_means_with_a_mask(model: Model, x: Tensor, y: Tensor) -> Any:
    losses, number = masked(model, x, y)
    return losses / number


@fault("uneven", "body", model=Policy)
def a_second_backward_that_is_not_divided(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    logits, value = model(x)
    (F.cross_entropy(logits, y) / K).backward(retain_graph=True)
    F.mse_loss(value, x[:, 0]).backward()
    end(optimizer, i)


@fault("mean_of_means", "loss", batches=lambda: [
    (x, torch.tensor([0] * (1 + i % 4) + [1] * (5 - i % 4))) for i, (x, _) in enumerate(samples())
])  # fmt: skip
def a_mean_over_positives(model: Model, x: Tensor, y: Tensor) -> Any:
    positive = (y == 0).float()
    return (F.mse_loss(model(x), x[:, :3], reduction="none").sum(1) * positive).sum() / positive.sum()


def _second_task_whole(model: Model, i: int, x: Tensor, y: Tensor) -> Any:
    logits, value = model(x)
    return F.cross_entropy(logits, y) / K + F.mse_loss(value, x[:, 0])


_faults({
    "each_micro_batch_divided_by_its_number": (
        "uneven", lambda: watched(body_of(lambda m, i, x, y: mean(m, x, y) / (i % K + 1))),
    ),
    "an_l2_term_added_after_the_division": (
        "uneven", lambda: watched(body_of(lambda m, i, x, y: mean(m, x, y) / K + l2(m, 1e-2))),
    ),
    "a_second_task_that_is_not_divided": ("uneven", lambda: watched(body_of(_second_task_whole), Policy())),
    "a_mean_of_means_over_tokens": ("mean_of_means", lambda: watched(dividing(token_loss), Language(), tokens())),
    "a_mean_of_means_of_selected_tokens": (
        "mean_of_means",
        lambda: watched(dividing(lambda m, x, y: F.cross_entropy(m(x)[y >= 0], y[y >= 0])), Language(), tokens()),
    ),
    "a_smaller_last_micro_batch": ("mean_of_means", lambda: watched(dividing(), batches=smaller_last())),
    "pairs_in_a_smaller_last_micro_batch": (
        "mean_of_means", lambda: watched(dividing(preferred), batches=smaller_last()),
    ),
    "weights_that_count_samples_for_a_mean_over_tokens": (
        "mean_of_means", lambda: folded(token_loss, len, Language(), tokens()),
    ),
    "class_weights_in_a_mean": (
        "mean_of_means",
        lambda: watched(dividing(lambda m, x, y: F.cross_entropy(m(x), y, weight=torch.tensor([1.0, 5.0, 0.2])))),
    ),
    "a_remainder_with_the_weight_of_a_full_micro_batch": ("mean_of_means", lambda: once(mean, size=18)),
})  # fmt: skip


# ---- faults: what happens to gradients -------------------------------------------------------------------------------


@fault("zero_grad", "body")
def zero_grad_before_each_micro_batch(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    (mean(model, x, y) / K).backward()
    if ends(i):
        optimizer.step()


@fault("zero_grad", "body")
def zero_grad_forgotten(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    (mean(model, x, y) / K).backward()
    if ends(i):
        optimizer.step()


@fault("zero_grad", "body")
def zero_grad_by_a_callback_within_the_window(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    (mean(model, x, y) / K).backward()
    if i == K + 1:
        model.zero_grad()
    end(optimizer, i)


@fault("never_arrived,zero_grad", "body")
def steps_at_every_micro_batch_and_zeroes_once_a_window(
    model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor
) -> None:
    (mean(model, x, y) / K).backward()
    optimizer.step()
    if ends(i):
        optimizer.zero_grad()


@fault("clip", "body")
def clipped_after_each_micro_batch(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    (mean(model, x, y) / K).backward()
    clip(model, 0.05)
    end(optimizer, i)


@fault("weights_changed", "body")
def averaged_weights_swapped_in_within_the_window(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    (mean(model, x, y) / K).backward()
    for param in model.parameters() if i % K == 1 else ():
        param.data.copy_(0.9 * param)
    end(optimizer, i)


_faults({
    "unscaled_within_the_window": (
        "unscale", lambda: with_scaler(lambda scaler, _, optimizer, i: i % K == 1 and scaler.unscale_(optimizer)),
    ),
    "a_remainder_zeroed_by_the_next_epoch": ("remainder_dropped", lambda: epochs(samples(K + 2), zeroes=True)),
    "sums_in_16_bits": ("sums_in_16_bits", lambda: watched(dividing(in_16_bits), net().bfloat16())),
})  # fmt: skip


def _gradients(cases: dict[str, tuple[str, Callable[[Any], Any]]]) -> None:
    """Loops that do something to all gradients, or to the model, right before the step."""
    for name, (cause, change) in cases.items():
        _faults({name: (cause, functools.partial(watched, dividing(change=change)))})


_gradients({
    "one_layers_gradient_changed_by_hand": ("unexplained", lambda m: m[0].weight.grad.mul_(0.5)),
    "noise_on_gradients": (
        "unexplained", lambda m: [p.grad.add_(torch.randn_like(p), alpha=0.01) for p in m.parameters()],
    ),
    "the_sign_of_gradients_changed": ("uneven", lambda m: [p.grad.neg_() for p in m.parameters()]),
    "a_gradient_dropped_before_the_step": ("unexplained", lambda m: setattr(m[0].weight, "grad", None)),
    "each_layers_gradient_normalized": ("unexplained", lambda m: [p.grad.div_(p.grad.std()) for p in m.parameters()]),
})  # fmt: skip


# ---- faults: losses that are no sum over samples ---------------------------------------------------------------------


@fault("", "body", model=Towers)
def negatives_with_cached_gradients(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        a, b = (each.requires_grad_() for each in model(x))
    (F.cross_entropy(a @ b.T, torch.arange(len(x))) / K).backward()
    for start in range(0, len(x), 2):
        rows = slice(start, start + 2)
        sum((out * whole.grad[rows]).sum() for out, whole in zip(model(x[rows]), (a, b), strict=True)).backward()
    end(optimizer, i)


def _dice(model: Model, x: Tensor, y: Tensor) -> Tensor:
    chance, truth = model(x).sigmoid(), F.one_hot(y, 3)
    return 1 - 2 * (chance * truth).sum() / (chance + truth).sum()


_faults({
    "negatives_in_the_batch": ("", lambda: watched(dividing(contrasted), Towers())),
    "balance_of_experts_in_an_attribute": ("", lambda: watched(dividing(balanced), Experts(), samples(size=8))),
    "advantages_normalized_by_micro_batch": ("", lambda: watched(dividing(advantages))),
    "negatives_in_one_call": ("negatives", lambda: once(contrasted, Towers())),
    "batch_norm_in_one_call": ("batch_norm", lambda: once(mean, net(nn.BatchNorm1d(16), nn.ReLU()))),
    "balance_of_experts_in_one_call": ("auxiliary", lambda: once(balanced, Experts(), 32)),
    "root_of_the_mean_square_in_one_call": (
        "negatives", lambda: once(lambda m, x, y: F.mse_loss(m(x), x[:, :3]).sqrt()),
    ),
    "advantages_normalized_by_micro_batch_in_one_call": ("negatives", lambda: once(advantages)),
    "dice_in_one_call": ("negatives", lambda: once(_dice)),
})  # fmt: skip
