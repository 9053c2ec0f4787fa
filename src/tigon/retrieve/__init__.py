"""Retrieval: exact search over items in memory, with filters on item attributes.

`__init__.pyi` declares the public names. The package is the separate extra `tigon[retrieve]`, which plain
`import tigon` does not load.
"""

from tigon.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
