"""How much of the exact answers codes of signs find, measured with an index's own items and a user's own queries."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tigon.retrieve import searching
from tigon.retrieve.arguments import read_int, read_ints
from tigon.retrieve.scan import CodedItems, filtered_topk
from tigon.retrieve.scan.codes import signs_of
from tigon.retrieve.scan.sign import GROUP_BYTES, check_bits, projection_of
from tigon.retrieve.scan.signed import MOST_CANDIDATES

if TYPE_CHECKING:
    from tigon.retrieve.index import Index

# Queries of one search, and searches of one query that are timed.
BATCH, TIMED = 32, 5


class Calibrated(NamedTuple):
    """One row of a calibration.

    Attributes:
        bits, candidates: of the searches; bits None where all items are scored.
        recall: the share of the exact answers' items that were found, the mean over queries.
        bytes: that a search of one query reads.
        milliseconds: that it took, the median of several.
    """

    bits: int | None
    candidates: int | None
    recall: float
    bytes: int
    milliseconds: float


class Calibration(NamedTuple):
    """What `Index.calibrate` measured; `print` shows it.

    Attributes:
        items, queries, k: of the searches.
        rows: the exact search first, then each number of bits with each number of candidates.
    """

    items: int
    queries: int
    k: int
    rows: tuple[Calibrated, ...]

    def __str__(self) -> str:
        lines = [f"{self.items:,} items, {self.queries:,} queries; times of one query"]
        lines.append(f"{'bits':>6}{'candidates':>12}{f'recall@{self.k}':>13}{'MB':>10}{'ms':>10}")
        for row in self.rows:
            name = "exact" if row.bits is None else str(row.bits)
            many = "all" if row.candidates is None else f"{row.candidates:,}"
            lines.append(f"{name:>6}{many:>12}{row.recall:>13.4f}{row.bytes / 1e6:>10,.2f}{row.milliseconds:>10.3f}")
        return "\n".join(lines)


def calibrated(
    index: Index, queries: Any, k: int, bits: Sequence[int], candidates: Sequence[int] | None
) -> Calibration:
    name = "Index.calibrate"
    k = read_int(name, "k", k)
    query = searching.asked(index, queries, k, None, False).query
    end = index.rows.end
    if not len(index) or not len(query):
        raise ValueError(f"{name}: there must be items and queries, got {len(index):,} and {len(query):,}.")
    bits = read_ints(name, "bits", bits)
    for number in bits:
        check_bits(name, number)
    given = read_ints(name, "candidates", (2 * k, 4 * k, 10 * k) if candidates is None else candidates)
    wrong = next((many for many in given if not k <= many <= MOST_CANDIDATES), None)
    if wrong is not None:
        raise ValueError(f"{name}: candidates must be integers from k, {k:,}, to {MOST_CANDIDATES:,}, got {wrong!r}.")
    rows = index.embeddings[:end]
    beside: dict[str, Any] = {"live": index.live[: (end + 31) // 32], "bias": searching._bias(index, end)}
    width = rows.shape[1] * rows.element_size()

    def search(items: Tensor | CodedItems, part: Tensor) -> Tensor:
        return filtered_topk(part, items, k, plan="codes" if isinstance(items, CodedItems) else "auto", **beside)[1]

    def every(items: Tensor | CodedItems) -> Tensor:
        return torch.cat([search(items, part) for part in query.split(BATCH)])

    exact = every(rows)
    found = [Calibrated(None, None, 1.0, width * end, _milliseconds(partial(search, rows, query[:1])))]
    scaled = index.metric != "cosine"
    for number in bits:
        projection = projection_of(rows.shape[1], number, 0).to(index.device)
        signs = signs_of(rows, projection, scaled=scaled)
        for many in given:
            items = CodedItems(rows, signs.codes, signs.scales, None, many, projection)
            recall = _recall(every(items), exact)
            moved = (number // 8 + (2 if scaled else 0)) * end + min(many * (GROUP_BYTES * 8 // number), end) * width
            found.append(Calibrated(number, many, recall, moved, _milliseconds(partial(search, items, query[:1]))))
    return Calibration(len(index), len(query), k, tuple(found))


def _recall(rows: Tensor, exact: Tensor) -> float:
    there = exact >= 0
    hit = torch.stack([torch.isin(one, other) for one, other in zip(exact, rows, strict=True)]) & there
    return float((hit.sum(1) / there.sum(1).clamp(min=1)).mean())


def _milliseconds(search: Callable[[], Tensor]) -> float:
    """Of a call until its answer is there."""
    taken = []
    search().cpu()
    for _ in range(TIMED):
        began = time.perf_counter()
        search().cpu()
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken)
