"""The parts of random_walks.py: the model, the moves, and what draws them."""
