"""Losses of a linear head that never build its logits, and the coding rate.

The names of `__init__.pyi` are imported on first use.
"""

from tigon.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
