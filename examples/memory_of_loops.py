"""What a window keeps in memory, loop by loop: python examples/memory_of_loops.py [--quick]

Each loop trains in a process of its own. The peak is the kernel's count of resident pages over the second
update, less what was resident before the model was made. glibc gives every freed tensor back at once here
(MALLOC_MMAP_THRESHOLD_), so the peak is that of live tensors. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import accumfused as af

WIDTH, LAYERS, CLASSES, STEPS = 512, 8, 64, 2
RELEASE_BYTES = 4 << 20  # smaller than the default of 32 MiB on a CPU, as the model is

# Name: the parameters' dtype, the optimizer, and whether gradients are released during backward.
LOOPS: dict[str, tuple[torch.dtype, Callable[[Any], torch.optim.Optimizer], bool]] = {
    "fp32: autograd, AdamW(fused)": (torch.float32, lambda p: torch.optim.AdamW(p, fused=True), False),
    "fp32: accumulate()": (torch.float32, lambda p: af.AdamW(p, max_grad_norm=1.0), False),
    "fp32: released": (torch.float32, lambda p: af.AdamW(p, max_grad_norm=1.0), True),
    "bf16: autograd, AdamW(fused), all in bf16": (torch.bfloat16, lambda p: torch.optim.AdamW(p, fused=True), False),
    "bf16: accumulate()": (torch.bfloat16, lambda p: af.AdamW(p, max_grad_norm=1.0), False),
    "bf16: released": (torch.bfloat16, lambda p: af.AdamW(p, max_grad_norm=1.0), True),
    "bf16: released, 8-bit states": (
        torch.bfloat16, lambda p: af.AdamW(p, max_grad_norm=1.0, state_dtype="8bit"), True,
    ),
    "bf16: released, 8-bit states, no masters": (
        torch.bfloat16, lambda p: af.AdamW(p, max_grad_norm=1.0, state_dtype="8bit", master_weights=None), True,
    ),
    "bf16: released, 8-bit states, no masters, bf16 sums": (
        torch.bfloat16,
        lambda p: af.AdamW(
            p, max_grad_norm=1.0, state_dtype="8bit", master_weights=None, sum_dtype=torch.bfloat16
        ),
        True,
    ),
}  # fmt: skip


def resident(name: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (the peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name + ":")).split()[1])


def measure(loop: str, samples: int, layers: int) -> tuple[float, int]:
    """The peak in bytes, and the number of parameters."""
    dtype, make, released = LOOPS[loop]
    torch.set_num_threads(1)
    warm_up(make)
    before = resident("VmRSS")
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(layers)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES)).to(dtype)
    optimizer = make(model.parameters())
    release: Any = contextlib.nullcontext()
    if released and isinstance(optimizer, af.FusedOptimizer):
        release = af.release_gradients(optimizer, bucket_bytes=RELEASE_BYTES)
    with release:
        window(model, optimizer, samples)  # makes the states
        Path("/proc/self/clear_refs").write_text("5")
        window(model, optimizer, samples)
    return resident("VmHWM") - before, sum(param.numel() for param in model.parameters())


def warm_up(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """What the first call of each kind loads is no tensor of the loop."""
    for dtype in (torch.float32, torch.bfloat16):
        small = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True).to(dtype)
        small(torch.zeros(1, 2, 16, dtype=dtype)).sum().backward()
    param = nn.Parameter(torch.zeros(8192))
    param.grad = torch.ones(8192)
    torch.nn.utils.clip_grad_norm_([param], 1.0)
    make([param]).step()


def window(model: nn.Module, optimizer: torch.optim.Optimizer, samples: int) -> None:
    for _ in range(STEPS):
        loss = loss_of(model, samples)
        if isinstance(optimizer, af.FusedOptimizer):
            optimizer.backward(loss, weight=samples)
        else:
            (loss / STEPS).backward()
        del loss
    if not isinstance(optimizer, af.FusedOptimizer):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def loss_of(model: nn.Module, samples: int) -> Tensor:
    """The mean over sequences of 8 tokens, of random numbers."""
    x = torch.randn(samples, 8, WIDTH, dtype=next(model.parameters()).dtype)
    return F.cross_entropy(model(x).flatten(0, 1).float(), torch.randint(CLASSES, (samples * 8,)))


def in_a_process(loop: str, samples: int, layers: int) -> tuple[float, int]:
    command = [sys.executable, __file__, "--loop", loop, "--samples", str(samples), "--layers", str(layers)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    peak, parameters = json.loads(done.stdout)
    return peak, parameters


def main(layers: int, sizes: Sequence[int]) -> dict[str, list[float]]:
    """For each loop the peaks in MB at these sizes of micro-batch, and the first one in bytes per parameter."""
    found = {}
    print(f"{'peak, MB':46}{'samples:':>8}", *(f"{size:7}" for size in sizes), " bytes per parameter", sep="")
    for loop in LOOPS:
        peaks, parameters = zip(*(in_a_process(loop, size, layers) for size in sizes), strict=True)
        found[loop] = [*(peak / 1e6 for peak in peaks), peaks[0] / parameters[0]]
        print(f"{loop:54}", *(f"{peak / 1e6:7.0f}" for peak in peaks), f"{found[loop][-1]:20.1f}", sep="", flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, which shows that everything runs")
    parser.add_argument("--loop", choices=LOOPS)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--layers", type=int, default=LAYERS)
    chosen = parser.parse_args()
    if chosen.loop is not None:
        print(json.dumps(measure(chosen.loop, chosen.samples, chosen.layers)))
    elif chosen.quick:
        main(layers=1, sizes=[1])
    else:
        print("about 50 minutes on two cores without bf16 instructions; --quick shows that all runs", flush=True)
        main(layers=LAYERS, sizes=[1, 64, 128])
