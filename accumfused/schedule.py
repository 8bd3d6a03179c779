"""Batch sizes: how many micro-batches and updates, at which learning rate, and windows that grow."""

from accumfused.loop.batch_size import gradient_accumulation_steps, scale_lr, updates, updates_per_epoch
from accumfused.loop.noise_scale import NoiseScale

__all__ = ["NoiseScale", "gradient_accumulation_steps", "scale_lr", "updates", "updates_per_epoch"]
