"""Shared prefixes: batches of prefixes and suffixes, for models that compute each prefix once."""
