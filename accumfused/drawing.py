"""An empty picture for a report to draw on. matplotlib is loaded here, and by this call only."""

from __future__ import annotations

import importlib
from typing import Any


def figure(caller: str, width: float, height: float) -> Any:
    """A matplotlib figure.

    Args:
        caller: the method that draws, for the message.
        width: in inches, as the height.

    Raises:
        ImportError: matplotlib does not load.
    """
    try:
        module: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            f"{caller}() draws with matplotlib, which does not load: {error}; pip install matplotlib"
        ) from error
    return module.Figure(figsize=(width, height), layout="constrained")
