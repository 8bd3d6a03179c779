"""Compiles a rule that the native module does not have, when it first steps on a CPU.

The machine's compiler makes a shared library of csrc/cpu/rule.inl and the rule's functor. It lies in a folder
(ACCUMFUSED_CACHE, or accumfused/ in the user's cache), under a hash of all that it depends on, and later processes load
it from there.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from accumfused import functors
from accumfused.compiling import FLAGS, INSTRUCTION_SETS, compiler
from accumfused.rule import Rule

_SOURCE = """#define AF_TARGET user
#include "cpu/rule.inl"
extern "C" __attribute__((visibility("default"))) const accumfused::cpu::RuleCode accumfused_rule =
    accumfused::user::kRuleCode<accumfused::user::{functor}>;
"""
_loaded: list[ctypes.CDLL] = []  # for as long as the process runs: kernels are called by their addresses


@functools.cache
def code(rule: type[Rule], instruction_set: str) -> int | str:
    """The address of the rule's RuleCode for an instruction set; or the reason why there is none."""
    try:
        library = ctypes.CDLL(str(_library(rule, instruction_set)))
    except (OSError, RuntimeError) as error:
        return f"the rule {rule.name} does not compile here: {error}"
    _loaded.append(library)
    return ctypes.addressof(ctypes.c_char.in_dll(library, "accumfused_rule"))


def _library(rule: type[Rule], instruction_set: str) -> Path:
    command = [*shlex.split(compiler()), *FLAGS, "-w", "-shared", *INSTRUCTION_SETS[instruction_set]]
    version = subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout
    headers = _headers()
    parts = [
        functors.functor(rule, is_common=True),
        shlex.join(command),
        *(path.read_text() for path in sorted(headers.rglob("*.*"))),
    ]
    key = hashlib.sha256(b"\0".join([version, *(part.encode() for part in parts)])).hexdigest()[:20]
    made = _folder() / f"{rule.name}-{key}.so"
    if made.exists():
        return made
    try:
        made.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        own = tempfile.TemporaryDirectory(dir=made.parent)  # another process may be doing the same
    except OSError as error:
        raise RuntimeError(f"{error}; set ACCUMFUSED_CACHE to a folder that can be written") from None
    with own as folder:
        (Path(folder) / "functors.h").write_text(parts[0])
        source, part = Path(folder) / "rule.cpp", Path(folder) / "rule.so"
        source.write_text(_SOURCE.format(functor=functors.functor_name(rule)))
        command += [f"-I{folder}", f"-I{headers}", str(source), "-o", str(part)]
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if run.returncode != 0:
            output = run.stdout.strip()[-2000:]
            raise RuntimeError(f"{command[0]} failed; install g++ or clang++, or set CXX:\n{output}")
        part.replace(made)
    return made


def _headers() -> Path:
    """csrc: in a wheel a part of the package, in a checkout beside it."""
    package = Path(__file__).parents[1]
    return package / "csrc" if (package / "csrc").exists() else package.parent / "csrc"


def _folder() -> Path:
    if chosen := os.environ.get("ACCUMFUSED_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accumfused"
