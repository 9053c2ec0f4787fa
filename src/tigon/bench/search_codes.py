"""Searches with codes: 8-bit codes with a certificate, and signs, beside the plain search of the same vectors.

The floor of such a search is the time of its codes' bytes at the rate of a large copy. A search by signs for many
queries is far above: what binds it are popcounts.

Random vectors are the hardest: hardly one is nearer to a query than the next. Clustered ones are like those of trained
models, in which queries have neighbours: CLUSTER rows around each of many centres, SPREAD times as wide as the centres,
with lengths that differ by a factor of exp(±LENGTHS). Queries are drawn like rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tigon.bench.runner import Ceilings, Settings, free, one_line, peak_mib, time_ms
from tigon.bench.search import CHECKED, CHECKED_ROWS, Items, SearchRow, expected, milliseconds_of_graph
from tigon.ops.filtered_topk import CodedItems, encode_items, filtered_topk
from tigon.ops.filtered_topk.coded import _coded_topk
from tigon.ops.filtered_topk.plan import CODED_TERMS, plan_coded_scan
from tigon.ops.filtered_topk.sign import count_candidates, make_projection, pays
from tigon.runtime import device as facts
from tigon.runtime import use_triton

CLUSTER, SPREAD, LENGTHS = 1000, 0.6, 0.1
# Signs of the searches that are timed for every number of queries.
BITS = 512
# Of clustered vectors also these bits with the default of 5 k candidates, and BITS with these candidates for each of k.
MORE_BITS, MORE_CANDIDATES = (64, 256), (2, 10)
# Queries of which the share that is certified, and of which the recall is taken.
CERTIFIED, RECALLED = 256, 64
# Rows of the search that reads nothing but signs, and the bytes of memory that it needs.
MANY, MANY_BITS, ROOM = 10**9, 64, 14 << 30
# A call that takes longer than these milliseconds takes hardly less in a CUDA graph.
LONG_MS = 20.0


@dataclass
class CodedRow(SearchRow):
    """A search of vectors that may have codes.

    vectors: "random", "clustered", or "one", the same for every row. codes: "int8" or "sign", of so many bits a row
    and candidates a query; None for a plain search. certified: the share of the queries whose answer the codes alone
    prove. recall: the share of the exact answers' rows that were found.
    """

    vectors: str = "random"
    codes: str | None = None
    bits: int | None = None
    candidates: int | None = None
    certified: float | None = None
    recall: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Bench:
    """What the searches of one run have in common."""

    def __init__(
        self, dim: int, dtype: torch.dtype, device: torch.device, ceilings: Ceilings, settings: Settings,
        step: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.dim, self.dtype, self.device = dim, dtype, device
        self.ceilings, self.settings, self.step = ceilings, settings, step
        self.query_dtype = torch.float16 if dtype.itemsize == 1 else dtype

    def row(self, items: int, queries: int, k: int, by: str, moved: float, flop: float = 0, **more: Any) -> CodedRow:
        """moved: bytes. flop: of the products."""
        floor = max(moved / self.ceilings.copy_gbps / 1e6, flop / self.ceilings.matmul_tflops / 1e9)
        dtype = str(self.dtype).removeprefix("torch.")
        return CodedRow(items, self.dim, dtype, queries, k, "none", 1.0, by, floor_ms=floor, **more)

    def timed(self, row: CodedRow, call: Callable[[], Any], check: Callable[[], None]) -> CodedRow:
        """The row with its times, after its check."""
        self.step(f"{row.queries} × {row.k}, {row.implementation}, {row.vectors} vectors")
        try:
            check()
            row.ms = time_ms(call, self.device, self.settings)
            if self.device.type == "cuda" and row.ms < LONG_MS:
                row.graph_ms = milliseconds_of_graph(call)
            row.peak_mib = peak_mib(call, self.device)[0]
            assert row.floor_ms is not None
            row.times_floor = (row.graph_ms or row.ms) / row.floor_ms
        except torch.OutOfMemoryError:
            row.status, row.reason = "failed", "out of memory"
        except Exception as error:
            row.status, row.reason = "failed", f"{type(error).__name__}: {one_line(error)}"
        free(self.device)
        return row


def measured(
    items: int, dim: int, dtype: torch.dtype, queries: Sequence[int], ks: Sequence[int], device: torch.device,
    ceilings: Ceilings, settings: Settings, step: Callable[[str], None] = lambda _: None,
) -> Iterator[CodedRow]:  # fmt: skip
    """Searches of random vectors, whose plain ones `search.run` measures, of clustered ones, and of signs alone."""
    bench = Bench(dim, dtype, device, ceilings, settings, step)
    step("random vectors")
    draw = torch.Generator(device).manual_seed(1)
    asked = torch.randn(max(CERTIFIED, *queries), dim, device=device, generator=draw).to(bench.query_dtype)
    vectors = Items(items, dim, dtype, [], device).vectors
    for k in ks:
        yield from _searches(bench, vectors, asked, queries, k, "random", [(BITS, None)], plain=False)
    del vectors
    free(device)
    step("clustered vectors")
    vectors, asked = clustered(items, dim, dtype, CERTIFIED, device)
    for k in ks:
        signs = [(bits, None) for bits in (*MORE_BITS, BITS)] + [(BITS, many * k) for many in MORE_CANDIDATES]
        yield from _searches(
            bench, vectors, asked, queries[:1], k, "clustered", signs if k == ks[0] else [(BITS, None)], plain=True
        )
    del vectors
    free(device)
    yield from _signs_alone(bench, items, ks[0])


def clustered(
    items: int, dim: int, dtype: torch.dtype, queries: int, device: torch.device
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(items, dim) rows, and (queries, dim) queries: fp16 for rows of fp8."""
    draw = torch.Generator(device).manual_seed(2)
    centres = torch.randn(max(1, items // CLUSTER), dim, device=device, generator=draw)

    def drawn(n: int) -> Tensor:
        at = torch.randint(len(centres), (n,), device=device, generator=draw)
        x = centres[at] + SPREAD * torch.randn(n, dim, device=device, generator=draw)
        return x * torch.exp(LENGTHS * torch.randn(n, 1, device=device, generator=draw))

    vectors = torch.empty(items, dim, dtype=dtype, device=device)
    for start in range(0, items, CHECKED_ROWS):
        part = vectors[start : start + CHECKED_ROWS]
        part.copy_(drawn(len(part)))
    return vectors, drawn(queries).to(torch.float16 if dtype.itemsize == 1 else dtype)


def _searches(
    bench: Bench, vectors: Tensor, asked: Tensor, counts: Sequence[int], k: int, name: str,
    signs: Sequence[tuple[int, int | None]], *, plain: bool,
) -> Iterator[CodedRow]:  # fmt: skip
    """Plain searches where they are asked for, searches by codes of 8 bits, and by each of the signs."""
    N, D = vectors.shape
    right = expected(vectors, asked[:CHECKED], k)
    exact = filtered_topk(asked[:RECALLED], vectors, k)[1]
    moved, flop = vectors.numel() * vectors.element_size(), 2 * vectors.numel()
    coded = encode_items(vectors)
    for count in counts:
        query = asked[:count]
        if plain:
            row = bench.row(N, count, k, "tigon", moved, flop * count, vectors=name)
            yield _search(bench, row, query, vectors, right)
        row = bench.row(N, count, k, "tigon, int8", N * (D + 4), flop * count, vectors=name, codes="int8", bits=8 * D)
        if _reads(query, vectors, k):
            row.certified = certified(asked, coded, k, count)
        else:
            row.note = "a search of these sizes reads the vectors"
        yield _search(bench, row, query, coded, right, vectors)
    del coded
    for bits, candidates in signs:
        made = encode_items(vectors, "sign", bits=bits)._replace(candidates=candidates)
        many = count_candidates(k, candidates)
        recall = _recall(_by_signs(asked[:RECALLED], made, k)[1], exact)
        for count in counts:
            by = f"tigon, {bits} signs"
            row = bench.row(
                N, count, k, by, N * (bits // 8 + 2), vectors=name, codes="sign", bits=bits, candidates=many,
                recall=recall,
            )  # fmt: skip
            if not pays(count, vectors, bits, True, None):
                row.note = 'plan="codes"; by default such a search reads the vectors'
            yield bench.timed(row, _call(asked[:count], made, k), lambda: None)
        del made
        free(bench.device)


def _search(
    bench: Bench, row: CodedRow, query: Tensor, items: Tensor | CodedItems, right: Tensor, plain: Tensor | None = None
) -> CodedRow:
    """plain: rows without codes, by which a search returns the same bits."""

    def check() -> None:
        scores, found = filtered_topk(query, items, row.k)
        row.equal = (found[: len(right)] == right[: len(found)]).float().mean().item()
        if row.equal < 0.99:  # near ties may change places
            row.status, row.reason = "wrong", f"{row.equal:.4f} of the ids are those of a sort in fp64"
        if plain is not None:
            other = filtered_topk(query, plain, row.k)
            if not (torch.equal(scores, other[0]) and torch.equal(found, other[1])):
                row.status, row.reason = "wrong", "the answer is not that of a search without codes"

    return bench.timed(row, lambda: filtered_topk(query, items, row.k), check)


def _call(query: Tensor, made: CodedItems, k: int) -> Callable[[], Any]:
    return lambda: _by_signs(query, made, k)


def _by_signs(query: Tensor, made: CodedItems, k: int, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return filtered_topk(query, made, k, live=live, plan="codes")


def _reads(query: Tensor, vectors: Tensor, k: int) -> bool:
    """Whether kernels read codes of 8 bits."""
    if not use_triton(query, vectors if vectors.element_size() > 1 else None):
        return False
    two = query.dtype != vectors.dtype and vectors.element_size() == 2
    (B, D), N, room = query.shape, len(vectors), facts.shared_memory(query.device)
    return plan_coded_scan(B, k, D, N, vectors.dtype, two_terms=two, room=room) is not None


def certified(asked: Tensor, coded: CodedItems, k: int, count: int) -> float:
    """The share of the queries whose answer is proven by codes, in batches in which a query has as many terms."""
    size = CODED_TERMS if count <= CODED_TERMS else count
    assert coded.scales is not None
    assert coded.error is not None
    items = coded.rows, coded.codes, coded.scales, coded.error
    sure = [
        _coded_topk(part, *items, k, None, None, None, None, 0, None, None, "dense", None)[2]
        for part in asked.split(size)
    ]
    return torch.cat(sure).float().mean().item()


def _recall(found: Tensor, exact: Tensor) -> float:
    return torch.stack([torch.isin(a, b) for a, b in zip(exact, found, strict=True)]).float().mean().item()


def _signs_alone(bench: Bench, items: int, k: int) -> Iterator[CodedRow]:
    """A billion rows of 64 signs where memory allows, all of the same vector: what a search of one query takes."""
    device, count = bench.device, items
    if device.type == "cuda":
        count = MANY
        if torch.cuda.mem_get_info(device)[0] < ROOM:
            return
    bench.step(f"{count:,} × {MANY_BITS} signs")
    draw = torch.Generator(device).manual_seed(3)
    query, row_of = torch.randn(2, 1, bench.dim, device=device, generator=draw)
    query = query.to(bench.query_dtype)
    projection = make_projection(bench.dim, MANY_BITS, 0).to(device)
    codes = torch.empty(count, MANY_BITS // 32, dtype=torch.int32, device=device)
    codes.random_(-(2**31), 2**31, generator=draw)
    rows = row_of.to(bench.dtype).expand(count, -1)
    made = CodedItems(rows, codes, None, None, None, projection)
    many = count_candidates(k, None)
    row = bench.row(
        count, 1, k, f"tigon, {MANY_BITS} signs", count * MANY_BITS / 8, vectors="one", codes="sign", bits=MANY_BITS,
        candidates=many, note="signs drawn at random, one vector for all rows (stride 0)",
    )  # fmt: skip

    def check() -> None:
        """Of each 64 rows one is live; k of these have the query's own signs, which then are the candidates."""
        place = 37
        planted = torch.randperm(max(1, (count - place) // 64), device=device, generator=draw)[:k].sort().values * 64
        planted += place
        codes[planted] = encode_items(query, "sign", bits=MANY_BITS).codes
        live = torch.zeros((count + 31) // 32, dtype=torch.int32, device=device)
        live[place // 32 :: 2] = 1 << place % 32
        found = _by_signs(query, made._replace(candidates=k), k, live)[1]
        row.equal = float(torch.isin(planted, found[0]).float().mean())
        if row.equal < 1:
            row.status, row.reason = "wrong", f"{row.equal:.4f} of the planted rows were found"

    yield bench.timed(row, _call(query, made, k), check)
