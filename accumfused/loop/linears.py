"""Linear layers add their weight's gradient to the window's accumulator within the product that makes it.

The module's forward becomes a function whose backward asks the optimizer for the accumulator, and hands autograd no
gradient of the weight. Where the accumulator cannot take the product as it is, autograd gets the gradient as ever.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.nn.utils import parametrize

from accumfused.batch_norm import check_model
from accumfused.eager import uncompiled
from accumfused.formats.kinds import DTYPES
from accumfused.formats.shards import is_dtensor
from accumfused.loop.contributions import Contributions, has_hooks, refuse_drops
from accumfused.optimizer import FusedOptimizer, check_fused

SMALLEST = 2**19  # elements of a weight; a smaller gradient stays in a cache, and the calls cost more than they save


def fuse_linears(model: nn.Module, optimizer: FusedOptimizer) -> FusedLinears:
    """Adds the weight gradients of linear layers to the optimizer's window within backward's matrix products.

    The gradient of such a weight never exists: `p.grad` stays None. The layers are `nn.Linear`, and `Conv1D` of
    transformers. `print(handle)` shows the layers, and the reasons why others are left alone. All other gradients go
    their usual way, into `p.grad` or through `release_gradients`, which is called first if both are wanted. It warns of
    BatchNorm in training mode (`accumfused.check_model`).

    The contract is that of `release_gradients`: the weight of a micro-batch must be in its loss, so call
    `optimizer.backward(loss, weight, last)` instead of `accumulate(weight)`. A loop without windows keeps working:
    its step closes a window of one micro-batch, so it checks the norm, and leaves None in `p.grad`.

    Args:
        model: its layers' `forward` is replaced. Copies and pickles of it are ordinary models.
        optimizer: an optimizer of this package with the layers' weights (`accumfused.fuse` converts others).

    Returns:
        A handle; `remove()` or the end of a `with` block gives the layers their own `forward` back.

    Raises:
        TypeError: the model is no module, or the optimizer is of another package.
        ValueError: the optimizer drops micro-batches (`nonfinite="drop"`).
        RuntimeError: a window is open; a parameter is FullyShardedDataParallel's; several processes and no
            `process_group` (`accumfused.attach_ddp` gives one). backward() raises it outside `no_sync()` of an attached
            DDP.

    Example:
        >>> with af.fuse_linears(model, optimizer):
        ...     for (x, y), last in af.windows(loader, 4):
        ...         optimizer.backward(loss_of(x, y), weight=len(y))
        ...         if last:
        ...             optimizer.step()
    """
    return FusedLinears(model, optimizer)


class FusedLinears:
    """The handle that `fuse_linears` returns.

    Attributes:
        fused: the names of the layers whose gradients go into the accumulators.
        left: the names of other linear layers, each with the reason.
    """

    def __init__(self, model: nn.Module, optimizer: FusedOptimizer) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"fuse_linears takes a torch.nn.Module first, got {type(model).__name__}")
        check_fused(optimizer, "fuse_linears")
        refuse_drops(optimizer, "fuse_linears()")
        if optimizer._engine.settings.offload:
            raise ValueError(
                "fuse_linears() adds products to sums where the weights lie, and offload=True has these on the host; "
                "leave one of them out, or call release_gradients(), which goes with offload=True"
            )
        optimizer._engine.refuse_open("fuse_linears()")
        check_model(model)  # a warning may be an error
        self.fused: list[str] = []
        self.left: dict[str, str] = {}
        self._optimizer = weakref.ref(optimizer)  # the model holds this object
        # Weakly: a copy of the model has these functions, too, and would keep the original.
        self._layers: WeakSet[nn.Module] = WeakSet()
        self._own_release: weakref.ref[Contributions] | None = None
        param_ids = {id(param) for param in optimizer._engine.plans.params}
        layers = []
        for name, module in model.named_modules():
            if not _is_linear(module):
                continue
            reason = _reason(module, param_ids)
            if reason is None:
                self.fused.append(name)
                layers.append(module)
            else:
                self.left[name] = reason
        release: Any = optimizer._engine.during_backward or Contributions(optimizer)
        release.claim(module.weight for module in layers)
        if optimizer._engine.during_backward is None:
            optimizer._engine.during_backward = release
            self._own_release = weakref.ref(release)

        # `copy` and `pickle` take a bound method by its module and its name: a copy is bound to the copied module,
        # whose weight the optimizer does not have, and an unpickled module gets its class's own method.
        def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            inputs = (*args, *kwargs.values())
            if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
                return type(layer).forward(layer, *args, **kwargs)  # type: ignore[no-any-return]  # which refuses
            # is_exporting() is True in every compiled function of torch 2.11.
            exports = torch.compiler._is_exporting_flag
            if torch.compiler.is_dynamo_compiling() and not exports and torch.is_grad_enabled():
                return self._outside_graphs(layer, inputs[0])
            return self._forward(layer, inputs[0])

        forward.fused = self  # type: ignore[attr-defined]
        optimizer._engine.plans.fused |= set(layers)
        optimizer._engine.plans.forget()
        for module in layers:
            self._layers.add(module)
            module.forward = types.MethodType(forward, module)

    def remove(self) -> None:
        """Gives the layers their own `forward` back. A second call does nothing.

        Raises:
            RuntimeError: a window is open.
        """
        optimizer = self._optimizer()
        if optimizer is not None and self._layers:
            optimizer._engine.refuse_open("remove()")
        self._put_back()

    def __enter__(self) -> FusedLinears:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Calls `remove()`. After an exception it does so even in an open window, and drops a half-added window."""
        if kind is None:
            self.remove()
            return
        optimizer = self._optimizer()
        if optimizer is not None and self._layers and optimizer._engine.window.in_progress is not None:
            optimizer.zero_grad()
        self._put_back()

    def __str__(self) -> str:
        lines = [f"{len(self.fused)} layers add their weight's gradient to the accumulator"]
        lines += [f"  {name}" for name in self.fused]
        lines += [f"{len(self.left)} linear layers are left alone"] if self.left else []
        return "\n".join(lines + [f"  {name}: {reason}" for name, reason in self.left.items()])

    def _put_back(self) -> None:
        for module in self._layers:
            if _handle_of(module.__dict__.get("forward")) is self:  # else somebody has wrapped it
                del module.forward
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._engine.plans.fused -= self._layers
            optimizer._engine.plans.forget()
        self._layers.clear()
        release = self._own_release() if self._own_release else None
        if release is not None:
            release.unhook()

    def _forward(self, layer: nn.Module, x: Any) -> Tensor:
        """Computes the layer's output, as its own `forward` does."""
        weight: Any = layer.weight
        bias: Any = layer.bias
        casts = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if casts else x.dtype
        recorded = layer in self._layers and x.dim() > 1 and _is_recorded(x, weight)
        if not recorded or not multiplies(x.device, dtype):
            return type(layer).forward(layer, x)  # type: ignore[no-any-return]
        is_transposed = type(layer) is not nn.Linear
        gradient = functools.partial(self._gradient, weight, is_transposed)
        if casts:  # not within the function: autocast would keep the cast weight, which has no graph there, for others
            x, weight, bias = (None if part is None else part.to(dtype) for part in (x, weight, bias))
        weight = weight.t() if is_transposed else weight
        # The function's own output is no view: nobody could write into that in place.
        output: Any = _Linear.apply(_rows(x), weight, bias, gradient)  # type: ignore[no-untyped-call]
        return output if x.dim() == 2 else output.view(*x.shape[:-1], output.shape[-1])  # type: ignore[no-any-return]

    @uncompiled
    def _outside_graphs(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Runs `_forward` with a break in a compiled graph: that costs less than a gradient to write and to add."""
        return self._forward(layer, x)

    def _gradient(self, weight: nn.Parameter, is_transposed: bool, ctx: Any, grad: Tensor, x: Tensor) -> Tensor | None:
        """Computes `grad.t() @ x` for autograd; None: it is in the accumulator, or nothing asks for it."""
        if not weight.requires_grad:  # frozen since the forward pass
            return None
        if torch.is_grad_enabled() or torch.compiler.is_compiling():  # create_graph=True; compiled autograd
            return grad.t() @ x
        optimizer = self._optimizer()
        release = None if optimizer is None or not self._layers else optimizer._engine.during_backward
        if release is not None:
            is_taken = _is_taken(ctx.next_functions[1][0])
            if is_taken is False:
                return None
            target = release.contribute(weight) if is_taken else None
            if target is not None:
                accumulator, holds_sum = target
                add_product(accumulator.t() if is_transposed else accumulator, grad.t(), x, holds_sum)
                return None
        return grad.t() @ x


class _Linear(torch.autograd.Function):
    """F.linear of rows, whose weight gradient may have gone elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gradient: Any) -> Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.gradient = gradient
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_weight = ctx.gradient(ctx, grad, x)  # first, while `grad` is in a cache
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return grad @ weight if ctx.needs_input_grad[0] else None, grad_weight, grad_bias, None


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a matrix product of this dtype can be added to an fp32 tensor as it is."""
    if dtype in (torch.float16, torch.bfloat16):
        return device.type == "cuda" and torch.version.hip is None and hasattr(torch.ops.aten.addmm, "dtype_out")
    return dtype == torch.float32


def add_product(accumulator: Tensor, left: Tensor, right: Tensor, holds_sum: bool) -> None:
    """Adds a matrix product to an fp32 accumulator, or overwrites it, in place."""
    if accumulator.device.type == "cpu":
        # With beta=0 MKL writes zeros too, in up to twice the time of zero_(), and then adds: the same bits.
        (accumulator if holds_sum else accumulator.zero_()).addmm_(left, right)
    elif left.dtype == torch.float32:
        accumulator.addmm_(left, right, beta=int(holds_sum))
    else:
        torch.addmm(accumulator, left, right, out_dtype=torch.float32, beta=int(holds_sum), out=accumulator)


def _is_recorded(x: Tensor, weight: Tensor) -> bool:
    """Whether autograd, and nobody else, records what happens to these."""
    return (
        torch.is_grad_enabled()
        and type(x) is Tensor
        and type(weight) is nn.Parameter
        and weight.requires_grad
        and x.dtype in DTYPES
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._get_tracing_state()
        and forward_ad._current_level < 0
    )


def _is_taken(node: Node) -> bool | None:
    """Whether this backward adds to the `p.grad` behind a node of autograd's; None: it returns that to somebody."""
    while not hasattr(node, "variable"):  # not yet the parameter's own
        node = node.next_functions[0][0]  # type: ignore[assignment]
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad() for this weight
        return None


def _conv1d() -> type[nn.Module] | None:
    """Finds transformers' linear layer with a transposed weight, if that is loaded."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def _is_linear(module: nn.Module) -> bool:
    return type(module) is _conv1d() or isinstance(module, nn.Linear) or "Linear" in type(module).__name__


def _reason(module: nn.Module, param_ids: set[int]) -> str | None:
    """Tells why a layer is left alone; None: it is not.

    Args:
        param_ids: of the optimizer's parameters.
    """
    weight = getattr(module, "weight", None)
    if is_dtensor(weight):
        return "its weight is spread over processes, which reduce its gradient after backward"
    if parametrize.is_parametrized(module, "weight") or (weight is not None and "weight" not in module._parameters):
        return "its weight is computed from other parameters"
    if type(module) is not nn.Linear and type(module) is not _conv1d():
        return f"it is a {type(module).__name__}, with a forward of its own"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    forward = module.__dict__.get("forward")
    if forward is not None and not _is_own(module, forward):
        return "its forward was replaced, by an earlier call or by somebody else"
    if not weight.requires_grad:
        return "its weight is frozen"
    if id(weight) not in param_ids:
        return "the optimizer does not have its weight"
    if has_hooks(weight):
        return "its weight has hooks, which expect a gradient"
    if not multiplies(weight.device, weight.dtype):
        return f"no product of {weight.dtype} can be added to an fp32 accumulator on {weight.device}"
    if weight.numel() < SMALLEST:
        return f"its weight has {weight.numel()} elements, and below {SMALLEST} the calls cost more than they save"
    return None


def _is_own(module: nn.Module, forward: Any) -> bool:
    """Whether an instance's forward computes like its class's: that of a copied or unpickled module."""
    handle = _handle_of(forward)
    is_class_own = getattr(forward, "__func__", None) is type(module).forward
    return is_class_own or (handle is not None and module not in handle._layers)


def _handle_of(forward: Any) -> FusedLinears | None:
    """Finds the handle that has put this `forward` there, into the module itself or into the original of a copy."""
    return getattr(getattr(forward, "__func__", None), "fused", None)
