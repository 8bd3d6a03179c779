"""`python -m bench.counters`: bytes per parameter that our kernels move on a GPU, as its own counters say.

Reads dram__bytes_read and dram__bytes_write by Nsight Compute (ncu) for GPT-2 124M, beside what the arithmetic needs.
Where ncu is not there, or may not read the counters, it says so.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Iterable

import torch

from accumfused.backends import why_not
from bench import shapes
from bench.workload import Workload

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
BUDGET = {"accumulate": (8, 4), "norm": (4, 0), "step": (16, 12)}  # bytes per parameter, fp32


def measured() -> None:
    """What ncu watches: for each backend one window of two fp32 gradients, then one step from p.grad."""
    device = torch.device("cuda", 0)
    work = Workload(shapes.model(shapes.GPT2), device)
    second = work.random()
    for backend in ("cuda", "triton"):
        if why_not(backend, device) is not None:
            continue
        optimizer = work.ours(backend)
        for grads in (work.grads, second):
            work.set_grads(grads)
            optimizer.accumulate()
        optimizer.step()
        work.set_grads()
        optimizer.step()
        torch.cuda.synchronize()


def parse(text: str) -> list[tuple[str, dict[str, float]]]:
    """ncu's CSV -> (kernel, metric -> bytes) of each launch, in order."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches: dict[str, tuple[str, dict[str, float]]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[first:]))):
        _, found = launches.setdefault(row["ID"], (row["Kernel Name"], {}))
        found[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    return list(launches.values())


def table(launches: Iterable[tuple[str, dict[str, float]]], parameters: int) -> list[str]:
    lines = [f"{'kernel':<44}{'read':>8}{'written':>9}{'needed':>12}   bytes per parameter"]
    for kernel, found in launches:
        verb = next((verb for verb in BUDGET if f"{verb}_kernel" in kernel), None)
        if verb is None or not all(metric in found for metric in METRICS):
            continue
        read, written = (found[metric] / parameters for metric in METRICS)
        needed = "{} + {}".format(*BUDGET[verb])
        lines.append(f"{kernel.split('(')[0][-42:]:<44}{read:8.2f}{written:9.2f}{needed:>12}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.counters", description=__doc__)
    parser.add_argument("--measured", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().measured:
        measured()
        return
    if not torch.cuda.is_available():
        sys.exit(f"not counted: torch {torch.__version__} finds no GPU that it can use")
    ncu = shutil.which("ncu")
    if ncu is None:
        sys.exit("not counted: ncu (Nsight Compute) is not on the PATH")
    command = [ncu, "--csv", "--print-units", "base", "--clock-control", "none", "--metrics", ",".join(METRICS)]
    command += [
        "--kernel-name",
        "regex:(accumulate|norm|step)_kernel",
        sys.executable,
        "-m",
        "bench.counters",
        "--measured",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    launches = parse(done.stdout)
    if done.returncode != 0 or not launches:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("==ERROR==")]
        sys.exit(f"not counted: ncu gave none: {' '.join(said) or done.stderr.strip()[-500:]}")
    print(f"{torch.cuda.get_device_name()}, {shapes.GPT2}; the norm of a finished window reads nothing")
    print("\n".join(table(launches, shapes.count(shapes.model(shapes.GPT2)))))


if __name__ == "__main__":
    main()
