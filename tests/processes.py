"""Tests that need several processes: workers over gloo that stay, since starting one takes seconds.

A test gives a function of its module, which every worker runs; what it returns comes back, in the order of ranks.
"""

from __future__ import annotations

import datetime
import gc
import importlib
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SECONDS = 120  # after which a run is given up, and the workers with it
_pools: dict[int, Pool] = {}


def run(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(*args)` returns in each of so many workers, with torch.distributed initialized."""
    if size not in _pools:
        _pools[size] = Pool(size)
    try:
        return _pools[size].run(function, *args)
    except WorkersLostError:
        close(size)
        raise


def close(*sizes: int) -> None:
    """Ends the workers: those of these sizes, or all."""
    for size in sizes or list(_pools):
        if size in _pools:
            _pools.pop(size).close()


class WorkersLostError(AssertionError):
    """Workers did not answer, or died."""


class Pool:
    """So many workers, each with a pipe."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name, "store")
        self._pipes, self._processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(rank, size, str(store), there, list(sys.path)), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__qualname__, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(_SECONDS):
                    raise WorkersLostError(f"worker {rank} did not answer in {_SECONDS} s")
                answers.append(pipe.recv())
            except EOFError:
                raise WorkersLostError(f"worker {rank} died") from None
        errors = [f"worker {rank}:\n{answer}" for rank, (failed, answer) in enumerate(answers) if failed]
        if errors:  # the others may wait for it in a collective, and would answer the next test
            raise WorkersLostError("\n".join(errors))
        return [answer for _, answer in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _work(rank: int, size: int, store: str, pipe: Any, path: list[str]) -> None:
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=_SECONDS)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timeout)
    while True:
        module, name, args = pipe.recv()
        try:
            if module not in sys.modules:
                _import(module)
            answer = False, getattr(sys.modules[module], name)(*args)
        except BaseException:
            answer = True, traceback.format_exc()
        pipe.send(answer)


def _import(module: str) -> None:
    """What a module brings is out of the garbage collector's sight, as in harness.py: optimizers look through it."""
    import torch._dynamo  # noqa: F401

    importlib.import_module(module)
    gc.collect()
    gc.freeze()
