"""One optimizer under test with its parameters, and the model's state beside it: what is compared, and how."""

from __future__ import annotations

import math
import re
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from snapshot import differences, snapshot
from torch import Tensor

import accumfused as af
from walks.numbers import SMALLEST, UNIT, Bounded

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
CLASSES = {"sgd": af.SGD, "adam": af.Adam, "adamw": af.AdamW, "lion": af.Lion}
STOCK = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
FOREIGN = {"rmsprop": torch.optim.RMSprop, "adagrad": torch.optim.Adagrad}
EXPECTED_WARNINGS = re.compile(
    "windows (in a row )?were dropped|written while a window was open|steps were skipped|written from outside|"
    "gradient layout contract"
)
Refusal = type[Exception] | tuple[type[Exception], ...] | None


class Finding(AssertionError):  # noqa: N818  # it is what the walk looks for
    """The package did something else than the model says."""


def require(condition: bool, text: str) -> None:
    if not condition:
        raise Finding(text)


def random(shape: Sequence[int], seed: int, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


def parameter(shape: Sequence[int], layout: str, dtype: torch.dtype, seed: int) -> torch.nn.Parameter:
    """A parameter whose memory lies as `layout` says."""
    values = random(shape, seed).to(dtype)
    if layout == "transposed" and values.dim() >= 2:
        values = values.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "channels_last" and values.dim() == 4:
        values = values.contiguous(memory_format=torch.channels_last)
    elif layout == "holes" and values.dim() >= 1:
        wide = torch.zeros((2 * values.shape[0], *values.shape[1:]), dtype=dtype)
        wide[::2] = values
        values = wide[::2]
    elif layout == "offset":  # one element into its memory, so aligned to nothing
        flat = torch.zeros(values.numel() + 1, dtype=dtype)
        flat[1:] = values.flatten()
        values = flat[1:].view(values.shape)
    return torch.nn.Parameter(values)


class Subject:
    """An optimizer with its parameters, and the model of both."""

    def __init__(self, config: dict[str, Any], known: frozenset[str], scope: list[Subject]) -> None:
        self.config, self.known, self.scope = config, known, scope
        self.rule, self.foreign = config["rule"], config["rule"] in FOREIGN
        specs = config["params"]
        self.params = [parameter(s["shape"], s["layout"], DTYPES[s["dtype"]], s["seed"]) for s in specs]
        cut = config["cut"]
        groups = [{"params": self.params[:cut]}] + ([{"params": self.params[cut:], "lr": 0.07}] if cut else [])
        if not cut:
            groups = [{"params": self.params}]
        self.optimizer = self.build(groups)
        self.reset_model()

    def reset_model(self) -> None:
        self.full = [p.detach().double() for p in self.params]  # the weights in full precision
        self.states: list[dict[str, Any]] = [{} for _ in self.params]
        self.steps = [0] * len(self.params)
        self.written = [False] * len(self.params)  # from outside since the last step: its master is out of date
        self.trusted = False  # masters came with a checkpoint, and no step has seen them yet
        self.phase = "idle"
        self.forget_window()
        self.handle: Any = None  # of release_gradients
        self.skips = 0
        self.folds = self.backwards = 0
        self.saved: dict[str, Any] | None = None
        self.grad_dtypes: dict[int, list[torch.dtype]] = {}  # that the user has chosen; a closed window hides them
        self.ever_exposed: list[weakref.ref[Tensor]] = []
        self.buffers: list[Tensor] = []  # the user's, which are gradients or lie behind them

    def forget_window(self) -> None:
        self.sums: dict[int, Bounded] = {}
        self.total, self.weighted, self.count = 0.0, None, 0
        self.of_tensors = False
        self.exposed: dict[int, weakref.ref[Tensor]] = {}
        self.entered, self.part = False, dict[int, Bounded]()

    def build(self, groups: list[dict[str, Any]]) -> Any:
        settings, options = dict(self.config["settings"]), dict(self.config["options"])
        settings = {k: DTYPES.get(v, v) if k.endswith("dtype") else v for k, v in settings.items()}
        if self.foreign or self.config["fuse"]:
            return af.fuse((FOREIGN | STOCK)[self.rule](groups, **options), **settings)
        return CLASSES[self.rule](groups, **options, **settings)

    # ---- what is compared ------------------------------------------------------------------------------------------

    def attempt(self, call: Callable[[], Any], refusal: Refusal = None, *, only: tuple[str, ...] = ()) -> bool:
        """Makes the call; a refused one must have changed nothing (`only`: nothing whose name begins so)."""
        before = {id(s): (s.bits(), s.identities()) for s in self.scope}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call()
                error = None
            except Finding:
                raise
            except Exception as raised:
                error = raised
        for warning in caught:
            require(EXPECTED_WARNINGS.search(str(warning.message)) is not None, f"warned: {warning.message}")
        if error is None:
            require(refusal is None, f"was not refused, {refusal} expected")
            return True
        if refusal is None:
            raise Finding(f"raised {type(error).__name__}: {error}") from error
        require(isinstance(error, refusal), f"raised {type(error).__name__}, expected {refusal}: {error}")
        for side in self.scope:
            bits, grads = before[id(side)]
            changed = [name for name in differences(bits, side.bits()) if name.startswith(only or ("",))]
            changed = [name for name in changed if not side._may_change(name)]
            require(not changed, f"refused, and changed {changed}: {error}")
            require(bool(only) or grads == side.identities(), f"refused, and exchanged p.grad: {error}")
        return False

    def bits(self) -> dict[str, Any]:
        """Everything that the optimizer can write; rows that are new in a window say nothing."""
        found = snapshot(self.optimizer)
        if "weights" in found:
            total, count, held = found["weights"]
            found["weights"] = total, count, [h for h in held if h >= 0]
        return {name: value for name, value in found.items() if value is not None or name[0] != "a"}

    def _may_change(self, name: str) -> bool:
        """Remainders of parameters that were written may be dropped at any time, and states may be made, as zeros."""
        words = name.split()
        if words[0] != "state":
            return False
        row = int(words[1])
        return self.written[row] or not self.states[row]

    def identities(self) -> list[int]:
        return [id(p.grad) for p in self.params]

    def check_unwritten(self, rows: Sequence[int] | None = None) -> None:
        """Parameters in full precision, states and step counts are those of the model."""
        for row in range(len(self.params)) if rows is None else rows:
            different = Bounded.exact(self.full[row]).differs(self.actual(row))
            require(different is None, f"parameter {row} was written: {different}")
            entries = self.optimizer.state.get(self.params[row], {})
            for name, value in self.states[row].items():
                if isinstance(value, Tensor) and value.dim() and name in entries:
                    same = torch.equal(value.nan_to_num(7e7), entries[name].double().nan_to_num(7e7))
                    require(same, f"state {name} of parameter {row} was written")

    def actual(self, row: int) -> Tensor:
        """A parameter in full precision: with its remainder or out of its master, unless they are out of date."""
        param = self.params[row].detach()
        entries = self.optimizer.state.get(self.params[row], {})
        if self.written[row]:
            return self.full[row] if torch.equal(self.full[row].to(param.dtype), param) else param.double()
        if "master_weight" in entries:
            master = entries["master_weight"]
            return torch.where(master.to(param.dtype) == param, master, param.float()).double()
        if "master_remainder" in entries:
            remainder = entries["master_remainder"].to(torch.int32)
            remainder = remainder << 8 if entries["master_remainder"].dtype == torch.int8 else remainder
            high = param.contiguous().view(torch.int16).to(torch.int32) << 16
            joined = (high + remainder).contiguous().view(torch.float32)
            return torch.where(joined.isnan(), param.float(), joined).double()
        return param.double()

    # ---- gradients -------------------------------------------------------------------------------------------------

    def live(self) -> list[int]:
        return [row for row, p in enumerate(self.params) if p.grad is not None]

    def is_exposed(self) -> bool:
        """Whether a p.grad is an accumulator of the closed window, its own or another parameter's."""
        accumulators = {id(found) for found in (grad() for grad in self.exposed.values()) if found is not None}
        return any(p.grad is not None and id(p.grad) in accumulators for p in self.params)

    def is_hooked(self, row: int) -> bool:
        return self.handle is not None and bool(getattr(self.params[row], "_post_accumulate_grad_hooks", None))

    def is_readable(self) -> bool:
        """Whether each p.grad can be accumulated and stepped with."""
        grads = [p.grad for p in self.params if p.grad is not None]
        return all(g.layout == torch.strided and g.dtype in UNIT and g.dtype != torch.float64 for g in grads)

    def slopes(self, rows: Sequence[int], seed: int, poison: str | None) -> dict[int, Tensor]:
        """Gradients for those that require one, in the parameter's dtype."""
        found = {}
        for row in rows:
            if row >= len(self.params) or not self.params[row].requires_grad:
                continue
            param = self.params[row]
            slope = random(param.shape, seed + row, [0.05, 1.0, 8.0][(seed + row) % 3])
            if poison is not None and slope.numel() and row == rows[0]:
                slope.view(-1)[seed % slope.numel()] = float(poison)
            found[row] = slope.to(param.dtype)
            if param.grad is None and param.grad_dtype == torch.float64:
                param.grad_dtype = param.dtype
        return found

    def grad_unit(self, row: int) -> float:
        param = self.params[row]
        return max(
            UNIT[dtype] for dtype in (param.dtype, param.grad_dtype or param.dtype, *self.grad_dtypes.get(row, ()))
        )

    def loss(self, slopes: dict[int, Tensor], *, narrow: bool = False) -> Tensor:
        """Args: narrow: in 16 bits, where all terms are."""
        terms = [(self.params[row] * slope).sum() for row, slope in slopes.items()]
        narrow = narrow and len({term.dtype for term in terms}) == 1
        return torch.stack([term if narrow else term.float() for term in terms]).sum()

    def is_alias(self, row: int) -> bool:
        """Whether p.grad is the parameter's own memory: what writes one then writes the other."""
        grad = self.params[row].grad
        return grad is not None and grad.numel() > 0 and address(grad) == self.params[row].data_ptr()

    def adds_to(self, grad: Tensor | None) -> bool:
        """Whether autograd adds in place to it, as it does to its own."""
        if grad is None:
            return True
        odd = grad.layout != torch.strided or grad.dtype == torch.float64 or grad.requires_grad or grad.is_neg()
        return not odd and 0 not in [s for s, n in zip(grad.stride(), grad.shape, strict=True) if n > 1]


TINY_BF16 = 1e-38


def smallest(dtype: torch.dtype) -> float:
    return 4 * SMALLEST.get(dtype, 0.0)


def address(grad: Tensor) -> int:
    return grad.data_ptr() if grad.layout == torch.strided else 0


def holds(dtype: torch.dtype, weight: Any) -> bool:
    """Whether the loss can be multiplied by the weight without rounding it."""
    if dtype not in (torch.float16, torch.bfloat16):
        return True
    return not isinstance(weight, Tensor) and float(torch.tensor(float(weight), dtype=dtype)) == weight


def good(value: Any) -> bool:
    return isinstance(value, Tensor) or (math.isfinite(value) and value > 0)


def divisors_given(divisors: list[Any]) -> bool:
    return any(divisor is not None for divisor in divisors)


def weight_of(value: Any) -> Any:
    """A weight as a walk writes it down: None, a number, or ["tensor", number, dtype, shape]."""
    if isinstance(value, (list, tuple)):
        _, number, dtype, shape = value
        return torch.full(tuple(shape), float(number), dtype=DTYPES[dtype], device="cpu")
    return float(value) if value in ("nan", "inf", "-inf") else value
