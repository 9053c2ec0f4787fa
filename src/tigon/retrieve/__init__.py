"""Retrieval: exact search over items in memory, with filters on their attributes.

`__init__.pyi` declares the public names. The package is an extra of its own, `tigon[retrieve]`, and is imported by its
name: `import tigon` loads none of it.
"""

from tigon.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
