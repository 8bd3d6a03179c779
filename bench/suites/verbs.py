"""Each verb alone, called on the backend: no host code of the optimizer is in the time."""

from __future__ import annotations

import math

import torch

from accumfused.backends import select
from accumfused.backends.base import OVERWRITE, Fold, Scaling
from accumfused.plan import Grads
from bench.measure import Variant, interleave
from bench.report import Table, timed
from bench.shapes import gpt2
from bench.suites import Bench
from bench.workload import MAX_GRAD_NORM, Workload, random_tensors

_READY = 0  # index of the weight 1


def run(bench: Bench) -> list[Table]:
    shapes = gpt2(64, 2, 512, 64) if bench.quick else gpt2()
    work = Workload(shapes)
    grads_bf16 = random_tensors(shapes, 1e-3, torch.bfloat16)
    accumulators = random_tensors(shapes, 1e-3)
    optimizer = work.ours()
    plan = optimizer._plan()
    backend = select("auto", [torch.device("cpu")])
    rows = len(shapes)
    partials = torch.zeros(plan.chunks)
    weights = torch.ones(8, dtype=torch.float64)
    scaling = Scaling(plan.device, takes_norm=True, max_grad_norm=MAX_GRAD_NORM)
    hypers = [rule.hyper_values(group) for rule, group in zip(plan.rules, optimizer.param_groups, strict=True)]
    grads_fp32: Grads = [*work.grads]
    outcome = backend.norm(plan, grads_fp32, partials, scaling)
    exact = math.sqrt(sum(float(grad.double().square().sum()) for grad in work.grads))
    difference = abs(float(outcome.norm) / exact - 1.0)
    stock_difference = abs(float(torch.nn.utils.get_total_norm(work.grads)) / exact - 1.0)

    def accumulate(grads: list[torch.Tensor], held: int) -> None:
        fold = Fold(list(grads), list(accumulators), [held] * rows, weights, _READY, 1.0)
        backend.accumulate(plan, fold, partials)

    variants = [
        Variant("norm", lambda: backend.norm(plan, grads_fp32, partials, scaling), passes=("read",)),
        Variant("accumulate, fp32", lambda: accumulate(work.grads, _READY), passes=("accumulate",)),
        Variant("first accumulate, bf16", lambda: accumulate(grads_bf16, OVERWRITE), passes=("overwrite_bf16",)),
        Variant("accumulate, bf16", lambda: accumulate(grads_bf16, _READY), passes=("accumulate_bf16",)),
        Variant("step, AdamW", lambda: backend.step(plan, grads_fp32, hypers, outcome), passes=("step",)),
    ]
    timings = interleave(variants, 2 * bench.rounds, bench.ceilings)
    table = timed(f"verbs, GPT-2 124M, backend {backend.name}", timings, work.count, bench.ceilings)
    table.notes.append(
        f"relative error of the norm against fp64: {difference:.1e}; of torch's get_total_norm: {stock_difference:.1e}"
    )
    return [table]
