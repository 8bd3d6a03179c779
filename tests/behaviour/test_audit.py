"""The audit: its verdicts on many loops, a hint at each fault, and that it leaves everything as it was."""

from __future__ import annotations

import contextlib
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audited_loops import LOOPS, K, WithLoss, dividing, end, ends, mean, net, once, returned, samples, update, watched
from inside import attached
from torch import Tensor, nn
from torch.nn import functional as F

import accumfused as af
from accumfused.auditing.hints import CAUSES


@pytest.mark.parametrize("name", LOOPS)
def test_each_loop_has_its_verdict_and_causes_and_no_bit_of_it_changes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but a second call of their loss tells some from the large batch: the verdict on these is "unknown"."""
    runs, watch = [], af.audit.watch

    def noting(model: nn.Module, *args: Any, **options: Any) -> Any:
        runs.append([*model.parameters(), *model.buffers()])
        return watch(model, *args, **options) if len(runs) == 1 else contextlib.nullcontext()

    monkeypatch.setattr(af.audit, "watch", noting)
    expected, loop = LOOPS[name]
    torch.manual_seed(0)
    report = loop()
    verdict, _, causes = expected.replace("rounded", "equal").partition(" ")
    assert (report.verdict, ",".join(report.names)) == (verdict, causes), str(report)
    assert report.matches == (None if verdict == "unknown" else verdict == "equal")
    assert expected != "equal" or max(step.difference for step in report.steps) < 1e-5
    known = ("dropout", "random", "losses of one sum", "its outputs are not those of the micro-batches")
    assert verdict != "equal" or all(any(text in note for text in known) for note in report.notes)
    if runs:  # else nothing is watched: it is one call
        torch.manual_seed(0)
        loop()
        assert all(map(torch.equal, *runs))


def test_each_cause_but_those_of_several_processes_is_shown_by_a_loop() -> None:
    shown = {cause for expected, _ in LOOPS.values() for cause in expected.partition(" ")[2].split(",")}
    assert shown - {""} == CAUSES.keys() - {"ranks", "unsynced"}


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


@pytest.mark.parametrize("between", [nn.Tanh, lambda: nn.BatchNorm1d(16)])
def test_a_copy_that_calls_the_watched_model_itself_tells_nothing_and_changes_nothing(between: Any) -> None:
    def run(is_watched: bool) -> list[Any]:
        model = WithLoss(between())
        model.forward = torch.compile(model.forward, backend="aot_eager")  # type: ignore[method-assign]
        if is_watched:
            report = watched(dividing(returned), model)
            assert (report.verdict, report.names) == ("unknown", []), str(report)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for i, (x, y) in enumerate(samples()):
                dividing(returned)(model, optimizer, i, x, y)
        return states(model)

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


def test_a_loss_functions_own_parameters_keep_their_gradients() -> None:
    weight = torch.ones(3, requires_grad=True)
    weight.grad = before = torch.ones(3)
    assert once(lambda m, x, y: F.cross_entropy(m(x) * weight, y)).matches
    assert weight.grad is before
    assert bool((before == 1).all())


def test_random_numbers_outside_of_dropout_layers_are_no_verdict() -> None:
    def noisy(model: Any, x: Tensor) -> Tensor:
        return model(x + torch.randn_like(x) + torch.rand(())).square().mean(0).sum()

    report = af.audit(net(), noisy, torch.randn(8, 6), K)
    assert (report.verdict, report.names) == ("unknown", [])
    assert "outside of dropout layers" in str(report)


def test_causes_that_are_ignored_do_not_count() -> None:
    model, uneven = net(nn.BatchNorm1d(16)), samples(1, 15)[0]
    assert once(mean, model, ignore=["batch_norm"]).matches
    assert once(mean, model, uneven, ignore=["batch_norm"]).names == ["mean_of_means"]
    assert once(mean, model, uneven, ignore=["batch_norm", "mean_of_means"]).matches
    for ignore, verdict in (((), "unknown"), (("batch_norm",), "equal")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with af.audit.watch(model, optimizer, gradient_accumulation_steps=K, ignore=ignore) as report:
            for i, (x, y) in enumerate(samples(K)):
                (mean(model, x, y) / K).backward()
                end(optimizer, i)
        assert report.verdict == verdict
    with pytest.raises(ValueError, match="ignore takes names of causes"):
        once(mean, model, ignore=["normalization"])


# ---- steps that are not judged ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scaler", "make", "bad"), [
    (torch.amp.GradScaler, torch.optim.SGD, K + 1), (af.GradScaler, af.SGD, 3 * K - 1),  # the second window, the last
])  # fmt: skip
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


def test_a_loss_that_is_not_seen_is_not_judged_and_the_report_says_what_can() -> None:
    text = str(LOOPS["a_backward_that_is_not_seen"][1]())
    assert text.startswith("Cannot tell: its backward() was not seen.\nTo know, call af.audit(")


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
    compiled = net()
    compiled.forward = torch.compile(compiled.forward, backend="aot_eager")
    with pytest.raises(ValueError, match="a copy of the model calls the model itself"):
        af.audit(compiled, square, x, K)
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


def test_a_report_speaks_to_people_to_programs_and_to_the_eye(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = LOOPS["not_divided"][1]()
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
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match=r"matplotlib, which does not load: .*pip install matplotlib"):
            report.picture(tmp_path / "shares.svg")
    report.picture(tmp_path / "shares.svg")
    assert "<svg" in (tmp_path / "shares.svg").read_text()


def test_a_cause_is_shown_by_the_step_where_it_is_worst(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with af.audit.watch(model, optimizer) as report:
        for sizes in ((8, 8), (8, 6), (8, 7), *[(8, 8)] * 9, (8, 1)):
            for size in sizes:
                (model(torch.randn(size, 6)).square().mean() / len(sizes)).backward()
            update(optimizer)
    assert [cause.detail for cause in report.causes] == ["step 13: counts from 3 to 24"]
    difference = [step.difference for step in report.steps]
    assert max(difference) == difference[-1]
    table = str(report).split("\n\n")[2].splitlines()
    assert [line.split()[0] for line in table] == ["step", *"1234567", "13", "..."]
    assert table[-1] == "... and 5 more"
    report.picture(tmp_path / "shares.svg")
    assert "step 13" in re.sub(r"\s+", " ", (tmp_path / "shares.svg").read_text())


def test_a_block_without_steps_says_so() -> None:
    model = net()
    with af.audit.watch(model, torch.optim.SGD(model.parameters())) as report:
        pass
    assert not report.matches
    assert str(report) == "No step was seen: nothing to judge."
