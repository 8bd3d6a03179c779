"""Gradients that are released during backward: the bits of the same loop without, and never all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_same_bits, everything
from table import ADAMW_CASE
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import accumfused as af
from accumfused.accumulation import Phase

EACH, SOME, ALL = 1, 300, 2**30  # bytes: every gradient by itself, a few at a time, all at the end
tiny_and_huge = pytest.mark.parametrize("bucket", [EACH, ALL], ids=["each", "all"])
every_bucket = pytest.mark.parametrize("bucket", [EACH, SOME, ALL], ids=["each", "some", "all"])


class Net(nn.Module):
    """With a parameter in two places, one without a gradient, and one that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 1)
        self.unused, self.rare = nn.Linear(3, 3), nn.Parameter(torch.ones(9))

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.middle(torch.tanh(self.middle(x))))
        return self.last(x * self.rare if rare else x)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def loss_of(model: Any, seed: int, scale: float = 1.0) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), device="cpu").to(model.rare.device)
    return scale * model(x, rare=seed % 2 == 1).square().mean()


Loop = Callable[[Net, Any], None]


def assert_release_changes_nothing(loop: Loop, backend: str, bucket: int, **options: Any) -> None:
    """Runs a loop with and without release and compares all that it leaves, bit for bit."""
    results = []
    for released in (False, True):
        model = net()
        optimizer = ADAMW_CASE.make(model.parameters(), backend, **options)
        if released:
            af.release_gradients(optimizer, bucket)
        loop(model, optimizer)
        norm = torch.zeros(()) if optimizer.grad_norm is None else optimizer.grad_norm
        results.append(everything(optimizer) | {"norm": norm, "skipped": optimizer.skipped_steps.float()})
    one, other = results
    assert one.keys() == other.keys()
    assert len([name for name in one if name.startswith("exp_avg ")]) > 4  # it has stepped
    for name, value in one.items():
        assert_same_bits(other[name], value, name)


# ---- the same bits --------------------------------------------------------------------------------------------------


@every_bucket
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_sums(backend: str, bucket: int, closed: bool) -> None:
    def loop(model: Net, optimizer: Any) -> None:
        for update in range(3):
            for micro_batch in range(3):
                loss_of(model, 3 * update + micro_batch).backward()
                optimizer.accumulate(last=closed and micro_batch == 2)
            optimizer.step()

    assert_release_changes_nothing(loop, backend, bucket, max_grad_norm=0.05)


def one(value: float) -> Tensor:
    return torch.tensor(value)


WEIGHTS: dict[str, list[Any]] = {
    "numbers": [3.0, 0.1, 0.7],
    "a total of 1": [0.25, 0.25, 0.5],
    "an empty micro-batch": [3.0, 0, 0.7],
    "an empty one last": [3.0, 0.1, 0],
    "an empty one first": [0, 0.1, 0.7],
    "tensors": [3.0, 0.1, 0.7],
    "empty tensors": [3.0, 0.0, 0.0],
    "one": [0.3],
    "one tensor": [0.3],
}


@pytest.mark.parametrize("bucket", [EACH, SOME], ids=["each", "some"])
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_in_the_loss(backend: str, kind: str, closed: bool, bucket: int) -> None:
    weights = [one(weight) if "tensor" in kind else weight for weight in WEIGHTS[kind]]

    def loop(model: Net, optimizer: Any) -> None:
        for update in range(2):
            for index, weight in enumerate(weights):
                loss = loss_of(model, 3 * update + index)
                if weight == 0:  # a masked mean of nothing
                    loss = loss * torch.nan
                optimizer.backward(loss, weight, last=closed and index == len(weights) - 1)
            optimizer.step()

    assert_release_changes_nothing(loop, backend, bucket, max_grad_norm=0.05)


@tiny_and_huge
@pytest.mark.parametrize("scaler", ["torch", "accumfused"])
@pytest.mark.parametrize("clips", [False, True])
def test_loss_scaling(backend: str, scaler: str, clips: bool, bucket: int) -> None:
    device = torch.get_default_device().type
    scales = []

    def loop(model: Net, optimizer: Any) -> None:
        make = torch.amp.GradScaler if scaler == "torch" else af.GradScaler
        grad_scaler = make(device, init_scale=2.0**10, growth_interval=2)
        for update in range(5):
            for micro_batch in range(2):
                loss = loss_of(model, 2 * update + micro_batch, torch.inf if update == 2 else 1.0)
                scaled, closes = grad_scaler.scale(loss), micro_batch == 1 and (scaler == "torch" or clips)
                if update % 2:
                    scaled.backward()
                    optimizer.accumulate(last=closes)
                else:
                    optimizer.backward(scaled, 1 + micro_batch, last=closes)
            if clips:
                grad_scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            grad_scaler.step(optimizer)
            grad_scaler.update()
            optimizer.zero_grad()
        scales.append(grad_scaler.get_scale())

    assert_release_changes_nothing(loop, backend, bucket)
    assert scales == [2.0**11] * 2  # grown, backed off, grown


@every_bucket
def test_a_step_that_is_skipped(backend: str, bucket: int) -> None:
    skipped = []

    def loop(model: Net, optimizer: Any) -> None:
        for update in range(3):
            for micro_batch in range(2):
                optimizer.backward(loss_of(model, update, torch.inf if update == micro_batch == 1 else 1.0), 1)
            optimizer.step()
            skipped.append(bool(optimizer.step_was_skipped))

    assert_release_changes_nothing(loop, backend, bucket, max_grad_norm=0.05)
    assert skipped == [False, True, False] * 2


@every_bucket
def test_a_loop_that_does_not_accumulate(backend: str, bucket: int) -> None:
    def loop(model: Net, optimizer: Any) -> None:
        for update in range(3):
            optimizer.zero_grad()
            loss_of(model, update).backward()
            if update == 1:  # another part of the same gradient
                loss_of(model, 7).backward()
            optimizer.step(normalizer=3.0)

    assert_release_changes_nothing(loop, backend, bucket, max_grad_norm=0.05)


@tiny_and_huge
def test_a_closure(backend: str, bucket: int) -> None:
    def loop(model: Net, optimizer: Any) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 1)
            loss.backward()
            return loss.detach()

        for _ in range(2):
            assert float(optimizer.step(closure)) > 0

    assert_release_changes_nothing(loop, backend, bucket, max_grad_norm=0.05)


@tiny_and_huge
def test_optimizers_that_are_clipped_together(backend: str, bucket: int) -> None:
    def run(released: bool) -> list[Tensor]:
        model = net()
        params = list(model.parameters())
        optimizers = [ADAMW_CASE.make(part, backend) for part in (params[:3], params[3:])]
        af.clip_together(optimizers, 0.05)
        for optimizer in optimizers if released else []:
            af.release_gradients(optimizer, bucket)
        for update in range(3):
            for micro_batch in range(2):
                loss_of(model, 2 * update + micro_batch).backward()
                for optimizer in optimizers if update < 2 or micro_batch == 0 else []:
                    optimizer.accumulate(last=update == micro_batch == 1)
                if update == 2:  # without windows
                    break
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [*params, *(optimizer.grad_norm for optimizer in optimizers)]

    for value, truth in zip(run(True), run(False), strict=True):
        assert_same_bits(value, truth)


@tiny_and_huge
def test_an_optimizer_without_kernels(backend: str, bucket: int) -> None:
    def run(released: bool) -> list[Tensor]:
        model = net()
        optimizer = af.fuse(
            torch.optim.RMSprop(model.parameters(), lr=0.1, foreach=False), max_grad_norm=0.05, backend=backend
        )
        if released:
            af.release_gradients(optimizer, bucket)
        for update in range(3):
            for micro_batch in range(3):
                optimizer.backward(loss_of(model, 3 * update + micro_batch), 1 + micro_batch)
            optimizer.step()
            assert model.rare.grad is None
        return list(model.parameters())

    for value, truth in zip(run(True), run(False), strict=True):
        assert_same_bits(value, truth)


@tiny_and_huge
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_16_bit_gradients(backend: str, dtype: torch.dtype, closed: bool, bucket: int) -> None:
    def loop(model: Net, optimizer: Any) -> None:
        params = list(model.parameters())
        for param in params[::2]:
            param.grad_dtype = dtype
        for update in range(3):
            for micro_batch in range(2):
                loss_of(model, 2 * update + micro_batch).backward()
                optimizer.accumulate(last=closed and micro_batch == 1)
                assert closed == (params[0].grad is not None) or micro_batch == 0
            optimizer.step()
            assert [param.grad_dtype for param in params[:2]] == [dtype, torch.float32]

    assert_release_changes_nothing(loop, backend, bucket, max_grad_norm=0.05)


# ---- how often hooks come -------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """One parameter in the outer and in the inner checkpoint, with whole numbers, so that every order is exact."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [-1.0, 1.0]]))
        self.bias = nn.Parameter(torch.tensor([1.0, -3.0]))
        self.reentrant = reentrant

    def inner(self, x: Tensor) -> Tensor:
        return (x @ self.weight + self.bias) * 2

    def outer(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x @ self.weight, use_reentrant=self.reentrant) + self.bias

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return checkpoint(self.outer, x, use_reentrant=self.reentrant).sum()


@tiny_and_huge
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("weights", [[None, None], [one(1.0), one(3.0)], [2, 0, 2]], ids=str)
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # the outer's first pass
def test_nested_checkpoints(backend: str, reentrant: bool, weights: list[Any], closed: bool, bucket: int) -> None:
    results, calls = [], []
    for released in (False, True):
        model = Checkpointed(reentrant)
        optimizer = af.SGD(model.parameters(), lr=0.5, backend=backend)
        if released:
            af.release_gradients(optimizer, bucket)
            model.weight.register_post_accumulate_grad_hook(lambda param: calls.append(1))
        for index, weight in enumerate(weights):
            loss = model(torch.tensor([[1.0, float(index)]]))
            optimizer.backward(loss, weight, last=closed and index == len(weights) - 1)
        if closed:
            results.append([param.grad.clone() for param in model.parameters()])
        optimizer.step()
        results.append(list(model.parameters()))
    assert len(calls) == len(weights) * (2 if reentrant else 1)
    half = len(results) // 2
    for plain, folded in zip(results[:half], results[half:], strict=True):
        assert all(map(torch.equal, plain, folded))


def test_parts_of_one_micro_batch_count_once(backend: str) -> None:
    param = nn.Parameter(torch.zeros(3))
    optimizer = af.SGD([param], lr=1.0, backend=backend)
    af.release_gradients(optimizer, EACH)
    for weight, slopes in ((1, (2.0, 3.0)), (3, (4.0, 5.0))):
        x = torch.ones(3, requires_grad=True)
        halves = [checkpoint(lambda x, slope=slope: x * param * slope, x, use_reentrant=True) for slope in slopes]
        optimizer.backward(sum(half.sum() for half in halves), weight)
    optimizer.step()
    assert param.tolist() == [-((2 + 3) * 1 + (4 + 5) * 3) / 4] * 3


@pytest.mark.parametrize("weight", [4.0, one(4.0)], ids=["number", "tensor"])
def test_a_hook_that_comes_twice_in_the_backward_that_closes_the_window(backend: str, weight: Any) -> None:
    found = []
    for released in (False, True):
        p, q = (nn.Parameter(torch.ones(4)) for _ in range(2))
        optimizer = af.SGD([p, q], lr=1.0, backend=backend)
        if released:
            af.release_gradients(optimizer, EACH)
        x = torch.ones(4, requires_grad=True)
        for _ in range(2):
            x = checkpoint(lambda x, p=p, q=q: x * p + q, x, use_reentrant=True)
        optimizer.backward(x.sum(), weight, last=True)
        found.append((p.grad.tolist(), q.grad.tolist()))
    assert found == [([3.0] * 4, [2.0] * 4)] * 2


def test_only_the_loop_ends_a_micro_batch(backend: str) -> None:
    """Two backward passes and one accumulate() are one micro-batch, however often the hooks were called."""
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    optimizer = af.SGD([a, b], lr=1.0, backend=backend)
    af.release_gradients(optimizer, EACH)
    for _ in range(2):
        (a * 2).sum().backward()
        (a * 3 + b).sum().backward()
        optimizer.accumulate()
    assert optimizer._runtime.window._count == 2
    optimizer.step()
    assert a.tolist() == [-10.0] * 3
    assert b.tolist() == [-2.0] * 3


@tiny_and_huge
def test_an_unused_parameter_is_left_alone(backend: str, bucket: int) -> None:
    model = net()
    optimizer = ADAMW_CASE.make(model.parameters(), backend)
    af.release_gradients(optimizer, bucket)
    before, version = model.unused.weight.detach().clone(), model.unused.weight._version
    for seed in (0, 2):
        optimizer.backward(loss_of(model, seed), 2)
    optimizer.step()
    assert_same_bits(model.unused.weight, before)
    assert model.unused.weight._version == version
    assert model.unused.weight not in optimizer.state
    assert model.rare not in optimizer.state


def test_gradients_that_share_memory_stay_apart(backend: str) -> None:
    """An accumulator was a gradient: the next parameter's may be in the same memory, and must not become one too."""

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            return a + b

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            grad = grad.clone()
            return grad, grad.detach()

    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    optimizer = af.SGD([a, b], lr=1.0, backend=backend)
    af.release_gradients(optimizer, EACH)
    for _ in range(2):
        (Both.apply(a, b) * torch.arange(3.0)).sum().backward()
        optimizer.accumulate()
    optimizer.step()
    assert a.tolist() == b.tolist() == [0.0, -2.0, -4.0]


def test_torch_autograd_grad_folds_nothing(backend: str) -> None:
    model = net()
    optimizer = ADAMW_CASE.make(model.parameters(), backend)
    af.release_gradients(optimizer, EACH)
    grads = torch.autograd.grad(loss_of(model, 1), list(model.first.parameters()))
    assert all(grad.abs().sum() > 0 for grad in grads)
    assert optimizer._runtime.window.phase is Phase.IDLE


@tiny_and_huge
def test_a_gradient_of_gradients(backend: str, bucket: int) -> None:
    def loop(model: Net, optimizer: Any) -> None:
        for micro_batch in range(2):
            loss = loss_of(model, 1 + 2 * micro_batch)
            used = [*model.first.parameters(), *model.last.parameters()]
            penalty = sum(grad.square().sum() for grad in torch.autograd.grad(loss, used, create_graph=True))
            (loss + penalty).backward()
            optimizer.accumulate()
        optimizer.step()

    assert_release_changes_nothing(loop, backend, bucket, max_grad_norm=0.05)


@tiny_and_huge
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_gradients_with_a_graph(backend: str, bucket: int) -> None:
    def loop(model: Net, optimizer: Any) -> None:
        for micro_batch in range(3):
            loss_of(model, micro_batch).backward(create_graph=True)
            optimizer.accumulate()
        optimizer.step()

    assert_release_changes_nothing(loop, backend, bucket, max_grad_norm=0.05)
