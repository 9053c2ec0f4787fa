"""The k best rows against a full sort in fp64 by (score, row): sizes, dtypes, ties, filters; and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from scans import (
    HALF,
    NONE,
    RANGE,
    SOME,
    Literal,
    assert_equal,
    check,
    compute_answer,
    integers,
    live_bits,
    unpack,
    words,
)

import tigon
from tigon.retrieve.scan import bits, coded, filtered_topk_reference, launches, plan, reference

pytestmark = pytest.mark.usefixtures("fresh_plans")
TAGS = tigon.RowTags([(0, 1 << bit, 1 << bit) for bit in range(5)])


@pytest.mark.parametrize(
    ("B", "N", "D", "k", "dtype"),
    [
        (1, 1, 1, 1, torch.float16),  # the least
        (3, 1000, 24, 10, torch.float16),
        (17, 200, 8, 3, torch.bfloat16),  # beyond one tile of queries
        (2, 50, 40, 64, torch.float32),  # fewer rows than results
        (2, 5000, 16, 10, torch.float16),  # beyond a strip
        (1, 300, 300, 5, torch.bfloat16),  # several steps of a sum, the last one cut off
        (1, 5000, 16, 200, torch.float16),  # the smaller groups of a larger k
        (1, 3000, 16, 600, torch.bfloat16),  # three levels
        (1, 70, 16, 2048, torch.float16),  # sorted by torch
    ],
)
def test_rows_and_scores(B, N, D, k, dtype, backend, device):
    check(integers(B, D, dtype=dtype, device=device), integers(N, D, dtype=dtype, device=device, seed=1), k)


def ordered(n, by):
    return {
        "ascending": torch.arange(n), "descending": torch.arange(n).flip(0), "equal": torch.zeros(n),
        "in one group": torch.where((torch.arange(n) >= 64) & (torch.arange(n) < 128), 100, torch.arange(n) % 7),
    }[by]  # fmt: skip


@pytest.mark.parametrize("by", ["ascending", "descending", "equal", "in one group"])
def test_no_order_is_a_bad_one(by, backend, device):
    items = torch.stack((ordered(2000, by).half(), torch.ones(2000).half()), 1).to(device)
    check(torch.tensor([[1.0, 0.0], [-1.0, 2.0]], dtype=torch.float16, device=device), items, 70)


PLANS = ["auto", "dense", "compact", "bitmaps"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("where", [None, SOME, RANGE, NONE], ids=str)
def test_plans_and_filters(where, plan, backend, device):
    """Beyond a strip; and with live rows and biases."""
    options = {"attributes": words(4500, device), "where": where, "plan": plan}
    check(integers(1, 16, device=device), integers(4500, 16, device=device, seed=1), 8, **options)
    if where in (None, RANGE):
        options = {"attributes": words(333, device), "where": where, "plan": plan, "live": live_bits(333, device)}
        options["bias"] = integers(333, dtype=torch.float32, device=device, most=5)
        check(integers(2, 8, device=device), integers(333, 8, device=device, seed=1), 9, **options)


@pytest.mark.parametrize("plan", ["compact", "bitmaps"])
def test_plans_without_filters_and_attributes(plan, backend, device):
    for options in ({}, {"live": live_bits(1000, device)}):
        query, items = integers(3, 24, device=device), integers(1000, 24, device=device, seed=1)
        check(query, items, 10, plan=plan, **options)


def test_a_list_that_several_blocks_of_queries_read(monkeypatch, backend, device):
    monkeypatch.setattr(plan, "SPARE", 0)
    options = {"attributes": words(300, device), "where": SOME, "live": live_bits(300, device)}
    check(integers(20, 8, device=device), integers(300, 8, device=device, seed=1), 2, **options)


def test_a_filter_for_each_query(backend, device):
    where = [SOME, None, RANGE, SOME, NONE]
    options = {"attributes": words(700, device), "where": where, "live": live_bits(700, device)}
    check(integers(5, 16, device=device), integers(700, 16, device=device, seed=1), 5, **options)


@pytest.mark.parametrize("n", [63, 64, 700, 4200])  # beside a word of 32 rows, and beyond a strip
@pytest.mark.parametrize("with_live", [False, True])
def test_bits_in_place_of_a_filter(n, with_live, backend, device):
    """The same answer from bits, in every plan, where the memory has further numbers behind those of the rows."""
    attributes = words(n + 100, device)
    bits = tigon.RowBits.from_filters([RANGE], attributes).bits[0]
    assert torch.equal(unpack(bits, n + 100), RANGE.mask(attributes))
    given = tigon.RowBits(bits[None, : -(-n // 32)])
    query, items = integers(2, 16, device=device), integers(n, 16, device=device, seed=1)
    live = live_bits(n, device) if with_live else None
    want = compute_answer(query, items, 70, attributes[:, :n], RANGE, live)
    for p in PLANS:
        assert_equal(tigon.filtered_topk(query, items, 70, where=given, live=live, plan=p), want)


@pytest.mark.parametrize("many", [False, True])
def test_bits_of_a_filter_for_each_query(many, backend, device, monkeypatch):
    monkeypatch.setattr(plan, "SPARE", 0)  # fewer programs for the interpreter
    N, B = 145, 35 if many else 5
    filters = [tigon.RowFilter([[Literal(0, 1 << n)]]) for n in range(33 if many else 4)]
    attributes, live = words(N, device), live_bits(N, device)
    # Their places in the memory are in another order, and there are further ones.
    bits = tigon.RowBits.from_filters([*reversed([NONE, *filters])], attributes).bits
    starts = torch.arange(len(filters) - 1, -1, -1, device=device) * bits.stride(0)
    of_query = [(3 * b) % len(filters) for b in range(B)]
    given = tigon.RowBits(bits, torch.tensor(of_query, dtype=torch.int32, device=device), starts)
    assert given.filters == len(filters)
    query, items = integers(B, 8, device=device), integers(N, 8, device=device, seed=1)
    for alive in (None, live):
        want = compute_answer(query, items, 3, attributes, [filters[f] for f in of_query], alive)
        assert_equal(tigon.filtered_topk(query, items, 3, where=given, live=alive), want)
    every = tigon.RowBits(bits, given.which)  # without starts, filters are the rows of the memory
    want = compute_answer(query, items, 3, attributes, [[*reversed([NONE, *filters])][f] for f in of_query])
    assert torch.equal(tigon.filtered_topk(query, items, 3, where=every)[1], want[1])


def test_words_written_again_alone(backend, device):
    attributes, filters = words(1000, device), [HALF, RANGE, SOME]
    memory = torch.zeros(4, 40, dtype=torch.int32, device=device)
    starts = torch.tensor([40, 120, 0], device=device)
    bits.write_bits(filters, attributes, memory, starts)
    assert (memory[2] == 0).all()
    assert (memory[:, 32:] == 0).all()
    attributes[:, 500:530], before = words(30, device, seed=7), memory.clone()
    bits.write_bits(filters, attributes, memory, starts, torch.tensor([15, 16], device=device))
    changed = memory != before
    assert changed[:, [15, 16]].any()
    changed[:, [15, 16]] = False
    assert not changed.any()
    for f, place in zip(filters, (1, 3, 0), strict=True):
        assert torch.equal(unpack(memory[place], 1000), f.mask(attributes))


def test_more_filters_than_a_word_has_bits(backend, device, monkeypatch):
    monkeypatch.setattr(plan, "SPARE", 0)  # fewer programs for the interpreter
    where = [tigon.RowFilter([[Literal(0, 1 << n, "codes", codes=[n % 2])]]) for n in range(34)]
    options = {"attributes": words(100, device), "where": [*where, where[0]]}
    check(integers(35, 8, device=device), integers(100, 8, device=device, seed=1), 2, **options)


def test_levels_above_the_strips(monkeypatch, triton_backend, device):
    """Some hundred million rows have them; here of small groups."""
    monkeypatch.setattr(plan, "KEYS", 8)
    monkeypatch.setattr(plan, "choose_sizes", lambda k: plan.Sizes(4, 0, 16, 4))
    tile = plan.Tile(16, 16, 16, 4, 1)
    monkeypatch.setattr(plan, "TILES", {16: (tile, tile)})
    assert plan.plan_scan(plan.SearchSizes(2, 2, 8, 1000, torch.float16)).levels == (128, 64, 32, 16, 4)
    query, items = integers(2, 8, device=device), integers(1000, 8, device=device, seed=1)
    check(query, items, 2)
    check(query, items, 2, where=HALF, attributes=words(1000, device))


def test_batches_go_in_pieces(monkeypatch, triton_backend, device):
    monkeypatch.setattr(plan, "WORKSPACE", 1)
    monkeypatch.setattr(plan, "SPARE", 0)
    assert plan.plan_scan(plan.SearchSizes(33, 1, 8, 40, torch.float16)).pieces == 3
    options = {"attributes": words(40, device), "where": [HALF, *[SOME] * 32], "bias": torch.zeros(40, device=device)}
    query, items = integers(33, 8, dtype=torch.float32, device=device), integers(40, 8, device=device, seed=1)
    check(query, items, 1, **options)
    weights = integers(33, 5, dtype=torch.float32, device=device, most=9)
    check(query, items, 1, attributes=options["attributes"], tags=TAGS, tag_weights=weights)


def test_a_query_of_more_bits_than_the_items(backend, device):
    """Ranked by all its bits: two rows that differ by less than the query's rounding to fp16."""
    items = torch.zeros(300, 16, device=device)
    items[:, 0], items[:, 1] = 1.0, -1.0
    items[77, 2] = 1.0
    query = torch.zeros(3, 16, device=device)
    query[0, 0], query[0, 1], query[0, 2] = 1.0, 1.0 + 2**-13, 2**-20
    query[1], query[2] = 1e-30 * query[0], 1e30 * query[0]  # beyond what fp16 reaches
    for dtype in (torch.float16, torch.bfloat16):
        scores, rows = tigon.filtered_topk(query, items.to(dtype), 1, bias=torch.zeros(300, device=device))
        assert rows.tolist() == [[77]] * 3
        # Of numbers that cancel the last bits depend on their order.
        assert ((scores[:, 0] - query @ items[77]).abs() <= 1e-6 * query.abs().amax(1)).all()


def test_views_of_larger_buffers(backend, device):
    items, attributes = integers(600, 40, device=device, seed=1), words(600, device, 3)
    query = integers(2, 48, device=device)[:, 3:27:2]
    check(query, items[:500, 1:13], 5, attributes=attributes[:2, :500], where=SOME)
    bias = integers(1000, dtype=torch.float32, device=device)[::2]
    check(query, integers(24, 500, device=device).t()[:, ::2], 5, bias=bias)


def test_chunks_of_rows_are_merged(monkeypatch, device):
    monkeypatch.setattr(reference, "SCORES", 64)
    options = {"where": HALF, "attributes": words(500, device)}
    check(integers(2, 4, device=device), integers(500, 4, device=device, seed=1), 5, **options)


def test_nan_and_infinities(backend, device):
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


INF = torch.inf


@pytest.mark.parametrize(
    ("dtype", "stored", "D"),
    [
        (torch.float32, torch.float16, 8),
        (torch.float32, torch.bfloat16, 300),  # several steps of a sum
        (torch.bfloat16, torch.float16, 16),
        (torch.float16, torch.float16, 8),
        (torch.float32, torch.float32, 8),
    ],
)
def test_rows_that_hold_infinities(dtype, stored, D, backend, device, monkeypatch):
    """Their scores are those of fp32, in any number of terms: the scan has them, though few groups are picked."""
    monkeypatch.setattr(plan, "choose_sizes", lambda k: plan.Sizes(4, 0, 64, 8))
    monkeypatch.setattr(plan, "SPARE", 2)
    monkeypatch.setattr(plan, "choose_tile", lambda *_, **__: plan.Tile(16, 16, 16 if D <= 16 else 64, 4, 1))
    draw = torch.Generator().manual_seed(D)
    query = (1 + 0.1 * torch.randn(3, D, generator=draw)).to(dtype)
    query[0, 3] = 1e-9 if dtype != torch.float16 else 6e-8  # rounded away beside the others in fp16
    query[1, 5] = -query[1, 5]
    items = torch.randn(2000, D, generator=draw).to(stored)
    rows = [31, 700, 1303, 1999]
    items[rows[0], 3] = items[rows[1], 5] = items[rows[2], 4] = INF
    items[rows[3], 4] = -INF
    items[900, 2], items[900, 6] = INF, -INF  # NaN
    scores, found = tigon.filtered_topk(query.to(device), items.to(device), 3)
    assert found[0].tolist() == rows[:3]
    assert scores[0].tolist() == [INF] * 3
    assert found[1, :2].tolist() == [rows[0], rows[2]]
    assert scores[1, 2] < INF
    want_scores, want = compute_answer(query, items, 3)
    assert torch.equal(found.cpu(), want)
    assert torch.allclose(scores.cpu().double(), want_scores, rtol=1e-4)


def test_zeros_of_both_signs_are_equal(backend, device):
    items = torch.tensor([[1.0], [-0.0], [0.0], [-1.0]], device=device)
    scores, rows = tigon.filtered_topk(torch.tensor([[1.0]], device=device), items, 4)
    assert rows.tolist() == [[0, 1, 2, 3]]
    assert scores.signbit().tolist() == [[False, False, False, True]]


@pytest.mark.parametrize(("B", "N"), [(0, 5), (2, 0), (0, 0)])
@pytest.mark.parametrize("tagged", [False, True])
def test_empty(B, N, tagged, backend, device):
    options = {}
    if tagged:
        weights = torch.ones(B, 5, device=device)
        options = {"attributes": words(N, device), "tags": TAGS, "tag_weights": weights}
    scores, rows = tigon.filtered_topk(torch.ones(B, 4, device=device), torch.ones(N, 4, device=device), 3, **options)
    assert scores.shape == rows.shape == (B, 3)
    assert (rows == -1).all()
    assert (scores == -torch.inf).all()


def test_float8(backend, device):
    """Every number of the format, which small integers are not."""
    every = torch.arange(256, dtype=torch.uint8, device=device)[:, None].view(torch.float8_e4m3fn)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        query = torch.tensor([[1.0], [-1.0]], dtype=dtype, device=device)
        check(query, every, 100)


def test_the_reference_takes_fp64():
    query, items, weights = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 8), (50, 8), (3, 5)))
    for options in ({}, {"attributes": words(50), "tags": TAGS, "tag_weights": weights}):
        scores, rows = filtered_topk_reference(query, items, 5, **options)
        want_scores, want_rows = compute_answer(query, items, 5, **options)
        assert torch.equal(rows, want_rows)
        torch.testing.assert_close(scores, want_scores, rtol=1e-14, atol=1e-13)


def test_inputs_are_as_they_were(backend, device):
    query, items, bias, weights = (torch.randn(*shape, device=device) for shape in ((3, 8), (50, 8), (50,), (3, 5)))
    given = query, items, bias, weights, words(50, device), live_bits(50, device)
    before = [t.clone() for t in given]
    options = {"bias": bias, "attributes": given[4], "live": given[5], "where": HALF}
    tigon.filtered_topk(query, items, 5, **options)
    tigon.filtered_topk(query, items, 5, **options, tags=TAGS, tag_weights=weights)
    assert_equal(given, before)
    assert all(t._version == 0 for t in given)


Q, X = torch.ones(2, 4), torch.ones(5, 4)
W = torch.zeros(1, 5, dtype=torch.int64)
B1, EACH, Bits = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), tigon.RowBits


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f([1], X, 3), r"query must be a tensor, got list"),
        (lambda f: f(Q[0], X, 3), r"query must have two dimensions, .* got \(4,\)"),
        (lambda f: f(Q[:, :3], X, 3), r"query must be as wide as items, 4, got \(2, 3\)"),
        (lambda f: f(Q.long(), X, 3), r"query must be fp16, bf16 or fp32, got torch.int64"),
        (lambda f: f(Q, X.to(torch.int8), 3), r"items must be fp16, bf16, float8_e4m3fn or fp32, got torch.int8"),
        (lambda f: f(Q, X[:1].expand(2**31 - 4095, 4), 3), r"items must be at most 2\*\*31 - 4096 rows, got"),
        (lambda f: f(Q, X, 0), r"k must be an int from 1 to 2048, got 0"),
        (lambda f: f(Q, X, 2049), r"k must be an int from 1 to 2048, got 2049"),
        (lambda f: f(Q, X, 3, plan="fast"), r"plan must be one of auto, dense, compact, bitmaps, codes, got 'fast'"),
        (lambda f: f(Q, X, 3, share=2), r"share must be from 0 to 1, got 2"),
        (lambda f: f(Q, X, 3, attributes=W.int()), r"attributes must be \(W, 5\) int64.* got \(1, 5\) torch.int32"),
        (lambda f: f(Q, X, 3, live=W[0]), r"live must be \(1,\) int32.* got \(5,\) torch.int64"),
        (lambda f: f(Q, X, 3, bias=Q), r"bias must be \(5,\) fp32, got \(2, 4\) torch.float32"),
        (lambda f: f(Q, X.to("meta"), 3), r"items must be on cpu, as query is, got meta"),
        (lambda f: f(Q.clone().requires_grad_(), X, 3), r"query must not require a gradient.* got a tensor that does"),
        (lambda f: f(Q, X.clone().requires_grad_(), 3), r"items must not require a gradient.* got a tensor that does"),
        (lambda f: f(Q, X, 3, where=HALF), r"attributes must be the words that the filters test, got None"),
        (lambda f: f(Q, X, 3, where=SOME, attributes=W), r"attributes must have the 2 words .* got 1"),
        (lambda f: f(Q, X, 3, where=[HALF], attributes=W), r"where must have a filter for each of 2 queries, got 1"),
        (lambda f: f(Q, X, 3, where=[HALF, 3], attributes=W), r"where must hold tigon.RowFilters or None, got int"),
        (lambda f: f(Q, X, 3, where=W, attributes=W), r"where must be a tigon.RowFilter or .* got Tensor"),
        (lambda f: f(Q, X, 3, where=Bits(W)), r"where.bits must be \(filters, 1\) int32.* got \(1, 5\) torch.int64"),
        (lambda f: f(Q, X, 3, where=Bits(B1, B1)), r"where.which must be \(2,\) int32, got \(1, 1\) torch.int32"),
        (lambda f: f(Q, X, 3, where=Bits(B1, EACH, B1[0])), r"where.starts must be \(filters,\) int64"),
        (lambda f: f(Q, X, 3, where=Bits(B1.to("meta"))), r"where.bits must be on cpu, as query is, got meta"),
        (
            lambda f: f(Q, X, 3, where=Bits(B1, EACH), plan="dense"),
            r"plan must be 'bitmaps' or 'auto' where each query has a filter, got 'dense'",
        ),
        (
            lambda f: f(Q, X, 3, where=[HALF, None], attributes=W, plan="compact"),
            r"plan must be 'bitmaps' or 'auto' where each query has a filter, got 'compact'",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=f"^filtered_topk: {message}"):
        call(tigon.filtered_topk)


def test_searching_over_a_parameter(backend, device):
    items = torch.nn.Parameter(torch.randn(20, 4, device=device))
    with torch.no_grad():
        scores, _ = tigon.filtered_topk(items[:2], items, 1)
    assert not scores.requires_grad
    assert torch.equal(scores[:, 0], (items[:2].detach() @ items.detach().t()).max(1).values)


OPTIONS = {"one": SOME, "a filter for each": [SOME, None, HALF], "none": None, "bits": None, "bits for each": None}


@pytest.mark.parametrize("kind", [*OPTIONS, "tags"])
def test_compiles_whole(kind, backend, device):
    torch._dynamo.reset()
    query, items, attributes = (
        integers(3, 16, device=device),
        integers(90, 16, device=device, seed=1),
        words(90, device),
    )
    bits = tigon.RowBits.from_filters([HALF, SOME], attributes).bits
    which = torch.tensor([1, 0, 1], dtype=torch.int32, device=device) if kind == "bits for each" else None
    tags, weights = tigon.RowTags(TAGS.tags, device=device), integers(3, 5, dtype=torch.float32, device=device)

    def f(query, items, attributes, bits, weights):
        if kind.startswith("bits"):
            return tigon.filtered_topk(query, items, 5, where=tigon.RowBits(bits, which))
        options = {"tags": tags, "tag_weights": weights, "where": HALF} if kind == "tags" else {"where": OPTIONS[kind]}
        return tigon.filtered_topk(query, items, 5, attributes=attributes, **options)

    # AOT also traces the empty results of an operator.
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager" if backend == "triton" else "eager")
    for n in (90, 77):
        given = query, items[:n], attributes[:, :n], bits[:, : -(-n // 32)], weights
        assert_equal(compiled(*given), f(*given))


def test_exports(backend, device):
    class Search(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("items", integers(90, 16, device=device, seed=1))
            self.register_buffer("attributes", words(90, device))

        def forward(self, query):
            return tigon.filtered_topk(query, self.items, 5, attributes=self.attributes, where=SOME)

    search, query = Search(), integers(3, 16, device=device)
    assert_equal(torch.export.export(search, (query,)).module()(query), search(query))


def test_the_library_ops(triton_backend, device):
    moved, tags = HALF.to(device), TAGS.to(device)
    query, items, attributes = (
        integers(2, 16, device=device),
        integers(90, 16, device=device, seed=1),
        words(90, device),
    )
    given = attributes, moved.table, moved.bitmaps, None, 1, live_bits(90, device), None, "compact"
    weights = torch.randn(2, tags.table.shape[1], device=device)
    torch.library.opcheck(
        launches._filtered_topk.op, (query, items, 5, *given, attributes, tags.table, weights, tags.width)
    )
    torch.library.opcheck(coded._coded_topk.op, (query, *tigon.encode_items(items)[:4], 5, *given, None))


def test_a_key_of_a_launch_tells_all_that_it_depends_on(monkeypatch, triton_backend, device):
    made, searches, tags = {}, 0, (TAGS, tigon.RowTags([(word, 1 << bit, 0) for word in (0, 1) for bit in range(40)]))

    def launch(kernel, key, tensors, plan):
        found = plan(), [None if t is None else t.dtype for t in tensors]
        assert made.setdefault((kernel, key), found) == found

    monkeypatch.setattr(launches, "launch", launch)
    wide = torch.zeros(20_000, 40, device=device)
    attributes, bias = torch.zeros(3, 20_000, dtype=torch.int64, device=device), torch.zeros(20_000, device=device)
    live = torch.zeros(625, dtype=torch.int32, device=device)
    for N, D, k, dtype, B in itertools.product(
        (70, 20_000), (16, 40), (3, 90, 100), (torch.float16, torch.float32), (1, 40)
    ):
        items, query = wide[:N, :D].to(dtype), torch.zeros(B, D, dtype=dtype, device=device)
        beside = {"attributes": attributes[:, :N], "live": live[: -(-N // 32)]}
        for options in (
            {}, {"bias": bias[:N]}, {**beside, "where": SOME}, {**beside, "where": HALF}, {**beside, "plan": "compact"},
            {**beside, "where": HALF, "plan": "dense"}, {**beside, "where": [SOME, *[None] * (B - 1)]},
            {**beside, "where": HALF, "plan": "bitmaps"}, {"attributes": beside["attributes"], "where": HALF},
            *({**beside, "tags": given, "tag_weights": torch.zeros(B, len(given), device=device)} for given in tags),
        ):  # fmt: skip
            tigon.filtered_topk(query, items, k, **options)
            tigon.filtered_topk(query.float(), wide[:N, :D].half(), k, **options)
            tigon.filtered_topk(query, torch.zeros(N, 48, dtype=dtype, device=device)[:, :D], k, **options)
            searches += 3
    assert searches == 3 * 11 * 48
    assert len(made) > 300


@pytest.mark.gpu
@pytest.mark.parametrize("where", [*OPTIONS][:3])
def test_a_cuda_graph(where, device):
    query, items = integers(3, 16, device=device), integers(9000, 16, device=device, seed=1)
    attributes = words(9000, device)
    options = {"attributes": attributes, "where": OPTIONS[where]}
    tigon.filtered_topk(query, items, 5, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = tigon.filtered_topk(query, items, 5, **options)
    query.copy_(integers(3, 16, device=device, seed=9))
    attributes.copy_(words(9000, device, seed=9))
    graph.replay()
    assert_equal(got, tigon.filtered_topk(query, items, 5, **options))
