"""Drawn searches of `filtered_topk`, and their answers by a full sort of fp64 scores by (score, row)."""

from __future__ import annotations

import torch

import tigon

Literal = tigon.RowFilter.Literal
HALF = tigon.RowFilter([[Literal(0, 1)]])
SOME = tigon.RowFilter([[Literal(0, 6, "all"), Literal(1, 8)], [Literal(1, 3, negated=True)]])
RANGE = tigon.RowFilter([[Literal(1, 0xFF00, "range", 0x2000, 0x5000)], [Literal(0, 0xF0, "codes", codes=[1, 4, 9])]])
NONE = tigon.RowFilter([[]])


def integers(*shape, dtype=torch.float16, device="cpu", seed=0, most=2):
    """Small ones: sums are exact in any order, and many are equal."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=g).to(dtype).to(device)


def words(n, device="cpu", count=2, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**50, (count, n), generator=g).to(device)


def live_bits(n, device="cpu", seed=2):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (-(-n // 32),), generator=g).to(torch.int32).to(device)


def unpack(bits, n):
    i = torch.arange(n, device=bits.device)
    return ((bits[i >> 5] >> (i & 31)) & 1) != 0


def compute_answer(
    query, items, k, attributes=None, where=None, live=None, bias=None, tags=None, tag_weights=None, plan=None
):
    """Scores in fp64 and rows. plan: does not matter."""
    s = query.double() @ items.double().t()
    for t, (word, mask, value) in enumerate(() if tags is None else tags.tags):
        s += tag_weights[:, t, None].double() * ((attributes[word] & mask) == value).double()
    if bias is not None:
        s = s + bias.double()
    for b, f in enumerate([where] * len(query) if isinstance(where, tigon.RowFilter) else where or ()):
        if f is not None:
            s[b, ~f.mask(attributes)] = -torch.inf
    if live is not None:
        s[:, ~unpack(live, len(items))] = -torch.inf
    s[s.isnan()] = -torch.inf
    s = torch.cat((s, s.new_full((len(query), k), -torch.inf)), 1)
    best = s.sort(dim=1, descending=True, stable=True)
    scores, rows = best.values[:, :k], best.indices[:, :k]
    return scores, rows.masked_fill(scores == -torch.inf, -1)


def assert_equal(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one.to(other.dtype), other)


def check(query, items, k, **options):
    """The same rows and scores, where scores are exact sums of small integers. Returns them."""
    got = tigon.filtered_topk(query, items, k, **options)
    assert (got[0].dtype, got[1].dtype) == (torch.float32, torch.int64)
    assert_equal(got, compute_answer(query, items, k, **options))
    return got
