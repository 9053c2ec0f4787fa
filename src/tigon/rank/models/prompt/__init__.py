"""Ranking by prompts: a language model reads a request once, and answers questions about each candidate.

`__init__.pyi` declares the public names. They need what the extra `rank` brings.
"""

from tigon.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
