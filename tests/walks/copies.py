"""Copies and checkpoints, in any state."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import Tensor

from walks.moves import Moves
from walks.numbers import Bounded
from walks.steps import Side
from walks.subject import require


class Copies(Moves):
    """state_dict, load_state_dict, deepcopy, pickle."""

    def do_state_dict(self, side: Side) -> None:
        side.attempt(side.optimizer.state_dict, RuntimeError if side.entered else None)

    def do_resume(self, side: Side, way: str, backend: str, reload: bool) -> None:
        """A checkpoint into a fresh optimizer of the same parameters."""
        if not self.is_alone:
            return
        if side.entered:
            side.attempt(side.optimizer.state_dict, RuntimeError)
            return
        if reload:
            state = side.optimizer.state_dict()
            if side.attempt(
                lambda: side.optimizer.load_state_dict(state), RuntimeError if side.phase == "open" else None
            ):
                self._after_load(side, closed_is_released=True)
            return
        if side.handle is not None:
            if side.phase == "open":
                return
            self.do_remove(side)
        state = side.optimizer.state_dict()
        if way == "saved":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        elif way == "deepcopied":
            state = copy.deepcopy(state)
        side.config = {**side.config, "settings": {**side.config["settings"], "backend": backend}}
        groups = [{"params": list(g["params"]), "lr": 9.0} for g in side.optimizer.param_groups]
        clip = side.clip
        fresh = side.build(groups)
        fresh.max_grad_norm = clip
        side.attempt(lambda: fresh.load_state_dict(state))
        side.optimizer, side.skips = fresh, 0
        self._after_load(side, closed_is_released=False)

    def _after_load(self, side: Side, *, closed_is_released: bool) -> None:
        side.trusted = True
        if side.phase == "closed":
            if closed_is_released:
                require(not side.live(), "load_state_dict() left the closed window's p.grad")
            side._end()

    def do_save(self, side: Side) -> None:
        """A checkpoint of model and optimizer, and all that the model knows."""
        if not self.is_alone or side.entered:
            return
        names = ("full", "states", "steps", "sums", "total", "weighted", "count", "of_tensors")
        known = {name: copy.deepcopy(getattr(side, name)) for name in names}
        params = [param.detach().clone() for param in side.params]
        state = copy.deepcopy(side.optimizer.state_dict())
        side.saved = {"phase": side.phase, "known": known, "params": params, "state": state}

    def do_load(self, side: Side, params_first: bool) -> None:
        """Back to the checkpoint; the model's weights come before or after the optimizer's state."""
        saved = side.saved
        if not self.is_alone or saved is None or side.entered or any(map(side.is_alias, side.live())):
            return
        fits = len(saved["params"]) == len(side.params)
        remainders = any("master_remainder" in entries for entries in side.optimizer.state.values())
        if params_first and side.trusted and remainders and "written after load" in self.known:
            return  # a checkpoint after a checkpoint
        refusals = ([RuntimeError] if side.phase == "open" else []) + ([] if fits else [ValueError])
        if not refusals and params_first:
            self._put(side, saved["params"])
        state = copy.deepcopy(saved["state"])
        if not side.attempt(lambda: side.optimizer.load_state_dict(state), tuple(refusals) or None):
            return
        if not params_first:
            self._put(side, saved["params"])
        if side.phase == "closed":
            require(not side.live(), "load_state_dict() left the closed window's p.grad")
        side._end()
        for name, value in copy.deepcopy(saved["known"]).items():
            setattr(side, name, value)
        if saved["phase"] == "open":
            side.phase = "open"
        else:
            side.forget_window()
        side.written, side.trusted = [False] * len(side.params), True
        for row, param in enumerate(side.params):
            entries = side.optimizer.state.get(param, {})
            has_brought = {"master_weight", "master_remainder"} & saved["state"]["state"].get(row, {}).keys()
            if "master_weight" in entries and not has_brought:  # it stayed
                master = entries["master_weight"]  # which serves again where its weights have come back
                same = master.to(param.dtype) == param.detach()
                side.full[row] = torch.where(same, master.double(), param.detach().double())
            elif "master_remainder" in entries and not has_brought:
                side.full[row], side.written[row] = param.detach().double(), True

    @staticmethod
    def _put(side: Side, values: list[Tensor]) -> None:
        with torch.no_grad():
            for param, value in zip(side.params, values, strict=True):
                param.copy_(value)

    def do_copy(self, side: Side, way: str) -> None:
        """A copy of optimizer and parameters goes on; the original goes another way."""
        if not self.is_alone:
            return
        if side.entered:
            side.attempt(lambda: copy.deepcopy(side.optimizer), RuntimeError)
            return
        both = side.params, side.optimizer
        copied: list[Any] = []

        def call() -> None:
            copied.append(copy.deepcopy(both) if way == "deepcopied" else pickle.loads(pickle.dumps(both)))

        side.attempt(call)
        old_params, old = both
        if side.handle is not None and side.phase != "open":
            side.handle.remove()
        side.handle = None
        side.params, side.optimizer = copied[0]
        side.skips, side.trusted = 0, False
        if side.phase == "closed":
            side._end()
        with torch.no_grad():  # what happens to the original is nothing to the copy
            for param in old_params:
                param.fill_(77.0)
            for entries in old.state.values():
                for value in entries.values():
                    if isinstance(value, Tensor):
                        value.fill_(3)
        side.buffers.clear()

    def do_full_precision(self, side: Side) -> None:
        """What the optimizer gives as the model's weights."""
        model = torch.nn.ParameterList(side.params)
        found: dict[str, Tensor] = {}
        side.attempt(lambda: found.update(side.optimizer.full_precision_state_dict(model)))
        for row, full in enumerate(side.full):
            different = Bounded.exact(full).differs(found[str(row)])
            require(different is None, f"full_precision_state_dict(): parameter {row}: {different}")
