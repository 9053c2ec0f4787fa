"""What a search does with its arguments, and the search itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tigon.data.values import describe, shorten
from tigon.retrieve import coded, linking
from tigon.retrieve.arguments import as_int, read_int, read_ints
from tigon.retrieve.clauses import Clauses, clauses_of, row_filter
from tigon.retrieve.columns import Coded, Vocabulary
from tigon.retrieve.memory import dtype_of
from tigon.retrieve.rates import rates_of
from tigon.retrieve.scan import CodedItems, RowBits, RowFilter, filtered_topk
from tigon.retrieve.scan.plan import Plan, coded_plan_of, plan_of
from tigon.retrieve.scan.signed import MOST_CANDIDATES, by_signs
from tigon.retrieve.text import parse
from tigon.retrieve.where import Expression
from tigon.retrieve.writing import distance_bias, moved, sent

if TYPE_CHECKING:
    from tigon.retrieve.index import Index

# Filters that are kept compiled, for each index, and about how many bytes of them.
KEPT, KEPT_BYTES = 1024, 64 << 20
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Compiled(NamedTuple):
    """An expression as clauses of columns, and as what the operator tests."""

    clauses: Clauses
    filter: RowFilter
    bytes: int = 0


class Asked(NamedTuple):
    """A search that fits the index.

    query: as the operator takes it. norms: (B, 1), what is taken from scores; None if nothing is. most: the largest k.
    ks: of each query, None if one is of all. filters: one for all queries, or one for each; share: of the items that
    pass the one. candidates: that a query has where signs are read; 0 where they are not. links: beside which vectors
    count alpha, which the query and norms have already, but no biases.
    """

    query: Tensor
    norms: Tensor | None
    most: int
    ks: Sequence[int] | None
    filters: RowFilter | list[RowFilter | None] | None
    share: float | None
    candidates: int | None = None
    links: linking.Linked | None = None
    alpha: float = 1.0


def asked(
    index: Index, query: Any, k: Any, where: Any, strict: bool, candidates: int | None = None, links: Any = None,
    alpha: float = 1.0,
) -> Asked:  # fmt: skip
    """The arguments of a search, checked.

    Raises: ValueError for what does not fit the index.
    """
    q, norms = _query(index, query)
    most, ks = ks_of(k, q.shape[0])
    filters, share = _filters(index, where, q.shape[0], strict)
    candidates = _read_candidates(index, most, candidates)
    found = linking.linked(index, links, alpha, q.shape[0])
    q, norms = linking.weighed(q, norms, alpha)
    return Asked(q, norms, most, ks, filters, share, candidates, found, alpha)


def _read_candidates(index: Index, k: int, candidates: Any) -> int | None:
    if candidates is None:
        return None
    if index.coding != "sign":
        raise ValueError(
            f"Index.search: candidates must be None for an index without codes 'sign', which scores all, got "
            f"{shorten(candidates)}."
        )
    number = as_int(candidates)
    if number is None or (number != 0 and not k <= number <= MOST_CANDIDATES):
        raise ValueError(
            f"Index.search: candidates must be 0 or an integer from k, {k:,}, to {MOST_CANDIDATES:,}, got "
            f"{shorten(candidates)}."
        )
    return number


def query_of(index: Index, query: Any) -> Tensor:
    """(B, dim) floats, where they were.

    Raises: ValueError if they are anything else.
    """
    if not isinstance(query, Tensor):
        try:
            query = torch.as_tensor(np.require(query, requirements="W"))  # torch warns of others
        except (TypeError, ValueError):
            got = type(query).__name__
            raise ValueError(f"Index.search: query must be a tensor or an array of numbers, got {got}.") from None
    q: Tensor = query.detach()
    if q.dim() == 1:
        q = q[None]
    if q.dim() != 2 or q.shape[1] != index.dim:
        raise ValueError(
            f"Index.search: query must be (queries, {index.dim}), the index's dim, or ({index.dim},), got "
            f"{tuple(query.shape)}."
        )
    if q.dtype not in FLOATS:
        raise ValueError(f"Index.search: query must be floats, got {q.dtype}.")
    q = q.float() if q.dtype == torch.float64 else q
    if q.device.type == "cpu" and not bool(q.isfinite().all()):  # on a GPU the host would wait
        wrong = int((~q.isfinite()).any(1).nonzero()[0])
        raise ValueError(f"Index.search: query must be finite, got NaN or infinity in query {wrong}.")
    return q


def _query(index: Index, query: Any) -> tuple[Tensor, Tensor | None]:
    q = moved(query_of(index, query), index.device)
    if index.metric == "cosine":
        wide = q.float()
        return wide / wide.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny), None
    if index.metric == "l2":  # −|q − x|² = 2 q · x − |x|² − |q|²
        wide = q.float()
        return 2 * wide, wide.double().square().sum(1, keepdim=True).float()
    return q, None


def ks_of(k: Any, B: int) -> tuple[int, Sequence[int] | None]:
    if (number := as_int(k)) is not None:
        return number, None
    if isinstance(k, (str, bytes)) or not (isinstance(k, Sequence) or getattr(k, "ndim", 0) == 1):
        raise ValueError(f"Index.search: k must be an integer, or a list of one for each query, got {shorten(k)}.")
    ks = [as_int(n) or 0 for n in k]
    if len(ks) != B or min(ks, default=1) < 1:
        raise ValueError(f"Index.search: k must be positive integers, one for each of {B} queries, got {shorten(k)}.")
    return max(ks, default=1), ks


def _filters(
    index: Index, where: Any, B: int, strict: bool
) -> tuple[RowFilter | list[RowFilter | None] | None, float | None]:
    if where is None or isinstance(where, (str, Expression)):
        found = compiled(index, where, strict)
        return (None, None) if found is None else (found.filter, index.counts.share(found.clauses))
    given = wheres_of(where, B)
    filters = {}
    for key, one in distinct(given).items():
        found = compiled(index, one, strict)
        filters[key] = None if found is None else found.filter
    return [filters[_known_by(one)] for one in given], None


def distinct(wheres: Sequence[Any]) -> dict[Any, Any]:
    """Filters that may differ, each once: looking one up takes longer than comparing two texts."""
    return {_known_by(where): where for where in wheres}


def _known_by(where: Any) -> Any:
    return where if isinstance(where, str) else id(where)


def wheres_of(where: Any, B: int) -> Sequence[Any]:
    """Of a list of filters, one for each query.

    Raises: ValueError if it is no list, or of another length.
    """
    if not isinstance(where, (list, tuple)):
        raise ValueError(
            "Index.search: where must be an expression of col(…), its text, None, or a list of one for each query, got "
            f"{describe(where)}."
        )
    if len(where) != B:
        raise ValueError(f"Index.search: where must have an expression for each of {B} queries, got {len(where)}.")
    return where


def compiled(index: Index, where: Any, strict: bool = False) -> Compiled | None:
    """A filter of an index, from the filters that were asked for lately or made; None where all items pass.

    Raises: ValueError if it is neither an expression nor its text, or does not fit the schema.
    """
    if where is None:
        return None
    if not isinstance(where, (str, Expression)):
        got = type(where).__name__
        raise ValueError(f"Index.search: where must be an expression of col(…) or its text, got {got}.")
    kept = index.filters
    try:
        key = str(where), strict, index.schema.version
        with index.turns.compiling:
            found = kept.get(key)
        if found is None:
            clauses = clauses_of(parse(where) if isinstance(where, str) else where, index.schema, strict)
    except RecursionError:
        raise ValueError("where: the expression nests too deeply: combine fewer parts.") from None
    if found is None:
        row = row_filter(clauses, index.schema)
        found = Compiled(clauses, row, _bytes_of(clauses, row) + len(key[0]))
        with index.turns.compiling:
            kept[key] = found
            size = sum(other.bytes for other in kept.values())
            while len(kept) > KEPT or (size > KEPT_BYTES and len(kept) > 1):
                size -= kept.pop(next(iter(kept))).bytes
    return found


def is_compiled(index: Index, where: str, strict: bool) -> bool:
    """Whether a filter is among those that are kept."""
    return (where, strict, index.schema.version) in index.filters


def _bytes_of(clauses: Clauses, row: RowFilter) -> int:
    """About how much memory a compiled filter takes: Python's tuples and integers beside the tensors."""
    ranges = sum(len(ranges) for clause in clauses for _, ranges in clause.codes)
    codes = sum(len(literal.codes or ()) for literals in row.clauses for literal in literals)
    return 128 * ranges + 40 * codes + row.table.nbytes + row.bitmaps.nbytes


# ------------------------------------------------------------------------------------------------------------- search


def found_rows(index: Index, search: Asked, hidden: bool = False) -> tuple[Tensor, Tensor, bool]:
    """Scores and rows of what a search finds, and whether all that pass were scored. Out of memory, it is done in
    halves once.

    hidden: whether live bits are read although each row is there.
    """
    end, B = index.rows.end, search.query.shape[0]
    if not end or not B:
        _check_k(search.most)
        scores = torch.full((B, search.most), -torch.inf, device=index.device)
        return scores, torch.full((B, search.most), -1, dtype=torch.int64, device=index.device), True
    whole = index.rows.count == end and not hidden
    plain = search.candidates == 0 or search.links is not None  # codes know nothing of links
    items = index.embeddings[:end] if plain else coded.items(index, end, search.candidates)
    tagged = search.links is not None and len(search.links.tags) > 0
    given: dict[str, Any] = {
        "attributes": index.attributes[:, :end] if search.filters is not None or tagged else None,
        "live": None if whole else index.live[: (end + 31) // 32],
        "bias": _bias(index, end, search.alpha),
        "share": search.share,
    }
    bits = index.kept.found(index, search.filters, end)
    filters = search.filters if bits is None else bits
    if bits is not None and not tagged:
        given["attributes"] = None
    if search.links is not None and tagged:
        given |= {"tags": search.links.tags, "tag_weights": search.links.weights}

    def approximate(query: Tensor, where: Any) -> bool:
        coded_items = items if isinstance(items, CodedItems) else None
        return by_signs(query, coded_items, where, "auto", search.share)

    try:
        found = filtered_topk(search.query, items, search.most, where=filters, **given)
        return *found, not approximate(search.query, filters)
    except torch.OutOfMemoryError as error:
        if B == 1:
            raise _too_large(B) from error
    half = B // 2
    parts, exact = [], True
    try:
        for part in (slice(half), slice(half, B)):
            own = filters[part] if isinstance(filters, list) else filters
            if isinstance(own, RowBits) and own.which is not None:
                own = own._replace(which=own.which[part])
            if search.links is not None and tagged:
                given["tag_weights"] = search.links.weights[part]
            parts.append(filtered_topk(search.query[part], items, search.most, where=own, **given))
            exact = exact and not approximate(search.query[part], own)
    except torch.OutOfMemoryError as error:
        raise _too_large(B - half) from error
    scores, rows = (torch.cat(pair) for pair in zip(*parts, strict=True))
    return scores, rows, exact


def answered(search: Asked, scores: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and rows as `Hits` have them, from those that were found."""
    if search.norms is not None:
        scores = scores - search.norms
    if search.ks is not None:
        ks = sent(np.asarray(search.ks), scores.device)[:, None]
        beyond = torch.arange(search.most, device=scores.device) >= ks
        scores, rows = scores.masked_fill(beyond, -torch.inf), rows.masked_fill(beyond, -1)
    return scores, rows


@torch.no_grad()
def rows_of_bits(index: Index, query: Tensor, k: int, bits: RowBits | None) -> Tensor:
    """(B, k), the rows that an exhaustive search finds among those whose bits are set; None: among all."""
    with index.turns.asking(), index.turns.search(index.device):
        end = index.rows.end
        if not end:
            return torch.full((len(query), k), -1, dtype=torch.int64, device=index.device)
        if bits is not None:
            bits = bits._replace(bits=bits.bits[:, : (end + 31) // 32])
        live = None if index.rows.count == end else index.live[: (end + 31) // 32]
        asked, _ = _query(index, query)
        return filtered_topk(asked, index.embeddings[:end], k, where=bits, live=live, bias=_bias(index, end))[1]


def _too_large(queries: int) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(
        f"Index.search: the device's memory does not suffice for {queries} {'query' if queries == 1 else 'queries'} at "
        "once; the index is as it was: search smaller batches, or free memory."
    )


def _check_k(k: int) -> None:
    """The operator's own check, for a search that does not reach it."""
    one = torch.zeros(1, 1)
    filtered_topk(one, one, k)


def _bias(index: Index, end: int, alpha: float = 1.0) -> Tensor | None:
    if index.metric != "l2":
        return None
    # Over a parameter, which may have changed since, they are computed anew.
    bias = index.bias[:end] if index.bias is not None else distance_bias(index.embeddings[:end])
    return bias if alpha == 1 else bias * alpha


def warm(index: Index, ks: Any, batches: Any, where: Any, strict: bool, dtypes: Any) -> None:
    """Searches of each k, batch and dtype, as they are at first, with the bits of their filters, and with rows that are
    free.

    Raises: ValueError for an empty index, and for what does not fit it.
    """
    if not index.rows.end:
        raise ValueError("Index.warmup: the index must hold items, since kernels depend on how many, got an empty one.")
    ks, batches = read_ints("Index.warmup", "k", ks), read_ints("Index.warmup", "queries", batches)
    own = torch.float32 if index.dtype.itemsize == 1 else index.dtype
    kinds = [own if dtypes is None else dtypes] if not isinstance(dtypes, (list, tuple)) else dtypes
    read = [dtype_of("Index.warmup", dtype) for dtype in kinds]
    if any(dtype.itemsize == 1 for dtype in read):
        raise ValueError("Index.warmup: dtype must be float16, bfloat16 or float32, of queries, got float8_e4m3fn.")
    for B in batches:
        filters = [where[b % len(where)] for b in range(B)] if isinstance(where, (list, tuple)) and where else where
        for dtype, k in product(read, ks):
            search = asked(index, torch.ones(B, index.dim, dtype=dtype), k, filters, strict)
            for _ in range(3):
                with index.turns.search(index.device):
                    for hidden in (False, True):
                        found_rows(index, search, hidden)
                index.kept.prepare(index, search.filters)
    index.kept.warm(index)


# ------------------------------------------------------------------------------------------------------------ explain


class Explanation(NamedTuple):
    """What a filter does and what a search with it costs; `print` shows it.

    Attributes:
        items: in the index. share: of them that pass, estimated. clauses: that must all hold.
        plan: of the search on a GPU: which rows are read, and the bytes that are moved.
        text: what `print` shows. ms: how long the bytes or the products of the plan take on the index's GPU, by the
            rates that it was measured to have; None on a CPU.
    """

    items: int
    share: float
    clauses: int
    plan: Plan
    text: str
    ms: float | None = None

    def __str__(self) -> str:
        return self.text


def explained(index: Index, where: Any, k: int, queries: int, strict: bool, links: Any = None) -> Explanation:
    k, queries = read_int("Index.explain", "k", k), read_int("Index.explain", "queries", queries)
    found = compiled(index, where, strict)
    clauses = [] if found is None else found.clauses
    share = index.counts.share(clauses)
    words = sorted({literal.word for clause in (found.filter.clauses if found else ()) for literal in clause})
    lines = [f"{len(index):,} items; about {share:.2%} pass"]
    for clause in clauses:
        parts = [_coded(index, name).spoken(ranges) for name, ranges in clause.codes]
        for tag in clause.tags:
            vocabulary = index.schema[tag.column]
            assert isinstance(vocabulary, Vocabulary)
            start = index.schema.places[tag.column][tag.place].start
            names = [i + start for i in range(tag.bits.bit_length()) if tag.bits >> i & 1]
            parts.append(f"{tag.column} has {'not ' * tag.negated}{tag.test} of {vocabulary.listed(names)}")
        lines.append(f"  and {' or '.join(parts) or 'nothing: no item passes'}; {index.counts.share([clause]):.2%}")
    sizes = queries, k, index.dim, index.rows.end, index.dtype
    options: dict[str, Any] = {
        "filters": int(bool(clauses)), "words": len(words), "share": share if clauses else None,
        "live": index.rows.count < index.rows.end, "bias": index.metric == "l2",
        "kept": found is not None and found.filter in index.kept.places,
    }  # fmt: skip
    if links is not None:
        found_links = linking.linked(index, links, 1.0, queries)
        assert found_links is not None
        lines.append(linking.spoken(index, links))
        if len(found_links.tags):
            options |= {
                "width": found_links.tags.width,
                "steps": found_links.tags.table.shape[1] // found_links.tags.width,
            }
    bounded = links is None and index.coding == "int8" and isinstance(coded.items(index, index.rows.end), CodedItems)
    plan = (coded_plan_of(*sizes, **options) if bounded else None) or plan_of(*sizes, **options)
    lines.append(str(plan))
    rates = rates_of(index.device)
    ms = None if rates is None else rates.ms(plan.bytes, plan.flop)
    if rates is not None:
        lines.append(
            f"at least {ms:.3f} ms on this GPU, by {rates.copy / 1e9:,.0f} GB/s of a copy and "
            f"{rates.product / 1e12:,.0f} TFLOP/s of a product"
        )
    return Explanation(len(index), share, len(clauses), plan, "\n".join(lines), ms)


def _coded(index: Index, name: str) -> Coded:
    column = index.schema[name]
    assert isinstance(column, Coded)
    return column
