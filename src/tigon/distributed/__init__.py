"""Training over several devices: shards that stay inside of a node, and tensor parallelism."""

from tigon.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
