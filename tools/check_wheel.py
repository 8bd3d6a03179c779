"""Training steps with the installed package, outside the repository: python check_wheel.py native|pure"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import accumfused as af
from accumfused import compiled
from accumfused.rules import sign

kind = sys.argv[1]
installed = Path(af.__file__).resolve()
assert installed.is_relative_to(Path(sys.prefix).resolve()), f"{installed} is not the installed package"


class SignRule(af.Rule):
    """A user's own rule: its kernel is compiled here, of what the wheel brings along."""

    name = "sign_of_the_gradient"
    hypers = {"lr": 0.1}  # noqa: RUF012

    @staticmethod
    def update(h: Any, step: Any, p: Any, g: Any, *states: Any) -> tuple[Any, ...]:
        return (p - sign(g) * h.lr,)


def step(optimizer_class: Any, **options: Any) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = optimizer_class(model.parameters(), max_grad_norm=1.0, **options)
    before = [param.detach().clone() for param in model.parameters()]
    model(torch.ones(8, 64)).square().mean().backward()
    optimizer.accumulate(weight=8, last=True)
    optimizer.step()
    for param, old in zip(model.parameters(), before, strict=True):
        assert not torch.equal(param, old), "the step changed nothing"


step(af.AdamW, lr=0.1)
with tempfile.TemporaryDirectory() as cache:
    os.environ["ACCUMFUSED_CACHE"] = cache
    step(af.optimizer_of(SignRule), backend="cpu" if kind == "native" else "auto")
cpuinfo = Path("/proc/cpuinfo")
if kind == "native" and cpuinfo.exists() and " avx2 " in cpuinfo.read_text():
    assert "x86_64_v3" in compiled.module.instruction_sets(), compiled.module.instruction_sets()
assert (compiled.unavailable is None) == (kind == "native"), compiled.unavailable or "there is a native module"
print(f"accumfused {af.__version__}, {kind}: {compiled.unavailable or compiled.module.__name__} ({installed.parent})")
