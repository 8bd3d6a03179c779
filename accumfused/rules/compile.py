"""Where the native kernels of a rule are. The native module has the package's; for a user's rule a CPU's compiler runs.

That is when the rule first steps: the compiler makes a shared library of csrc/cpu/rule.inl and the rule's functor. It
lies in a folder (ACCUMFUSED_CACHE, or accumfused/ in the user's cache), under a hash of all that it depends on, and
later processes load it from there.
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

from accumfused import compiled
from accumfused.compiling import FLAGS, INSTRUCTION_SETS, compiler
from accumfused.rules import to_cpp
from accumfused.rules.rule import Rule

_SOURCE = """#define AF_TARGET user
#include "cpu/rule.inl"
extern "C" __attribute__((visibility("default"))) const accumfused::cpu::RuleCode accumfused_rule =
    accumfused::user::kRuleCode<accumfused::user::{functor}>;
"""
_loaded: list[ctypes.CDLL] = []  # for as long as the process runs: kernels are called by their addresses


@functools.cache
def _in_the_module() -> dict[str, int]:
    """The native module's rules, by their functors' digests: a rule of the same name may be another one."""
    return {digest: index for index, (_, digest, *_) in enumerate(compiled.module.rules())}


def index(rule: type[Rule]) -> int:
    """The rule's index among the native module's, for the CUDA kernels.

    Raises:
        RuntimeError: they do not have it.
    """
    if reason := why_not_cuda(rule):
        raise RuntimeError(reason)
    return 0 if rule.is_foreign else _in_the_module()[to_cpp.digest(rule)]


def code(rule: type[Rule], instruction_set: str) -> int:
    """The address of the rule's RuleCode, for the CPU's kernels.

    Raises:
        RuntimeError: the rule does not compile.
    """
    made = _code(rule, instruction_set)
    if isinstance(made, str):
        raise RuntimeError(made)
    return made


def why_not_cpu(rule: type[Rule]) -> str | None:
    """The reason why the CPU's kernels cannot run the rule, or None."""
    made = _code(rule, compiled.module.instruction_sets()[0])
    return made if isinstance(made, str) else None


def why_not_cuda(rule: type[Rule]) -> str | None:
    """The reason why the CUDA kernels cannot run the rule, or None."""
    if rule.is_foreign or (rule.is_common and to_cpp.digest(rule) in _in_the_module()):
        return None
    return f"the native module has no CUDA kernel for the rule {rule.name}; Triton has"


@functools.cache
def _code(rule: type[Rule], instruction_set: str) -> int | str:
    """The address, or the reason why there is none."""
    if rule.is_foreign:
        return 0  # its own step updates
    place = _in_the_module().get(to_cpp.digest(rule))
    if place is not None:
        return int(compiled.module.rule_codes(instruction_set)[place])
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
        to_cpp.functor(rule, is_common=True),
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
        source.write_text(_SOURCE.format(functor=to_cpp.functor_name(rule)))
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
