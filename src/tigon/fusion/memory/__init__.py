"""The memory of a training step: estimate, recomputation, offload."""
