"""Node embeddings without labels, of graphs as PyG has them.

`__init__.pyi` declares the public names. The package is imported by its name: `import tigon` loads none of it, and no
other package of Tigon knows of it.
"""

from tigon.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
