"""Fine-tunes one small GPT with every recipe, and says what each holds, costs and reaches.

The model first learns prose: the help texts that CPython carries. Each recipe then trains a copy of it on code, the
modules of CPython's standard library, in windows of 16 micro-batches. All copies see the same bytes and learning rates,
one update of each in turn. Matrix products are in fp32 on a CPU, whose products in bf16 are slow, and in bf16 on a GPU;
"in bf16" is said of what is kept: weights, gradients and states. Another package's recipe is left out and named where
the package is missing, or has no kernel for the device.

python examples/finetune.py [--device cuda --size 500M]: 11M takes half an hour on two cores
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import importlib.util
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from text_data import Batch, collate, paragraphs
from text_model import GPT
from text_watch import live_bytes
from torch import Tensor, nn
from torch.nn import functional as F

import accumfused as af

SAMPLE_BYTES, MICRO_BATCH_SIZE, K = 128, 1, 16
MAX_GRAD_NORM, LR, BETAS = 1.0, 2e-4, (0.9, 0.95)
VALIDATION_SAMPLES, VALIDATION_EVERY = 64, 10
SIZES = {"tiny": (32, 2, 2), "11M": (384, 6, 6), "500M": (1408, 21, 11)}  # width, depth, heads


class Recipe(NamedTuple):
    dtype: torch.dtype  # of the weights, and of the gradients that backward() leaves
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    released: bool = False  # gradients are folded into the window's sums during backward()
    is_optional: bool = False  # another package, which need not be here


def peer(module: str, name: str, **settings: Any) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """An optimizer of another package, which is imported where it is made."""
    return lambda params: getattr(importlib.import_module(module), name)([*params], lr=LR, betas=BETAS, **settings)


def ours(**settings: Any) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    return partial(af.AdamW, lr=LR, betas=BETAS, max_grad_norm=MAX_GRAD_NORM, **settings)


IN_FP32, IN_BF16 = "torch, fp32 weights", "torch, all in bf16"
RECIPES = {
    IN_FP32: Recipe(torch.float32, partial(torch.optim.AdamW, lr=LR, betas=BETAS, fused=True)),
    IN_BF16: Recipe(torch.bfloat16, partial(torch.optim.AdamW, lr=LR, betas=BETAS, fused=True)),
    "torchao, 8-bit states": Recipe(
        torch.bfloat16, peer("torchao.optim", "AdamW8bit", bf16_stochastic_round=True), is_optional=True
    ),
    "bitsandbytes, 8-bit states": Recipe(torch.bfloat16, peer("bitsandbytes.optim", "AdamW8bit"), is_optional=True),
    "accumfused": Recipe(torch.bfloat16, ours()),
    "accumfused, 8-bit states, released": Recipe(torch.bfloat16, ours(state_dtype="8bit"), released=True),
    "accumfused, 8-bit states, no masters, bf16 sums, released": Recipe(
        torch.bfloat16, ours(state_dtype="8bit", master_weights=None, sum_dtype=torch.bfloat16), released=True
    ),
}


# ---- bytes that every CPython carries -------------------------------------------------------------------------------


def code(longest: int) -> tuple[list[Tensor], list[Tensor]]:
    """Samples of the standard library's modules: those to train on, and those of every tenth module, to validate."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    samples: tuple[list[Tensor], list[Tensor]] = [], []
    for index, file in enumerate(files):
        text = file.read_bytes()
        pieces = [text[begin : begin + longest] for begin in range(0, len(text) - longest, longest)]
        samples[index % 10 == 0].extend(torch.tensor(list(piece)) for piece in pieces)
    return samples


def windows(samples: list[Tensor], seed: int) -> Iterator[list[Batch]]:
    """K micro-batches at a time, without end; the same ones from the same seed."""
    draws = random.Random(seed)
    while True:
        yield [collate(draws.sample(samples, MICRO_BATCH_SIZE)) for _ in range(K)]


# ---- one update ------------------------------------------------------------------------------------------------------


def loss_of(model: GPT, batch: Batch) -> Tensor:
    """The mean cross-entropy, in nats per byte."""
    inputs, targets = (x.to(model.norm.weight.device) for x in batch[:2])
    if inputs.is_cuda:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(inputs)
    else:
        weights = {name: param.float() for name, param in model.named_parameters()}
        logits = torch.func.functional_call(model, weights, (inputs,))
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train(
    model: GPT, recipe: Recipe, batches: Iterator[list[Batch]], factor: Callable[[int], float], look: Callable[[], None]
) -> Iterator[None]:
    """One update per `next()`. `look` is called where the most is held: between backward and what follows it."""
    params = [*model.parameters()]
    optimizer = recipe.make(params)
    if recipe.released:
        assert isinstance(optimizer, af.FusedOptimizer)
        af.release_gradients(optimizer)
    for update in itertools.count():
        for group in optimizer.param_groups:
            lr = LR * factor(update)  # torchao keeps it in a tensor
            group["lr"].fill_(lr) if isinstance(group["lr"], Tensor) else group.update(lr=lr)
        for batch in next(batches):
            loss = loss_of(model, batch)
            if not isinstance(optimizer, af.FusedOptimizer):
                (loss / K).backward()
                look()
            elif recipe.released:
                optimizer.backward(loss, weight=1)  # the mean over micro-batches
                look()
            else:
                loss.backward()
                look()
                optimizer.accumulate(weight=1)
        if not isinstance(optimizer, af.FusedOptimizer):
            torch.nn.utils.clip_grad_norm_(params, MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        yield


@torch.no_grad()
def validate(model: GPT, samples: list[Tensor]) -> float:
    chosen = random.Random(0).sample(samples, VALIDATION_SAMPLES)
    parts = [chosen[begin : begin + 32] for begin in range(0, len(chosen), 32)]
    return sum(loss_of(model, collate(part)).item() for part in parts) / len(parts)


def schedule(updates: int) -> Callable[[int], float]:
    """A tenth of the updates up, then down to nothing, linearly."""
    warmup = max(1, updates // 10)
    return lambda update: min((update + 1) / warmup, (updates - update) / max(1, updates - warmup))


# ---- all recipes -----------------------------------------------------------------------------------------------------


def most_bytes(model: GPT, recipe: Recipe, samples: list[Tensor]) -> tuple[int, int]:
    """The most that tensors hold in two updates of an open window, and on a GPU the allocator's peak with activations.

    The first is looked at after each backward(): what backward() frees again is in the second alone.
    """
    seen, peak = [0], 0
    gc.collect()  # what the recipe before has left
    before = live_bytes()  # the other copies of the model
    allocated = torch.cuda.memory_allocated()  # 0 without a GPU
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    run = train(
        copy.deepcopy(model).to(recipe.dtype), recipe, windows(samples, 1), lambda _: 1.0,
        lambda: seen.append(live_bytes() - before),
    )  # fmt: skip
    for _ in range(2):  # the first one makes the states
        next(run)
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() - allocated
    return max(seen), peak


class Result(NamedTuple):
    bytes_per_parameter: float
    peak_gb: float  # of the GPU's allocator; 0 without one
    seconds: list[float]  # of each update
    losses: list[float]  # on the validation samples: before the first update, and after every so many


def compare(size: str, device: str, pretraining: int, updates: int) -> tuple[dict[str, Result], dict[str, str]]:
    """Results of the recipes that run here, and why others do not."""
    torch.manual_seed(0)
    width, depth, heads = SIZES[size]
    start = GPT(SAMPLE_BYTES, width, depth, heads).to(device)
    count = sum(param.numel() for param in start.parameters())
    prose = [sample for sample in paragraphs(SAMPLE_BYTES) if len(sample) == SAMPLE_BYTES]
    samples, validation = code(SAMPLE_BYTES)
    print(f"{count / 1e6:.1f}M parameters on {device}; samples: prose {len(prose)}, code {len(samples)}", flush=True)
    first = train(start, RECIPES[IN_FP32], windows(prose, 0), lambda update: min(5.0, (update + 1) / 4), lambda: None)
    for _ in range(pretraining):
        next(first)
    first.close()
    start.zero_grad()
    print(f"after {pretraining} updates on prose: {validate(start, validation):.4f} nats per byte of code", flush=True)

    results, missing, models, runs = dict[str, Result](), dict[str, str](), {}, {}
    for name, recipe in RECIPES.items():
        try:
            held, peak = most_bytes(start, recipe, samples)
        except Exception as error:
            if not recipe.is_optional:
                raise
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
            continue
        models[name] = copy.deepcopy(start).to(recipe.dtype)
        runs[name] = train(models[name], recipe, windows(samples, 2), schedule(updates), lambda: None)
        results[name] = Result(held / count, peak / 1e9, [], [validate(models[name], validation)])
    for update in range(updates):
        for name in [*runs] if update % 2 else reversed([*runs]):  # none is always the first
            began = perf_counter()
            next(runs[name])
            if device == "cuda":
                torch.cuda.synchronize()
            results[name].seconds.append(perf_counter() - began)
            if (update + 1) % VALIDATION_EVERY == 0 or update + 1 == updates:
                results[name].losses.append(validate(models[name], validation))
    return results, missing


def table(results: dict[str, Result], missing: dict[str, str]) -> str:
    """In Markdown."""
    reference = results[IN_FP32].losses[-1]
    stock = median(results[IN_BF16].seconds)
    head = "| recipe | bytes per parameter | peak, GB | loss at the end | above fp32 | s per update | of torch's bf16 |"
    columns = head.count("|") - 1
    lines = [head, "|---" * columns + "|"]
    for name, (held, peak, seconds, losses) in results.items():
        time, above = median(seconds), losses[-1] - reference
        numbers = f"{losses[-1]:.4f} | {above:+.4f} | {time:.3f} | {time / stock:.3f}"
        lines.append(f"| {name} | {held:.2f} | {f'{peak:.2f}' if peak else '-'} | {numbers} |")
    lines += [f"| {name}: left out, {reason} {'| ' * columns}" for name, reason in missing.items()]
    return "\n".join(lines)


# In the order of RECIPES: torch's greys, other packages', our blues.
COLOURS = ("#4d4d4d", "#9a9a9a", "#c98b2b", "#8f6bb3", "#9ecae1", "#4292c6", "#08519c")


def draw(results: dict[str, Result], file: Path) -> None:
    """Validation losses above those of fp32 weights, and bytes per parameter."""
    import matplotlib.pyplot as plt

    colours = dict(zip(RECIPES, COLOURS, strict=True))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(3, 2), layout="constrained")
    updates = [0, *range(VALIDATION_EVERY, len(results[IN_FP32].seconds) + VALIDATION_EVERY, VALIDATION_EVERY)]
    for name, result in results.items():
        above = [loss - fp32 for loss, fp32 in zip(result.losses, results[IN_FP32].losses, strict=True)]
        width = 6 if name in (IN_FP32, IN_BF16) else 2  # others lie on these
        left.plot(updates[: len(above)], above, color=colours[name], label=name, linewidth=width)
    left.set(xlabel="update", title="validation loss above that of fp32 weights, nats per byte")
    left.legend(frameon=False, fontsize=8)
    names = [*results][::-1]
    bars = right.barh(range(len(names)), [results[name].bytes_per_parameter for name in names])
    for bar, name in zip(bars, names, strict=True):
        bar.set_color(colours[name])
    right.bar_label(bars, fmt="%.1f", padding=3)
    right.set(yticks=[], title="bytes per parameter in an open window", xlim=(0, 20))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", choices=SIZES, default="11M")
    parser.add_argument("--pretraining", type=int, default=150, help="updates on prose (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=80, help="of each recipe (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--picture", type=Path, help="where the picture goes, if matplotlib is here")
    args = parser.parse_args()
    results, missing = compare(args.size, args.device, args.pretraining, args.updates)
    print(table(results, missing))
    if args.json:
        args.json.write_text(json.dumps({name: result._asdict() for name, result in results.items()}, indent=1))
    if args.picture and importlib.util.find_spec("matplotlib") is not None:
        draw(results, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
