"""Searches with codes: 8-bit codes with a certificate, and signs, beside the plain search of the same vectors.

The floor of such a search is the time of its codes' bytes at the rate of a large copy. A search by signs for many
queries is far above: what binds it are popcounts.

Random vectors are the hardest: hardly one is nearer to a query than the next. Clustered ones are like those of trained
models, in which queries have neighbours: CLUSTER rows around each of many centres, SPREAD times as wide as the centres,
with lengths that differ by a factor of exp(±LENGTHS). Queries are drawn like rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from harness.runner import free
from harness.search import CHECKED, CHECKED_ROWS, Bench, Items, SearchRow, sort_in_fp64
from torch import Tensor

from tigon.kernels import device as facts
from tigon.kernels import use_triton
from tigon.retrieve.scan import CodedItems, encode_items, filtered_topk
from tigon.retrieve.scan.coded import _coded_topk
from tigon.retrieve.scan.plan import CODED_TERMS, SearchSizes, plan_coded_scan
from tigon.retrieve.scan.sign import count_candidates, make_projection, pays

CLUSTER, SPREAD, LENGTHS = 1000, 0.6, 0.1
# Signs of the searches that are timed for every number of queries.
BITS = 512
# Clustered vectors are also searched with these bits and the default of 5 k candidates, and with BITS and these
# candidates per k.
MORE_BITS, MORE_CANDIDATES = (64, 256), (2, 10)
# Queries of which the share that is certified, and of which the recall is taken.
CERTIFIED, RECALLED = 256, 64
# Rows of the search that reads nothing but signs, and the bytes of memory that it needs.
MANY, MANY_BITS, ROOM = 10**9, 64, 14 << 30


def measure_codes(bench: Bench, items: int, queries: Sequence[int], ks: Sequence[int]) -> Iterator[SearchRow]:
    """Searches of random vectors, whose plain ones `measure_searches` times, of clustered ones, and of signs alone."""
    draw = torch.Generator(bench.device).manual_seed(1)
    most = max(CERTIFIED, *queries)
    query = torch.randn(most, bench.dim, device=bench.device, generator=draw).to(bench.query_dtype)
    vectors = Items(items, bench.dim, bench.dtype, [], bench.device).vectors
    for k in ks:
        yield from _measure_int8(bench, vectors, query, queries, k, "random")
        yield from _measure_signs(bench, vectors, query, queries, k, "random", [(BITS, None)])
    del vectors
    free(bench.device)
    vectors, query = draw_clustered(items, bench.dim, bench.dtype, CERTIFIED, bench.device)
    few = queries[:1]
    for k in ks:
        row = bench.make_row(items, few[0], k, "tigon", vectors="clustered")
        row.floor_ms = bench.compute_floor(vectors.numel() * vectors.element_size(), 2 * vectors.numel() * few[0])
        yield _search(bench, row, query[: few[0]], vectors, sort_in_fp64(vectors, query[:CHECKED], k))
        yield from _measure_int8(bench, vectors, query, few, k, "clustered")
        signs = [(bits, None) for bits in (*MORE_BITS, BITS)] + [(BITS, many * k) for many in MORE_CANDIDATES]
        signs = signs if k == ks[0] else [(BITS, None)]
        yield from _measure_signs(bench, vectors, query, few, k, "clustered", signs)
    del vectors
    free(bench.device)
    if bench.device.type != "cuda":
        yield measure_signs_alone(bench, items, ks[0])
    elif torch.cuda.mem_get_info(bench.device)[0] >= ROOM:
        yield measure_signs_alone(bench, MANY, ks[0])


def draw_clustered(
    items: int, dim: int, dtype: torch.dtype, queries: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(items, dim) rows, and (queries, dim) queries: fp16 for rows of fp8."""
    generator = torch.Generator(device).manual_seed(2)
    centres = torch.randn(max(1, items // CLUSTER), dim, device=device, generator=generator)

    def draw(n: int) -> Tensor:
        chosen = torch.randint(len(centres), (n,), device=device, generator=generator)
        x = centres[chosen] + SPREAD * torch.randn(n, dim, device=device, generator=generator)
        return x * torch.exp(LENGTHS * torch.randn(n, 1, device=device, generator=generator))

    vectors = torch.empty(items, dim, dtype=dtype, device=device)
    for start in range(0, items, CHECKED_ROWS):
        part = vectors[start : start + CHECKED_ROWS]
        part.copy_(draw(len(part)))
    return vectors, draw(queries).to(torch.float16 if dtype.itemsize == 1 else dtype)


def _measure_int8(
    bench: Bench, vectors: Tensor, query: Tensor, counts: Sequence[int], k: int, kind: str
) -> Iterator[SearchRow]:
    (N, D), coded = vectors.shape, encode_items(vectors)
    expected = sort_in_fp64(vectors, query[:CHECKED], k)
    for count in counts:
        row = bench.make_row(N, count, k, "tigon, int8", vectors=kind, codes="int8", bits=8 * D)
        row.floor_ms = bench.compute_floor(N * (D + 4), 2 * N * D * count)
        if reads_codes(query[:count], vectors, k):
            row.certified = measure_certified(query, coded, k, count)
        else:
            row.note = "a search of these sizes reads the vectors"
        yield _search(bench, row, query[:count], coded, expected, vectors)


def _measure_signs(
    bench: Bench, vectors: Tensor, query: Tensor, counts: Sequence[int], k: int, kind: str,
    signs: Sequence[tuple[int, int | None]],
) -> Iterator[SearchRow]:  # fmt: skip
    """signs: bits of a row, and candidates of a query, None for the default."""
    exact = filtered_topk(query[:RECALLED], vectors, k)[1]
    for bits, candidates in signs:
        coded = encode_items(vectors, "sign", bits=bits)._replace(candidates=candidates)
        ids = search_signs(query[:RECALLED], coded, k)[1]
        recall = torch.stack([torch.isin(a, b) for a, b in zip(exact, ids, strict=True)]).float().mean().item()
        for count in counts:
            row = bench.make_row(
                len(vectors), count, k, f"tigon, {bits} signs", vectors=kind, codes="sign", bits=bits, recall=recall,
                candidates=count_candidates(k, candidates),
            )  # fmt: skip
            row.floor_ms = bench.compute_floor(len(vectors) * (bits // 8 + 2))
            if not pays(count, vectors, bits, True, None):
                row.note = 'plan="codes"; by default such a search reads the vectors'
            own = query[:count]
            yield bench.time(row, lambda own=own, coded=coded: search_signs(own, coded, k), lambda: None)
        del coded
        free(bench.device)


def _search(
    bench: Bench, row: SearchRow, query: Tensor, items: Tensor | CodedItems, expected: Tensor,
    plain: Tensor | None = None,
) -> SearchRow:  # fmt: skip
    """plain: rows without codes, by which a search returns the same bits."""

    def check() -> None:
        result = filtered_topk(query, items, row.k)
        row.compare(result[1], expected)
        if plain is not None:
            other = filtered_topk(query, plain, row.k)
            if not all(torch.equal(a, b) for a, b in zip(result, other, strict=True)):
                row.status, row.reason = "wrong", "the answer is not that of a search without codes"

    return bench.time(row, lambda: filtered_topk(query, items, row.k), check)


def search_signs(query: Tensor, coded: CodedItems, k: int, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return filtered_topk(query, coded, k, live=live, plan="codes")


def reads_codes(query: Tensor, vectors: Tensor, k: int) -> bool:
    """Whether kernels read codes of 8 bits."""
    if not use_triton(query, vectors if vectors.element_size() > 1 else None):
        return False
    two = query.dtype != vectors.dtype and vectors.element_size() == 2
    (B, D), N, room = query.shape, len(vectors), facts.shared_memory(query.device)
    return plan_coded_scan(SearchSizes(B, k, D, N, vectors.dtype, two_terms=two, room=room)) is not None


def measure_certified(query: Tensor, coded: CodedItems, k: int, count: int) -> float:
    """The share of the queries whose answer is proven by codes, in batches in which a query has as many terms."""
    size = CODED_TERMS if count <= CODED_TERMS else count
    assert coded.scales is not None
    assert coded.error is not None
    items = coded.rows, coded.codes, coded.scales, coded.error
    proven = [
        _coded_topk(part, *items, k, None, None, None, None, 0, None, None, "dense", None)[2]
        for part in query.split(size)
    ]
    return torch.cat(proven).float().mean().item()


def measure_signs_alone(bench: Bench, count: int, k: int) -> SearchRow:
    """Rows of 64 signs, all of the same vector: what a search of one query takes that reads nothing but signs."""
    device = bench.device
    draw = torch.Generator(device).manual_seed(3)
    query, vector = torch.randn(2, 1, bench.dim, device=device, generator=draw)
    query = query.to(bench.query_dtype)
    codes = torch.empty(count, MANY_BITS // 32, dtype=torch.int32, device=device)
    codes.random_(-(2**31), 2**31, generator=draw)
    projection = make_projection(bench.dim, MANY_BITS, 0).to(device)
    coded = CodedItems(vector.to(bench.dtype).expand(count, -1), codes, None, None, None, projection)
    row = bench.make_row(
        count, 1, k, f"tigon, {MANY_BITS} signs", vectors="one", codes="sign", bits=MANY_BITS,
        candidates=count_candidates(k, None), note="signs drawn at random, one vector for all rows (stride 0)",
        floor_ms=bench.compute_floor(count * MANY_BITS / 8),
    )  # fmt: skip

    def check() -> None:
        """One row in 64 is live; k live rows have the query's signs, and these rows are the candidates."""
        place = 37
        planted = torch.randperm(max(1, (count - place) // 64), device=device, generator=draw)[:k].sort().values * 64
        planted += place
        codes[planted] = encode_items(query, "sign", bits=MANY_BITS).codes
        live = torch.zeros((count + 31) // 32, dtype=torch.int32, device=device)
        live[place // 32 :: 2] = 1 << place % 32
        ids = search_signs(query, coded._replace(candidates=k), k, live)[1]
        row.equal = float(torch.isin(planted, ids[0]).float().mean())
        if row.equal < 1:
            row.status, row.reason = "wrong", f"{row.equal:.4f} of the planted rows were found"

    return bench.time(row, lambda: search_signs(query, coded, k), check)
