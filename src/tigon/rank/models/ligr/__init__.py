"""LiGR: rankers that read a request's history as a sequence, followed by its candidates."""
