"""What every test shares: a seed, torch's number of threads given back, and the backends of this machine.

`backend`, `emulated`, `native` and `never_waits` are fixtures. `interpreting` runs Triton's kernels without a GPU.
`pairwise` makes few rows of many axes, in which every two values of two axes meet: a covering array of strength 2. Most
defects need one value or a pair of them, seldom more (Kuhn, Wallace and Gallo 2004, "Software fault interactions and
implications for software testing").
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import emulation
import inside
import pytest
import reference  # noqa: F401  # makes "reference" the name of a backend
import torch
from hypothesis import HealthCheck, settings

from accumfused import backends, compiled
from accumfused.backends.cuda import CudaBackend

GPU = torch.cuda.is_available()
ALL = ["reference", "cpu", "emulated", *(["cuda", "triton"] if GPU else [])]
OLDER_THAN_TESTS: list[torch.Size] = []  # tensors that there are once all tests are collected
ONE = ["reference" if compiled.unavailable else "cpu", *(["cuda"] if GPU else [])]

os.environ["ACCUMFUSED_CACHE"] = str(Path(__file__).parents[1] / "build" / "rules")  # what users' rules compile to

# No test depends on how fast the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
LONG = ("test_bits.py", "test_huggingface.py", "test_triton_code.py")  # the files that take longest


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Triton looks at this when it is imported, which it is in parts, and when it meets a kernel."""
    with pytest.MonkeyPatch.context() as patch:
        if not GPU:
            patch.setenv("TRITON_INTERPRET", "1")
        yield


with interpreting(), contextlib.suppress(ImportError):  # before anything else does: torch's compiler, the frameworks
    importlib.import_module("triton.language")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--emulated", action="store_true", help="what runs on one backend runs on the emulation of a GPU")
    parser.addoption("--full", action="store_true", help="all combinations, on all backends, and what is marked full")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: takes long, and tells little that other tests do not; runs with --full")
    config.addinivalue_line("markers", "pairwise(**axes): every two values of two axes meet; --full: all, if few")
    config.addinivalue_line("markers", "in_turn(**axes): rows of pairwise take values one after another; not --full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    left = [item for item in items if not item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=[*{*items} - {*left}])
    # So that the processes end together: behaviour/ has many short files.
    items[:] = sorted(left, key=lambda item: (item.path.name not in LONG, item.path.parent.name == "behaviour"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Behaviour is tested with one backend for each device: conformance/ shows that all of them have the same bits."""
    full = metafunc.config.getoption("--full")
    for mark in metafunc.definition.iter_markers("pairwise"):
        turn = metafunc.definition.get_closest_marker("in_turn")
        turns = {} if turn is None else turn.kwargs
        axes = {**turns, **mark.kwargs}
        rows = combinations(axes) if full else in_turn([*turns.values()], pairwise(mark.kwargs))
        metafunc.parametrize([*axes], rows, ids=["-".join(map(_name, row)) for row in rows])
    if "backend" not in metafunc.fixturenames:
        return
    if any("backend" in str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize")):
        return
    everywhere = full or metafunc.definition.path.parent.name == "conformance"
    one = ["emulated"] if metafunc.config.getoption("--emulated") else ONE
    metafunc.parametrize("backend", ALL if everywhere else one, indirect=True)


def _name(value: Any) -> str:
    return str(getattr(value, "name", getattr(value, "__name__", value))).removeprefix("torch.")


def pytest_collection_finish() -> None:
    OLDER_THAN_TESTS.extend(tensors_alive())
    gc.freeze()  # what modules hold, or each collection, which tests and frameworks ask for, goes through it again


def tensors_alive() -> list[torch.Size]:
    """The shapes of all tensors but numbers and pairs of them, which torch takes from the CPU beside other devices."""
    gc.collect()
    alive = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return [tensor.shape for tensor in alive if tensor.numel() > 2]


def pytest_sessionfinish() -> None:
    gc.unfreeze()
    if "processes" in sys.modules:  # whoever imports it imports torch's compiler, and with it Triton
        sys.modules["processes"].close()


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """The same random numbers in every run, and no thread count or float mode left behind.

    One thread unless a test asks for more: over small tensors, on a busy machine, threads mostly wait for each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a backend, on its device. Where the CUDA kernels lack a test's rule, it runs on what "auto" takes.

    "emulated" is the CUDA backend on the CPU, over the emulation of its kernels' machine.
    """
    assert not OLDER_THAN_TESTS, "tensors that modules make at import lie on the CPU: make them in the test"
    name = request.param
    if name == "cpu":
        need_native()
    elif name == "emulated":
        request.getfixturevalue("emulate_cuda")
        name = "cuda"
    if request.param not in ("cuda", "triton"):
        yield name
        return
    backends.check(name, torch.device("cuda", 0))
    inside.replace_cuda(monkeypatch)
    with on_device("cuda", monkeypatch):
        yield name


@contextlib.contextmanager
def on_device(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New tensors lie there. A generator's numbers are drawn on the CPU, where those of the tests are, and moved.

    torch looks up once, when it first needs them, which functions take its default device.
    """

    def moved(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def drawn(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("generator") is None or "device" in kwargs:
                return draw(*args, **kwargs)
            return draw(*args, **kwargs, device="cpu").to(device)

        return drawn

    with torch.device(device):
        torch.empty(0)  # so it looks before they are replaced
        for name in ("rand", "randn", "randint"):
            monkeypatch.setattr(torch, name, moved(getattr(torch, name)))
        yield


@pytest.fixture(scope="session")
def emulated() -> Any:
    """The module of the CUDA kernels over the emulation."""
    reason = emulation.why_not()
    if reason is not None:
        pytest.skip(reason)
    return emulation.load()


@pytest.fixture
def emulate_cuda(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="cuda" is the emulation, for parameters on the CPU."""
    need_native()
    emulated.seed(0)
    inside.replace_cuda(monkeypatch, functools.partial(CudaBackend, emulated, emulated.Table))


@pytest.fixture
def native() -> None:
    """Skips the test where there is no native module."""
    need_native()


def need_native() -> None:
    if compiled.unavailable is not None:
        pytest.skip(compiled.unavailable)


@pytest.fixture
def never_waits() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """For a `with` block in which every call that waits for the GPU raises."""
    return _never_waits


@contextlib.contextmanager
def _never_waits() -> Iterator[None]:
    try:
        _set_sync_debug_mode("error")  # may raise after it has set the mode, which would stay for the whole process
        yield
    finally:
        _set_sync_debug_mode("default")


def _set_sync_debug_mode(mode: str) -> None:
    with warnings.catch_warnings():  # torch's own, once per process
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)


Pair = tuple[int, int, int, int]  # an axis and the place of its value, twice
MOST_ROWS = 10_000  # rows: a test of millions would fill the memory before the first one runs


def combinations(axes: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
    """All of them; where these are too many, pairs."""
    return [*itertools.product(*axes.values())] if math.prod(map(len, axes.values())) <= MOST_ROWS else pairwise(axes)


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Rows with a value of each axis, the same ones in every call; greedy, so not the fewest possible."""
    sizes = [len(values) for values in axes.values()]
    left: dict[Pair, None] = {
        (one, i, other, j): None
        for one, other in itertools.combinations(range(len(sizes)), 2)
        for i, j in itertools.product(range(sizes[one]), range(sizes[other]))
    }
    rows = []
    while left:
        one, i, other, j = next(iter(left))
        row = {one: i, other: j}
        for axis in (axis for axis in range(len(sizes)) if axis not in row):
            row[axis] = max(range(sizes[axis]), key=lambda value: sum(p in left for p in _pairs(row, axis, value)))
        for axis, value in row.items():
            for pair in _pairs(row, axis, value):
                left.pop(pair, None)
        rows.append(tuple(values[row[axis]] for axis, values in enumerate(axes.values())))
    return rows


def in_turn(turns: Sequence[Sequence[Any]], rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Puts one value of each before every row, in turn; rows come again where the values are more."""
    count = max(map(len, (*turns, rows)))
    return [(*(values[n % len(values)] for values in turns), *rows[n % len(rows)]) for n in range(count)]


def _pairs(row: Mapping[int, int], axis: int, value: int) -> list[Pair]:
    """Those of this value with what the row has already."""
    ordered = [sorted([(axis, value), item]) for item in row.items() if item[0] != axis]
    return [(*one, *other) for one, other in ordered]
