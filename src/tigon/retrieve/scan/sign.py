"""1-bit codes: the signs of a row's random projections, used to find the rows that are scored exactly.

A projection is the sum of a few row elements with random signs. A random permutation, split into bins, selects the
elements: a permutation's bins share no element. With more bits than elements there are several permutations. The
fraction of signs that a row and a query share determines the angle between them, so a code estimates the cosine; times
the row's norm, which may be stored next to the code, the inner product.

The query is not reduced to signs: a large projection counts three times as much. That costs the scan no bytes.

Source: one permutation and one random projection, Li & Li 2023, https://arxiv.org/abs/2302.03505, with signs only as
in LiNR, Borisyuk et al. 2024, https://arxiv.org/abs/2407.13218.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels import cdiv, is_traced
from tigon.retrieve.scan.bits import RowBits
from tigon.retrieve.scan.codes import CodedItems
from tigon.retrieve.scan.filters import RowFilter
from tigon.retrieve.scan.reference import find_hidden, normalize

BITS = (64, 128, 256, 512, 1024)
# Row elements per projection if there are more bits than elements. With 1, codes would repeat; above 2, recall is
# unchanged.
TERMS = 4
# A group is 512 bytes of codes, a node 16 groups, a strip 16 nodes: 4-byte maxima are below a hundredth of the bytes
# read, and few other rows are scored with a picked row.
GROUP_BYTES, ARITY = 512, 16
# Candidates per result, and the minimum.
CANDIDATES, LEAST_CANDIDATES = 5, 256
# Costs of a popcount, and of selecting among codes, in bytes that an H200 moves meanwhile: 16 popcounts per clock per
# multiprocessor, and some 0.08 ms.
POPCOUNT, OVERHEAD = 1.2, 350_000_000
# Tensor core operations per byte moved.
FLOP = 184
# Codes per chunk on a CPU: 16 million signs in fp32.
SIGNS = 1 << 24
# Maximum number of candidates per query.
MOST_CANDIDATES = 65536
Where = RowFilter | Sequence[RowFilter | None] | RowBits


class Signs(NamedTuple):
    """Codes of rows. scales: norms, bf16. more: for queries, the large projections; query scales are fp32."""

    codes: Tensor
    more: Tensor | None
    scales: Tensor | None


def check_bits(name: str, bits: int) -> None:
    if type(bits) is not int or bits not in BITS:
        raise ValueError(f"{name}: bits must be one of {', '.join(map(str, BITS))}, got {bits!r}.")


def count_bins(D: int, bits: int) -> int:
    """The number of projections from a permutation of D elements."""
    return bits if bits <= D else max(1, D // TERMS)


@functools.lru_cache(64)
def make_projection(D: int, bits: int, seed: int) -> Tensor:
    """(terms, bits) int32: index of a row element, times 2, plus 1 for a sign change; −1 for none.

    Integer arithmetic only, so that a seed gives the same projection on every platform and PyTorch version.
    """
    bins = count_bins(D, bits)
    terms, times = cdiv(D, bins), cdiv(bits, bins)
    at = torch.arange(times * D, dtype=torch.int64, device="cpu").view(times, D)
    number = _mix(at + _mix(torch.full_like(at, seed)))
    order = number.argsort(dim=1, stable=True)
    value = 2 * order + (_mix(number) & 1)
    value = torch.nn.functional.pad(value, (0, terms * bins - D), value=-1)
    # Bin b's t-th element is number t · bins + b in the permutation: bin sizes differ by at most one.
    return value.view(times, terms, bins).transpose(0, 1).reshape(terms, times * bins)[:, :bits].int().contiguous()


def _mix(x: Tensor) -> Tensor:
    """32 bits that depend on all 32 low bits of x, like MurmurHash3's finalizer. The products fit 64 bits."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def compute_factor(D: int, bits: int) -> float:
    """The factor that turns a sum of signs times projections into an inner product, for rows with norm 1."""
    return math.sqrt(math.pi / 2 * count_bins(D, bits)) / bits


def count_candidates(k: int, candidates: int | None) -> int:
    """The number of picked groups: each of a query's candidates may be in another group."""
    return max(LEAST_CANDIDATES, CANDIDATES * k) if candidates is None else candidates


def pays(B: int, items: Tensor, bits: int, scaled: bool, share: float | None) -> bool:
    """Whether reading the signs costs less than reading the rows, from sizes alone, in bytes.

    share: the fraction of rows that pass a filter; None without a filter.
    """
    N, D = items.shape
    passing = N * (1.0 if share is None else share)
    rows = passing * max(D * items.element_size(), 2 * B * D / FLOP)
    signs = passing * max(bits // 8 + (2 if scaled else 0), POPCOUNT * B * bits / 16)
    return signs + OVERHEAD < rows


def uses_signs(query: Tensor, coded: CodedItems | None, where: Where | None, plan: str, share: float | None) -> bool:
    """Whether a search reads signs. With a filter per query it reads the rows, which cost as much for all queries."""
    signs = coded is not None and coded.projection is not None
    one = where is None or isinstance(where, RowFilter) or (isinstance(where, RowBits) and where.which is None)
    if plan == "codes" and not (signs and one):
        got = "another kind of items" if not signs else "a filter per query"
        raise ValueError(
            "filtered_topk: plan may be 'codes' only for items from encode_items(rows, 'sign') and at most one "
            f"filter, got {got}."
        )
    if coded is None or coded.projection is None or not one or plan not in ("auto", "codes"):
        return False
    passing = None if where is None else 0.5 if share is None else share
    bits = coded.projection.shape[1]
    return plan == "codes" or pays(query.shape[0], coded.rows, bits, coded.scales is not None, passing)


# ------------------------------------------------------------------------------------------------------- on a CPU


def signs_reference(rows: Tensor, projection: Tensor, *, scaled: bool, query: bool = False) -> Signs:
    """Signs of rows, or of queries: the kernel's specification, bit for bit.

    rows: (n, D). projection: from `make_projection`. scaled: include the rows' norms.
    """
    bits = projection.shape[1]
    size = max(1, SIGNS // bits)
    if is_traced(rows) or rows.shape[0] <= size:
        return _signs(rows, projection, scaled, query)
    parts = [_signs(part, projection, scaled, query) for part in rows.split(size)]
    return Signs(*(None if one[0] is None else torch.cat(one) for one in zip(*parts, strict=True)))  # type: ignore[arg-type]


def _signs(rows: Tensor, projection: Tensor, scaled: bool, query: bool) -> Signs:
    bits, x = projection.shape[1], rows.float()
    y = x.new_zeros((x.shape[0], bits))
    for p in projection:
        number = x[:, (p >> 1).clamp(min=0).long()]
        y = y + torch.where(p >= 0, torch.where((p & 1) != 0, -number, number), 0.0)
    codes = _words(y >= 0)
    if not query:
        return Signs(codes, None, _norms(x) if scaled else None)
    u, exponent = _whole(y.abs())
    large = u * (4 * bits) >= 5 * u.sum(1, keepdim=True)
    v = torch.where(large, 3, 1)
    step = (u * v).sum(1).float() / (v * v).sum(1).float()
    return Signs(codes, _words(large), step * compute_factor(rows.shape[1], bits) * _power(exponent - 14))


def _whole(size: Tensor) -> tuple[Tensor, Tensor]:
    """Non-negative numbers as integers below 2¹⁵ times a power of two, so that sums do not depend on order."""
    size = torch.where(size < torch.inf, size, 0.0)
    exponent = (size.amax(1).view(torch.int32) >> 23).clamp(15, 254)
    return (size * _power(268 - exponent)[:, None]).long(), exponent


def _power(exponent: Tensor) -> Tensor:
    return (exponent << 23).view(torch.float32)


def _norms(x: Tensor) -> Tensor:
    u, exponent = _whole(x.abs())
    return ((u * u).sum(1).float().sqrt() * _power(exponent - 14)).bfloat16()


def _words(bits: Tensor) -> Tensor:
    place = torch.arange(32, device=bits.device)
    return (bits.view(bits.shape[0], -1, 32).long() << place).sum(2).int()


def _unpack_signs(words: Tensor) -> Tensor:
    """(n, bits) fp32 with 0 and 1."""
    place = torch.arange(32, device=words.device, dtype=torch.int32)
    return ((words[:, :, None] >> place) & 1).view(words.shape[0], -1).float()


def keys_reference(query: Signs, codes: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    """(B, n) int64, the scan's keys: larger means closer by code."""
    assert query.more is not None
    assert query.scales is not None
    levels = 1 + 2 * _unpack_signs(query.more)
    # Integer sums below 2²⁴: exact in any order.
    w = ((2 * _unpack_signs(query.codes) - 1) * levels) @ (2 * _unpack_signs(codes) - 1).t()
    if scales is None and bias is None:
        return 4096 - ((levels.sum(1, keepdim=True) - w) / 2).long()
    s = w if scales is None else w * scales.float()
    if bias is not None:
        s = s * query.scales[:, None] + bias.float()
    s = torch.where(s.isnan(), -torch.inf, torch.where(s == 0, 0.0, s))
    number = s.view(torch.int32)
    return ((number ^ ((number >> 31) & 0x7FFFFFFF)) >> 12).long() + 0x80001


def sign_topk_reference(
    query: Tensor, coded: CodedItems, k: int, *, attributes: Tensor | None = None,
    where: RowFilter | RowBits | None = None, live: Tensor | None = None, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The k best rows in the groups with the best codes: the kernels' result."""
    items, codes, scales, projection = coded.rows, coded.codes, coded.scales, coded.projection
    assert projection is not None
    B, N = query.shape[0], items.shape[0]
    G = choose_group(codes.shape[1])
    strip = G * ARITY * ARITY
    strips = cdiv(N, strip)
    wide = torch.float64 if torch.float64 in (query.dtype, items.dtype) else torch.float32
    every = torch.arange(N, device=query.device)
    hidden = find_hidden(attributes, where, live, 0, N)
    there = torch.ones_like(every, dtype=torch.bool) if hidden is None else ~hidden
    # A row's position: its index, or with a filter its rank among the strip's passing rows.
    place = every
    if where is not None:
        passing = torch.nn.functional.pad(there, (0, strips * strip - N)).view(strips, strip).long()
        place = ((passing.cumsum(1) - passing).view(-1)[:N]) + every // strip * strip
    groups = strips * (strip // G)
    asked = signs_reference(query, projection, scaled=True, query=True)
    best = torch.zeros((B, groups), dtype=torch.int64, device=query.device)
    # Missing rows go past the last position.
    row_at = torch.full((strips * strip + 1,), -1, dtype=torch.int64, device=query.device)
    row_at[torch.where(there, place, strips * strip)] = every
    row_at[-1] = -1
    size = N if is_traced(query) else max(1, SIGNS // (32 * codes.shape[1]))
    for start in range(0, N, max(size, 1)):
        at = slice(start, start + size)
        keys = keys_reference(
            asked, codes[at], None if scales is None else scales[at], None if bias is None else bias[at]
        )
        best.scatter_reduce_(1, (place[at] // G).expand(B, -1), keys.masked_fill(~there[at], 0), "amax")
    many = min(count_candidates(k, coded.candidates), groups)
    order = (best << 31) | (0x7FFFFFFF - torch.arange(groups, device=query.device))
    picked = torch.topk(order, many, dim=1).indices.sort(dim=1).values
    found = (picked[:, :, None] * G + torch.arange(G, device=query.device)).view(B, -1)
    rows = row_at[found]
    x = items[rows.clamp(min=0)] if items.element_size() > 1 else items.view(torch.uint8)[rows.clamp(min=0)]
    s = (x.view(items.dtype).to(wide) @ query.to(wide)[:, :, None])[:, :, 0]
    if bias is not None:
        s = s + bias[rows.clamp(min=0)].to(wide)
    s = normalize(s).masked_fill(rows < 0, -torch.inf)
    s, rows = (
        torch.nn.functional.pad(t, (0, max(k - s.shape[1], 0)), value=v) for t, v in ((s, -torch.inf), (rows, -1))
    )
    at_best = s.sort(dim=1, descending=True, stable=True).indices[:, :k]
    scores = s.gather(1, at_best)
    return scores, rows.gather(1, at_best).masked_fill(scores == -torch.inf, -1)


def choose_group(words: int) -> int:
    """Rows per group, for codes of so many 32-bit words."""
    return GROUP_BYTES // (4 * words)
