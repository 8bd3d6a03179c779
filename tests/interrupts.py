"""Ctrl-C at a chosen instruction."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import accumfused as af

OURS = str(Path(af.__file__).parent)


class Interrupted:
    """Within the block Python raises KeyboardInterrupt before the n-th instruction of this package's functions.

    With None it counts them. (A signal comes only after calls: where one would not, autograd may be left off.)
    """

    def __init__(self, at: int | None) -> None:
        self.at, self.seen, self.came = at, 0, False

    def __enter__(self) -> Interrupted:
        self.has_grad = torch.is_grad_enabled()
        sys._getframe().f_trace_opcodes = True  # or Python 3.12 brings no instructions of the first frames
        sys.settrace(self._enter)
        return self

    def __exit__(self, kind: Any, *_: object) -> bool:
        sys.settrace(None)
        torch.set_grad_enabled(self.has_grad)
        return kind is KeyboardInterrupt

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            self.seen += 1
            if self.at is not None and self.seen > self.at and not self.came:
                self.came = True
                raise KeyboardInterrupt
        return self._instruction
