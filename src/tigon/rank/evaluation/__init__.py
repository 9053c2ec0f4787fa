"""Score tables with a ranker, and compute metrics."""
