"""FP8 training products: rows, columns and weights in e4m3, and linear layers on them. Public as `tigon.fp8`."""

from tigon.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
