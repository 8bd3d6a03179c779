"""Prints accumfused/optimizers/__init__.pyi: what type checkers and editors see of the classes that rules become.

Run it after a rule's hyper-parameters or texts have changed; tests/repo/test_signatures.py compares.
"""

from __future__ import annotations

import inspect
import textwrap
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from accumfused import optimizers
from accumfused.optimizer import FusedOptimizer
from accumfused.optimizers import making
from accumfused.settings import NAMES, without_settings

STUB = Path(optimizers.__file__).with_suffix(".pyi")
_HEAD = '''"""Printed by tools/print_stubs.py from the rules and their docstrings."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from accumfused.optimizer import FusedOptimizer
'''
_TAIL = """
ALL: tuple[type[FusedOptimizer], ...]
PEERS: dict[type[torch.optim.Optimizer], type[FusedOptimizer]]
RULES: tuple[type[Rule], ...]
"""


def printed() -> str:
    """The text of the stub."""
    by_hand = [each for each in optimizers.ALL if not _is_made(each)]
    made = sorted((each for each in optimizers.ALL if _is_made(each)), key=lambda each: each.__name__)
    bases = {base for each in made for base in each.__bases__ if base.__module__.startswith("accumfused.optimizers")}
    imports = sorted((each.__module__, each.__name__) for each in [*by_hand, *bases])
    lines = [f"from {module} import {name} as {name}" for module, name in imports]
    lines += ["from accumfused.rules import Rule", "from accumfused.settings import SettingArguments", _TAIL]
    return _HEAD + "\n".join([*lines, *map(_class, made)])


def _is_made(optimizer: type[FusedOptimizer]) -> bool:
    return optimizer.__init__.__module__ == making.__name__


def _class(optimizer: type[FusedOptimizer]) -> str:
    bases = [base.__name__ if base.__module__.startswith("accumfused") else f"torch.optim.{base.__name__}"
             for base in optimizer.__bases__]  # fmt: skip
    lines, is_keyword = ["self,"], False
    for name, each in inspect.signature(optimizer).parameters.items():
        if name in NAMES:
            continue
        if each.kind is each.KEYWORD_ONLY and not is_keyword:
            lines, is_keyword = [*lines, "*,"], True
        default = "" if each.default is each.empty else f" = {each.default!r}"
        lines.append(f"{name}: {'Any' if name == 'params' else _type(each.annotation)}{default},")
    lines.append("**settings: Unpack[SettingArguments],")
    described = without_settings(inspect.getdoc(optimizer) or "")
    return "\n".join(
        [
            f"class {optimizer.__name__}({', '.join(bases)}):",
            textwrap.indent(f'"""{described.strip()}\n"""\n', "    "),
            "    def __init__(",
            *(f"        {line}" for line in lines),
            "    ) -> None: ...",
            "",
        ]
    )


def _type(annotation: Any) -> str:
    parts = [*map(_type, get_args(annotation))]
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(parts)
    if get_origin(annotation) is tuple:
        return f"tuple[{', '.join(parts)}]"
    return "None" if annotation is type(None) else str(annotation.__name__)


if __name__ == "__main__":
    STUB.write_text(printed())
