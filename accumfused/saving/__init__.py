"""What outlives a step: checkpoints, and weights in full precision."""
