"""Policies of clipping: what the settings `clip=` and `skip_above=` take instead of one number."""

from accumfused.clipping import PerTensor, RunningMean, ZScore

__all__ = ["PerTensor", "RunningMean", "ZScore"]
