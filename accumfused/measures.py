"""What an optimizer tells of its steps: norm, skips, metrics, and the gradient noise scale. core/ measures them."""

from __future__ import annotations

import torch
from torch import Tensor

from accumfused.core.engine import Engine
from accumfused.core.metrics import Metrics
from accumfused.core.noise import NoiseEstimate


class Measures:
    """The base of optimizers that has these calls."""

    engine: Engine

    @property
    def grad_norm(self) -> Tensor | None:
        """The last step's global norm, after normalization and before clipping: fp32, shape [], on the device.

        None if the step took no norm.
        """
        outcome = self.engine.outcome
        return outcome.norm if outcome is not None and outcome.normed else None

    @property
    def step_was_skipped(self) -> Tensor:
        """Whether the last step wrote nothing: bool, shape [], on the device."""
        outcome = self.engine.outcome
        return torch.tensor(False) if outcome is None else outcome.skipped

    @property
    def skipped_steps(self) -> Tensor:
        """How many steps wrote nothing: int64, shape [], on the device."""
        skips = self.engine.plans.skips
        return torch.zeros((), dtype=torch.int64) if skips is None else skips.count.clone()

    @property
    def dropped_micro_batches(self) -> Tensor:
        """How many micro-batches `nonfinite="drop"` has left out: int64, shape [], on the device."""
        dropped = self.engine.dropped
        return torch.zeros((), dtype=torch.int64) if dropped is None else dropped.clone()

    def metrics(self) -> Metrics:
        """The norms and counts of the last measured step: of gradients, parameters and updates, per tensor and group.

        Returns:
            One small tensor on the device with its names; to read it waits for the device.

        Raises:
            RuntimeError: the optimizer was made without metrics=True (or n); no step was measured yet.
        """
        meter = self.engine.meter
        if meter is None:
            raise RuntimeError(
                "no metrics are measured; make the optimizer with metrics=True, or metrics=n for every n steps"
            )
        found = meter.read()
        if found is None:
            raise RuntimeError("no step was measured yet; call metrics() after step() (with metrics=n after the n-th)")
        return found

    def noise_scale(self) -> NoiseEstimate:
        """Estimates the gradient noise scale from the windows so far: how large a batch still helps.

        Signal and noise are exponential means over windows (the setting `noise_scale`), the noise scale is their ratio.
        The estimate assumes that

        - micro-batches are drawn independently, each of samples that are independent, too;
        - a micro-batch's gradient is a mean over its weight (samples or tokens), which the window's weights say;
          without weights all micro-batches are of one size, and that size is the unit;
        - the true gradient changes little within the windows that the mean holds;
        - a parameter's gradient of a micro-batch comes in one piece.

        Windows of one micro-batch do not enter, nor do skipped steps. Processes that add up their windows have one
        estimate, from the micro-batches of all. Where gradients are means over processes before they are folded, a
        micro-batch is that of all processes together.

        Returns:
            Tensors on the device; to read one waits for it.

        Raises:
            RuntimeError: the optimizer was made without noise_scale=True; no window of two micro-batches was stepped.
        """
        if self.engine.noise is None:
            raise RuntimeError("the noise scale is not measured; make the optimizer with noise_scale=True")
        return self.engine.noise.estimate()
