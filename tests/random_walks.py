"""Random walks over the public calls, against the float64 model of docs/state-machine.md in walks/.

    python tests/random_walks.py --minutes 60 --seed 0

walks until a call does something else than the model says, and prints the seed, the configuration, and the shortest
list of calls that still does it. A walk depends on its seed alone.
"""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import pprint
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from walks.draw import Walk, drawn
from walks.moves import KNOWN
from walks.subject import Finding
from walks.world import World


def walked(
    walk: Walk, known: frozenset[str] = KNOWN, after: Callable[[World], None] = lambda world: None
) -> tuple[int, BaseException] | None:
    """The number of the call that is a finding, and what it was; None if all went as the model says.

    Args:
        after: is called after each call.
    """
    torch.set_num_threads(walk.config["threads"])
    number = -1
    try:
        world = World(copy.deepcopy(walk.config), known)
        for name, arguments in walk.calls:
            number += 1
            world.call(name, arguments)
            after(world)
            if not world.is_finite():
                break  # by nonfinite="propagate": everything is NaN from here on
    except Exception as error:  # of any kind: none is documented that the model has not asked for
        return number, error
    finally:
        torch.set_num_threads(1)
    return None


def differing(walk: Walk, known: frozenset[str] = KNOWN) -> int | None:
    """The number of the call after which two backends' parameters have different bits; None if they never do."""
    bits: list[list[list[Any]]] = []
    for backend in ("cpu", "torch"):
        config = copy.deepcopy(walk.config)
        for part in [config, config.get("mate", config)]:
            part["settings"]["backend"] = backend
        calls = [(n, {**a, "backend": backend} if "backend" in a else a) for n, a in walk.calls]
        bits.append([])

        def see(world: World, seen: list[list[Any]] = bits[-1]) -> None:
            params = [param.detach() for side in world.sides for param in side.params]
            seen.append([p.nan_to_num(7e4).flatten().tolist() for p in params])

        walked(Walk(config, calls), known, see)
    one, other = bits
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)


def same(one: BaseException, other: BaseException) -> bool:
    def kind(error: BaseException) -> tuple[type, str]:
        return type(error), "".join(c for c in str(error) if c.isalpha())[:24]

    return kind(one) == kind(other)


def shrunk(walk: Walk, known: frozenset[str] = KNOWN) -> Walk:
    """Calls, and then parameters, are taken out as long as the finding stays what it is."""
    found = walked(walk, known)
    if found is None:
        return walk
    walk = Walk(walk.config, walk.calls[: found[0] + 1])

    def holds(candidate: Walk) -> bool:
        again = walked(candidate, known)
        return again is not None and same(again[1], found[1])

    size = max(1, len(walk.calls) // 2)
    while size:
        start, removed = 0, False
        while start < len(walk.calls):
            candidate = Walk(walk.config, walk.calls[:start] + walk.calls[start + size :])
            if holds(candidate):
                walk, removed = candidate, True
            else:
                start += size
        size = size if removed and size == 1 else size // 2
    for row in reversed(range(len(walk.config["params"]))):
        params = walk.config["params"][:row] + walk.config["params"][row + 1 :]
        candidate = Walk({**walk.config, "params": params, "cut": 0}, walk.calls)
        if params and holds(candidate):
            walk = candidate
    for setting in list(walk.config["settings"]):
        settings = {k: v for k, v in walk.config["settings"].items() if k != setting}
        candidate = Walk({**walk.config, "settings": settings}, walk.calls)
        if holds(candidate):
            walk = candidate
    return walk


def report(seed: int, walk: Walk, found: tuple[int, BaseException], known: frozenset[str]) -> str:
    if any(walked(walk, known) is None for _ in range(5)):
        calls = "\n".join(f"  {name}({arguments})" for name, arguments in walk.calls[: found[0] + 1])
        head = f"seed {seed}: call {found[0]}: {type(found[1]).__name__}: {found[1]}: not in each run"
        return f"{head}\n{pprint.pformat(walk.config, width=120)}\n{calls}"
    smallest = shrunk(walk, known)
    number, error = walked(smallest, known) or found
    trace = "" if isinstance(error, Finding) else "".join(traceback.format_exception(error)[-3:])
    lines = [f"seed {seed}: call {number}: {type(error).__name__}: {error}", pprint.pformat(smallest.config, width=120)]
    return "\n".join([*lines, *(f"  {name}({arguments})" for name, arguments in smallest.calls), trace])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first walk; each has the next one")
    parser.add_argument("--length", type=int, default=60, help="calls in a walk, at most")
    parser.add_argument("--findings", type=int, default=1, help="end after so many")
    parser.add_argument(
        "--with", dest="tried", action="append", default=[], help="try what is known not to hold; or all"
    )
    options = parser.parse_args()
    known = frozenset() if "all" in options.tried else KNOWN - set(options.tried)
    logging.getLogger("accumfused").setLevel(logging.ERROR)
    import torch._dynamo  # noqa: F401  # which the first backward() would import

    gc.collect()
    gc.freeze()  # each new optimizer looks for BatchNorm among all objects that the collector sees
    end, seed, left = time.monotonic() + 60 * options.minutes, options.seed, options.findings
    while time.monotonic() < end and left:
        walk = drawn(seed, options.length)
        found = walked(walk, known)
        number = differing(walk, known) if found is None and seed % 4 == 0 else None
        if number is not None:
            calls = "\n".join(f"  {name}({arguments})" for name, arguments in walk.calls[: number + 1])
            print(
                f"seed {seed}: backends differ after call {number}:\n{pprint.pformat(walk.config)}\n{calls}", flush=True
            )
            left -= 1
        if found is not None:
            print(report(seed, walk, found, known), flush=True)
            left -= 1
        seed += 1
    gc.unfreeze()
    print(f"{seed - options.seed} walks, {options.findings - left} findings")
    sys.exit(left != options.findings)


if __name__ == "__main__":
    main()
