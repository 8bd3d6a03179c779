"""What is kept beyond a step: checkpoints, fp32 weights, and the memory that all of it takes."""
