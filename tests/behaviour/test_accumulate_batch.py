"""A batch in as many micro-batches as fit: which parts run, what one that ran out of memory leaves, what is refused."""

from __future__ import annotations

import functools
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from compare import assert_all_same_bits, everything, refused
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import accumfused as af

ROOT = Path(__file__).parents[2]
TEXTS = {
    "card": "CUDA out of memory. Tried to allocate 2.00 GiB",
    "cpu": "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to",
    "windows": "DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes",
    "cublas": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "driver": "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
}


class Card(nn.Module):
    """Raises as an allocator does, forward or backward, for more elements than fit."""

    def __init__(self, where: str = "never", most: int = 0, error: Exception | None = None) -> None:
        super().__init__()
        self.where, self.most, self.error = where, most, error or torch.OutOfMemoryError(TEXTS["card"])

    def forward(self, x: Tensor) -> Tensor:
        return _Pass.apply(x, self)  # type: ignore[no-any-return,no-untyped-call]

    def take(self, where: str, size: int) -> None:
        if where == self.where and size > self.most:
            raise type(self.error)(*self.error.args)


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, card: Card) -> Tensor:
        ctx.card = card
        card.take("forward", x.numel())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.card.take("backward", grads[0].numel())
        return grads[0], None


class Net(nn.Sequential):
    """Three layers of 4, each followed by a card, whose loss notes the parts that it was called with."""

    def __init__(self, layer: int = 0, where: str = "never", samples: int = 2, error: Exception | None = None) -> None:
        torch.manual_seed(1)
        cards = [Card(where if index == layer else "never", 4 * samples, error) for index in range(3)]
        super().__init__(*(each for card in cards for each in (nn.Linear(4, 4), card)))
        self.calls: list[int] = []

    def loss_of(self, part: tuple[Tensor, Tensor]) -> Tensor:
        x, y = part
        self.calls.append(len(x))
        return F.cross_entropy(self(x), y)


def batch_of(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 4, generator=generator), torch.randint(4, (samples,), generator=generator)


def by_hand(optimizer: af.FusedOptimizer, net: Net, batch: tuple[Tensor, Tensor], sizes: list[int]) -> list[Tensor]:
    """A window of the same parts; returns their losses."""
    losses = []
    for x, y in zip(batch[0].split(sizes), batch[1].split(sizes), strict=True):
        losses.append(F.cross_entropy(net(x), y))
        losses[-1].backward()  # type: ignore[no-untyped-call]
        optimizer.accumulate(weight=len(y))
    return losses


def optimizer_of(net: nn.Module, **options: Any) -> af.AdamW:
    return af.AdamW(net.parameters(), lr=0.1, max_grad_norm=0.5, **options)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_update_is_bit_for_bit_that_of_a_window_with_the_parts_that_fit(
    layer: int, where: str, backend: str
) -> None:
    net, peer = Net(layer, where), Net()
    optimizer, other = optimizer_of(net, backend=backend), optimizer_of(peer, backend=backend)
    for step, (samples, calls) in enumerate([(7, [7, 4, 2, 2, 2, 1]), (7, [2, 2, 2, 1]), (2, [2]), (5, [2, 1, 2])]):
        net.calls.clear()
        batch = batch_of(samples, step)
        loss = af.accumulate_batch(optimizer, batch, net.loss_of, weight="samples")
        assert net.calls == calls
        assert all(param.grad is None for param in net.parameters())
        sizes = [size for size in calls if size <= 2]
        losses = by_hand(other, peer, batch, sizes)
        mean = sum(size * each.item() for size, each in zip(sizes, losses, strict=True)) / samples
        assert loss.item() == pytest.approx(mean, rel=1e-6)
        assert (loss.dtype, loss.shape, loss.requires_grad) == (torch.float32, (), False)
        optimizer.step()
        other.step()
        assert_all_same_bits(everything(optimizer), everything(other))


@pytest.mark.parametrize("text", TEXTS)
def test_each_allocators_error_halves_the_part(text: str) -> None:
    error = torch.OutOfMemoryError if text == "card" else RuntimeError
    net = Net(1, "backward", error=error(TEXTS[text]))
    af.accumulate_batch(optimizer_of(net), batch_of(4), net.loss_of, weight="samples")
    assert net.calls == [4, 2, 2]


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: device-side assert triggered"), ValueError("memory")])
def test_other_errors_pass(error: Exception) -> None:
    net = Net(1, "backward", error=error)
    with pytest.raises(type(error), match=str(error)):
        af.accumulate_batch(optimizer_of(net), batch_of(4), net.loss_of, weight="samples")
    assert net.calls == [4]


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_below_a_checkpoint_are_dropped_too(reentrant: bool) -> None:
    nets, found = [Net(0, "backward"), Net()], []
    for net in nets:
        optimizer = optimizer_of(net)

        def loss_of(part: tuple[Tensor, Tensor], net: Net = net) -> Tensor:
            x = part[0].clone().requires_grad_()  # made within: its gradient ends with it
            return F.cross_entropy(checkpoint(net, x, use_reentrant=reentrant), part[1])  # type: ignore[no-any-return]

        parts = [batch_of(4)] if net is nets[0] else [*zip(*(each.split(2) for each in batch_of(4)), strict=True)]
        for part in parts:
            af.accumulate_batch(optimizer, part, loss_of, weight="samples")
        found.append(optimizer)
        optimizer.step()
    assert_all_same_bits(everything(found[0]), everything(found[1]))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_nothing_of_a_failed_part_is_alive_when_its_half_runs(where: str) -> None:
    net, alive = Net(2, where), list[Any]()

    def loss_of(part: tuple[Tensor, Tensor]) -> Tensor:
        assert [each() for each in alive[:1]] == [None] * len(alive[:1])
        x = net[0](part[0].clone())
        cycle = [x]
        cycle.append(cycle)  # type: ignore[arg-type]
        alive.append(weakref.ref(x))
        return F.cross_entropy(nn.Sequential(*[*net][1:])(x), part[1])

    af.accumulate_batch(optimizer_of(net), batch_of(4), loss_of, weight="samples")
    assert len(alive) == 3


def test_after_16_batches_in_parts_it_tries_twice_as_much() -> None:
    net = Net(1, "backward")
    optimizer = optimizer_of(net)

    def calls(samples: int) -> list[int]:
        net.calls.clear()
        af.accumulate_batch(optimizer, batch_of(samples), net.loss_of, weight="samples")
        optimizer.step()
        return [*net.calls]

    assert calls(4) == [4, 2, 2]
    for _ in range(15):
        assert calls(4) == [2, 2]
        assert calls(1) == [1]  # tells nothing
    assert calls(4) == [4, 2, 2]
    net[3].most = 100  # somebody else has freed memory
    assert [len(calls(16)) for _ in range(34)] == [8] * 15 + [4] * 16 + [2] * 3
    net[3].most = 8
    assert calls(16) == [8, 4] + [2] * 8
    assert [calls(16) for _ in range(16)] == [[2] * 8] * 15 + [[4] + [2] * 8]


def test_what_fits_is_elements_of_the_largest_tensor_not_samples() -> None:
    calls = list[tuple[int, ...]]()
    net = Net()

    def loss_of(part: dict[str, Tensor]) -> Tensor:
        calls.append(tuple(part["x"].shape))
        if part["x"].numel() > 64:
            raise torch.OutOfMemoryError
        return net(part["x"]).square().mean()

    def ran(samples: int, length: int) -> list[tuple[int, ...]]:
        calls.clear()
        batch = {"n": torch.ones(samples, 1), "x": torch.ones(samples, length, 4)}
        af.accumulate_batch(optimizer, batch, loss_of, weight="samples")
        return calls

    optimizer = optimizer_of(net)
    assert ran(4, 8) == [(4, 8, 4), (2, 8, 4), (2, 8, 4)]
    assert ran(16, 1) == [(16, 1, 4)]
    assert ran(4, 16) == [(1, 16, 4)] * 4


@pytest.mark.parametrize("kind", ["lambda", "method", "partial"])
def test_a_function_that_is_made_anew_for_each_batch_is_known_again(kind: str) -> None:
    net = Net(1, "forward")
    optimizer, calls = optimizer_of(net), []
    for _ in range(2):
        ways: dict[str, Callable[[Any], Tensor]] = {
            "lambda": lambda part: net.loss_of(part), "method": net.loss_of,
            "partial": functools.partial(Net.loss_of, net),
        }  # fmt: skip
        net.calls.clear()
        af.accumulate_batch(optimizer, batch_of(4), ways[kind], weight="samples")
        calls.append([*net.calls])
    assert calls[1] == [2, 2]
    assert len(calls[0]) >= 2


def test_a_batch_may_be_nested() -> None:
    net = Net(1, "forward", samples=3)
    x, y = batch_of(6)

    def loss_of(part: dict[str, Any]) -> Tensor:
        (inputs, [more]), targets = part["inputs"], part["targets"]
        assert torch.equal(inputs, more)
        return net.loss_of((inputs, targets))

    batch = {"inputs": (x, [x.clone()]), "targets": y}
    af.accumulate_batch(optimizer_of(net), batch, loss_of, weight=lambda part: (part["targets"] >= 0).sum())
    assert net.calls == [6, 3, 3]
    af.accumulate_batch(optimizer_of(net), x, lambda part: net(part[:3]).sum(), weight="samples")  # a tensor alone


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        (lambda: (torch.ones(2, 4), "text"), TypeError, r"batch\[1\] is str, .* give split="),
        (lambda: {"x": torch.ones(2, 4), "mask": [None]}, TypeError, r"batch\['mask'\]\[0\] is NoneType"),
        (
            lambda: {"x": torch.ones(2, 4), "scale": torch.tensor(1.0)},
            TypeError,
            r"batch\['scale'\] is a tensor without dim",
        ),
        (
            lambda: {"x": torch.ones(2, 4), "y": torch.ones(3)},
            ValueError,
            r"batch\['x'\] has 2, batch\['y'\] has 3; .* split=",
        ),
        (lambda: [], ValueError, "there is no tensor"),
        (lambda: 3, TypeError, "batch is int"),
    ],
)
def test_a_batch_that_cannot_be_halved_is_refused_by_name(
    batch: Callable[[], Any], error: type[Exception], text: str
) -> None:
    optimizer = optimizer_of(Net())
    with refused(optimizer, error, text):
        af.accumulate_batch(optimizer, batch(), lambda _: pytest.fail("it ran"), weight="samples")


def test_split_halves_what_is_not_of_tensors() -> None:
    net, words = Net(1, "forward"), ["a", "bb", "ccc", "dddd", "ee", "f", "g"]
    optimizer = optimizer_of(net)

    def halves(texts: list[str]) -> list[list[str]]:
        return [texts[: len(texts) // 2], texts[len(texts) // 2 :]]

    def loss_of(texts: list[str]) -> Tensor:
        lengths = torch.tensor([len(text) for text in texts])
        return net.loss_of((lengths[:, None].expand(-1, 4).float(), lengths - 1))

    for calls in ([7, 3, 1, 2, 2, 2], [1, 2, 2, 2]):
        net.calls.clear()
        af.accumulate_batch(optimizer, words, loss_of, weight=len, split=halves)
        assert net.calls == calls
    with refused(optimizer, ValueError, "with split= give a function"):
        af.accumulate_batch(optimizer, words, loss_of, weight="samples", split=halves)
    net[3].most = 0
    with pytest.raises(torch.OutOfMemoryError, match="one sample, of shapes"):
        af.accumulate_batch(optimizer, ["a"], loss_of, weight=len, split=halves)


def test_a_part_without_weight_is_in_neither_the_update_nor_the_loss() -> None:
    net, peer = Net(1, "forward"), Net()
    x, y = batch_of(4)
    y[:2] = -100
    optimizer, other = optimizer_of(net), optimizer_of(peer)
    for count in (lambda part: (part[1] >= 0).sum(), lambda part: int((part[1] >= 0).sum())):
        loss = af.accumulate_batch(optimizer, (x, y), net.loss_of, weight=count)
        expected = by_hand(other, peer, (x[2:], y[2:]), [2])
        assert torch.equal(loss, expected[0])
        optimizer.step()
        other.step()
        assert_all_same_bits(everything(optimizer), everything(other))


def test_sums_of_losses_have_no_weight_and_a_divisor_of_the_steps() -> None:
    nets, losses = [Net(1, "forward"), Net()], []
    for net in nets:
        optimizer = af.SGD(net.parameters(), lr=0.1)

        def loss_of(part: tuple[Tensor, Tensor], net: Net = net) -> Tensor:
            return F.cross_entropy(net(part[0]), part[1], reduction="sum")

        losses.append(af.accumulate_batch(optimizer, batch_of(5), loss_of, weight=None))
        optimizer.step(normalizer=5)
    assert torch.allclose(*losses)
    for param, whole in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(param, whole)


def test_one_number_for_all_parts_is_no_weight() -> None:
    optimizer = optimizer_of(Net())
    weights: list[Any] = [1, 0.5, torch.tensor(2), "tokens"]
    for weight in weights:
        with refused(optimizer, TypeError, 'weight must be "samples", a function .* or None'):
            af.accumulate_batch(optimizer, batch_of(2), lambda _: pytest.fail("it ran"), weight=weight)
    nothing: Any = lambda _: None  # noqa: E731  # it lacks its return: no plain sum
    with refused(optimizer, TypeError, "weight must be a number or a tensor of one element, got NoneType"):
        af.accumulate_batch(optimizer, batch_of(2), lambda _: pytest.fail("it ran"), weight=nothing)
    call: Any = af.accumulate_batch
    with pytest.raises(TypeError, match="weight"):
        call(optimizer, batch_of(2), Net().loss_of)


def test_one_sample_that_does_not_fit_raises_with_its_size_and_leaves_no_gradient() -> None:
    net, other = Net(1, "backward", samples=0), torch.ones((), requires_grad=True)
    optimizer = optimizer_of(net)
    text = r"one sample, of shapes \[\[1, 4\], \[1\]\], does not fit in memory \(CUDA out of memory.*checkpoint"
    with refused(optimizer, torch.OutOfMemoryError, text):
        af.accumulate_batch(optimizer, batch_of(3), lambda part: net.loss_of(part) + other, weight="samples")
    assert net.calls == [3, 2, 1]
    assert other.grad is None


def test_an_accumulate_that_runs_out_of_memory_raises() -> None:
    class Full(af.SGD):
        def accumulate(self, *args: Any, **kwargs: Any) -> None:
            raise torch.OutOfMemoryError("of the sums")

    net = Net()
    with pytest.raises(torch.OutOfMemoryError, match="of the sums"):
        af.accumulate_batch(Full(net.parameters()), batch_of(4), net.loss_of, weight="samples")
    assert net.calls == [4]


def test_the_sums_of_a_bf16_model_are_made_before_its_first_part() -> None:
    net = Net().bfloat16()
    optimizer = optimizer_of(net)

    def loss_of(part: tuple[Tensor, Tensor]) -> Tensor:
        places.append(inside.places(optimizer))
        return F.cross_entropy(net(part[0].bfloat16()).float(), part[1])

    places = list[list[Any]]()
    af.accumulate_batch(optimizer, batch_of(4), loss_of, weight="samples")
    assert [place is not None and place.dtype == torch.float32 for place in places[0]] == [True] * 6
    assert all(a is b for a, b in zip(places[0], inside.accumulators(optimizer), strict=True))
    whole = Net()
    adopts = optimizer_of(whole)
    af.accumulate_batch(adopts, batch_of(4), whole.loss_of, weight="samples")
    assert inside.places(adopts) == [None] * 6


def test_several_optimizers_and_a_group_take_the_same_parts() -> None:
    for grouped in (False, True):
        nets, found = [Net(1, "backward"), Net()], []
        for net in nets:
            first = af.SGD(net[0].parameters(), lr=0.1)
            second = af.AdamW(nn.ModuleList([*net][1:]).parameters(), lr=0.1)
            both: Any = af.ClipGroup([first, second], max_grad_norm=0.1) if grouped else [first, second]
            parts = [batch_of(4)] if net is nets[0] else [*zip(*(each.split(2) for each in batch_of(4)), strict=True)]
            for part in parts:
                af.accumulate_batch(both, part, net.loss_of, weight="samples")
            for each in [both] if grouped else both:
                each.step()
            found.append([first, second])
        for ours, theirs in zip(*found, strict=True):
            assert_all_same_bits(everything(ours), everything(theirs))


def test_a_scaler_scales_each_part_and_not_the_loss() -> None:
    net, peer = Net(1, "backward"), Net()
    optimizer, other = optimizer_of(net), optimizer_of(peer)
    scaler = af.GradScaler("cpu", init_scale=2.0**10)
    loss = af.accumulate_batch(optimizer, batch_of(4), net.loss_of, weight="samples", scaler=scaler)
    scaler.step(optimizer)
    losses = by_hand(other, peer, batch_of(4), [2, 2])
    other.step()
    assert loss.item() == pytest.approx(sum(each.item() for each in losses) / 2, rel=1e-6)
    assert_all_same_bits(everything(optimizer), everything(other))  # a power of two rounds nothing
    stock: Any = torch.amp.GradScaler("cpu")
    with refused(optimizer, TypeError, r"accumfused\.GradScaler"):
        af.accumulate_batch(optimizer, batch_of(4), net.loss_of, weight="samples", scaler=stock)


def test_a_gradient_that_was_there_is_refused() -> None:
    net = Net()
    optimizer = optimizer_of(net)
    net.loss_of(batch_of(2)).backward()  # type: ignore[no-untyped-call]
    with refused(optimizer, RuntimeError, "there is a gradient already, of the optimizer's parameters"):
        af.accumulate_batch(optimizer, batch_of(2), net.loss_of, weight="samples")
    optimizer.zero_grad()
    x, y = batch_of(4)
    x.requires_grad_().grad = torch.ones(4, 4)
    with refused(optimizer, RuntimeError, r"there is a gradient already, of a tensor of shape \[4, 4\]"):
        af.accumulate_batch(optimizer, (x, y), net.loss_of, weight="samples")


def test_parameters_that_no_optimizer_has_are_refused_unless_they_are_frozen() -> None:
    net = Net()
    optimizer = optimizer_of(net[0])
    with refused(optimizer, RuntimeError, r"a parameter of shape \[4.*\] that none .* requires_grad_\(False\)"):
        af.accumulate_batch(optimizer, batch_of(2), net.loss_of, weight="samples")
    nn.ModuleList([*net][1:]).requires_grad_(False)
    af.accumulate_batch(optimizer, batch_of(2), net.loss_of, weight="samples")


def test_gradients_that_are_folded_during_backward_are_refused() -> None:
    net = Net()
    optimizer = optimizer_of(net)
    for takes in (lambda: af.release_gradients(optimizer), lambda: af.fuse_linears(net, optimizer)):
        handle = takes()
        with refused(optimizer, RuntimeError, r"release_gradients\(\) or fuse_linears\(\) folds .* remove\(\)"):
            af.accumulate_batch(optimizer, batch_of(2), net.loss_of, weight="samples")
        handle.remove()
    af.accumulate_batch(optimizer, batch_of(2), net.loss_of, weight="samples")


@pytest.mark.parametrize("kind", [None, list, torch.optim.SGD])
def test_optimizers_of_others_are_refused(kind: Any) -> None:
    given: Any = torch.optim.SGD([nn.Parameter(torch.ones(1))]) if kind is torch.optim.SGD else kind and kind()
    with pytest.raises(TypeError, match="accumulate_batch takes an optimizer of this package"):
        af.accumulate_batch(given, batch_of(2), lambda _: pytest.fail("it ran"), weight="samples")


@pytest.mark.parametrize("kind", ["number", "two", "no graph"])
def test_what_is_no_loss_is_refused(kind: str) -> None:
    loss: Any = {"number": 1.0, "two": torch.ones(2, requires_grad=True), "no graph": torch.ones(1)}[kind]
    optimizer = optimizer_of(Net())
    with refused(optimizer, TypeError, r"loss_of\(part\) must return a loss"):
        af.accumulate_batch(optimizer, batch_of(2), lambda _: loss, weight="samples")


LIMITED = """
import copy, resource
import torch
import accumfused as af

torch.set_num_threads(1)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(1, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1))
peer = copy.deepcopy(net)
x, tried, parts = torch.randn(2048, 1), [], []

class Noting(af.SGD):
    def accumulate(self, weight):
        parts.append(int(weight))
        super().accumulate(weight)

optimizer, other = Noting(net.parameters(), lr=0.1), af.SGD(peer.parameters(), lr=0.1)

def loss_of(part):
    tried.append(len(part))
    return net(part).square().mean()

loss_of(x[:8]).backward()  # what torch keeps
optimizer.zero_grad()
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size + 60 * 2**20, hard))
try:
    loss_of(x).backward()
except RuntimeError as error:
    print(error)
optimizer.zero_grad()
tried.clear()
af.accumulate_batch(optimizer, x, loss_of, weight="samples")  # of 32 MiB in each activation
optimizer.step()
print(tried, sum(parts))
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
for part in x.split(parts):
    peer(part).square().mean().backward()
    other.accumulate(weight=len(part))
other.step()
print(*map(torch.equal, net.parameters(), peer.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say how much memory is mapped")
def test_a_process_whose_memory_is_limited_trains_on_the_whole_batch() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    error, tried, equal, _ = done.stdout.split("\n")
    assert "DefaultCPUAllocator: can't allocate memory" in error
    assert tried.startswith("[2048, 1024, ")
    assert tried.endswith("] 2048")
    assert equal == "True True True True"
