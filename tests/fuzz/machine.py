"""The rules: what a training loop, and its user, may call in any order."""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

import accumfused as af
from fuzz import draws
from fuzz.bounds import UNIT, Bounded
from fuzz.step import Side, step_together

GROWTH_INTERVAL = 3  # of scalers
WRITES = {  # from outside, under no_grad; nobody can see one through `.data`
    "copy": lambda p, seed: p.copy_(draws.random(p.shape, seed)),
    "scale": lambda p, seed: p.mul_(0.5),
    "element": lambda p, seed: p.view(-1)[:1].fill_(3.0) if p.is_contiguous() else p.clamp_(-1.0, 1.0),
    "nothing": lambda p, seed: p.add_(0.0),
    "data": lambda p, seed: p.data.mul_(draws.random(p.shape, seed) > 0),
}
HOW = ["freeze", "thaw", "thaw", "lay out", "add"]
ENDS = ["zero_grad", "zero_grad", "close", "keep", "drop"]
CHANGES = [{}, {"lr": 0.1}, {"lr": 0.02}, {"momentum": 0.0}, {"momentum": 0.6}, {"weight_decay": 0.3}]


class Machine(RuleBasedStateMachine):
    """One optimizer, or two that are clipped together, with GradScalers, in any sequence of calls."""

    @initialize(config=draws.configurations())
    def begin(self, config: dict[str, Any]) -> None:
        self.config, self.scalers, self.left = config, dict[bool, Any](), None
        torch.set_default_dtype(draws.DTYPES[config["default_dtype"]])
        self.sides = list[Side]()
        self.sides += [Side(each, self.sides) for each in (config, config["mate"]) if each]
        self.group = config["mate"] and af.ClipGroup([side.optimizer for side in self.sides], config["together"])

    def teardown(self) -> None:
        torch.set_default_dtype(torch.float32)

    def side(self, index: int) -> Side:
        return self.sides[index % len(self.sides)]

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
          poison=draws.poisons, dtype=draws.losses)  # fmt: skip
    def own_backward(self, side: int, **arguments: Any) -> None:
        if self.config["style"] not in ("tiny", "huge"):  # in the loss they would leave the range of fp32
            self.side(side).own_backward(**arguments)

    @rule(side=draws.SIDES, rows=draws.rows, seed=draws.SEEDS, weight=draws.weights, count=st.integers(1, 3),
          last=draws.flags, step=draws.flags, resumed=draws.BACKENDS, overflows=draws.overflows)  # fmt: skip
    def micro_batches(
        self, side: int, rows: list[int], seed: int, weight: Any, count: int, last: bool, step: bool, resumed: Any,
        overflows: list[bool],
    ) -> None:  # fmt: skip
        """A window, or the beginning of one, as a loop has it. Args: resumed: by this backend, after one of them."""
        for index in range(count):
            if resumed is not None and index == 1:
                self.load(side, "now", resumed)
            is_bad = overflows[index] and self.side(side).drops
            self.side(side).backward(rows, seed + index, math.inf if is_bad else None)
            self.side(side).accumulate(weight, last and index == count - 1)
        if step:
            self.step(side)

    @rule(side=draws.SIDES, rows=draws.rows, seed=draws.SEEDS, weight=draws.weights, count=st.integers(1, 5),
          steps=st.integers(1, 3), is_sized=draws.flags, end=st.integers(1, 6), ends=st.sampled_from(ENDS),
          overflows=draws.overflows, resumes=draws.flags)  # fmt: skip
    def loop(
        self, side: int, rows: list[int], seed: int, weight: Any, count: int, steps: int, is_sized: bool, end: int,
        ends: str, overflows: list[bool], resumes: bool,
    ) -> None:  # fmt: skip
        """A loop over af.windows, which a break may end. Args: ends: what follows it. resumes: the open window."""
        own, items = self.side(side), range(count)
        begun = own.arrived + own.entered if resumes and own.phase == "open" else 0
        resumed = own.optimizer if resumes else None
        iterator = iter(af.windows(items if is_sized else iter(items), steps, resumed=resumed))
        left = max(1, steps - begun)
        for item, last in iterator:
            left = (left or steps) - 1
            assert last == (left == 0 or item == count - 1), f"last is {last} at {item} of {count}"
            own.backward(rows, seed + item, math.inf if overflows[item] and own.drops else None)
            own.accumulate(weight)
            if item == end - 1:
                break
            if last:
                self.step(side)
        if ends == "close":
            iterator.close()  # type: ignore[attr-defined]
        elif ends == "zero_grad":
            self.zero_grad(side, True)
        self.left = iterator if ends == "keep" else None  # (Python closes others.)

    @rule(side=draws.SIDES, normalizer=draws.normalizers, scale=draws.grad_scales, found=draws.found_infs)
    def step(self, side: int, normalizer: Any = None, scale: Any = None, found: Any = None) -> None:
        number = None if isinstance(normalizer, tuple) else normalizer
        if self.group is None:
            self.sides[0].step(normalizer, scale, found)
            return
        if found is not None:
            self.side(side).attempt(self.side(side).optimizer.step, RuntimeError)
        call = functools.partial(self.group.step, normalizer=number)
        if not step_together(self.sides, call, number, self.group.max_grad_norm):
            self.sides[0].zero_grad()
            self.sides[1].zero_grad()

    @rule(side=draws.SIDES, set_to_none=draws.flags)
    def zero_grad(self, side: int, set_to_none: bool) -> None:
        self.side(side).zero_grad(set_to_none)

    @rule(side=draws.SIDES, change=st.sampled_from(CHANGES), clip=st.sampled_from(["same", None, 1.0, 20.0]))
    def set(self, side: int, change: dict[str, Any], clip: Any) -> None:
        """What may change between steps."""
        own = self.side(side)
        groups = own.optimizer.param_groups
        if "lr" in change or not own.foreign:  # (torch's RMSprop makes its buffer at first only)
            known = {"lr", *own.config["options"]}
            groups[-1].update({name: value for name, value in change.items() if name in known})
        if clip != "same" and (self.group is None or clip is not None):
            (own.optimizer if self.group is None else self.group).max_grad_norm = clip

    @rule(side=draws.SIDES, bucket_bytes=st.sampled_from([1, 64, 2**20, None]))
    def release_gradients(self, side: int, bucket_bytes: int | None) -> None:
        """Args: bucket_bytes: None: this ends."""
        own, is_open = self.side(side), self.side(side).phase == "open"
        if bucket_bytes is None:
            if own.handle is not None and own.attempt(own.handle.remove, RuntimeError if is_open else None):
                own.handle = None
        elif own.drops:  # it looks at whole micro-batches
            own.attempt(lambda: af.release_gradients(own.optimizer, bucket_bytes), ValueError)
        elif own.is_readable():
            handles, refusal = list[Any](), RuntimeError if own.handle is not None or is_open else None
            own.attempt(lambda: handles.append(af.release_gradients(own.optimizer, bucket_bytes)), refusal)
            own.handle = handles[0] if handles else own.handle

    # ---- loss scaling ----------------------------------------------------------------------------------------------

    @rule(ours=draws.flags, unscale=draws.lasts, zero=draws.flags)
    def scaled_step(self, ours: bool, unscale: bool, zero: bool) -> None:
        """unscale_() perhaps, step() and update(), over gradients of any scale, by af.GradScaler or torch's."""
        ours, unscale = ours or self.group is not None, unscale and self.group is None
        side, cls = self.sides[0], af.GradScaler if ours else torch.amp.GradScaler
        dtypes = {side.params[row].grad.dtype for row in side.live()}
        refuses = side.phase == "open" and (unscale or not ours)
        refuses |= side.drops and side.phase == "closed" and not ours
        if self.group is None and not all(map(side.is_plain, side.live())):
            return
        if (unscale or not ours) and not refuses and (not dtypes or torch.float16 in dtypes):
            return  # torch refuses these
        if ours not in self.scalers:
            self.scalers[ours] = cls("cpu", init_scale=2.0**4, growth_interval=GROWTH_INTERVAL)
            self.scalers[ours].scale(torch.ones((), dtype=torch.float32))
        scaler, made = self.scalers[ours], False
        scale, grows = scaler.get_scale(), scaler.state_dict()["_growth_tracker"] + 1 == GROWTH_INTERVAL
        infinite = self.group is None and any(not bool(side.params[row].grad.isfinite().all()) for row in side.live())
        dropped = any(each.has_dropped for each in self.sides)
        skips, call = [side.skips for side in self.sides], lambda: scaler.step(self.group or side.optimizer)
        if self.group is not None:
            divisor = torch.tensor(scale, dtype=torch.float32)
            made = step_together(self.sides, call, divisor, self.group.max_grad_norm, for_scaler=True)
        elif refuses:  # (torch's unscale_() asks nobody; what it has not seen its step() refuses.)
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
        if made:
            side.attempt(scaler.update)
            overflow = dropped or skips != [side.skips for side in self.sides] if ours else infinite
            assert scaler.get_scale() == scale * (0.5 if overflow else 2.0 if grows else 1.0)
        else:
            del self.scalers[ours]
        for each in self.sides if zero or (self.group and not made) else ():
            each.zero_grad()

    # ---- by hand ---------------------------------------------------------------------------------------------------

    @rule(
        side=draws.SIDES, row=draws.ROW, seed=draws.SEEDS, kind=st.sampled_from([*draws.GRADS, *["shared", "kept"] * 2])
    )
    def set_grad(self, side: int, row: int, seed: int, kind: str) -> None:
        """shared: with another parameter's. kept: by somebody who will write it."""
        own = self.side(side)
        row %= len(own.params)
        param = own.params[row]
        if own.entered or (own.foreign and kind in ("expanded", "negative", "shared")):  # it is clipped in place
            return
        grads = {row: draws.GRADS.get(kind, lambda v: v)(draws.random(param.shape, seed, 2.0).to(param.dtype))}
        if kind == "shared":
            flat = draws.random([max(p.numel() for p in own.params)], seed, 2.0).to(param.dtype)
            views = {p.shape: flat[: p.numel()].view(p.shape) for p in own.params}
            grads = {each: views[own.params[each].shape] for each in (row, seed % len(own.params))}
        elif kind == "kept":
            own.kept = grads[row][...] if seed % 2 else grads[row]
        for each, grad in grads.items():
            param, own.params[each].grad = own.params[each], None
            if grad.dtype != (param.grad_dtype or grad.dtype):
                param.grad_dtype = grad.dtype
                own.narrow |= {each} if grad.element_size() == 2 else set()
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
            if not own.entered and own.settings.get("state_dtype") != "8bit":  # blocks of memory would be rounded anew
                param.data = draws.transposed(param.detach())
        elif how in WRITES:
            self.write_param(own, row, seed, how)
        elif len(own.params) < 7:
            shape = draws.SHAPES[seed % len(draws.SHAPES)]
            own.params.append(draws.parameter(shape, "transposed", own.config["params"][0][2], seed))
            own.full.append(own.params[-1].detach().double())
            own.states.append({})
            own.attempt(lambda: own.optimizer.add_param_group({"params": own.params[-1:], "lr": 0.05}))

    def write_param(self, own: Side, row: int, seed: int, kind: str) -> None:
        with torch.no_grad():
            WRITES[kind](own.params[row], seed)
        own.wrote(row)

    # ---- copies and checkpoints ------------------------------------------------------------------------------------

    @rule(side=draws.SIDES)
    def save(self, side: int) -> None:
        """A checkpoint for later, with the weights."""
        own, saved, file = self.side(side), list[Any](), io.BytesIO()
        model = torch.nn.ParameterList(own.params)
        if not own.attempt(lambda: saved.append(own.optimizer.state_dict()), RuntimeError if own.entered else None):
            return
        full = own.optimizer.full_precision_state_dict(model)
        for row, weights in enumerate(full.values()):
            assert torch.equal(weights.double().nan_to_num(7e7), own.full[row].nan_to_num(7e7)), f"full precision {row}"
        torch.save((*saved, full, model.state_dict()), file)
        file.seek(0)
        own.saved = (*torch.load(file, weights_only=True), own.known())

    @rule(side=draws.SIDES, way=st.sampled_from(["shared", "now", "before", "after", "full"]),
          backend=draws.BACKENDS)  # fmt: skip
    def load(self, side: int, way: str, backend: str | None) -> None:
        """A checkpoint into a fresh optimizer of the same parameters, with this backend, or into the same one.

        Args:
            way: shared: of now, in memory. now: through a file. Otherwise an earlier one with its weights, which are
                loaded before or after it, or after it in full precision.
        """
        own, model = self.side(side), torch.nn.ParameterList(self.side(side).params)
        if way == "now":
            self.save(side)
        if own.saved is None or own.entered or (backend is not None and own.handle is not None):
            return
        state, full, weights, known = copy.deepcopy(own.saved)  # torch shares what it loads
        if way == "shared":
            state, known = own.optimizer.state_dict(), own.known()
        of_master = {"master_weight", "master_remainder"}
        rows = [row for row in range(len(own.params)) if own.may_have_master(row)]
        bare = [row for row in rows if not of_master & state["state"].get(row, {}).keys()]
        fits = len(state["param_groups"]) == len(own.optimizer.param_groups)
        backend = backend if fits else None
        refusal = [RuntimeError] * (backend is None and own.phase == "open") + [ValueError] * (not fits)
        target, earlier = own.optimizer, way not in ("shared", "now") and not refusal
        if backend is not None:
            own.settings |= {"backend": backend} | ({"offload": False} if backend != "cpu" else {})
            target = own.build([{"params": list(g["params"]), "lr": 9.0} for g in own.optimizer.param_groups])
            target.max_grad_norm = own.optimizer.max_grad_norm
        if earlier and way == "before":
            model.load_state_dict(weights)
        if not own.attempt(lambda: target.load_state_dict(state), tuple(refusal) or None):
            return
        if backend is not None:
            own.optimizer, own.skips = target, 0
            self.group, limit = None, self.group and self.group.max_grad_norm
            self.group = limit and af.ClipGroup([side.optimizer for side in self.sides], limit)
        elif own.phase == "closed":
            assert not own.live(), "load_state_dict() left the closed window's p.grad"
        own.end_window()
        vars(own).update(known)
        own.of_tensors &= not (own.total and math.isfinite(own.total))  # else the host knows it now
        if earlier and way == "full":
            call = functools.partial(target.load_full_precision_state_dict, model, full)
            if own.attempt(call, RuntimeError if own.phase == "open" else None):
                return
        if earlier and way != "before":
            model.load_state_dict(weights)
        for row in bare if earlier else ():
            own.wrote(row)

    @rule(side=draws.SIDES, states=st.sampled_from([torch.float32, torch.bfloat16, "8bit"]),
          masters=st.sampled_from(draws.MASTERS["bf16"]))  # fmt: skip
    def convert(self, side: int, states: Any, masters: str | None) -> None:
        """A checkpoint of now into a fresh optimizer of another format, whose first step is skipped."""
        own = self.side(side)
        if own.foreign or own.phase != "idle" or own.handle is not None or self.group is not None:
            return
        states = torch.bfloat16 if own.config["options"].get("amsgrad") else states  # which 8 bits do not serve
        for param in own.params:
            param.grad = None
        saved, known = copy.deepcopy(own.optimizer.state_dict()), own.optimizer
        own.settings |= {"state_dtype": states, "state_dtype_min_numel": 4}
        if all(param.dtype == torch.bfloat16 for param in own.params):
            own.settings["master_weights"] = own.masters = masters
        own.optimizer = own.build([{"params": list(g["params"]), "lr": 9.0} for g in known.param_groups])
        own.optimizer.max_grad_norm = known.max_grad_norm
        own.saved, own.skips = None, 0  # a checkpoint of the old format would be converted by a step that is made
        own.attempt(lambda: own.optimizer.load_state_dict(saved))
        own.skip_converting()

    @rule(pickled=draws.flags)
    def copy(self, pickled: bool) -> None:
        """A copy of optimizers and parameters goes on; the originals go another way."""
        old, copied = ([(own.params, own.optimizer) for own in self.sides], self.group), list[Any]()
        call = lambda: copied.append(pickle.loads(pickle.dumps(old)) if pickled else copy.deepcopy(old))  # noqa: E731
        if not self.sides[0].attempt(call, RuntimeError if any(own.entered for own in self.sides) else None):
            return
        for own, (params, optimizer), new in zip(self.sides, old[0], copied[0][0], strict=True):
            own.params, own.optimizer = new
            own.handle = None
            if own.phase == "closed":
                own.end_window()
            states = [v for entries in optimizer.state.values() for v in entries.values() if isinstance(v, Tensor)]
            with torch.no_grad():
                for value in [*params, *states]:
                    value.fill_(77)
            if own.phase == "open" and optimizer.state:  # its sums are its own, too
                for param in params:
                    param.grad = param.grad_dtype = None
                    param.grad = torch.ones_like(param, requires_grad=False)
                optimizer.accumulate(1e-20 if own.weighted else None)  # as small as any first weight
        self.group = copied[0][1]
