"""The audit's command: it runs a script unchanged, says what its updates are, and ends it."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import processes
import pytest
import torch

import accumfused
from accumfused.__main__ import main
from accumfused.auditing import script, swap
from accumfused.auditing.swap import Run
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


EXPENSIVE = """
import atexit, pathlib
atexit.register(lambda: pathlib.Path("atexit.pt").write_text("cut short"))
try:
    exec(compile(pathlib.Path("train.py").read_text(), "train.py", "exec"))
except:
    print("goes on")
finally:
    pathlib.Path("finally.pt").write_text("cut short")
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


def _command(arguments: list[str], out: str, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    with open(out, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    main(arguments)


def started(arguments: list[str], out: str, environment: Mapping[str, str] | None = None) -> Any:
    """The command in a process of its own, which it may end at once."""
    process = processes.context().Process(target=_command, args=(arguments, out, environment or {}))
    process.start()
    return process


def audited(*arguments: str) -> tuple[int, str]:
    """The exit code of `accumfused audit`, and what it has printed."""
    process = started(["audit", *arguments], "out.txt")
    process.join()
    return process.exitcode, Path("out.txt").read_text()


@pytest.mark.parametrize(("division", "code", "head"), [
    ("4", 0, "The update is that of the large batch.\n"),
    ("1", 1, "The update has the direction of the large batch, its length times 4.\n"),
])  # fmt: skip
def test_a_script_is_watched_for_two_windows_and_then_ends(path: str, division: str, code: int, head: str) -> None:
    found, out = audited(path, division, "-z")
    assert found == code
    assert out.startswith(f"\n{head}"), out
    assert "the end of the script" not in out
    assert "\n2 " in out
    assert "\n3 " not in out
    assert ("0.weight" in out) == (division == "1")
    assert "\npicture: accumfused-audit.png\n" in out
    assert Path("accumfused-audit.png").stat().st_size > 10_000
    assert "The script was ended here, after 2 steps: " in out
    assert out.endswith("Its finally: blocks and atexit handlers did not run.\n")


def test_a_fault_at_the_end_of_an_epoch_is_seen_by_those_who_watch_it(path: str) -> None:
    Path(path).write_text(SCRIPT.replace("(i + 1) % 4", "(i % 10 + 1) % 4"))  # 10 micro-batches an epoch
    assert audited(path, "4")[0] == 0
    code, out = audited("--steps", "3", path, "4")
    assert code == 1
    assert "remainder_leaked (step 3: 6 micro-batches where 4 belong" in out
    code, out = audited("--steps", "0", path, "4")
    assert code == 2
    assert "argument --steps: a whole number >= 1, got 0" in out


def test_nothing_of_a_script_runs_after_its_end_so_that_no_file_is_written(path: str) -> None:
    Path("expensive.py").write_text(EXPENSIVE)
    code, out = audited("expensive.py", "4", "-z")
    assert (code, "goes on" in out) == (0, False), out
    assert not Path("finally.pt").exists()
    assert not Path("atexit.pt").exists()


def test_the_first_block_of_the_page_prints_what_the_page_says(path: str) -> None:
    page = (Path(script.__file__).parents[2] / "docs" / "guide" / "audit.md").read_text()
    text, _, rest = page.partition("<<'END'\n")[2].partition("END\naccumfused audit train.py\n")
    Path(path).write_text(text)
    code, out = audited("train.py")
    assert code == 1
    assert out.startswith("\n" + rest.partition("```text\n")[2].partition("...\n")[0]), out


def test_a_fault_is_an_exit_code_unless_its_cause_is_ignored_and_a_short_script_is_judged_by_what_it_did(
    path: str,
) -> None:
    text = SCRIPT.replace("range(48)", "range(4)").replace("randn(4, 6)", "randn(4 + i, 6)")
    Path(path).write_text(text.replace("(4,)", "(4 + i,)"))
    options = ["--micro-batches", "4", "--picture", "shares.svg"]
    code, out = audited(*options, path, "4")
    assert code == 1
    assert "the end of the script __main__" in out
    assert "mean_of_means (step 1: counts from 4 to 7)" in out
    assert "<svg" in Path("shares.svg").read_text()
    code, out = audited(*options, "--ignore", "mean_of_means", path, "4")
    assert code == 0
    assert "overlooked: mean_of_means" in out


@pytest.mark.parametrize(("end", "code", "texts"), [
    ("print('nothing')", 3, ["No step was seen"]),
    ("sys.exit('ERROR: no data')", 4, ["\nERROR: no data\n", "The script failed, with exit code 1."]),
    ("sys.exit(7)", 4, ["The script failed, with exit code 7."]),
    ("raise KeyError('data')", 4, ["KeyError: 'data'", "The script failed, with exit code 1."]),
    ("sys.exit(0)", 3, ["No step was seen"]),
])  # fmt: skip
def test_a_script_without_steps_has_its_exit_code_and_what_it_says_is_shown(
    path: str, end: str, code: int, texts: list[str]
) -> None:
    Path(path).write_text(f"import sys\nprint(flush=True)\n{end}")
    found, out = audited(path)
    assert found == code, out
    assert all(text in out for text in texts), out


def test_batch_norm_cannot_be_told_and_no_table_says_otherwise(path: str) -> None:
    Path(path).write_text(SCRIPT.replace("torch.nn.Tanh()", "torch.nn.BatchNorm1d(8)"))
    code, out = audited(path, "4", "-z")
    assert code == 3
    assert "times" not in out
    assert "picture" not in out


def test_several_processes_are_compared_and_the_first_reports(path: str) -> None:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        port = server.getsockname()[1]
    text = SCRIPT.replace("import sys\n", "import sys\nimport torch.distributed as dist\n", 1).replace(
        "model = Net", "dist.init_process_group('gloo')\nmodel = Net"
    )
    text = text.replace(
        "optimizer = AdamW", "model = torch.nn.parallel.DistributedDataParallel(model)\noptimizer = AdamW"
    )
    Path(path).write_text(text)
    places = [
        {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        for rank in range(2)
    ]
    both = [started(["audit", path, "4", "-z"], f"{rank}.txt", each) for rank, each in enumerate(places)]
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert Path("0.txt").read_text().startswith("\nThe update is that of the large batch.\n")
    assert Path("1.txt").read_text() == ""


# ---- the command line ------------------------------------------------------------------------------------------------


def test_the_command_line_says_what_there_is(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, text in (
        (["--version"], 0, f"accumfused {accumfused.__version__}\n"),
        (["audit", "--help"], 0, "accumfused audit --swap train.py"),
        (["audit", "nowhere.py"], 2, "there is no file nowhere.py"),
        (["docter"], 2, "invalid choice: 'docter' (choose from"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == code
        streams = capsys.readouterr()
        assert text in streams.out + streams.err


def test_a_reader_that_has_gone_is_no_error(path: str) -> None:
    waits = "import os\nprint('begun', flush=True)\nwhile not os.path.exists('closed'): pass\nmodel = Net"
    Path(path).write_text(SCRIPT.replace("model = Net", waits))
    os.mkfifo("pipe")
    process = started(["audit", path, "4", "-z"], "pipe")
    with open("pipe") as reader:
        assert reader.readline() == "begun\n"
    Path("closed").touch()
    process.join()
    assert process.exitcode == 0


# ---- losses with other optimizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new", "code", "tail", "lines"), [
    ("for i in", "for i in", 0, "The losses of 10 updates agree: by ", 15),
    ("for i in", "torch.seed()\nfor i in", 3, "The losses differ before the first update: the script draws", 15),
    ("lr=0.01", "lr=0.01 if 'torch' in AdamW.__module__ else 0.3", 1, "The losses DIFFER: from update 2 on, by ", 15),
    ("AdamW", "Rprop", 3, "The script makes no optimizer of torch.optim that accumfused has.", 3),
    ("for i in", "sys.exit(5)\nfor i in", 4, "The script failed, with exit code 5 with torch's optimizers, 5 with", 1),
])  # fmt: skip
def test_ten_losses_are_compared_with_those_of_torchs_optimizers(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    old: str, new: str, code: int, tail: str, lines: int,
) -> None:  # fmt: skip
    forked = processes.context()  # such processes have imported torch already
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: forked)
    Path(path).write_text(SCRIPT.replace(old, new))
    assert swap.compare([path, "4"], PEERS) == code
    out = capsys.readouterr().out
    assert out.strip().splitlines()[-1].startswith(tail), out
    assert len(out.strip().splitlines()) == lines, out
    assert ("torch, nudged" in out) == (code == 1)


@pytest.mark.parametrize(("nudged", "code", "text"), [
    ([0.0, 1e-7, 4e-4], 0, "differ no more than torch from itself: by 3.0e-03 at most"),
    ([0.0, 1e-7, 1e-4], 1, "DIFFER: from update 3 on, by 3.0e-03, where torch differs from itself"),
])  # fmt: skip
def test_a_difference_is_one_only_where_torch_differs_less_from_itself(
    nudged: list[float], code: int, text: str
) -> None:
    stock, swapped = Run([1.0, 1.0, 1.0], ["torch's SGD"]), Run([1.0, 1.0, 1.003], ["accumfused's SGD"])
    found, told = swap.verdict_of(stock, swapped, [0.0, 1e-7, 3e-3], nudged)
    assert found == code
    assert text in told


def test_a_nudge_is_a_rounding_of_some_weights_and_draws_no_number_of_the_scripts() -> None:
    param = torch.ones(1000, requires_grad=True)
    before = torch.get_rng_state()
    swap.nudge(torch.optim.SGD([param]), {})
    assert torch.equal(torch.get_rng_state(), before)
    assert 400 < int((param == 1 + torch.finfo(torch.float32).eps).sum()) < 600
    assert 400 < int((param == 1).sum()) < 600


def test_each_run_of_a_launcher_has_a_meeting_place_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    assert swap.meeting_port(1) is None
    store = torch.distributed.TCPStore("localhost", 0, is_master=True)  # as torchrun's agent has one
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    assert [swap.meeting_port(run) for run in (1, 2)] == [str(store.port + 1), str(store.port + 2)]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    ports = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        ports.append([swap.meeting_port(run) for run in (1, 2)])
    assert ports[0] == ports[1]
    assert len({*ports[0], str(store.port)}) == 3
