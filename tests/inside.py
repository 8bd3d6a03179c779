"""The one door of the tests to what is private in the package, and in torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils._device
import torch.utils._python_dispatch
from torch import Tensor

import accumfused as af
from accumfused import backends, compiled
from accumfused.core import metrics
from accumfused.distributed import exchange
from accumfused.rules import Rule, compile


def use_backend(optimizer: af.FusedOptimizer, backend: Any) -> None:
    """This backend object steps, whatever the optimizer would have chosen."""
    optimizer._engine.plans.forget()
    optimizer._engine.plans.backend = backend


def replace_cuda(patch: pytest.MonkeyPatch, make: Callable[[], Any] | None = None) -> None:
    """backend="cuda" is what this makes, for parameters on any device, or what it is; for rules that it lacks, "auto".

    By that name these are refused, and most tests go through all rules.
    """
    select = backends._select

    def selected(name: str, device: torch.device, rules: Iterable[type[Rule]], dtype: torch.dtype) -> Any:
        if name == "cuda" and any(map(compile.why_not_cuda, rules)):
            name = "auto"
        if name != "cuda" or make is None:
            return select(name, device, rules, dtype)
        backends.check(name, device, rules, dtype)
        return make()

    if make is not None:
        patch.setattr(backends, "_why_not_cuda", lambda device: None)
    patch.setattr(backends, "_select", selected)


def run_engine(loss: Tensor) -> None:
    """Backward without torch's function of that name."""
    engine = torch.autograd.Variable._execution_engine
    options = {"allow_unreachable": True, "accumulate_grad": True}
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), **options)


def native() -> Any:
    """The native module, or None."""
    return compiled.module


def forget_what_loads() -> None:
    """The CUDA kernels are asked again whether they load on a GPU."""
    backends._loads_on.cache_clear()


def forget_constructors() -> None:
    """torch looks up again which functions make tensors on its default device."""
    torch.utils._device._device_constructors.cache_clear()


def attached(*things: Any) -> list[int]:
    """How many hooks modules, tensors and optimizers have, and then how many function modes there are."""
    kinds = (
        "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_post_accumulate_grad_hooks",
        "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
    )  # fmt: skip
    hooks = [len(getattr(thing, kind, None) or ()) for thing in things for kind in kinds]
    return [*hooks, torch._C._len_torch_function_stack()]


def plan(optimizer: af.FusedOptimizer) -> Any:
    """The plan of the last step."""
    return optimizer._engine.plans.last


def plan_of(optimizer: af.FusedOptimizer) -> Any:
    """The plan for the parameters and states of now: another object where something has changed."""
    return optimizer._engine.plans.current()


def outcome(optimizer: af.FusedOptimizer) -> Any:
    """Norm and coefficients of the last step, on its device; None before it."""
    return optimizer._engine.outcome


def rule_of(of: Any, group: dict[str, Any]) -> type[Rule]:
    """The rule that an optimizer, or a class of optimizers, has for a parameter group."""
    return of._rule_of(group)  # type: ignore[no-any-return]


def accumulators(optimizer: af.FusedOptimizer) -> list[Any]:
    """The tensors of its window's sums, None where a parameter has none."""
    optimizer._engine.wait()
    return optimizer._engine.window.sums


def places(optimizer: af.FusedOptimizer) -> list[Any]:
    """The memory that its window has for sums which are no adopted gradients, None where it has none."""
    return list(optimizer._engine.window.arena.places)


def open_window(optimizer: Any) -> dict[str, Any]:
    """What the open window holds, by name: the sums, and what it knows of the weights; of none or new rows nothing."""
    engine = getattr(optimizer, "_engine", None)
    if engine is None or not engine.window.is_open:
        return {}
    window = engine.window
    engine.wait()
    sums = {f"accumulator {row}": value for row, value in enumerate(window.sums) if value is not None}
    known = window.weights
    numbers = {"unit": known.unit, "total": known.total, "factors": known.factors, "micro-batches": known.count}
    return sums | numbers


def memories(optimizer: Any) -> dict[str, Any]:
    """What it remembers of earlier steps, or None: the history of norms, and the means of the noise scale."""
    clipping, noise = optimizer._engine.clipping, optimizer._engine.noise
    return {"history": clipping.history, "noise": None if noise is None else noise.means}


@contextlib.contextmanager
def sizes_on_the_way(bundled_bytes: int, piece_bytes: int) -> Iterator[None]:
    """Accumulators below the one size travel together, and larger ones in pieces of the other."""
    with (
        mock.patch.object(exchange, "BUNDLED_BYTES", bundled_bytes),
        mock.patch.object(exchange, "_PIECE_BYTES", piece_bytes),
    ):
        yield


def copied_at_a_time(elements: int) -> contextlib.AbstractContextManager[Any]:
    """A block in which a measured step copies so many elements of weights at a time."""
    return mock.patch.dict(metrics._COPIED, cpu=elements, cuda=elements)


def fails(optimizer: af.FusedOptimizer, verb: str, after: int = 0) -> contextlib.AbstractContextManager[Any]:
    """A block in which the backend has no memory to accumulate, to take a norm or to step, after so many launches."""
    backend = optimizer._engine.plans.current().backend
    launches = iter([getattr(backend, verb)] * after)

    def run(*given: Any) -> Any:
        launch = next(launches, None)
        if launch is None:
            raise RuntimeError("out of memory")
        return launch(*given)

    return mock.patch.object(backend, verb, side_effect=run)


def version(tensor: Tensor | None) -> int:
    """How often it was written, as torch counts; nothing public tells it."""
    return -1 if tensor is None else tensor._version


def negated(values: Tensor) -> Tensor:
    """torch negates it lazily."""
    return torch._neg_view(values)


def efficient_zeros() -> Tensor:
    """Three zeros without memory, as torch makes them for gradients that are none."""
    return torch._efficientzerotensor(3, device=torch.get_default_device())


def words(optimizer: af.FusedOptimizer) -> Tensor | None:
    """Of each row, from which the rounding noise of its next sum in bf16 comes; None: no sum was rounded."""
    optimizer._engine.wait()
    return optimizer._engine.window.noise.of_rows()


def backend(optimizer: af.FusedOptimizer) -> Any:
    """The backend of the last step."""
    return optimizer._engine.plans.current().backend


def sleep_on_the_gpu(cycles: int) -> None:
    """Keeps the current stream busy."""
    torch.cuda._sleep(cycles)


def wrapper(kind: Any, inner: torch.Tensor) -> Any:
    """A tensor of that class with the shape of another one, and without memory."""
    return torch.Tensor._make_wrapper_subclass(
        kind, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
    )


def partials(optimizer: af.FusedOptimizer) -> Any:
    """The sums of squares of gradients from p.grad, in the last step."""
    optimizer._engine.wait()
    return optimizer._engine.window.partials


def allocations(profiler: Any) -> list[int]:
    """Bytes that a torch.profiler.profile has seen allocated, or freed (negative), in the order of time."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def compiled_autograd() -> Any:
    """Within it the compiler runs backward passes, also those of models that are not compiled."""
    from torch._dynamo import compiled_autograd  # takes two seconds

    return compiled_autograd._enable(torch.compile(backend="eager"))


def private(owner: Any, name: str) -> Any:
    """What a test replaces for a while."""
    return getattr(owner, name)


def is_idle(worker: Any) -> bool:
    """Whether a worker of offload=True has made all its tasks: it has given their slots back."""
    return worker._free.qsize() == len(worker.slots)
