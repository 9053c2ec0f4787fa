"""A training step's memory: estimate, recomputation, offload."""
