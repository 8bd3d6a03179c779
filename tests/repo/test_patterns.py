"""The patterns that people are taught: each example's numbers against float64, and a page that names them all."""

from __future__ import annotations

import ast
import importlib
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compare import assert_close
from torch import Tensor, nn
from torch.nn import functional as F

import accumfused as af

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "patterns.md"
FOLDER = ROOT / "examples" / "patterns"
PATTERNS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "data")
EXACT = 1e-5  # of the update: fp32 rounding of weights around 0.3 that moved by some 0.03
every_pattern = pytest.mark.parametrize("name", PATTERNS)

Load = Callable[[str], Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Imports an example as `python examples/patterns/NAME.py` does, and forgets it, for its name is a common one."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("data", *PATTERNS)
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(others)


def updated(net: nn.Module, batches: list[tuple[Tensor, Tensor]], lr: float, max_norm: float = math.inf) -> Tensor:
    """The weights after plain gradient descent in float64, one update for each batch, by the formula."""
    params = [param.detach().double().requires_grad_() for param in net.parameters()]
    names = [name for name, _ in net.named_parameters()]
    for x, y in batches:
        x = x.double() if x.is_floating_point() else x
        logits = torch.func.functional_call(net, dict(zip(names, params, strict=True)), x)
        loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
        grads = torch.autograd.grad(loss, params)
        norm = float(torch.cat([grad.flatten() for grad in grads]).norm())
        scale = lr * min(1.0, max_norm / norm)
        params = [(p - scale * g).detach().requires_grad_() for p, g in zip(params, grads, strict=True)]
    return torch.cat([param.detach().flatten() for param in params])


def weights(net: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in net.parameters()])


# ---- the numbers of each --------------------------------------------------------------------------------------------


def test_basic_loop(load: Load) -> None:
    example, data = load("basic_loop"), load("data")
    whole = data.micro_batches([27])
    assert_close(weights(example.here()), updated(data.model(), whole, example.LR), "model")
    found = example.main()
    assert found["weight=len(y)"] < EXACT
    truth, start = updated(data.model(), whole, example.LR), weights(data.model()).double()
    means = [updated(data.model(), [batch], example.LR) - start for batch in data.micro_batches(example.SIZES)]
    for way, divisor in (("loss", 1), ("loss / 4", 4)):  # what is wrong is wrong by what the formula says
        expected = (sum(means) / divisor - (truth - start)).norm() / (truth - start).norm()
        assert found[way] == pytest.approx(float(expected), rel=1e-4)


def test_clipping(load: Load) -> None:
    example, data = load("clipping"), load("data")
    truth = updated(data.model(), data.micro_batches([32]), example.LR, example.MAX_NORM)
    assert_close(weights(example.here()), truth, "model")
    unclipped = updated(data.model(), data.micro_batches([32]), example.LR)
    assert float((truth - unclipped).norm()) > 0.1  # there was something to clip
    found = example.main()
    assert found["window"] < EXACT
    assert found["each"] > 0.1


def test_mixed_precision(load: Load) -> None:
    example, data = load("mixed_precision"), load("data")
    truth = updated(data.model(), data.micro_batches([32, 32]), example.LR, example.MAX_NORM)
    assert_close(weights(example.train(unscale_first=True)), truth, "model")
    found = example.main()
    assert found["unscale first"] < EXACT
    assert found["clip first"] == pytest.approx(1, abs=1e-4)  # 1 / 65536 of each update is left


def test_learning_rate(load: Load) -> None:
    found = load("learning_rate").main()
    small, kept, scaled = found.values()
    assert abs(scaled - small) < 0.02 * abs(kept - small)
    data, example = load("data"), load("learning_rate")
    ((x, y),) = whole = data.micro_batches([512])
    pieces = list(zip(x.split(32), y.split(32), strict=True))
    net = data.model().double()
    nn.utils.vector_to_parameters(updated(net, pieces, 4 * example.LR), net.parameters())
    assert scaled == pytest.approx(F.cross_entropy(net(whole[0][0].double()), y).item(), rel=1e-5)


def test_schedulers(load: Load) -> None:
    example = load("schedulers")
    found = example.main()
    updates = example.EPOCHS * 3  # windows of 4, 4 and 2
    for way, total in (("len(loader)", 40), ("len(loader) // 4", 8), ("updates_per_epoch()", 12)):
        expected = example.LR * (1 + math.cos(math.pi * updates / total)) / 2
        assert found[way] == pytest.approx(expected, abs=1e-12)


def test_a_one_cycle_schedule_that_was_told_too_few_updates_raises_as_the_page_says() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
    optimizer.step()
    for _ in range(8):
        schedule.step()
    with pytest.raises(ValueError, match="Tried to step 9 times"):
        schedule.step()


def test_fixed_effective_batch(load: Load) -> None:
    example, data = load("fixed_effective_batch"), load("data")
    truth = updated(data.model(), data.micro_batches([32] * 4), example.LR)
    for per_device, steps in ((4, 8), (8, 4), (16, 2), (32, 1)):
        assert_close(weights(example.train(per_device, steps)), truth, "model")
    found = example.main()
    right = {"8 x 4", "4 x 8", "2 x 16", "1 x 32"}
    assert {way for way, value in found.items() if value < EXACT} == right
    assert all(value > 0.3 for way, value in found.items() if way not in right)


def test_dynamic_accumulation(load: Load) -> None:
    example, data = load("dynamic_accumulation"), load("data")
    assert_close(
        weights(example.here()), updated(data.model(), data.micro_batches([8, 16, 32, 64]), example.LR), "model"
    )
    found = example.main()
    assert found["windows"] < EXACT
    assert found["modulo"] > 0.1


def test_remainder(load: Load) -> None:
    example, data = load("remainder"), load("data")
    batches = data.micro_batches([32, 32, 13])
    truth = updated(data.model(), batches, example.LR)
    assert_close(weights(example.here()), truth, "model")
    found = example.main()
    assert found["windows"] < EXACT
    two, start = updated(data.model(), batches[:2], example.LR), weights(data.model())
    missed = float((truth - two).norm() / (truth - start).norm())
    assert found["it dropped"] == pytest.approx(missed, rel=1e-4)
    assert 0.1 < found["it divided by 4"] < found["it dropped"]


def masked_by_hand(net: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The other usual form of the example's loss: 0 / 0 in its gradients where nothing counts."""
    mask = targets != -100
    losses = F.cross_entropy(net(tokens).flatten(0, -2), targets.clamp(min=0).flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


@pytest.mark.parametrize("mask", ["ignore_index", "by hand"])
def test_token_weights(load: Load, monkeypatch: pytest.MonkeyPatch, mask: str) -> None:
    example = load("token_weights")
    if mask == "by hand":
        monkeypatch.setattr(example, "loss", masked_by_hand)
    counting = example.TARGETS != -100
    assert counting.flatten(1).sum(1).unique().numel() == 4
    assert counting[2].sum() == 0
    truth = updated(example.START, [(example.TOKENS[counting], example.TARGETS[counting])], example.LR)
    assert_close(weights(example.here()), truth, "model")
    assert bool(weights(example.taught()).isnan().any()) == (mask == "by hand")
    found = example.main()
    assert found["tokens"] < EXACT
    assert not found["means"] < 0.1
    assert math.isnan(found["loss of the empty one"])


def test_batch_norm(load: Load) -> None:
    example, data = load("batch_norm"), load("data")
    groups = nn.GroupNorm(4, 16)
    truth = updated(data.model(nn.GroupNorm(4, 16)), data.micro_batches([32]), example.LR)
    assert_close(weights(example.accumulated(groups)), truth, "model")
    found = example.main()
    assert found["GroupNorm"] < EXACT
    assert found["BatchNorm1d"] > 0.1
    assert (found["warnings of GroupNorm"], found["warnings of BatchNorm1d"]) == (0, 1)


def test_dropout(load: Load) -> None:
    example, data = load("dropout"), load("data")
    found = example.main()
    assert found["p=0"] < EXACT
    assert found["p=0.5, one draw"] > 3 * found["mean of 100 draws"]

    draws = example.gradients(data.model(nn.Dropout(0.5)), 8, 400).double()
    error = (draws.mean(0) - over_all_masks(data.model(), data.micro_batches([32])[0])).square()
    variance = draws.var(0) / len(draws)
    # Unbiased: the squared error of the mean is its variance, 195 times. Twice that would be a bias.
    assert float(error.sum() / variance.sum()) == pytest.approx(1, abs=0.5)


def over_all_masks(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The exact mean gradient over the 2^16 masks of 16 units that are dropped with p=0.5."""
    net = net.double()
    masks = 2 * (torch.arange(2**16)[:, None] >> torch.arange(16) & 1).double()
    for x, y in zip(*batch, strict=True):
        logits = net[3](net[2](net[0](x.double()) * masks))
        (F.cross_entropy(logits, y.expand(len(masks))) / len(batch[0])).backward()
    return torch.cat([param.grad.flatten() for param in net.parameters()])


def test_zero_grad(load: Load) -> None:
    example, data = load("zero_grad"), load("data")
    truth = updated(data.model(), data.micro_batches([32] * 3), example.LR)
    assert_close(weights(example.train(zero_grad_first=False)), truth, "model")
    found = example.main()
    assert found["without"] < EXACT
    assert found["warnings"] == 1
    lasts = updated(data.model(), data.micro_batches([8] * 12)[3::4], example.LR)  # what is left of each window
    start = weights(data.model())
    assert found["zero_grad first"] == pytest.approx(float((lasts - truth).norm() / (truth - start).norm()), rel=1e-4)


def test_two_optimizers(load: Load) -> None:
    example = load("two_optimizers")
    found = example.main()
    assert found["zero_grad"] < 10 * EXACT  # two networks, each of which follows the other
    assert found["no zero_grad"] > 0.1
    nets = example.networks()
    generator, discriminator = (af.SGD(net.parameters(), lr=example.LR) for net in nets)
    real, noise = (values.float() for values in example.batches()[0])
    generator.backward(example.losses(nets, real, noise)[1])
    with pytest.raises(RuntimeError, match="there is a gradient that was not accumulated"):
        discriminator.backward(example.losses(nets, real, noise)[0])


def test_existing_loop(load: Load) -> None:
    example, data = load("existing_loop"), load("data")
    stock, fused = data.model().double(), data.model()
    assert example.train(stock) == example.train(fused, "fuse") == pytest.approx(0.1 * 0.8**8)
    assert_close(weights(fused), weights(stock), "model")
    found = example.main()
    assert found["fuse()"] < EXACT
    assert found["new"] > 0.1
    assert found["lr, new"] == 0.1


# ---- what all have in common ----------------------------------------------------------------------------------------


@every_pattern
def test_every_pattern_is_tested_here_and_is_on_the_page(name: str) -> None:
    assert f"test_{name}" in globals()
    assert f"(../examples/patterns/{name}.py)" in PAGE.read_text()


@every_pattern
def test_every_pattern_names_its_pitfall_and_shows_it_in_two_lines(
    name: str, load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (FOLDER / f"{name}.py").read_text()
    docstring = ast.get_docstring(ast.parse(source))
    assert docstring is not None
    first, blank, *rest = docstring.splitlines()
    assert first.startswith("Pattern: ")
    assert (blank, rest[0][:9]) == ("", "Pitfall: ")
    assert any(line.startswith("Remedy: ") for line in rest)
    assert len(rest) + 1 <= 6
    example: ModuleType = load(name)
    assert set(map(type, example.main().values())) <= {float, int}
    assert 1 <= len(capsys.readouterr().out.splitlines()) <= 2


def test_the_page_runs() -> None:
    runner = ROOT / "tools" / "run_blocks.py"
    run = subprocess.run([sys.executable, str(runner), str(PAGE)], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, ""), run.stdout + run.stderr
