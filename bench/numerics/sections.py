"""All measurements of the report, as tables; each row also carries the numbers that its text was made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.numerics import codec_study, contenders, equal, moments, peers, rounding, text, tiny_steps
from bench.numerics.tasks import Task, run_all
from bench.report import Column, Row, Table

Rows = list[dict[str, Any]]


def measure(quick: bool, processes: int, only: set[str] | None = None) -> dict[str, list[Table]]:
    """Section -> tables, for all sections or those named; a peer that does not run becomes a note."""
    wanted = {name: tasks for name, (tasks, _) in SECTIONS.items() if only is None or name in only}
    return _measure({name: make(quick) for name, make in wanted.items()}, processes)


def measure_briefly(quick: bool, processes: int, with_peers: bool) -> dict[str, list[Table]]:
    """Weights and states alone, in seconds: of fewer elements, so what is random shows a larger statistical error."""
    weights, states = (
        [*(_peers(known, quick=True) if with_peers else []), *(each.name for each in ours)]
        for known, ours in ((peers.WEIGHTS, contenders.weight_formats()), (peers.STATES, contenders.state_formats()))
    )
    most, elements, count, after = (1 << 13, 1 << 10, 10, (100,)) if quick else (1 << 16, 1 << 12, 100, (1000,))
    tasks: dict[str, list[Task]] = {
        "weights": [(tiny_steps.displacement, (name, quick, most)) for name in weights],
        "states": [
            task
            for name in states
            for task in ((moments.largest_updates, (name, elements, count)), (moments.zeros, (name, after)))
        ],
    }
    tasks["weights"] += [(tiny_steps.decay, (name, quick)) for name in weights]
    return _measure(tasks, processes)


def _measure(wanted: dict[str, list[Task]], processes: int) -> dict[str, list[Table]]:
    tasks = [(name, task) for name, own in wanted.items() for task in own]
    results = run_all([task for _, task in tasks], processes)
    found: dict[str, Results] = {name: [] for name in wanted}
    for (name, task), result in zip(tasks, results, strict=True):
        found[name].append((task, result))
    return {name: SECTIONS[name][1](results) for name, results in found.items()}


def _text_tasks(quick: bool) -> list[Task]:
    sizes = (2, 400) if quick else ()
    return [(text.train, (name, seed, *sizes)) for seed in text.SEEDS for name in text.FORMATS]


def _weight_tasks(quick: bool) -> list[Task]:
    names = [*_peers(peers.WEIGHTS, quick), *(each.name for each in contenders.weight_formats())]
    return [(measured, (name, quick)) for name in names for measured in (tiny_steps.displacement, tiny_steps.decay)]


def _state_tasks(quick: bool) -> list[Task]:
    ours = [each.name for each in contenders.state_formats()]
    names = [*_peers(peers.STATES, quick), *ours, "torch.optim.AdamW, bf16"]
    measured: list[Task] = []
    for name in names:
        measured.append((moments.largest_updates, (name, 1 << 12, 20) if quick else (name,)))
        measured.append((moments.zeros, (name, (300,) if quick else (1000, 3000))))
    return measured


def _equal_tasks(quick: bool) -> list[Task]:
    return [(equal.against_fp32, (rule, 1 << 12, 20) if quick else (rule,)) for rule in equal.RULES]


def _study_tasks(quick: bool) -> list[Task]:
    return [(codec_study.study, (block, quick)) for block in codec_study.BLOCKS]


def _rounding_tasks(quick: bool) -> list[Task]:
    return [(rounding.statistics, (quick,))]


def _weights(results: list[tuple[Task, Any]]) -> list[Table]:
    moved, decayed, notes = [], [], []
    for (function, (name, *_)), result in _ours_first(results):
        if isinstance(result, str):
            notes += _left_out(name, result) if function is tiny_steps.displacement else []
        elif function is tiny_steps.decay:
            decayed.append(result)
        else:
            row: Row = {"name": name, "bytes": result[0]["bytes"], "cells": result}
            for cell in result:
                row[_cell(cell)] = f"{100 * cell['bias']:+.4f}% ± {100 * cell['bias_error']:.4f}"
                row[f"error {_cell(cell)}"] = _percent(cell["error"])
            moved.append(row)
    cells = [(size, lr) for size in tiny_steps.SIZES for lr in tiny_steps.LEARNING_RATES]
    steps = f"{moved[0]['cells'][0]['steps'] if moved else 'no'} steps of AdamW"
    headings = {f"{size:g} {lr:g}": f"|w| {size:g}, lr {lr:g}" for size, lr in cells}
    first = [Column("name", "weights"), Column("bytes", "B/param", "{:g}")]
    notes += [f"{package} {_version(package)}" for package in dict.fromkeys(p.package for p in peers.WEIGHTS.values())]
    return [
        Table(f"Tiny steps: the bias of the mean displacement, against fp64, after {steps}",
              [*first, *(Column(key, heading) for key, heading in headings.items())], moved, notes),
        Table("The same: an element's error, root mean square, over the displacement's",
              [*first, *(Column(f"error {key}", heading) for key, heading in headings.items())], moved),
        Table("Weight decay alone (lr 1e-3, weight decay 0.1): what is left of the weights",
              [Column("name", "weights"), Column("ratio", "ratio", "{:.5f}"), Column("exact", "exact", "{:.5f}"),
               Column("difference", "difference", "{:+.1e}")], decayed),
    ]  # fmt: skip


def _states(results: list[tuple[Task, Any]]) -> list[Table]:
    largest, vanishing, notes = [], [], []
    for (function, (name, *_)), result in _ours_first(results):
        if isinstance(result, str):
            notes += _left_out(name, result) if function is moments.zeros else []
        elif function is moments.zeros:
            vanishing.append(result)
        else:
            row: Row = {"name": name, "kinds": result}
            for cell in result:
                row[cell["gradients"]] = f"{cell['largest']:.3g}x {_percent(cell['error'])} {_percent(cell['drift'])}"
            largest.append(row)
    notes += [f"{package} {_version(package)}" for package in dict.fromkeys(p.package for p in peers.STATES.values())]
    after = [key for key in (vanishing[0] if vanishing else {}) if key.startswith("after")]
    return [
        Table("Updates from stored moments: largest |update| over the exact one's; error of updates; of their sum",
              [Column("name", "moments"), *(Column(kind, kind) for kind in codec_study.KINDS)], largest, notes),
        Table("Zero gradients: largest |update| without any gradient; second moment after N zeros, over the exact",
              [Column("name", "moments"), Column("from_start", "largest |update|", "{:g}"),
               *(Column(key, key, "{:.3f}") for key in after)], vanishing),
    ]  # fmt: skip


def _study(results: list[tuple[Task, Any]]) -> list[Table]:
    by_format: dict[tuple[int, str], Row] = {}
    for _, cells in results:
        for cell in cells:
            row = by_format.setdefault(
                (cell["block"], cell["format"]), {"block": cell["block"], "format": cell["format"]}
            )
            row[cell["gradients"]] = f"{cell['largest']:.2f}x {_percent(cell['error'])}"
            row.setdefault("kinds", []).append(cell)
    columns = [Column("format", "first moment; second moment"), Column("block", "block")]
    columns += [Column(kind, kind) for kind in codec_study.KINDS]
    title = "8-bit formats, simulated: largest |update| over the exact one's; error of updates, root mean square"
    return [Table(title, columns, list(by_format.values()))]


def _equal(results: list[tuple[Task, Any]]) -> list[Table]:
    columns = [
        Column("rule", "rule"),
        Column("name", "weights"),
        Column("steps", "steps"),
        Column("elements", "elements"),
        Column("differing", "masters that differ from fp32"),
        Column("not_nearest", "parameters that are not nearest"),
    ]
    return [Table("Masters against fp32 training, bit for bit", columns, [row for _, rows in results for row in rows])]


def _rounding(results: list[tuple[Task, Any]]) -> list[Table]:
    columns = [
        Column("what", "stochastic rounding"),
        Column("draws", "draws", "{:,}"),
        Column("value", "found", "{:+.2e}"),
        Column("sigma", "standard deviation", "{:.2e}"),
        Column("sigmas", "in standard deviations", "{:+.2f}"),
    ]
    return [Table("Stochastic rounding: what should be zero", columns, [row for _, rows in results for row in rows])]


def _text(results: list[tuple[Task, Any]]) -> list[Table]:
    runs = [result for _, result in results]
    rows: Rows = text.summary(runs)
    for row in rows:
        row["finals"] = "  ".join(f"{final:.3f}" for final in row["final"])
        row["verdict"], row["inside"] = ("yes" if row[key] else "no" for key in ("within", "mean_within"))
        row["runs"] = [run for run in runs if run["name"] == row["name"]]
    columns = [
        Column("name", "format"),
        Column("bytes", "B/param", "{:g}"),
        Column("finals", "final loss, by seed"),
        Column("mean", "mean", "{:.4f}"),
        Column("apart", "mean - fp32's", "{:+.4f}"),
        Column("furthest", "furthest of a seed", "{:+.4f}"),
        Column("verdict", "every seed closer than fp32's spread"),
        Column("inside", "mean within fp32's range"),
    ]
    spread = rows[0]["spread"]
    notes = [f"fp32's final losses spread by {spread:.4f} over the seeds; bytes: weight, moments and an accumulator"]
    return [Table("Training on real text: loss on held-out text, nats per byte", columns, rows, notes)]


def _peers(known: dict[str, peers.Peer], quick: bool) -> list[str]:
    """With --quick without those that take their time."""
    return [name for name, peer in known.items() if not (quick and peer.compiles)]


def _ours_first(results: list[tuple[Task, Any]]) -> list[tuple[Task, Any]]:
    """Peers run first, for they take longest, and stand last."""
    return sorted(results, key=lambda pair: pair[0][1][0] in peers.WEIGHTS or pair[0][1][0] in peers.STATES)


def _percent(error: float) -> str:
    """A relative error."""
    return f"{error:.1e} times" if error >= 100 else f"{100 * error:.3g}%"


def _left_out(name: str, reason: str) -> list[str]:
    why = reason.splitlines()[0].rsplit(" (", 1)[0]  # without where in the peer's code it was
    return [f"left out: {name}: {why[:200]}"]


def _version(package: str) -> str:
    try:
        return peers.version(package)
    except ImportError:
        return "is not installed"


def _cell(cell: dict[str, Any]) -> str:
    return f"{cell['size']:g} {cell['lr']:g}"


Results = list[tuple[Task, Any]]
SECTIONS: dict[str, tuple[Callable[[bool], list[Task]], Callable[[Results], list[Table]]]] = {
    "text": (_text_tasks, _text),
    "weights": (_weight_tasks, _weights),
    "states": (_state_tasks, _states),
    "codes": (_study_tasks, _study),
    "equal": (_equal_tasks, _equal),
    "rounding": (_rounding_tasks, _rounding),
}
