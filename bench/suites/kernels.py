"""Each verb (accumulate, norm, step) alone, called on the backend: the time has no host code of the optimizer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from accumfused.core.protocol import Fold, Scaling
from accumfused.core.rows import Grads
from bench import shapes
from bench.exact import MAX_GRAD_NORM
from bench.measure import Variant
from bench.shapes import Shapes
from bench.suites import Bench
from bench.tables import Table, timed
from bench.workload import Workload

FOLLOWS = ("backend", "model")


def run(bench: Bench) -> list[Table]:
    models = (shapes.GPT2, shapes.LLAMA_1B) if bench.on_gpu else (shapes.VIT,)
    return [_model(bench, name, of) for name, of in bench.models(*models).items()]


def _model(bench: Bench, model: str, of: Shapes) -> Table:
    work = bench.workload(of)
    grads_bf16, accumulators = work.random(dtype=torch.bfloat16), work.random()
    variants, notes, names = [], [], []
    for backend in bench.backends:
        name, some, note = _verbs(work, backend, grads_bf16, accumulators)
        if len(bench.backends) > 1:
            some = [Variant(f"{variant.name}, {name}", variant.run, passes=variant.passes) for variant in some]
            note = f"{name}: {note}"
        names.append(name)
        variants += some
        notes.append(note)
    timings = bench.interleave(variants, 2 * bench.rounds)
    title = f"kernels, {model}, backend{'s' * (len(names) > 1)} {' and '.join(names)}"
    table = timed(title, timings, work.count)
    table.notes += notes
    return table


def _verbs(
    work: Workload, name: str, grads_bf16: list[Tensor], accumulators: list[Tensor]
) -> tuple[str, list[Variant], str]:
    """The backend's name, its verbs, and what was checked."""
    optimizer = work.ours(name)
    plan = optimizer._engine.plans.current()
    backend = plan.backend
    partials = torch.zeros(plan.chunks, device=work.device)
    scaling = Scaling(plan.device, max_grad_norm=MAX_GRAD_NORM)
    hypers = plan.hypers(optimizer.param_groups)
    grads_fp32 = Grads(work.grads)
    outcome = backend.norm(plan, grads_fp32, partials, scaling)
    exact = math.sqrt(sum(float(grad.double().square().sum()) for grad in work.grads))
    difference = abs(float(outcome.norm) / exact - 1.0)
    stock_difference = abs(float(torch.nn.utils.get_total_norm(work.grads)) / exact - 1.0)
    assert difference < 1e-6, f"the norm is {difference:.1e} off"

    def accumulate(grads: list[Tensor], *, overwrites: bool = False) -> None:
        backend.accumulate(plan, Fold(Grads(grads), Grads(accumulators), 1.0, overwrites=overwrites), partials)

    def step() -> None:
        backend.step(plan, grads_fp32, hypers, outcome)

    # Overwriting goes last: what the accumulators hold before does not matter to it.
    for grads, overwrites in ((work.grads, False), (grads_bf16, False), (grads_bf16, True)):
        expected = [
            grad.double() + (0.0 if overwrites else accumulator.double())
            for grad, accumulator in zip(grads, accumulators, strict=True)
        ]
        accumulate(grads, overwrites=overwrites)
        errors = [(x - y).abs().max() for x, y in zip(accumulators, expected, strict=True)]
        error = float(torch.stack(errors).max())
        assert error < 1e-8, f"accumulate is {error:.1e} off"
        del expected
    work.error(step)
    variants = [
        Variant("norm", lambda: backend.norm(plan, grads_fp32, partials, scaling), passes=("read",)),
        Variant("accumulate, fp32", lambda: accumulate(work.grads), passes=("accumulate",)),
        Variant("first accumulate, bf16", lambda: accumulate(grads_bf16, overwrites=True), passes=("overwrite_bf16",)),
        Variant("accumulate, bf16", lambda: accumulate(grads_bf16), passes=("accumulate_bf16",)),
        Variant("step, AdamW", step, passes=("step",)),
    ]
    note = (
        f"relative error of the norm against fp64: {difference:.1e}; of torch's get_total_norm: {stock_difference:.1e}"
    )
    return backend.name, variants, note
