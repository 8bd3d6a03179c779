"""Many independent measurements over all cores: one process and one thread each."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

Task = tuple[Callable[..., Any], tuple[Any, ...]]


def run_all(tasks: Sequence[Task], processes: int) -> list[Any]:
    """What each `function(*arguments)` returns, in order; an exception becomes a string that says what failed.

    Functions and arguments must be picklable. With one process everything runs here.
    """
    if processes == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return [_run(function, arguments) for function, arguments in tasks]
        finally:
            torch.set_num_threads(threads)
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(processes, context, _one_thread) as pool:
        return list(pool.map(_run, *zip(*tasks, strict=True)))


def _one_thread() -> None:
    torch.set_num_threads(1)


def _run(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
