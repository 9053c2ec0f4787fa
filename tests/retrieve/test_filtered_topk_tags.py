"""Weights of attribute values in a search: against a full sort in fp64, in every plan; and what is refused."""

from __future__ import annotations

import pytest
import torch
from scans import HALF, SOME, assert_equal, check, compute_answer, integers, live_bits
from scans import words as draw_words

import tigon
from tigon.retrieve.scan import plan

pytestmark = pytest.mark.usefixtures("fresh_plans")


def words(n, device="cpu"):
    return draw_words(n, device, count=3)


def of_bits(count, word=0):
    return [(word, 1 << bit, 1 << bit) for bit in range(count)]


CODES = [(2, 0xF0, code << 4) for code in range(16)]
# One step of 16, one of 64 in part, two words, and more steps than keep their weights.
TAGS = {5: of_bits(5), 48: of_bits(48), 70: of_bits(45) + of_bits(25, 1), 116: of_bits(50) + of_bits(50, 1) + CODES}


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
    check(query, items, 2, attributes=words(N, device), tags=tags, tag_weights=weights)


@pytest.mark.parametrize("p", ["dense", "compact", "bitmaps"])
@pytest.mark.parametrize("where", [None, HALF, SOME], ids=str)
def test_plans_filters_live_rows_and_biases(where, p, backend, device):
    N = 4200
    options = {"attributes": words(N, device), "where": where, "live": live_bits(N, device), "plan": p}
    options["bias"] = integers(N, dtype=torch.float32, device=device, most=5)
    options |= {"tags": tigon.RowTags(TAGS[48]), "tag_weights": integers(1, 48, dtype=torch.float32, device=device)}
    check(integers(1, 16, device=device), integers(N, 16, device=device, seed=1), 8, **options)


def test_filters_of_each_query_and_bits(backend, device):
    N = 200
    attributes, weights = words(N, device), integers(3, 70, dtype=torch.float32, device=device)
    query, items = integers(3, 8, device=device), integers(N, 8, device=device, seed=1)
    given = {"attributes": attributes, "tags": tigon.RowTags(TAGS[70]), "tag_weights": weights}
    scores, rows = check(query, items, 5, where=[SOME, None, HALF], **given)
    every = torch.full((7,), -1, dtype=torch.int32, device=device)
    some, half = tigon.RowBits.from_filters([SOME, HALF], attributes).bits
    bits = torch.stack([some, every, half])
    which = torch.arange(3, dtype=torch.int32, device=device)
    assert_equal(tigon.filtered_topk(query, items, 5, where=tigon.RowBits(bits, which), **given), (scores, rows))
    scores, rows = check(query, items, 5, where=HALF, **given)
    one = tigon.RowBits(bits[2:])
    assert torch.equal(tigon.filtered_topk(query, items, 5, where=one, **given)[1], rows)


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
        assert_equal(tigon.filtered_topk(query, items, 6, plan=p, **options), (scores, rows))
    few = tigon.RowTags(TAGS[70][19::-1])  # in another order, and without those of weight 0
    alone = options | {"tags": few, "tag_weights": weights[:1, :20].flip(1)}
    assert_equal(tigon.filtered_topk(query[:1], items, 6, **alone), (scores[:1], rows[:1]))
    without = {"attributes": attributes, "where": HALF}
    plain = tigon.filtered_topk(query, items, 6, **without)
    for p in ("dense", "bitmaps"):
        assert_equal(tigon.filtered_topk(query, items, 6, plan=p, **without), plain)
    assert_equal(tigon.filtered_topk(query[1:2], items, 6, **without), [t[1:2] for t in plain])
    want_scores, want_rows = compute_answer(query, items, 6, **options)
    assert torch.equal(rows, want_rows)
    torch.testing.assert_close(scores.double(), want_scores, rtol=1e-6, atol=1e-5)


def test_weights_of_zero_are_no_weights(triton_backend, device):
    g = torch.Generator().manual_seed(4)
    query, items = (torch.randn(n, 16, generator=g).half().to(device) for n in (2, 300))
    zeros = torch.zeros(2, 5, device=device)
    plain = tigon.filtered_topk(query, items, 6)
    for tags, weights in ((tigon.RowTags(TAGS[5]), zeros), (tigon.RowTags([]), zeros[:, :0])):
        given = {"attributes": words(300, device), "tags": tags, "tag_weights": weights}
        assert_equal(tigon.filtered_topk(query, items, 6, **given), plain)


@pytest.mark.parametrize("coding", ["int8", "sign"])
def test_codes_are_not_read(coding, backend, device):
    query, items = integers(2, 64, device=device), integers(200, 64, device=device, seed=1)
    coded = tigon.encode_items(items, coding) if coding == "int8" else tigon.encode_items(items, coding, bits=64)
    given = {"attributes": words(200, device), "tags": tigon.RowTags(TAGS[48])}
    given["tag_weights"] = integers(2, 48, dtype=torch.float32, device=device, most=20)
    assert_equal(tigon.filtered_topk(query, coded, 5, **given), tigon.filtered_topk(query, items, 5, **given))


Q, X = torch.ones(2, 4), torch.ones(5, 4)
W, T, V = torch.zeros(1, 5, dtype=torch.int64), tigon.RowTags(of_bits(3)), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tags": T}, r"tag_weights must be \(2, 3\) fp32, a weight per query and tag, got None"),
        ({"tag_weights": V}, r"tags must be a tigon.RowTags beside tag_weights, got NoneType"),
        ({"tags": [(0, 1, 1)], "tag_weights": V}, r"tags must be a tigon.RowTags beside tag_weights, got list"),
        ({"tags": T, "tag_weights": V[:1]}, r"tag_weights must be \(2, 3\) fp32.* got \(1, 3\) torch.float32"),
        ({"tags": T, "tag_weights": V.half()}, r"tag_weights must be \(2, 3\) fp32.* got \(2, 3\) torch.float16"),
        ({"tags": T, "tag_weights": [1]}, r"tag_weights must be a tensor, got list"),
        ({"tags": T, "tag_weights": V.to("meta")}, r"tag_weights must be on cpu, as query is, got meta"),
        ({"tags": T, "tag_weights": V.clone().requires_grad_()}, r"tag_weights must not require a gradient.* a tensor"),
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
        (of_bits(1) * 2, r"tags must be distinct, got a duplicate"),
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
