"""When noise scale and metrics are there, what they leave alone, and what they refuse."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import inside
import pytest
import torch
from compare import assert_all_same_bits, everything, refused

import accumfused as af


def made(backend: str = "auto", **settings: Any) -> tuple[torch.Tensor, Any]:
    param = torch.ones(5, requires_grad=True)
    return param, af.SGD([param], lr=0.1, momentum=0.5, backend=backend, **settings)


def window(param: torch.Tensor, optimizer: Any, *, parts: int = 2, value: float = 1.0) -> None:
    for _ in range(parts):
        param.grad = torch.full_like(param, value)
        optimizer.accumulate(2.0)
    optimizer.step()


@pytest.mark.parametrize("name", ["metrics", "noise_scale"])
def test_what_is_not_measured_is_refused_with_the_remedy(name: str) -> None:
    param, optimizer = made()
    with pytest.raises(RuntimeError, match=f"make the optimizer with {name}=True"):
        getattr(optimizer, name)()
    param, optimizer = made(**{name: True})
    with pytest.raises(RuntimeError, match="yet"):
        getattr(optimizer, name)()
    window(param, optimizer)
    assert getattr(optimizer, name)()


def test_metrics_are_those_of_the_parameters_device_while_another_is_the_default(backend: str) -> None:
    found = []
    for default in ("cpu", "meta"):  # a large model is made without memory first
        param, optimizer = made(backend, metrics=True, noise_scale=True, max_grad_norm=1.0)
        with torch.device(default):
            for value in (1.0, 2.0):
                param.grad = torch.full((5,), value, device=param.device)
                optimizer.accumulate(2.0)
            optimizer.step()
            found.append([optimizer.metrics().as_dict(), optimizer.noise_scale().as_dict(), param.tolist()])
    assert found[0] == found[1]
    assert found[0][0]["grad_norm"] == pytest.approx(1.5 * math.sqrt(5))
    assert found[0][0]["param_norm"] == pytest.approx(math.sqrt(5))


def test_metrics_and_noise_scale_print_as_tables() -> None:
    layer = torch.nn.Linear(3, 2)
    optimizer = af.SGD(layer.named_parameters(), lr=0.1, metrics=True, noise_scale=True, max_grad_norm=1e-3)
    for scale in (1.0, 2.0):
        layer(torch.full((4, 3), scale)).square().sum().backward()
        optimizer.accumulate()
    optimizer.step()
    found = optimizer.metrics()
    head, *lines, last = (line.split() for line in str(found).splitlines())
    assert head == ["grad_norm", "param_norm", "update_norm", "update_ratio"]
    assert [line[0] for line in lines] == ["all", "group0", "weight", "bias"]
    for name, *numbers in lines:
        prefix = "" if name == "all" else f"{name}/"
        assert [float(number) for number in numbers] == pytest.approx(
            [found.as_dict()[prefix + of] for of in head], 1e-3
        )
    assert last[::2] == ["clip", "clip_share", "skipped_steps"]
    noise = optimizer.noise_scale()
    assert {name: float(getattr(noise, name)) for name in vars(noise)} == noise.as_dict()
    assert float(noise) == noise.as_dict()["noise_scale"]
    assert str(noise).endswith(", windows 1")


@pytest.mark.parametrize("plain", [False, True])
def test_windows_of_one_micro_batch_and_plain_steps_have_no_noise_scale_and_are_warned_of(
    backend: str, plain: bool
) -> None:
    param, optimizer = made(backend, noise_scale=True)
    window(param, optimizer, parts=1)
    param.grad = torch.ones_like(param)
    if not plain:
        optimizer.accumulate()
    with refused(optimizer, af.AccumulationWarning, "noise_scale= measures nothing in this loop"):
        optimizer.step()
    with pytest.warns(af.AccumulationWarning, match="two or more before each step, or let several processes"):
        optimizer.step()
    window(param, optimizer, parts=1)
    with pytest.raises(RuntimeError, match="no window of two or more micro-batches"):
        optimizer.noise_scale()


def test_a_step_of_torchs_own_is_not_measured() -> None:
    torchs = type("Own", (torch.optim.SGD,), {})
    with pytest.raises(ValueError, match="whose update cannot be measured"):
        af.fuse(torchs([torch.ones(2, requires_grad=True)], lr=0.1), metrics=True)


def test_measuring_changes_no_bit(backend: str) -> None:
    """Nor whether a step without clipping skips."""
    found = []
    for settings in ({}, {"metrics": True, "noise_scale": True}):
        param, optimizer = made(backend, **settings)
        window(param, optimizer)
        window(param, optimizer, value=math.inf)
        window(param, optimizer, parts=3)
        param.grad = torch.tensor([1.0, math.nan, 2.0, 3.0, 4.0])
        optimizer.step()
        found.append(everything(optimizer))
        assert int(optimizer.skipped_steps) == 1
    assert_all_same_bits(found[1], found[0])


@pytest.mark.parametrize("bad", [math.inf, math.nan, 10.0])
@pytest.mark.parametrize("clipped", [0, 1])
def test_a_skipped_step_updates_nothing_counts_and_did_not_clip(backend: str, bad: float, clipped: int) -> None:
    param, optimizer = made(backend, metrics=True, noise_scale=True, max_grad_norm=0.5, skip_above=9.0)
    for _ in range(clipped):  # which counts in the share
        window(param, optimizer)
    noise = optimizer.noise_scale() if clipped else None
    window(param, optimizer, value=bad)
    found = optimizer.metrics().as_dict()
    wanted = {"update_norm": 0.0, "update_ratio": 0.0, "skipped_steps": 1.0, "clip": 1.0, "clip_share": float(clipped)}
    assert wanted.items() <= found.items()
    assert math.isnan(found["param_norm"])
    if noise is not None:
        after = optimizer.noise_scale()
        assert (after.signal, int(after.windows)) == (noise.signal, 1)


def test_the_ratio_of_a_parameter_that_is_nan_is_no_zero() -> None:
    param, optimizer = made(metrics=True)
    for value, ratio in ((math.nan, 1), (1.0, 1), (0.0, 0)):
        with torch.no_grad():
            param.fill_(value)
        window(param, optimizer)
        found = optimizer.metrics().as_dict()["update_ratio"]
        assert math.isnan(found) if math.isnan(value) else bool(found) == bool(ratio)


@pytest.mark.parametrize("how", ["plain", "window", "closed", "released", "clipped"])
def test_norms_name_the_tensor_whose_gradient_is_not_finite_in_skipped_steps_too(backend: str, how: str) -> None:
    params = [torch.ones(n, requires_grad=True) for n in (6, 4, 3)]
    clip: dict[str, Any] = {"clip": af.PerTensor(1.0)} if how == "clipped" else {"nonfinite": "propagate"}
    optimizer = af.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.1, backend=backend, metrics=True, **clip)
    if how == "released":
        af.release_gradients(optimizer)
    grads = [[3.0, 0.0, 1.0, 2.0, -math.inf, 0.0], [0.0, 4.0, 3.0, 0.0], [1.0, math.nan, 1.0]]
    if how == "released":
        optimizer.backward(sum((p * torch.tensor(g)).sum() for p, g in zip(params, grads, strict=True)))  # type: ignore[arg-type]
    for param, grad in zip(params, grads if how != "released" else (), strict=how != "released"):
        param.grad = torch.tensor(grad)
    if how in ("window", "closed"):
        optimizer.accumulate(last=how == "closed")
    optimizer.step()
    found = optimizer.metrics().as_dict()
    assert [found[f"param{index}/grad_norm"] for index in range(3)] == pytest.approx(
        [math.inf, 5.0, math.nan], nan_ok=True
    )
    of_groups = [found[f"{name}grad_norm"] for name in ("", "group0/", "group1/")]
    assert of_groups == pytest.approx([math.nan, math.inf, math.nan], nan_ok=True)


def test_every_nth_step_is_measured(backend: str) -> None:
    param, optimizer = made(backend, metrics=3)
    found = []
    for step in range(1, 7):
        param.grad = torch.full_like(param, float(step))
        optimizer.step()
        if step >= 3:
            found.append(optimizer.metrics().as_dict()["grad_norm"])
        assert bool(optimizer.grad_norm.isfinite()) == (step % 3 == 0)
    assert found == pytest.approx([3 * 5**0.5] * 3 + [6 * 5**0.5])


def test_steps_of_before_a_resume_count_where_the_loop_tells_of_them(backend: str) -> None:
    param, optimizer = made(backend, metrics=3)
    for step, is_measured in ((4, [False, True, False, False, True]), (-1, [True, False])):
        optimizer.set_metrics_step(step)
        found = []
        for _ in is_measured:
            param.grad = torch.ones_like(param)
            optimizer.step()
            found.append(bool(optimizer.grad_norm.isfinite()))
        assert found == is_measured
    _, other = made(backend)
    other.set_metrics_step(5)  # does nothing without metrics
    for each in (optimizer, other):
        with pytest.raises(ValueError, match="step must be a whole number >= -1, got -2"):
            each.set_metrics_step(-2)


def test_a_tensor_without_a_gradient_counts_zero(backend: str) -> None:
    params = [torch.ones(3, requires_grad=True) for _ in range(2)]
    optimizer = af.SGD(params, lr=0.1, backend=backend, metrics=True)
    for grads in ([True, True], [True, False]):
        for param, has_one in zip(params, grads, strict=True):
            param.grad = torch.tensor([0.0, 1.0, 1.0]) if has_one else None
        optimizer.step()
    found = optimizer.metrics().as_dict()
    for name in ("grad_norm", "param_norm", "update_norm"):
        assert found[f"param1/{name}"] == 0.0
    assert found["param_norm"] == found["param0/param_norm"] > 0


@pytest.mark.parametrize("weights", ["split16", "split8", None])
def test_a_measured_step_copies_few_weights_at_a_time_and_measures_the_same(backend: str, weights: Any) -> None:
    """The bits, and the memory: that of some copies, and not of all."""
    sizes, found = [30_000] * 8, []
    for elements in (10**9, 60_000):
        torch.manual_seed(0)
        params = [torch.randn(n).bfloat16().requires_grad_() for n in sizes]
        optimizer = af.AdamW(params, lr=0.1, backend=backend, metrics=2, master_weights=weights, rounding_seed=1)
        peaks = []
        with inside.copied_at_a_time(elements):
            for _ in range(4):
                for param in params:
                    param.grad = torch.randn_like(param)
                with torch.profiler.profile(profile_memory=True) as profiler:
                    optimizer.step()
                peaks.append(max([0, *itertools.accumulate(inside.allocations(profiler))]))
        found.append((everything(optimizer), optimizer.metrics().values, peaks[3] - peaks[2]))
    assert_all_same_bits(found[1][0], found[0][0])
    assert torch.equal(found[1][1], found[0][1])
    assert found[1][2] <= found[0][2] - 4 * 120_000  # half of the weights, in fp32


@pytest.mark.parametrize(("copied", "windows"), [(copy.deepcopy, 2), (None, 1)], ids=["copied", "resumed"])
def test_a_copied_window_enters_and_one_from_a_checkpoint_does_not(backend: str, copied: Any, windows: int) -> None:
    param, optimizer = made(backend, noise_scale=True)
    window(param, optimizer)
    for value in (1.0, 3.0):
        param.grad = torch.full_like(param, value)
        optimizer.accumulate(1.0)
    if copied:
        twin = copied(optimizer)
        (twin_param,) = twin.param_groups[0]["params"]
    else:
        twin_param, twin = made(backend, noise_scale=True)
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, twin):
        each.step()
    assert [int(each.noise_scale().windows) for each in (optimizer, twin)] == [2, windows]
    assert (optimizer.noise_scale().as_dict() == twin.noise_scale().as_dict()) is bool(copied)
    window(twin_param, twin)
    assert int(twin.noise_scale().windows) == windows + 1


def test_parameters_in_one_micro_batch_only_enter(backend: str) -> None:
    """A window's gradient is then zero in the others; adopted first gradients and late ones count once."""
    params = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    for weight in (None, 1.0):
        optimizer = af.SGD(params, lr=0.1, backend=backend, noise_scale=True)
        for index in range(3):
            for own, param in enumerate(params):
                param.grad = torch.full_like(param, 3.0) if own == index else None
            optimizer.accumulate(weight)
        optimizer.step()
        # Of orthogonal gradients of squared norm 18: (3 * 18 - 3 * 6) / 2 as means, thrice the gradients as a sum.
        scale = 1.0 if weight else 9.0
        assert float(optimizer.noise_scale().noise) == pytest.approx(18.0 * scale)
        assert float(optimizer.noise_scale().signal) == pytest.approx(0.0, abs=1e-5)


def test_muons_update_is_that_of_the_weights() -> None:
    param = torch.randn(30, 20, requires_grad=True)
    optimizer = af.Muon([param], lr=0.1, weight_decay=0.0, metrics=True)
    before = param.detach().clone()
    param.grad = torch.randn_like(param)
    optimizer.step()
    found = optimizer.metrics().as_dict()
    assert found["update_norm"] == pytest.approx(float((param.detach() - before).norm()), rel=1e-5)
    assert found["param_norm"] == pytest.approx(float(before.norm()), rel=1e-5)


def growing(optimizer: Any, **options: Any) -> Any:
    return af.NoiseScale(optimizer, 1.0, start=2, every=2, **options)


def test_windows_grow_with_the_noise_scale_and_never_shrink() -> None:
    """By a factor of two at most, up to the most; the learning rate follows where it is asked to."""
    param, optimizer = made(noise_scale=0.5)
    sizes, noise = [], {True: 30.0, False: 0.0}
    steps = growing(optimizer, most=12, rule="sqrt")
    for update in range(12):
        sizes.append(steps(update))
        for _ in range(sizes[-1]):
            param.grad = 1.0 + torch.randn_like(param) * noise[update < 8]
            optimizer.accumulate(1.0)
        optimizer.step()
    assert sizes == [2, 2, 4, 4, 8, 8] + [12] * 6
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 6**0.5)
    assert [last for _, last in af.windows(range(24), growing(optimizer, most=12))].count(True) == 6


@pytest.mark.parametrize("bad", [{"most": 1}, {"micro_batch": 0.0}, {"rule": "cubic"}, {"start": 1}])
def test_wrong_growth_is_refused(bad: dict[str, Any]) -> None:
    _, optimizer = made(noise_scale=True)
    with pytest.raises(ValueError, match=next(iter(bad))):
        af.NoiseScale(optimizer, **bad)
    _, optimizer = made()
    with pytest.raises(ValueError, match="does not measure the noise scale"):
        af.NoiseScale(optimizer)
