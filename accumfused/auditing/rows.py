"""Collects outputs of a model's layers that have a row for each sample, between two backward passes.

A model may be called whole, by its children, or past its `forward`: each outermost call counts its own samples.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Module
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_leaves, tree_map

from accumfused.auditing.randomness import Generators


class Rows:
    """Hooks all layers of a model; `edges` is what the loss may come from.

    Args:
        called: is told of each outermost call that has a graph: module, inputs, output. The inputs' containers
            are copies: the module may change its own.
    """

    def __init__(
        self, model: Module, generators: Generators, called: Callable[[Module, Any, Any], None] | None = None
    ) -> None:
        self._model, self._called, self._generators = model, called, generators
        self._thread = threading.get_ident()
        self._before: list[Tensor] = []  # the generators' states before an outermost call
        self._inputs: Any = ()  # of the outermost call
        self._called_since = set[int]()  # outermost modules since the last backward, by id
        self.modules = frozenset[int]()  # those of the backward that runs
        self.inputs: Tensor | None = None  # of the first call that the loss comes from
        self._open: list[tuple[int, list[GradientEdge], list[GradientEdge]]] = []  # of each module that is running
        self.edges: list[GradientEdge] = []
        self.dtypes: set[torch.dtype] = set()  # of outputs with fractions
        self.samples = 0  # of the last outermost call
        self.is_random = False  # one of them drew random numbers
        self.is_paused = False  # backward runs: a checkpoint computes its layers again
        self._is_used = False  # by a backward pass: the next call begins anew

    def __deepcopy__(self, memo: Any) -> Rows:
        """The hooks of a copy of the model do nothing."""
        made = copy.copy(self)
        made.is_paused = True
        return made

    def handles(self) -> Iterator[Any]:
        """The hooks."""
        computed = (each for each in self._model.modules() if isinstance(each, ParametrizationList))
        weights = {id(module) for each in computed for module in each.modules()}  # whose outputs are parameters
        for module in self._model.modules():
            if id(module) in weights or isinstance(module, torch.jit.ScriptModule):
                continue
            yield module.register_forward_pre_hook(self._enter, with_kwargs=True)
            yield module.register_forward_hook(self._leave, with_kwargs=True)

    def use(self) -> None:
        """A backward pass begins: another may follow it, and the next call of the model begins anew."""
        self._is_used, self._open = True, []  # an exception in forward has left some open
        self.modules, self._called_since = frozenset(self._called_since) or self.modules, set()

    def forget(self) -> None:
        """Lets go of the graph."""
        self.edges, self._open, self.is_random, self._is_used = [], [], False, False
        self.inputs, self._inputs = None, ()

    @property
    def _is_off(self) -> bool:
        return self.is_paused or threading.get_ident() != self._thread  # DataParallel runs replicas in others

    def _enter(self, module: Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self._is_off:
            return
        if self._is_used and not self._open and torch.is_grad_enabled():
            self.forget()
        if not self._open:
            self._before = self._generators.tensors()
            self._inputs = copied((args, kwargs))
        self._open.append((_samples((args, kwargs)), [], []))

    def _leave(self, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._is_off or not self._open:
            return
        _, fitting, others = self._open.pop()
        size = self._open[0][0] if self._open else _samples((args, kwargs))
        if torch.is_grad_enabled():
            for leaf in leaves(output):
                self.dtypes |= {leaf.dtype} if leaf.is_floating_point() else set()
                if leaf.requires_grad and leaf.ndim:
                    (fitting if len(leaf) == size else others).append(get_gradient_edge(leaf))
        if self._open:
            self._open[-1][1].extend(fitting)
            self._open[-1][2].extend(others)
            return
        self.edges += fitting or others
        self._called_since.add(id(module))
        inputs, self._inputs = self._inputs, ()
        if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves(output)):
            self.samples = size
            self.inputs = self.inputs if self.inputs is not None else next(iter(leaves(inputs)), None)
            self.is_random |= not all(map(torch.equal, self._before, self._generators.tensors()))
            if self._called is not None:
                self._called(module, inputs, output)


def leaves(values: Any) -> list[Tensor]:
    """The tensors in what a model takes or returns."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def copied(values: Any) -> Any:
    """The same tensors in containers of their own."""
    return tree_map(lambda leaf: copy.copy(leaf) if isinstance(leaf, MutableMapping) else leaf, values)


def _samples(inputs: Any) -> int:
    return next((len(leaf) for leaf in leaves(inputs) if leaf.ndim), 0)
