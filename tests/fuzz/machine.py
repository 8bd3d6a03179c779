"""The rules: what a training loop, and its user, may call in any order."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

import accumfused as af
from fuzz import draws
from fuzz.bounds import UNIT, Bounded
from fuzz.step import Side, step_together
from fuzz.subject import KNOWN

GROWTH_INTERVAL = 3  # of scalers
WRITES = {  # from outside, under no_grad; nobody can see one through `.data`
    "copy": lambda p, seed: p.copy_(draws.random(p.shape, seed)),
    "scale": lambda p, seed: p.mul_(0.5),
    "element": lambda p, seed: p.view(-1)[:1].fill_(3.0) if p.is_contiguous() else p.clamp_(-1.0, 1.0),
    "nothing": lambda p, seed: p.add_(0.0),
    "data": lambda p, seed: p.data.mul_(draws.random(p.shape, seed) > 0),
}
HOW = ["freeze", "thaw", "thaw", "lay out", "add"]
CHANGES = [{}, {"lr": 0.1}, {"lr": 0.02}, {"momentum": 0.0}, {"momentum": 0.6}, {"weight_decay": 0.3}]


class Machine(RuleBasedStateMachine):
    """One optimizer, or two that are clipped together, with GradScalers, in any sequence of calls."""

    @initialize(config=draws.configurations())
    def begin(self, config: dict[str, Any]) -> None:
        self.config, self.scalers = config, dict[bool, Any]()
        torch.set_default_dtype(draws.DTYPES[config["default_dtype"]])
        self.sides = list[Side]()
        self.sides += [Side(each, self.sides) for each in (config, config["mate"]) if each]
        if config["mate"]:
            self.group = af.ClipGroup([side.optimizer for side in self.sides], config["together"])

    def teardown(self) -> None:
        torch.set_default_dtype(torch.float32)

    def side(self, index: int) -> Side:
        return self.sides[index % len(self.sides)]

    def is_alone(self) -> bool:
        return len(self.sides) == 1

    @invariant()
    def nothing_else_was_written(self) -> None:
        for side in self.sides:
            side.check_unwritten()
        known = [value for side in self.sides for state in side.states for value in state.values()]
        known += [full for side in self.sides for full in side.full]
        if not all(bool(torch.as_tensor(value).isfinite().all()) for value in known):
            self.begin(self.config)  # by nonfinite="propagate": everything is NaN from here on

    # ---- the calls of a loop ---------------------------------------------------------------------------------------

    @rule(side=draws.SIDES, rows=draws.rows, seed=draws.SEEDS, poison=draws.poisons)
    def backward(self, side: int, rows: list[int], seed: int, poison: float | None) -> None:
        self.side(side).backward(rows, seed, poison)

    @rule(side=draws.SIDES, weight=draws.weights, last=draws.lasts)
    def accumulate(self, side: int, weight: Any, last: bool) -> None:
        self.side(side).accumulate(weight, last)

    @rule(side=draws.SIDES, rows=draws.rows, seed=draws.SEEDS, weight=draws.weights, last=draws.lasts,
          poison=draws.poisons)  # fmt: skip
    def own_backward(self, side: int, **arguments: Any) -> None:
        if self.config["style"] not in ("tiny", "huge"):  # in the loss they would leave the range of fp32
            self.side(side).own_backward(**arguments)

    @rule(side=draws.SIDES, rows=draws.rows, seed=draws.SEEDS, weight=draws.weights, count=st.integers(1, 3),
          last=draws.flags, step=draws.flags)  # fmt: skip
    def micro_batches(
        self, side: int, rows: list[int], seed: int, weight: Any, count: int, last: bool, step: bool
    ) -> None:
        """A window, or the beginning of one, as a loop has it."""
        for index in range(count):
            self.side(side).backward(rows, seed + index)
            self.side(side).accumulate(weight, last and index == count - 1)
        if step:
            self.step(side)

    @rule(side=draws.SIDES, normalizer=draws.normalizers, scale=draws.grad_scales, found=draws.found_infs)
    def step(self, side: int, normalizer: Any = None, scale: Any = None, found: Any = None) -> None:
        number = None if isinstance(normalizer, tuple) else normalizer
        if self.is_alone():
            self.sides[0].step(normalizer, scale, found)
        elif not step_together(self.sides, self.group, number):
            self.sides[0].zero_grad()
            self.sides[1].zero_grad()

    @rule(side=draws.SIDES, set_to_none=draws.flags)
    def zero_grad(self, side: int, set_to_none: bool) -> None:
        self.side(side).zero_grad(set_to_none)

    @rule(side=draws.SIDES, change=st.sampled_from(CHANGES), clip=st.sampled_from(["same", None, 1.0, 20.0]),
          epoch=draws.lasts)  # fmt: skip
    def set(self, side: int, change: dict[str, Any], clip: Any, epoch: bool) -> None:
        """What may change between steps; an epoch is a scheduler's."""
        own = self.side(side)
        groups = own.optimizer.param_groups
        if "lr" in change or not own.foreign:  # (torch's RMSprop makes its buffer at first only)
            known = {"lr", *own.config["options"]}
            groups[-1].update({name: value for name, value in change.items() if name in known})
        if clip != "same" and self.is_alone():
            own.optimizer.max_grad_norm = clip
        if epoch:
            half = torch.optim.lr_scheduler.MultiplicativeLR
            if own.scheduler and len(own.scheduler.base_lrs) != len(groups):
                own.scheduler = None  # torch's schedulers know the groups that were there when they were made
            own.scheduler = own.scheduler or half(own.optimizer, lambda epoch: 0.5 if epoch % 2 else 2.0)
            expected = [group["lr"] * (2.0 if own.scheduler.last_epoch % 2 else 0.5) for group in groups]
            own.attempt(own.scheduler.step)
            assert [group["lr"] for group in groups] == expected

    @rule(side=draws.SIDES, bucket_bytes=st.sampled_from([1, 64, 2**20, None]))
    def release_gradients(self, side: int, bucket_bytes: int | None) -> None:
        """Args: bucket_bytes: None: this ends."""
        own, is_open = self.side(side), self.side(side).phase == "open"
        if bucket_bytes is None:
            if own.handle is not None and own.attempt(own.handle.remove, RuntimeError if is_open else None):
                own.handle = None
        elif own.is_readable():
            handles, refusal = list[Any](), RuntimeError if own.handle is not None or is_open else None
            own.attempt(lambda: handles.append(af.release_gradients(own.optimizer, bucket_bytes)), refusal)
            own.handle = handles[0] if handles else own.handle

    # ---- loss scaling ----------------------------------------------------------------------------------------------

    @precondition(is_alone)
    @rule(ours=draws.flags, unscale=draws.lasts, zero=draws.flags)
    def scaled_step(self, ours: bool, unscale: bool, zero: bool) -> None:
        """unscale_() perhaps, step() and update(), over gradients of any scale, by af.GradScaler or torch's."""
        side, cls = self.sides[0], af.GradScaler if ours else torch.amp.GradScaler
        dtypes = {side.params[row].grad.dtype for row in side.live()}
        refuses = side.phase == "open" and (unscale or not ours)
        if not all(map(side.is_plain, side.live())):
            return
        if (unscale or not ours) and not refuses and (not dtypes or torch.float16 in dtypes):
            return  # torch refuses these
        if ours not in self.scalers:
            self.scalers[ours] = cls("cpu", init_scale=2.0**4, growth_interval=GROWTH_INTERVAL)
            self.scalers[ours].scale(torch.ones((), dtype=torch.float32))
        scaler, made = self.scalers[ours], False
        scale, grows = scaler.get_scale(), scaler.state_dict()["_growth_tracker"] + 1 == GROWTH_INTERVAL
        infinite = any(not bool(side.params[row].grad.isfinite().all()) for row in side.live())
        skips, call = side.skips, lambda: scaler.step(side.optimizer)
        if refuses:  # (torch's unscale_() asks nobody; what it has not seen its step() refuses.)
            side.attempt((lambda: scaler.unscale_(side.optimizer)) if ours else call, RuntimeError)
        elif not ours and infinite:  # torch's scaler never calls step()
            made = side.attempt(call)
        else:
            if unscale or not ours:
                before = {row: Bounded.exact(side.params[row].grad).times(1 / scale) for row in side.live()}
                side.attempt(lambda: scaler.unscale_(side.optimizer))
                for row, known in before.items():
                    grad = side.params[row].grad
                    known.rounded(2 * UNIT[grad.dtype]).check(grad, f"unscale_(): gradient {row}")
            divisor = None if unscale or not ours else torch.tensor(scale, dtype=torch.float32)
            found = float(infinite) if unscale and ours else None
            made = side.expected_step(
                call, [None, divisor], found=found, for_scaler=ours, is_unchecked=ours and not unscale
            )
        if not made:
            del self.scalers[ours]
            return
        side.attempt(scaler.update)
        overflow = side.skips > skips if ours else infinite
        assert scaler.get_scale() == scale * (0.5 if overflow else 2.0 if grows else 1.0)
        if zero:
            side.zero_grad()

    # ---- by hand ---------------------------------------------------------------------------------------------------

    @rule(side=draws.SIDES, row=draws.ROW, seed=draws.SEEDS, kind=st.sampled_from([*draws.GRADS]))
    def set_grad(self, side: int, row: int, seed: int, kind: str) -> None:
        own = self.side(side)
        row %= len(own.params)
        param = own.params[row]
        if own.entered or (own.foreign and kind in ("expanded", "negative")):  # it is clipped in place
            return
        grad, param.grad = draws.GRADS[kind](draws.random(param.shape, seed, 2.0).to(param.dtype)), None
        if grad.dtype != (param.grad_dtype or grad.dtype):
            param.grad_dtype = grad.dtype
            own.narrow |= {row} if grad.dtype == torch.bfloat16 else set()
        param.grad = grad

    @rule(side=draws.SIDES, rows=draws.rows, how=st.sampled_from(["clear", "clear", "fill", "clip", "clip"]))
    def touch_grads(self, side: int, rows: list[int], how: str) -> None:
        """clear, fill: as model.zero_grad() does. clip: by torch."""
        own = self.side(side)
        params = [own.params[row] for row in sorted({row % len(own.params) for row in rows}) if not own.entered]
        if how == "clear":
            for param in params:
                param.grad = None
        elif own.is_readable() and all(map(own.is_plain, own.live())):
            with torch.no_grad():
                for grad in [param.grad for param in params if param.grad is not None and how == "fill"]:
                    grad.zero_()
                torch.nn.utils.clip_grad_norm_(params, 0.5)

    @rule(side=draws.SIDES, row=draws.ROW, seed=draws.SEEDS, how=st.sampled_from([*WRITES, *HOW]))
    def touch_param(self, side: int, row: int, seed: int, how: str) -> None:
        """Written, frozen or not, added in a group, or laid out anew in memory with the same numbers."""
        own = self.side(side)
        row %= len(own.params)
        param = own.params[row]
        if how in ("freeze", "thaw"):
            param.requires_grad_(how == "thaw")
        elif how == "lay out":
            if not own.entered and own.settings.get("state_dtype") != "int8":  # blocks of memory would be rounded anew
                param.data = draws.transposed(param.detach())
        elif how in WRITES:
            self.write_param(own, row, seed, how)
        elif len(own.params) < 7:
            shape = draws.SHAPES[seed % len(draws.SHAPES)]
            own.params.append(draws.parameter(shape, "transposed", own.config["params"][0][2], seed))
            own.full.append(own.params[-1].detach().double())
            own.states.append({})
            own.written.append(False)
            own.attempt(lambda: own.optimizer.add_param_group({"params": own.params[-1:], "lr": 0.05}))

    def write_param(self, own: Side, row: int, seed: int, kind: str) -> None:
        param = own.params[row]
        has_master = param.dtype != torch.float32 and own.masters is not None
        if own.trusted and has_master and "written after load" in KNOWN:
            return
        with torch.no_grad():
            WRITES[kind](param, seed)
        now, master = param.detach(), own.optimizer.state.get(param, {}).get("master_weight")
        if master is not None:  # its elements serve where they are rounded to the parameter's, and serve again
            own.full[row] = torch.where(master.to(param.dtype) == now, master, now.float()).double()
        elif kind == "data" and not own.written[row]:  # the old remainder counts
            own.full[row] = own.actual(row).clone()
        else:
            own.full[row] = now.double()
        own.written[row] |= has_master and kind != "data"

    # ---- copies and checkpoints ------------------------------------------------------------------------------------

    @precondition(is_alone)
    @rule(way=st.sampled_from(["shared", "saved", "reloaded", "deepcopied", "pickled"]),
          backend=st.sampled_from(["cpu", "torch", "foreach"]))  # fmt: skip
    def carry_over(self, way: str, backend: str) -> None:
        """A checkpoint into a fresh optimizer of the same parameters, or into the same one; or a copy of both."""
        if way in ("deepcopied", "pickled"):
            self.copy(pickled=way == "pickled")
            return
        own = self.sides[0]
        if own.entered:
            own.attempt(own.optimizer.state_dict, RuntimeError)
            return
        state, file = own.optimizer.state_dict(), io.BytesIO()
        if way == "reloaded":
            refusal = RuntimeError if own.phase == "open" else None
            if not own.attempt(lambda: own.optimizer.load_state_dict(state), refusal):
                return
            assert own.phase != "closed" or not own.live(), "load_state_dict() left the closed window's p.grad"
        elif own.handle is not None:
            return
        else:
            if way == "saved":
                torch.save(state, file)
                file.seek(0)
                state = torch.load(file, weights_only=True)
            own.settings |= {"backend": backend}
            fresh = own.build([{"params": list(g["params"]), "lr": 9.0} for g in own.optimizer.param_groups])
            fresh.max_grad_norm = own.optimizer.max_grad_norm
            own.attempt(lambda: fresh.load_state_dict(state))
            own.optimizer, own.skips, own.scheduler = fresh, 0, None
        own.trusted = True
        if own.phase == "closed":
            own.end_window()

    def copy(self, pickled: bool) -> None:
        """A copy of optimizer and parameters goes on; the original goes another way."""
        own = self.sides[0]
        old, copied = (own.params, own.optimizer), list[Any]()
        call = lambda: copied.append(pickle.loads(pickle.dumps(old)) if pickled else copy.deepcopy(old))  # noqa: E731
        if not own.attempt(call, RuntimeError if own.entered else None):
            return
        own.params, own.optimizer = copied[0]
        own.handle, own.scheduler, own.skips, own.trusted = None, None, 0, False
        if own.phase == "closed":
            own.end_window()
        states = [v for entries in old[1].state.values() for v in entries.values() if isinstance(v, Tensor)]
        with torch.no_grad():
            for value in [*old[0], *states]:
                value.fill_(77)
        if own.phase == "open" and old[1].state:  # its sums are its own, too
            for param in old[0]:
                param.grad = param.grad_dtype = None
                param.grad = torch.ones_like(param, requires_grad=False)
            own.attempt(lambda: old[1].accumulate(None if not own.weighted else 1.0))
