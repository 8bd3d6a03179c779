"""Loops as people write them, to count the audit's verdicts: 65 that are right, 47 with a fault.

All but the last ones were written before the audit that is judged by them, and every second of these was held back
until it was done. At first sight of that half it accused none of 28 right loops, could not tell in 3 of them, and found
all 19 faults.
`RIGHT` loops make the update of the large batch; `FAULTS` do not. Each case returns a report.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from audited_loops import Experts, K, Language, count, end, ends, net, samples, token_loss, tokens, update
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import accumfused as af

Case = Callable[[], Any]
RIGHT: dict[str, Case] = {}
FAULTS: dict[str, Case] = {}


def right(case: Case) -> Case:
    RIGHT[case.__name__] = case
    return case


def fault(case: Case) -> Case:
    FAULTS[case.__name__] = case
    return case


def run(
    micro: Callable[..., None], model: nn.Module | None = None, data: Sequence[Any] | None = None, *, make: Any = None,
    watched: nn.Module | None = None, **options: Any,
) -> Any:  # fmt: skip
    """Two windows; `micro(model, optimizer, i, x, y)` is the loop's body."""
    model = net() if model is None else model
    optimizer = (make or functools.partial(torch.optim.SGD, lr=0.05))(model.parameters())
    with af.audit.watch(watched or model, optimizer, **{"gradient_accumulation_steps": K, **options}) as report:
        for i, (x, y) in enumerate(samples(2 * K, 6) if data is None else data):
            micro(model, optimizer, i, x, y)
    return report


def divided(loss: Callable[..., Tensor], model: nn.Module | None = None, data: Any = None, **options: Any) -> Any:
    """The loop of every tutorial: loss / K, a step at the end of a window."""

    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (loss(model, x, y) / K).backward()
        end(optimizer, i)

    return run(micro, model, data, **options)


def once(
    loss: Callable[..., Tensor], batch: Any, model: nn.Module | None = None, steps: int = K, **options: Any
) -> Any:
    """`af.audit` of one batch."""
    return af.audit(net() if model is None else model, loss, batch, steps, **options)


def ce(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def logp(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.log_softmax(model(x), 1).gather(1, y[:, None])[:, 0]


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x.roll(1, 1))


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * log_var).exp()), mean, log_var


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.pi, self.v = nn.Linear(6, 12), nn.Linear(12, 3), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.pi(h), self.v(h)[:, 0]


# ---- right: signs, factors, losses of one sample each ----------------------------------------------------------------


@right
def reinforce() -> Any:
    return divided(lambda m, x, y: -(logp(m, x, y) * x[:, 5]).mean())


@right
def minus_the_mean() -> Any:
    return divided(lambda m, x, y: -logp(m, x, y).mean())


@right
def ppo() -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        logits, value = model(x)
        log_probs = logits.log_softmax(1)
        ratio = (log_probs.gather(1, y[:, None])[:, 0] + 1.0).exp()
        advantage = x[:, 0]
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        entropy = -(log_probs.exp() * log_probs).sum(1)
        return -gain.mean() + 0.5 * F.mse_loss(value, x[:, 1]) - 0.01 * entropy.mean()

    return divided(loss, Policy())


@right
def dpo_in_one_batch() -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        chosen, rejected = model(x).sum(1).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    return divided(loss)


@right
def dpo_in_two_calls_with_a_reference() -> Any:
    reference = net().requires_grad_(False)

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        ours = logp(model, x, y) - logp(model, x.flip(1), y)
        theirs = logp(reference, x, y) - logp(reference, x.flip(1), y)
        return -F.logsigmoid(0.1 * (ours - theirs)).mean()

    return divided(loss)


@right
def siamese() -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        a, b = model(x).chunk(2)
        return (1 - F.cosine_similarity(a, b)).mean()

    return divided(loss)


@right
def triplets() -> Any:
    return divided(lambda m, x, y: F.triplet_margin_loss(*m(x).chunk(3)))


@right
def margin_ranking() -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        a, b = model(x)[:, 0].chunk(2)
        return F.margin_ranking_loss(a, b, torch.ones(3), margin=0.5)

    return divided(loss)


@right
def pairs_of_two_towers() -> Any:
    return divided(lambda m, x, y: F.mse_loss(*m(x)), Towers())


@right
def reward_model_of_pairs() -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        rewards = model(torch.cat([x, x.roll(2, 1)]))[:, 0]
        return -F.logsigmoid(rewards[: len(x)] - rewards[len(x) :]).mean()

    return divided(loss)


@right
def vae() -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        out, mean, log_var = model(x)
        kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum()
        return (F.mse_loss(out, x, reduction="sum") + 0.3 * kl) / len(x)

    return divided(loss, Vae())


@right
def vae_of_means() -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        out, mean, log_var = model(x)
        kl = torch.mean(-0.5 * torch.sum(1 + log_var - mean**2 - log_var.exp(), dim=1), dim=0)
        return F.mse_loss(out, x) + 0.00025 * kl

    return divided(loss, Vae())


@right
def distillation() -> Any:
    teacher, heat = net().requires_grad_(False), 2.0

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        with torch.no_grad():
            soft = (teacher(x.flip(1)) / heat).softmax(1)
        kl = F.kl_div((out / heat).log_softmax(1), soft, reduction="batchmean") * heat * heat
        return 0.3 * kl + 0.7 * F.cross_entropy(out, y)

    return divided(loss)


@right
def heat_squared_is_the_number_of_micro_batches() -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.kl_div((model(x) / 2).log_softmax(1), x[:, :3].softmax(1), reduction="batchmean") * (2.0 * 2.0)

    return divided(loss)


@right
def factor_in_a_tensor() -> Any:
    weight = torch.tensor(0.7)
    return divided(lambda m, x, y: ce(m, x, y) * weight)


@right
def weighted_kl() -> Any:
    return divided(lambda m, x, y: 0.3 * F.kl_div(m(x).log_softmax(1), x[:, :3].softmax(1), reduction="batchmean"))


@right
def mean_over_samples_sum_over_features() -> Any:
    return divided(lambda m, x, y: (m(x) - x[:, :3]).square().mean(0).sum())


@right
def focal() -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(model(x), y, reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()

    return divided(loss)


@right
def losses_of_single_samples_stacked() -> Any:
    return divided(lambda m, x, y: torch.stack([ce(m, a[None], b[None]) for a, b in zip(x, y, strict=True)]).mean())


@right
def smoothed_labels() -> Any:
    return divided(lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1))


@right
def huber_and_an_l2_term_divided_with_it() -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(model(x), x[:, :3]) + 1e-3 * sum(p.square().sum() for p in model.parameters())

    return divided(loss)


# ---- right: models ---------------------------------------------------------------------------------------------------


@right
def dropout() -> Any:
    return divided(ce, net(nn.ReLU(), nn.Dropout(0.3)))


@right
def group_norm_and_convolutions() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(32, 3)
    )
    return divided(ce, model)


@right
def frozen_batch_norm() -> Any:
    return divided(ce, net(nn.BatchNorm1d(16).eval(), nn.Tanh()))


@right
def time_first_lstm() -> Any:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.cell, self.head = nn.LSTM(6, 7), nn.Linear(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(x)[0])

    torch.manual_seed(3)
    data = [(torch.randn(5, 4, 6), torch.randint(3, (5, 4))) for _ in range(2 * K)]
    return divided(lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten()), Recurrent(), data)


@right
def weight_norm() -> Any:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    return divided(ce, nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 3)))


@right
def low_rank_adapters_on_a_frozen_layer() -> Any:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.base = net().requires_grad_(False)
            self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + 2.0 * self.up(self.down(x))

    return divided(ce, Adapted(), make=lambda ps: torch.optim.SGD([p for p in ps if p.requires_grad], lr=0.1))


@right
def gradient_checkpointing() -> Any:
    return divided(lambda m, x, y: F.cross_entropy(m[2](checkpoint(nn.Sequential(*m[:2]), x, use_reentrant=False)), y))


@right
def calls_forward() -> Any:
    return divided(lambda m, x, y: F.cross_entropy(m.forward(x), y))


@right
def a_method_that_returns_the_loss() -> Any:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.net(x), y)

    return divided(lambda m, x, y: m.loss(x, y), WithLoss())


@right
def children_of_a_module_dict() -> Any:
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(6, 8), "head": nn.Linear(8, 3)})
    return divided(lambda m, x, y: F.cross_entropy(m["head"](m["body"](x).relu()), y), model)


@right
def compiled_model() -> Any:
    model = torch.compile(net(), backend="aot_eager")
    return divided(ce, model)  # type: ignore[arg-type]


@right
def compiled_copy_of_the_watched_model() -> Any:
    model = net()
    compiled = torch.compile(model, backend="aot_eager")
    return divided(lambda m, x, y: ce(compiled, x, y), model)


@right
def parameters_without_a_module() -> Any:
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(6, 8), torch.randn(8, 3)])
    return divided(lambda m, x, y: F.cross_entropy((x @ m[0]).tanh() @ m[1], y), model)


# ---- right: tokens ---------------------------------------------------------------------------------------------------


@right
def tokens_weighted_by_their_count() -> Any:
    model = Language()
    optimizer = af.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for (x, y), last in af.windows(tokens(2 * K + 3), K):
            token_loss(model, x, y).backward()
            optimizer.accumulate(weight=count(y))
            if last:
                optimizer.step()
    return report


@right
def masked_language_model() -> Any:
    torch.manual_seed(4)
    data = [(torch.randint(16, (4, 12)), torch.rand(4, 12) < 0.3) for _ in range(2 * K)]

    def micro(model: Any, optimizer: Any, i: int, x: Tensor, mask: Tensor) -> None:
        total = sum(int(m.sum()) for _, m in data[i - i % K :][:K])
        (F.cross_entropy(model(x.masked_fill(mask, 0))[mask], x[mask], reduction="sum") / total).backward()
        end(optimizer, i)

    return run(micro, Language(), data)


@right
def a_masked_sum_over_the_windows_count() -> Any:
    data = tokens(2 * K)

    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten().clamp(0), reduction="none")
        mask = (y != -100).flatten().float()
        ((losses * mask).sum() / sum(count(y) for _, y in data[i - i % K :][:K])).backward()
        end(optimizer, i)

    return run(micro, Language(), data)


@right
def one_sequence_at_a_time() -> Any:
    data = [(x[:1], y[:1]) for x, y in tokens(2 * K)]

    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        total = sum(int(count(y)) for _, y in data[i - i % K :][:K])
        (token_loss(model, x, y, "sum") / total).backward()
        end(optimizer, i)

    return run(micro, Language(), data)


@right
def label_counts_before_the_shift() -> Any:
    """As older models of transformers count them: off by one label a sequence, in all micro-batches alike."""
    data = tokens(2 * K)

    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        total = sum(count(y) for _, y in data[i - i % K :][:K])
        logits = model(x)[:, :-1].flatten(0, 1)
        (F.cross_entropy(logits, y[:, 1:].flatten(), reduction="sum") / total).backward()
        end(optimizer, i)

    return run(micro, Language(), data)


# ---- right: loops ----------------------------------------------------------------------------------------------------


@right
def two_tasks_in_one_loss() -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        logits, value = model(x)
        return 0.8 * F.cross_entropy(logits, y) + 0.2 * F.mse_loss(value, x[:, 0])

    return divided(loss, Policy())


@right
def two_tasks_in_two_backward_passes() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        logits, value = model(x)
        (F.cross_entropy(logits, y) / K).backward(retain_graph=True)
        (0.5 * F.mse_loss(value, x[:, 0]) / K).backward()
        end(optimizer, i)

    return run(micro, Policy())


@right
def gan_with_two_optimizers() -> Any:
    return _gan(two=True)


@right
def gan_with_one_optimizer() -> Any:
    return _gan(two=False)


def _gan(two: bool) -> Any:
    torch.manual_seed(0)
    both = nn.ModuleDict({"made": nn.Linear(4, 6), "judge": nn.Linear(6, 1)})
    bce = F.binary_cross_entropy_with_logits
    if two:
        optimizers = [torch.optim.SGD(both[name].parameters(), lr=0.05) for name in ("judge", "made")]
    else:
        optimizers = [torch.optim.SGD(both.parameters(), lr=0.05)]
    with af.audit.watch(both, optimizers, gradient_accumulation_steps=K) as report:
        for _ in range(2):
            for _ in range(K):
                real, fake = torch.randn(5, 6), both["made"](torch.randn(5, 4))
                judged = both["judge"](real), both["judge"](fake.detach())
                loss = bce(judged[0], torch.ones(5, 1)) + bce(judged[1], torch.zeros(5, 1))
                (loss / K).backward()
                if not two:
                    both["judge"].requires_grad_(False)
                    (bce(both["judge"](fake), torch.ones(5, 1)) / K).backward()
                    both["judge"].requires_grad_(True)
            if two:
                update(optimizers[0])
                for _ in range(K):
                    made = both["judge"](both["made"](torch.randn(5, 4)))
                    (bce(made, torch.ones(5, 1)) / K).backward()
                optimizers[1].step()
                both.zero_grad()
            else:
                update(optimizers[0])
    return report


@right
def wasserstein_with_gradient_penalty() -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        fake = x.flip(1)
        mixed = (0.3 * x + 0.7 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(2, dim=1) - 1).square().mean()
        return model(fake).mean() - model(x).mean() + 10 * penalty

    return divided(loss)


@right
def sharpness_aware() -> Any:
    return _sam(1)


@right
def sharpness_aware_over_windows() -> Any:
    return _sam(K)


def _sam(steps: int) -> Any:
    model, data = net(), samples(2 * steps, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=steps) as report:
        for start in range(0, len(data), steps):
            for is_second in (False, True):
                for x, y in data[start : start + steps]:
                    (ce(model, x, y) / steps).backward()
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


@right
def scaler_and_clip() -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        scaler.scale(ce(model, x, y) / K).backward()
        if ends(i):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return run(micro)


@right
def clip_by_value_and_zero_grad_first() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        if i % K == 0:
            optimizer.zero_grad()
        (ce(model, x, y) / K).backward()
        if ends(i):
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()

    return run(micro)


@right
def a_shorter_last_window_divided_by_its_own_length() -> Any:
    data = samples(2 * K + 2, 6)

    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (ce(model, x, y) / (K if i < 2 * K else 2)).backward()
        if ends(i) or i + 1 == len(data):
            update(optimizer)

    return run(micro, data=data)


@right
def gradients_divided_in_place() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        ce(model, x, y).backward()
        if ends(i):
            for p in model.parameters():
                p.grad /= K
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        end(optimizer, i)

    return run(micro)


@right
def averaged_weights_after_the_step() -> Any:
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model)

    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (ce(model, x, y) / K).backward()
        end(optimizer, i)
        if ends(i):
            average.update_parameters(model)

    return run(micro, model)


@right
def a_kl_weight_that_rises_after_each_window() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        out, mean, log_var = model(x)
        kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()
        ((F.mse_loss(out, x) + 0.1 * (1 + i // K) * kl) / K).backward()
        end(optimizer, i)

    return run(micro, Vae())


@right
def a_look_at_gradients_with_autograd_grad() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        loss = ce(model, x, y)
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        torch.autograd.backward(loss / K)
        end(optimizer, i)

    return run(micro)


@right
def one_step_a_micro_batch() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        ce(model, x, y).backward()
        update(optimizer)

    return run(micro, net(nn.BatchNorm1d(16), nn.Tanh()), gradient_accumulation_steps=1)


@right
def a_batch_that_k_divides_and_one_that_it_does_not() -> Any:
    torch.manual_seed(0)
    batch = torch.randn(18, 6), torch.randint(3, (18,))
    return once(lambda m, b: ce(m, *b), batch, weight_fn=lambda b: len(b[1]))


@right
def preference_pairs_in_one_call() -> Any:
    def loss(model: Any, batch: Any) -> Tensor:
        chosen, rejected = model(torch.cat(batch)).sum(1).chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()

    torch.manual_seed(0)
    return once(loss, (torch.randn(8, 6), torch.randn(8, 6)))


@right
def dropout_in_one_call() -> Any:
    torch.manual_seed(0)
    return once(lambda m, b: ce(m, *b), (torch.randn(16, 6), torch.randint(3, (16,))), net(nn.ReLU(), nn.Dropout(0.5)))


# ---- right: written after the audit ----------------------------------------------------------------------------------


@right
def diffusion() -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        time = torch.rand(len(x), 1)
        return F.mse_loss(model((1 - time) * x + time * torch.randn_like(x)), torch.randn(len(x), 3))

    return divided(loss)


@right
def connectionist_temporal_classification() -> Any:
    torch.manual_seed(0)
    data = [(torch.randn(4, 9, 6), torch.randint(1, 5, (4, 3))) for _ in range(2 * K)]

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.ctc_loss(model(x).log_softmax(2).transpose(0, 1), y, torch.full((4,), 9), torch.full((4,), 3))

    return divided(loss, nn.Linear(6, 5), data)


@right
def adversarial_inputs() -> Any:
    """A first backward pass is for the gradient of the inputs; what it brings to parameters is zeroed."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=1) as report:
        for x, y in samples(4, 6):
            ce(model, x.requires_grad_(), y).backward()
            assert x.grad is not None
            optimizer.zero_grad()
            ce(model, x.detach() + 0.1 * x.grad.sign(), y).backward()
            update(optimizer)
    return report


@right
def samples_that_are_normalized_by_themselves() -> Any:
    data = [(torch.stack([(row - row.mean()) / row.std() for row in x]), y) for x, y in samples(2 * K, 5)]
    return divided(lambda m, x, y: ce(m, torch.stack([(row - row.mean()) / row.std() for row in x]), y), data=data)


@right
def losses_of_single_samples_in_a_loop() -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Any:
        return sum(ce(model, a[None], b[None]) for a, b in zip(x, y, strict=True)) / len(x)

    return divided(loss)


@right
def an_l2_term_of_its_own_once_a_window() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (ce(model, x, y) / K).backward()
        if ends(i):
            (1e-3 * sum(p.square().sum() for p in model.parameters())).backward()
        end(optimizer, i)

    return run(micro)


@right
def labels_smoothed_over_tokens() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x).flatten(0, 1), y.flatten(), label_smoothing=0.1).backward()
        optimizer.accumulate(weight=count(y))
        if ends(i):
            optimizer.step()

    return run(micro, Language(), tokens(2 * K), make=af.AdamW)


@right
def dropout_twice() -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        one, other = model(x), model(x)
        kl = F.kl_div(one.log_softmax(1), other.softmax(1), reduction="none").sum(1).mean()
        return 0.5 * (F.cross_entropy(one, y) + F.cross_entropy(other, y)) + kl

    return divided(loss, net(nn.Dropout(0.2)))


# ---- faults: sizes ---------------------------------------------------------------------------------------------------


def _closing(loss: Callable[..., Tensor] = ce) -> Callable[..., None]:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        loss(model, x, y).backward()
        end(optimizer, i)

    return micro


@fault
def not_divided() -> Any:
    return run(_closing())


@fault
def not_divided_and_clipped() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        ce(model, x, y).backward()
        if ends(i):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        end(optimizer, i)

    return run(micro)


@fault
def reinforce_not_divided() -> Any:
    return run(_closing(lambda m, x, y: -(logp(m, x, y) * x[:, 5]).mean()))


@fault
def divided_by_the_loop_and_by_weights() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (ce(model, x, y) / K).backward()
        optimizer.accumulate(weight=1.0)
        if ends(i):
            optimizer.step()

    return run(micro, make=af.AdamW)


@fault
def divided_twice_in_the_loss() -> Any:
    return divided(lambda m, x, y: ce(m, x, y) / K)


@fault
def never_unscaled() -> Any:
    return divided(lambda m, x, y: ce(m, x, y) * torch.tensor(1024.0))


@fault
def clipped_before_it_is_unscaled() -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        scaler.scale(ce(model, x, y) / K).backward()
        if ends(i):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return run(micro)


@fault
def a_remainder_divided_by_k() -> Any:
    data = samples(K + 3, 6)

    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (ce(model, x, y) / K).backward()
        if ends(i) or i + 1 == len(data):
            update(optimizer)

    return run(micro, data=data)


@fault
def a_remainder_that_leaks_into_the_next_epoch() -> Any:
    model, data = net(), samples(K + 1, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for _ in range(2):
            for i, (x, y) in enumerate(data):
                (ce(model, x, y) / K).backward()
                end(optimizer, i)
    return report


@fault
def steps_after_the_first_micro_batch() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        if i % K == 0:
            (ce(model, x, y) / K).backward()
            update(optimizer)

    return run(micro)


# ---- faults: weights -------------------------------------------------------------------------------------------------


@fault
def a_mean_of_means_over_tokens() -> Any:
    return divided(token_loss, Language(), tokens(2 * K))


@fault
def a_mean_of_means_with_a_mask() -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten().clamp(0), reduction="none")
        mask = (y != -100).flatten().float()
        return (losses * mask).sum() / mask.sum()

    return divided(loss, Language(), tokens(2 * K))


@fault
def a_mean_of_means_of_selected_tokens() -> Any:
    return divided(lambda m, x, y: F.cross_entropy(m(x)[y >= 0], y[y >= 0]), Language(), tokens(2 * K))


@fault
def a_smaller_last_micro_batch() -> Any:
    return divided(ce, data=[*samples(K - 1, 6), *samples(1, 2), *samples(K - 1, 6), *samples(1, 3)])


@fault
def weights_that_count_samples_for_a_mean_over_tokens() -> Any:
    model = Language()
    optimizer = af.AdamW(model.parameters(), lr=0.01)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for (x, y), last in af.windows(tokens(2 * K), K):
            token_loss(model, x, y).backward()
            optimizer.accumulate(weight=len(y))
            if last:
                optimizer.step()
    return report


@fault
def each_micro_batch_divided_by_its_number() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (ce(model, x, y) / (i % K + 1)).backward()
        end(optimizer, i)

    return run(micro)


@fault
def pairs_in_a_smaller_last_micro_batch() -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        chosen, rejected = model(x).sum(1).chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()

    return divided(loss, data=[*samples(K - 1, 6), *samples(1, 2)] * 2)


@fault
def an_l2_term_added_after_the_division() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (ce(model, x, y) / K + 1e-2 * sum(p.square().sum() for p in model.parameters())).backward()
        end(optimizer, i)

    return run(micro)


@fault
def a_second_task_that_is_not_divided() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        logits, value = model(x)
        (F.cross_entropy(logits, y) / K + F.mse_loss(value, x[:, 0])).backward()
        end(optimizer, i)

    return run(micro, Policy())


@fault
def a_second_backward_that_is_not_divided() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        logits, value = model(x)
        (F.cross_entropy(logits, y) / K).backward(retain_graph=True)
        F.mse_loss(value, x[:, 0]).backward()
        end(optimizer, i)

    return run(micro, Policy())


# ---- faults: what happens to gradients -------------------------------------------------------------------------------


@fault
def zero_grad_before_each_micro_batch() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        (ce(model, x, y) / K).backward()
        if ends(i):
            optimizer.step()

    return run(micro)


@fault
def zero_grad_forgotten() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (ce(model, x, y) / K).backward()
        if ends(i):
            optimizer.step()

    return run(micro)


@fault
def zero_grad_by_a_callback_within_the_window() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (ce(model, x, y) / K).backward()
        if i == K + 1:
            model.zero_grad()
        end(optimizer, i)

    return run(micro)


@fault
def a_remainder_zeroed_by_the_next_epoch() -> Any:
    model, data = net(), samples(K + 2, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for _ in range(2):
            optimizer.zero_grad()
            for i, (x, y) in enumerate(data):
                (ce(model, x, y) / K).backward()
                end(optimizer, i)
    return report


@fault
def clipped_after_each_micro_batch() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (ce(model, x, y) / K).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        end(optimizer, i)

    return run(micro)


@fault
def unscaled_within_the_window() -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        scaler.scale(ce(model, x, y) / K).backward()
        if i % K == 1:
            scaler.unscale_(optimizer)
        if ends(i):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return run(micro)


@fault
def sums_in_16_bits() -> Any:
    return divided(lambda m, x, y: F.cross_entropy(m(x.bfloat16()).float(), y), net().bfloat16())


@fault
def averaged_weights_swapped_in_within_the_window() -> Any:
    model = net()
    average = {name: 0.9 * tensor for name, tensor in model.state_dict().items()}

    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (ce(model, x, y) / K).backward()
        if i % K == 1:
            model.load_state_dict(average)
        end(optimizer, i)

    return run(micro, model)


@fault
def one_layers_gradient_changed_by_hand() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (ce(model, x, y) / K).backward()
        if ends(i):
            model[0].weight.grad *= 0.5
        end(optimizer, i)

    return run(micro)


@fault
def steps_at_every_micro_batch_and_zeroes_once_a_window() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (ce(model, x, y) / K).backward()
        optimizer.step()
        if ends(i):
            optimizer.zero_grad()

    return run(micro)


# ---- faults: losses that are no sum over samples ---------------------------------------------------------------------


@fault
def negatives_in_the_batch() -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        a, b = (F.normalize(each, dim=1) for each in model(x))
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))

    return divided(loss, Towers())


@fault
def negatives_in_one_call() -> Any:
    def loss(model: Any, x: Any) -> Tensor:
        a, b = (F.normalize(each, dim=1) for each in model(x))
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))

    torch.manual_seed(0)
    return once(loss, torch.randn(16, 6), Towers())


@fault
def batch_norm_in_one_call() -> Any:
    torch.manual_seed(0)
    return once(
        lambda m, b: ce(m, *b), (torch.randn(16, 6), torch.randint(3, (16,))), net(nn.BatchNorm1d(16), nn.ReLU())
    )


@fault
def a_remainder_with_the_weight_of_a_full_micro_batch() -> Any:
    torch.manual_seed(0)
    return once(lambda m, b: ce(m, *b), (torch.randn(18, 6), torch.randint(3, (18,))))


@fault
def balance_of_experts_in_an_attribute() -> Any:
    class Attribute(nn.Module):
        balance: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.experts = Experts()

        def forward(self, x: Tensor) -> Tensor:
            out, self.balance = self.experts(x)
            return out

    return divided(lambda m, x, y: ce(m, x, y) + 0.1 * m.balance, Attribute(), samples(2 * K, 8))


@fault
def balance_of_experts_in_one_call() -> Any:
    def loss(model: Any, batch: Any) -> Tensor:
        out, balance = model(batch[0])
        return F.cross_entropy(out, batch[1]) + 0.1 * balance

    return once(loss, samples(1, 32)[0], Experts())


@fault
def root_of_the_mean_square_in_one_call() -> Any:
    return once(lambda m, x: F.mse_loss(m(x), x[:, :3]).sqrt(), samples(1, 16)[0][0])


@fault
def advantages_normalized_by_micro_batch_in_one_call() -> Any:
    def loss(model: Any, batch: Any) -> Tensor:
        x, y = batch
        advantage = (x[:, 5] - x[:, 5].mean()) / x[:, 5].std()
        return -(logp(model, x, y) * advantage).mean()

    return once(loss, samples(1, 16)[0])


@fault
def dice_in_one_call() -> Any:
    def loss(model: Any, batch: Any) -> Tensor:
        chance, truth = model(batch[0]).sigmoid(), F.one_hot(batch[1], 3)
        return 1 - 2 * (chance * truth).sum() / (chance + truth).sum()

    return once(loss, samples(1, 16)[0])


# ---- faults: written after the audit ---------------------------------------------------------------------------------


@fault
def class_weights_in_a_mean() -> Any:
    return divided(lambda m, x, y: F.cross_entropy(m(x), y, weight=torch.tensor([1.0, 5.0, 0.2])))


@fault
def a_mean_over_positives() -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        positive = (y == 0).float()
        return (F.mse_loss(model(x), x[:, :3], reduction="none").sum(1) * positive).sum() / positive.sum()

    data = [(x, torch.tensor([0] * (1 + i % 4) + [1] * (5 - i % 4))) for i, (x, _) in enumerate(samples(2 * K, 6))]
    return divided(loss, data=data)


@fault
def noise_on_gradients() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (ce(model, x, y) / K).backward()
        for p in model.parameters() if ends(i) else ():
            p.grad.add_(torch.randn_like(p), alpha=0.01)
        end(optimizer, i)

    return run(micro)


@fault
def advantages_normalized_by_micro_batch() -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        advantage = (x[:, 5] - x[:, 5].mean()) / x[:, 5].std()
        return -(logp(model, x, y) * advantage).mean()

    return divided(loss)


@fault
def the_sign_of_gradients_changed() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (ce(model, x, y) / K).backward()
        for p in model.parameters() if ends(i) else ():
            p.grad.neg_()
        end(optimizer, i)

    return run(micro)


@fault
def a_gradient_dropped_before_the_step() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (ce(model, x, y) / K).backward()
        if ends(i):
            model[0].weight.grad = None
        end(optimizer, i)

    return run(micro)


@fault
def each_layers_gradient_normalized() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (ce(model, x, y) / K).backward()
        for p in model.parameters() if ends(i) else ():
            p.grad /= p.grad.std()
        end(optimizer, i)

    return run(micro)


@fault
def negatives_with_cached_gradients() -> Any:
    def micro(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            a, b = (each.requires_grad_() for each in model(x))
        (F.cross_entropy(a @ b.T, torch.arange(len(x))) / K).backward()
        for start in range(0, len(x), 2):
            rows = slice(start, start + 2)
            sum((out * whole.grad[rows]).sum() for out, whole in zip(model(x[rows]), (a, b), strict=True)).backward()
        end(optimizer, i)

    return run(micro, Towers())
