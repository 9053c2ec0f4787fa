"""What several continuations have in common is computed once: batches of prefixes and suffixes for whole models."""
