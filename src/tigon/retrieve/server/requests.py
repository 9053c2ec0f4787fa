"""Checked requests: code after `parse` does not check again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from starlette.exceptions import HTTPException

from tigon.retrieve.server.bodies import Array, DeleteBody, SearchBody, UpsertBody, parse_body, parse_features

MAX_K = 2048  # as in `tigon.filtered_topk`
# Per request: results, that is queries times k; distinct filters, fewer than an index caches; and their total
# characters.
MAX_RESULTS, MAX_FILTERS, MAX_FILTER_TEXT = 1 << 17, 256, 1 << 15
LONG_FILTER = 500  # the most filter characters that are compiled in the event loop


class Limits(NamedTuple):
    """Request limits.

    Attributes:
        max_body: bytes per request.
        max_batch: queries per request, and per search.
        max_queue: pending queries.
        wait: the longest time in seconds that a search waits for others.
        max_connections: per process.
        request_timeout: seconds in which a request must arrive, and its response must be read. Only `run.serve` limits
            connections and time; another ASGI server has its own limits.
    """

    max_body: int = 16 << 20
    max_batch: int = 256
    max_queue: int = 4096
    wait: float = 1e-3
    max_connections: int = 4096
    request_timeout: float = 60.0


class IndexInfo(NamedTuple):
    """The index properties that requests must fit.

    Attributes:
        dim: the vector width.
        prefers_half: whether queries become fp16 where fp16 holds their numbers exactly; all others become fp32.
        is_fixed: whether the vectors belong to a parameter, so that updates have none.
        has_encoder, has_snapshot: whether the server has an encoder, and a folder for snapshots.
    """

    dim: int
    prefers_half: bool
    is_fixed: bool
    has_encoder: bool
    has_snapshot: bool


class SearchRequest(NamedTuple):
    """A search.

    Attributes:
        query: (queries, dim), finite, in the search dtype; None where an encoder computes the query from `features`.
        k, where: each query's result count and filter.
        strict: whether a filter value that no item has is an error.
    """

    query: Array | None
    features: Any
    k: list[int]
    where: list[str | None]
    strict: bool

    @classmethod
    def parse(cls, content: bytes, binary: bool, info: IndexInfo, limits: Limits) -> SearchRequest:
        """Raises: HTTPException, 422 or 413, for an invalid body."""
        body, arrays = parse_body(SearchBody, content, binary, info.dim)
        query, features = arrays.get("vectors"), None
        has_features = body.features is not None or any(name.startswith("features") for name in arrays)
        if (query is not None) + (body.texts is not None) + has_features != 1:
            raise HTTPException(422, "a search must have exactly one of vectors, texts and features.")
        if query is not None:
            query = check_vectors(query, info.dim)
            count = len(query)
        elif info.has_encoder:
            features, count = parse_features(body, arrays)
        else:
            raise HTTPException(422, "this server has no encoder for texts and features: send vectors.")
        if not 0 < count <= limits.max_batch:
            status = 413 if count else 422
            raise HTTPException(status, f"a request must have 1 to {limits.max_batch:,} queries, got {count:,}.")
        if query is not None:
            query = parse_queries(query, info)
        return cls(query, features, _parse_k(body, count), _parse_where(body, count), body.strict)


def _parse_k(body: SearchBody, count: int) -> list[int]:
    ks = [body.k] * count if isinstance(body.k, int) else body.k
    if len(ks) != count or not all(1 <= k <= MAX_K for k in ks):
        raise HTTPException(422, f"k must be from 1 to {MAX_K:,}, or a list with a number for each of {count} queries.")
    if count * max(ks) > MAX_RESULTS:
        raise HTTPException(413, f"a request must have at most {MAX_RESULTS:,} results, queries times k.")
    return ks


def _parse_where(body: SearchBody, count: int) -> list[str | None]:
    wheres = body.where if isinstance(body.where, list) else [body.where] * count
    distinct = set(wheres) - {None}
    if len(wheres) != count:
        raise HTTPException(422, f"where must have a filter for each of {count} queries, got {len(wheres)}.")
    if (size := sum(map(len, filter(None, distinct)))) > MAX_FILTER_TEXT or len(distinct) > MAX_FILTERS:
        limit = f"{MAX_FILTERS} different filters, with {MAX_FILTER_TEXT:,} characters in total"
        raise HTTPException(422, f"a request must have at most {limit}, got {len(distinct):,} of {size:,}.")
    return wheres


def is_long(where: Iterable[str | None]) -> bool:
    """Whether compiling the filters may block the event loop for too long."""
    return sum(len(each) for each in where if each is not None) > LONG_FILTER


class UpsertRequest(NamedTuple):
    """Items to write. ids: int64 or a list; vectors: (items, dim), None over a parameter; table: the attributes."""

    ids: Array | list[int] | list[str]
    vectors: Array | None
    table: dict[str, list[Any]] | None

    @classmethod
    def parse(cls, content: bytes, binary: bool, info: IndexInfo) -> UpsertRequest:
        """Raises: HTTPException, 422 or 413, for an invalid body."""
        body, arrays = parse_body(UpsertBody, content, binary, info.dim)
        vectors = arrays.get("vectors")
        if (vectors is None) != info.is_fixed:
            raise HTTPException(422, "vectors must be given, unless the index is over a parameter.")
        vectors = None if vectors is None else check_vectors(vectors, info.dim)
        return cls(arrays.get("ids", body.ids), vectors, body.table)


def parse_ids(content: bytes, binary: bool, info: IndexInfo) -> Array | list[int] | list[str]:
    """The items to delete. Raises: HTTPException, 422 or 413, for an invalid body."""
    body, arrays = parse_body(DeleteBody, content, binary, info.dim)
    return arrays.get("ids", body.ids)


def check_vectors(vectors: Array, dim: int) -> Array:
    """(n, dim) floats, from the body or from the encoder; a single vector may be (dim,).

    Raises: HTTPException, 422.
    """
    matrix = vectors[None] if vectors.ndim == 1 else vectors
    if matrix.ndim != 2 or (len(matrix) and matrix.shape[1] != dim):
        raise HTTPException(422, f"vectors must have {dim} numbers each, the index's dim, got {vectors.shape}.")
    if matrix.dtype.kind != "f":
        raise HTTPException(422, f"vectors must be floats, got {matrix.dtype}.")
    return matrix.astype(np.float32) if matrix.dtype == np.float64 else matrix


def parse_queries(matrix: Array, info: IndexInfo) -> Array:
    """The queries to search, in the dtype that most searches have.

    Searches in the same dtype form a batch, and 16-bit searches take one product instead of two. No number changes.

    Raises: HTTPException, 422, for numbers that are not finite.
    """
    if not np.isfinite(matrix).all():
        row = int((~np.isfinite(matrix)).any(1).argmax())
        raise HTTPException(422, f"vectors must be finite, got NaN or infinity in query {row}.")
    if not info.prefers_half:
        return matrix.astype(np.float32, copy=False)
    if matrix.dtype == np.float16:
        return matrix
    with np.errstate(over="ignore"):
        half = matrix.astype(np.float16)
    return half if np.array_equal(half, matrix) else matrix
