"""`af.audit`: a call for a model and a loss, and `af.audit.watch` for a loop as it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from accumfused.arguments import checked_whole
from accumfused.auditing.hints import checked
from accumfused.auditing.once import audited
from accumfused.auditing.report import AuditReport
from accumfused.auditing.watching import Watch, check_training, tracks_of


class Audit:
    """Says whether accumulated updates are those of the large batch, how far off they are, and why.

    `af.audit(model, loss_fn, batch, K)` computes the gradient of one batch, and that of the same samples in K
    micro-batches. `with af.audit.watch(model, optimizer) as report:` watches a training loop as it is.

    Examples:
        >>> batch = torch.randn(8, 64), torch.randint(10, (8,))
        >>> report = af.audit(model, lambda net, b: torch.nn.functional.cross_entropy(net(b[0]), b[1]), batch, 4)
        >>> report.matches
        True
    """

    def __call__(
        self,
        model: Module,
        loss_fn: Callable[[Any, Any], Tensor],
        batch: Any,
        gradient_accumulation_steps: int,
        *,
        weight_fn: Callable[[Any], float | Tensor] | None = None,
        ignore: Collection[str] = (),
    ) -> AuditReport:
        """Compares one batch with the same samples in micro-batches.

        Both run on a copy of the model, from one state of all random generators. Yours stay as they are, bit for bit.

        Args:
            model: in training mode.
            loss_fn: takes model and batch, and returns the loss. It must not keep state.
            batch: a tensor, or lists, tuples and dicts of them; their first dimension is the sample.
            gradient_accumulation_steps: how many micro-batches; the last is shorter if it does not divide the samples.
            weight_fn: takes a micro-batch, and returns its weight, the number of its tokens for instance. None: each
                micro-batch has the same weight, as with loss / K.
            ignore: names of causes that do not count. "batch_norm": its layers are in eval mode.

        Returns:
            The report; `print` it.

        Raises:
            ValueError: a model in eval mode, or one whose copy calls it, a batch that cannot be split, a loss function
                that keeps state, weights that are negative, an unknown name in `ignore`.
            TypeError: not a module; no loss came back.
            RuntimeError: the model cannot be copied, or a device's generator cannot be read.
        """
        if not isinstance(model, Module):
            raise TypeError(f"audit takes a torch.nn.Module, got {type(model).__name__}")
        check_training(model)
        steps = checked_whole(gradient_accumulation_steps, "gradient_accumulation_steps")
        return audited(model, loss_fn, batch, steps, weight_fn, checked(ignore))

    def watch(
        self,
        model: Module,
        optimizer: Optimizer | Iterable[Optimizer],
        *,
        gradient_accumulation_steps: int | None = None,
        process_group: Any = None,
        ignore: Collection[str] = (),
    ) -> AbstractContextManager[AuditReport]:
        """Watches the loop in the block, and fills the report when the block ends.

        Put a few whole windows into the block, an epoch's end among them. Nothing of the loop changes: hooks read
        gradients into copies on the host, and are removed at the end, also after an exception.

        Args:
            model: the module that the loop calls, in training mode.
            optimizer: the optimizer, or several.
            gradient_accumulation_steps: the micro-batches that belong to a step. None: as in most steps, and any other
                number whose gradients have the right size.
            process_group: compares with the large batch of all its processes. Each of them must watch the same steps.
            ignore: names of causes that do not count: steps that these alone explain are taken for the large batch's.

        Returns:
            A context manager for `with`; it gives the report.

        Raises:
            ValueError: a model in eval mode; no optimizer; an unknown name in `ignore`.
            TypeError: not a module, or not an optimizer.
            RuntimeError: sharded parameters; a device whose generator cannot be read.
        """
        if gradient_accumulation_steps is not None:
            checked_whole(gradient_accumulation_steps, "gradient_accumulation_steps")
        tracks = tracks_of(model, optimizer, process_group)
        return Watch(model, tracks, checked(ignore), gradient_accumulation_steps)


audit = Audit()
"""Says whether accumulated updates are those of the large batch: see `Audit`."""
