"""Around the optimizer: the iterators, converters and handles that a training loop calls."""
