"""The loop that trains a ranker, its optimizers, its defaults, and warm starts."""
