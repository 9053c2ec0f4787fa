"""Tables: read common file formats and columns from in-memory tables.

`tigon.retrieve` and `tigon.rank` read their tables here. The package depends on neither; error messages begin with the
name passed by the caller.
"""

from tigon.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
