"""What run.py measures: one row per operator in OPS, and one per use of it that has kernels of its own.

A row knows how to draw random inputs, how many bytes and FLOPs the operator needs at least, what the right answer is in
fp64, and who implements it. Peers are imported when they are first asked for; one that is missing becomes a line in the
report, not an error. A file of this folder with a tuple `OPS` adds its rows.
"""

from __future__ import annotations

import importlib
import pkgutil

from cases.row import Implementation, Op


def collect_rows() -> dict[str, Op]:
    """The rows in all files of this folder by their names."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return {op.name: op for module in modules for op in getattr(module, "OPS", ())}


OPS = collect_rows()

__all__ = ["OPS", "Implementation", "Op", "collect_rows"]
