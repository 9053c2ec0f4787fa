"""Find interacting features from the weights of small networks fitted on a table."""
