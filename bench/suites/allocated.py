"""A whole window of a TransformerEncoder on a CPU, forward and backward included: autograd allocates the gradients.

Freed memory that the C library gives back to the kernel comes back as page faults, so each contender has a process of
its own, with the system's default allocator, and they take turns. Micro-batches are small: what is measured is memory.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import accumfused as af
from bench import stock
from bench.exact import ADAMW, MAX_GRAD_NORM
from bench.suites import Bench
from bench.tables import Table, quartiles

FOLLOWS = ()
_MICRO_BATCHES, _WARM_UP = 4, 3
_STEERING = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")  # what begins with these chooses or tunes an allocator
Contender = tuple[Callable[[Tensor], object], Callable[[], object]]  # a micro-batch from its loss, and the step


def run(bench: Bench) -> list[Table]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_STEERING)}
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    command = [sys.executable, "-m", "bench.suites.allocated", *(["--quick"] if bench.quick else [])]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    pipes |= {"env": environment, "cwd": Path(__file__).parents[2]}
    with ExitStack() as stack:
        processes = [stack.enter_context(subprocess.Popen([*command, name], **pipes)) for name in VARIANTS]
        rounds = [[_turn(process) for process in processes] for _ in range(1 + bench.rounds)][1:]  # warm-up comes first
    size = "tiny" if bench.quick else "25M"
    table = Table(f"allocated: window of {_MICRO_BATCHES} micro-batches of 8 tokens, {size} parameters")
    for place, name in enumerate(VARIANTS):
        seconds, faults, peaks = zip(*(turns[place] for turns in rounds), strict=True)
        table.rows.append({
            "name": name,
            "CPU ms": quartiles(seconds, 1e3),
            "x stock": statistics.median(turns[0][0] / turns[place][0] for turns in rounds),
            "page faults": statistics.median(faults),
            "peak MB": max(peaks) / 1e6,
        })  # fmt: skip
    table.notes.append(
        "forward and backward included; medians of windows, ratios of those in the same round; each contender in a "
        "process of its own, with the default allocator; CPU time is that of all threads"
    )
    return [table]


def _turn(process: subprocess.Popen[str]) -> list[float]:
    """One window of this contender: CPU seconds, page faults, peak memory in bytes."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())  # type: ignore[no-any-return]


def _stock(model: nn.Module) -> Contender:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    clip_and_step = stock.clip_and_step([*model.parameters()], optimizer)
    return lambda loss: (loss / _MICRO_BATCHES).backward(), lambda: (clip_and_step(), optimizer.zero_grad())


def _ours(model: nn.Module, *, released: bool) -> Contender:
    optimizer: Any = af.AdamW(model.parameters(), max_grad_norm=MAX_GRAD_NORM, **ADAMW)
    if released:
        optimizer._release = af.release_gradients(optimizer)  # lives as long

    def micro_batch(loss: Tensor) -> None:
        loss.backward()
        optimizer.accumulate(weight=1.0)

    return (lambda loss: optimizer.backward(loss, weight=1.0)) if released else micro_batch, optimizer.step


VARIANTS: dict[str, Callable[[nn.Module], Contender]] = {
    "autograd + clip + fused": _stock,
    "accumfused": lambda model: _ours(model, released=False),
    "accumfused, release_gradients": lambda model: _ours(model, released=True),
}


def main() -> None:
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # torch's, of shapes
    width, layers = (32, 2) if "--quick" in sys.argv else (512, 8)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    inputs = torch.randn(_MICRO_BATCHES, 1, 8, width).unbind()
    micro_batch, step = VARIANTS[sys.argv[-1]](model)

    def window() -> None:
        for given in inputs:
            micro_batch(model(given).square().mean())
        step()

    for _ in range(_WARM_UP):
        window()
    for _ in sys.stdin:
        before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
        window()
        seconds, used = time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF)
        print(json.dumps([seconds, used.ru_minflt - before, used.ru_maxrss * 1024]), flush=True)


if __name__ == "__main__":
    main()
