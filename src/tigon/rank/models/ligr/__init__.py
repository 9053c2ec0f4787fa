"""Rankers that read a request's history as a sequence, and its candidates behind it."""
