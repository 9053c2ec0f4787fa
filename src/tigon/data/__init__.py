"""Tables, the schemas' JSON and metrics, shared by retrieval and ranking.

Error messages of the readers begin with the name passed by the caller.
"""

from tigon.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
