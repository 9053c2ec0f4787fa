"""Searches by `tigon.filtered_topk`: times over queries, k and the share of the rows that pass, beside torch's own.

The floor of a search is the time of its bytes at the rate of a large copy, or of its products at the rate of a large
one, whichever is more; both rates are measured in the run. Bytes: the vectors of the rows that pass, once, and a word
of attributes for each row where there is a filter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tigon.bench import report
from tigon.bench.runner import Ceilings, Settings, free, measure_ceilings, one_line, peak_mib, time_ms
from tigon.retrieve.scan import RowFilter, filtered_topk

# Rows of scores that a check holds at once, and queries that it compares.
CHECKED_ROWS, CHECKED = 1 << 20, 16
# Bits of the one word of attributes: for filters of shares, and of one each for queries.
EACH = 32
PEERS = ("torch", "torch-gather")
NOTES = {"torch": "product, mask, topk", "torch-gather": "gather the rows that pass, product, topk"}


@dataclass
class SearchRow:
    """One search. filters: "none", "one" for all queries, or "each" of 32 for a query. share: of the rows that pass.

    ms: as called. graph_ms: in a CUDA graph. equal: the share of the ids, place by place, of a sort of all fp64 scores.
    p99_ms: of single searches of an index, each waited for, 99 % take less; ms is their median then. updates: items
    written a second meanwhile, in calls of `call` items.
    """

    items: int
    dim: int
    dtype: str
    queries: int
    k: int
    filters: str
    share: float
    implementation: str
    status: str = "ok"  # ok | failed | wrong
    reason: str = ""
    note: str = ""
    ms: float | None = None
    graph_ms: float | None = None
    floor_ms: float | None = None
    times_floor: float | None = None
    peak_mib: float | None = None
    equal: float | None = None
    plan: str = ""
    p99_ms: float | None = None
    updates: int | None = None
    call: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Case:
    queries: int
    k: int
    filters: str
    share: float


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
        self.shares = list(shares)
        self.each = [RowFilter([[RowFilter.Literal(0, 1 << bit)]]) for bit in range(EACH)]
        self.one = {share: RowFilter([[RowFilter.Literal(0, 1 << EACH + i)]]) for i, share in enumerate(shares)}

    def filters(self, case: Case) -> RowFilter | list[RowFilter] | None:
        if case.filters == "none":
            return None
        return self.one[case.share] if case.filters == "one" else [self.each[b % EACH] for b in range(case.queries)]

    def masks(self, case: Case) -> Tensor | None:
        """(N,) or (B, N) of what passes."""
        where = self.filters(case)
        if isinstance(where, list):
            made = {id(f): f.mask(self.words) for f in where}
            return torch.stack([made[id(f)] for f in where])
        return None if where is None else where.mask(self.words)


def run(
    items: int, dim: int, dtype: torch.dtype, cases: Sequence[Case], device: torch.device, *,
    peers: Sequence[str] = PEERS, settings: Settings | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda _: None, step: Callable[[str], None] = lambda _: None,
    more: Sequence[Callable[[Ceilings, Settings], Iterable[SearchRow]]] = (),
) -> dict[str, Any]:  # fmt: skip
    """Measure searches, one case after another.

    Args:
        items, dim, dtype: of the vectors. cases: see `cases_of`.
        peers: of PEERS. settings: how long to measure. keep: called with the result so far, after every case.
        step: called with the name of each case before it is measured. more: called at the end, for further rows, with
            the ceilings and the settings.

    Returns: a result of kind "search", see `report.result`.
    """
    settings = settings or Settings(1, 10.0, 60.0)
    ceilings = measure_ceilings(device, settings)
    shares = sorted({case.share for case in cases if case.filters == "one"})
    made = Items(items, dim, dtype, shares, device)
    draw = torch.Generator(device).manual_seed(1)
    queries = torch.randn(max(case.queries for case in cases), dim, device=device, generator=draw)
    queries = queries.to(torch.float16 if dtype.itemsize == 1 else dtype)
    rows: list[SearchRow] = []
    content: dict[str, Any] = {}
    for case in cases:
        step(f"{case.queries} × {case.k}, {named(case.filters, case.share)}")
        rows += _measured(made, queries[: case.queries], case, ceilings, settings, peers)
        content = report.result("search", rows, device=device, ceilings=asdict(ceilings))
        keep(content)
        free(device)
    del made
    free(device)
    for measure in more:
        for row in measure(ceilings, settings):
            rows.append(row)
            content = report.result("search", rows, device=device, ceilings=asdict(ceilings))
            keep(content)
    return content


def cases_of(queries: Sequence[int], ks: Sequence[int], shares: Sequence[float], each: bool) -> Iterator[Case]:
    """Every combination; with `each`, also searches with a filter for each query. Of further ks only all rows."""
    for k in ks:
        for share in shares if k == ks[0] else [1.0]:
            for count in queries:
                yield Case(count, k, "none" if share == 1 else "one", share)
    if each:
        for count in queries:
            yield Case(count, ks[0], "each", 1 / 8)


def named(filters: str, share: float) -> str:
    return "all pass" if filters == "none" else f"{share:.3g} pass" + ", a filter each" * (filters == "each")


def _measured(
    items: Items, queries: Tensor, case: Case, ceilings: Ceilings, settings: Settings, peers: Sequence[str]
) -> list[SearchRow]:
    count, dim = items.vectors.shape
    scanned = 1.0 if case.filters == "each" else case.share
    moved = scanned * items.vectors.numel() * items.vectors.element_size() + 8 * count * (case.filters != "none")
    flop = 2 * scanned * items.vectors.numel() * case.queries
    floor = max(moved / ceilings.copy_gbps / 1e6, flop / ceilings.matmul_tflops / 1e9)
    checked = queries[:CHECKED]
    right = expected(items.vectors, checked, case.k, items.masks(replace(case, queries=len(checked))))
    rows = []
    for name in ("tigon", *peers):
        if name == "torch-gather" and case.filters != "one":
            continue
        row = SearchRow(
            count, dim, str(items.vectors.dtype).removeprefix("torch."), case.queries, case.k, case.filters, case.share,
            name, note=NOTES.get(name, ""), floor_ms=floor,
        )  # fmt: skip
        try:
            _measure(row, _calls(name, items, queries, case), right, items.vectors.device, settings)
        except torch.OutOfMemoryError:
            row.status, row.reason = "failed", "out of memory"
        except Exception as error:
            row.status, row.reason = "failed", f"{type(error).__name__}: {one_line(error)}"
        rows.append(row)
        free(items.vectors.device)
    return rows


def _measure(
    row: SearchRow,
    call: Callable[[], tuple[Tensor, Tensor]],
    right: Tensor,
    device: torch.device,
    settings: Settings,
) -> None:
    _, found = call()
    row.equal = (found[: len(right)] == right).float().mean().item()
    if row.implementation == "tigon" and row.equal < 0.99:  # near ties may change places
        row.status, row.reason = "wrong", f"{row.equal:.4f} of the ids are those of a sort in fp64"
    row.ms = time_ms(call, device, settings)
    if device.type == "cuda" and row.implementation != "torch-gather":  # whose sizes the host has to know
        row.graph_ms = milliseconds_of_graph(call)
    peak, _ = peak_mib(call, device)
    row.peak_mib = peak
    assert row.floor_ms is not None
    row.times_floor = (row.graph_ms or row.ms) / row.floor_ms


def milliseconds_of_graph(call: Callable[[], Any]) -> float:
    """Median milliseconds of a call in a CUDA graph."""
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(call, rep=20, return_mode="median"))


def _calls(name: str, items: Items, queries: Tensor, case: Case) -> Callable[[], tuple[Tensor, Tensor]]:
    where, k = items.filters(case), case.k
    if name == "tigon":
        words = None if where is None else items.words
        share = case.share if case.filters == "one" else None
        return lambda: filtered_topk(queries, items.vectors, k, attributes=words, where=where, share=share)
    vectors = items.vectors.to(queries.dtype) if items.vectors.element_size() == 1 else items.vectors

    def masked() -> tuple[Tensor, Tensor]:
        scores = queries @ vectors.T
        keep = items.masks(case)
        return _best(scores if keep is None else scores.masked_fill_(~keep, -torch.inf), k)

    def gathered() -> tuple[Tensor, Tensor]:
        keep = items.masks(case)
        assert keep is not None
        rows = keep.nonzero()[:, 0]
        scores, found = _best(queries @ vectors[rows].T, min(k, len(rows)))
        return scores, rows[found]

    return masked if name == "torch" else gathered


def _best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, rows = scores.topk(k)
    return values, rows


def expected(vectors: Tensor, queries: Tensor, k: int, keep: Tensor | None = None) -> Tensor:
    """(B, k), the ids that a sort of all scores in fp64 puts first, by pieces of rows. keep: (N,) or (B, N)."""
    best_scores = best_rows = None
    for start in range(0, len(vectors), CHECKED_ROWS):
        part = slice(start, start + CHECKED_ROWS)
        scores = queries.double() @ vectors[part].double().T
        if keep is not None:
            scores.masked_fill_(~keep[..., part], -torch.inf)
        values, rows = scores.topk(min(k, scores.shape[1]))
        if best_scores is not None and best_rows is not None:
            values, rows = torch.cat([best_scores, values], 1), torch.cat([best_rows, rows + start], 1)
        values, order = values.sort(dim=1, descending=True, stable=True)
        best_scores, best_rows = values[:, :k], rows.gather(1, order[:, :k])
    assert best_scores is not None
    assert best_rows is not None
    return best_rows.masked_fill(best_scores == -torch.inf, -1)
