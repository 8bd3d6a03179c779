"""Windows in CUDA graphs: replays give the bits of eager windows, and a capture that cannot is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from compare import assert_all_same_bits, assert_same_bits
from gpu_runs import DEVICE, Scaled, Windows, captured
from table import STATES, WEIGHTS

import accumfused as af
from accumfused import compiled

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

FACTORS = (1.0, float("inf"), 0.5, 2.0, 1.0, 1.0)  # of the parameters in each window's losses
HALVES = ("bf16_stochastic", "split16", "split8")


def of_format(weights: str, states: str) -> Any:
    dtype, settings = WEIGHTS[weights]
    known = {"state_dtype": STATES[states], "state_dtype_min_numel": 2, "rounding_seed": 17}
    return partial(Windows, dtype=dtype, **known, **settings)


def of_policy(clip: Any) -> Any:
    return partial(Windows, max_grad_norm=None, clip=clip)


# What is captured, what runs eagerly beside it, and the windows that are no replays.
PAIRS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "windows": (Windows, Windows, ()),
    "eager windows between replays": (Windows, Windows, (2, 5)),  # `grad_norm` is theirs until the next capture
    "our scaler, and torch's": (Scaled, partial(Scaled, kind=torch.amp.GradScaler), ()),
    **{f"released in {size}": (partial(Windows, bucket=size), Windows, ()) for size in (1, 2000, 2**30)},
    **{
        str(clip): (of_policy(clip), of_policy(clip), ())
        for clip in (af.PerTensor(0.5), af.PerGroup(0.5), af.Adaptive(0.1), af.ZScore(0.1, 0.5, 2))
    },
    **{f"{w}, {s}": (of_format(w, s), of_format(w, s), ()) for w in HALVES for s in STATES},
}


@pytest.fixture
def graphs(gpu: str) -> str:
    """A backend whose steps can be captured."""
    if gpu == "triton" and compiled.unavailable is not None:
        pytest.skip("without the native module's table a plan cannot be known to be unchanged")
    return gpu


@pytest.mark.parametrize("pair", PAIRS)
def test_a_captured_window_gives_the_bits_of_eager_ones(pair: str, graphs: str) -> None:
    """It follows lr and losses, skips, rounds with the noise of its own step, and leaves eager windows alone."""
    captures, eager, unreplayed = PAIRS[pair]
    one, other = captures(graphs), eager(graphs)
    replay = captured(one.window)
    other.window()
    for number, factor in enumerate(FACTORS):
        for run, play in ((one, one.window if number in unreplayed else replay), (other, other.window)):
            run.factor.fill_(factor)
            run.lr.fill_(0.05 / (number + 1))
            play()
    assert_all_same_bits(one.everything(), other.everything())
    assert int(one.optimizers[0].state[one.params[0]]["step"]) == len(FACTORS)  # one to warm up, one that is skipped
    assert [int(optimizer.skipped_steps) for optimizer in one.optimizers] == [1] * len(one.optimizers)


@pytest.mark.parametrize("moved", [False, True], ids=["before the first step", "after a tensor has moved"])
def test_a_capture_that_would_make_tensors_is_refused(moved: bool, graphs: str) -> None:
    run = Windows(graphs)
    if moved:
        run.window()
        run.params[1].data = run.params[1].data.clone()
    before = [p.detach().clone() for p in run.params]
    with pytest.raises(RuntimeError, match="make one whole step"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        run.window()
    run.optimizers[0].zero_grad()
    for param, old in zip(run.params, before, strict=True):
        assert_same_bits(param, old)


def test_gradients_in_the_memory_of_compiled_graphs_are_copied(gpu: str) -> None:
    """With reduce-overhead each backward pass writes the same memory again."""
    found = []
    for mode in (None, "reduce-overhead"):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)).to(DEVICE)
        forward: Any = net if mode is None else torch.compile(net, mode=mode)
        optimizer = af.SGD(net.parameters(), lr=0.1, backend=gpu)
        data = torch.randn(3, 16, 64, device=DEVICE)
        for _ in range(6):  # some to warm up, some recorded, some replayed
            for x in data:
                torch.compiler.cudagraph_mark_step_begin()
                forward(x).square().mean().backward()
                optimizer.accumulate()
            optimizer.step()
        found.append(torch.cat([param.detach().flatten() for param in net.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
