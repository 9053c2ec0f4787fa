"""One row per operator: its reference, and calls that together reach every branch in its kernels.

Tests over all operators (test_invariants.py, test_kernels_compile.py) read this table: a new operator is a new
row in a file of this folder.
"""

import importlib
import pkgutil

from ops_table.row import Case, Op


def collect_rows() -> tuple[Op, ...]:
    """The rows in all files of this folder."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    rows = {id(value): value for module in modules for value in vars(module).values() if isinstance(value, Op)}
    return tuple(rows.values())


OPS = collect_rows()

__all__ = ["OPS", "Case", "Op", "collect_rows"]
