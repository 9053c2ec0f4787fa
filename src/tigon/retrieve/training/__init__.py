"""Train retrieval models: losses with sampled negatives, hard negatives, towers, mixtures and clusters."""
