"""Loops as people write them, each with the audit's verdict and the causes that it names.

"equal" loops make the update of the large batch, and so do "rounded" ones, but for sums or products in 16 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from inside import run_engine
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import accumfused as af

Batch = tuple[Tensor, Tensor]
Model = Any  # of any output
Loss = Callable[..., Any]  # of a model, x and y
Body = Callable[..., None]  # what a loop does with a micro-batch: takes model, optimizer, its number, x and y
K = 4
SGD = torch.optim.SGD


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


def few_positives() -> list[Batch]:
    """Samples with other numbers of positives in each micro-batch."""
    return [(x, torch.tensor([0] * (1 + i % K) + [1] * (5 - i % K))) for i, (x, _) in enumerate(samples())]


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


class TimeFirst(nn.LSTM):
    """Its first dimension is time. Args: returns_loss: of targets that come with x."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(6, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:  # type: ignore[override]
        out = super().forward(x)[0]
        return out if y is None else {"loss": token_loss(lambda _: out, x, y), "out": out}


def mean(model: Model, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model(x), y, reduction=reduction)


def token_loss(model: Model, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction)


def masked(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """The sum of all tokens' losses."""
    losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten().clamp(0), reduction="none")
    return (losses * (y != -100).flatten().float()).sum()


def logp(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return F.log_softmax(model(x), 1).gather(1, y[:, None])[:, 0]


def preferred(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """The loss of preference pairs: the halves of a batch are chosen and rejected."""
    chosen, rejected = model(x).sum(1).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def contrasted(model: Model, x: Tensor, y: Any = None) -> Tensor:
    """Each sample's negatives are the others of its micro-batch."""
    a, b = (F.normalize(each, dim=1) for each in model(x))
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


def advantages(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """Normalized by micro-batch."""
    advantage = (x[:, 5] - x[:, 5].mean()) / x[:, 5].std()
    return -(logp(model, x, y) * advantage).mean()


def confident(model: Model, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return F.cross_entropy(out, y) + out.softmax(1).mean(0).square().sum()


def kl_of_batch(model: Model, x: Tensor) -> Tensor:
    return F.kl_div(model(x).log_softmax(1), x[:, :3].softmax(1), reduction="batchmean")


def returned(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """The loss that the model returns."""
    return model(x, y)["loss"]  # type: ignore[no-any-return]


def in_16_bits(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x.bfloat16()).float(), y)


def autocast(loss: Loss) -> Loss:
    def cast(model: Model, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(lambda *args: model(*args), x, y)  # type: ignore[no-any-return]

    return cast


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
    body: Body, model: nn.Module | None = None, batches: Sequence[Any] | None = None, *, make: Any = SGD, steps: int = K
) -> Any:
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
    batches: Sequence[Batch] | None = None, prepare: Callable[..., Any] = lambda *_: None, **options: Any,
) -> Any:  # fmt: skip
    """The report of this package's windows. Args: prepare: takes model and optimizer. options: of AdamW."""
    model = model or net()
    optimizer = af.AdamW(model.parameters(), lr=0.01, **options)
    prepare(model, optimizer)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for (x, y), last in af.windows(batches or samples(), K):
            optimizer.backward(loss(model, x, y), weight=weight(y))
            if last:
                optimizer.step()
    return report


def windows_of(lengths: Sequence[int], divisor: int | None, steps: int | None = K) -> Any:
    """The report of windows of these lengths. Args: divisor: of each loss; None: the window's own length."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=steps) as report:
        for length in lengths:
            for x, y in samples(length):
                (mean(model, x, y) / (divisor or length)).backward()
            update(optimizer)
    return report


def epochs(count: int, *, zeroes: bool) -> Any:
    """Two epochs, whose last micro-batches make no step: the next epoch zeroes them, or goes on with them."""

    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        if zeroes and i == count:
            optimizer.zero_grad()
        dividing()(model, optimizer, i % count, x, y)

    return watched(body, batches=2 * samples(count))


def once(loss: Loss, model: nn.Module | None = None, batch: Any = None, **options: Any) -> Any:
    """The report of one batch, computed whole and in micro-batches."""
    batch = samples(1, 16)[0] if batch is None else batch
    return af.audit(model or net(), lambda net, batch: loss(net, *batch), batch, K, **options)


LOOPS: dict[str, tuple[str, Callable[[], Any]]] = {}  # verdict and causes, and the loop, which returns its report


def _loops(expected: str, **loops: Callable[[], Any]) -> None:
    LOOPS.update({name: (expected, loop) for name, loop in loops.items()})


def loop(expected: str, **options: Callable[[], Any]) -> Callable[[Any], Any]:
    """Adds a function: a loss that each micro-batch divides by K, a body, or a whole loop. Options are of `watched`."""

    def add(function: Any) -> Any:
        body = {0: None, 3: dividing(function)}.get(function.__code__.co_argcount, function)

        def run() -> Any:
            return watched(body, **{name: option() for name, option in options.items()}) if body else function()

        _loops(expected, **{function.__name__: run})
        return function

    return add


def of_loss(loss: Loss, model: Callable[[], nn.Module] = net, batches: Callable[[], Any] = samples) -> Any:
    """A loop that divides this loss by K."""
    return lambda: watched(dividing(loss), model(), batches())


def changing(change: Callable[[Any], Any]) -> Any:
    """A loop that changes all gradients, or the model, right before the step."""
    return lambda: watched(dividing(change=change))


# ---- equal: losses ---------------------------------------------------------------------------------------------------


@loop("equal", model=Policy)
def ppo(model: Model, x: Tensor, y: Tensor) -> Any:
    logits, value = model(x)
    log_probs = logits.log_softmax(1)
    ratio = (log_probs.gather(1, y[:, None])[:, 0] + 1.0).exp()
    gain = torch.min(ratio * x[:, 0], ratio.clamp(0.8, 1.2) * x[:, 0])
    entropy = -(log_probs.exp() * log_probs).sum(1)
    return -gain.mean() + 0.5 * F.mse_loss(value, x[:, 1]) - 0.01 * entropy.mean()


@loop("equal")
def dpo_in_two_calls_with_a_reference() -> Any:
    reference = net().requires_grad_(False)

    def loss(model: Model, x: Tensor, y: Tensor) -> Any:
        ours = logp(model, x, y) - logp(model, x.flip(1), y)
        theirs = logp(reference, x, y) - logp(reference, x.flip(1), y)
        return -F.logsigmoid(0.1 * (ours - theirs)).mean()

    return watched(dividing(loss))


@loop("equal", model=Vae)
def vae(model: Model, x: Tensor, y: Tensor) -> Any:
    out, kl = model(x)
    return (F.mse_loss(out, x, reduction="sum") + 0.3 * kl.sum()) / len(x)


@loop("equal")
def wasserstein_with_gradient_penalty(model: Model, x: Tensor, y: Tensor) -> Any:
    fake = x.flip(1)
    mixed = (0.3 * x + 0.7 * fake).requires_grad_()
    (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
    penalty = (slope.norm(2, dim=1) - 1).square().mean()
    return model(fake).mean() - model(x).mean() + 10 * penalty


@loop("equal", model=lambda: nn.Linear(6, 5), batches=lambda: [
    (torch.randn(4, 9, 6), torch.randint(1, 5, (4, 3))) for _ in range(2 * K)
])  # fmt: skip
def connectionist_temporal_classification(model: Model, x: Tensor, y: Tensor) -> Any:
    return F.ctc_loss(model(x).log_softmax(2).transpose(0, 1), y, torch.full((4,), 9), torch.full((4,), 3))


@loop("equal", model=lambda: net(nn.Dropout(0.2)))
def dropout_twice(model: Model, x: Tensor, y: Tensor) -> Any:
    one, other = model(x), model(x)
    kl = F.kl_div(one.log_softmax(1), other.softmax(1), reduction="none").sum(1).mean()
    return 0.5 * (F.cross_entropy(one, y) + F.cross_entropy(other, y)) + kl


_loops(
    "equal",
    reinforce=of_loss(lambda m, x, y: -(logp(m, x, y) * x[:, 5]).mean()),
    dpo_in_one_batch=of_loss(preferred),
    heat_squared_is_the_number_of_micro_batches=of_loss(lambda m, x, y: kl_of_batch(m, x) * (2.0 * 2.0)),
    factor_in_a_tensor=of_loss(lambda m, x, y: mean(m, x, y) * torch.tensor(0.7)),
    distillation=of_loss(lambda m, x, y: 0.3 * kl_of_batch(m, x) * 2.0 * 2.0 + 0.7 * mean(m, x, y)),
    weighted_kl=of_loss(lambda m, x, y: 0.3 * kl_of_batch(m, x)),
    a_kl_times_counts=lambda: watched(
        body_of(lambda m, i, x, y: kl_of_batch(m, x) * len(y) / 13),
        batches=2 * [samples(1, n)[0] for n in (K, 2, 5, 2)],
    ),
    mean_over_samples_sum_over_features=of_loss(lambda m, x, y: (m(x) - x[:, :3]).square().mean(0).sum()),
    losses_of_single_samples_in_a_loop=of_loss(
        lambda m, x, y: sum(mean(m, a[None], b[None]) for a, b in zip(x, y, strict=True)) / len(x)
    ),
    samples_that_are_normalized_by_themselves=of_loss(
        lambda m, x, y: mean(m, torch.stack([(row - row.mean()) / row.std() for row in x]), y)
    ),
    sums_over_samples=lambda: watched(body_of(lambda m, i, x, y: mean(m, x, y, "sum"))),
    sums_over_as_many_samples_as_micro_batches=lambda: watched(
        body_of(lambda m, i, x, y: mean(m, x, y, "sum") / len(y) / K), batches=samples(size=K)
    ),
    losses_that_take_turns=lambda: watched(
        body_of(lambda m, i, x, y: (mean(m, x, y) if i % 2 else m(x).square().mean()) / K)
    ),
)


# ---- equal: models ---------------------------------------------------------------------------------------------------


class _Warming(nn.Linear):
    """Its output is halved from the fifth call on."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * torch.where(self.calls > K, 0.5, 1.0)


class _Mapped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.func.vmap(lambda row: row.pow(2).mul_(2.0))(x))


def _frozen() -> nn.Module:
    model: Any = net()
    model[0].requires_grad_(False)
    return model  # type: ignore[no-any-return]


def _sequences() -> list[Batch]:
    return [(torch.randn(5, 4, 6), torch.randint(3, (5, 4))) for _ in range(2 * K)]


def _checkpointed(use_reentrant: bool) -> Loss:
    def loss(model: Model, x: Tensor, y: Tensor) -> Any:
        x = x.clone().requires_grad_()
        return F.cross_entropy(model[2](checkpoint(model[:2], x, use_reentrant=use_reentrant)), y)

    return loss


@loop("equal")
def compiled_copy_of_the_watched_model() -> Any:
    model = net()
    compiled = torch.compile(model, backend="aot_eager")
    return watched(dividing(lambda _, x, y: mean(compiled, x, y)), model)


_loops(
    "equal",
    dropout=of_loss(mean, lambda: net(nn.ReLU(), nn.Dropout(0.3))),
    frozen_batch_norm=of_loss(mean, lambda: net(nn.BatchNorm1d(16).eval(), nn.Tanh())),
    weight_norm=of_loss(
        mean,
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3)),
    ),
    pairs_of_two_towers=of_loss(lambda m, x, y: F.mse_loss(*m(x)), Towers),
    calls_forward=of_loss(lambda m, x, y: F.cross_entropy(m.forward(x), y)),
    a_method_that_returns_the_loss=of_loss(lambda m, x, y: m.loss(m.net(x), y), WithLoss),
    a_model_that_returns_the_loss=of_loss(returned, WithLoss),
    a_model_with_dropout_that_returns_the_loss=of_loss(returned, lambda: WithLoss(nn.Dropout(0.5))),
    compiled_model=of_loss(mean, lambda: torch.compile(net(), backend="aot_eager")),  # type: ignore[arg-type, return-value]
    compiled_model_that_returns_the_loss=of_loss(
        returned,
        lambda: torch.compile(WithLoss(), backend="aot_eager"),  # type: ignore[arg-type, return-value]
    ),
    gradient_checkpointing=of_loss(_checkpointed(use_reentrant=False)),
    gradient_checkpointing_whose_graph_cannot_be_asked=of_loss(_checkpointed(use_reentrant=True)),
    functions_of_torch_func=of_loss(mean, lambda: _Mapped(6, 3)),
    time_first_lstm=of_loss(token_loss, TimeFirst, _sequences),
    time_first_lstm_that_returns_the_loss=of_loss(returned, TimeFirst, _sequences),
    a_frozen_layer=lambda: watched(
        dividing(), _frozen(), make=lambda ps, lr: SGD([p for p in ps if p.requires_grad], lr)
    ),
    sparse_gradients=of_loss(
        lambda m, x, y: mean(m, torch.randint(16, (6, 4)), y),
        lambda: nn.Sequential(nn.Embedding(16, 8, sparse=True), nn.Flatten(), nn.Linear(32, 3)),
    ),
)


# ---- equal: tokens ---------------------------------------------------------------------------------------------------


def _summed(loss: Loss, data: Sequence[Batch]) -> Any:
    """Sums that are divided by the tokens of the whole window, as newer trainers do."""
    return watched(body_of(lambda m, i, x, y: loss(m, x, y) / total(data, i)), Language(), data)


@loop("equal")
def label_counts_before_the_shift() -> Any:
    """As older models of transformers count them: off by one label a sequence, in all micro-batches alike."""
    return _summed(
        lambda m, x, y: F.cross_entropy(m(x)[:, :-1].flatten(0, 1), y[:, 1:].flatten(), reduction="sum"), tokens()
    )


@loop("equal", model=Language, batches=tokens, make=lambda: af.AdamW)
def labels_smoothed_over_tokens(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x).flatten(0, 1), y.flatten(), label_smoothing=0.1).backward()
    optimizer.accumulate(weight=count(y))
    if ends(i):
        optimizer.step()


@loop("equal")
def an_empty_micro_batch_with_a_weight_of_0() -> Any:
    batches = tokens()
    batches[1] = batches[1][0], torch.full_like(batches[1][1], -100)
    return folded(token_loss, lambda y: int(count(y)), Language(), batches)


@loop("equal")
def two_optimizers_of_one_model_with_tied_weights() -> Any:
    model = Language()
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is matrix] for matrix in (True, False))
    optimizers = [af.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]
    with af.audit.watch(model, optimizers, gradient_accumulation_steps=K) as report:
        for i, (x, _) in enumerate(tokens()):
            (token_loss(model, x[:, :-1].repeat(1, 2)[:, :12], x) / K).backward()
            for optimizer in optimizers:
                end(optimizer, i)
    return report


def _by_normalizer(closes: bool) -> Any:
    batches = tokens()

    def body(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        token_loss(model, x, y, "sum").backward()
        optimizer.accumulate(last=closes and ends(i))
        if ends(i):
            optimizer.step(normalizer=total(batches, i))

    return watched(body, Language(), batches, make=functools.partial(af.AdamW, max_grad_norm=0.1))


_loops(
    "equal",
    sums_over_tokens_that_the_step_divides=lambda: _by_normalizer(closes=False),
    sums_of_closed_windows_that_the_step_divides=lambda: _by_normalizer(closes=True),
    tokens_weighted_by_their_count=lambda: folded(token_loss, count, Language(), tokens(2 * K + 3), max_grad_norm=0.1),
    a_masked_sum_over_the_windows_count=lambda: _summed(masked, tokens()),
    one_sequence_at_a_time=lambda: _summed(
        functools.partial(token_loss, reduction="sum"), [(x[:1], y[:1]) for x, y in tokens()]
    ),
)


# ---- equal: loops ----------------------------------------------------------------------------------------------------


@loop("equal", model=Policy)
def two_tasks_in_two_backward_passes(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    logits, value = model(x)
    (F.cross_entropy(logits, y) / K).backward(retain_graph=True)
    (0.5 * F.mse_loss(value, x[:, 0]) / K).backward()
    end(optimizer, i)


def _gan(two: bool, is_one_watched: bool = False) -> Any:
    torch.manual_seed(0)
    both = nn.ModuleDict({"made": nn.Linear(4, 6), "judge": nn.Linear(6, 1)})
    bce = F.binary_cross_entropy_with_logits
    parts = [both["judge"].parameters(), both["made"].parameters()] if two else [both.parameters()]
    optimizers = [SGD(part, lr=0.05) for part in parts]
    seen = optimizers[:1] if is_one_watched else optimizers
    with af.audit.watch(both, seen, gradient_accumulation_steps=K) as report:
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
    optimizer = SGD(model.parameters(), lr=0.05)
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


@loop("equal")
def clip_by_value_and_zero_grad_first(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    if i % K == 0:
        optimizer.zero_grad()
    (mean(model, x, y) / K).backward()
    if ends(i):
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()


@loop("equal")
def divided_by_the_argument_of_backward(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    mean(model, x, y).backward(gradient=torch.tensor(1 / K))
    end(optimizer, i)


@loop("equal")
def losses_that_share_a_backward() -> Any:
    model, batches = net(), samples()
    optimizer = SGD(model.parameters(), lr=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for start in range(0, 2 * K, K):
            losses = [mean(model, x, y) / K for x, y in batches[start : start + K]]
            torch.add(losses[0] + losses[1], losses[2] + losses[3]).backward()
            update(optimizer)
    return report


@loop("equal")
def a_look_at_gradients_with_autograd_grad(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    loss = mean(model, x, y)
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    torch.autograd.backward(loss / K)
    end(optimizer, i)


@loop("equal", model=lambda: net(nn.BatchNorm1d(16), nn.Tanh()), steps=lambda: 1)
def one_step_a_micro_batch(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    mean(model, x, y).backward()
    update(optimizer)


@loop("equal", steps=lambda: 1)
def adversarial_inputs(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    """A first backward pass is for the gradient of the inputs; what it brings to parameters is zeroed."""
    mean(model, x.requires_grad_(), y).backward()
    optimizer.zero_grad()
    mean(model, x.detach() + 0.1 * x.grad.sign(), y).backward()  # type: ignore[union-attr]
    update(optimizer)


@loop("equal", model=lambda: net(nn.BatchNorm1d(16).eval(), nn.Tanh()))
def a_pass_without_gradients(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    (mean(model, x, y) / K).backward()
    with torch.no_grad():
        model[1].train()(torch.tanh(model[0](x)))
        model(x)
    model[1].eval()
    end(optimizer, i)


def _closure(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    """A backward in the closure of a step belongs to it."""

    def backward() -> Tensor:
        loss = mean(model, x, y) / 2
        loss.backward()
        return loss

    if i % 2:
        optimizer.step(backward)
        optimizer.zero_grad()
    else:
        backward()


@loop("equal", make=lambda: functools.partial(torch.optim.LBFGS, max_iter=2), steps=lambda: 1)
def closures_of_lbfgs(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mean(model, x, y)
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()


@loop("equal", make=lambda: af.AdamW, steps=lambda: 1, batches=lambda: samples(2, 3))
def a_weight_that_waits_for_the_next_fold(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    mean(model, x, y).backward()
    optimizer.accumulate(weight=len(y))
    optimizer.step()


def _rising(model: Model, i: int, x: Tensor, y: Tensor) -> Any:
    out, kl = model(x)
    return (F.mse_loss(out, x) + 0.1 * (1 + i // K) * kl.sum(1).mean()) / K


def _share(i: int) -> float:
    """One over the samples of a window of smaller_last()."""
    return 1 / sum(len(y) for _, y in smaller_last()[i - i % K :][:K])


_loops(
    "equal",
    gan_with_two_optimizers=lambda: _gan(two=True),
    gan_whose_second_optimizer_is_not_watched=lambda: _gan(two=True, is_one_watched=True),
    gan_with_one_optimizer=lambda: _gan(two=False),
    sharpness_aware=lambda: _sharpness_aware(1),
    sharpness_aware_over_windows=lambda: _sharpness_aware(K),
    scaler_and_clip=lambda: with_scaler(unscale_and_clip),
    a_fused_step_unscales_by_itself=lambda: with_scaler(lambda *_: None, make=functools.partial(SGD, fused=True)),
    gradients_normed_for_a_log_and_divided=lambda: watched(
        dividing(by=1, change=lambda m: [p.grad.mul_(1 / K) for p in m.parameters() if p.grad.norm() > 0])
    ),
    gradients_divided_in_place=lambda: watched(
        dividing(by=1, change=lambda m: ([p.grad.div_(K) for p in m.parameters()], clip(m)))
    ),
    a_kl_weight_that_rises_after_each_window=lambda: watched(body_of(_rising), Vae()),
    an_l2_term_of_its_own_once_a_window=lambda: watched(dividing(change=lambda m: l2(m).backward())),
    means_and_an_l2_term_times_counts=lambda: watched(
        body_of(lambda m, i, x, y: (mean(m, x, y) + l2(m)) * len(y) * _share(i)), batches=smaller_last()
    ),
    a_factor_that_undoes_a_division=lambda: watched(
        body_of(lambda m, i, x, y: mean(m, x, y, "sum") * _share(i) * K / K), batches=smaller_last()
    ),
    closures=lambda: watched(_closure, steps=2),
    closures_of_windows=lambda: watched(_closure, make=af.SGD, steps=2),
    released_gradients=lambda: folded(
        prepare=lambda _, optimizer: af.release_gradients(optimizer, bucket_bytes=64), max_grad_norm=0.1
    ),
    fused_linears=lambda: folded(prepare=af.fuse_linears, max_grad_norm=0.1),
    a_shorter_last_window_divided_by_its_own_length=lambda: windows_of((K, K, 2), None),
    remainders_at_the_ends_of_epochs=lambda: windows_of((K, 3) * 3, None),
    windows_of_any_length=lambda: windows_of((4, 2, 4, 6), None, steps=None),
)


# ---- equal: in one call, and in 16 bits ------------------------------------------------------------------------------


@loop("equal")
def preference_pairs_in_one_call() -> Any:
    torch.manual_seed(0)
    pairs = torch.randn(8, 6), torch.randn(8, 6)
    return once(lambda model, *pair: preferred(model, torch.cat(pair), None), batch=pairs)  # type: ignore[arg-type]


def _text(model: Model, batch: dict[str, Tensor]) -> Tensor:
    return token_loss(model, batch["text"], batch["targets"])


def _texts(**options: Any) -> Any:
    """The report of texts with padding, in one call, as a dictionary."""
    text, targets = map(torch.cat, zip(*tokens(K), strict=True))
    return af.audit(Language(), _text, {"text": text, "targets": targets}, K, **options)


_loops(
    "equal",
    a_batch_that_k_divides_and_one_that_it_does_not=lambda: once(
        mean, batch=samples(1, 18)[0], weight_fn=lambda b: len(b[1])
    ),
    tokens_and_their_counts_in_one_call=lambda: _texts(weight_fn=lambda batch: count(batch["targets"])),
    sums_in_one_call=lambda: once(functools.partial(mean, reduction="sum")),
    dropout_in_one_call=lambda: once(mean, net(nn.ReLU(), nn.Dropout(0.5))),
    checkpoints_in_one_call=lambda: once(_checkpointed(use_reentrant=True)),
    buffers_that_count_calls_in_one_call=lambda: once(mean, _Warming()),
)
_loops(
    "rounded",
    scaler_with_autocast=lambda: with_scaler(unscale_and_clip, autocast(mean), make=torch.optim.AdamW),
    parameters_in_16_bits_whose_sums_are_in_32=lambda: folded(in_16_bits, model=net().bfloat16()),
    autocast_of_a_model_that_returns_its_loss=of_loss(autocast(returned), WithLoss),
    autocast_in_one_call=lambda: once(autocast(mean)),
)


# ---- unknown ---------------------------------------------------------------------------------------------------------


@loop("unknown", model=Towers)
def negatives_with_cached_gradients(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        a, b = (each.requires_grad_() for each in model(x))
    (F.cross_entropy(a @ b.T, torch.arange(len(x))) / K).backward()
    for start in range(0, len(x), 2):
        rows = slice(start, start + 2)
        sum((out * whole.grad[rows]).sum() for out, whole in zip(model(x[rows]), (a, b), strict=True)).backward()
    end(optimizer, i)


@loop("unknown")
def a_backward_that_is_not_seen(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    run_engine(mean(model, x, y))
    end(optimizer, i)


_loops(
    "unknown",
    parameters_without_a_module=of_loss(
        lambda m, x, y: F.cross_entropy((x @ m[0]).tanh() @ m[1], y),
        lambda: nn.ParameterList([torch.randn(6, 8), torch.randn(8, 3)]),
    ),
    a_pass_for_gradients_of_inputs_or_a_lost_micro_batch=lambda: watched(adversarial_inputs, steps=2),
    negatives_in_the_batch=of_loss(contrasted, Towers),
    an_auxiliary_loss_of_the_batch=of_loss(confident),
    advantages_normalized_by_micro_batch=of_loss(advantages),
    a_factor_that_may_be_divided=lambda: watched(  # 0.3 / K?
        body_of(lambda m, i, x, y: mean(m, x, y) / K + 0.075 * m(x).square().mean())
    ),
    a_second_loss_with_counts_of_its_own=of_loss(
        lambda m, x, y: mean(m, x, y) + (m(x)[:, 0] * (y == 0)).sum() / (y == 0).sum(), batches=few_positives
    ),
)


# ---- faults: sizes ---------------------------------------------------------------------------------------------------


@loop("scaled never_arrived")
def steps_after_the_first_micro_batch(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    """A framework that takes the first micro-batch of each window, and divides by all."""
    if i % K == 0:
        (mean(model, x, y) / K).backward()
        update(optimizer)


_loops(
    "scaled not_divided",
    not_divided=lambda: watched(dividing(by=1)),
    complex_gradients_not_divided=lambda: watched(
        dividing(lambda m, x, y: m(x + 0j).abs().square().mean(), by=1), nn.Linear(6, 3, dtype=torch.complex64)
    ),
    not_divided_and_clipped=lambda: watched(dividing(by=1, change=clip)),
    sums_divided_by_samples=lambda: watched(body_of(lambda m, i, x, y: mean(m, x, y, "sum") / len(y))),
)
_loops(
    "scaled divided_twice",
    divided_by_the_loop_and_by_weights=lambda: folded(lambda m, x, y: mean(m, x, y) / K, lambda y: 1.0),
    divided_twice_in_the_loss=of_loss(lambda m, x, y: mean(m, x, y) / K),
)
_loops(
    "scaled unscale",
    clipped_before_it_is_unscaled=lambda: with_scaler(lambda scaler, model, optimizer, i: ends(i) and clip(model, 1.0)),
    never_unscaled=of_loss(lambda m, x, y: mean(m, x, y) * torch.tensor(1024.0)),
)
_loops(
    "scaled factor",
    divided_by_another_number=lambda: watched(
        dividing(by=1, change=lambda m: [p.grad.div_(7) for p in m.parameters()])
    ),
)
_loops(
    "scaled remainder_under_weighted",
    a_remainder_divided_by_k=lambda: windows_of((K, 3), K),
    remainders_divided_by_k_at_the_ends_of_epochs=lambda: windows_of((K, 3) * 3, K),
)
_loops(
    "scaled remainder_under_weighted,remainder_leaked",
    windows_of_any_length_divided_by_one=lambda: windows_of((4, 2, 4, 6), 4, steps=None),
)
_loops(
    "scaled remainder_leaked",
    a_remainder_that_leaks_into_the_next_epoch=lambda: epochs(K + 1, zeroes=False),
    remainders_that_leak_into_most_windows=lambda: windows_of((K, K + 2, K + 2), K, steps=None),
)


# ---- faults: weights -------------------------------------------------------------------------------------------------


@loop("different uneven", model=Policy)
def a_second_backward_that_is_not_divided(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    logits, value = model(x)
    (F.cross_entropy(logits, y) / K).backward(retain_graph=True)
    F.mse_loss(value, x[:, 0]).backward()
    end(optimizer, i)


@loop("different mean_of_means", batches=few_positives)
def a_mean_over_positives(model: Model, x: Tensor, y: Tensor) -> Any:
    positive = (y == 0).float()
    return (F.mse_loss(model(x), x[:, :3], reduction="none").sum(1) * positive).sum() / positive.sum()


def _second_task_whole(model: Model, i: int, x: Tensor, y: Tensor) -> Any:
    logits, value = model(x)
    return F.cross_entropy(logits, y) / K + F.mse_loss(value, x[:, 0])


_loops(
    "different uneven",
    each_micro_batch_divided_by_its_number=lambda: watched(body_of(lambda m, i, x, y: mean(m, x, y) / (i % K + 1))),
    an_l2_term_added_after_the_division=lambda: watched(body_of(lambda m, i, x, y: mean(m, x, y) / K + l2(m, 1e-2))),
    a_second_task_that_is_not_divided=lambda: watched(body_of(_second_task_whole), Policy()),
    the_sign_of_gradients_changed=changing(lambda m: [p.grad.neg_() for p in m.parameters()]),
)
_loops(
    "different mean_of_means",
    a_mean_of_means_over_tokens=of_loss(token_loss, Language, tokens),
    a_smaller_last_micro_batch=of_loss(mean, batches=smaller_last),
    pairs_in_a_smaller_last_micro_batch=of_loss(preferred, batches=smaller_last),
    weights_that_count_samples_for_a_mean_over_tokens=lambda: folded(token_loss, len, Language(), tokens()),
    class_weights_in_a_mean=of_loss(lambda m, x, y: F.cross_entropy(m(x), y, weight=torch.tensor([1.0, 5.0, 0.2]))),
    a_remainder_with_the_weight_of_a_full_micro_batch=lambda: once(mean, batch=samples(1, 18)[0]),
    tokens_without_their_counts_in_one_call=_texts,
)


# ---- faults: what happens to gradients -------------------------------------------------------------------------------


@loop("different zero_grad")
def zero_grad_before_each_micro_batch(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    (mean(model, x, y) / K).backward()
    if ends(i):
        optimizer.step()


@loop("different zero_grad")
def zero_grad_forgotten(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor, loss: Loss = mean) -> None:
    (loss(model, x, y) / K).backward()
    if ends(i):
        optimizer.step()


@loop("different zero_grad")
def zero_grad_by_a_callback_within_the_window(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    (mean(model, x, y) / K).backward()
    if i == K + 1:
        model.zero_grad()
    end(optimizer, i)


@loop("different never_arrived,zero_grad")
def steps_at_every_micro_batch_and_zeroes_once_a_window(
    model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor
) -> None:
    (mean(model, x, y) / K).backward()
    optimizer.step()
    if ends(i):
        optimizer.zero_grad()


@loop("different clip")
def clipped_after_each_micro_batch(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    (mean(model, x, y) / K).backward()
    clip(model, 0.05)
    end(optimizer, i)


@loop("different weights_changed")
def averaged_weights_swapped_in_within_the_window(model: Model, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    (mean(model, x, y) / K).backward()
    for param in model.parameters() if i % K == 1 else ():
        param.data.copy_(0.9 * param)
    end(optimizer, i)


_loops(
    "different unscale",
    unscaled_within_the_window=lambda: with_scaler(
        lambda scaler, _, optimizer, i: i % K == 1 and scaler.unscale_(optimizer)
    ),
)
_loops(
    "scaled zero_grad",
    zero_grad_before_micro_batches_that_are_the_same=lambda: watched(
        zero_grad_before_each_micro_batch, batches=samples(1) * 2 * K
    ),
)
_loops(
    "different zero_grad",
    zero_grad_forgotten_for_a_model_that_returns_its_loss=lambda: watched(
        functools.partial(zero_grad_forgotten, loss=returned), WithLoss(nn.Dropout(0.5))
    ),
)
_loops("different remainder_dropped", a_remainder_zeroed_by_the_next_epoch=lambda: epochs(K + 2, zeroes=True))
_loops("different sums_in_16_bits", sums_in_16_bits=lambda: watched(dividing(in_16_bits), net().bfloat16()))
_loops(
    "different unexplained",
    one_layers_gradient_changed_by_hand=changing(lambda m: m[0].weight.grad.mul_(0.5)),
    a_gradient_dropped_before_the_step=changing(lambda m: setattr(m[0].weight, "grad", None)),
    a_gradient_changed_by_hand_in_a_model_that_returns_its_loss=lambda: watched(
        dividing(returned, change=lambda m: m.net[0].weight.grad.mul_(0.5)), WithLoss(nn.Dropout(0.5))
    ),
)


# ---- faults: losses that are no sum over samples ---------------------------------------------------------------------


class _OfTheBatch(WithLoss):
    def loss(self, out: Tensor, labels: Tensor) -> Tensor:
        return out.mean(0).square().sum()


_loops(
    "different batch_norm",
    batch_norm_in_a_model_that_returns_its_loss=of_loss(returned, lambda: WithLoss(nn.BatchNorm1d(16))),
    batch_norm_in_one_call=lambda: once(mean, net(nn.BatchNorm1d(16), nn.ReLU())),
)
_loops("different auxiliary", an_auxiliary_loss_in_one_call=lambda: once(confident))
_loops(
    "different batch_norm,auxiliary",
    batch_norm_and_an_auxiliary_loss_in_one_call=lambda: once(confident, net(nn.BatchNorm1d(16), nn.Dropout(0.0))),
)
_loops(
    "different negatives",
    a_model_that_returns_a_loss_of_the_batch=of_loss(returned, _OfTheBatch),
    negatives_in_one_call=lambda: once(contrasted, Towers()),
    root_of_the_mean_square_in_one_call=lambda: once(lambda m, x, y: F.mse_loss(m(x), x[:, :3]).sqrt()),
    advantages_normalized_by_micro_batch_in_one_call=lambda: once(advantages),
)
