"""Released gradients: when autograd brings them, what of them is alive, and what may follow. Numbers: test_loops.py."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from typing import Any

import inside
import pytest
import torch
from compare import refused, writes_nothing
from loop import Loop
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import accumfused as af
from accumfused.distributed import exchange as processes

EACH, ALL = 1, 2**30
every_bucket = pytest.mark.parametrize("bucket", [EACH, ALL], ids=["each", "all"])


@pytest.mark.parametrize(("bucket", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError)])
def test_what_is_no_number_of_bytes_is_refused(bucket: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="bucket_bytes must be"):
        af.release_gradients(af.SGD([nn.Parameter(torch.zeros(1))]), bucket)


@pytest.mark.parametrize(
    ("given", "on_cpu", "on_card"), [(None, 32 * 2**20, 16 * 2**20), (5, 5, 5), (2**40, 2**40, 2**40)]
)
def test_a_bucket_is_smaller_on_a_card_unless_its_size_is_given(given: int | None, on_cpu: int, on_card: int) -> None:
    release = af.release_gradients(af.SGD([nn.Parameter(torch.zeros(1))]), given)
    for device, size in (("cpu", on_cpu), ("cuda:0", on_card), ("cuda:1", on_card), ("xpu:0", on_card)):
        assert release.bucket_bytes(torch.device(device)) == size


FULL = {"cpu": 2**23, **({"cuda": 2**22} if torch.cuda.is_available() else {})}  # elements of fp32


@pytest.mark.parametrize("device", FULL)
@pytest.mark.parametrize("lacking", [0, 1])
def test_a_bucket_is_folded_when_it_is_full_on_its_device(device: str, lacking: int) -> None:
    param = nn.Parameter(torch.zeros(FULL[device] - lacking, device=device))
    with af.release_gradients(af.SGD([param])) as release:
        param.sum().backward()
        assert (param.grad is not None) == bool(lacking)
        release.optimizer.zero_grad()


@every_bucket
def test_what_was_folded_may_be_dropped_by_zero_grad_but_not_whole_windows_in_a_row(backend: str, bucket: int) -> None:
    it = Loop(backend, bucket=bucket).run("backward zero_grad backward zero_grad backward close model_zero")
    it.run("backward accumulate zero_grad backward accumulate step")  # one, and a step
    it.run("backward accumulate zero_grad backward accumulate")
    with pytest.warns(UserWarning, match="two accumulation windows in a row"):
        it.optimizer.zero_grad()
    it.params[0].grad = torch.ones(1, 4)  # by hand: as ever
    assert it.run("step").values() == [7.0, 7.0]
    it.optimizer.accumulate(2)  # nothing was folded, so the weight comes in time
    assert it.run("step").values() == [6.5, 7.0]


@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.parametrize("way", [{"bucket": EACH}, {"fuses": True}], ids=["released", "linears"])
def test_an_exception_in_the_block_ends_it_in_any_case(backend: str, way: dict[str, Any], entered: bool) -> None:
    it = Loop(backend, "backward accumulate", **way)
    with contextlib.suppress(KeyboardInterrupt), it.release:
        it.run("backward" if entered else "")
        raise KeyboardInterrupt
    assert it.run("backward accumulate step").values() == ([7.5, 7.0] if entered else [7.0, 6.0])
    it.run("backward remove")  # a second time does nothing
    assert [param.grad.unique().tolist() for param in it.params] == [[1.0], [2.0]]
    assert not any("forward" in vars(layer) for layer in it.layers)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copies_do_not_release(backend: str, copied: Any) -> None:
    it, other = Loop(backend, bucket=EACH).run("backward accumulate"), Loop(backend, bucket=EACH)
    other.optimizer = copied(it.optimizer)
    other.params = other.optimizer.param_groups[0]["params"]
    other.run("backward")
    assert [param.grad.unique().tolist() for param in other.params] == [[1.0], [2.0]]
    with writes_nothing(it.optimizer):
        assert other.run("accumulate step").values() == [7.0, 6.0]
    af.release_gradients(other.optimizer)


def test_an_optimizer_tells_whether_it_accumulates_in_backward(backend: str) -> None:
    layer = nn.Linear(2, 2)
    optimizer = af.SGD(layer.parameters(), lr=0.1, backend=backend)
    for begin in (af.release_gradients, lambda optimizer: af.fuse_linears(layer, optimizer)):
        assert not optimizer.accumulates_in_backward
        with begin(optimizer):
            assert optimizer.accumulates_in_backward
    assert not optimizer.accumulates_in_backward


@every_bucket
def test_an_optimizer_that_is_gone_takes_its_hooks_along(backend: str, bucket: int) -> None:
    it = Loop(backend, bucket=bucket).run("backward step backward")
    gone = weakref.ref(it.optimizer), weakref.ref(it.release), weakref.ref(it.params[1])
    del it.optimizer, it.release
    gc.collect()
    assert [each() is None for each in gone] == [True, True, False]
    it.loss().backward()
    assert it.params[0].grad is not None
    af.release_gradients(af.SGD(it.params, lr=0.5, backend=backend))
    del it
    gc.collect()
    assert gone[2]() is None


def test_processes_that_come_after_the_release_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Loop("reference", bucket=EACH)
    monkeypatch.setattr(processes, "has_processes", lambda: True)
    with refused(it.optimizer, RuntimeError, "more than one process.*call accumfused.attach_ddp"):
        it.loss().backward()
    monkeypatch.undo()
    assert it.run("backward step").values() == [7.5, 7.0]


# ---- as autograd brings them ----------------------------------------------------------------------------------------


def sgd(count: int, backend: str, bucket: int = EACH, size: int = 4) -> tuple[list[nn.Parameter], af.SGD]:
    """Args: bucket: 0: not released."""
    params = [nn.Parameter(torch.zeros(size)) for _ in range(count)]
    optimizer = af.SGD(params, lr=1.0, backend=backend)
    if bucket:
        af.release_gradients(optimizer, bucket)
    return params, optimizer


def first(*params: Tensor) -> list[float]:
    assert all((param == param[0]).all() for param in params)
    return [param[0].item() for param in params]


@pytest.mark.pairwise(
    bucket=[EACH, ALL], reentrant=[False, True], closed=[False, True],
    weights=[(None, None), (1, 3), (2, 0, 2), (4,), (0, 3), (torch.tensor(0.0), torch.tensor(3.0))],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # the outer's first pass
def test_a_hook_that_comes_twice_is_one_micro_batch(
    backend: str, bucket: int, reentrant: bool, weights: tuple[Any, ...], closed: bool
) -> None:
    """Nested checkpoints, over whole numbers, so that every order is exact."""

    def inner(x: Tensor) -> Tensor:
        return (x * (a + 2) + b) * 2

    def outer(x: Tensor) -> Tensor:
        return checkpoint(inner, x * (a + 2), use_reentrant=reentrant) + b

    found = []
    for released in (0, bucket):
        (a, b), optimizer = sgd(2, backend, released)
        for index, weight in enumerate(weights):
            loss = checkpoint(outer, torch.full((4,), index + 1.0, requires_grad=True), use_reentrant=reentrant).sum()
            loss = loss * torch.nan if weight == 0 else loss
            optimizer.backward(loss, weight, last=closed and index == len(weights) - 1)
        optimizer.step()
        found.append(first(a, b))
    assert found[0] == found[1]
    assert found[1][1] == (-6.0 if weights[0] is None else -3.0)


def test_only_the_loop_ends_a_micro_batch(backend: str) -> None:
    it = Loop(backend, "backward backward accumulate backward backward accumulate", bucket=EACH)
    assert "micro-batches: 2" in repr(it.optimizer)
    assert it.run("step").values() == [6.0, 4.0]


def test_a_gradient_that_cannot_be_used_is_refused_in_backward(backend: str) -> None:
    (other,), optimizer = sgd(1, backend, ALL)
    table = nn.Parameter(torch.zeros(2, 2))
    optimizer.add_param_group({"params": [table]})
    with pytest.raises(RuntimeError, match="sparse gradients are not supported"):
        (nn.functional.embedding(torch.tensor([1]), table, sparse=True).sum() * other).sum().backward()
    with refused(optimizer, RuntimeError, r"ended early.*call optimizer\.zero_grad\(\)"):
        optimizer.step()


@pytest.mark.parametrize("between", [False, True], ids=["in a window", "between windows"])
def test_parameters_that_come_later_are_released_too(backend: str, between: bool) -> None:
    """A group at once; what is unfrozen, from its second micro-batch on; what was removed no longer."""
    (a, frozen, removed), optimizer = sgd(3, backend, bucket=0)
    frozen.requires_grad_(False)
    added = nn.Parameter(torch.zeros(4))
    with af.release_gradients(optimizer, EACH):
        optimizer.param_groups[0]["params"] = [a, frozen]
        (a + removed).sum().backward()
        assert [param.grad is None for param in (a, removed)] == [True, False]
        optimizer.accumulate()
        if between:
            optimizer.step()
        optimizer.add_param_group({"params": [added]})
        frozen.requires_grad_()
        for micro_batch in range(2):
            (a * 3 + added * 5 + frozen * 7).sum().backward()
            assert [param.grad is None for param in (a, added, frozen)] == [True, True, micro_batch == 1]
            optimizer.accumulate()
        optimizer.step()
        assert first(a, added, frozen) == [-7.0, -10.0, -14.0]


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_step_takes_the_gradients_of_what_was_frozen(backend: str, is_alone: bool) -> None:
    (a, frozen), optimizer = sgd(2, backend, bucket=0)
    frozen.requires_grad_(False)
    af.release_gradients(optimizer, EACH)
    frozen.requires_grad_()
    for scale in (0.0, 1.0):
        (frozen if is_alone else a + frozen).sum().backward()
        optimizer.grad_scale = scale
        if not scale:
            with refused(optimizer, ValueError, "grad_scale must be finite"):  # nothing is folded
                optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
    assert (first(a, frozen), frozen.grad) == ([is_alone - 1.0, -1.0], None)


# ---- another loss that reaches the parameters ------------------------------------------------------------------------

TAKEN_IN_BACKWARD: dict[str, Any] = {
    "release": lambda model, optimizer: af.release_gradients(optimizer, EACH),
    "linears": lambda model, optimizer: af.fuse_linears(model, optimizer),
    "p.grad": lambda model, optimizer: None,
}


def train_pair(taken: str, backend: str, weight: float | None, *, freezes: bool) -> list[Tensor]:
    """A GAN's loop over windows of two."""
    torch.manual_seed(0)
    generator = nn.Linear(3, 1024)
    discriminator = nn.Sequential(nn.Linear(1024, 512), nn.Tanh(), nn.Linear(512, 1))
    of_generator = af.SGD(generator.parameters(), lr=0.1, backend=backend)
    of_discriminator = af.SGD(discriminator.parameters(), lr=0.1, backend=backend)
    TAKEN_IN_BACKWARD[taken](discriminator, of_discriminator)
    for _ in range(2):
        for _ in range(2):
            fake = generator(torch.randn(4, 3))
            real = discriminator(torch.randn(4, 1024))
            loss = nn.functional.softplus(-real).mean() + nn.functional.softplus(discriminator(fake.detach())).mean()
            of_discriminator.backward(loss, weight)
            discriminator.requires_grad_(not freezes)
            nn.functional.softplus(-discriminator(fake)).mean().backward()
            discriminator.requires_grad_(True)
            of_generator.accumulate(weight)
            discriminator.zero_grad()
        of_discriminator.step()
        of_generator.step()
    return [param.detach() for net in (generator, discriminator) for param in net.parameters()]


@pytest.mark.parametrize("taken", ["release", "linears"])
@pytest.mark.parametrize("weight", [None, 4.0])
def test_another_loss_is_kept_away_by_the_remedy_that_the_refusal_names(
    backend: str, taken: str, weight: float | None
) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"discriminator\.requires_grad_\(False\) before") as raised:
        train_pair(taken, backend, weight, freezes=False)
    assert "module's zero_grad()" not in str(raised.value)
    expected = train_pair("p.grad", backend, weight, freezes=False)
    for param, other in zip(train_pair(taken, backend, weight, freezes=True), expected, strict=True):
        torch.testing.assert_close(param, other, rtol=2e-5, atol=2e-6)


def test_a_step_of_a_window_with_another_loss_in_it_is_refused_with_the_remedy(backend: str) -> None:
    (param,), optimizer = sgd(1, backend)
    (param * 1.0).sum().backward()
    optimizer.accumulate()
    (param * 9.0).sum().backward()  # another loss
    with refused(optimizer, RuntimeError, r"zero_grad\(\) of the optimizer.*requires_grad_\(False\) before that loss"):
        optimizer.step()


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bucket", "expected"), [(1, [1] * 8), (16, [1] * 8), (48, [1, 1, 2, 3, 1, 2, 3, 1])])
def test_no_more_than_a_bucket_is_alive(backend: str, bucket: int, expected: list[int]) -> None:
    """In p.grad or elsewhere, beside the accumulators. A gradient counts once, and each micro-batch begins anew."""
    (a, *others), optimizer = sgd(7, backend, bucket=0)  # of 16 bytes each
    seen: list[Any] = []
    alive: list[int] = []

    def look(param: Tensor) -> None:
        seen.append(weakref.ref(param.grad))
        kept = {id(accumulator) for accumulator in inside.accumulators(optimizer)}
        alive.append(len({id(grad) for ref in seen if (grad := ref()) is not None} - kept))

    for param in (a, *others):
        param.register_post_accumulate_grad_hook(look)  # before those of the release
    with af.release_gradients(optimizer, bucket):
        for _ in range(3):
            for loss in (a.sum(), a.sum(), sum(param.sum() for param in others)):
                loss.backward()
            optimizer.accumulate()
        optimizer.step()
    assert alive == expected * 3
    assert first(a, *others) == [-6.0] + [-3.0] * 6


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_sums_keep_no_graph_of_a_backward_that_makes_one() -> None:
    params, optimizer = sgd(2, "torch")
    for _ in range(2):
        (params[0] * params[1]).sum().backward(create_graph=True)
        optimizer.accumulate()
    assert not any(accumulator.requires_grad for accumulator in inside.accumulators(optimizer))


@pytest.mark.parametrize("weight", [2, torch.full((), 2.0)], ids=["number", "tensor"])
def test_closing_is_no_pass_of_its_own(backend: str, weight: Any) -> None:
    """Each write of an accumulator counts in its version."""
    versions = []
    for bucket in (0, 20):
        params, optimizer = sgd(3, backend, bucket)
        for last in (False, False, True):
            optimizer.backward(sum(param.sum() for param in params), weight, last=last)
        versions.append([inside.version(param.grad) for param in params])
    assert versions[0] == versions[1]


def test_the_bucket_is_32_mib_unless_said_otherwise() -> None:
    params, optimizer = sgd(5, "auto", bucket=0, size=2**21)  # 8 MiB each
    af.release_gradients(optimizer)
    for count, param in enumerate(params, 1):
        param.sum().backward()
        assert sum(p.grad is not None for p in params) == count % 4
