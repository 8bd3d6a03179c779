"""Small models for many tests, each with its batches, gradients and optimizers.

`Model`, `build` and `trained` make parameters of every format, for tests of what is saved, which goes by all ROUTES.
`Net`, `mlp` and `fused` make linear layers, called in every way, whose gradients a window takes. `both` and `matrices`
make what Muon is tested with.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import inside
import torch
import torch.nn.functional as F
from compare import assert_close, params_of
from table import STATES, WEIGHTS, random_params
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.nn import Module, Parameter, ParameterList
from torch.utils.checkpoint import checkpoint

import accumfused as af
from accumfused.formats import codecs, kinds, numeric

MASTERS = tuple(name for name, (_, options) in WEIGHTS.items() if options.get("master_weights"))


class Model(Module):
    """Parameters of several shapes, one channels_last and one tied, and buffers."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = [(37, 11), (130,), (), (6, 4, 3, 2)]
        values = [torch.randn(shape, generator=generator, device="cpu").to(dtype=dtype) for shape in shapes]
        values[3] = values[3].to(memory_format=torch.channels_last)
        values = [value.to(torch.get_default_device()) for value in values]
        self.matrix, self.vector, self.scalar, self.kernel = map(Parameter, values)
        self.tied = self.matrix
        self.register_buffer("mean", torch.ones(3, dtype=dtype))
        self.register_buffer("count", torch.tensor(7))


def build(weights: str, states: str, backend: str, cls: Any = af.AdamW, **options: Any) -> tuple[Model, Any]:
    dtype, settings = WEIGHTS[weights]
    model = Model(dtype)
    options = {"lr": 0.1, "max_grad_norm": 5.0, "rounding_seed": 17, "state_dtype_min_numel": 2, **settings, **options}
    return model, cls(model.parameters(), backend=backend, state_dtype=STATES[states], **options)


def grads_of(optimizer: torch.optim.Optimizer, seed: int, dtype: torch.dtype | None = None) -> None:
    """Sets random gradients, the same for every dtype and layout of the parameters; of this dtype, or theirs."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params_of(optimizer):
        values = torch.randn(param.shape, generator=generator, device="cpu")
        param.grad_dtype = dtype or param.dtype
        param.grad = torch.empty_like(param, dtype=dtype or param.dtype, requires_grad=False).copy_(values)


def train(optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    """Steps with random gradients, each of which moves something."""
    first = params_of(optimizer)[0]
    for step in range(steps):
        before = first.detach().clone()
        grads_of(optimizer, seed + step)
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(first, before)


def trained(weights: str, states: str, backend: str, steps: int = 3, **options: Any) -> tuple[Model, Any]:
    model, optimizer = build(weights, states, backend, **options)
    train(optimizer, steps)
    return model, optimizer


def skip_a_step(optimizer: Any) -> None:
    """A step that writes nothing, but for what every step does first: bringing loaded states into their formats."""
    grads_of(optimizer, 0)
    params_of(optimizer)[0].grad.fill_(torch.nan)
    optimizer.step()
    assert bool(optimizer.step_was_skipped)
    optimizer.zero_grad()


def through_a_file(saved: Any, *, weights_only: bool = True) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


Pair = tuple[Any, Any]  # a model and its optimizer


def by_file(old: Pair, new: Pair, *order: int) -> Pair:
    new[1].load_state_dict(new[1].state_dict())  # a load leaves nothing behind for the next
    for index in order:
        new[index].load_state_dict(through_a_file(old[index].state_dict()))
    return new


def by_names(old: Pair, new: Pair, *, flat: bool) -> Pair:
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=flat, strict=False)  # some may have no state yet
    saved = copy.deepcopy(dcp.get_optimizer_state_dict(*old, options=options))
    new[0].load_state_dict(old[0].state_dict())
    dcp.set_optimizer_state_dict(*new, saved, options=options)
    return new


ROUTES: dict[str, Callable[[Pair, Pair], Pair]] = {  # from the old pair to the new one, or to a third
    "weights first": lambda old, new: by_file(old, new, 0, 1),
    "states first": lambda old, new: by_file(old, new, 1, 0),
    "names": lambda old, new: by_names(old, new, flat=False),
    "flat names": lambda old, new: by_names(old, new, flat=True),
    "deepcopy": lambda old, new: copy.deepcopy(old),
    "pickle": lambda old, new: pickle.loads(pickle.dumps(old)),
}


def whole(optimizer: Any) -> list[Tensor]:
    """The parameters in fp32, each in memory of its own."""
    saved = optimizer.full_precision_state_dict(ParameterList(params_of(optimizer)))
    return [value.clone() for value in saved.values()]


def in_fp64(entries: Mapping[str, Any], names: Iterable[str]) -> dict[str, Tensor]:
    """These states of a parameter, whatever they are kept in."""
    found = {}
    for name in names:
        value = kinds.state_in(entries, name)
        if value.dtype == torch.uint8:
            codes, scale = numeric.memory_order(value), entries[f"{name}_scale"].view(-1)
            value = torch.empty_like(value, dtype=torch.float32)
            numeric.memory_order(value).copy_(codecs.decode(codes, scale, second_moment=name.endswith("sq")))
        found[name] = value.to(torch.float64, copy=True)
    return found


def states_of(optimizer: Any) -> dict[str, Tensor]:
    """Every state in fp64, by parameter and name."""
    names = inside.rule_of(optimizer, optimizer.param_groups[0]).states
    every = [in_fp64(optimizer.state[param], names) for param in params_of(optimizer)]
    return {f"{name} {index}": value for index, found in enumerate(every) for name, value in found.items()}


WIDTH = 24


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, WIDTH, bias=False), nn.Tanh(),
        nn.Linear(WIDTH, 16),
    )  # fmt: skip


class Net(nn.Module):
    """Args: way: what `forward` does with two layers, or its name in WAYS."""

    def __init__(self, way: str | Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = WAYS[way] if isinstance(way, str) else way
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def _nested(net: Any, x: Tensor, *, reentrant: bool) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return net.a(torch.tanh(net.b(x)))

    def outer(x: Tensor) -> Tensor:
        return net.b(checkpoint(inner, net.a(x), use_reentrant=reentrant))  # type: ignore[no-any-return]

    return checkpoint(outer, x, use_reentrant=reentrant)  # type: ignore[no-any-return]


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "twice": lambda net, x: net.a(torch.tanh(net.a(x))) + net.b(x),
    "outside": lambda net, x: F.linear(torch.tanh(net.a(x)), net.a.weight) + net.b(x),
    "checkpoint": lambda net, x: checkpoint(net.b, checkpoint(net.a, x, use_reentrant=False), use_reentrant=False),  # type: ignore
    "reentrant": lambda net, x: checkpoint(net.b, checkpoint(net.a, x, use_reentrant=True), use_reentrant=True),  # type: ignore
    "nested": lambda net, x: _nested(net, x, reentrant=False),
    "nested reentrant": lambda net, x: _nested(net, x, reentrant=True),
    "unused": lambda net, x: net.a(x),
    "one dimension": lambda net, x: net.b(net.a(x.reshape(-1)[:WIDTH])),
    "four dimensions": lambda net, x: net.b(net.a(x[None])),
    "transposed": lambda net, x: net.b(net.a(x.transpose(0, 1))).transpose(0, 1),
    "expanded": lambda net, x: net.b(net.a(x[:1].expand(3, -1, -1))).sum((0, 1)).expand(2, -1),
    "sliced": lambda net, x: net.b(net.a(x[::2, 1:])),
    "batch of 0": lambda net, x: torch.cat([net.b(net.a(x[:0])), net.a(x)]),
    "nothing else": lambda net, x: net.a(x).detach() + net.b(x.detach()),
}


def batch(model: nn.Module, number: int, *shape: int) -> Tensor:
    """Random numbers, the same for each number, in the model's dtype."""
    drawn = torch.randn(*(shape or (4, 3, WIDTH)), generator=torch.Generator().manual_seed(number))
    return drawn.to(next(model.parameters()).dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def backward(model: nn.Module, number: int = 0, *shape: int) -> None:
    loss_of(model, batch(model, number, *shape)).backward()


def fused(model: nn.Module, backend: str = "auto") -> af.SGD:
    """An optimizer with all parameters, whose window the layers add to."""
    optimizer = af.SGD(model.parameters(), lr=0.1, backend=backend)
    af.fuse_linears(model, optimizer)
    return optimizer


def assert_same_gradients(model: nn.Module, truth: nn.Module, divisor: float = 1.0) -> None:
    """The gradients of the one are those of the other, divided; none where that has none."""
    for (name, param), right in zip(model.named_parameters(), truth.parameters(), strict=True):
        assert (param.grad is None) == (right.grad is None), name
        if param.grad is not None and right.grad is not None:
            assert_close(param.grad, right.grad / divisor, "model", name)


# Squares and rectangles of both kinds, small ones in batches, and large ones in panels of 256 rows.
MATRICES = [(24, 24), (24, 24), (40, 64), (64, 40), (300, 300), (300, 700), (520, 270), (1, 5), (5, 1), (0, 3)]
OTHERS = [(7,), (), (9, 4)]
ADAMW: dict[str, Any] = {"lr": 0.1, "betas": (0.5, 0.7), "weight_decay": 0.4}
MUON: dict[str, Any] = {"lr": 0.7, "weight_decay": 0.3}


def assert_near(actual: Tensor, truth: Tensor) -> None:
    """Within the rounding of bf16 matrices, of which an update is made."""
    size = truth.double().norm()
    assert_close(
        (actual.double() - truth.double()).norm() / size if size else size, torch.zeros(()), "bf16 Newton-Schulz"
    )


def matrices(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """About as large as an update, so that the decay shows."""
    return [(p.detach() / max((1, *p.shape)) ** 0.5).requires_grad_() for p in random_params(shapes)]


def both(**settings: Any) -> af.Muon:
    """Matrices and AdamW's parameters, in two groups."""
    torch.manual_seed(0)
    groups = [{"params": matrices(MATRICES[:4])}, {"params": matrices(OTHERS), "use_muon": False, **ADAMW}]
    return af.Muon(groups, **MUON, **settings)
