"""Tigon inside other trainers: one module per host, imported by the host's name on first use."""

from tigon.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
