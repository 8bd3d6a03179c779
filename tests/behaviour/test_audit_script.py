"""The audit's command: it runs a script unchanged, and says what its updates are."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import processes
import pytest
import torch

from accumfused.auditing import script
from accumfused.optimizers import PEERS

SCRIPT = """
import sys
import torch
from torch.nn import functional as F
from torch.optim import AdamW

class Net(torch.nn.Sequential):
    pass

model = Net(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
optimizer = AdamW(model.parameters(), lr=0.01)
for i in range(48):
    x, y = torch.randn(4, 6), torch.randint(3, (4,))
    (F.cross_entropy(model(x), y) / float(sys.argv[1])).backward()
    if (i + 1) % 4 == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none="-z" in sys.argv)
print("the end of the script", __name__)
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", str(Path(script.__file__).parents[2]))  # for processes of their own
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


@pytest.mark.parametrize(("division", "head"), [
    ("4", "The update is that of the large batch.\n"),
    ("1", "The update has the direction of the large batch, its length times 4.\n"),
])  # fmt: skip
def test_a_script_is_watched_for_two_windows_and_then_ends(
    path: str, capsys: pytest.CaptureFixture[str], division: str, head: str
) -> None:
    constructor = torch.optim.Optimizer.__init__
    assert script.main([path, division, "-z"], PEERS) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"\n{head}"), out
    assert "the end of the script" not in out
    assert "\n2 " in out
    assert "\n3 " not in out
    assert ("0.weight" in out) == (division == "1")
    assert out.endswith("picture: accumfused-audit.png\n")
    assert Path("accumfused-audit.png").stat().st_size > 10_000
    assert torch.optim.Optimizer.__init__ is constructor


def test_a_fault_is_an_exit_code_unless_its_cause_is_ignored_and_a_short_script_is_judged_by_what_it_did(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SCRIPT.replace("range(48)", "range(4)").replace("randn(4, 6)", "randn(4 + i, 6)")
    Path(path).write_text(text.replace("(4,)", "(4 + i,)"))
    options = ["--micro-batches", "4", "--picture", "shares.svg"]
    assert script.main([*options, path, "4"], PEERS) == 1
    out = capsys.readouterr().out
    assert "the end of the script __main__" in out
    assert "mean_of_means (step 1: counts from 4 to 7)" in out
    assert "<svg" in Path("shares.svg").read_text()
    assert script.main([*options, "--ignore", "mean_of_means", path, "4"], PEERS) == 0
    assert "overlooked: mean_of_means" in capsys.readouterr().out


def test_a_script_without_steps_or_without_a_file_is_told(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(path).write_text("print('nothing')")
    assert script.main([path], PEERS) == 0
    assert "No step was seen" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        script.main(["nowhere.py"], PEERS)
    assert "there is no file nowhere.py" in capsys.readouterr().err


@pytest.mark.parametrize(("seeds", "code", "tail"), [
    ("", 0, "The losses of 10 updates agree: by "),
    ("torch.seed()\n", 1, "The losses differ before the first update: the script draws random numbers that no seed"),
])  # fmt: skip
def test_ten_losses_are_compared_with_those_of_torchs_optimizers(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, seeds: str, code: int, tail: str
) -> None:
    forked = processes.context()  # such processes have imported torch already
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: forked)
    Path(path).write_text(SCRIPT.replace("for i in", f"{seeds}for i in"))
    assert script.main(["--swap", path, "4"], PEERS) == code
    out = capsys.readouterr().out
    assert out.strip().splitlines()[-1].startswith(tail), out
    assert out.startswith("\ntorch's AdamW against accumfused's AdamW\n")
    assert len(out.strip().splitlines()) == 15
