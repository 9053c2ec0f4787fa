"""Which features of a table act together, read from the weights of small networks that were fitted on it."""
