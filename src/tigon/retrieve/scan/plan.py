"""Search plans, decided from sizes alone: rows to read and how, groups, levels, tiles, bytes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tigon.kernels.rows import cdiv, next_power_of_2

# Keys that a program selects among: 65,536 took 0.43 ms on an H200 and 20 s to compile, 16,384 some 0.03 ms.
KEYS = 16384
# Groups picked in addition to k. The scan and the exact scores differ by at most 2·D·2⁻²⁴·|q|·|x|: an item that is
# ahead by less may lie in a group with a lower maximum.
SPARE = 16
# Cost of reading rows through a list relative to contiguous rows: 1.2 in tiles of 256 queries on an H200.
GATHERED = 1.2
# Byte limit on a search's maxima and candidates: larger batches are split into pieces, each of which reads all rows.
# 256 queries with k = 1000 among 15.5 million rows take 1.08 GiB, and are one piece: in two, scans took 3.0 ms on an
# H200.
WORKSPACE = 5 << 28


# Shared memory per program on a Hopper GPU, in bytes.
ROOM = 232448


class SearchSizes(NamedTuple):
    """The sizes and options that a search is planned from.

    Attributes:
        B, k, D, N: queries, results, width, rows.
        dtype: the items' dtype.
        filters: the number of distinct filters: 0 if all rows pass, 1 for a single filter for the batch.
        words: attribute words that the filters read.
        share: the fraction of rows that pass; None if unknown: counted as half.
        live, bias: whether they are given.
        kind: "auto", or the requested plan.
        two_terms: each query is a sum of two rows in the items' dtype.
        room: bytes of shared memory per program.
        kept: whether precomputed bits are read in place of attributes.
        width: tag columns per step of their product, 0 without tags. steps: the number of steps.
        many: whether products read their operands from shared memory, as from the H100 on, which leaves registers for
            larger tiles with tags.
    """

    B: int
    k: int
    D: int
    N: int
    dtype: torch.dtype
    filters: int = 0
    words: int = 0
    share: float | None = None
    live: bool = False
    bias: bool = False
    kind: str = "auto"
    two_terms: bool = False
    room: int = ROOM
    kept: bool = False
    width: int = 0
    steps: int = 0
    many: bool = True


class Sizes(NamedTuple):
    """Tree sizes, in item rows: a group, an intermediate node (0: none), a strip; and the number of groups that
    a program's table has places for."""

    group: int
    middle: int
    strip: int
    places: int


class Tile(NamedTuple):
    """queries, rows: the product's size. depth: the size of a summation step. stages: loads in flight at once."""

    queries: int
    rows: int
    depth: int
    warps: int
    stages: int


class Plan(NamedTuple):
    """The result of `plan_scan`.

    Attributes:
        kind: "dense": read all rows. "compact": read the rows that pass, through a list. "bitmaps": read all rows, with
            a filter per query. An empty search has "none".
        bytes: the batch's memory traffic.
        flop: the products' FLOPs.
        groups: the number of groups per query whose rows are scored exactly.
        sizes: the tree of maxima.
        levels: rows per node for each level, from the top level, which is read whole, to the groups.
        tile: the scan's tile.
        pieces: the number of sequential pieces of the batch, so that the workspace suffices.
        workspace: bytes per piece.
        codes: "int8" if codes are scanned first; groups then have the largest bounds, and the tile is for
            the codes.
        terms: 8-bit numbers per query element.
        then: the plan for queries that the codes do not settle.
    """

    kind: str
    bytes: int
    flop: int
    groups: int
    sizes: Sizes
    levels: tuple[int, ...]
    tile: Tile
    pieces: int
    workspace: int
    codes: str | None = None
    terms: int = 1
    then: Plan | None = None

    def __str__(self) -> str:
        how = {
            "dense": "all rows",
            "compact": "a list of matching rows",
            "bitmaps": "all rows, with a filter per query",
        }
        levels = " → ".join(f"{size:,}" for size in self.levels)
        codes = f"{self.codes} codes of " if self.codes is not None else ""
        which = codes + how.get(self.kind, "no rows")
        return (
            f"{self.kind}: {which}; {self.bytes / 1e9:.3f} GB, {self.flop / 1e12:.3f} TFLOP\n"
            f"maxima of {levels} rows; {self.groups} groups of {self.sizes.group} rows scored exactly for each query\n"
            f"tile of {self.tile.queries} queries × {self.tile.rows} rows; {self.pieces} piece(s), workspace "
            f"{self.workspace / 2**20:.1f} MiB"
        )


def choose_sizes(k: int) -> Sizes:
    """Choose sizes by k alone, so that a query's scores have the same bits in any batch and plan.

    A program selects among the children of as many nodes as there are places. Small groups write many maxima, large
    groups score many rows twice: 4N/G + k·G·2D bytes are minimal at G = √(2N/(kD)), 49 for 15.5 M × 128 and k = 100.
    """
    places = next_power_of_2(min(k + SPARE, 2048))
    if places <= 128:
        return Sizes(64, 0, 4096, places)
    if places <= 256:
        return Sizes(32, 0, 2048, places)
    return Sizes(16, 128, 2048 if places <= 1024 else 1024, places)


def list_levels(N: int, sizes: Sizes) -> tuple[int, ...]:
    """Rows per node for each level, from the top: a single program reads a whole top level."""
    levels = [sizes.group, *([sizes.middle] if sizes.middle else []), sizes.strip]
    while cdiv(N, levels[-1]) > KEYS:
        levels.append(levels[-1] * min(64, KEYS // sizes.places))
    return tuple(reversed(levels))


def count_nodes(N: int, levels: tuple[int, ...], strip: int) -> list[int]:
    """Nodes per level, from the top. Below strip level, every strip has room for its maximum node count."""
    return [cdiv(N, n) if n >= strip else cdiv(N, strip) * (strip // n) for n in levels]


def _split(B: int, one: int) -> tuple[int, int]:
    """The pieces of a batch whose queries take so many bytes of workspace each, and the queries in a piece."""
    pieces = cdiv(B, max(16, WORKSPACE // max(one, 1) // 16 * 16))
    return pieces, cdiv(B, max(pieces, 1))


# Tuned on a GPU, for 16-bit numbers: maximum batch size → tile for contiguous rows, and for listed rows.
TILES = {
    16: (Tile(16, 128, 128, 4, 4), Tile(16, 64, 128, 4, 3)),
    32: (Tile(32, 128, 128, 4, 4), Tile(32, 128, 128, 4, 5)),
    64: (Tile(64, 128, 128, 4, 4), Tile(64, 128, 128, 4, 4)),
    128: (Tile(128, 128, 128, 8, 3), Tile(128, 128, 128, 8, 4)),
    256: (Tile(256, 64, 128, 8, 3), Tile(256, 64, 128, 8, 3)),
}
# With filter columns, whose products take registers.
TILES_FILTERED = {
    16: Tile(16, 128, 128, 4, 3), 32: Tile(32, 128, 128, 4, 3), 64: Tile(64, 128, 128, 4, 3),
    128: Tile(128, 64, 128, 8, 3), 256: Tile(256, 64, 128, 8, 3),
}  # fmt: skip
# For rows that take several steps, in which queries are read again per step. With larger tiles the products wait for
# each other.
TILES_WIDE = {16: Tile(16, 128, 64, 4, 4), 64: Tile(64, 64, 64, 4, 3), 256: Tile(128, 64, 64, 4, 3)}
# For fp32, where a product takes three on the tensor cores.
TILES_FP32 = {16: Tile(16, 64, 64, 4, 3), 256: Tile(64, 64, 64, 8, 2)}


def tag_steps(columns: int, width: int) -> int:
    """The number of steps in a tile's tag product whose weights stay loaded: 1, 2, or 0 for more."""
    steps = columns // width if width else 0
    return steps if steps <= 2 else 0


def choose_tile(given: SearchSizes, B: int, kind: str) -> Tile:
    """B: queries at once. kind: the plan."""
    D, dtype, two_terms, width, steps = given.D, given.dtype, given.two_terms, given.width, given.steps
    if dtype == torch.float32:
        tile = TILES_FP32[16 if B <= 16 else 256]
    elif D > 128:
        tile = TILES_WIDE[16 if B <= 16 else 64 if B <= 64 else 256]
        if two_terms and B > 64:  # with two sums per score, 4 warps have too few registers
            tile = tile._replace(warps=8)
    else:
        most = next((n for n in TILES if n >= B), 256)
        tile = TILES_FILTERED[most] if kind == "bitmaps" or width else TILES[most][kind == "compact"]
        if two_terms:
            tile = tile._replace(queries=min(tile.queries, 128), stages=min(tile.stages, 3))
    if width:
        tile = _with_tags(tile, given)
    tile = tile._replace(depth=max(16, min(tile.depth, next_power_of_2(D))))
    size = 4 if dtype == torch.float32 else 2
    while tile.stages > 1 and _shared_bytes(tile, D, size, two_terms, width, steps) > given.room:
        tile = tile._replace(stages=tile.stages - 1)
    while tile.queries > 16 and _shared_bytes(tile, D, size, two_terms, width, steps) > given.room:
        tile = tile._replace(queries=tile.queries // 2)
    return tile


def _with_tags(tile: Tile, given: SearchSizes) -> Tile:
    """Shrink tiles that leave no registers for the tag product's separate sums."""
    if given.dtype == torch.float32:
        return tile._replace(queries=min(tile.queries, 16), warps=4)
    if not given.many:
        wide = 32 if given.steps > 1 or given.two_terms else 64
        return tile._replace(queries=min(tile.queries, wide), rows=64, warps=4)
    if given.steps > 2:
        return tile._replace(queries=min(tile.queries, 32), rows=64, warps=4)
    return tile


def _shared_bytes(tile: Tile, D: int, size: int, two_terms: bool, width: int = 0, steps: int = 0) -> int:
    """Bytes of shared memory: queries stay loaded if a single step is the whole sum, otherwise move like rows."""
    if width:  # two terms of the weights, and the rows' tags
        tags = 2 * width * (2 * tile.queries * min(steps, 2) + tile.rows * min(steps, 2))
        return tags + _shared_bytes(tile, D, size, two_terms)
    queries = tile.queries * (2 if two_terms else 1)
    if tile.depth >= D:
        return size * tile.depth * (queries + tile.stages * tile.rows) + 4096
    return size * tile.depth * tile.stages * (queries + tile.rows) + 4096


def choose_kind(filters: int, share: float | None, kind: str = "auto") -> str:
    """Choose the rows to read by bytes per row with D numbers; a listed row costs `GATHERED` times as much."""
    if kind != "auto" and filters:
        return kind
    if filters > 1:
        return "bitmaps"
    return "compact" if filters and (share is None or share * GATHERED < 1) else "dense"


def plan_scan(given: SearchSizes) -> Plan:
    """Plan a search."""
    B, k, D, N, dtype, filters, words, share = given[:8]
    kind, sizes = choose_kind(filters, share, given.kind), choose_sizes(k)
    levels = list_levels(N, sizes)
    groups = min(k + SPARE, sizes.places, cdiv(N, sizes.strip) * (sizes.strip // sizes.group))
    size = torch.empty((), dtype=dtype).element_size()
    passing = (0.5 if share is None else share) if kind == "compact" else 1.0
    read = int(N * passing * (size * D + (4 if given.bias else 0) + (4 if kind == "compact" else 0)))
    read += (filters * N // 8 if given.kept else 8 * words * N) + (N // 8 if given.live else 0)
    if not given.kept and (kind == "bitmaps" or (kind == "dense" and filters)):
        read += 2 * 4 * N * cdiv(max(filters, 1), 32)
    elif kind == "compact":
        read += int(4 * N * passing)
    # The maxima are written, and each query's picked groups are read again.
    read += B * int(4 * cdiv(N, sizes.group) * passing) + B * groups * sizes.group * (size * D + 16)
    one = 4 * sum(count_nodes(N, levels, sizes.strip)) + 8 * groups * sizes.group
    pieces, b = _split(B, one)
    tile = choose_tile(given, b, kind)
    # Tags: a word per step, and two weight terms.
    read += int(N * passing) * 8 * given.steps
    flop = int(2 * B * N * passing * (D + 2 * given.width * given.steps))
    return Plan(kind if N and B else "none", read, flop, groups, sizes, levels, tile, pieces, one * b)


# With codes: the maximum batch size that reads codes; the maximum with two terms per query element (which halves the
# distance between bounds and scores, in products that are bound by memory anyway); and the maximum k whose groups can
# be certified.
CODED_QUERIES, CODED_TERMS, CODED_MOST = 64, 16, 1008
# Groups per result whose rows are scored exactly; more groups certify more queries, fewer are scored sooner.
CODED_GROUPS = 4
# Cost of more groups and launches, in bytes that memory could move meanwhile: 0.08 ms on an H200.
CODED_BYTES = 5 << 26
# 16-bit tile sizes count as 8-bit numbers for codes: queries → tile for contiguous rows, and for listed rows.
TILES_INT8 = {
    16: (Tile(16, 128, 128, 4, 4), Tile(16, 128, 128, 4, 4)),
    32: (Tile(32, 128, 128, 4, 4), Tile(32, 128, 128, 4, 4)),
    64: (Tile(64, 128, 128, 4, 4), Tile(64, 128, 128, 4, 4)),
}
TILES_INT8_WIDE = {16: Tile(16, 128, 128, 4, 4), 64: Tile(64, 64, 128, 4, 3)}


def choose_coded_sizes(k: int) -> Sizes:
    """Like `choose_sizes`, with more places. Groups are equal, so that their exact scores have the same bits."""
    sizes = choose_sizes(k)
    if sizes.group == 16:
        return Sizes(16, 128, 1024, 2048)
    return Sizes(sizes.group, 8 * sizes.group, sizes.strip, max(128, next_power_of_2(CODED_GROUPS * k)))


def plan_coded_scan(given: SearchSizes) -> Plan | None:
    """Plan a search with 8-bit codes; None if codes would move more bytes."""
    B, k, D, N, dtype = given[:5]
    plain = plan_scan(given)
    if plain.kind not in ("dense", "compact") or B > CODED_QUERIES or k > CODED_MOST or D > 1 << 16:
        return None
    sizes = choose_coded_sizes(k)
    levels = list_levels(N, sizes)
    nodes = count_nodes(N, levels, sizes.strip)
    groups = min(sizes.places, nodes[-1])
    size = torch.empty((), dtype=dtype).element_size()
    passing = (0.5 if given.share is None else given.share) if plain.kind == "compact" else 1.0
    read = plain.bytes + int(N * passing * (D + 4 - size * D))
    read += B * (groups - plain.groups) * sizes.group * (size * D + 16)
    if read + CODED_BYTES > plain.bytes:
        return None
    one = 4 * sum(nodes) + 16 * groups * sizes.group
    pieces, b = _split(B, one)
    if D > 128:
        tile = TILES_INT8_WIDE[16 if b <= 16 else 64]
    else:
        tile = TILES_INT8[next(n for n in TILES_INT8 if n >= b)][plain.kind == "compact"]
    tile = tile._replace(depth=max(32, min(tile.depth, next_power_of_2(D))), rows=min(tile.rows, sizes.middle))
    terms = 2 if b <= CODED_TERMS else 1
    while tile.stages > 1 and _shared_bytes(tile, D, 1, terms == 2) > given.room:
        tile = tile._replace(stages=tile.stages - 1)
    then = plain._replace(
        sizes=sizes, levels=levels, groups=min(k + SPARE, groups), pieces=pieces,
        tile=choose_tile(given, b, plain.kind),
    )  # fmt: skip
    then = then._replace(tile=then.tile._replace(rows=min(then.tile.rows, sizes.middle)))
    return plain._replace(
        bytes=read, flop=plain.flop * terms, groups=groups, sizes=sizes, levels=levels, tile=tile, pieces=pieces,
        workspace=one * b, codes="int8", terms=terms, then=then,
    )  # fmt: skip
