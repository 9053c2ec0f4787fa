"""Item attributes in an index: the schema, value counts, and compiled filters."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from tigon.retrieve.filters.clauses import Clauses, build_row_filter, compile_clauses
from tigon.retrieve.filters.expressions import Expression
from tigon.retrieve.filters.schema import Schema
from tigon.retrieve.filters.text import parse
from tigon.retrieve.filters.value_counts import ValueCounts
from tigon.retrieve.fork import Forkable
from tigon.retrieve.scan import RowFilter, RowTags

# The most compiled filters that an index caches, and about how many bytes they may take.
MOST_FILTERS, MOST_FILTER_BYTES = 1024, 64 << 20


@dataclass(eq=False)
class CompiledFilter:
    """An expression as clauses over columns, and as the operator's filter.

    bytes: about how much memory both take. share: the estimated share of items that pass, at a number of changes.
    """

    clauses: Clauses
    filter: RowFilter
    bytes: int
    share: tuple[int, float] = (-1, 1.0)


class Attributes(Forkable):
    """Schema, value counts and compiled filters. A copy starts with no compiled filters.

    Attributes:
        link_tags: the tags for sets of link values, which `links.resolve` fills under `lock`.
    """

    def __init__(self, schema: Schema) -> None:
        self.__setstate__({"schema": schema, "counts": ValueCounts(schema)})

    def __getstate__(self) -> dict[str, Any]:
        return {"schema": self.schema, "counts": self.counts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.schema: Schema = state["schema"]
        self.counts: ValueCounts = state["counts"]
        self.lock = threading.Lock()
        self.link_tags: dict[Any, tuple[RowTags, list[int]]] = {}
        self._filters: dict[tuple[str, bool, int], CompiledFilter] = {}
        self.survive_forks()

    def after_fork(self, is_child: bool) -> None:
        if is_child:
            self.lock = threading.Lock()

    def compile(self, where: Any, strict: bool = False) -> CompiledFilter | None:
        """Compile a filter, or take a recent filter from the cache; None where all items pass.

        Args:
            where: an expression, its text, or None.
            strict: whether a value that no item has is an error.

        Raises: ValueError if `where` is neither an expression nor its text, or does not fit the schema.
        """
        if where is None:
            return None
        if not isinstance(where, (str, Expression)):
            got = type(where).__name__
            raise ValueError(f"Index.search: where must be an expression of col(…) or its text, got {got}.")
        try:
            key = str(where), strict, self.schema.version
            with self.lock:
                compiled = self._filters.get(key)
            if compiled is not None:
                return compiled
            clauses = compile_clauses(parse(where) if isinstance(where, str) else where, self.schema, strict)
        except RecursionError:
            raise ValueError("where: the expression nests too deeply: combine fewer parts.") from None
        row_filter = build_row_filter(clauses, self.schema)
        compiled = CompiledFilter(clauses, row_filter, _count_bytes(clauses, row_filter) + len(key[0]))
        with self.lock:
            self._filters[key] = compiled
            size = sum(other.bytes for other in self._filters.values())
            while len(self._filters) > MOST_FILTERS or (size > MOST_FILTER_BYTES and len(self._filters) > 1):
                size -= self._filters.pop(next(iter(self._filters))).bytes
        return compiled

    def estimate_share(self, compiled: CompiledFilter) -> float:
        """Estimate the share of items that pass a filter; anew once items were added or removed."""
        changes = self.counts.changes
        if compiled.share[0] != changes:
            compiled.share = changes, self.counts.estimate_share(compiled.clauses)
        return compiled.share[1]

    def is_compiled(self, where: str, strict: bool) -> bool:
        """Whether the cache holds a filter."""
        return (where, strict, self.schema.version) in self._filters


def _count_bytes(clauses: Clauses, row_filter: RowFilter) -> int:
    """About how much memory a compiled filter takes: Python's tuples and integers beside the tensors."""
    ranges = sum(len(ranges) for clause in clauses for _, ranges in clause.codes)
    codes = sum(len(literal.codes or ()) for literals in row_filter.clauses for literal in literals)
    return 128 * ranges + 40 * codes + row_filter.table.nbytes + row_filter.bitmaps.nbytes
