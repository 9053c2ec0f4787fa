"""1-bit codes: kernels find what the reference finds, to the last bit; recall rises with bits and candidates."""

from __future__ import annotations

import pytest
import torch
from scans import SOME, assert_equal, integers, live_bits, words

import tigon
from tigon.retrieve.scan import sign, sign_launches


def numbers(*shape, seed=0, device="cpu"):
    return integers(*shape, device=device, seed=seed, most=3)


def beside(N, device, live=False, where=False, bias=False):
    options = {"live": live_bits(N, device)} if live else {}
    options |= {"attributes": words(N, device), "where": SOME} if where else {}
    return options | ({"bias": integers(N, dtype=torch.float32, device=device, most=9)} if bias else {})


@pytest.mark.parametrize(
    ("N", "D", "bits", "dtype"),
    [
        (3, 1, 64, torch.float16),  # the least
        (5, 7, 1024, torch.bfloat16),  # more bits than numbers, an odd width
        (4, 130, 128, torch.float32),  # bins of unequal sizes
        (2, 64, 64, torch.float16),  # one number a bin
        (3, 100, 512, torch.float8_e4m3fn),
    ],
)
@pytest.mark.parametrize("query", [False, True])
def test_signs_have_the_same_bits_everywhere(N, D, bits, dtype, query, backend, device):
    rows = torch.randn(N, D, generator=torch.Generator().manual_seed(N))
    rows[0] *= 0
    rows = rows.to(dtype)
    projection = sign.make_projection(D, bits, 3)
    if query and dtype == torch.float8_e4m3fn:
        rows = rows.half()
    want = sign.signs_reference(rows, projection, scaled=True, query=query)
    on, where = projection.to(device), rows.to(device)
    if backend == "triton":
        found = sign_launches.encode(where, on, scaled=True, query=query)
    else:
        found = sign.signs_reference(where, on, scaled=True, query=query)
    for one, other in zip(found, want, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one.cpu(), other)


def test_a_projection_sums_bins_of_a_permutation():
    for D, bits in ((128, 64), (128, 128), (7, 64), (130, 512), (1, 64)):
        projection = sign.make_projection(D, bits, 0)
        bins = sign.count_bins(D, bits)
        assert projection.shape == (-(-D // bins), bits)
        assert torch.equal(projection, sign.make_projection(D, bits, 0))
        for start in range(0, bits - bins + 1, bins):  # each permutation has every number once
            part = projection[:, start : start + bins]
            assert sorted((part[part >= 0] >> 1).tolist()) == list(range(D))
    first, second = sign.make_projection(128, 512, 0), sign.make_projection(128, 512, 1)
    assert not torch.equal(first, second)
    assert 0.4 < (first & 1).float().mean() < 0.6
    # What a seed means stays what it is: codes that were saved are searched by later versions.
    assert sign.make_projection(8, 64, 0)[:, :3].tolist() == [[0, 14, 3], [10, 2, 12], [4, 12, 11], [8, 7, 1]]


def test_norms_and_scales_of_queries():
    rows = torch.randn(50, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 50)[:, None]
    items = tigon.encode_items(rows, "sign", bits=1024)
    assert torch.allclose(items.scales.float(), rows.norm(dim=1), rtol=2**-8, atol=0)
    # The estimate of q · x is the right size: of x itself |x|².
    asked = sign.signs_reference(rows, items.projection, scaled=True, query=True)
    levels = (1 + 2 * sign._unpack_signs(asked.more)) * (2 * sign._unpack_signs(asked.codes) - 1)
    own = (levels * (2 * sign._unpack_signs(items.codes) - 1)).sum(1) * items.scales.float() * asked.scales
    assert ((own / rows.square().sum(1)) - 1).abs().max() < 0.2


@pytest.mark.parametrize(
    ("B", "N", "D", "bits", "k", "candidates", "options"),
    [
        (1, 1, 1, 64, 3, 4, {}),  # fewer rows than results
        (3, 257, 40, 512, 5, 20, {"live": True}),
        (2, 1100, 24, 128, 5, 20, {"bias": True, "live": True}),  # beyond a tile
        (2, 2049, 16, 512, 5, 30, {"where": True, "live": True}),  # beyond a strip
        (1, 700, 7, 1024, 5, 20, {"where": True, "bias": True}),
        (1, 2050, 8, 512, 5, 1500, {"live": True}),  # groups are sorted by torch
    ],
)
def test_kernels_find_what_the_reference_finds(B, N, D, bits, k, candidates, options, backend, device):
    items = tigon.encode_items(numbers(N, D, seed=1, device=device), "sign", bits=bits)
    if D == 40:
        items = items._replace(scales=None)  # as of rows of one norm: many keys are equal
    items, query, given = (
        items._replace(candidates=candidates),
        numbers(B, D, device=device),
        beside(N, device, **options),
    )
    wanted = sign.sign_topk_reference(query, items, k, **given)
    assert_equal(tigon.filtered_topk(query, items, k, plan="codes", **given), wanted)


def test_bits_of_a_filter_pass_the_rows_that_it_passes(backend, device):
    N = 600
    items = tigon.encode_items(numbers(N, 16, seed=1, device=device), "sign", bits=256)._replace(candidates=12)
    query, options = numbers(2, 16, device=device), beside(N, device, where=True, live=True)
    want = tigon.filtered_topk(query, items, 4, plan="codes", **options)
    options["where"] = tigon.RowBits.from_filters([SOME], options.pop("attributes"))
    assert_equal(tigon.filtered_topk(query, items, 4, plan="codes", **options), want)


def planted(device):
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(40, 32, generator=g)
    rows = centres[torch.randint(40, (4000,), generator=g)] + 0.6 * torch.randn(4000, 32, generator=g)
    rows = rows * torch.exp(0.3 * torch.randn(4000, 1, generator=g))
    return rows.to(device), (centres[:20] + 0.5 * torch.randn(20, 32, generator=g)).to(device)


def recall(rows, query, bits, candidates, k=10):
    items = tigon.encode_items(rows, "sign", bits=bits)._replace(candidates=candidates)
    exact = tigon.filtered_topk(query, rows, k)[1]
    found = tigon.filtered_topk(query, items, k, plan="codes")[1]
    return (found[:, :, None] == exact[:, None, :]).any(1).float().mean().item()


def test_recall_rises_with_bits_and_candidates(device):
    rows, query = planted(device)
    by_bits = [recall(rows, query, bits, 10) for bits in (64, 256, 1024)]
    by_candidates = [recall(rows, query, 128, many) for many in (10, 30, 100)]
    assert by_bits == sorted(by_bits)
    assert by_candidates == sorted(by_candidates)
    assert by_bits[-1] > by_bits[0] + 0.1
    assert by_candidates[-1] > 0.95
    # Norms count: without them signs see directions alone.
    items = tigon.encode_items(rows, "sign", bits=256)._replace(candidates=20)
    exact = tigon.filtered_topk(query, rows, 10)[1]
    blind = tigon.filtered_topk(query, items._replace(scales=None), 10, plan="codes")[1]
    assert (blind[:, :, None] == exact[:, None, :]).any(1).float().mean() < recall(rows, query, 256, 20) - 0.05


def test_all_rows_as_candidates_are_an_exact_search(device):
    rows, query = numbers(300, 16, seed=1, device=device), numbers(3, 16, device=device)
    items = tigon.encode_items(rows, "sign", bits=64)._replace(candidates=300)
    assert_equal(tigon.filtered_topk(query, items, 20, plan="codes"), tigon.filtered_topk(query, rows, 20))


def test_signs_are_read_where_that_costs_less():
    rows = torch.empty(15_500_000, 128, dtype=torch.float16, device="meta")
    items = tigon.CodedItems(rows, rows, None, None, None, torch.empty(4, 512, dtype=torch.int32, device="meta"))

    def reads(B, **options):
        asked = {"where": None, "plan": "auto", "share": None} | options
        return sign.uses_signs(torch.empty(B, 128, device="meta"), items, **asked)

    assert reads(1)
    assert reads(4)
    assert not reads(16)  # popcounts take longer than reading the rows
    assert not reads(1, where=SOME, share=0.01)  # few rows are scored at once
    assert reads(16, plan="codes")
    assert not reads(1, plan="dense")
    assert not reads(2, where=[SOME, None])


def test_many_rows_have_addresses_of_64_bits():
    """Plans for 2³¹ rows: levels that one program reads, and tables that are small beside the codes."""
    for W in (2, 16, 32):
        N = 2**31 - 4096
        plan = sign_launches._plan(1, N, W, 100, 400)
        counts, _ = sign_launches._nodes(N, plan.tree)
        assert counts[0] <= sign_launches.KEYS
        assert len(plan.tree.levels) <= 5
        assert 4 * sum(counts) < 0.01 * N * 4 * W


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: tigon.encode_items(x, "sign", bits=96), "encode_items: bits must be one of 64, 128, .*, got 96"),
        (lambda x: tigon.encode_items(x, "signs"), "encode_items: codes must be one of .*, got 'signs'"),
        (
            lambda x: tigon.filtered_topk(x, x, 1, plan="codes"),
            "filtered_topk: plan may be 'codes' only for items from encode_items",
        ),
        (lambda x: _search(x, candidates=2), "filtered_topk: candidates of items must be an int from k, 3, .*, got 2"),
        (lambda x: _search(x, codes=x), "filtered_topk: codes of items must be .* int32 on .*, got"),
        (lambda x: _search(x, scales=x[0]), "filtered_topk: scales of items must be .* bfloat16 on .*, got"),
    ],
)
def test_bad_input_gets_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        call(torch.ones(5, 8))


def _search(x, **fields):
    tigon.filtered_topk(x, tigon.encode_items(x, "sign", bits=64)._replace(**fields), 3)


def test_exports(device):
    rows, query = numbers(200, 16, seed=1, device=device), numbers(2, 16, device=device)
    items = tigon.encode_items(rows, "sign", bits=64)._replace(candidates=12)

    class Search(torch.nn.Module):
        def forward(self, query):
            return tigon.filtered_topk(query, items, 3, plan="codes")

    assert_equal(torch.export.export(Search(), (query,)).module()(query), Search()(query))
