"""Rankers that read each row by its features: what was shown, to whom, and where, without a sequence of events."""
