"""Runs a training script unchanged, and says whether its first updates are those of the large batch.

With `--swap` it runs twice, with torch's optimizers and with this package's in their place, and compares the losses.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import multiprocessing
import os
import random
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from accumfused.auditing.hints import CAUSES
from accumfused.auditing.report import AuditReport
from accumfused.auditing.track import Track
from accumfused.auditing.watching import Watch
from accumfused.auditing.window import DIFFERENT

_WINDOWS, _MOST_WINDOWS, _UPDATES = 2, 8, 10
_CLOSE = 1e-3  # of a loss: kernels that round otherwise stay below it for ten updates


class _Done(BaseException):
    """Ends the script: enough was seen."""


def main(arguments: list[str], peers: Mapping[type[Optimizer], type[Optimizer]]) -> int:
    """Runs the command.

    Args:
        arguments: of the command line, without "audit".
        peers: torch's optimizers, each with the one that takes its place.

    Returns:
        The exit code: 1 if an update is not the large batch's, or losses differ.
    """
    parser = argparse.ArgumentParser(prog="accumfused audit", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--swap", action="store_true", help="compare ten updates with those of this package's optimizers"
    )
    steps, picture = "gradient_accumulation_steps; else as it is seen", "where the picture goes (default: %(default)s)"
    causes: dict[str, Any] = {"action": "append", "choices": [*CAUSES], "default": [], "metavar": "CAUSE"}
    parser.add_argument("--micro-batches", type=int, metavar="K", help=steps)
    parser.add_argument("--picture", default="accumfused-audit.png", help=picture)
    parser.add_argument("--ignore", **causes, help="what does not count: batch_norm")
    parser.add_argument("script", help="the training script; all that follows is for the script")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if not Path(given.script).is_file():
        parser.error(f"there is no file {given.script}")
    command = [given.script, *given.rest]
    if given.swap:
        return _compare(_apart(command, {}), _apart(command, peers))
    report = _watched(command, given.micro_batches, {*given.ignore})
    print(f"\n{report}")
    if report.steps and importlib.util.find_spec("matplotlib") is not None:
        report.picture(given.picture)
        print(f"\npicture: {given.picture}")
    return int(report.verdict == DIFFERENT)


def _run(command: list[str]) -> None:
    """Runs a script as python does, until it ends or enough was seen."""
    sys.argv, sys.path[0] = command, str(Path(command[0]).resolve().parent)
    with contextlib.suppress(_Done, SystemExit):
        runpy.run_path(command[0], run_name="__main__")


@contextlib.contextmanager
def _optimizers(made: Callable[[Optimizer], None]) -> Iterator[None]:
    """Tells of each optimizer that is made."""
    own = Optimizer.__init__

    def construct(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        made(self)

    Optimizer.__init__ = construct  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.__init__ = own  # type: ignore[method-assign]


# ---- the first windows -----------------------------------------------------------------------------------------------


def _watched(command: list[str], steps: int | None, ignore: set[str]) -> AuditReport:
    reports, watches = [AuditReport()], list[Watch]()

    def made(optimizer: Optimizer) -> None:
        known = [track.optimizer for watch in watches for track in watch.tracks]
        if any(track.windows for watch in watches for track in watch.tracks):
            return  # one that comes in the midst of training
        for watch in watches:
            watch.stop()
        optimizers = [*known, optimizer]
        models = _models_of(optimizers)
        model = models[0] if len(models) == 1 else ModuleList(models)
        names = {id(param): name for name, param in model.named_parameters()}
        watch = Watch(model, [Track(each, names, None) for each in optimizers], ignore, steps, ended)
        watches[:] = [watch]
        reports[:] = [watch.__enter__()]

    def ended() -> None:
        counts = [len(track.windows) for track in watches[0].tracks]
        if min(counts) >= _WINDOWS or max(counts) >= _MOST_WINDOWS:
            raise _Done

    try:
        with _optimizers(made):
            _run(command)
    finally:
        for watch in watches:
            watch.__exit__(_Done)
    return reports[-1]


def _models_of(optimizers: list[Optimizer]) -> list[Module]:
    """The modules that have the optimizers' parameters, without those within others."""
    params = {id(param) for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]}
    found = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), Module) and any(id(param) in params for param in each.parameters())
    ]
    inner = {id(module) for each in found for module in each.modules() if module is not each}
    return [each for each in found if id(each) not in inner]


# ---- the first losses ------------------------------------------------------------------------------------------------

Run = tuple[list[float], list[str]]  # the losses of the first updates, and the optimizers that made them
Peers = Mapping[type[Optimizer], type[Optimizer]]


def _apart(command: list[str], peers: Peers) -> Run:
    """The run of a script in a process of its own."""
    os.environ["PYTHONHASHSEED"] = "0"
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_losses, command, peers).result()


def _losses(command: list[str], peers: Peers) -> Run:
    for stock, fused in peers.items():
        setattr(torch.optim, stock.__name__, fused)
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    backward, since, losses, optimizers = torch.autograd.backward, list[float](), list[float](), dict[str, None]()

    def noted(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        first = tensors if isinstance(tensors, Tensor) else tensors[0]
        since.append(float(first.detach().sum()))
        return backward(tensors, *args, **kwargs)

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        optimizers[f"{type(optimizer).__module__.partition('.')[0]}'s {type(optimizer).__name__}"] = None
        if since:
            losses.append(sum(since))
            since.clear()
        if len(losses) == _UPDATES:
            raise _Done

    torch.autograd.backward = noted
    register_optimizer_step_post_hook(stepped)
    _run(command)
    return losses, [*optimizers]


def _compare(stock: Run, swapped: Run) -> int:
    (losses, classes), (others, other_classes) = stock, swapped
    print(f"\n{' and '.join(classes)} against {' and '.join(other_classes)}")
    if classes == other_classes:
        print("The script makes no optimizer of torch.optim that accumfused has.")
        return 1
    print(f"\n{'update':>6}  {'torch':>12}  {'accumfused':>12}  difference")
    off = [abs(loss - other) / max(abs(loss), 1e-12) for loss, other in zip(losses, others, strict=False)]
    for index, (loss, other, difference) in enumerate(zip(losses, others, off, strict=False), 1):
        print(f"{index:>6}  {loss:>12.6g}  {other:>12.6g}  {difference:.1e}")
    is_close = len(losses) == len(others) and max(off, default=0.0) <= _CLOSE
    if not losses or len(losses) != len(others):
        print(f"\nThe script made {len(losses)} updates with torch's optimizers, and {len(others)} with accumfused's.")
    elif off[0] > 0:
        is_close = False
        print("\nThe losses differ before the first update: the script draws random numbers that no seed fixes.")
    else:
        verb = "agree" if is_close else "DIFFER"
        print(f"\nThe losses of {len(losses)} updates {verb}: by {max(off):.1e} at most.")
    return int(not is_close)
