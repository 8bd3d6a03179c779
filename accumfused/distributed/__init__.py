"""Several processes: their groups, and what they tell each other about a window."""
