"""The step of an optimizer that keeps torch's own: it runs on scaled copies, and `p.grad` stays as it was.

In: gradients in `p.grad`, or a window's sums, with their coefficient. Out: updated parameters. A step that fails before
it writes a parameter or a state leaves gradients, states and window as they were, and the call may be repeated. One
that fails later leaves the window BROKEN, as kernels of several launches do (core/protocol.py `Commit`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from accumfused.core.engine import Engine
from accumfused.core.norm import Measured
from accumfused.core.protocol import run
from accumfused.core.reader import setting_grads
from accumfused.core.window import Phase, Window


def step_by_itself(optimizer: Any, engine: Engine, measured: Measured) -> None:
    """Runs torch's own step on scaled gradients in `p.grad`; the host waits for the coefficient."""
    window, phase, params = engine.window, engine.window.phase, measured.plan.params
    coefficient, _, skipped = measured.outcome.values.tolist()
    if skipped:
        engine.commit_of_step(measured).end()
        return
    step: Any = optimizer.torch_class.step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # the hooks are ours already
    grads: list[Tensor | None] = [param.grad for param in params]
    scaled = _scaled(measured, window, grads, coefficient)
    _free_dtypes(window, params, scaled)
    attributes = vars(optimizer)
    hidden = {name: attributes[name] for name in ("grad_scale", "found_inf") if name in attributes}
    shown = partial(attributes.update, hidden)
    before = _Before(optimizer, scaled)
    returned = () if phase is Phase.CLOSED else (setting_grads(params, grads),)  # else the commit releases them
    commit = engine.commit_of_step(measured, *returned, shown)
    try:
        run([*commit.begins, *(partial(attributes.pop, name) for name in hidden), setting_grads(params, scaled)])
        step(optimizer)
        commit.end()
    except BaseException:
        if not measured.is_made:
            run([setting_grads(params, grads), shown])
            if before.restore():
                window.phase = phase
            window.restore_grad_dtypes()
        raise


def _scaled(measured: Measured, window: Window, grads: list[Tensor | None], coefficient: float) -> list[Tensor | None]:
    """Makes the gradients that the step takes: copies, but for those that it takes as they are.

    Those of a window get the parameter's dtype, because some of torch's steps refuse another.
    """
    outcome, scaled = measured.outcome, list[Tensor | None]()
    is_one = coefficient == 1.0 and outcome.coefficients is None
    rows = zip(measured.plan.rows, measured.taken.sums, grads, strict=True)
    for index, (row, taken, grad) in enumerate(rows):
        if taken is None:
            scaled.append(None)
            continue
        keeps_dtype = window.phase is Phase.IDLE or getattr(row.param, "grad_dtype", None) == taken.dtype
        dtype = taken.dtype if keeps_dtype else row.param.dtype
        if is_one and dtype == taken.dtype and grad is not None:
            scaled.append(grad)
            continue
        if not (is_one and dtype == taken.dtype):
            # 16 bits in fp32: torch may round a factor of 16-bit tensors to their dtype.
            wide = taken if taken.dtype in (torch.float32, torch.float64) else taken.float()
            taken = (wide * outcome.coefficient_of(index).to(taken.device)).to(dtype)
        scaled.append(taken if row.shard is None else row.shard.whole(taken))
    return scaled


def _free_dtypes(window: Window, params: list[Tensor], grads: list[Tensor | None]) -> None:
    """Lets `p.grad` of an open window have a dtype that autograd's may not; the window's end restores it."""
    for param, grad in zip(params, grads, strict=True):
        dtype = getattr(param, "grad_dtype", None)
        if grad is not None and dtype not in (None, grad.dtype):
            window.grad_dtypes[param], param.grad_dtype = dtype, None


class _Before:
    """Parameters and states before a step that may fail.

    A step that has begun to write tells by the tensors' versions, and by the step counts, which steps advance first:
    torch's operations on lists leave no version. (Writes through `.data`, and on lists where no step is counted, go
    unseen.)

    Args:
        scaled: the gradients that the step takes.
    """

    def __init__(self, optimizer: Any, scaled: list[Tensor | None]) -> None:
        self._optimizer = optimizer
        self._groups = [dict(group) for group in optimizer.param_groups]
        states = optimizer.state.items()
        self._states = {key: dict(entries) if isinstance(entries, dict) else entries for key, entries in states}
        tensors = [leaf for leaf in tree_leaves([*self._states.values()]) if isinstance(leaf, Tensor)]
        self._numbers = [(number, number.clone()) for number in tensors if number.numel() == 1]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        grads = [grad for grad in scaled if grad is not None]
        self._versions = [(tensor, _version(tensor)) for tensor in (*params, *tensors, *grads)]

    def restore(self) -> bool:
        """Restores the states if the step has not begun to write, and returns whether it has not.

        New states that count no step go in any case: they may be half made.
        """
        state = self._optimizer.state
        new = [key for key in state if isinstance(state[key], dict) and self._states.get(key, {}) == {}]
        has_begun = (
            any(state[key].get("step", 0) != 0 for key in new)
            or any(_version(tensor) != version for tensor, version in self._versions)
            or any(not torch.equal(number, value) for number, value in self._numbers)
        )
        for key in new:
            if not has_begun or ("step" in state[key] and state[key]["step"] == 0):
                del state[key]
        if has_begun:
            return False
        for group, options in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(options)
        state.update(self._states)
        return True


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
