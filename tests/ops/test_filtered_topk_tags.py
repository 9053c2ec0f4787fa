"""Weights of attribute values in a search: against a full sort in fp64, in every plan; and what is refused."""

from __future__ import annotations

import pytest
import torch

import tigon
from tigon.ops.filtered_topk import filtered_topk_reference, launches, plan

Literal = tigon.RowFilter.Literal
HALF = tigon.RowFilter([[Literal(0, 1)]])
SOME = tigon.RowFilter([[Literal(0, 6, "all"), Literal(1, 8)], [Literal(1, 3, negated=True)]])


def expected(query, items, k, attributes, tags, weights, where=None, live=None, bias=None):
    """Every score in fp64 from tests in plain Python, sorted by (score descending, row ascending)."""
    s = query.double() @ items.double().t()
    for t, (word, mask, value) in enumerate(tags.tags):
        s += weights[:, t, None].double() * ((attributes[word] & mask) == value).double()
    if bias is not None:
        s = s + bias.double()
    for b, f in enumerate([where] * len(query) if isinstance(where, tigon.RowFilter) else where or ()):
        if f is not None:
            s[b, ~f.mask(attributes)] = -torch.inf
    if live is not None:
        i = torch.arange(len(items), device=live.device)
        s[:, ((live[i >> 5] >> (i & 31)) & 1) == 0] = -torch.inf
    s = torch.cat((s, s.new_full((len(query), k), -torch.inf)), 1)
    found = s.sort(dim=1, descending=True, stable=True)
    scores, rows = found.values[:, :k], found.indices[:, :k]
    return scores, rows.masked_fill(scores == -torch.inf, -1)


def agree(query, items, k, **options):
    """The same rows and scores, where scores are exact sums of small integers."""
    want = expected(query, items, k, **{_NAMES.get(n, n): v for n, v in options.items() if n != "plan"})
    got = tigon.filtered_topk(query, items, k, **options)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.to(other.dtype), other)
    return got


_NAMES = {"tag_weights": "weights"}


def integers(*shape, dtype=torch.float16, device="cpu", seed=0, most=2):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=g).to(dtype).to(device)


def words(n, device="cpu", count=3):
    g = torch.Generator().manual_seed(1)
    return torch.randint(0, 2**50, (count, n), generator=g).to(device)


def of_bits(count, word=0):
    return [(word, 1 << bit, 1 << bit) for bit in range(count)]


CODES = [(2, 0xF0, code << 4) for code in range(16)]
# One step of 16, one of 64 in part, two words, and more steps than keep their weights.
TAGS = {5: of_bits(5), 48: of_bits(48), 70: of_bits(45) + of_bits(25, 1), 116: of_bits(50) + of_bits(50, 1) + CODES}


@pytest.fixture(autouse=True)
def _plans_made_anew():
    launches._plan_scan.cache_clear()
    yield
    launches._plan_scan.cache_clear()


@pytest.mark.parametrize("count", TAGS)
@pytest.mark.parametrize(
    ("B", "D", "dtype"),
    [(1, 16, torch.float16), (3, 24, torch.bfloat16), (2, 300, torch.float16), (2, 8, torch.float32)],
)
def test_rows_and_scores(count, B, D, dtype, backend, device, monkeypatch):
    monkeypatch.setattr(plan, "SPARE", 0)  # so that groups are picked by the scan, and not all of them
    N = 700
    tags, weights = tigon.RowTags(TAGS[count]), integers(B, count, dtype=torch.float32, device=device, most=3)
    query, items = integers(B, D, dtype=dtype, device=device), integers(N, D, dtype=dtype, device=device, seed=1)
    agree(query, items, 2, attributes=words(N, device), tags=tags, tag_weights=weights)


@pytest.mark.parametrize("p", ["dense", "compact", "bitmaps"])
@pytest.mark.parametrize("where", [None, HALF, SOME], ids=str)
def test_plans_filters_live_rows_and_biases(where, p, backend, device):
    N = 4200
    g = torch.Generator().manual_seed(2)
    live = torch.randint(-(2**31), 2**31, (-(-N // 32),), generator=g).to(torch.int32).to(device)
    options = {"attributes": words(N, device), "where": where, "live": live, "plan": p}
    options["bias"] = integers(N, dtype=torch.float32, device=device, most=5)
    options |= {"tags": tigon.RowTags(TAGS[48]), "tag_weights": integers(1, 48, dtype=torch.float32, device=device)}
    agree(integers(1, 16, device=device), integers(N, 16, device=device, seed=1), 8, **options)


def test_filters_of_each_query_and_bits(backend, device):
    N = 200
    attributes, weights = words(N, device), integers(3, 70, dtype=torch.float32, device=device)
    query, items = integers(3, 8, device=device), integers(N, 8, device=device, seed=1)
    given = {"attributes": attributes, "tags": tigon.RowTags(TAGS[70]), "tag_weights": weights}
    scores, rows = agree(query, items, 5, where=[SOME, None, HALF], **given)
    every = torch.full((7,), -1, dtype=torch.int32, device=device)
    some, half = tigon.RowBits.from_filters([SOME, HALF], attributes).bits
    bits = torch.stack([some, every, half])
    which = torch.arange(3, dtype=torch.int32, device=device)
    for got, want in zip(
        tigon.filtered_topk(query, items, 5, where=tigon.RowBits(bits, which), **given), (scores, rows), strict=True
    ):
        assert torch.equal(got, want)
    scores, rows = agree(query, items, 5, where=HALF, **given)
    one = tigon.RowBits(bits[2:])
    assert torch.equal(tigon.filtered_topk(query, items, 5, where=one, **given)[1], rows)


def test_batches_go_in_pieces(monkeypatch, triton_backend, device):
    monkeypatch.setattr(plan, "WORKSPACE", 1)
    monkeypatch.setattr(plan, "SPARE", 0)
    weights = integers(33, 5, dtype=torch.float32, device=device, most=9)
    options = {"attributes": words(40, device), "tags": tigon.RowTags(TAGS[5]), "tag_weights": weights}
    agree(integers(33, 8, dtype=torch.float32, device=device), integers(40, 8, device=device, seed=1), 1, **options)


def test_weights_of_more_bits_than_one_term(backend, device, monkeypatch):
    """Rows are ranked by all bits of the weights, whatever the weights of other queries."""
    monkeypatch.setattr(plan, "SPARE", 0)
    N = 400
    attributes = torch.zeros(1, N, dtype=torch.int64, device=device)
    attributes[0, ::2], attributes[0, 333] = 1, 2
    weights = torch.tensor([[1.0, 1.0 + 2**-20]], device=device) * torch.tensor([[1.0], [1e-20], [1e20]], device=device)
    query, items = torch.zeros(3, 8, device=device).half(), torch.zeros(N, 8, device=device).half()
    tags = tigon.RowTags(of_bits(2))
    scores, rows = tigon.filtered_topk(query, items, 1, attributes=attributes, tags=tags, tag_weights=weights)
    assert rows.tolist() == [[333]] * 3
    assert torch.equal(scores[:, 0], weights[:, 1])


def test_the_same_bits_in_every_plan_and_batch_and_among_other_tags(triton_backend, device):
    g = torch.Generator().manual_seed(3)
    query, items = (torch.randn(n, 48, generator=g).half().to(device) for n in (3, 500))
    weights = torch.randn(3, 70, generator=g).to(device)
    weights[0, 20:] = 0
    attributes, tags = words(500, device), tigon.RowTags(TAGS[70])
    options = {"attributes": attributes, "where": HALF, "tags": tags, "tag_weights": weights}
    scores, rows = tigon.filtered_topk(query, items, 6, **options)
    for p in ("dense", "bitmaps"):
        for got, want in zip(tigon.filtered_topk(query, items, 6, plan=p, **options), (scores, rows), strict=True):
            assert torch.equal(got, want)
    few = tigon.RowTags(TAGS[70][19::-1])  # in another order, and without those of weight 0
    alone = options | {"tags": few, "tag_weights": weights[:1, :20].flip(1)}
    for got, want in zip(tigon.filtered_topk(query[:1], items, 6, **alone), (scores, rows), strict=True):
        assert torch.equal(got[0], want[0])
    options["weights"] = options.pop("tag_weights")
    want_scores, want_rows = expected(query, items, 6, **options)
    assert torch.equal(rows, want_rows)
    torch.testing.assert_close(scores.double(), want_scores, rtol=1e-6, atol=1e-5)


def test_weights_of_zero_are_no_weights(triton_backend, device):
    g = torch.Generator().manual_seed(4)
    query, items = (torch.randn(n, 16, generator=g).half().to(device) for n in (2, 300))
    zeros = torch.zeros(2, 5, device=device)
    plain = tigon.filtered_topk(query, items, 6)
    for tags, weights in ((tigon.RowTags(TAGS[5]), zeros), (tigon.RowTags([]), zeros[:, :0])):
        got = tigon.filtered_topk(query, items, 6, attributes=words(300, device), tags=tags, tag_weights=weights)
        for one, other in zip(got, plain, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("coding", ["int8", "sign"])
def test_codes_are_not_read(coding, backend, device):
    query, items = integers(2, 64, device=device), integers(200, 64, device=device, seed=1)
    coded = tigon.encode_items(items, coding) if coding == "int8" else tigon.encode_items(items, coding, bits=64)
    given = {"attributes": words(200, device), "tags": tigon.RowTags(TAGS[48])}
    given["tag_weights"] = integers(2, 48, dtype=torch.float32, device=device, most=20)
    for got, want in zip(
        tigon.filtered_topk(query, coded, 5, **given), tigon.filtered_topk(query, items, 5, **given), strict=True
    ):
        assert torch.equal(got, want)


def test_the_reference_takes_fp64(device):
    g = torch.Generator().manual_seed(5)
    query, items, weights = (torch.randn(*s, dtype=torch.float64, generator=g) for s in ((3, 8), (50, 8), (3, 70)))
    tags, attributes = tigon.RowTags(TAGS[70]), words(50)
    got = filtered_topk_reference(query, items, 5, attributes=attributes, tags=tags, tag_weights=weights)
    want = expected(query, items, 5, attributes, tags, weights)
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0], rtol=1e-14, atol=1e-13)


def test_empty(backend, device):
    tags = tigon.RowTags(TAGS[5])
    for B, N in ((0, 5), (2, 0)):
        given = {"attributes": words(N, device), "tags": tags, "tag_weights": torch.ones(B, 5, device=device)}
        scores, rows = tigon.filtered_topk(torch.ones(B, 4, device=device), torch.ones(N, 4, device=device), 3, **given)
        assert scores.shape == (B, 3)
        assert (rows == -1).all()


def test_inputs_are_as_they_were(backend, device):
    query, items, weights = (torch.randn(*s, device=device) for s in ((3, 8), (50, 8), (3, 5)))
    given = query, items, weights, words(50, device)
    kept = [t.clone() for t in given]
    tigon.filtered_topk(query, items, 5, attributes=given[3], tags=tigon.RowTags(TAGS[5]), tag_weights=weights)
    for t, before in zip(given, kept, strict=True):
        assert torch.equal(t, before)
        assert t._version == 0


def test_the_library_op(triton_backend, device):
    tags = tigon.RowTags(TAGS[5], device=device)
    weights = torch.randn(2, tags.table.shape[1], device=device)
    args = integers(2, 16, device=device), integers(90, 16, device=device, seed=1), 5, *(None,) * 4, 0, None, None
    torch.library.opcheck(
        launches._filtered_topk.op, (*args, "dense", words(90, device), tags.table, weights, tags.width)
    )


def test_compiles_whole(backend, device):
    torch._dynamo.reset()
    query, items = integers(3, 16, device=device), integers(90, 16, device=device, seed=1)
    tags, attributes = tigon.RowTags(TAGS[5], device=device), words(90, device)

    def f(query, items, attributes, weights):
        given = {"attributes": attributes, "tags": tags, "tag_weights": weights}
        return tigon.filtered_topk(query, items, 5, where=HALF, **given)

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    weights = integers(3, 5, dtype=torch.float32, device=device)
    for n in (90, 77):
        given = query, items[:n], attributes[:, :n], weights
        for a, b in zip(compiled(*given), f(*given), strict=True):
            assert torch.equal(a, b)


def test_a_key_of_a_launch_tells_all_that_it_depends_on(monkeypatch, triton_backend, device):
    made = {}

    def launch(kernel, key, tensors, plan):
        found = plan(), [None if t is None else t.dtype for t in tensors]
        assert made.setdefault((kernel, key), found) == found

    monkeypatch.setattr(launches, "launch", launch)
    items = torch.zeros(5000, 16, device=device)
    for N in (70, 5000):
        for B in (1, 40):
            for count, tags in TAGS.items():
                for attributes in (words(N, device), words(N + 8, device)[:, :N]):
                    query, weights = torch.zeros(B, 16, device=device), torch.zeros(B, count, device=device)
                    given = {"attributes": attributes, "tags": tigon.RowTags(tags), "tag_weights": weights}
                    for dtype in (torch.float16, torch.float32):
                        tigon.filtered_topk(query, items[:N].to(dtype), 3, **given)
                        tigon.filtered_topk(query, items[:N].to(dtype), 3, where=HALF, **given)
                        tigon.filtered_topk(query, items[:N].to(dtype), 3)
    assert len(made) > 100


Q, X = torch.ones(2, 4), torch.ones(5, 4)
W, T, V = torch.zeros(1, 5, dtype=torch.int64), tigon.RowTags(of_bits(3)), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tags": T}, r"tag_weights must be \(2, 3\) fp32, a query and a tag each, got None"),
        ({"tag_weights": V}, r"tags must be a tigon.RowTags beside tag_weights, got NoneType"),
        ({"tags": [(0, 1, 1)], "tag_weights": V}, r"tags must be a tigon.RowTags beside tag_weights, got list"),
        ({"tags": T, "tag_weights": V[:1]}, r"tag_weights must be \(2, 3\) fp32.* got \(1, 3\) torch.float32"),
        ({"tags": T, "tag_weights": V.half()}, r"tag_weights must be \(2, 3\) fp32.* got \(2, 3\) torch.float16"),
        ({"tags": T, "tag_weights": [1]}, r"tag_weights must be a tensor, got list"),
        ({"tags": T, "tag_weights": V.to("meta")}, r"tag_weights must be on cpu, as query is, got meta"),
        ({"tags": T, "tag_weights": V.clone().requires_grad_()}, r"tag_weights must not require a gradient.* got one"),
        ({"tags": T, "tag_weights": V, "attributes": None}, r"attributes must have the 1 words .* got 0"),
        ({"tags": T, "tag_weights": V, "plan": "codes"}, r"plan must not be 'codes' with tags"),
    ],
)  # fmt: skip
def test_what_is_refused(given, message):
    with pytest.raises(ValueError, match=f"^filtered_topk: {message}"):
        tigon.filtered_topk(Q, X, 3, **{"attributes": W, **given})


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        (3, r"tags must be a sequence of \(word, mask, value\), got int"),
        (of_bits(50) * 90, r"tags must be at most 4,096, got 4,500"),
        ([(0, 1)], r"tags\[0\] must be three ints, \(word, mask, value\), got \(0, 1\)"),
        ([(0, 1, 1.0)], r"tags\[0\] must be three ints"),
        ([(0, 1, 1), (-1, 1, 1)], r"tags\[1\] must be a row of attributes, .* got \(-1, 1, 1\)"),
        ([(0, 1 << 63, 1)], r"tags\[0\] must be a row of attributes"),
        (of_bits(1) * 2, r"tags must be different, got one twice"),
    ],
)
def test_tags_that_are_refused(tags, message):
    with pytest.raises(ValueError, match=f"^RowTags: {message}"):
        tigon.RowTags(tags)


def test_tags_of_a_word_lie_together():
    tags = tigon.RowTags([(1, 1, 1), (0, 2, 2), (1, 6, 4), (0, 1, 1)])
    assert (tags.width, tags.words, len(tags)) == (16, 2, 4)
    assert tags.table.shape == (3, 32)
    assert tags.table[0].tolist() == [0] * 16 + [1] * 16
    assert tags.places.tolist() == [16, 1, 17, 0]
    assert tags.to("cpu") is tags
    attributes = torch.arange(8).repeat(2, 1)
    assert tags.has(attributes).long().tolist() == [
        [r == 1 or r % 2 == 1 for r in range(8)], [r & 2 > 0 for r in range(8)], [r & 6 == 4 for r in range(8)],
        [r % 2 == 1 for r in range(8)],
    ]  # fmt: skip
