"""One training step with the installed package, outside the repository: python check_wheel.py native|pure"""

import sys
from pathlib import Path

import torch

import accumfused as af
from accumfused import compiled

kind = sys.argv[1]
installed = Path(af.__file__).resolve()
assert installed.is_relative_to(Path(sys.prefix).resolve()), f"{installed} is not the installed package"

model = torch.nn.Linear(64, 64)
optimizer = af.AdamW(model.parameters(), lr=0.1, max_grad_norm=1.0)
before = [param.detach().clone() for param in model.parameters()]

model(torch.ones(8, 64)).square().mean().backward()
optimizer.accumulate(weight=8, last=True)
optimizer.step()

for param, old in zip(model.parameters(), before, strict=True):
    assert not torch.equal(param, old), "the step changed nothing"
assert (compiled.unavailable is None) == (kind == "native"), compiled.unavailable or "there is a native module"
print(f"accumfused {af.__version__}, {kind}: {compiled.unavailable or compiled.module.__name__} ({installed.parent})")
