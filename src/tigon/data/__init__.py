"""Tables: files of the usual formats, and the columns of tables in memory.

`tigon.retrieve` and `tigon.rank` read their tables here. The package knows neither, and its errors begin with the name
that the caller gives.
"""

from tigon.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
