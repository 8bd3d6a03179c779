"""Rules: an optimizer's arithmetic, written once in Python. It runs as C++ and CUDA, as Triton, and on torch's tensors.

This module imports no torch, and no more do trace.py, rule.py and to_cpp.py: setup.py prints the rules before it
compiles.
"""

from accumfused.rules.rule import MAXIMUM_RATCHETS, Rule
from accumfused.rules.trace import Symbol, agree, float32, maximum, minimum, named, power, sign, sqrt, where

__all__ = [
    "MAXIMUM_RATCHETS",
    "Rule",
    "Symbol",
    "agree",
    "float32",
    "maximum",
    "minimum",
    "named",
    "power",
    "sign",
    "sqrt",
    "where",
]
