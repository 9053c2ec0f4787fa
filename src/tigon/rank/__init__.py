"""Ranking: losses and metrics for scores over ragged groups, one group per request.

Public names are declared in `__init__.pyi`. Import the package explicitly: `import tigon` does not load it, and no
other Tigon package depends on it.
"""

from tigon.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
