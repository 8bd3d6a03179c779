"""Where the native kernels of a rule are. The native module has the package's; for a user's rule a CPU's compiler runs.

That is when the rule first steps: the compiler makes a shared library of csrc/cpu/rule.inl and the rule's functor. It
lies in a folder (ACCUMFUSED_CACHE, or accumfused/ in the user's cache), and later processes load it from there. Its
name has a hash of all that it depends on, and a digest of the library: to load one that a full disk or a broken copy
has cut short would end the process by SIGBUS. If the library is damaged, or another user owns it or the folder, or can
write them, a library is compiled into a temporary folder of this process.
"""

from __future__ import annotations

import contextlib
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
from accumfused.warn import say_once

_SOURCE = """#define AF_TARGET user
#include "cpu/rule.inl"
extern "C" __attribute__((visibility("default"))) const accumfused::cpu::RuleCode accumfused_rule =
    accumfused::user::kRuleCode<accumfused::user::{functor}>;
"""
_loaded: list[ctypes.CDLL] = []  # for as long as the process runs: kernels are called by their addresses


@functools.cache
def _in_the_module() -> dict[str, int]:
    """Lists the native module's rules, by their functors' digests: a rule of the same name may be another one."""
    return {digest: index for index, (_, digest, *_) in enumerate(compiled.module.rules())}


def index(rule: type[Rule]) -> int:
    """Looks up the rule's index among the native module's, for the CUDA kernels.

    Raises:
        RuntimeError: they do not have it.
    """
    if reason := why_not_cuda(rule):
        raise RuntimeError(reason)
    return 0 if rule.is_foreign else _in_the_module()[to_cpp.digest(rule)]


def code(rule: type[Rule], instruction_set: str) -> int:
    """Returns the address of the rule's RuleCode, for the CPU's kernels.

    Raises:
        RuntimeError: the rule does not compile.
    """
    result = _code(rule, instruction_set)
    if isinstance(result, str):
        raise RuntimeError(result)
    return result


def why_not_cpu(rule: type[Rule]) -> str | None:
    """Tells why the CPU's kernels cannot run the rule, or returns None."""
    result = _code(rule, compiled.module.instruction_sets()[0])
    return result if isinstance(result, str) else None


def why_not_cuda(rule: type[Rule]) -> str | None:
    """Tells why the CUDA kernels cannot run the rule, or returns None."""
    if rule.is_foreign or (rule.is_common and to_cpp.digest(rule) in _in_the_module()):
        return None
    return f"the native module has no CUDA kernel for the rule {rule.name}; Triton has"


@functools.cache
def _code(rule: type[Rule], instruction_set: str) -> int | str:
    """Returns the address, or the reason why the rule has none."""
    if rule.is_foreign:
        return 0  # its own step updates
    place = _in_the_module().get(to_cpp.digest(rule))
    if place is not None:
        return int(compiled.module.rule_codes(instruction_set)[place])
    try:
        library = _library(rule, instruction_set, _folder())
        try:
            return _loaded_code(library)
        except (OSError, ValueError):  # another machine's, say
            _delete(library)
            return _loaded_code(_library(rule, instruction_set, _temporary_folder()))
    except (OSError, RuntimeError) as error:
        return f"the rule {rule.name} does not compile here: {error}"


def _loaded_code(library: Path) -> int:
    """Loads a library, and returns the address of its RuleCode.

    Raises:
        OSError, ValueError: it does not load, or has none.
    """
    loaded = ctypes.CDLL(str(library))
    address = ctypes.addressof(ctypes.c_char.in_dll(loaded, "accumfused_rule"))
    _loaded.append(loaded)
    return address


def _library(rule: type[Rule], instruction_set: str, folder: Path) -> Path:
    """Returns the rule's library in a folder; compiles it unless it is there."""
    command = [*shlex.split(compiler()), *FLAGS, "-w", "-shared", *INSTRUCTION_SETS[instruction_set]]
    version = subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout
    headers = _headers()
    parts = [
        to_cpp.functor(rule, is_common=True),
        shlex.join(command),
        *(path.read_text() for path in sorted(headers.rglob("*.*"))),
    ]
    stem = f"{rule.name}-{_digest(bytes(1).join([version, *(part.encode() for part in parts)]))}"
    for library in folder.glob(f"{stem}-*.so"):
        if not _is_private(library):
            say_once(f"{library} belongs to another user, or others can write it: it is not loaded; delete it")
        elif _is_whole(library):
            return library
        else:
            _delete(library)  # the next process makes another one
        folder = _temporary_folder()
    try:
        temporary = tempfile.TemporaryDirectory(dir=folder)  # another process may be doing the same
    except OSError as error:
        raise RuntimeError(f"{error}; set ACCUMFUSED_CACHE to a folder that can be written") from None
    with temporary as place:
        (Path(place) / "functors.h").write_text(parts[0])
        source, part = Path(place) / "rule.cpp", Path(place) / "rule.so"
        source.write_text(_SOURCE.format(functor=to_cpp.functor_name(rule)))
        command += [f"-I{place}", f"-I{headers}", str(source), "-o", str(part)]
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if run.returncode != 0:
            output = run.stdout.strip()[-2000:]
            raise RuntimeError(f"{command[0]} failed; install g++ or clang++, or set CXX:\n{output}")
        part.chmod(0o700)
        with part.open("rb+") as file:
            library = folder / f"{stem}-{_digest(file.read())}.so"
            os.fsync(file.fileno())
        part.replace(library)
    return library


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]


def _is_whole(library: Path) -> bool:
    """Tells whether a library is as it was written: its name ends with its digest."""
    try:
        return library.stem.endswith(f"-{_digest(library.read_bytes())}")
    except OSError:
        return False


def _delete(library: Path) -> None:
    with contextlib.suppress(OSError):  # the folder may be read-only
        library.unlink()


def _headers() -> Path:
    """Returns csrc: in a wheel a part of the package, in a checkout next to it."""
    package = Path(__file__).parents[1]
    return package / "csrc" if (package / "csrc").exists() else package.parent / "csrc"


def _folder() -> Path:
    """Returns the folder of compiled rules; makes it if it is missing.

    Raises:
        RuntimeError: it cannot be made.
    """
    chosen = os.environ.get("ACCUMFUSED_CACHE")
    folder = Path(chosen or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accumfused")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise RuntimeError(f"{error}; set ACCUMFUSED_CACHE to a folder that can be written") from None
    if _is_private(folder):
        return folder
    say_once(
        f"{folder} belongs to another user, or others can write it, so no compiled rule is loaded from there; each "
        "process compiles its own. chmod 700 it, or set ACCUMFUSED_CACHE to another folder"
    )
    return _temporary_folder()


@functools.cache
def _private_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="accumfused-")  # of mode 0700, and removed when the process ends


def _temporary_folder() -> Path:
    return Path(_private_folder().name)


def _is_private(path: Path) -> bool:
    """Tells whether a file or folder is this user's, and no other can write it: a library runs when it is loaded."""
    if not hasattr(os, "getuid"):  # Windows, where a user's cache is private
        return True
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022
