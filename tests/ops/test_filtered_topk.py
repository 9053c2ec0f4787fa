"""The k best rows against a full sort in fp64 by (score, row): sizes, dtypes, ties, filters; and what is refused."""

from __future__ import annotations

import pytest
import torch

import tigon
from tigon.ops.filtered_topk import filtered_topk_reference

Literal = tigon.RowFilter.Literal


def expected(query, items, k, attributes=None, where=None, live=None, bias=None):
    """Every score in fp64, sorted by (score descending, row ascending)."""
    s = query.double() @ items.double().t()
    if bias is not None:
        s = s + bias.double()
    for b, f in enumerate([where] * len(query) if isinstance(where, tigon.RowFilter) else where or ()):
        if f is not None:
            s[b, ~f.mask(attributes)] = -torch.inf
    if live is not None:
        there = torch.tensor([bool(live[r // 32].item() >> r % 32 & 1) for r in range(len(items))], device=s.device)
        s[:, ~there.bool()] = -torch.inf
    s[s.isnan()] = -torch.inf
    s = torch.cat((s, s.new_full((len(query), k), -torch.inf)), 1)
    found = s.sort(dim=1, descending=True, stable=True)
    scores, rows = found.values[:, :k], found.indices[:, :k]
    return scores, rows.masked_fill(scores == -torch.inf, -1)


def agree(query, items, k, **options):
    """The same rows and scores, where scores are exact sums of small integers."""
    scores, rows = tigon.filtered_topk(query, items, k, **options)
    options = {n: v for n, v in options.items() if n not in ("plan", "share")}
    want_scores, want_rows = expected(query, items, k, **options)
    assert scores.dtype == torch.float32
    assert rows.dtype == torch.int64
    assert torch.equal(scores.double(), want_scores)
    assert torch.equal(rows, want_rows)


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


HALF = tigon.RowFilter([[Literal(0, 1)]])
SOME = tigon.RowFilter([[Literal(0, 6, "all"), Literal(1, 8)], [Literal(1, 3, negated=True)]])
RANGE = tigon.RowFilter([[Literal(1, 0xFF00, "range", 0x2000, 0x5000)], [Literal(0, 0xF0, "codes", codes=[1, 4, 9])]])
NONE = tigon.RowFilter([[]])


@pytest.mark.parametrize(
    ("B", "N", "D", "k", "dtype"),
    [
        (1, 1, 1, 1, torch.float16),  # the least
        (3, 1000, 24, 10, torch.float16),
        (17, 333, 8, 7, torch.bfloat16),
        (2, 50, 40, 64, torch.float32),  # fewer rows than k
    ],
)
def test_rows_and_scores(B, N, D, k, dtype, device):
    agree(integers(B, D, dtype=dtype, device=device), integers(N, D, dtype=dtype, device=device, seed=1), k)


@pytest.mark.parametrize("where", [HALF, SOME, RANGE, NONE, [SOME, None, SOME, RANGE]], ids=str)
@pytest.mark.parametrize("more", [False, True], ids=["", "live and bias"])
def test_filters(where, more, device):
    B, N = 4, 700
    options = {"attributes": words(N, device), "where": where}
    if more:
        options |= {"live": live_bits(N, device), "bias": integers(N, dtype=torch.float32, device=device, most=5)}
    agree(integers(B, 16, device=device), integers(N, 16, device=device, seed=1), 20, **options)


def test_live_alone(device):
    agree(integers(3, 8, device=device), integers(333, 8, device=device, seed=1), 9, live=live_bits(333, device))


def test_chunks_of_rows_are_merged(monkeypatch, device):
    from tigon.ops.filtered_topk import reference

    monkeypatch.setattr(reference, "SCORES", 64)
    options = {"where": HALF, "attributes": words(500, device)}
    agree(integers(2, 4, device=device), integers(500, 4, device=device, seed=1), 5, **options)


def test_nan_and_infinities(device):
    query, items = integers(2, 8, device=device), integers(40, 8, device=device, seed=1)
    items[3, 2], items[7] = torch.nan, torch.inf
    bias = torch.zeros(40, device=device)
    bias[5], bias[9] = -torch.inf, torch.inf
    scores, rows = tigon.filtered_topk(query, items, 40, bias=bias)
    assert (rows[:, 0] == 9).all()
    assert (scores[:, 0] == torch.inf).all()
    for hidden in (3, 5):
        assert not (rows == hidden).any()
    assert ((rows == -1) == (scores == -torch.inf)).all()
    assert not scores.isnan().any()


def test_zeros_of_both_signs_are_equal(device):
    items = torch.tensor([[1.0], [-0.0], [0.0], [-1.0]], device=device)
    scores, rows = tigon.filtered_topk(torch.tensor([[1.0]], device=device), items, 4)
    assert rows.tolist() == [[0, 1, 2, 3]]
    assert scores.signbit().tolist() == [[False, False, False, True]]


@pytest.mark.parametrize(("B", "N"), [(0, 5), (2, 0), (0, 0)])
def test_empty(B, N, device):
    scores, rows = tigon.filtered_topk(torch.ones(B, 4, device=device), torch.ones(N, 4, device=device), 3)
    assert scores.shape == rows.shape == (B, 3)
    assert (rows == -1).all()
    assert (scores == -torch.inf).all()


def test_float8(device):
    query, items = integers(3, 16, device=device), integers(100, 16, device=device, seed=1)
    got = tigon.filtered_topk(query, items.to(torch.float8_e4m3fn), 10)
    for a, b in zip(got, tigon.filtered_topk(query, items, 10), strict=True):
        assert torch.equal(a, b)


def test_the_reference_takes_fp64(device):
    query, items = torch.randn(3, 8, dtype=torch.float64), torch.randn(50, 8, dtype=torch.float64)
    scores, rows = filtered_topk_reference(query, items, 5)
    want_scores, want_rows = expected(query, items, 5)
    assert torch.equal(rows, want_rows)
    assert torch.equal(scores, want_scores)


def test_inputs_are_as_they_were(device):
    query, items, bias = (torch.randn(*shape, device=device) for shape in ((3, 8), (50, 8), (50,)))
    given = query, items, bias, words(50, device), live_bits(50, device)
    kept = [t.clone() for t in given]
    tigon.filtered_topk(query, items, 5, bias=bias, attributes=given[3], live=given[4], where=HALF)
    for t, before in zip(given, kept, strict=True):
        assert torch.equal(t, before)
        assert t._version == 0


Q, X = torch.ones(2, 4), torch.ones(5, 4)
W = torch.zeros(1, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f([1], X, 3), r"query must be a tensor, got list"),
        (lambda f: f(Q[0], X, 3), r"query must have two dimensions, .* got \(4,\)"),
        (lambda f: f(Q[:, :3], X, 3), r"query must be as wide as items, 4, got \(2, 3\)"),
        (lambda f: f(Q.long(), X, 3), r"query must be fp16, bf16 or fp32, got torch.int64"),
        (lambda f: f(Q, X.to(torch.int8), 3), r"items must be fp16, bf16, float8_e4m3fn or fp32, got torch.int8"),
        (lambda f: f(Q, X, 0), r"k must be an int from 1 to 2048, got 0"),
        (lambda f: f(Q, X, 2049), r"k must be an int from 1 to 2048, got 2049"),
        (lambda f: f(Q, X, 3, plan="fast"), r"plan must be one of auto, dense, compact, bitmaps, got 'fast'"),
        (lambda f: f(Q, X, 3, share=2), r"share must be from 0 to 1, got 2"),
        (lambda f: f(Q, X, 3, attributes=W.int()), r"attributes must be \(W, 5\) int64.* got \(1, 5\) torch.int32"),
        (lambda f: f(Q, X, 3, live=W[0]), r"live must be \(1,\) int32.* got \(5,\) torch.int64"),
        (lambda f: f(Q, X, 3, bias=Q), r"bias must be \(5,\) fp32, got \(2, 4\) torch.float32"),
        (lambda f: f(Q, X.to("meta"), 3), r"items must be on cpu, as query is, got meta"),
        (lambda f: f(Q.clone().requires_grad_(), X, 3), r"query must not require a gradient.* got one that does"),
        (lambda f: f(Q, X.clone().requires_grad_(), 3), r"items must not require a gradient.* got one that does"),
        (lambda f: f(Q, X, 3, where=HALF), r"attributes must be the words that the filters test, got None"),
        (lambda f: f(Q, X, 3, where=SOME, attributes=W), r"attributes must have the 2 words .* got 1"),
        (lambda f: f(Q, X, 3, where=[HALF], attributes=W), r"where must have a filter for each of 2 queries, got 1"),
        (lambda f: f(Q, X, 3, where=[HALF, 3], attributes=W), r"where must hold tigon.RowFilters or None, got int"),
        (lambda f: f(Q, X, 3, where=W, attributes=W), r"where must be a tigon.RowFilter or .* got Tensor"),
        (
            lambda f: f(Q, X, 3, where=[HALF, None], attributes=W, plan="compact"),
            r"plan must be 'bitmaps' or 'auto' where each query has a filter, got 'compact'",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=f"^filtered_topk: {message}"):
        call(tigon.filtered_topk)


def test_searching_over_a_parameter(device):
    items = torch.nn.Parameter(torch.randn(20, 4, device=device))
    with torch.no_grad():
        scores, _ = tigon.filtered_topk(items[:2], items, 1)
    assert not scores.requires_grad
    assert torch.equal(scores[:, 0], (items[:2].detach() @ items.detach().t()).max(1).values)


def test_compiles_whole(device):
    query, items = integers(3, 16, device=device), integers(90, 16, device=device, seed=1)
    attributes = words(90, device)

    def f(query, items, attributes):
        return tigon.filtered_topk(query, items, 5, attributes=attributes, where=SOME)

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (90, 77):
        given = query, items[:n], attributes[:, :n]
        for a, b in zip(compiled(*given), f(*given), strict=True):
            assert torch.equal(a, b)
