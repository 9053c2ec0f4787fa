"""A filter's effect, and the search plan with the filter."""

from __future__ import annotations

from typing import Any, NamedTuple

from tigon.retrieve.arguments import read_int
from tigon.retrieve.filters.clauses import Clause
from tigon.retrieve.filters.columns import Coded, Vocabulary
from tigon.retrieve.filters.schema import Schema
from tigon.retrieve.index.table import RowTable
from tigon.retrieve.links.resolve import describe_links, resolve_links
from tigon.retrieve.scan import CodedItems
from tigon.retrieve.scan.plan import Plan, SearchSizes, plan_coded_scan, plan_scan


class Explanation(NamedTuple):
    """A filter's effect, and the search plan with the filter; `print` shows both.

    Attributes:
        items: in the index. share: the estimated share of items that pass. clauses: all must hold.
        plan: the search plan on a GPU: which rows are read, and the bytes that are moved.
        text: shown by `print`.
    """

    items: int
    share: float
    clauses: int
    plan: Plan
    text: str

    def __str__(self) -> str:
        return self.text


def explain_search(
    table: RowTable, where: Any, k: int, queries: int, *, strict: bool = False, links: Any = None
) -> Explanation:
    """Plan a search, as `Index.explain`. The caller holds the update lock."""
    k, queries = read_int("Index.explain", "k", k), read_int("Index.explain", "queries", queries)
    rows, format, counts = table.rows, table.format, table.attributes.counts
    counts.settle(wait=True)
    compiled = table.attributes.compile(where, strict)
    clauses = [] if compiled is None else compiled.clauses
    share = counts.estimate_share(clauses)
    words = {literal.word for clause in (compiled.filter.clauses if compiled else ()) for literal in clause}
    lines = [f"{rows.count:,} items; about {share:.2%} pass"]
    for clause in clauses:
        alone = counts.estimate_share([clause])
        lines.append(f"  and {_describe_clause(clause, table.schema)}; {alone:.2%}")
    options: dict[str, Any] = {
        "filters": int(bool(clauses)), "words": len(words), "share": share if clauses else None,
        "live": rows.count < rows.end, "bias": format.has_bias,
        "kept": compiled is not None and compiled.filter in table.cache.places,
    }  # fmt: skip
    resolved = resolve_links(links, 1.0, queries, table.attributes, table.device)
    if resolved is not None:
        lines.append(describe_links(resolved, format.codes))
        if len(resolved.tags):
            width = resolved.tags.width
            options |= {"width": width, "steps": resolved.tags.table.shape[1] // width}
    reads_codes = links is None and format.codes == "int8" and isinstance(table.items(), CodedItems)
    sizes = SearchSizes(queries, k, format.dim, rows.end, table.dtype, **options)
    plan = (plan_coded_scan(sizes) if reads_codes else None) or plan_scan(sizes)
    lines.append(str(plan))
    return Explanation(rows.count, share, len(clauses), plan, "\n".join(lines))


def _describe_clause(clause: Clause, schema: Schema) -> str:
    parts = []
    for name, ranges in clause.codes:
        column = schema[name]
        assert isinstance(column, Coded)
        parts.append(column.describe(ranges))
    for tag in clause.tags:
        vocabulary = schema[tag.column]
        assert isinstance(vocabulary, Vocabulary)
        start = schema.places[tag.column][tag.place].start
        names = [i + start for i in range(tag.bits.bit_length()) if tag.bits >> i & 1]
        parts.append(f"{tag.column} has {'not ' * tag.negated}{tag.test} of {vocabulary.list_names(names)}")
    return " or ".join(parts) or "nothing: no item passes"
