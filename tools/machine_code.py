"""What the built module holds for GPUs: python tools/machine_code.py [ARCH ...]

Prints, as a Markdown table, each kernel's registers, the occupancy that they allow, its local memory, and its vector
loops: 16-byte loads and stores, and how many instructions one element takes on its way through one. Reads the
module with `cuobjdump`, from the CUDA toolkit or from Triton's wheel.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

THREADS = 256  # of a block: csrc/cuda/policy.h
REGISTERS = 65536  # of a multiprocessor
MOST_THREADS = {75: 1024, 80: 2048, 90: 2048, 100: 2048, 120: 1536}

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
TARGET = re.compile(r"\bBRA(?:\.\w+)*\s.*?(0x[0-9a-f]+)")
NARROW_STORE = re.compile(
    r"(?:@(?P<guard>!?U?P\d+) )?STG\.E(?:\.[A-Z]+)*(?:\.U?(?P<bits>8|16|64))?(?:\.[A-Z]+)* "
    r".*?\[(?P<base>R\d+)(?:\.U?\d+)?(?:\+(?:UR\d+\+)?(?P<offset>-?0x[0-9a-f]+))?\]"
)
# Integer operations, comparisons, and moves: of 128 instructions a clock, a multiprocessor takes 64 of these.
ALU = re.compile(
    r"^(?:@!?U?P\d+ )?(?:LOP3|PLOP3|SHF|PRMT|IADD3|VIADD|LEA|V?[FI]MNMX3?|ISETP|FSETP|SEL|FSEL|MOV|CS2R|FCHK)\b"
)
_ENDS = re.compile(r"\b(BRA|BSYNC|CALL|RET|EXIT)\b")
RULES = {  # functors' names
    "Sgd": "SGD", "SgdMomentum": "SGD with momentum", "SgdNesterov": "SGD with Nesterov momentum", "Adam": "Adam",
    "AdamAmsgrad": "AMSGrad", "Lion": "Lion",
}  # fmt: skip
NAMES = {
    "segment_norms_kernel": "segment norms",
    **{
        f"{kernel}_kernelILi{size}": name + more
        for kernel, name in (("norm", "norm"), ("write", "table"))
        for size, more in ((3584, ""), (32000, " with a large packet"))
    },
    **{
        f"accumulate_kernelILi{size}ELb{rounds}": name + more
        for rounds, name in ((0, "accumulate"), (1, "accumulate, sums in bf16"))
        for size, more in ((3584, ""), (32000, " with a large packet"))
    },
    **{
        before + f"{len(rule) + 7}{rule}FunctorE": f"step: {name}{formats}"
        for before, formats in (
            ("KindE0ENS0_", ""), ("KindE1ENS0_", " in any format"), ("10PackedRuleINS0_", " in any format"),
        )
        for rule, name in RULES.items()
    },
}  # fmt: skip
# What a pass reads, the gradient included, and what it writes.
STREAMS = {
    "accumulate": (2, 1), "norm": (1, 0), "step: SGD": (2, 1), "step: SGD with momentum": (3, 2),
    "step: SGD with Nesterov momentum": (3, 2), "step: Adam": (4, 3), "step: AMSGrad": (5, 4),
    "step: Lion": (3, 2),
}  # fmt: skip
# The loops for packed formats: loads of 8 bytes and stores of 16, without the states' -> weights; the rest tells the
# gradient.
PACKED = {(1, 1): "split8", (0, 2): "split16", (0, 1): "bf16 stochastic"}


@dataclass
class Loop:
    """An innermost loop with 16-byte loads, or 8-byte ones of 16-bit gradients."""

    loads: int  # of 16 bytes
    half_loads: int  # of 8 bytes
    stores: int  # of 16 bytes
    least: float  # instructions for one element, where neither division nor root takes its slow path
    most: float  # the same, for other hyper-parameters
    uses_local_memory: bool
    alu: float = 0.0  # of `least`, those of the ALU; counted for packed formats


@dataclass
class Kernel:
    name: str
    arch: int
    registers: int
    local_bytes: int  # stack and local memory, spills included
    code: list[tuple[int, str]] = field(default_factory=list)  # address, instruction

    @property
    def occupancy(self) -> float:
        """The share of a multiprocessor's threads that its registers allow."""
        blocks = REGISTERS // (-(-self.registers // 8) * 8 * THREADS)
        return min(1.0, blocks * THREADS / MOST_THREADS[self.arch])

    @property
    def uses_local_memory(self) -> bool:
        return self.local_bytes > 0 or _uses_local_memory(self.code)

    def vector_loops(self) -> Iterator[Loop]:
        """The innermost loops that read and write as the verb does, in wide accesses alone."""
        reads, writes = STREAMS.get(self.name, (0, 0))
        for body in self.innermost_loops():
            accesses = _accesses(body)
            loads = sum("LDG.E.128" in text for text in accesses)
            half_loads = sum("LDG.E.64" in text for text in accesses)
            stores = sum("STG.E.128" in text for text in accesses)
            rows = (loads + half_loads) // reads if reads else 0
            if loads + half_loads + stores == len(accesses) == rows * (reads + writes) > 0 and loads + half_loads > 0:
                ways = _ways(body)
                if ways is not None:
                    local = _uses_local_memory(body)
                    yield Loop(loads, half_loads, stores, ways[0] / (4 * rows), ways[1] / (4 * rows), local)

    def packed_loops(self) -> Iterator[tuple[str, str, str, Loop]]:
        """(states, weights, gradient, loop) of the loops over eight elements; 8-bit states have a shared scale each."""
        states = STREAMS.get(self.name.removesuffix(" in any format"), (0, 1))[1] - 1
        for body in self.innermost_loops():
            accesses = _accesses(body)
            wide, half, stores, half_stores = (
                sum(access in text for text in accesses)
                for access in ("LDG.E.128", "LDG.E.64", "STG.E.128", "STG.E.64")
            )
            scales = sum("LDS.U8" in text for _, text in body)
            if scales not in (0, states) or wide + half + stores + half_stores != len(accesses):
                continue
            if not any(re.search(r"\bIDP\b", text) for _, text in body):  # which adds noise
                continue
            ways, key = _ways(body), (half - scales, stores - states + scales)
            if ways is not None and key in PACKED:
                alu = (_ways(body, ALU) or (0, 0))[0] / 8
                loop = Loop(wide, half, stores, ways[0] / 8, ways[1] / 8, _uses_local_memory(body), alu)
                yield "8-bit" if scales else "bf16", PACKED[key], "fp32" if wide == stores + 2 else "bf16", loop

    def wide_accesses(self) -> tuple[int, int]:
        """Loads and stores of 16 bytes in innermost loops."""
        accesses = [text for body in self.innermost_loops() for text in _accesses(body)]
        return sum("LDG.E.128" in text for text in accesses), sum("STG.E.128" in text for text in accesses)

    def split_stores(self) -> list[str]:
        """Stores that the compiler has split, in innermost loops with wide loads: each to what lies behind the last."""
        found = []
        for body in self.innermost_loops():
            if not any(re.search(r"LDG\.E\.(64|128)", text) for text in _accesses(body)):
                continue
            last: re.Match[str] | None = None
            for _, text in body:
                store = NARROW_STORE.match(text)
                if store is not None:
                    if last is not None and _follows(last, store):
                        found.append(text)
                    last = store
                elif last is not None and (_ENDS.search(text) or _result(text) in (_guard(last), last["base"])):
                    last = None
        return found

    def innermost_loops(self) -> Iterator[list[tuple[int, str]]]:
        loops = [(_target(text), address) for address, text in self.code if -1 < _target(text) < address]
        for first, last in loops:
            if not any(first <= other[0] and other[1] < last for other in loops if other != (first, last)):
                yield [(address, text) for address, text in self.code if first <= address <= last]


def _accesses(body: list[tuple[int, str]]) -> list[str]:
    return [text for _, text in body if re.search(r"\b(LDG|STG|LD|ST)\.E", text)]


def _follows(first: re.Match[str], second: re.Match[str]) -> bool:
    """Whether a store is to the memory behind another's, on the same condition."""
    size = int(first["bits"] or "32") // 8
    begin, end = (int(match["offset"] or "0", 16) for match in (first, second))
    return end == begin + size and all(first[name] == second[name] for name in ("guard", "bits", "base"))


def _guard(store: re.Match[str]) -> str:
    return (store["guard"] or "").lstrip("!")


def _result(text: str) -> str:
    """The register that an instruction writes, or "": predicates too."""
    words = text.split()
    operands = words[2:] if words[0].startswith("@") else words[1:]
    return operands[0].rstrip(",") if operands else ""


def _uses_local_memory(code: list[tuple[int, str]]) -> bool:
    return any(re.search(r"\b(LDL|STL)\b", text) for _, text in code)


def _target(text: str) -> int:
    found = TARGET.search(text)
    return int(found[1], 16) if found else -1


def _ways(body: list[tuple[int, str]], counted: re.Pattern[str] = re.compile("")) -> tuple[int, int] | None:
    """Instructions on the shortest and the longest way through a loop that makes no call, if there is one.

    Counts those that match.
    """
    place = {address: index for index, (address, _) in enumerate(body)}
    ways: list[tuple[int, int] | None] = [(0, 0), *[None] * (len(body) - 1)]
    for index, (_, text) in enumerate(body[:-1]):
        here, count = ways[index], int(counted.match(text) is not None)
        if here is None or re.search(r"\bCALL\b", text):
            continue
        branches = re.search(r"\bBRA\b", text)
        always = branches and not text.startswith("@") and not re.search(r"BRA(?:\.\w+)* !?U?P\d|BRA\.DIV", text)
        for following in {place.get(_target(text), 0) if branches else 0, 0 if always else index + 1}:
            if following > index:
                least, most = ways[following] or (10**9, 0)
                ways[following] = (min(least, here[0] + count), max(most, here[1] + count))
    end, count = ways[-1], int(counted.match(body[-1][1]) is not None)
    return None if end is None else (end[0] + count, end[1] + count)


def module() -> Path:
    """The native module's path; it is not loaded."""
    found = importlib.util.find_spec("accumfused._C")
    if found is None or found.origin is None:
        raise FileNotFoundError("there is no native module; see python -m accumfused")
    return Path(found.origin)


def cuobjdump() -> str | None:
    """The program's path, or None."""
    triton = importlib.util.find_spec("triton")
    folders = [*(triton.submodule_search_locations or [])] if triton else []
    wheels = [str(Path(folder) / "backends/nvidia/bin") for folder in folders]
    return shutil.which("cuobjdump") or next(filter(None, (shutil.which("cuobjdump", path=w) for w in wheels)), None)


def kernels(path: Path, arch: int) -> list[Kernel]:
    """Every kernel that the module holds for a compute capability."""
    program = cuobjdump()
    assert program is not None

    def dump(what: str) -> list[str]:
        command = [program, f"--dump-{what}", "-arch", f"sm_{arch}", str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()

    found: dict[str, Kernel] = {}
    function = ""
    for line in dump("resource-usage"):
        if header := re.match(r"\s*Function (\S+):", line):
            function = header[1]
        elif usage := re.match(r"\s*REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", line):
            name = next((name for part, name in NAMES.items() if part in function), function)
            found[function] = Kernel(name, arch, int(usage[1]), int(usage[2]) + int(usage[3]))
    for line in dump("sass"):
        if header := re.match(r"\s*Function : (\S+)", line):
            function = header[1]
        elif instruction := INSTRUCTION.match(line):
            found[function].code.append((int(instruction[1], 16), instruction[2]))
    return sorted(found.values(), key=lambda kernel: kernel.name)


def table(archs: list[int]) -> str:
    lines = [
        "| kernel | sm | registers | occupancy | local bytes | loads / stores of 16 bytes | instructions per element |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for arch in archs:
        for kernel in kernels(module(), arch):
            fp32 = [loop for loop in kernel.vector_loops() if not loop.half_loads]
            pairs = sorted({f"{loop.loads} / {loop.stores}" for loop in fp32})
            if not pairs and any(kernel.wide_accesses()):
                pairs = ["{} / {} in all".format(*kernel.wide_accesses())]
            count = f"{min(loop.least for loop in fp32):.0f} to {max(loop.most for loop in fp32):.0f}" if fp32 else ""
            lines.append(
                f"| {kernel.name} | {arch} | {kernel.registers} | {kernel.occupancy:.0%} | {kernel.local_bytes} "
                f"| {', '.join(pairs)} | {count} |"
            )
            for states, weights, grad, loop in sorted(kernel.packed_loops(), key=lambda found: found[:3]):
                wide = f"{loop.loads} / {loop.stores}"
                lines.append(
                    f"| ... {weights}, {states} states, {grad} gradients | {arch} | | | | {wide} "
                    f"| {loop.least:.1f}, {loop.alu:.1f} of the ALU |"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table([int(arch) for arch in sys.argv[1:]] or [90]))
