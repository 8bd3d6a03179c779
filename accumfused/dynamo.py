"""torch.compiler.disable without its wrapper: a step passes through it each time, and it costs 5 us, cold 30."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

_Function = TypeVar("_Function", bound=Callable[..., Any])


def disable(function: _Function) -> _Function:
    """Marks a plain function, which torch.compile then neither traces nor compiles, nor what it calls.

    A traced call of it breaks the graph, because of the attribute that torch's own wrappers have; and its code runs as
    it is, all frames below included.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001
    skips = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skips)
    return function
