"""Shared prefixes: batches with prefixes and suffixes, for models that compute each prefix once."""
