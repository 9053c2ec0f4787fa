"""Search requests: the caller's arguments, checked and converted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tigon.data.values import describe, shorten
from tigon.retrieve.arguments import as_int, as_tensor
from tigon.retrieve.filters.attributes import Attributes
from tigon.retrieve.filters.expressions import Expression
from tigon.retrieve.index.format import VectorFormat
from tigon.retrieve.index.table import RowTable
from tigon.retrieve.links.resolve import ResolvedLinks, resolve_links
from tigon.retrieve.scan import MOST as MOST_K
from tigon.retrieve.scan import RowFilter
from tigon.retrieve.scan.sign import MOST_CANDIDATES
from tigon.retrieve.transfer import to_device

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class SearchRequest:
    """A search that fits an index. Later steps do not check again.

    Attributes:
        query: (B, dim) as the operator takes it, on the index's device; scaled by alpha.
        k: the largest hit count over the queries. ks: each query's count, None if all have k.
        filters: one filter for all queries, or a filter per query. share: the estimated share of items that pass a
            common filter.
        norms: (B, 1), subtracted from the scores; None for metrics other than "l2".
        candidates: items scored exactly where signs are read; None: the default. 0: signs are not read.
        links: weights that are added to the scores; vectors then count alpha.
    """

    query: Tensor
    k: int
    ks: Sequence[int] | None = None
    filters: RowFilter | list[RowFilter | None] | None = None
    share: float | None = None
    norms: Tensor | None = None
    candidates: int | None = None
    links: ResolvedLinks | None = None
    alpha: float = 1.0

    @classmethod
    def parse(
        cls, table: RowTable, query: Any, k: Any = 100, where: Any = None, *, strict: bool = False,
        candidates: int | None = None, links: Any = None, alpha: float = 1.0,
    ) -> SearchRequest:  # fmt: skip
        """Parse the arguments of `Index.search`, for an index with these rows.

        Raises: ValueError for arguments that do not fit the index.
        """
        q, norms = _fit_metric(to_device(parse_query(query, table.format.dim), table.device), table.format)
        B = len(q)
        most, ks = parse_k(k, B)
        filters, share = _parse_filters(table.attributes, where, B, strict)
        number = _parse_candidates(table.format.codes, most, candidates)
        resolved = resolve_links(links, alpha, B, table.attributes, table.device)
        if alpha != 1:
            q, norms = q.float() * alpha, None if norms is None else norms * alpha
        return cls(q, most, ks, filters, share, norms, number, resolved, alpha)


def parse_query(query: Any, dim: int) -> Tensor:
    """Parse a query as (B, dim) floats, without moving it to another device.

    Raises: ValueError for anything else.
    """
    q = as_tensor("Index.search", "query", query)
    if q.dim() == 1:
        q = q[None]
    if q.dim() != 2 or q.shape[1] != dim:
        raise ValueError(
            f"Index.search: query must be (queries, {dim}), the index's dim, or ({dim},), got {tuple(query.shape)}."
        )
    if q.dtype not in FLOATS:
        raise ValueError(f"Index.search: query must be floats, got {q.dtype}.")
    q = q.float() if q.dtype == torch.float64 else q
    if q.device.type == "cpu" and not bool(q.isfinite().all()):  # on a GPU the host would wait
        wrong = int((~q.isfinite()).any(1).nonzero()[0])
        raise ValueError(f"Index.search: query must be finite, got NaN or infinity in query {wrong}.")
    return q


def _fit_metric(q: Tensor, format: VectorFormat) -> tuple[Tensor, Tensor | None]:
    """A query whose inner products become the metric's scores by subtracting norms and adding biases."""
    if format.metric == "cosine":
        wide = q.float()
        return wide / wide.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny), None
    if format.metric == "l2":  # −|q − x|² = 2 q · x − |x|² − |q|²
        wide = q.float()
        return 2 * wide, wide.double().square().sum(1, keepdim=True).float()
    return q, None


def parse_k(k: Any, B: int, name: str = "Index.search") -> tuple[int, Sequence[int] | None]:
    """The largest k, and each query's k where the caller gave a list for B queries.

    Raises: ValueError for numbers that are not positive or too large, and for a list with another length.
    """
    if (number := as_int(k)) is not None:
        most, ks = number, None
    else:
        if isinstance(k, (str, bytes)) or not (isinstance(k, Sequence) or getattr(k, "ndim", 0) == 1):
            raise ValueError(f"{name}: k must be an integer, or a list with an integer per query, got {shorten(k)}.")
        ks = [as_int(n) or 0 for n in k]
        if len(ks) != B or min(ks, default=1) < 1:
            raise ValueError(f"{name}: k must be positive integers, one for each of {B} queries, got {shorten(k)}.")
        most = max(ks, default=1)
    if not 1 <= most <= MOST_K:
        raise ValueError(f"{name}: k must be from 1 to {MOST_K:,}, got {shorten(k)}.")
    return most, ks


def _parse_filters(
    attributes: Attributes, where: Any, B: int, strict: bool
) -> tuple[RowFilter | list[RowFilter | None] | None, float | None]:
    if where is None or isinstance(where, (str, Expression)):
        compiled = attributes.compile(where, strict)
        if compiled is None:
            return None, None
        return compiled.filter, attributes.estimate_share(compiled)
    wheres = broadcast_filters(where, B)
    filters = {}
    for key, one in unique_filters(wheres).items():
        compiled = attributes.compile(one, strict)
        filters[key] = None if compiled is None else compiled.filter
    return [filters[_filter_key(one)] for one in wheres], None


def unique_filters(wheres: Sequence[Any]) -> dict[Any, Any]:
    """Deduplicate possibly different filters: compiling a filter takes longer than comparing two texts."""
    return {_filter_key(where): where for where in wheres}


def _filter_key(where: Any) -> Any:
    return where if isinstance(where, str) else id(where)


def broadcast_filters(where: Any, B: int) -> Sequence[Any]:
    """A filter for each of B queries.

    Raises: ValueError for a list with another length, and for a value that is neither a filter nor a list.
    """
    if where is None or isinstance(where, (str, Expression)):
        return [where] * B
    if not isinstance(where, (list, tuple)):
        raise ValueError(
            "Index.search: where must be an expression of col(…), its text, None, or a list with one of these per "
            f"query, got {describe(where)}."
        )
    if len(where) != B:
        raise ValueError(f"Index.search: where must have an expression for each of {B} queries, got {len(where)}.")
    return where


def _parse_candidates(codes: str | None, k: int, candidates: Any) -> int | None:
    if candidates is None:
        return None
    if codes != "sign":
        raise ValueError(
            f"Index.search: candidates must be None for an index without codes 'sign', which scores all items, got "
            f"{shorten(candidates)}."
        )
    number = as_int(candidates)
    if number is None or (number != 0 and not k <= number <= MOST_CANDIDATES):
        raise ValueError(
            f"Index.search: candidates must be 0 or an integer from k, {k:,}, to {MOST_CANDIDATES:,}, got "
            f"{shorten(candidates)}."
        )
    return number
