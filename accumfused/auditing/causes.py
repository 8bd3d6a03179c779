"""The reasons why an accumulated update is not that of the large batch, in plain words, each with its remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """Args: text: a sentence on what happens. remedy: a sentence on what to do."""

    text: str
    remedy: str


CAUSES = {
    "not_divided": Cause(
        "The loss is a mean over a micro-batch, and the sum of such means is not divided by their number.",
        "Divide each loss by the number of micro-batches, or pass accumulate() a weight.",
    ),
    "divided_twice": Cause(
        "The gradient is divided by the number of micro-batches twice.",
        "Keep one of the two: the loss / K, or the weights or the framework's own division.",
    ),
    "mean_of_means": Cause(
        "Micro-batches with different counts of samples or tokens have the same weight: a mean of means.",
        "Weight each micro-batch by its count: accumulate(weight=count), or sum the losses and divide by all tokens.",
    ),
    "uneven": Cause(
        "The micro-batches of a window enter the step with different weights.",
        "Treat all micro-batches of a window alike; a weight belongs to a count of samples or tokens.",
    ),
    "factor": Cause(
        "The gradient is that of the large batch times a number.",
        "Look for a division by another number than that of the window's micro-batches.",
    ),
    "remainder_dropped": Cause(
        "Micro-batches at an epoch's end never reach a step.",
        "Step after the last micro-batch, too: af.windows() says when.",
    ),
    "remainder_under_weighted": Cause(
        "The last window has fewer micro-batches, and is divided by the number of a full one.",
        "Divide by the number of micro-batches in this window, or pass accumulate() a weight.",
    ),
    "remainder_leaked": Cause(
        "Micro-batches of one epoch enter the first step of the next.",
        "Step after an epoch's last micro-batch, or drop its gradients: af.windows() ends the window there.",
    ),
    "batch_norm": Cause(
        "BatchNorm in training mode normalizes each micro-batch by itself.",
        "Use GroupNorm or LayerNorm, freeze it with eval(), or take larger micro-batches.",
    ),
    "dropout": Cause(
        "The model draws random numbers in forward, as dropout does: the large batch would draw others.",
        "Nothing is wrong if that is meant. To compare runs, set dropout to 0.",
    ),
    "negatives": Cause(
        "The loss is not a sum over samples: a sample's loss depends on the others in its micro-batch.",
        "Gather the negatives of all micro-batches first, as docs/guide/contrastive.md shows.",
    ),
    "auxiliary": Cause(
        "An auxiliary loss is not a sum over samples: it depends on how samples are split into micro-batches.",
        "Collect its statistics over the whole window, or accept it as a property of the micro-batch.",
    ),
    "never_arrived": Cause(
        "Steps have fewer micro-batches than gradient_accumulation_steps.",
        "Look at the framework's accumulation: it steps too early, or it loses micro-batches.",
    ),
    "clip": Cause(
        "Gradients are clipped before the window is complete.",
        "Clip once, right before the step, or set max_grad_norm.",
    ),
    "unscale": Cause(
        "Gradients are unscaled at the wrong place: within the window, after the clip, or never.",
        "Call scaler.unscale_(optimizer) once: after the last backward, before the clip.",
    ),
    "zero_grad": Cause(
        "zero_grad() is at the wrong place: gradients are lost within a window, or stay after its step.",
        "Call it once a window, right after the step.",
    ),
    "ranks": Cause(
        "Processes with different counts of samples or tokens have the same weight.",
        "Divide by the count of all processes: af.attach_ddp with a weight does.",
    ),
    "sums_in_16_bits": Cause(
        "Gradients are summed in 16 bits, and each micro-batch rounds the sum.",
        "Keep sums in fp32: accumulate() does, and so do fp32 parameters with autocast.",
    ),
    "weights_changed": Cause(
        "Parameters changed between the micro-batches of one window.",
        "Write parameters only between windows: optimizers' steps, averages, loaded weights.",
    ),
    "unexplained": Cause(
        "The gradient of the step holds something that no micro-batch of its window has brought.",
        "Look for other losses, hooks that change gradients, and gradients from before the window.",
    ),
}
