"""The audit: it names the fault of each loop, raises no alarm at sound ones, and leaves everything as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audited_loops import FAULTS, SOUND, K, Language, net, samples, token_loss, tokens
from inside import attached
from torch import Tensor, nn
from torch.nn import functional as F

import accumfused as af

Body = Callable[[Any, Any], None]
HERE = {name: loop for name, loop in FAULTS.items() if name != "ranks"}  # tests/distributed has that one


@pytest.mark.parametrize("name", HERE)
def test_the_fault_of_a_loop_is_named_and_no_other(name: str) -> None:
    report = FAULTS[name]()
    assert report.names == [name], str(report)
    assert not report.matches


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_loop_raises_no_alarm(name: str) -> None:
    report = SOUND[name]()
    assert report.matches, str(report)
    assert max(step.difference for step in report.steps) < 1e-5
    assert report.notes == []


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


# ---- more loops ------------------------------------------------------------------------------------------------------


def halved(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    (0.5 * F.mse_loss(model(x), F.one_hot(y, 3).float()) / K).backward()
    end(optimizer, i)


def smoothed(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    (F.cross_entropy(model(x), y, label_smoothing=0.1) / K).backward()
    end(optimizer, i)


def summed_over_features(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    ((model(x) - F.one_hot(y, 3)).square().mean(0).sum() / K).backward()
    end(optimizer, i)


def summed(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y, reduction="sum").backward()
    end(optimizer, i)


def two_losses(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    out = model(x)
    (F.cross_entropy(out, y) / K).backward(retain_graph=True)
    (0.1 * out.square().mean() / K).backward()
    end(optimizer, i)


def penalized(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    loss = F.cross_entropy(model(x), y) + 1e-3 * sum(p.square().sum() for p in model.parameters())
    (loss / K).backward()
    end(optimizer, i)


def with_gradient(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward(gradient=torch.tensor(1 / K))
    end(optimizer, i)


def differentiated(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    """torch.autograd.grad brings no gradient to p.grad."""
    out = model(x)
    torch.autograd.grad(out.sum(), list(model.parameters()), retain_graph=True)
    (F.cross_entropy(out, y) / K).backward()
    end(optimizer, i)


def normed_and_divided(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    """The norm is for the log: no clip follows."""
    F.cross_entropy(model(x), y).backward()
    if (i + 1) % K == 0:
        torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad.mul_(1 / K)
    end(optimizer, i)


def clipped_by_value(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    (F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    end(optimizer, i)


@pytest.mark.parametrize(
    "body",
    [
        halved, smoothed, summed_over_features, summed, two_losses, penalized, with_gradient, differentiated,
        normed_and_divided, clipped_by_value,
    ],
)  # fmt: skip
def test_other_sound_loops_raise_no_alarm(body: Any) -> None:
    report = watched(body)
    assert report.matches, str(report)
    assert max(step.difference for step in report.steps) < 1e-5


def never_zeroed(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    (F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        optimizer.step()


def never_unscaled(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    (F.cross_entropy(model(x), y) / K * torch.tensor(1024.0)).backward()
    end(optimizer, i)


def contrasted(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    one, other = model(x), model(x + 0.1)
    (F.cross_entropy(one @ other.T, torch.arange(len(x))) / K).backward()
    end(optimizer, i)


def uneven(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    (F.cross_entropy(model(x), y) / (1 + i % K)).backward()
    end(optimizer, i)


def divided_by_another_number(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    if (i + 1) % K == 0:
        for param in model.parameters():
            param.grad /= 7
    end(optimizer, i)


def changed(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
    (F.cross_entropy(model(x), y) / K).backward()
    if (i + 1) % K == 0:
        model[0].weight.grad += 1
    end(optimizer, i)


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (never_zeroed, "zero_grad"), (never_unscaled, "unscale"), (contrasted, "negatives"), (uneven, "uneven"),
        (divided_by_another_number, "factor"), (changed, "unexplained"),
    ],
)  # fmt: skip
def test_other_faults_are_named(body: Any, cause: str) -> None:
    assert watched(body).names == [cause]


def test_a_lost_micro_batch_is_seen_even_if_all_are_the_same() -> None:
    model = net()
    optimizer, (x, y) = torch.optim.SGD(model.parameters(), lr=0.1), samples(1)[0]
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for i in range(2 * K):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) / K).backward()
            if (i + 1) % K == 0:
                optimizer.step()
    assert report.names == ["zero_grad"]


def test_losses_that_share_a_backward_are_so_many_micro_batches() -> None:
    model, batches = net(), samples(2 * K)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for start in range(0, 2 * K, K):
            losses = [F.cross_entropy(model(x), y) / K for x, y in batches[start : start + K]]
            torch.add(losses[0] + losses[1], losses[2] + losses[3]).backward()
            optimizer.step()
            optimizer.zero_grad()
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


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, af.GradScaler])
def test_a_step_that_a_scaler_skips_is_no_fault(scaler: Any) -> None:
    model, scale = net(), scaler("cpu", init_scale=1024.0)
    optimizer = af.SGD(model.parameters(), lr=0.1) if scaler is af.GradScaler else torch.optim.SGD(model.parameters())
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for i, (x, y) in enumerate(samples(3 * K)):
            scale.scale(F.cross_entropy(model(x), y) / K * (torch.inf if i == K + 1 else 1)).backward()
            if (i + 1) % K == 0:
                scale.unscale_(optimizer)
                scale.step(optimizer)
                scale.update()
                optimizer.zero_grad()
    assert (report.matches, len(report.steps)) == (True, 2), str(report)


def test_an_empty_micro_batch_with_a_weight_of_0_is_no_fault() -> None:
    model = Language()
    optimizer = af.SGD(model.parameters(), lr=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for i, ((x, y), last) in enumerate(af.windows(tokens(2 * K), K)):
            targets = torch.full_like(y, -100) if i == 1 else y
            token_loss(model, x, targets).backward()
            optimizer.accumulate(weight=int((targets != -100).sum()))
            if last:
                optimizer.step()
    assert report.matches, str(report)


def test_windows_that_are_released_or_accumulated_by_linears_are_seen() -> None:
    for prepare in (lambda _, optimizer: af.release_gradients(optimizer, bucket_bytes=64), af.fuse_linears):
        model = net()
        optimizer = af.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.1)
        prepare(model, optimizer)
        with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
            for (x, y), last in af.windows(samples(2 * K), K):
                optimizer.backward(F.cross_entropy(model(x), y), weight=len(y))
                if last:
                    optimizer.step()
        assert report.matches, str(report)


@pytest.mark.parametrize("closes", [False, True])
def test_the_optimizers_normalizer_is_seen_with_open_and_closed_windows(closes: bool) -> None:
    model = net()
    optimizer = af.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for i, (x, y) in enumerate(samples(2 * K)):
            F.cross_entropy(model(x), y).backward()
            optimizer.accumulate(last=closes and i % K == K - 1)
            if i % K == K - 1:
                optimizer.step(normalizer=K)
    assert report.matches, str(report)


def test_a_weight_that_waits_for_the_next_fold_is_seen() -> None:
    model = net()
    optimizer = af.AdamW(model.parameters(), lr=0.01)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=1) as report:
        for x, y in samples(2, 3):
            F.cross_entropy(model(x), y).backward()
            optimizer.accumulate(weight=len(y))
            optimizer.step()
    assert report.matches, str(report)


def test_sums_over_tokens_that_the_step_divides_are_sound() -> None:
    model = Language()
    optimizer = af.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.1)
    with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
        for window in range(2):
            batches = tokens(K, seed=window)
            for x, y in batches:
                token_loss(model, x, y, "sum").backward()
                optimizer.accumulate()
            optimizer.step(normalizer=sum((y != -100).sum() for _, y in batches))
    assert report.matches, str(report)


def test_a_loss_that_is_not_seen_is_not_judged() -> None:
    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        torch.autograd.backward(F.cross_entropy(model(x), y))
        end(optimizer, i)

    report = watched(body)
    assert report.matches
    assert report.notes == ["loss.backward() was not called: divisions and counts of tokens were not judged"]


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

    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (F.cross_entropy(model(x), y) / K).backward()
        end(optimizer, i)

    assert watched(body, Mapped(6, 3)).matches


def test_a_loss_within_the_model_is_run_again_in_halves() -> None:
    class Whole(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            out = super().forward(x)
            loss = F.cross_entropy(out, y) if self.plain else (out.mean(0).square().sum())
            return {"loss": loss, "logits": out}

    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (model(x, y=y)["loss"] / K).backward()
        end(optimizer, i)

    for plain, names in ((True, []), (False, ["negatives"])):
        model = Whole(6, 3)
        model.plain = plain  # type: ignore[assignment]
        assert watched(body, model).names == names


def test_a_model_whose_first_dimension_is_time_is_not_cut_there() -> None:
    class Sequence(nn.LSTM):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            out = super().forward(x)[0]
            return {"loss": F.mse_loss(out, y), "out": out}

    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (model(torch.randn(6, 4, 5), torch.randn(6, 4, 3))["loss"] / K).backward()
        end(optimizer, i)

    torch.manual_seed(0)
    assert watched(body, Sequence(5, 3)).matches


def test_autocast_rounds_and_raises_no_alarm() -> None:
    class Whole(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            out = super().forward(x)
            return {"loss": F.cross_entropy(out.float(), y), "logits": out}

    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x, y)["loss"]
        (loss / K).backward()
        end(optimizer, i)

    assert watched(body, Whole(6, 3)).matches

    def loss(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(batch[0]).float(), batch[1])

    assert af.audit(net(), loss, samples(1, 16)[0], K).matches


def test_short_windows_at_the_ends_of_epochs_are_remainders() -> None:
    for division, names in ((lambda left: left, []), (lambda left: K, ["remainder_under_weighted"])):
        model, batches = net(), samples(K + 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with af.audit.watch(model, optimizer, gradient_accumulation_steps=K) as report:
            for _ in range(3):
                for start in (0, K):
                    window = batches[start : start + K]
                    for x, y in window:
                        (F.cross_entropy(model(x), y) / division(len(window))).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        assert report.names == names


def test_gradients_that_are_unscaled_within_a_window_are_not_lost_but_unscaled_too_early() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        scaler.scale(F.cross_entropy(model(x), y) / K).backward()
        if i % K == 0:
            scaler.unscale_(optimizer)
        if i % K == K - 1:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    assert watched(body).names == ["unscale"]


def test_a_clip_before_a_step_that_unscales_by_itself_is_named() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        scaler.scale(F.cross_entropy(model(x), y) / K).backward()
        if i % K == K - 1:
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    for clips in (False, True):
        report = watched(body, make=lambda params, lr: torch.optim.SGD(params, lr, fused=True))
        assert report.names == (["unscale"] if clips else [])


def test_the_optimizer_within_a_wrapper_is_watched() -> None:
    class Wrapper(torch.optim.Optimizer):
        """As Accelerate's: it has no hooks."""

        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with af.audit.watch(model, Wrapper(inner), gradient_accumulation_steps=1) as report:
        for x, y in samples(2):
            F.cross_entropy(model(x), y).backward()
            inner.step()
            inner.zero_grad()
    assert report.matches


def test_gradients_of_zero_and_windows_without_targets_are_no_fault() -> None:
    model = net()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[2], model[0])]
    nn.init.zeros_(model[2].weight)  # the first layer's gradients are 0
    with af.audit.watch(model, optimizers, gradient_accumulation_steps=K) as report:
        for i, (x, y) in enumerate(samples(2 * K)):
            targets = y if i < K else torch.full_like(y, -100)
            F.cross_entropy(model(x), targets, reduction="sum").backward()
            for optimizer in optimizers if i % K == K - 1 else ():
                optimizer.step()
                optimizer.zero_grad()
    assert len(report.steps) == 4
    assert report.matches, str(report)


def test_a_pass_without_gradients_is_no_micro_batch() -> None:
    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (F.cross_entropy(model(x), y) / K).backward()
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

    def word(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (F.cross_entropy(model(torch.randint(16, (4, 4))), y) / K).backward()
        end(optimizer, i)

    def wave(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        model(x + 0j).abs().square().mean().backward()
        end(optimizer, i)

    assert watched(word, words).matches
    assert watched(wave, waves).names == ["not_divided"]


# ---- nothing changes -------------------------------------------------------------------------------------------------


def states(model: nn.Module) -> list[Any]:
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    tensors = [tensor.clone() for tensor in (*model.parameters(), *model.buffers(), torch.get_rng_state())]
    return [tensors, grads, modes, random.getstate(), np.random.get_state()[1].tolist()]


def test_an_audit_leaves_everything_as_it_was_bit_for_bit() -> None:
    model = net(nn.BatchNorm1d(16), nn.Dropout(0.2))
    model[1].eval()
    for param in list(model.parameters())[:2]:
        param.grad = torch.randn_like(param)

    def loss(model: Any, x: Tensor) -> Any:
        return model(x).square().mean() + random.random() + np.random.random() + torch.rand(())

    before = states(model)
    af.audit(model, loss, torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), K, dtype=torch.float64)
    torch.testing.assert_close(states(model), before, rtol=0, atol=0)


def test_a_watched_run_is_the_same_run_bit_for_bit() -> None:
    class Whole(nn.Module):
        """Returns a loss, which is looked at again, and draws with a function, which no copy can switch off."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = net(nn.BatchNorm1d(16), nn.Dropout(0.2))

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            out = self.inner(F.dropout(x, 0.2))
            return {"loss": F.cross_entropy(out, y), "logits": out}

    def run(is_watched: bool) -> list[Any]:
        model = Whole()
        optimizer = af.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.1)
        watch: Any = af.audit.watch(model, optimizer) if is_watched else torch.enable_grad()
        torch.manual_seed(5)
        with watch:
            for (x, y), last in af.windows(samples(K, seed=5), 2):
                model(x, y)["loss"].backward()
                optimizer.accumulate(weight=len(y))
                if last:
                    optimizer.step()
        return [*states(model), optimizer.state_dict()["state"]]

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


def test_an_exception_in_the_block_passes_and_leaves_no_hook() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = attached(model, optimizer, *model.parameters())

    def loop() -> None:
        for i, (x, y) in enumerate(samples(2 * K)):
            (F.cross_entropy(model(x), y) / K).backward()
            end(optimizer, i)
            if i == K:
                assert attached(model, optimizer, *model.parameters()) != before
                raise KeyError("data")

    with pytest.raises(KeyError, match="data"), af.audit.watch(model, optimizer) as report:
        loop()
    assert attached(model, optimizer, *model.parameters()) == before
    assert report.matches  # of the step that was made


# ---- one batch -------------------------------------------------------------------------------------------------------


def mean_over_tokens(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return token_loss(model, batch["text"], batch["targets"])


def padded() -> dict[str, Tensor]:
    pairs = tokens(K)
    return {"text": torch.cat([x for x, _ in pairs]), "targets": torch.cat([y for _, y in pairs])}


def test_a_mean_over_tokens_needs_their_counts() -> None:
    report = af.audit(Language(), mean_over_tokens, padded(), K)
    assert report.names == ["mean_of_means"]
    assert af.audit(
        Language(), mean_over_tokens, padded(), K, weight_fn=lambda batch: (batch["targets"] != -100).sum()
    ).matches


def test_batch_norm_and_an_auxiliary_loss_are_named_for_one_batch() -> None:
    model, batch = net(nn.BatchNorm1d(16), nn.Dropout(0.0)), samples(1, 16)[0]
    assert af.audit(model, lambda net, b: F.cross_entropy(net(b[0]), b[1]), batch, K).names == ["batch_norm"]

    def balanced(model: Any, batch: Any) -> Tensor:
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + out.softmax(1).mean(0).square().sum()

    assert af.audit(net(), balanced, batch, K).names == ["auxiliary"]
    assert af.audit(model, balanced, batch, K).names == ["batch_norm", "auxiliary"]


def test_random_numbers_outside_of_dropout_layers_are_named_and_hide_other_causes() -> None:
    def noisy(model: Any, x: Tensor) -> Tensor:
        return model(x + torch.randn_like(x) + torch.rand(())).square().mean(0).sum()

    report = af.audit(net(), noisy, torch.randn(8, 6), K)
    assert report.names == ["dropout"]
    assert report.notes == [
        "forward draws random numbers outside of dropout layers: other causes could not be looked at"
    ]


def test_every_run_begins_with_the_models_buffers() -> None:
    class Warming(nn.Linear):
        """Its output is halved from the fifth call on."""

        calls: Tensor

        def __init__(self) -> None:
            super().__init__(6, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * torch.where(self.calls > K, 0.5, 1.0)

    assert af.audit(Warming(), square, torch.randn(8, 6), K).matches


def test_sums_and_double_precision() -> None:
    batch = samples(1, 16)[0]
    report = af.audit(net(), lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"), batch, K)
    assert report.matches
    report = af.audit(net(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch, K, dtype=torch.float64)
    assert report.matches
    assert report.steps[0].difference < 1e-14


# ---- what is refused, before anything changes ------------------------------------------------------------------------


def square(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def test_what_cannot_be_audited_is_refused() -> None:
    model, x, calls = net(), torch.randn(8, 6), []

    def counting(model: Any, x: Tensor) -> Tensor:
        calls.append(1)
        return square(model, x) * len(calls)

    for text, arguments in (
        ("eval mode", (net().eval(), square, x, K)),
        ("8 samples do not divide into 3", (model, square, x, 3)),
        ("whole number", (model, square, x, 0)),
        ("lengths", (model, square, (x, x[:4]), K)),
        ("no tensors", (model, square, ("text",), K)),
        ("keeps state", (model, counting, x, K)),
        ("meta device", (net().to("meta"), square, x, K)),
        ("dtype must be one of", (model, square, x, K, torch.int8)),
        ("requires a gradient", (net().requires_grad_(False), square, x, K)),
    ):
        with pytest.raises(ValueError, match=text):
            af.audit(*arguments[:4], dtype=arguments[4] if len(arguments) > 4 else None)
    with pytest.raises(ValueError, match="weight_fn must return"):
        af.audit(model, square, x, K, weight_fn=lambda _: -1.0)
    with pytest.raises(TypeError, match="must return a loss"):
        af.audit(model, lambda model, x: model(x), x, K)
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module"):
        af.audit(square, square, x, K)  # type: ignore[arg-type]
    model.lock = (n for n in range(1))  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="cannot be copied"):
        af.audit(model, square, x, K)


def test_what_cannot_be_watched_is_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    for error, text, arguments in (
        (ValueError, "eval mode", (net().eval(), optimizer)),
        (ValueError, "at least one optimizer", (model, [])),
        (TypeError, "torch optimizers", (model, [model])),
        (TypeError, r"torch\.nn\.Module", (model.forward, optimizer)),
    ):
        with pytest.raises(error, match=text), af.audit.watch(*arguments):  # type: ignore[arg-type]
            pass
    with (
        pytest.raises(ValueError, match="whole number"),
        af.audit.watch(model, optimizer, gradient_accumulation_steps=0),
    ):
        pass


# ---- the report ------------------------------------------------------------------------------------------------------


def test_a_report_speaks_to_people_to_programs_and_to_the_eye(tmp_path: Path) -> None:
    report = FAULTS["not_divided"]()
    text = str(report)
    assert text.startswith("The update is NOT that of the large batch.\n\nnot_divided (step 1: 4 times")
    assert "-> Divide each loss by the number of micro-batches" in text
    assert "0.weight" in text
    plain = report.as_dict()
    assert (plain["matches"], [each["name"] for each in plain["causes"]]) == (False, ["not_divided"])
    assert [each["micro_batches"] for each in plain["steps"]] == [K, K]
    assert plain["steps"][0]["factor"] == pytest.approx(4.0)
    assert plain["steps"][0]["shares"] == pytest.approx([4.0] * K)
    assert [each["name"] for each in plain["steps"][0]["tensors"]] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    report.picture(tmp_path / "shares.svg")
    assert "<svg" in (tmp_path / "shares.svg").read_text()


def test_a_block_without_steps_says_so() -> None:
    model = net()
    with af.audit.watch(model, torch.optim.SGD(model.parameters())) as report:
        pass
    assert not report.matches
    assert str(report) == "No step was seen: nothing to judge."
