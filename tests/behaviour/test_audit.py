"""The audit: its verdicts on many loops, a hint at each fault, and that it leaves everything as it was."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audited_loops import (
    CAUSES,
    FAULTS,
    RIGHT,
    SIZES,
    K,
    Language,
    WithLoss,
    end,
    ends,
    net,
    samples,
    token_loss,
    tokens,
    update,
    watched,
)  # fmt: skip
from inside import attached
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import accumfused as af


@pytest.mark.parametrize("name", [*RIGHT, *FAULTS])
def test_no_right_loop_is_accused_and_each_fault_is_found_and_named(name: str) -> None:
    """Nothing but a second call of their loss tells some from the large batch: the verdict on these is "unknown"."""
    report = (RIGHT | FAULTS)[name]()
    cause = CAUSES.get(name, "" if name == "parameters_without_a_module" else None)
    verdict = {None: "equal", "": "unknown"}.get(cause, "scaled" if name in SIZES else "different")
    assert report.verdict == verdict, str(report)
    assert report.matches == (verdict == "equal")
    assert report.names == (cause.split(",") if cause else []), str(report)
    assert verdict != "equal" or max(step.difference for step in report.steps) < 1e-5
    assert verdict != "equal" or all("dropout" in note or "random" in note for note in report.notes)


def test_the_table_has_its_size_and_cannot_tell_is_the_answer_for_at_most_one_loop_in_ten() -> None:
    assert (len(RIGHT), len(FAULTS)) == (65, 47)
    assert 10 * [*CAUSES.values()].count("") <= len(FAULTS)


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
    af.audit(model, loss, torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), K)
    torch.testing.assert_close(states(model), before, rtol=0, atol=0)


def test_a_watched_run_is_the_same_run_bit_for_bit() -> None:
    class Drawing(WithLoss):
        """Returns a loss, which is looked at again, and draws with a function, which no copy can switch off."""

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return super().forward(F.dropout(x, 0.2), labels)

    def run(is_watched: bool) -> list[Any]:
        model = Drawing(nn.BatchNorm1d(16), nn.Dropout(0.2))
        optimizer = af.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.1)
        watch: Any = af.audit.watch(model, optimizer) if is_watched else torch.enable_grad()
        torch.manual_seed(5)
        with watch:
            for (x, y), last in af.windows(samples(K), 2):
                model(x, y)["loss"].backward()
                optimizer.accumulate(weight=len(y))
                if last:
                    optimizer.step()
        return [*states(model), optimizer.state_dict()["state"]]

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


@pytest.mark.parametrize("name", [*RIGHT, *FAULTS])
def test_a_watched_loop_is_the_same_loop_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, watch = [], af.audit.watch

    def watched(model: nn.Module, *args: Any, **options: Any) -> Any:
        runs.append([*model.parameters(), *model.buffers()])
        return watch(model, *args, **options) if len(runs) == 1 else contextlib.nullcontext()

    monkeypatch.setattr(af.audit, "watch", watched)
    for _ in range(2):
        torch.manual_seed(0)
        (RIGHT | FAULTS)[name]()
    assert not runs or all(map(torch.equal, *runs))


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


def test_random_numbers_outside_of_dropout_layers_are_no_verdict() -> None:
    def noisy(model: Any, x: Tensor) -> Tensor:
        return model(x + torch.randn_like(x) + torch.rand(())).square().mean(0).sum()

    report = af.audit(net(), noisy, torch.randn(8, 6), K)
    assert (report.verdict, report.names) == ("unknown", [])
    assert "outside of dropout layers" in str(report)


def test_causes_that_are_ignored_do_not_count() -> None:
    model, batch = net(nn.BatchNorm1d(16)), samples(1, 16)[0]

    def loss(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    assert af.audit(model, loss, batch, K, ignore=["batch_norm"]).matches
    assert af.audit(model, loss, samples(1, 15)[0], K, ignore=["batch_norm"]).names == ["mean_of_means"]
    assert af.audit(model, loss, samples(1, 15)[0], K, ignore=["batch_norm", "mean_of_means"]).matches
    for ignore, verdict in (((), "unknown"), (("batch_norm",), "equal")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with af.audit.watch(model, optimizer, gradient_accumulation_steps=K, ignore=ignore) as report:
            for i, each in enumerate(samples(K)):
                (loss(model, each) / K).backward()
                end(optimizer, i)
        assert report.verdict == verdict
    with pytest.raises(ValueError, match="ignore takes names of causes"):
        af.audit(model, loss, batch, K, ignore=["normalization"])


def test_a_window_is_computed_at_once_where_the_model_returns_its_loss() -> None:
    """What the graph cannot tell is measured then: BatchNorm, and a compiled function that hides its terms."""

    def body(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (model(x, labels=y)["loss"] / K).backward()
        end(optimizer, i)

    def changed(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        if ends(i):
            (model(x, labels=y)["loss"] / K).backward()
            model.net[0].weight.grad *= 0.5
            update(optimizer)
        else:
            body(model, optimizer, i, x, y)

    def never_zeroed(model: Any, optimizer: Any, i: int, x: Tensor, y: Tensor) -> None:
        (model(x, labels=y)["loss"] / K).backward()
        if ends(i):
            optimizer.step()

    for loop, name in ((changed, "unexplained"), (never_zeroed, "zero_grad")):
        report = watched(loop, WithLoss(nn.Dropout(0.5)))
        assert (report.verdict, report.names) == ("different", [name]), str(report)
    bound = WithLoss()
    bound.forward = torch.compile(bound.forward, backend="aot_eager")  # type: ignore[method-assign]  # a copy calls it
    hidden: Any = torch.compile(WithLoss(), backend="aot_eager")
    for model, verdict, names in (
        (WithLoss(), "equal", []), (hidden, "equal", []), (bound, "unknown", []),
        (WithLoss(nn.BatchNorm1d(16)), "different", ["batch_norm"]),
        (WithLoss(nn.Dropout(0.5)), "equal", []),
    ):  # fmt: skip
        report = watched(body, model)
        assert (report.verdict, report.names) == (verdict, names), str(report)


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


def test_layers_that_a_checkpoint_computes_again_are_compared() -> None:
    """Such a graph cannot be asked for gradients of its parts."""

    def loss(model: Any, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        return F.cross_entropy(model[2](checkpoint(model[:2], x, use_reentrant=True)), batch[1])

    assert af.audit(net(), loss, samples(1, 16)[0], K).matches
    assert watched(lambda m, o, i, x, y: ((loss(m, (x, y)) / K).backward(), end(o, i)), net()).matches


def test_sums_and_double_precision() -> None:
    batch = samples(1, 16)[0]
    report = af.audit(net(), lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"), batch, K)
    assert report.matches
    batch = batch[0].double(), batch[1]
    report = af.audit(net().double(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch, K)
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
        ("8 samples do not make 9", (model, square, x, 9)),
        ("whole number", (model, square, x, 0)),
        ("lengths", (model, square, (x, x[:4]), K)),
        ("no tensors", (model, square, ("text",), K)),
        ("keeps state", (model, counting, x, K)),
        ("meta device", (net().to("meta"), square, x, K)),
        ("requires a gradient", (net().requires_grad_(False), square, x, K)),
    ):
        with pytest.raises(ValueError, match=text):
            af.audit(*arguments)
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
    head = "The update has the direction of the large batch, its length times 4.\n\nnot_divided (step 1: 4 times"
    assert text.startswith(head)
    assert "-> Divide each loss by the number of micro-batches" in text
    assert "0.weight" in text
    plain = report.as_dict()
    assert (plain["verdict"], plain["matches"]) == ("scaled", False)
    assert [each["name"] for each in plain["causes"]] == ["not_divided"]
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
