"""Searches by `tigon.filtered_topk`: times over queries, k and the share of the rows that pass, beside torch's own.

The floor of a search is the time of its bytes at the rate of a large copy, or of its products at the rate of a large
one, whichever is more; both rates are measured in the run. Bytes: the vectors of the rows that pass, once, and a word
of attributes for each row where there is a filter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from harness.runner import LONG_MS, Ceilings, Settings, format_dtype, free, one_line, peak_mib, time_ms
from torch import Tensor

from tigon.retrieve.scan import RowFilter, filtered_topk

# Rows of scores that a check holds at once, and queries that it compares.
CHECKED_ROWS, CHECKED = 1 << 20, 16
# Bits of the one word of attributes: for filters of shares, and of one each for queries.
EACH = 32
NOTES = {"torch": "product, mask, topk", "torch-gather": "gather the rows that pass, product, topk"}


@dataclass
class SearchRow:
    """One search. filters: "none", "one" for all queries, or "each" of 32 for a query. share: of the rows that pass.

    ms: as called. graph_ms: in a CUDA graph. equal: the share of the ids, place by place, of a sort of all fp64 scores.
    p99_ms: of single searches of an index, each waited for, 99 % take less; ms is their median then. updates: items
    written a second meanwhile, in calls of `call` items.

    For searches that may have codes, vectors: "random", "clustered", or "one", the same for every row. codes: "int8" or
    "sign", of so many bits a row and candidates a query; None for a plain search. certified: the share of the queries
    whose answer the codes alone prove. recall: the share of the exact answers' rows that the search returns.
    """

    items: int
    dim: int
    dtype: str
    queries: int
    k: int
    implementation: str
    filters: str = "none"
    share: float = 1.0
    status: str = "ok"  # ok | failed | wrong
    reason: str = ""
    note: str = ""
    ms: float | None = None
    graph_ms: float | None = None
    floor_ms: float | None = None
    times_floor: float | None = None
    peak_mib: float | None = None
    equal: float | None = None
    p99_ms: float | None = None
    updates: int | None = None
    call: int | None = None
    vectors: str | None = None
    codes: str | None = None
    bits: int | None = None
    candidates: int | None = None
    certified: float | None = None
    recall: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def compare(self, ids: Tensor, expected: Tensor) -> None:
        """Mark a search as wrong whose ids differ from the expected ones. Near ties may change places."""
        self.equal = (ids[: len(expected)] == expected[: len(ids)]).float().mean().item()
        if self.implementation.startswith("tigon") and self.equal < 0.99:
            self.status, self.reason = "wrong", f"{self.equal:.4f} of the ids are those of a sort in fp64"


@dataclass(frozen=True)
class Bench:
    """What the searches of one run have in common."""

    dim: int
    dtype: torch.dtype
    device: torch.device
    ceilings: Ceilings
    settings: Settings

    @property
    def query_dtype(self) -> torch.dtype:
        return torch.float16 if self.dtype.itemsize == 1 else self.dtype

    def make_row(self, items: int, queries: int, k: int, implementation: str, **more: Any) -> SearchRow:
        return SearchRow(items, self.dim, format_dtype(self.dtype), queries, k, implementation, **more)

    def compute_floor(self, moved: float, flop: float = 0.0) -> float:
        """Milliseconds. moved: bytes. flop: of the products."""
        return max(moved / self.ceilings.copy_gbps / 1e6, flop / self.ceilings.matmul_tflops / 1e9)

    def time(self, row: SearchRow, call: Callable[[], Any], check: Callable[[], None]) -> SearchRow:
        """The row with its times, after its check."""
        try:
            check()
            row.ms = time_ms(call, self.device, self.settings)
            # The host has to know the sizes of "torch-gather", and a long call takes hardly less in a CUDA graph.
            if self.device.type == "cuda" and row.ms < LONG_MS and row.implementation != "torch-gather":
                from triton.testing import do_bench_cudagraph

                row.graph_ms = float(do_bench_cudagraph(call, rep=20, return_mode="median"))
            row.peak_mib = peak_mib(call, self.device)[0]
            row.times_floor = (row.graph_ms or row.ms) / row.floor_ms if row.floor_ms else None
        except Exception as error:
            row.status, row.reason = "failed", one_line(error)
        free(self.device)
        return row


@dataclass(frozen=True)
class SearchCase:
    queries: int
    k: int
    filters: str
    share: float


def list_cases(queries: Sequence[int], ks: Sequence[int], shares: Sequence[float], each: bool) -> list[SearchCase]:
    """Every combination; with `each`, also searches with a filter for each query. Further ks search all rows only."""
    cases = [
        SearchCase(count, k, "none" if share == 1 else "one", share)
        for k in ks
        for share in (shares if k == ks[0] else [1.0])
        for count in queries
    ]
    return cases + [SearchCase(count, ks[0], "each", 1 / 8) for count in queries if each]


class Items:
    """Vectors, and a word of attributes in which bits say what filters ask."""

    def __init__(self, count: int, dim: int, dtype: torch.dtype, shares: Sequence[float], device: torch.device) -> None:
        draw = torch.Generator(device).manual_seed(0)
        self.vectors = torch.empty(count, dim, dtype=dtype, device=device)
        self.words = torch.zeros(1, count, dtype=torch.int64, device=device)
        for start in range(0, count, CHECKED_ROWS):
            n = min(CHECKED_ROWS, count - start)
            rows = slice(start, start + n)
            self.vectors[rows] = torch.randn(n, dim, device=device, generator=draw).to(dtype)
            chance = torch.rand(n, device=device, generator=draw)
            # A bit of three words' that are set in each lets one row in eight pass.
            words = [torch.randint(0, 1 << EACH, (n,), device=device, generator=draw) for _ in range(3)]
            word = words[0] & words[1] & words[2]
            for place, share in enumerate(shares):
                word |= (chance < share).long() << (EACH + place)
            self.words[0, rows] = word
        self.each = [RowFilter([[RowFilter.Literal(0, 1 << bit)]]) for bit in range(EACH)]
        self.one = {share: RowFilter([[RowFilter.Literal(0, 1 << EACH + i)]]) for i, share in enumerate(shares)}

    def select_filter(self, case: SearchCase) -> RowFilter | list[RowFilter] | None:
        if case.filters == "none":
            return None
        return self.one[case.share] if case.filters == "one" else [self.each[b % EACH] for b in range(case.queries)]

    def make_mask(self, case: SearchCase) -> Tensor | None:
        """(N,) or (B, N) of what passes."""
        where = self.select_filter(case)
        if isinstance(where, list):
            masks = {id(f): f.mask(self.words) for f in where}
            return torch.stack([masks[id(f)] for f in where])
        return None if where is None else where.mask(self.words)


def measure_searches(bench: Bench, count: int, cases: Sequence[SearchCase], peers: bool = True) -> Iterator[SearchRow]:
    """Searches of random vectors, and, with peers, torch's own in two ways."""
    shares = sorted({case.share for case in cases if case.filters == "one"})
    items = Items(count, bench.dim, bench.dtype, shares, bench.device)
    draw = torch.Generator(bench.device).manual_seed(1)
    most = max(case.queries for case in cases)
    queries = torch.randn(most, bench.dim, device=bench.device, generator=draw).to(bench.query_dtype)
    for case in cases:
        own = queries[: case.queries]
        scanned = (1.0 if case.filters == "each" else case.share) * items.vectors.numel()
        moved = scanned * items.vectors.element_size() + 8 * count * (case.filters != "none")
        floor = bench.compute_floor(moved, 2 * scanned * case.queries)
        mask = items.make_mask(replace(case, queries=min(CHECKED, case.queries)))
        expected = sort_in_fp64(items.vectors, own[:CHECKED], case.k, mask)
        for name in ("tigon", *(NOTES if peers else ())):
            if name == "torch-gather" and case.filters != "one":
                continue
            row = bench.make_row(
                count, case.queries, case.k, name, filters=case.filters, share=case.share, note=NOTES.get(name, ""),
                floor_ms=floor,
            )  # fmt: skip
            call = _make_call(name, items, own, case)
            yield bench.time(row, call, lambda row=row, call=call, expected=expected: row.compare(call()[1], expected))


def _make_call(name: str, items: Items, queries: Tensor, case: SearchCase) -> Callable[[], tuple[Tensor, Tensor]]:
    where, k = items.select_filter(case), case.k
    if name == "tigon":
        words = None if where is None else items.words
        share = case.share if case.filters == "one" else None
        return lambda: filtered_topk(queries, items.vectors, k, attributes=words, where=where, share=share)
    vectors = items.vectors.to(queries.dtype) if items.vectors.element_size() == 1 else items.vectors

    def search_masked() -> tuple[Tensor, Tensor]:
        scores, mask = queries @ vectors.T, items.make_mask(case)
        values, rows = (scores if mask is None else scores.masked_fill_(~mask, -torch.inf)).topk(k)
        return values, rows

    def search_gathered() -> tuple[Tensor, Tensor]:
        mask = items.make_mask(case)
        assert mask is not None
        rows = mask.nonzero()[:, 0]
        values, best = (queries @ vectors[rows].T).topk(min(k, len(rows)))
        return values, rows[best]

    return search_masked if name == "torch" else search_gathered


def sort_in_fp64(vectors: Tensor, queries: Tensor, k: int, mask: Tensor | None = None) -> Tensor:
    """(B, k), the ids that a sort of all scores in fp64 puts first, by pieces of rows. mask: (N,) or (B, N)."""
    best_scores = queries.new_empty(len(queries), 0, dtype=torch.float64)
    best_rows = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    for start in range(0, len(vectors), CHECKED_ROWS):
        part = slice(start, start + CHECKED_ROWS)
        scores = queries.double() @ vectors[part].double().T
        if mask is not None:
            scores.masked_fill_(~mask[..., part], -torch.inf)
        values, rows = scores.topk(min(k, scores.shape[1]))
        values, rows = torch.cat([best_scores, values], 1), torch.cat([best_rows, rows + start], 1)
        values, order = values.sort(dim=1, descending=True, stable=True)
        best_scores, best_rows = values[:, :k], rows.gather(1, order[:, :k])
    return best_rows.masked_fill(best_scores == -torch.inf, -1)
