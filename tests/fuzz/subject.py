"""One optimizer under test with its parameters, and the model's state beside it: what is compared, and how."""

from __future__ import annotations

import copy
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from compare import differences, snapshot
from models import in_fp64
from oracle import of_torch
from table import OPTIMIZERS, Own, OwnAdagrad
from torch import Tensor

import accumfused as af
from accumfused.formats.kinds import state_in
from fuzz.bounds import BF16, FP32, UNIT, Bounded, Update, tensors
from fuzz.draws import parameter, random

# What is known not to hold yet, and is left out; an entry is taken out with its repair.
KNOWN = {
    "refused after release": "a micro-batch has ended before its step() is refused, for another member, say",
}
FOREIGN = {"own RMSprop": Own, "own Adagrad": OwnAdagrad}
WINDOW = ("phase", "total", "weighted", "count", "of_tensors", "unit", "sums", "arrived", "has_dropped")
STATES = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "step")
EXPECTED_WARNINGS = re.compile(
    "windows (in a row )?were dropped|written while a window was open|steps were skipped|gradient layout contract|"
    "iteration of windows.. has left open|still holds the previous windows' gradients"
)
Refusal = type[Exception] | tuple[type[Exception], ...] | None


class Subject:
    """An optimizer with its parameters, and the model of both. Its state is in float64."""

    def __init__(self, config: dict[str, Any], scope: list[Any]) -> None:
        """Args: scope: all subjects that a refused call must not have changed, this one among them."""
        self.config, self.scope, self.rule = config, scope, config["rule"]
        self.params = [parameter(*made) for made in config["params"]]
        self.foreign, self.settings = self.rule in FOREIGN, dict(config["settings"])
        self.masters = self.settings.get("master_weights", "auto")
        cut = config["cut"] % len(self.params)
        groups = [{"params": self.params[:cut], "lr": 0.07}, {"params": self.params[cut:]}]
        self.states: list[dict[str, Any]] = [{} for _ in self.params]
        self.optimizer = self.build(groups if cut else groups[1:], self.train)
        self.full = [p.detach().double() for p in self.params]  # the weights in full precision
        self.narrow: set[int] = set()  # rows whose p.grad has been in 16 bits
        self.kept: Tensor | None = None  # a gradient that somebody else holds
        self.saved: Any = None  # a checkpoint, and the model at that time
        self.handle: Any = None  # of release_gradients
        self.skips = 0
        self.end_window()

    def end_window(self) -> None:
        self.phase, self.total, self.weighted, self.count, self.of_tensors = "idle", 0.0, None, 0, False
        self.unit = 1.0  # of the first weight that is not 0
        self.arrived, self.has_dropped = 0, False  # micro-batches, and whether one was left out as not finite
        self.sums: dict[int, Bounded] = {}
        self.exposed: list[weakref.ref[Tensor]] = []
        self.entered, self.part = False, dict[int, Bounded]()  # a micro-batch that is folded during backward

    def build(self, groups: list[dict[str, Any]], train: Callable[[Any], None] = lambda optimizer: None) -> Any:
        options = self.config["options"]
        if not self.foreign and not self.config["fuse"]:
            return OPTIMIZERS[self.rule].ours(groups, **options, **self.settings)
        optimizer = (FOREIGN.get(self.rule) or OPTIMIZERS[self.rule].torch_class)(groups, **options)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)  # binds the step of before
        train(optimizer)
        return af.fuse(optimizer, **self.settings)

    def train(self, optimizer: torch.optim.Optimizer) -> None:
        """Some steps of torch's, of some parameters; their states become the model's."""
        for step in range(self.config["trained"] if "state_dtype" not in self.settings else 0):  # it would round them
            for row, param in enumerate(self.params):
                param.grad = random(param.shape, row + step).to(param.dtype) if (row + step) % 3 else None
            optimizer.step()
        optimizer.zero_grad()
        for param, state in zip(self.params, self.states, strict=True):
            known = optimizer.state.get(param, {}).items()
            state.update({name: value.to(torch.float64, copy=True) for name, value in known if value is not None})

    def update(self, options: dict[str, Any]) -> Update:
        """The rule in float64."""
        rule = of_torch(FOREIGN[self.rule]) if self.foreign else OPTIMIZERS[self.rule].oracle
        return lambda param, grad, state: rule(param, grad, state, **options)

    # ---- what is compared ------------------------------------------------------------------------------------------

    def attempt(self, call: Callable[[], Any], refusal: Refusal = None, only: tuple[str, ...] = ("",)) -> bool:
        """Makes the call; a refused one must have changed nothing (`only`: nothing whose name begins so)."""
        scope, error = [] if refusal is None else self.scope, None
        before = [(side.bits(), [id(p.grad) for p in side.params]) for side in scope]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call()
            except Exception as raised:
                if refusal is None or not isinstance(raised, refusal):
                    raise
                error = raised.with_traceback(None)  # whose frames would keep a ClipGroup alive
        for warning in caught:
            assert EXPECTED_WARNINGS.search(str(warning.message)), f"warned: {warning.message}"
        assert (error is None) == (refusal is None), f"was not refused, {refusal} expected"
        for side, (bits, grads) in zip(scope, before, strict=True):
            changed = [name for name in differences(bits, side.bits()) if name.startswith(only)]
            changed = [name for name in changed if not side.may_change(name)]
            assert not changed, f"refused, and changed {changed}: {error}"
            same = only != ("",) or grads == [id(p.grad) for p in side.params]
            assert same, f"refused, and exchanged p.grad: {error}"
        return error is None

    def bits(self) -> dict[str, Any]:
        """Everything that the optimizer can write."""
        return snapshot(self.optimizer)

    def may_change(self, name: str) -> bool:
        """States may be made, as zeros; and torch's made ours, before another member of the group refuses."""
        kind, row, *_ = [*name.split(), ""]
        return kind == "state" and (not self.states[int(row)] or bool(self.config["fuse"] and self.config["trained"]))

    def may_have_master(self, row: int) -> bool:
        return self.params[row].dtype != FP32 and self.masters is not None

    def wrote(self, row: int) -> None:
        """After a parameter was written from outside: it is read with its remainder, or master, as both stand."""
        self.full[row] = self.actual(row).clone()

    def known(self) -> dict[str, Any]:
        """The part of the model that a checkpoint holds: a closed window is not in it."""
        window = (*WINDOW,) if self.phase == "open" else ()
        return {name: copy.deepcopy(vars(self)[name]) for name in ("full", "states", *window)}

    def check_unwritten(self) -> None:
        """Parameters in full precision and states are those of the model."""
        for row, (full, state) in enumerate(zip(self.full, self.states, strict=True)):
            now = {"": self.actual(row), **self.state_of(row)}
            for name, value in {"": full, **tensors(state)}.items():
                same = name not in now or torch.equal(value.nan_to_num(7e7), now[name].nan_to_num(7e7))
                assert same, f"parameter {row} was written, {name}"

    def state_of(self, row: int) -> dict[str, Tensor]:
        """The states of a parameter in float64, whatever they are kept in."""
        entries = self.optimizer.state.get(self.params[row], {})
        return in_fp64(entries, [name for name in STATES if state_in(entries, name) is not None])

    def actual(self, row: int) -> Tensor:
        """A parameter in full precision: with its remainder, or its master's elements where these round to it."""
        param, entries = self.params[row].detach(), self.optimizer.state.get(self.params[row], {})
        master, remainder = entries.get("master_weight"), entries.get("master_remainder")
        if master is not None:
            return torch.where(master.to(param.dtype) == param, master, param.float()).double()
        if remainder is None:
            return param.double()
        low = remainder.to(torch.int32) << (8 if remainder.dtype == torch.int8 else 0)
        joined = ((param.contiguous().view(torch.int16).to(torch.int32) << 16) + low).contiguous().view(FP32)
        return torch.where(joined.isnan(), param.float(), joined).double()

    # ---- gradients -------------------------------------------------------------------------------------------------

    def live(self) -> list[int]:
        return [row for row, p in enumerate(self.params) if p.grad is not None]

    def is_exposed(self) -> bool:
        """Whether a p.grad is an accumulator of the closed window."""
        accumulators = {id(grad()) for grad in self.exposed if grad() is not None}
        return any(id(self.params[row].grad) in accumulators for row in self.live())

    def is_hooked(self, row: int) -> bool:
        return self.handle is not None and bool(getattr(self.params[row], "_post_accumulate_grad_hooks", None))

    def is_readable(self) -> bool:
        """Whether each p.grad can be accumulated and stepped with."""
        grads = [self.params[row].grad for row in self.live()]
        return all(g.layout == torch.strided and g.dtype in UNIT for g in grads)

    def is_plain(self, row: int) -> bool:
        """Whether autograd adds in place to p.grad, as it does to its own."""
        grad = self.params[row].grad
        if grad is None:
            return True
        odd = grad.layout != torch.strided or grad.dtype not in UNIT or grad.requires_grad or grad.is_neg()
        strided = [p.grad for p in self.params if p.grad is not None and p.grad.layout == torch.strided]
        storages = [g.untyped_storage().data_ptr() for g in strided if g.numel()]
        odd = odd or storages.count(grad.untyped_storage().data_ptr()) > 1
        return not odd and 0 not in [s for s, n in zip(grad.stride(), grad.shape, strict=True) if n > 1]

    def slopes(self, rows: list[int], seed: int, poison: float | None) -> dict[int, Tensor]:
        """Gradients for those that require one, in the parameter's dtype."""
        found = {}
        for row in [row for row in rows if row < len(self.params) and self.params[row].requires_grad]:
            param = self.params[row]
            slope = random(param.shape, seed + row, [0.05, 1.0, 8.0][(seed + row) % 3])
            if poison is not None and slope.numel() and row == rows[0]:
                slope.view(-1)[seed % slope.numel()] = poison
            found[row] = slope.to(param.dtype)
            if param.grad is None and param.grad_dtype == torch.float64:
                param.grad_dtype = param.dtype
        return found

    def loss(self, slopes: dict[int, Tensor], dtype: torch.dtype = FP32) -> Tensor:
        return torch.stack([(self.params[row] * slope).sum().float() for row, slope in slopes.items()]).sum().to(dtype)

    def grad_unit(self, row: int) -> float:
        """Of p.grad: in 16 bits where it has been set so, also while a closed window hides that."""
        dtype = self.params[row].dtype
        return max(UNIT[dtype], UNIT[BF16] if row in self.narrow else 0.0)
