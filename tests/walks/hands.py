"""What a user does by hand to gradients and parameters between the calls of a loop, and the release of gradients."""

from __future__ import annotations

import torch
from torch import Tensor

import accumfused as af
from walks.moves import Moves
from walks.steps import Side
from walks.subject import DTYPES, parameter, random


def in_memory(kind: str, values: Tensor, seed: int) -> tuple[Tensor, Tensor | None]:
    """A gradient, fresh or as `kind` says, and the memory behind it that the user may write again."""
    if kind == "view":
        buffer = torch.zeros(values.numel() + 3, dtype=values.dtype)
        return buffer[3:].view(values.shape).copy_(values), buffer
    if kind == "holes" and values.dim():
        wide = torch.zeros((2 * values.shape[0], *values.shape[1:]), dtype=values.dtype)
        return wide[::2].copy_(values), wide
    if kind == "held":
        return values, values
    if kind == "transposed" and values.dim() >= 2:
        return values.transpose(0, 1).contiguous().transpose(0, 1), None
    if kind == "expanded" and values.numel() and values.dim():
        return values.flatten()[:1].expand(values.shape), None
    if kind == "graph":
        values.requires_grad_()
        return (values * 2.0 if seed % 2 else values), None
    if kind == "negative":
        return torch._neg_view(values), None
    if kind == "fp64":
        return values.double(), None
    if kind == "other":
        return values.to([torch.float32, torch.bfloat16, torch.float16][seed % 3]), None
    if kind == "sparse" and values.numel() and values.dim():
        return values.to_sparse(), None
    return torch.full_like(values, torch.nan) if kind == "nan" else values, None


class Hands(Moves):
    """Gradients, parameters, groups, hooks."""

    def do_clear_by_hand(self, side: Side, rows: list[int], to_none: bool) -> None:
        """As model.zero_grad() does, of some parameters."""
        if side.entered:
            return
        for row in rows:
            grad = side.params[row % len(side.params)].grad
            if to_none:
                side.params[row % len(side.params)].grad = None
            elif grad is not None and side.adds_to(grad) and not side.is_alias(row % len(side.params)):
                grad.zero_()

    def do_clip(self, side: Side, limit: float) -> None:
        """By torch."""
        if (
            side.entered
            or not side.is_readable()
            or any(not side.adds_to(side.params[r].grad) or side.is_alias(r) for r in side.live())
        ):
            return
        with torch.no_grad():
            torch.nn.utils.clip_grad_norm_(side.params, limit)

    def do_assign(self, side: Side, row: int, seed: int, kind: str) -> None:
        """p.grad by hand."""
        row %= len(side.params)
        param = side.params[row]
        if side.entered:
            return
        if side.foreign and kind in ("shared", "expanded", "again", "detached", "negative"):  # it is clipped in place
            return
        if side.handle is not None and kind in ("shared", "again"):  # autograd would add to both
            return
        values = random(param.shape, seed, 2.0).to(param.dtype)
        known = next((b for b in side.buffers if b.shape == param.shape and b.dtype == param.dtype), values)
        if kind == "again":
            grad = known
        elif kind == "detached" and self.is_alone:
            grad = param.detach()
        else:
            grad, buffer = in_memory(kind, values, seed)
            side.buffers += [] if buffer is None else [buffer]
        if kind == "shared":
            mates = [p for p in side.params if p.shape == param.shape and p.dtype == param.dtype and p is not param]
            for mate in [p for p in mates if p.grad_dtype in (None, grad.dtype)][:1]:
                mate.grad = None
                mate.grad = grad
        param.grad = None
        if grad.dtype != (getattr(param, "grad_dtype", None) or grad.dtype):
            param.grad_dtype = grad.dtype
            side.grad_dtypes.setdefault(row, []).append(grad.dtype)
        param.grad = grad

    def do_hold(self, side: Side, row: int) -> None:
        """A reference to a gradient of autograd's."""
        row %= len(side.params)
        grad = side.params[row].grad
        if grad is not None and not side.is_alias(row) and not any(known() is grad for known in side.ever_exposed):
            side.buffers.append(grad)

    def do_write_buffers(self, side: Side, seed: int) -> None:
        """The user goes on with memory that gradients are, or were views of."""
        if side.entered:
            return
        for buffer in side.buffers:
            if side.adds_to(buffer):
                with torch.no_grad():
                    buffer.fill_(float(seed % 7))
        if len(side.buffers) > 4:
            side.buffers.clear()

    def do_exchange(self, side: Side, one: int, other: int) -> None:
        """Two p.grads."""
        first, second = side.params[one % len(side.params)], side.params[other % len(side.params)]
        fits = first.shape == second.shape and first.grad is not None and second.grad is not None
        if not fits or first.dtype != second.dtype or first.grad.dtype != second.grad.dtype or side.entered:
            return
        first.grad, second.grad = second.grad, first.grad

    # ---- parameters ------------------------------------------------------------------------------------------------

    def do_freeze(self, side: Side, row: int, requires_grad: bool) -> None:
        side.params[row % len(side.params)].requires_grad_(requires_grad)

    def do_write(self, side: Side, row: int, seed: int, kind: str) -> None:
        """A parameter from outside, under no_grad."""
        row %= len(side.params)
        param = side.params[row]
        has_master = param.dtype != torch.float32 and side.config["settings"].get("master_weights", "auto") is not None
        if side.trusted and has_master and "written after load" in self.known:
            return
        with torch.no_grad():
            if kind == "copy":
                param.copy_(random(param.shape, seed))
            elif kind == "scale":
                param.mul_(0.5)
            elif kind == "zero":
                param.zero_()
            elif kind == "clamp":
                param.clamp_(-1.0, 1.0)
            elif kind == "element" and param.numel():
                param[tuple(seed % size for size in param.shape)] = 3.0
            elif kind == "nothing":
                param.add_(0.0)
            elif kind == "data":
                param.data.mul_(random(param.shape, seed) > 0)
            else:
                return
        now, master = param.detach(), side.optimizer.state.get(param, {}).get("master_weight")
        if master is not None:  # its elements serve where they are rounded to the parameter's, and serve again
            side.full[row] = torch.where(master.to(param.dtype) == now, master, now.float()).double()
        elif kind == "data" and not side.written[row]:  # which nobody can see: the old remainder counts
            side.full[row] = side.actual(row).clone()
        else:
            side.full[row] = now.double()
        side.written[row] |= has_master and kind != "data"

    def do_add_group(self, side: Side, shape: list[int], seed: int, dtype: str, layout: str) -> None:
        if len(side.params) >= 7:
            return
        param = parameter(shape, layout, torch.float32 if side.foreign else DTYPES[dtype], seed)
        masters = side.config["settings"].get("master_weights", "auto")
        refusal = ValueError if param.dtype == torch.float16 and str(masters).startswith("split") else None
        if not side.attempt(lambda: side.optimizer.add_param_group({"params": [param], "lr": 0.05}), refusal):
            return
        side.params.append(param)
        side.full.append(param.detach().double())
        side.states.append({})
        side.written.append(False)
        side.steps.append(0)

    def do_relayout(self, side: Side, row: int) -> None:
        """Its memory is another, transposed; the numbers are the same."""
        row %= len(side.params)
        param = side.params[row]
        if param.dim() >= 2 and not side.entered and not side.is_alias(row):
            data = param.detach()
            param.data = data.transpose(0, 1).contiguous(memory_format=torch.contiguous_format).transpose(0, 1)

    # ---- released gradients ----------------------------------------------------------------------------------------

    def do_release(self, side: Side, bucket_bytes: int) -> None:
        def call() -> None:
            side_handle = af.release_gradients(side.optimizer, bucket_bytes)
            side.handle = side_handle

        grads = [id(side.params[row].grad) for row in side.live()]
        if side.is_readable() and len(set(grads)) == len(grads):  # autograd would add to a shared one twice
            side.attempt(call, RuntimeError if side.handle is not None or side.phase == "open" else None)

    def do_remove(self, side: Side) -> None:
        if side.handle is None:
            return
        if side.attempt(side.handle.remove, RuntimeError if side.phase == "open" else None):
            side.handle = None
