"""Runs a script with torch's optimizers and with this package's in their place, and compares the losses.

Where they differ, torch runs once more with weights that are moved by one rounding after each update: a script that
differs from itself as much cannot tell optimizers apart.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from accumfused.auditing.script import CANNOT_TELL, FAILED, FAULTY, SOUND, is_first, leave, run_script, say

Peers = Mapping[type[Optimizer], type[Optimizer]]  # torch's optimizers, each with the one that takes its place
_UPDATES = 10
_CLOSE = 1e-3  # of a loss: kernels that round otherwise stay below it for ten updates, as a rule
_AS_FAR = 10.0  # times as far as torch from itself is the same: one run of chaos is another's by chance


@dataclass
class Run:
    """A script's first updates. Args: losses: one for each. optimizers: that made them. code: that it exited with."""

    losses: list[float]
    optimizers: list[str]
    code: int = 0


def compare(command: list[str], peers: Peers) -> int:
    """Runs the script in processes of their own, tells what the losses are, and returns the exit code."""
    stock, swapped = _apart(command, {}, 1), _apart(command, peers, 2)
    off, nudged = _differences(stock.losses, swapped.losses), list[float]()
    is_several = int(os.environ.get("WORLD_SIZE", "1")) > 1  # each must run as often
    if not stock.code and off and (max(off) > _CLOSE or is_several) and off[0] == 0.0:
        nudged = _differences(stock.losses, _apart(command, {}, 3, is_nudged=True).losses)
    code, text = verdict_of(stock, swapped, off, nudged)
    if is_first():
        if stock.optimizers:
            say(f"\n{' and '.join(stock.optimizers)} against {' and '.join(swapped.optimizers)}")
        if off and stock.optimizers != swapped.optimizers:
            say(_table(stock.losses, swapped.losses, off, nudged if max(off) > _CLOSE else []))
        say(f"\n{text}")
    return code


def verdict_of(stock: Run, swapped: Run, off: list[float], nudged: list[float]) -> tuple[int, str]:
    """The exit code, and what it means. Args: off: relative differences. nudged: those of torch from itself."""
    if stock.code or swapped.code:
        own = f"{stock.code} with torch's optimizers, {swapped.code} with accumfused's"
        return FAILED, f"The script failed, with exit code {own}."
    if stock.optimizers == swapped.optimizers:
        return CANNOT_TELL, "The script makes no optimizer of torch.optim that accumfused has."
    counts = len(stock.losses), len(swapped.losses)
    if not off or counts[0] != counts[1]:
        text = f"The script made {counts[0]} updates with torch's optimizers, and {counts[1]} with accumfused's."
        return FAULTY if off else CANNOT_TELL, text
    if off[0] > 0:
        return CANNOT_TELL, "The losses differ before the first update: the script draws numbers that no seed fixes."
    if max(off) <= _CLOSE:
        return SOUND, f"The losses of {len(off)} updates agree: by {max(off):.1e} at most."
    reach = [*itertools.accumulate(nudged, max)]
    for index, (difference, reached) in enumerate(zip(off, reach, strict=False), 1):
        if difference > max(_CLOSE, _AS_FAR * reached):
            other = f"torch differs from itself, nudged by one rounding, by {reached:.1e}"
            return FAULTY, f"The losses DIFFER: from update {index} on, by {difference:.1e}, where {other}."
    text = f"by {max(off):.1e} at most; torch, nudged by one rounding, by {max(reach, default=0.0):.1e}"
    return SOUND, f"The losses of {len(off)} updates differ no more than torch from itself: {text}."


def _table(losses: list[float], others: list[float], off: list[float], nudged: list[float]) -> str:
    lines = [f"\n{'update':>6}  {'torch':>12}  {'accumfused':>12}  difference" + "  torch, nudged" * bool(nudged)]
    for index, (loss, other, difference) in enumerate(zip(losses, others, off, strict=False), 1):
        own = "".join(f"{each:>15.1e}" for each in nudged[index - 1 : index])
        lines.append(f"{index:>6}  {loss:>12.6g}  {other:>12.6g}  {difference:>10.1e}{own}")
    return "\n".join(lines)


def _differences(losses: list[float], others: list[float]) -> list[float]:
    return [abs(loss - other) / max(abs(loss), 1e-12) for loss, other in zip(losses, others, strict=False)]


def _apart(command: list[str], peers: Peers, number: int, *, is_nudged: bool = False) -> Run:
    """The run of a script in a process of its own. Args: number: of the run, for a meeting place of its own."""
    os.environ["PYTHONHASHSEED"] = "0"
    context: Any = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(there, command, peers, meeting_port(number), is_nudged))
    process.start()
    there.close()
    try:
        run: Run = here.recv()
    except EOFError:  # it died
        process.join()
        return Run([], [], process.exitcode or 1)
    process.join()
    return run


def _run(pipe: Connection, command: list[str], peers: Peers, port: str | None, is_nudged: bool) -> None:
    """Sends the run of a script, which ends within its last update."""
    if port is not None:
        os.environ |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    for stock, fused in peers.items():
        setattr(torch.optim, stock.__name__, fused)
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    backward, since, losses, optimizers = torch.autograd.backward, list[float](), list[float](), dict[str, None]()
    generators: dict[torch.device, torch.Generator] = {}

    def noted(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        first = tensors if isinstance(tensors, Tensor) else tensors[0]
        since.append(float(first.detach().sum()))
        return backward(tensors, *args, **kwargs)

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        optimizers[f"{type(optimizer).__module__.partition('.')[0]}'s {type(optimizer).__name__}"] = None
        if is_nudged:
            nudge(optimizer, generators)
        if since:
            losses.append(sum(since))
            since.clear()
        if len(losses) == _UPDATES:
            pipe.send(Run(losses, [*optimizers]))
            leave(0)

    torch.autograd.backward = noted
    register_optimizer_step_post_hook(stepped)
    code = run_script(command)
    pipe.send(Run(losses, [*optimizers], code))


def meeting_port(number: int) -> str | None:
    """A port at which the processes of a run meet; at torchrun's own they would find what a run before has left there.

    Args:
        number: of the run.

    Returns:
        The same in all processes of a launcher; None without one.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address is None or port is None:
        return None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return str(int(port) + number)
    store, key = TCPStore(address, int(port), is_master=False), f"accumfused audit {number}"
    if is_first():
        with socket.socket() as server:
            server.bind(("", 0))
            store.set(key, str(server.getsockname()[1]))
    return store.get(key).decode()


@torch.no_grad()
def nudge(optimizer: Optimizer, generators: dict[torch.device, torch.Generator]) -> None:
    """Moves half of the weights by one rounding, as another kernel would, and draws from generators of its own."""
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if param.device not in generators:
            generators[param.device] = torch.Generator(param.device).manual_seed(0)
        half = torch.randint(2, param.shape, generator=generators[param.device], device=param.device)
        param.mul_(1 + torch.finfo(param.dtype).eps * half.to(param.dtype))
