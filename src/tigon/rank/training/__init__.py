"""Ranker training: the loop, optimizers, defaults, and warm starts."""
