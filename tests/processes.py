"""Tests that need several processes: workers over gloo, forked from one that has imported torch, which stay.

A test gives a function of its module, which every worker runs; what it returns comes back, in the order of ranks.
"""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import wait
from typing import Any

import reference  # noqa: F401  # workers know it by name, too
import torch
import torch.distributed as dist
from compare import bits
from torch import Tensor

_SECONDS = 120  # after which a run is given up, and the workers with it
_GRACE = 3  # the same once one of them has failed: the others wait for it in a collective, as a rule
_IMPORTED = ["pytest", "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.tensor.parallel"]
_IMPORTED += ["accumfused"]
_pools: dict[int, Pool] = {}


def run(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(*args)` returns in each of so many workers, with torch.distributed initialized."""
    if size not in _pools:
        _pools[size] = Pool(size)
    try:
        return _pools[size].run(function, *args)
    except WorkersLostError:  # those that are left may wait in a collective, and would answer the next test
        close(size)
        raise


def context() -> Any:
    """How processes are started: forked from one that has imported torch."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_IMPORTED)
    return found


def agreed(size: int, function: Callable[..., Any], *args: Any) -> Any:
    """What all of them return: the same, and bit for bit."""
    first, *others = run(size, function, *args)
    for rank, other in enumerate(others, 1):
        assert _plain(other) == _plain(first), f"process {rank} has another result than process 0"
    return first


def close(*sizes: int) -> None:
    """Ends the workers: those of these sizes, or all."""
    for size in sizes or list(_pools):
        _pools.pop(size).close()


class WorkersLostError(AssertionError):
    """Workers failed, did not answer, or died."""


class Pool:
    """So many workers, each with a pipe."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(size):
            here, there = context().Pipe()
            given = rank, size, f"{self._folder.name}/store", there, list(sys.path)
            self._processes.append(context().Process(target=_work, args=given, daemon=True))
            self._processes[-1].start()
            self._pipes.append(here)
            there.close()

    def run(self, function: Callable[..., Any], *args: Any, ranks: Collection[int] | None = None) -> list[Any]:
        """Args: ranks: of those whose answers are awaited; None: all."""
        task = pickle.dumps((function.__module__, function.__qualname__, pickle.dumps(args)))
        for pipe in self._pipes:
            pipe.send_bytes(task)
        waiting: dict[Any, int] = {p: rank for rank, p in enumerate(self._pipes) if ranks is None or rank in ranks}
        answers, errors = dict[int, Any](), list[str]()
        while waiting:
            ready = wait(list(waiting), timeout=_GRACE if errors else _SECONDS)
            for pipe in ready or list(waiting):
                rank = waiting.pop(pipe)
                try:
                    failed, answers[rank] = pickle.loads(pipe.recv_bytes()) if ready else (True, "did not answer")
                except (EOFError, OSError):
                    failed, answers[rank] = True, "died"
                errors += [f"worker {rank}: {answers[rank]}"] if failed else []
        if errors:
            raise WorkersLostError("\n".join(errors))
        return [answers[rank] for rank in sorted(answers)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _work(rank: int, size: int, store: str, pipe: Any, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=_SECONDS)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timeout)
    while True:
        module, name, args = pickle.loads(pipe.recv_bytes())
        try:
            torch.manual_seed(rank)  # as launchers do
            answer = False, getattr(importlib.import_module(module), name)(*pickle.loads(args))
        except BaseException:
            answer = True, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))


def _plain(value: Any) -> Any:
    """What can be compared by ==, whatever it holds."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), bits(value).tolist()
    if isinstance(value, (dict, list, tuple)):
        return [_plain(entry) for entry in (sorted(value.items()) if isinstance(value, dict) else value)]
    return repr(value) if isinstance(value, float) else value
