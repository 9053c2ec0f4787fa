"""Training-loop extensions: optimizers, captured steps, hpZ, tensor parallelism."""

from tigon.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
