"""Without the native module the package is pure Python, says so once; backend="torch" has the same bits."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest

from accumfused.backends import COSTS

WITHOUT_NATIVE = "import sys; sys.modules['accumfused._C'] = None\n"

TRAINING = """
import hashlib
import torch
import accumfused as af

# Elementwise only: the bits of a matrix product depend on where its operands lie.
torch.manual_seed(0)
model = [torch.nn.Parameter(torch.randn(130, 257)) for _ in range(3)]
data, target = torch.randn(6, 130, 257), torch.randn(6, 130, 257)
optimizers = [
    af.AdamW(model[:2], lr=0.05, weight_decay=0.1, max_grad_norm=0.5, backend=BACKEND),
    af.SGD(model[2:], lr=0.05, momentum=0.9, max_grad_norm=0.5, backend=BACKEND),
]
for epoch in range(3):
    for i, last in af.windows(range(6), 4):
        ((model[0] * data[i] * model[1] + model[2] - target[i]) ** 2).sum().backward()
        for optimizer in optimizers:
            optimizer.accumulate(1 + i, last=last)
            if last:
                optimizer.step()
tensors = [p.detach() for p in model]
tensors += [t for optimizer in optimizers for state in optimizer.state.values() for t in state.values()]
tensors += [optimizer.grad_norm for optimizer in optimizers]
for tensor in tensors:
    print(hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest())
"""

LOGGED = """
import logging
import torch
import accumfused as af

records = []
handler = logging.Handler()
handler.emit = lambda record: records.append((record.levelname, record.getMessage()))
logging.getLogger("accumfused").addHandler(handler)
assert af.fuse is not None and records == []  # nothing is said at import

def train(backend):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = af.SGD([param], lr=0.5, backend=backend)
    param.grad = torch.ones(3)
    optimizer.step()
    assert param.tolist() == [0.5] * 3

train("torch")
assert records == []  # it was asked for
for _ in range(3):
    train("auto")
for level, text in records:
    print(level, text)
"""

ASKED_FOR = """
import torch
import accumfused as af

param = torch.nn.Parameter(torch.ones(3))
for make in (af.AdamW, lambda params, backend: af.fuse(torch.optim.NAdam(params), backend=backend)):
    param.grad = torch.ones(3)
    try:
        make([param], backend="cpu").step()
    except RuntimeError as error:
        print(error)
    assert param.tolist() == [1.0] * 3
    assert param.grad.tolist() == [1.0] * 3
"""


def run(code: str) -> str:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "error", "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, timeout=60).stdout


@pytest.mark.usefixtures("native")
def test_the_same_training_gives_the_same_bits() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as native:
        exec(TRAINING, {"BACKEND": "cpu"})
    lines = native.getvalue().splitlines()
    assert len(lines) == 3 + 2 * 3 + 2 + 2  # parameters, AdamW's states, SGD's, norms
    assert run(WITHOUT_NATIVE + "BACKEND = 'torch'\n" + TRAINING).splitlines() == lines


def test_auto_falls_back_and_says_so_exactly_once() -> None:
    lines = run(WITHOUT_NATIVE + LOGGED).splitlines()
    assert len(lines) == 1
    said = f"WARNING falling back to the foreach backend ({COSTS['foreach']}): the native module was not built"
    assert lines[0].startswith(said)


def test_the_native_backend_asked_for_by_name_raises_with_the_reason() -> None:
    lines = run(WITHOUT_NATIVE + ASKED_FOR).splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("backend='cpu' cannot run: the native module was not built")
        assert line.endswith("use backend='auto' or 'torch'")
