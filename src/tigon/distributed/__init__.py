"""Training over several devices: what is shared between them, and what stays inside of a node."""

from tigon.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
