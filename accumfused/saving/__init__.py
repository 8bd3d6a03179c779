"""Data that outlive a step: checkpoints, and weights in full precision."""
