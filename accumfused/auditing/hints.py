"""Reasons why an update is not that of the large batch: hints beneath a verdict, each with evidence and a remedy.

No hint changes a verdict. A remedy speaks of the loop that was watched: plain, of windows, or a framework's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from accumfused.auditing.step import DIFFERENT, EQUAL, LOST, SCALED, UNKNOWN, Step, is_close

Hints = dict[str, str]  # names of causes, each with its evidence
_UNEXPLAINED = 0.02  # of the step's gradient; sums in 16 bits stay below


class Cause:
    """Args: text: a sentence on what happens. remedy: what to do in a plain loop. others: the same elsewhere."""

    def __init__(self, text: str, remedy: str, **others: str) -> None:
        self.text, self.remedy, self.others = text, remedy, others


CAUSES = {
    "not_divided": Cause(
        "The mean losses of micro-batches are added up, and not divided by their number.",
        "Divide each loss by the number of micro-batches.",
        accumfused="Divide each loss by the number of micro-batches, or pass accumulate() a weight.",
        trainer="Leave the division to Trainer; a model without num_items_in_batch: model_accepts_loss_kwargs=False.",
        accelerate="Give Accelerator gradient_accumulation_steps: accelerator.backward() then divides.",
    ),
    "divided_twice": Cause(
        "The gradient is divided by the number of micro-batches twice.",
        "Keep one of the two divisions.",
        accumfused="Keep one of the two: the loss / K, or the weights.",
        trainer="Take the division out of compute_loss: Trainer divides.",
        lightning="Take the division out of training_step: accumulate_grad_batches divides.",
        accelerate="Take your own division out: accelerator.backward() divides.",
    ),
    "mean_of_means": Cause(
        "Micro-batches with different counts of samples or tokens have the same weight: a mean of means.",
        "Sum the losses, and divide by the samples or tokens of the whole window.",
        accumfused="Weight each micro-batch by its count: optimizer.accumulate(weight=count).",
        trainer="Let the model take num_items_in_batch, or give Trainer a compute_loss_func that divides by it.",
        lightning="Take the FusedAccumulation mixin, and set micro_batch_weight to the count in training_step.",
        accelerate="Sum the losses, divide by the tokens of the window, and multiply by gradient_accumulation_steps.",
    ),
    "uneven": Cause(
        "Micro-batches, or terms of their losses, enter the step with different weights.",
        "Divide all micro-batches of a window, and all terms of a loss, by the same number.",
        lightning="Keep accumulate_grad_batches the same within a window, and return one loss with all terms.",
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
        "Divide by the number of micro-batches in this window.",
        accumfused="Pass accumulate() a weight, or divide by the number of micro-batches in this window.",
        lightning="Take the FusedAccumulation mixin, and set micro_batch_weight in training_step.",
        accelerate="Divide by the micro-batches of this window, and multiply by gradient_accumulation_steps.",
    ),
    "remainder_leaked": Cause(
        "Micro-batches of one epoch enter the first step of the next.",
        "Step after an epoch's last micro-batch, or drop its gradients: af.windows() ends the window there.",
    ),
    "batch_norm": Cause(
        "BatchNorm in training mode normalizes each micro-batch by itself.",
        "Use GroupNorm or LayerNorm, freeze it with eval(), or take larger micro-batches.",
    ),
    "negatives": Cause(
        "A sample's loss depends on the other samples of its micro-batch.",
        "Gather the negatives of all micro-batches first, as docs/guide/patterns.md shows.",
    ),
    "auxiliary": Cause(
        "An auxiliary loss depends on how samples are split into micro-batches.",
        "Collect its statistics over the whole window, or accept it as a property of the micro-batch.",
    ),
    "never_arrived": Cause(
        "Steps have fewer micro-batches than gradient_accumulation_steps.",
        "Look at the condition of the step: it comes too early, or micro-batches are lost before it.",
    ),
    "clip": Cause(
        "Gradients are clipped before the window is complete.",
        "Clip once, right before the step.",
        accumfused="Leave the clip out, and set max_grad_norm.",
        lightning="Give the Trainer gradient_clip_val: it clips before the step.",
        accelerate="Clip only if accelerator.sync_gradients is set.",
    ),
    "unscale": Cause(
        "Gradients are unscaled at the wrong place: within the window, after the clip, or never.",
        "Call scaler.unscale_(optimizer) once: after the last backward, before the clip.",
    ),
    "zero_grad": Cause(
        "zero_grad() is at the wrong place: gradients are lost within a window, or stay after its step.",
        "Call it once a window, right after the step.",
        lightning="Leave zero_grad() to Lightning, and change accumulate_grad_batches only where an update has ended.",
        accelerate="Call optimizer.zero_grad() within accelerator.accumulate(): it waits for the window's end.",
    ),
    "unsynced": Cause(
        "Processes step with different gradients.",
        "Leave no_sync() before the last micro-batch's forward pass, for every module that has parameters.",
        lightning="Step by Lightning's own optimizers, without no_backward_sync() around the last micro-batch.",
    ),
    "ranks": Cause(
        "Processes with different counts of samples or tokens have the same weight.",
        "Divide by the count of all processes: af.attach_ddp with a weight does.",
        trainer="Set average_tokens_across_devices=True.",
    ),
    "sums_in_16_bits": Cause(
        "Gradients are summed in 16 bits, and each micro-batch rounds the sum.",
        "Keep sums in fp32: fp32 parameters with autocast do, and so does accumfused's accumulate().",
        lightning='Take precision="bf16-mixed", or the FusedAccumulation mixin.',
    ),
    "weights_changed": Cause(
        "Parameters changed between the micro-batches of one window.",
        "Write parameters only between windows: optimizers' steps, averages, loaded weights.",
    ),
    "unexplained": Cause(
        "The step's gradient holds something that no micro-batch has brought.",
        "Look for other losses, hooks that change gradients, and gradients from before the window.",
    ),
}


def checked(ignore: Collection[str]) -> set[str]:
    """Names of causes.

    Raises:
        ValueError: one is unknown.
    """
    unknown = sorted(set(ignore) - CAUSES.keys())
    if unknown or isinstance(ignore, str):
        raise ValueError(f"ignore takes names of causes ({', '.join(CAUSES)}), got {ignore!r}")
    return set(ignore)


def expected_of(windows: Sequence[Step]) -> int:
    """The number of micro-batches in most windows: of those that are the large batch, if there are any."""
    some = [step for step in windows if step.verdict == EQUAL] or windows
    counts = Counter(step.arrived for step in some if step.arrived)
    return max(counts, key=lambda count: (counts[count], count)) if counts else 1


def hints(windows: Sequence[Step], steps: int | None) -> Hints:
    """What explains the windows that are not the large batch, with the step where it is worst, and the evidence.

    Args:
        steps: gradient_accumulation_steps; None: as in most windows.
    """
    found: Hints = {}
    sizes: dict[str, float] = {}
    expected = steps or expected_of(windows)
    short = sum(step.arrived < expected for step in windows)
    for index, step in enumerate(windows, 1):
        own: Hints = {}
        if "unread" in step.reasons and not step.is_decided:
            continue
        if step.verdict == DIFFERENT:
            own = _of_difference(step, expected)
        elif step.verdict == SCALED:
            own = _of_size(step, expected, is_remainder=2 * short <= len(windows))
        for name, detail in own.items():
            if step.fits[0].difference > 1.01 * sizes.get(name, -1.0):  # of steps that differ alike, the first one
                found[name], sizes[name] = f"step {index}: {detail}", step.fits[0].difference
    return found


def _of_difference(step: Step, expected: int) -> Hints:
    found = dict(step.flags)
    if step.is_decided:
        found |= {name: reason for name, reason in step.reasons.items() if name in CAUSES}
    if "unsynced" in found:  # what other processes have brought looks lost
        return found
    arrived = step.arrived
    # What is clipped or unscaled within a window may be as small as what is lost.
    lost = 0 if found.keys() & {"clip", "unscale"} else step.lost
    if abs(step.stale) > LOST:
        found["zero_grad"] = f"{step.stale:.2f} times the gradient from before the window is still there"
    elif lost and arrived - lost >= expected:
        found["remainder_dropped"] = f"{lost} before this window"
    elif lost:
        found["zero_grad"] = f"the first {lost} of {arrived} are lost"
    if found:
        return found
    if step.residual > _UNEXPLAINED:
        return {"unexplained": f"{step.residual:.1%} of the gradient"}
    counts = [each.samples if each.reading.unknown else each.main.size for each in step.passes]
    detail = f"counts from {min(counts):g} to {max(counts):g}"
    if arrived != expected and all(is_close(abs(w * m.main.factor), 1 / expected) for w, m in step.weighed):
        name = "remainder_leaked" if arrived > expected else "remainder_under_weighted"
        found[name] = f"{arrived} micro-batches where {expected} belong"
    of_ranks = [[share for share, each in step.pairs if each.rank == rank] for rank in range(step.world)]
    if step.world > 1 and all(_alike(shares) for shares in of_ranks):
        return found | {"ranks": detail}
    if _alike([share * each.main.size for share, each in step.pairs]) and not _alike(counts):
        return found | {"mean_of_means": detail}
    if step.is_decided and _alike(step.shares):
        return {"negatives": "all have the weight of the large batch"}
    return {"uneven": f"weights from {min(step.shares):.3g} to {max(step.shares):.3g}"}


def _of_size(step: Step, expected: int, *, is_remainder: bool) -> Hints:
    ratio, arrived = abs(step.ratio), step.arrived
    detail = f"{step.ratio:.4g} times that of the large batch"
    if "unscale" in step.flags or any(is_close(ratio, scale) for each in step.passes for scale in each.main.scales):
        return {"unscale": detail}
    if arrived < expected and is_close(ratio, arrived / expected):
        name = "remainder_under_weighted" if is_remainder else "never_arrived"
        return {name: f"{arrived} of {expected}: {detail}"}
    if arrived > expected and is_close(ratio, arrived / expected):
        return {"remainder_leaked": f"{arrived} micro-batches where {expected} belong: {detail}"}
    if step.world > 1 and (is_close(ratio, step.world) or is_close(ratio, 1 / step.world)):
        return {"ranks": detail}
    if step.reset:
        return {"zero_grad": f"the first {step.reset} of {arrived} are lost"}
    for number in (arrived, expected):
        if number > 1 and is_close(ratio, number):
            return {"not_divided": detail}
        if number > 1 and is_close(ratio, 1 / number):
            return {"divided_twice": detail}
    return {"factor": detail}


def final(step: Step, ignore: Collection[str]) -> str:
    """The verdict on a window: the graph's stands only where it is complete."""
    is_open = not step.is_decided and any(name not in ignore for name in step.reasons)
    return UNKNOWN if is_open else step.verdict


def _alike(numbers: Sequence[float]) -> bool:
    return all(abs(number - numbers[0]) <= 0.02 * max(abs(number), abs(numbers[0])) for number in numbers)
