"""Scores of a ranker, and metrics of them."""
