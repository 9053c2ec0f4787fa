"""Compressed models: loss, distance and latency."""
