"""The audit of more loops: other losses, other steps, and what only looks like a fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from audited_loops import (
    K,
    Language,
    WithLoss,
    body_of,
    clip,
    count,
    dividing,
    end,
    ends,
    folded,
    in_16_bits,
    l2,
    mean,
    net,
    samples,
    smaller_last,
    token_loss,
    tokens,
    total,
    unscale_and_clip,
    update,
    watched,
    with_scaler,
    zero_grad_before_each_micro_batch,
)  # fmt: skip
from inside import run_engine
from torch import Tensor, nn
from torch.nn import functional as F

import accumfused as af


def with_gradient(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    mean(model, x, y).backward(gradient=torch.tensor(1 / K))
    end(optimizer, i)


def normed_and_divided(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    """The norm is for the log: no clip follows."""
    mean(model, x, y).backward()
    if ends(i):
        torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad.mul_(1 / K)
    end(optimizer, i)


def divided_by_another_number(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    mean(model, x, y).backward()
    for param in model.parameters() if ends(i) else ():
        param.grad /= 7
    end(optimizer, i)


def kl(model: Any, x: Tensor) -> Tensor:
    return F.kl_div(model(x).log_softmax(1), x[:, :3].softmax(1), reduction="batchmean")


def few() -> list[tuple[Tensor, Tensor]]:
    """Samples with other numbers of targets in each micro-batch."""
    return [(x, torch.tensor([0] * (1 + i % K) + [1] * (5 - i % K))) for i, (x, _) in enumerate(samples())]


def share(i: int) -> float:
    """One over the samples of a window of smaller_last()."""
    return 1 / sum(len(y) for _, y in smaller_last()[i - i % K :][:K])


@pytest.mark.parametrize(("verdict", "body", "batches"), [
    ("equal", with_gradient, None), ("equal", normed_and_divided, None),
    ("equal", dividing(lambda m, x, y: 0.5 * F.mse_loss(m(x), F.one_hot(y, 3).float())), None),
    ("equal", body_of(lambda m, i, x, y: mean(m, x, y, "sum")), None),
    ("equal", body_of(lambda m, i, x, y: (mean(m, x, y) + l2(m)) * len(y) * share(i)), smaller_last),
    ("equal", body_of(lambda m, i, x, y: mean(m, x, y, "sum") * share(i) * K / K), smaller_last),
    ("equal", body_of(lambda m, i, x, y: mean(m, x, y, "sum") / len(y) / K), lambda: samples(size=K)),
    ("equal", body_of(lambda m, i, x, y: (mean(m, x, y) if i % 2 else m(x).square().mean()) / K), None),
    ("equal", body_of(lambda m, i, x, y: kl(m, x) * len(y) / 13), lambda: 2 * [samples(1, n)[0] for n in (K, 2, 5, 2)]),
    ("scaled", divided_by_another_number, None),
    ("scaled", body_of(lambda m, i, x, y: mean(m, x, y, "sum") / len(y)), None),
    ("different", body_of(lambda m, i, x, y: mean(m, x, y) / K + 0.1 * m(x).square().mean()), None),
    ("unknown", body_of(lambda m, i, x, y: mean(m, x, y) / K + 0.075 * m(x).square().mean()), None),  # 0.3 / K?
    ("unknown", dividing(lambda m, x, y: mean(m, x, y) + (m(x)[:, 0] * (y == 0)).sum() / (y == 0).sum()), few),
])  # fmt: skip
def test_other_losses_have_their_verdict(verdict: str, body: Any, batches: Any) -> None:
    report = watched(body, batches=batches and batches())
    assert report.verdict == verdict, str(report)
    assert verdict != "equal" or max(step.difference for step in report.steps) < 1e-5
    assert body is not divided_by_another_number or report.names == ["factor"]


def test_a_scaler_with_autocast_and_parameters_in_16_bits_whose_sums_are_in_32_are_sound() -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(x).float(), y)

    assert with_scaler(unscale_and_clip, loss, make=torch.optim.AdamW).matches
    assert folded(in_16_bits, model=net().bfloat16()).matches


def test_two_optimizers_of_one_model_with_tied_weights_are_sound() -> None:
    model = Language()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizers = [af.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]
    with af.audit.watch(model, optimizers, gradient_accumulation_steps=K) as report:
        for i, (x, _) in enumerate(tokens()):
            (token_loss(model, x[:, :-1].repeat(1, 2)[:, :12], x) / K).backward()
            for optimizer in optimizers:
                end(optimizer, i)
    assert report.matches, str(report)


def test_a_remainder_whose_samples_the_loop_counts_is_sound() -> None:
    """The last micro-batch has fewer samples, the last window fewer micro-batches."""
    model, batches = net(), [*samples(K + 1), *samples(1, 3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for window in (batches[:K], batches[K:]):
            optimizer.zero_grad(set_to_none=False)
            for x, y in window:
                (F.mse_loss(model(x), F.one_hot(y, 3).float()) * len(y) / sum(len(y) for _, y in window)).backward()
            optimizer.step()
    assert report.matches, str(report)


def test_a_lost_micro_batch_is_seen_even_if_all_are_the_same() -> None:
    assert watched(zero_grad_before_each_micro_batch, batches=samples(1) * 2 * K).names == ["zero_grad"]


def test_a_pass_for_gradients_of_inputs_is_no_micro_batch_but_may_be_a_lost_one() -> None:
    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        mean(model, x.requires_grad_(), y).backward()
        optimizer.zero_grad()
        mean(model, x.detach(), y).backward()
        update(optimizer)

    assert watched(body, steps=1).matches
    assert watched(body, steps=2).verdict == "unknown"


def test_losses_that_share_a_backward_are_so_many_micro_batches() -> None:
    model, batches = net(), samples(2 * K)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for start in range(0, 2 * K, K):
            losses = [mean(model, x, y) / K for x, y in batches[start : start + K]]
            torch.add(losses[0] + losses[1], losses[2] + losses[3]).backward()
            update(optimizer)
    assert report.matches, str(report)


def test_another_loss_that_passes_through_is_not_lost() -> None:
    """A GAN: the generator's loss leaves gradients in the discriminator, which its zero_grad() drops."""
    torch.manual_seed(0)
    generator, judge = nn.Linear(4, 6), nn.Linear(6, 1)
    making, judging = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (generator, judge))
    with af.audit.watch(judge, [making, judging], gradient_accumulation_steps=K) as report:
        for _ in range(2):
            for optimizer, answer in ((judging, 0.0), (making, 1.0)):
                optimizer.zero_grad()
                for _ in range(K):
                    out = judge(generator(torch.randn(5, 4)).detach() if answer == 0 else generator(torch.randn(5, 4)))
                    (F.binary_cross_entropy_with_logits(out, torch.full((5, 1), answer)) / K).backward()
                optimizer.step()
    assert report.matches, str(report)


@pytest.mark.parametrize(("scaler", "make"), [(torch.amp.GradScaler, torch.optim.SGD), (af.GradScaler, af.SGD)])
@pytest.mark.parametrize("bad", [K + 1, 3 * K - 1])  # in the second window, or the last
def test_a_step_that_a_scaler_skips_is_no_fault_and_is_counted(scaler: Any, make: Any, bad: int) -> None:
    scale = scaler("cpu", init_scale=1024.0)

    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        scale.scale(mean(model, x, y) / K * (torch.inf if i == bad else 1)).backward()
        if ends(i):
            scale.unscale_(optimizer)
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()

    report = watched(body, make=make, batches=samples(3 * K))
    assert (report.matches, len(report.steps)) == (True, 2), str(report)
    assert "1 of 3 steps were not judged: their gradients were inf or NaN" in str(report)


def test_an_empty_micro_batch_with_a_weight_of_0_is_no_fault() -> None:
    batches = tokens(2 * K)
    batches[1] = batches[1][0], torch.full_like(batches[1][1], -100)
    report = folded(token_loss, lambda y: int(count(y)), Language(), batches)
    assert report.matches, str(report)


def test_windows_that_are_released_or_accumulated_by_linears_are_seen() -> None:
    for prepare in (lambda _, optimizer: af.release_gradients(optimizer, bucket_bytes=64), af.fuse_linears):
        model = net()
        optimizer = af.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.1)
        prepare(model, optimizer)
        with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
            for (x, y), last in af.windows(samples(2 * K), K):
                optimizer.backward(mean(model, x, y), weight=len(y))
                if last:
                    optimizer.step()
        assert report.matches, str(report)


def clipping(params: Any, **_: Any) -> af.AdamW:
    return af.AdamW(params, lr=0.01, max_grad_norm=0.1)


@pytest.mark.parametrize("closes", [False, True])
def test_the_optimizers_normalizer_is_seen_with_open_and_closed_windows(closes: bool) -> None:
    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        mean(model, x, y).backward()
        optimizer.accumulate(last=closes and ends(i))
        if ends(i):
            optimizer.step(normalizer=K)

    report = watched(body, make=clipping)
    assert report.matches, str(report)


def test_a_weight_that_waits_for_the_next_fold_is_seen() -> None:
    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        mean(model, x, y).backward()
        optimizer.accumulate(weight=len(y))
        optimizer.step()

    report = watched(body, make=af.AdamW, steps=1, batches=samples(2, 3))
    assert report.matches, str(report)


def test_sums_over_tokens_that_the_step_divides_are_sound() -> None:
    batches = tokens(2 * K)

    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        token_loss(model, x, y, "sum").backward()
        optimizer.accumulate()
        if ends(i):
            optimizer.step(normalizer=total(batches, i))

    report = watched(body, Language(), batches, make=clipping)
    assert report.matches, str(report)


def test_a_loss_that_is_not_seen_is_not_judged() -> None:
    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        run_engine(mean(model, x, y))
        end(optimizer, i)

    report = watched(body)
    assert report.verdict == "unknown"
    assert str(report).startswith("Cannot tell from the graph: its backward() was not seen.\nTo know, call af.audit(")


@pytest.mark.parametrize("make", [torch.optim.SGD, af.SGD, torch.optim.LBFGS])
def test_a_backward_in_the_closure_of_a_step_belongs_to_it(make: Any) -> None:
    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        def closure() -> Tensor:
            if make is torch.optim.LBFGS:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) / (1 if make is torch.optim.LBFGS else 2)
            loss.backward()
            return loss

        if i % 2 or make is torch.optim.LBFGS:
            optimizer.step(closure)
            optimizer.zero_grad()
        else:
            closure()

    report = watched(body, make=make, steps=1 if make is torch.optim.LBFGS else 2)
    assert report.matches, str(report)


def test_models_may_use_functions_of_torch_func() -> None:
    class Mapped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.func.vmap(lambda row: row.pow(2).mul_(2.0))(x))

    assert watched(dividing(), Mapped(6, 3)).matches


def test_a_loss_within_the_model_is_run_again_in_halves() -> None:
    class OfTheBatch(WithLoss):
        def loss(self, out: Tensor, labels: Tensor) -> Tensor:
            return out.mean(0).square().sum()

    for model, names in ((WithLoss(), []), (OfTheBatch(), ["negatives"])):
        assert watched(dividing(lambda model, x, y: model(x, labels=y)["loss"]), model).names == names


def test_a_model_whose_first_dimension_is_time_is_not_cut_there() -> None:
    class Sequence(nn.LSTM):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            out = super().forward(x)[0]
            return {"loss": F.mse_loss(out, y), "out": out}

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return model(torch.randn(6, 4, 5), torch.randn(6, 4, 3))["loss"]  # type: ignore[no-any-return]

    torch.manual_seed(0)
    assert watched(dividing(loss), Sequence(5, 3)).matches


def test_autocast_rounds_and_raises_no_alarm() -> None:
    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x, y)["loss"]
        (loss / K).backward()
        end(optimizer, i)

    assert watched(body, WithLoss()).matches

    def loss(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(batch[0]).float(), batch[1])

    assert af.audit(net(), loss, samples(1, 16)[0], K).matches


@pytest.mark.parametrize(("lengths", "divisor", "steps", "names"), [
    ((K, 3) * 3, None, K, []), ((K, 3) * 3, K, K, ["remainder_under_weighted"]),  # at the ends of epochs
    ((4, 2, 4, 6), None, None, []), ((4, 2, 4, 6), 4, None, ["remainder_under_weighted", "remainder_leaked"]),
])  # fmt: skip
def test_windows_may_have_several_lengths(lengths: Any, divisor: Any, steps: Any, names: list[str]) -> None:
    """Short ones are remainders of the number that was given; without it any length is right."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=steps) as report:
        for length in lengths:
            for x, y in samples(length):
                (mean(model, x, y) / (divisor or length)).backward()
            update(optimizer)
    assert report.names == names


@pytest.mark.parametrize(("early", "clips", "fused", "names"), [
    (True, False, False, ["unscale"]), (False, False, True, []), (False, True, True, ["unscale"]),
])  # fmt: skip
def test_what_is_unscaled_within_a_window_or_clipped_before_it_is_named(
    early: bool, clips: bool, fused: bool, names: list[str]
) -> None:
    """A fused step unscales by itself; gradients that are unscaled too early are not lost."""

    def then(scaler: Any, model: Any, optimizer: Any, i: int) -> None:
        if early and i % K == 0:
            scaler.unscale_(optimizer)
        if clips and ends(i):
            clip(model)

    assert with_scaler(then, make=lambda params, lr: torch.optim.SGD(params, lr, fused=fused)).names == names


def test_the_optimizer_within_a_wrapper_is_watched() -> None:
    class Wrapper(torch.optim.Optimizer):
        """As Accelerate's: it has no hooks."""

        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with af.audit.watch(model, Wrapper(inner), gradient_accumulation_steps=1) as report:
        for x, y in samples(2):
            mean(model, x, y).backward()
            update(inner)
    assert report.matches


def test_gradients_of_zero_and_windows_without_targets_are_no_fault() -> None:
    model = net()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[2], model[0])]
    nn.init.zeros_(model[2].weight)  # the first layer's gradients are 0
    with af.audit.watch(model, optimizers, gradient_accumulation_steps=K) as report:
        for i, (x, y) in enumerate(samples(2 * K)):
            targets = y if i < K else torch.full_like(y, -100)
            F.cross_entropy(model(x), targets, reduction="sum").backward()
            for optimizer in optimizers:
                end(optimizer, i)
    assert len(report.steps) == 4
    assert report.matches, str(report)


def test_a_pass_without_gradients_is_no_micro_batch() -> None:
    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (mean(model, x, y) / K).backward()
        with torch.no_grad():
            model[1].train()(torch.tanh(model[0](x)))
            model(x)
        model[1].eval()
        end(optimizer, i)

    assert watched(body, net(nn.BatchNorm1d(16).eval(), nn.Tanh())).matches


def test_sparse_and_complex_gradients_are_compared() -> None:
    torch.manual_seed(0)
    words = nn.Sequential(nn.Embedding(16, 8, sparse=True), nn.Flatten(), nn.Linear(32, 3))
    waves = nn.Linear(6, 3, dtype=torch.complex64)

    def wave(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        model(x + 0j).abs().square().mean().backward()
        end(optimizer, i)

    assert watched(dividing(lambda model, x, y: mean(model, torch.randint(16, (6, 4)), y)), words).matches
    assert watched(wave, waves).names == ["not_divided"]
