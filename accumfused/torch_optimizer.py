"""torch.optim's protocol, which the base of this package's optimizers keeps: groups, checkpoints, copies."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from accumfused import accepted, backends
from accumfused.core.engine import Engine
from accumfused.core.plan import Plan
from accumfused.core.plans import Surroundings, rule_of
from accumfused.core.protocol import Backend, Exchange, OwnStep, run
from accumfused.core.window import Phase, Window
from accumfused.distributed import exchange, groups
from accumfused.distributed.wrapping import Wrappers
from accumfused.eager import without_grad
from accumfused.formats import kinds
from accumfused.rules import Rule
from accumfused.saving import checkpoint, full_precision, history
from accumfused.settings import Settings
from accumfused.warn import say_once


def _select(settings: Settings, plan: Plan, last: Plan | None) -> tuple[Backend, Exchange]:
    backend = None
    if last is not None and (last.devices, last.dtype) == (plan.devices, plan.dtype):
        backend = last.backend if set(plan.rules) <= {*last.rules} else None
    return (
        backend or backends.select(settings.backend, plan.devices, plan.rules, plan.dtype, offload=settings.offload),
        exchange.select(settings, plan, None if last is None else last.exchange),
    )


_SURROUNDINGS = Surroundings(_select, groups.default_seed)


@contextlib.contextmanager
def _own_hooks(optimizer: torch.optim.Optimizer, *hooks: Any) -> Iterator[None]:
    """Removes these hooks of our own in the end; and at first those that an interrupted call has left."""
    codes = {hook.__code__ for hook in hooks}
    moments = ("state_dict_post", "load_state_dict_pre", "load_state_dict_post")

    def remove() -> None:
        for moment in moments:
            registry = getattr(optimizer, f"_optimizer_{moment}_hooks")
            for key in [key for key, hook in registry.items() if getattr(hook, "__code__", None) in codes]:
                del registry[key]

    remove()
    try:
        yield
    finally:
        remove()


class TorchOptimizer(torch.optim.Optimizer):
    """An optimizer of torch.optim over an engine; subclasses set `rules`."""

    rules: ClassVar[tuple[type[Rule], ...]] = ()
    _own_step: ClassVar[OwnStep | None] = None  # in place of the kernels' step

    _engine: Engine  # works on its gradients; for the package's own use, and for benchmarks
    _refuse_gradients: Callable[[], None]

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Refuses a model in place of its parameters, before torch's constructors iterate over it."""
        if any(_is_model(argument) for argument in (*args[:1], options.get("params"))):
            raise TypeError(
                f"{cls.__name__} takes parameters, and got a model; write {cls.__name__}(model.parameters())"
            )
        return super().__new__(cls)

    @classmethod
    def _rule_of(cls, group: Mapping[str, Any]) -> type[Rule]:
        """Returns the rule for a parameter group."""
        return rule_of(cls.rules, group)

    def _configure(self, settings: Settings) -> None:
        """Gives the optimizer, which has its groups already, these settings and an engine.

        Raises:
            ValueError, TypeError, RuntimeError: settings that do not fit its parameters, group, or machine.
        """
        accepted.check_settings(settings, self.rules, self.param_groups, self.defaults)
        for group in self.param_groups:
            accepted.check_formats(self._rule_of(group), group, group["params"], settings)
        if settings.grads_are_reduced:
            Wrappers(param for group in self.param_groups for param in group["params"]).watch()
        self._engine = Engine(self, settings, _SURROUNDINGS)
        dtypes = {param.dtype for group in self.param_groups for param in group["params"] if param.requires_grad}
        if settings.master_weights not in (None, "auto") and dtypes.isdisjoint((torch.float16, torch.bfloat16)):
            say_once(f"master_weights={settings.master_weights!r} has no effect: no parameter is bf16 or fp16")

    def __repr__(self) -> str:
        """torch's text, then the class, settings other than defaults, the backend, the formats and the window."""
        if not hasattr(self, "_engine"):  # within torch's constructors
            return super().__repr__()
        settings, plan, window = self._engine.settings, self._engine.plans.last, self._engine.window
        lines = {field.name: getattr(settings, field.name) for field in fields(Settings)}
        lines = {field.name: lines[field.name] for field in fields(Settings) if lines[field.name] != field.default}
        lines["backend"] = lines.get("backend") or ("not chosen yet" if plan is None else plan.backend.name)
        formats = {
            kinds.described(rule, form, param)
            for group in self.param_groups
            for rule, param in ((self._rule_of(group), param) for param in group["params"])
            if param.requires_grad
            if (form := kinds.format_of(rule, param, settings)) != kinds.Format() or param.dtype != torch.float32
        }
        if formats:
            lines["formats"] = "; ".join(sorted(formats))
        if plan is not None and plan.rounds_sums:
            counts = Counter(row.sum_dtype for row in plan.rows)
            lines["sums"] = ", ".join(f"{str(dtype)[6:]} of {count} parameters" for dtype, count in counts.items())
        if window.phase is not Phase.IDLE:
            lines["window"] = f"{window.phase.value}, micro-batches: {window.weights.count}"
        ours = next(base for base in type(self).__mro__ if base.__module__.startswith("accumfused."))
        text = "".join(f"    {name}: {value}\n" for name, value in lines.items())
        return f"{super().__repr__()}\naccumfused.{ours.__name__} (\n{text})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does.

        Raises:
            TypeError: a parameter that requires a gradient and is not fp32, fp16, bf16 or fp64.
            RuntimeError: a complex parameter, or one that overlaps itself.
            ValueError: a parameter that is listed twice, or whose dtype `master_weights` does not serve; amsgrad with
                8-bit states; an eps too small for the states; a setting other than `max_grad_norm` for one group alone,
                or that for some groups only.
        """
        if isinstance(param_group, dict) and hasattr(self, "_engine"):
            every = [*self.param_groups, param_group]
            accepted.check_groups(self._engine.settings, self.rules, every, self.defaults)
        if isinstance(param_group, dict) and not isinstance(param_group["params"], set):
            members = param_group["params"]
            param_group["params"] = members = [members] if isinstance(members, Tensor) else list(members)
            params = [p[1] if isinstance(p, tuple) else p for p in members]
            accepted.check_parameters(params)
            engine = getattr(self, "_engine", None)  # None: torch's constructor calls this too
            if engine is not None:
                group = self.defaults | param_group
                accepted.check_formats(self._rule_of(group), group, params, engine.settings)
                if engine.during_backward is not None:
                    engine.during_backward.follow(params)
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of this optimizer, or of torch's of the same name, and resumes its open window.

        It ends this optimizer's closed window, and releases its gradients. Master weights, and limits of groups, that
        the checkpoint lacks stay as they are.

        Raises:
            TypeError: not a dictionary.
            ValueError: a checkpoint that does not fit; this optimizer stays as it was.
            RuntimeError: a window is open here: its gradients do not belong to the loaded state.
        """
        engine = self._engine
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"load_state_dict() takes what state_dict() returns, got {type(state_dict).__name__}")
        engine.refuse_open("load_state_dict()", ", and its gradients are not those of the checkpoint")
        window: Window | None = None
        formatted: dict[Tensor, dict[str, Tensor]] = {}
        histories: history.Histories = {}
        is_checked, completed = False, list[bool]()
        before = {"state": self.state, "param_groups": self.param_groups}

        def check(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            nonlocal window, formatted, histories, is_checked
            with checkpoint.refusing(ValueError):
                loaded, histories = history.without_histories(loaded)
                loaded = checkpoint.with_named_codes(self, loaded)
                checkpoint.check(self, loaded)
                for own, group in zip(self.param_groups, loaded["param_groups"], strict=False):  # torch compares them
                    group = {**self.defaults, **group}
                    accepted.check_formats(self._rule_of(group), group, own["params"], engine.settings)
                loaded = history.with_limits(self.param_groups, loaded)
                accepted.check_groups(engine.settings, self.rules, loaded["param_groups"], self.defaults)
            histories = history.of_policies(engine, histories)
            loaded, window = checkpoint.without_window(self, loaded)
            loaded, formatted = checkpoint.without_formats(self, loaded)
            is_checked = True
            return loaded

        def complete(_: torch.optim.Optimizer) -> None:
            for param, entries in formatted.items():
                self.state[param].update(entries)
            engine.plans.forget()
            history.resume(engine, histories)
            engine.end_window()  # a closed one: its gradients are not those of the checkpoint either
            calls = [] if window is None else [partial(setattr, engine, "window", window)]
            if window is not None:
                window.noise = engine.window.noise
            run([*calls, partial(completed.append, True)])  # no Ctrl-C comes in between

        with _own_hooks(self, check, complete):
            self.register_load_state_dict_pre_hook(check)  # after the user's hooks, which may edit the checkpoint
            self.register_load_state_dict_post_hook(complete, prepend=True)  # before the user's
            try:
                super().load_state_dict(state_dict)
            except BaseException:
                if not completed:  # torch may have put a part in place
                    vars(self).update(before)
                    if is_checked:
                        with checkpoint.refusing():
                            raise
                raise

    def state_dict(self, *, window: bool = True) -> dict[str, Any]:
        """Returns torch's state_dict; `state` holds an open window, under keys that torch's optimizers ignore.

        While a window of DTensors is open, every process must call this: the processes agree on its weights.

        Args:
            window: False leaves an open window out, for a run that will repeat its micro-batches; the optimizer keeps
                the window.

        Raises:
            RuntimeError: an `accumulate()` or `step()` was interrupted. Unless window=False: a micro-batch is in
                progress, or processes of a `process_group` have a part of the window each.
        """
        self._engine.window.refuse_broken()
        self._engine.wait()
        if window and self._engine.window.is_open:
            checkpoint.refuse_part(self._engine)
        with _own_hooks(self, checkpoint.with_window, history.with_histories):
            if window and self._engine.window.is_open:
                self.register_state_dict_post_hook(checkpoint.with_window, prepend=True)
            if history.of(self._engine):
                self.register_state_dict_post_hook(history.with_histories, prepend=True)
            return super().state_dict()

    def full_precision_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Returns `model.state_dict()` with 16-bit parameters in fp32: from the master if there is one, else upcast.

        Args:
            model: the model of this optimizer's parameters; it upcasts other parameters, and leaves buffers alone.

        Raises:
            TypeError, ValueError: not a model, or a model without a parameter of this optimizer.
        """
        return without_grad(full_precision.state_dict, self, model)

    def load_full_precision_state_dict(
        self, model: torch.nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> Any:
        """Loads fp32 weights into the model and into the masters of its parameters.

        It restores the weights of `full_precision_state_dict` bit for bit ("split8" rounds them to nearest, with 16
        bits of mantissa). It makes the (zero) states of parameters with masters that have none yet. To resume, call it
        after `load_state_dict`, whose masters it replaces.

        Args:
            model, state_dict, strict: as in `model.load_state_dict(state_dict, strict)`.

        Returns:
            The result of `model.load_state_dict`.

        Raises:
            TypeError, ValueError: as `full_precision_state_dict`; names or shapes do not fit. Nothing changes then.
            RuntimeError: a window is open.
        """
        return without_grad(full_precision.load_state_dict, self, model, state_dict, strict)

    def __getstate__(self) -> dict[str, Any]:
        engine = self._engine
        engine.wait()
        settings = replace(engine.settings, process_group=None, norm_group=None, reduce_dtype=None)
        carried = {**super().__getstate__(), "settings": settings, "is_grouped": engine.group is not None}
        carried["histories"] = {name: value.clone() for name, value in history.of(engine).items()}
        carried["skipped"] = engine.plans.skips.count.clone()
        engine.window.refuse_broken()
        if engine.window.is_open:
            checkpoint.refuse_part(engine)
            carried["window"] = engine.window.copied()
        return carried

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_copy = not hasattr(self, "_engine")  # a wrapper may have it outside its __dict__
        names = ("settings", "window", "is_grouped", "histories", "skipped")
        settings, window, is_grouped, histories, skipped = (state.pop(name, None) for name in names)
        states = state["state"]  # torch's Adagrad looks for a step count in all, and a window's mark has none
        marks = {key: states.pop(key) for key in [*states] if isinstance(states[key], dict) and not states[key]}
        super().__setstate__(state)
        states.update(marks)
        if is_copy:
            # As torch's constructor does: on a machine with a GPU a copy of its Adafactor cannot step without.
            self._warned_capturable_if_run_uncaptured = True
            settings = settings or Settings()  # torch's own state has none
            self._engine = Engine(self, settings, _SURROUNDINGS, window, skipped)
            history.resume(self._engine, histories or {})
            self._engine.group = (lambda: None) if is_grouped else None  # a copy of the group takes it up
            for group in self.param_groups:  # of an older pickle
                for param in [param for param in group["params"] if self.state.get(param)]:
                    self.state[param] = kinds.with_named_codes(self._rule_of(group), self.state[param])


def _is_model(params: Any) -> bool:
    """Tells whether this is a module that does not list parameters itself, as torch.nn.ParameterList does."""
    if not isinstance(params, torch.nn.Module):
        return False
    return not (isinstance(params, Iterable) and all(isinstance(each, Tensor | tuple | dict) for each in params))
