"""Measure the recall with sign codes, on an index's items and a user's queries."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.retrieve.arguments import read_int, read_ints
from tigon.retrieve.index.request import SearchRequest
from tigon.retrieve.index.table import RowTable
from tigon.retrieve.scan import CodedItems, filtered_topk
from tigon.retrieve.scan.encode import encode_signs
from tigon.retrieve.scan.sign import GROUP_BYTES, MOST_CANDIDATES, check_bits, make_projection

# Queries per search, and single-query searches that are timed.
BATCH, TIMED = 32, 5


class CalibrationRow(NamedTuple):
    """One row in a calibration.

    Attributes:
        bits, candidates: the search parameters; bits None where all items are scored.
        recall: the share of exact results that were found, the mean over queries.
        bytes: read by a single-query search.
        milliseconds: for a single-query search, the median over several.
    """

    bits: int | None
    candidates: int | None
    recall: float
    bytes: int
    milliseconds: float


class Calibration(NamedTuple):
    """The measurements from `Index.calibrate`; `print` shows them.

    Attributes:
        items, queries, k: the search sizes.
        rows: the exact search first, then each combination of bits and candidates.
    """

    items: int
    queries: int
    k: int
    rows: tuple[CalibrationRow, ...]

    def __str__(self) -> str:
        lines = [f"{self.items:,} items, {self.queries:,} queries; times per query"]
        lines.append(f"{'bits':>6}{'candidates':>12}{f'recall@{self.k}':>13}{'MB':>10}{'ms':>10}")
        for row in self.rows:
            name = "exact" if row.bits is None else str(row.bits)
            many = "all" if row.candidates is None else f"{row.candidates:,}"
            lines.append(f"{name:>6}{many:>12}{row.recall:>13.4f}{row.bytes / 1e6:>10,.2f}{row.milliseconds:>10.3f}")
        return "\n".join(lines)


def calibrate_codes(
    table: RowTable, queries: Any, k: int, bits: Sequence[int], candidates: Sequence[int] | None
) -> Calibration:
    """Measure the recall with codes "sign", as `Index.calibrate`. The caller holds the update lock."""
    name = "Index.calibrate"
    k = read_int(name, "k", k)
    query = SearchRequest.parse(table, queries, k).query
    count, end = table.rows.count, table.rows.end
    if not count or not len(query):
        raise ValueError(f"{name}: there must be items and queries, got {count:,} and {len(query):,}.")
    bits = read_ints(name, "bits", bits)
    for number in bits:
        check_bits(name, number)
    tried = read_ints(name, "candidates", (2 * k, 4 * k, 10 * k) if candidates is None else candidates)
    wrong = next((many for many in tried if not k <= many <= MOST_CANDIDATES), None)
    if wrong is not None:
        raise ValueError(f"{name}: candidates must be integers from k, {k:,}, to {MOST_CANDIDATES:,}, got {wrong!r}.")
    vectors = table.embeddings[:end]
    options: dict[str, Any] = {"live": table.live_words(always=True), "bias": table.score_bias()}
    width = vectors.shape[1] * vectors.element_size()

    def search(items: Tensor | CodedItems, part: Tensor) -> Tensor:
        return filtered_topk(part, items, k, plan="codes" if isinstance(items, CodedItems) else "auto", **options)[1]

    def search_all(items: Tensor | CodedItems) -> Tensor:
        return torch.cat([search(items, part) for part in query.split(BATCH)])

    exact = search_all(vectors)
    rows = [CalibrationRow(None, None, 1.0, width * end, _measure(partial(search, vectors, query[:1])))]
    is_scaled = table.format.metric != "cosine"
    for number in bits:
        projection = make_projection(vectors.shape[1], number, 0).to(table.device)
        signs = encode_signs(vectors, projection, scaled=is_scaled)
        for many in tried:
            items = CodedItems(vectors, signs.codes, signs.scales, None, many, projection)
            recall = _compute_recall(search_all(items), exact)
            read = (number // 8 + (2 if is_scaled else 0)) * end + min(many * (GROUP_BYTES * 8 // number), end) * width
            rows.append(CalibrationRow(number, many, recall, read, _measure(partial(search, items, query[:1]))))
    return Calibration(count, len(query), k, tuple(rows))


def _compute_recall(rows: Tensor, exact: Tensor) -> float:
    there = exact >= 0
    hit = torch.stack([torch.isin(one, other) for one, other in zip(exact, rows, strict=True)]) & there
    return float((hit.sum(1) / there.sum(1).clamp(min=1)).mean())


def _measure(search: Callable[[], Tensor]) -> float:
    """A call's median milliseconds until its result is on the host."""
    taken = []
    search().cpu()
    for _ in range(TIMED):
        began = time.perf_counter()
        search().cpu()
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken)
