"""Runs a training script unchanged, and says whether its first updates are those of the large batch.

With `--swap` it runs twice, with torch's optimizers and with this package's in their place, and compares the losses.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import random
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
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
    parser.add_argument(
        "--micro-batches", type=int, metavar="K", help="gradient_accumulation_steps; else as it is seen"
    )
    parser.add_argument(
        "--picture", default="accumfused-audit.png", help="where the picture goes (default: %(default)s)"
    )
    parser.add_argument(
        "--ignore",
        action="append",
        choices=[*CAUSES],
        default=[],
        metavar="CAUSE",
        help="what does not count: batch_norm",
    )
    parser.add_argument("--record", choices=["stock", "swapped"], help=argparse.SUPPRESS)
    parser.add_argument("--to", help=argparse.SUPPRESS)
    parser.add_argument("script", help="the training script; all that follows is for the script")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if not Path(given.script).is_file():
        parser.error(f"there is no file {given.script}")
    command = [given.script, *given.rest]
    if given.record is not None:
        run = _record(command, peers if given.record == "swapped" else {})
        Path(given.to).write_text(json.dumps(asdict(run)))
        return 0
    if given.swap:
        return _compare(*(_losses(command, kind) for kind in ("stock", "swapped")))
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
    report, watches = AuditReport(), list[Watch]()

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
        watch.start()
        watches[:] = [watch]

    def ended() -> None:
        counts = [len(track.windows) for track in watches[0].tracks]
        if min(counts) >= _WINDOWS or max(counts) >= _MOST_WINDOWS:
            raise _Done

    try:
        with _optimizers(made):
            _run(command)
    finally:
        for watch in watches:
            watch.stop()
            watch.fill(report, is_whole=False)
    return report


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


@dataclass
class _Run:
    """The losses of the first updates, and the classes of the optimizers that made them."""

    losses: list[float] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)


def _losses(command: list[str], kind: str) -> _Run:
    """The run of a script in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "losses.json"
        own = [sys.executable, "-m", "accumfused", "audit", "--record", kind, "--to", str(path), *command]
        subprocess.run(own, check=True, env={**os.environ, "PYTHONHASHSEED": "0"})
        return _Run(**json.loads(path.read_text()))


def _record(command: list[str], peers: Mapping[type[Optimizer], type[Optimizer]]) -> _Run:
    for stock, fused in peers.items():
        setattr(torch.optim, stock.__name__, fused)
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    backward, since, run = torch.autograd.backward, list[float](), _Run()

    def noted(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        first = tensors if isinstance(tensors, Tensor) else tensors[0]
        since.append(float(first.detach().sum()))
        return backward(tensors, *args, **kwargs)

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        name = f"{type(optimizer).__module__.partition('.')[0]}'s {type(optimizer).__name__}"
        run.classes += [name] if name not in run.classes else []
        if since:
            run.losses.append(sum(since))
            since.clear()
        if len(run.losses) == _UPDATES:
            raise _Done

    torch.autograd.backward = noted
    handle = register_optimizer_step_post_hook(stepped)
    try:
        _run(command)
    finally:
        handle.remove()
        torch.autograd.backward = backward
    return run


def _compare(one: _Run, other: _Run) -> int:
    stock, swapped = one.losses, other.losses
    print(f"\n{' and '.join(one.classes)} against {' and '.join(other.classes)}")
    if one.classes == other.classes:
        print("The script makes no optimizer of torch.optim that accumfused has.")
        return 1
    print(f"\n{'update':>6}  {'torch':>12}  {'accumfused':>12}  difference")
    worst = 0.0
    for index, (loss, ours) in enumerate(zip(stock, swapped, strict=False), 1):
        off = abs(loss - ours) / max(abs(loss), 1e-12)
        worst = max(worst, off)
        print(f"{index:>6}  {loss:>12.6g}  {ours:>12.6g}  {off:.1e}")
    if not stock or len(stock) != len(swapped):
        print(f"\nThe script made {len(stock)} updates with torch's optimizers, and {len(swapped)} with accumfused's.")
        return int(len(stock) != len(swapped))
    if stock[0] != swapped[0]:
        print("\nThe losses differ before the first update: the script draws random numbers that no seed fixes.")
        return 1
    is_close = worst <= _CLOSE
    print(f"\nThe losses of {len(stock)} updates {'agree' if is_close else 'DIFFER'}: by {worst:.1e} at most.")
    return int(not is_close)
