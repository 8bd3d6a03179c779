"""Runs a training script unchanged, says whether its first updates are those of the large batch, and ends it.

It ends within the optimizer's step, at once: no `finally:` of the script and no atexit handler runs, so that none
writes a checkpoint of a run that was cut short, and no `except:` goes on with it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.nn import Module, ModuleList
from torch.optim import Optimizer

from accumfused.auditing.hints import CAUSES
from accumfused.auditing.report import AuditReport
from accumfused.auditing.step import DIFFERENT, EQUAL, SCALED
from accumfused.auditing.track import Track
from accumfused.auditing.watching import Watch

SOUND, FAULTY, CANNOT_TELL, FAILED = 0, 1, 3, 4  # exit codes; 2 is argparse's
_ENDED = (
    "The script was ended here, after {} steps: what comes later, such as an epoch's remainder, was not seen (see "
    "--steps).\nIts finally: blocks and atexit handlers did not run."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `accumfused audit`."""
    known = ", ".join(CAUSES)
    parser.add_argument(
        "--swap", action="store_true",
        help="run the script twice, with torch's optimizers and with accumfused's, and compare ten updates' losses",
    )  # fmt: skip
    parser.add_argument(
        "--micro-batches", type=int, metavar="K",
        help="how many micro-batches belong to a step (default: as many as most steps have)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=_count, default=2, metavar="N",
        help="how many steps to watch; the end of an epoch among them shows its remainder (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--picture",
        default="accumfused-audit.png",
        help="where the picture goes: .png, .svg, .pdf (default: %(default)s)",
    )
    parser.add_argument(
        "--ignore", action="append", choices=[*CAUSES], default=[], metavar="CAUSE",
        help=f"a cause that does not count; may be repeated: {known}",
    )  # fmt: skip
    parser.add_argument("script", help="the training script; all that follows is for the script")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"a whole number >= 1, got {text}")
    return number


def run_script(command: list[str]) -> int:
    """Runs a script as python does, and returns its exit code. Its error, or the text of its exit, goes to stderr."""
    sys.argv, sys.path[0] = command, str(Path(command[0]).resolve().parent)
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    else:
        return 0
    return 1


def say(text: str) -> None:
    """Prints, also where the reader has gone."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer goes there


def leave(code: int) -> NoReturn:
    """Ends this process at once; where there are several, all of them."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_first() -> bool:
    """Whether this process reports: the only one, or that of rank 0."""
    is_several = dist.is_available() and dist.is_initialized()
    return (dist.get_rank() if is_several else int(os.environ.get("RANK", "0"))) == 0


def watch_script(command: list[str], watched: int, steps: int | None, ignore: set[str], picture: str) -> int:
    """Watches a script's first windows, as many as `watched`, reports, and ends it.

    Returns:
        The exit code, where the script has come to its own end before.
    """
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
        watch = Watch(model, [Track(each, names, _everyone) for each in optimizers], ignore, steps, ended)
        watches[:] = [watch]
        reports[:] = [watch.__enter__()]

    def ended() -> None:
        counts = [len(track.windows) for track in watches[0].tracks]
        if min(counts) >= watched or max(counts) >= 4 * watched:  # of optimizers that step more seldom
            watches[0].__exit__(SystemExit)
            _tell(reports[0], picture, _ENDED.format(max(counts)))
            leave(_code(reports[0]))

    with _optimizers(made):
        code = run_script(command)
    for watch in watches:
        watch.__exit__(SystemExit if code else None)
    _tell(reports[0], picture, f"The script failed, with exit code {code}." if code else "")
    return FAILED if code else _code(reports[0])


def _tell(report: AuditReport, picture: str, end: str) -> None:
    if not is_first():
        return
    say(f"\n{report}")
    if any(step.is_judged for step in report.steps) and importlib.util.find_spec("matplotlib") is not None:
        report.picture(picture)
        say(f"\npicture: {picture}")
    if end:
        say(f"\n{end}")


def _code(report: AuditReport) -> int:
    if report.verdict == SCALED:
        return FAULTY if {*report.names} - {"factor"} else SOUND
    return {EQUAL: SOUND, DIFFERENT: FAULTY}.get(report.verdict, CANNOT_TELL)


def _everyone() -> Any:
    """All processes, once the script has several."""
    is_several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.group.WORLD if is_several else None


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
