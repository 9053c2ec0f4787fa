"""Prompt rankers: a language model reads a request once, and answers questions about each candidate.

Public names are declared in `__init__.pyi` and need the extra `rank`.
"""

from tigon.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
