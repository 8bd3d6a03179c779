"""More loops as people write them: losses within the model, several losses a micro-batch, GANs, GRPO and DPO by hand.

RIGHT has the update of the large batch, FAULTY has not; each name with its loop, and what the audit may answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from audited_loops import SGD, Batch, K, Seeded, net, samples, update
from torch import Tensor, nn
from torch.nn import functional as F

import accumfused as af

Report = Callable[[], Any]
RIGHT: dict[str, tuple[str, Report]] = {}  # "equal", or "unknown" where nothing tells
FAULTY: dict[str, tuple[str, Report]] = {}  # the verdict and its causes


class Opaque(torch.autograd.Function):
    """An operation that no graph reading knows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Returning(Seeded):
    """Takes a dict and returns its loss.

    Args:
        by: what it divides by.
        pops: it takes the labels out of the dict.
        reduction: of the loss.
        is_opaque: its graph cannot be read.
    """

    def __init__(
        self, *between: nn.Module, by: float = 1, pops: bool = False, reduction: str = "mean", is_opaque: bool = False
    ) -> None:
        super().__init__()
        self.net = net(*between)
        self.by, self.pops, self.reduction, self.is_opaque = by, pops, reduction, is_opaque

    def forward(self, batch: dict[str, Tensor], count: Any = None) -> dict[str, Tensor]:
        y = batch.pop("y") if self.pops else batch["y"]
        loss = F.cross_entropy(self.net(batch["x"]), y, reduction=self.reduction) / (count or self.by)
        return {"loss": Opaque.apply(loss) if self.is_opaque else loss}


def lengths(*sizes: int) -> list[Batch]:
    torch.manual_seed(1)
    return [(torch.randn(size, 6), torch.randint(3, (size,))) for size in sizes]


def trained(
    loss: Callable[[Any, int, Tensor, Tensor], Any], model: nn.Module | None = None, batches: Iterable[Batch] = (),
    *, steps: int | None = None, every: int = K, between: Callable[[Any, int], None] = lambda *_: None,
) -> Any:  # fmt: skip
    """The report of a loop that steps after so many micro-batches, and after the last.

    Args:
        loss: takes model, number, x and y; several losses have a backward pass each.
        between: follows each micro-batch; takes the optimizer and the number.
    """
    model = net() if model is None else model
    optimizer = SGD(model.parameters(), lr=0.05)
    batches = [*batches] or samples()
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=steps) as report:
        for i, (x, y) in enumerate(batches):
            for each in loss(model, i, x, y):
                each.backward()
            between(optimizer, i)
            if (i + 1) % every == 0 or i + 1 == len(batches):
                update(optimizer)
    return report


def inside(*batches: int, outside: float = 1, **options: Any) -> Report:
    """A loop whose model returns its loss. Args: batches: their sizes. outside: what the loop divides by."""
    between = options.pop("between", tuple)
    return lambda: trained(
        lambda m, i, x, y: [m({"x": x, "y": y})["loss"] / outside],
        Returning(*between(), **options), lengths(*(batches or (6,) * 8)), steps=K,
    )  # fmt: skip


# ---- several losses, with a backward pass each -----------------------------------------------------------------------


class Heads(Seeded):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.a(h), self.b(h)


def both_heads(model: Any, i: int, x: Tensor, y: Tensor, by: Sequence[float] = (K, K)) -> Iterable[Tensor]:
    """Two losses of one form over the same samples."""
    yield F.cross_entropy(model(x)[0], y) / by[0]
    yield F.cross_entropy(model(x)[1], 2 - y) / by[1]


def in_turn(model: Any, i: int, x: Tensor, y: Tensor, by: Sequence[float] = (K, K)) -> Iterable[Tensor]:
    """Two tasks with samples of their own."""
    yield F.cross_entropy(model(x)[0], y) / by[0]
    yield F.cross_entropy(model(x.flip(0) + 1)[1], y) / by[1]


def with_auxiliary(model: Any, i: int, x: Tensor, y: Tensor) -> Iterable[Tensor]:
    """A second forward pass over the same samples, for a loss of the same form."""
    yield F.cross_entropy(model(x), y) / K
    yield 0.1 * F.cross_entropy(model(x), y.flip(0)) / K


def gan(
    count: int = 1, *, by: float | None = None, zeroes: bool = True, is_wasserstein: bool = False,
    is_hinge: bool = False, is_normed: bool = False, is_judge_alone: bool = False, steps: int | None = None,
) -> Any:  # fmt: skip
    """A GAN of two optimizers: the judge's losses of real and made samples have a backward pass each."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6) if is_normed else nn.Tanh())
    judge = nn.Linear(6, 1)
    both = nn.ModuleDict({"made": made, "judge": judge})
    optimizers = [SGD(judge.parameters(), lr=0.05), SGD(made.parameters(), lr=0.05)]
    divisor = by or count

    def loss(out: Tensor, is_real: bool) -> Tensor:
        if is_wasserstein:
            return -out.mean() if is_real else out.mean()
        if is_hinge:
            return F.relu(1 - out if is_real else 1 + out).mean()
        return F.binary_cross_entropy_with_logits(out, torch.full_like(out, float(is_real)))

    seen: Any = (judge, optimizers[:1]) if is_judge_alone else (both, optimizers)
    with af.audit.watch(*seen, gradient_accumulation_steps=steps) as report:
        for step in range(3):
            if zeroes or step == 0:
                judge.zero_grad()
            for _ in range(count):
                (loss(judge(torch.randn(5, 6)), True) / divisor).backward()
                (loss(judge(made(torch.randn(5, 4)).detach()), False) / divisor).backward()
            optimizers[0].step()
            made.zero_grad()
            for _ in range(count):
                (loss(judge(made(torch.randn(5, 4))), True) / divisor).backward()
            optimizers[1].step()
    return report


# ---- preferences and groups, by hand ---------------------------------------------------------------------------------


def preferences(by: float = K, batches: Iterable[Batch] = ()) -> Any:
    """DPO: a frozen reference, and a call each for the chosen and the rejected."""
    reference = net().requires_grad_(False)

    def loss(model: Any, i: int, x: Tensor, y: Tensor) -> Iterable[Tensor]:
        def gain(x: Tensor) -> Tensor:
            rows = torch.arange(len(y))
            with torch.no_grad():
                before = reference(x).log_softmax(1)[rows, y]
            return model(x).log_softmax(1)[rows, y] - before  # type: ignore[no-any-return]

        yield -F.logsigmoid(0.1 * (gain(x) - gain(x.flip(1)))).mean() / by

    return trained(loss, batches=batches, steps=K)


class Grouped(Seeded):
    """GRPO: clipped ratios times advantages within groups, a mean over tokens, divided by K inside."""

    def __init__(self, by: float = K) -> None:
        super().__init__()
        self.net, self.by = net(), by

    def forward(self, x: Tensor, y: Tensor, advantage: Tensor) -> Tensor:
        log_probs = self.net(x).log_softmax(1).gather(1, y[:, None])[:, 0]
        ratio = (log_probs - log_probs.detach()).exp()
        per_token = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return per_token.mean() / self.by


def groups(model: nn.Module | None = None, by: float = 1, *, batches: Iterable[Batch] = ()) -> Any:
    def loss(model: Any, i: int, x: Tensor, y: Tensor) -> Iterable[Tensor]:
        rewards = x[:, 0].tolist()  # of a rollout's verifier
        center = sum(rewards) / len(rewards)
        yield model(x, y, torch.tensor([each - center for each in rewards])) / by

    return trained(loss, model or Grouped(), batches, steps=K)


# ---- without backward ------------------------------------------------------------------------------------------------


def by_autograd_grad() -> Any:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05)
    with af.audit.watch(model, optimizer) as report:
        for i, (x, y) in enumerate(samples()):
            grads = torch.autograd.grad(F.cross_entropy(model(x), y) / K, list(model.parameters()))
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.grad = grad if i % K == 0 else param.grad + grad  # type: ignore[operator]
            if (i + 1) % K == 0:
                optimizer.step()
    return report


RIGHT |= {
    "a_loss_divided_within_the_model": ("equal", inside(by=K)),
    "a_loss_divided_where_no_graph_shows_it": ("unknown", inside(by=K, is_opaque=True)),
    "an_opaque_loss_divided_by_the_loop": ("equal", inside(outside=K, is_opaque=True)),
    "labels_popped_from_the_batch": ("equal", inside(outside=K, pops=True)),
    "two_heads_with_a_pass_each": ("equal", lambda: trained(both_heads, Heads(), steps=K)),
    "two_heads_with_a_pass_each_uncounted": ("equal", lambda: trained(both_heads, Heads())),
    "two_tasks_in_turn": ("equal", lambda: trained(in_turn, Heads(), steps=K)),
    "two_tasks_in_turn_uncounted": ("equal", lambda: trained(in_turn, Heads())),
    "an_auxiliary_pass_over_the_same_samples": ("equal", lambda: trained(with_auxiliary, steps=K)),
    "an_auxiliary_pass_uncounted": ("equal", lambda: trained(with_auxiliary)),
    "gan_in_three_passes": ("equal", gan),
    "gan_in_three_passes_accumulated": ("equal", lambda: gan(2)),
    "gan_accumulated_and_counted": ("equal", lambda: gan(2, steps=2)),
    "wasserstein_in_three_passes": ("equal", lambda: gan(is_wasserstein=True)),
    "dpo_by_hand": ("equal", preferences),
    "grpo_by_hand": ("equal", groups),
    "gradients_by_autograd_grad": ("unknown", by_autograd_grad),
}
FAULTY |= {
    "divided_within_the_model_and_by_the_loop": ("scaled divided_twice", inside(by=K, outside=K)),
    "a_returned_loss_not_divided": ("scaled not_divided", inside()),
    **{
        f"a_returned_loss_with_{rest}_left": ("scaled remainder_under_weighted", inside(*[6] * (K + rest), outside=K))
        for rest in (1, 2, 3)
    },
    "a_returned_loss_with_a_small_micro_batch": ("different mean_of_means", inside(6, 6, 6, 2, outside=K)),
    "divided_within_the_model_with_a_small_micro_batch": ("different mean_of_means", inside(6, 6, 6, 2, by=K)),
    "batch_norm_and_popped_labels": (
        "different batch_norm", inside(outside=K, pops=True, between=lambda: (nn.BatchNorm1d(16), nn.ReLU())),
    ),
    "the_second_head_not_divided": (
        "different uneven", lambda: trained(lambda *a: both_heads(*a, by=(K, 1)), Heads(), steps=K),
    ),
    "two_heads_and_a_remainder": (
        "scaled remainder_under_weighted", lambda: trained(both_heads, Heads(), samples(K + 3), steps=K),
    ),
    "gan_whose_judge_is_never_zeroed": ("different zero_grad", lambda: gan(zeroes=False)),
}  # fmt: skip


# ---- loaders, ramps, and loops that end otherwise --------------------------------------------------------------------


def generated(sizes: Sequence[int]) -> Iterable[Batch]:
    """A loader without a length."""
    yield from lengths(*sizes)


def by_count(*, is_inside: bool, sizes: Sequence[int] = (6, 2, 5, 3, 4, 6, 1, 7)) -> Any:
    """Sums, divided by the samples of the whole window within the model or without."""
    totals = [sum(sizes[i - i % K :][:K]) for i in range(len(sizes))]

    def loss(model: Any, i: int, x: Tensor, y: Tensor) -> Iterable[Tensor]:
        total = torch.tensor(totals[i])
        loss = model({"x": x, "y": y}, total if is_inside else None)["loss"]
        yield loss if is_inside else loss / total

    return trained(loss, Returning(reduction="sum"), generated(sizes), steps=K)


def weighted(sizes: Sequence[int] = (6, 2, 5, 3, 4, 6, 1, 7), *, is_opaque: bool = False) -> Any:
    """Mean losses of a model, each times its share of the window's samples."""
    totals = [sum(sizes[i - i % K :][:K]) for i in range(len(sizes))]

    def loss(model: Any, i: int, x: Tensor, y: Tensor) -> Iterable[Tensor]:
        yield model({"x": x, "y": y})["loss"] * len(y) / totals[i]

    return trained(loss, Returning(is_opaque=is_opaque), lengths(*sizes), steps=K)


def ramp(*, by: int | None = None) -> Any:
    """Windows that grow: 1, 2, 4 micro-batches. Args: by: what divides each loss; None: the window's own number."""
    model = Returning()
    optimizer = SGD(model.parameters(), lr=0.05)
    with af.audit.watch(model, optimizer) as report:
        for count in (1, 2, 4, 4):
            for x, y in lengths(*[6] * count):
                (model({"x": x, "y": y})["loss"] / (by or count)).backward()
            update(optimizer)
    return report


def scaled_loss(*, unscales: bool) -> Any:
    """A model that returns its loss, under a GradScaler."""
    model, scaler = Returning(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = SGD(model.parameters(), lr=0.05)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for i, (x, y) in enumerate(samples()):
            scaler.scale(model({"x": x, "y": y})["loss"] / K).backward()
            if (i + 1) % K == 0:
                if unscales:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
                optimizer.zero_grad()
    return report


class TwoTerms(Seeded):
    """Returns a loss and a penalty in one. Args: by: divides the loss. penalty_by: the penalty."""

    def __init__(self, by: float = 1, penalty_by: float = 1) -> None:
        super().__init__()
        self.net, self.by, self.penalty_by = net(), by, penalty_by

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.net(x)
        return F.cross_entropy(out, y) / self.by + 0.3 * out.square().mean() / self.penalty_by


def two_terms(outside: float = 1, **options: Any) -> Any:
    return trained(lambda m, i, x, y: [m(x, y) / outside], TwoTerms(**options), steps=K)


def preferred_in_model(outside: float, sizes: Sequence[int] = (6,) * 8) -> Any:
    """A model that takes a pair and returns its DPO-like loss."""

    class Pairs(Seeded):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
            return -F.logsigmoid(self.net(chosen).sum(1) - self.net(rejected).sum(1)).mean()

    return trained(lambda m, i, x, y: [m(x, x.flip(1)) / outside], Pairs(), lengths(*sizes), steps=K)


def group_of_four(*, by: float) -> Any:
    """GRPO whose micro-batch is one group: rewards measured from the group's mean and deviation, as plain numbers."""

    def loss(model: Any, i: int, x: Tensor, y: Tensor) -> Iterable[Tensor]:
        rewards = x[:, 0].tolist()
        center = sum(rewards) / len(rewards)
        spread = (sum((each - center) ** 2 for each in rewards) / len(rewards)) ** 0.5 + 1e-4
        yield model(x, y, torch.tensor([(each - center) / spread for each in rewards])) / by

    return trained(loss, Grouped(by=1), steps=K)


def zeroed_between(optimizer: Any, i: int) -> None:
    if i % K == 1:
        optimizer.zero_grad()


def one_loss_dropped(model: Any, i: int, x: Tensor, y: Tensor) -> Iterable[Tensor]:
    """The gradients of the first head are zeroed before those of the second come."""
    yield F.cross_entropy(model(x)[0], y) / K
    for param in model.parameters():
        param.grad = None
    yield F.cross_entropy(model(x)[1], y) / K


def leaked() -> Any:
    """Epochs of five, the last of them small: the fifth enters the next epoch's first step."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for i, (x, y) in enumerate(lengths(6, 6, 6, 6, 2) * 2):
            (F.cross_entropy(model(x), y) / K).backward()
            if i % 5 == K - 1:
                update(optimizer)
    return report


def three_losses(model: Any, i: int, x: Tensor, y: Tensor) -> Iterable[Tensor]:
    a, b = model(x)
    total = F.cross_entropy(a, y), 0.5 * F.cross_entropy(b, y), 0.1 * a.square().mean()
    return [sum(total) / K]  # type: ignore[list-item]


def passes_of_one_graph(model: Any, i: int, x: Tensor, y: Tensor) -> Iterable[Tensor]:
    """Two losses of one forward pass, whose graph is kept for the second."""
    a, b = model(x)
    (F.cross_entropy(a, y) / K).backward(retain_graph=True)
    yield F.cross_entropy(b, y) / K


RIGHT |= {
    "a_generator_and_sums_over_the_windows_count": ("equal", lambda: by_count(is_inside=False)),
    "counts_given_to_the_model": ("equal", lambda: by_count(is_inside=True)),
    "returned_means_weighted_by_samples": ("equal", weighted),
    "opaque_means_weighted_by_samples": ("equal", lambda: weighted(is_opaque=True)),
    "a_ramp_of_windows": ("equal", ramp),
    "a_returned_loss_under_a_scaler": ("equal", lambda: scaled_loss(unscales=True)),
    "two_terms_in_the_model": ("equal", lambda: two_terms(K)),
    "two_terms_divided_in_the_model": ("equal", lambda: two_terms(by=K, penalty_by=K)),
    "pairs_within_the_model": ("equal", lambda: preferred_in_model(K)),
    "groups_of_one_micro_batch": ("equal", lambda: group_of_four(by=K)),
    "three_losses_in_one_pass": ("equal", lambda: trained(three_losses, Heads(), steps=K)),
    "two_losses_of_one_forward_pass": ("equal", lambda: trained(passes_of_one_graph, Heads(), steps=K)),
    "two_losses_of_one_forward_pass_uncounted": ("equal", lambda: trained(passes_of_one_graph, Heads())),
    "gan_with_a_hinge": ("equal", lambda: gan(is_hinge=True)),
    "gan_with_batch_norm": ("equal", lambda: gan(is_normed=True)),
    "gan_whose_judge_alone_is_watched": ("equal", lambda: gan(is_judge_alone=True)),
    "wasserstein_accumulated": ("equal", lambda: gan(3, is_wasserstein=True)),
    "a_returned_loss_with_its_remainder_divided_by_its_own_number": ("equal", lambda: trained(
        lambda m, i, x, y: [m({"x": x, "y": y})["loss"] / (K if i < K else 3)], Returning(), samples(K + 3), steps=K
    )),
}  # fmt: skip
FAULTY |= {
    "returned_sums_of_means_over_counts": ("different mean_of_means", inside(6, 2, 5, 3, outside=K, is_opaque=True)),
    "a_ramp_divided_by_its_largest": ("scaled not_divided", lambda: ramp(by=4)),
    "a_returned_loss_never_unscaled": ("scaled unscale", lambda: scaled_loss(unscales=False)),
    "a_penalty_in_the_model_that_is_not_divided": ("different uneven", lambda: two_terms(by=K)),
    "two_terms_not_divided": ("scaled not_divided", two_terms),
    "pairs_with_a_small_micro_batch": ("different mean_of_means", lambda: preferred_in_model(K, (6, 6, 6, 2))),
    "groups_not_divided": ("scaled not_divided", lambda: group_of_four(by=1)),
    "a_returned_loss_zeroed_within_the_window": ("different zero_grad", lambda: trained(
        lambda m, i, x, y: [m({"x": x, "y": y})["loss"] / K], Returning(), steps=K, between=zeroed_between
    )),
    "a_small_micro_batch_that_leaks": ("different remainder_leaked,mean_of_means", leaked),
    "a_shorter_window_with_a_small_micro_batch": (
        "different remainder_under_weighted,mean_of_means", inside(6, 6, 6, 6, 6, 6, 2, outside=K),
    ),
    "the_first_of_two_losses_dropped": ("different zero_grad", lambda: trained(one_loss_dropped, Heads(), steps=K)),
    "opaque_and_a_remainder": (
        "scaled remainder_under_weighted", inside(*[6] * (K + 3), outside=K, is_opaque=True),
    ),
    "divided_within_the_model_with_a_remainder": ("scaled remainder_under_weighted", inside(*[6] * (K + 2), by=K)),
}  # fmt: skip
