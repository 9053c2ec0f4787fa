"""Codes of rows: what encode_items promises, and searches with codes against searches without."""

from __future__ import annotations

import pytest
import torch
from scans import HALF, assert_equal, live_bits

import tigon
from tigon.retrieve.scan import coded as launches_coded
from tigon.retrieve.scan import encode, launches, plan
from tigon.retrieve.scan.filters import stack_tables


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def odd_rows(D=40):
    """One large component, tiny and huge scales, zeros, integers, NaN and infinities."""
    rows = normal(30, D)
    rows[3, 7] = 1e4
    rows[4:9] *= torch.tensor([1e-5, 1e5, 1e-10, 1e-30, 1e-38])[:, None]
    rows[9] = 0
    rows[10] = torch.arange(D).float()
    rows[11, 2], rows[12, 3], rows[13] = torch.nan, torch.inf, 1e36
    return rows


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_codes_are_within_their_error(dtype, device, monkeypatch):
    monkeypatch.setattr(encode, "PIECE", 7 * 40)
    rows = odd_rows().to(dtype).to(device)
    coded = tigon.encode_items(rows)
    assert coded.rows is rows
    assert coded.codes.dtype == torch.int8
    wide = rows.double() if dtype != torch.float8_e4m3fn else rows.float().double()
    ordinary = (wide.abs().amax(1) <= 2.0**50) & ~wide.isnan().any(1)
    assert torch.equal(coded.scales == torch.inf, ~ordinary)
    ratio = wide[ordinary] / coded.scales[ordinary].double()[:, None]
    code = coded.codes[ordinary].double()
    assert ((ratio - code).norm(dim=1) <= coded.error[0]).all()
    assert (code.norm(dim=1) <= coded.error[1]).all()
    # No more than rounding to the nearest costs, and half of a unit in every component.
    assert coded.error[0] <= 0.5 * 40**0.5 * 1.001
    assert coded.error[1] <= code.norm(dim=1).max() * 1.001
    assert not coded.codes[~ordinary].any()


def test_no_rows():
    coded = tigon.encode_items(torch.ones(0, 4))
    assert coded.codes.shape == (0, 4)
    assert coded.scales.shape == (0,)
    assert coded.error.tolist() == [0, 0]


Q, X = torch.ones(2, 4), tigon.encode_items(torch.ones(5, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tigon.encode_items([1]), r"encode_items: rows must be a tensor, got list"),
        (lambda: tigon.encode_items(Q[0]), r"encode_items: rows must be \(N, D\) fp16, .*, got \(4,\) torch.float32"),
        (lambda: tigon.encode_items(Q.long()), r"encode_items: rows must be \(N, D\) .* got \(2, 4\) torch.int64"),
        (lambda: tigon.encode_items(Q, "int4"), r"encode_items: codes must be one of 'int8'.*, got 'int4'"),
        (lambda: tigon.filtered_topk(Q, X._replace(codes=Q), 1), r"filtered_topk: codes of items must be \(5, 4\)"),
        (lambda: tigon.filtered_topk(Q, X._replace(scales=None), 1), r"filtered_topk: scales of items .* got NoneT"),
        (
            lambda: tigon.filtered_topk(Q, X._replace(error=X.error.double()), 1),
            r"filtered_topk: error of items must be \(2,\) float32 on cpu, .* got \(2,\) torch.float64 on cpu",
        ),
        (lambda: tigon.filtered_topk(Q, X._replace(rows=3), 1), r"filtered_topk: items must be a tensor, got int"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


# ------------------------------------------------------------------------------------------------- searches with codes


@pytest.fixture(autouse=True)
def _small_searches_read_codes(monkeypatch, fresh_plans):
    monkeypatch.setattr(plan, "CODED_BYTES", -(1 << 60))


def certified(query, coded, k, *, attributes=None, where=None, live=None, bias=None, **options):
    """Scores, rows, and whether the codes sufficed; the same as filtered_topk's."""
    kind = plan.choose_kind(0 if where is None else 1, None, options.get("plan", "auto"))
    filters, tables = stack_tables(where, kind, query.device, len(query))
    items = coded.rows, coded.codes, coded.scales, coded.error
    return launches_coded._coded_topk(query, *items, k, attributes, *tables, filters, live, bias, kind, None)


def same(query, rows, k, coded=None, **options):
    """Codes change nothing: not the rows, not a bit of a score. Returns whether they sufficed."""
    coded = tigon.encode_items(rows) if coded is None else coded
    *got, sure = certified(query, coded, k, **options)
    assert_equal(got, tigon.filtered_topk(query, rows, k, **options))
    assert sure.dtype == torch.bool
    return sure


@pytest.mark.parametrize(
    ("B", "N", "D", "k", "dtype"),
    [
        (1, 1, 1, 1, torch.float16),  # the least
        (3, 1000, 24, 10, torch.float16),
        (17, 70, 40, 1, torch.bfloat16),  # beyond one tile, and one term
        (2, 50, 40, 64, torch.float32),  # fewer rows than results
        (2, 5000, 16, 10, torch.float16),  # beyond a strip
        (1, 300, 300, 5, torch.bfloat16),  # several steps of a sum, the last one cut off
        (1, 5000, 16, 150, torch.float16),  # the smaller groups of a larger k
        (1, 3000, 16, 600, torch.bfloat16),
        (1, 90, 16, 1009, torch.float16),  # beyond what codes certify
    ],
)
def test_the_same_answer_with_codes(B, N, D, k, dtype, triton_backend, device):
    query, rows = normal(B, D, seed=1).to(dtype).to(device), normal(N, D).to(dtype).to(device)
    sure = same(query, rows, k)
    coded = tigon.encode_items(rows)
    assert_equal(tigon.filtered_topk(query, coded, k), certified(query, coded, k)[:2])
    assert bool(sure.all()) == (k <= 1008)  # all groups, or nearly all, were picked


def test_few_groups_certify_what_is_far_ahead(small_trees, triton_backend, device):
    small_trees()
    rows = normal(400, 32)
    query = normal(3, 32, seed=1)
    rows[7], rows[200] = 3 * query[0], 4 * query[1]
    sure = same(query.to(device), rows.to(device), 1)
    assert sure[:2].all()


def adversaries():
    """Rows whose order int8 cannot tell, or tells wrongly, in one of two dtypes."""
    base, many = normal(1, 32), normal(200, 32)
    spiky, odd, at = many.clone(), many.clone(), torch.arange(200)
    spiky[at, at % 32] = 50.0
    odd[:30] = odd_rows(32)
    scales = many * 10.0 ** torch.linspace(-5, 5, 200)[torch.randperm(200)][:, None]
    rows = {
        "near duplicates": base + 1e-3 * many, "scales of ten orders of magnitude": scales,
        "rounded away": 100 + many * 1e-2, "zeros": torch.zeros(200, 32), "tiny": many * 1e-36, "huge": many * 1e30,
    }  # fmt: skip
    narrow = {
        "a large component": spiky, "odd rows": odd, "ties": many.round(), "equal": base.expand(200, 32),
        "half zeros": many * (at % 2)[:, None],
    }  # fmt: skip
    return rows | {name: wide.bfloat16() for name, wide in narrow.items()}


@pytest.mark.parametrize("name", adversaries())
def test_adversarial_rows_cannot_make_a_certificate_lie(name, small_trees, triton_backend, device):
    small_trees()
    rows = adversaries()[name].to(device)
    query = torch.cat((normal(3, 32, seed=1), rows[:1].float().cpu().nan_to_num(0, 1, -1), torch.zeros(1, 32)))
    query[1] *= 1e-20
    # Of one dtype: the plain scan of two terms makes NaN of infinities.
    sure = same(query.to(rows.dtype).to(device), rows, 3)
    if name in ("near duplicates", "equal", "zeros"):
        assert not sure[0]  # and the second scan was taken
    same(normal(17, 32, seed=2).to(rows.dtype).to(device), rows, 2)  # one term a query


def test_bounds_are_bounds(triton_backend, device):
    """Of groups of one strip each: every maximum that the scan of codes writes is at least the exact score's."""
    for name, rows in adversaries().items():
        rows = rows[:64].float().contiguous().to(device)
        for query in (normal(2, 32, seed=3), normal(17, 32, seed=3), rows[:3].cpu().nan_to_num(0, 1, -1)):
            query = query.to(device)
            wide = query.float() if name != "huge" else query / 1e10
            coded = tigon.encode_items(rows)
            bounds = group_bounds(wide, coded)
            scores = (wide[:, None, :] * rows[None]).sum(2)
            scores = scores.masked_fill(scores.isnan(), -torch.inf).view(len(wide), -1, 64).amax(2)
            assert (bounds >= scores).all(), name


def plan_codes(*sizes, **options):
    return plan.plan_coded_scan(plan.SearchSizes(*sizes, **options))


def group_bounds(query, coded):
    """(B, groups): what the scan of codes writes of each group."""
    (B, D), N = query.shape, len(coded.rows)
    made = plan_codes(B, 1, D, N, coded.rows.dtype)
    maxima = query.new_full((sum(launches._nodes(N, made)[0]), B), torch.nan, dtype=torch.float32)
    rows = launches.Rows(None, None, None, None, None, None)
    unknown = torch.ones(B, dtype=torch.int32, device=query.device)
    given = coded.codes, coded.scales, coded.error
    launches_coded._launch_bounds(query, given, rows, made, maxima, unknown, (-1, B))
    assert not unknown.any()
    return maxima[: -(-N // made.sizes.group)].t()


def test_bounds_are_tight(triton_backend, device):
    """Or nothing is certified: with two terms little more than the rows' own rounding is added."""
    rows, query = normal(64, 128).to(device), normal(2, 128, seed=1).to(device)
    coded = tigon.encode_items(rows)
    slack = (query.norm(dim=1) * coded.error[0] * coded.scales.max())[:, None]
    scores = (query @ rows.t()).amax(1, keepdim=True)
    bounds = group_bounds(query, coded)
    assert (bounds - scores <= 1.1 * slack).all()
    many = normal(17, 128, seed=1).to(device)
    assert (group_bounds(many, coded) - (many @ rows.t()).amax(1, keepdim=True) <= 4 * slack.max()).all()


@pytest.mark.parametrize("kind", ["dense", "compact"])
@pytest.mark.parametrize("where", [None, HALF], ids=str)
@pytest.mark.parametrize("places", [8, 256])
def test_filters_live_rows_and_biases(where, kind, places, small_trees, triton_backend, device):
    small_trees(places)
    N = 333
    g = torch.Generator().manual_seed(4)
    options = {
        "attributes": torch.randint(0, 4, (1, N), generator=g).to(device), "where": where, "plan": kind,
        "live": live_bits(N, device),
        "bias": normal(N, seed=5).to(device),
    }  # fmt: skip
    rows, query = normal(N, 16).half().to(device), normal(2, 16, seed=1).half().to(device)
    rows[5], options["bias"][7], options["bias"][9] = torch.inf, torch.inf, -torch.inf
    sure = same(query, rows, 4, **options)
    assert sure.all() == (places == 256) or sure.all()
    options["live"].zero_()
    assert same(query, rows, 4, **options).all()  # nothing is there
    if where is not None:
        bits = tigon.RowBits.from_filters([where], options["attributes"])
        given = {"live": None, "bias": options["bias"], "where": bits, "plan": kind}
        assert_equal(*(tigon.filtered_topk(query, x, 4, **given) for x in (tigon.encode_items(rows), rows)))


def test_queries_of_a_batch_are_certified_one_by_one(small_trees, triton_backend, device):
    """The second scan is of blocks of queries: what a block's certified queries have found stays."""
    small_trees()
    rows = torch.cat((normal(200, 32), normal(1, 32, seed=8) + 1e-4 * normal(200, 32, seed=9)))
    query = normal(20, 32, seed=1)
    query[3] = query[18] = rows[300]
    rows[17] = 5 * query[0]
    sure = same(query.to(device), rows.to(device), 1)
    assert sure[0]
    assert not sure[3]
    assert not sure[18]


def test_pieces_of_a_batch(small_trees, monkeypatch, triton_backend, device):
    monkeypatch.setattr(plan, "WORKSPACE", 1)
    small_trees(4, 0)
    assert plan_codes(17, 1, 8, 16, torch.float16).pieces == 2
    rows, query = normal(16, 8).half().to(device), normal(17, 8, seed=1).to(device)
    assert same(query, rows, 1).all()


def test_views_of_larger_codes(triton_backend, device):
    rows = normal(200, 40).half().to(device)
    coded = tigon.encode_items(rows)
    wide = tigon.CodedItems(
        torch.cat((rows, rows), 1)[:150, :40], torch.cat((coded.codes, coded.codes), 1)[:150, :40],
        torch.stack((coded.scales, coded.scales), 1)[:150, 0], coded.error,
    )  # fmt: skip
    same(normal(2, 40, seed=1).half().to(device), rows[:150], 5, wide)


def test_codes_compile_whole(triton_backend, device):
    torch._dynamo.reset()
    rows, query = normal(90, 16).half().to(device), normal(3, 16, seed=1).half().to(device)
    coded = tigon.encode_items(rows)

    def f(query, *items):
        return tigon.filtered_topk(query, tigon.CodedItems(*items), 5)

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (90, 77):
        given = query, rows[:n], coded.codes[:n], coded.scales[:n], coded.error
        assert_equal(compiled(*given), f(*given))


def test_the_planner_takes_codes_where_they_move_fewer_bytes(monkeypatch):
    monkeypatch.setattr(plan, "CODED_BYTES", 1 << 26)
    N, half = 15_500_000, torch.float16
    plain, coded = plan.plan_scan(plan.SearchSizes(16, 100, 128, N, half)), plan_codes(16, 100, 128, N, half)
    assert coded.bytes < 0.6 * plain.bytes
    assert coded.codes == "int8"
    assert "int8 codes of all rows" in str(coded)
    assert coded.sizes.group == coded.then.sizes.group == plain.sizes.group
    assert coded.then.levels == coded.levels
    for options in (
        {"B": 65}, {"k": 1009}, {"dtype": torch.float8_e4m3fn}, {"N": 10_000}, {"kind": "bitmaps", "filters": 2},
        {"filters": 1, "share": 0.001},
    ):  # fmt: skip
        assert plan_codes(**{"B": 16, "k": 100, "D": 128, "N": N, "dtype": half, **options}) is None
    for k in (1, 16, 100, 112, 113, 240, 241, 1008):
        made = plan_codes(1, k, 128, N, half)
        sizes = made.sizes
        assert sizes.group == plan.choose_sizes(k).group
        assert made.groups >= 2 * k
        assert plan.next_power_of_2(k) * sizes.group <= plan.KEYS
        arities = [up // down for up, down in zip(made.levels, made.levels[1:], strict=False)]
        assert max(arities) * sizes.places <= plan.KEYS
        assert sizes.group <= made.tile.rows <= sizes.middle
        assert sizes.group <= made.then.tile.rows <= sizes.middle


@pytest.mark.gpu
def test_a_cuda_graph_with_codes(device, monkeypatch):
    rows, query = normal(9000, 16).half().to(device), normal(3, 16, seed=1).half().to(device)
    coded = tigon.encode_items(rows)
    tigon.filtered_topk(query, coded, 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = tigon.filtered_topk(query, coded, 5)
    for seed in (2, 3):  # near duplicates of one row take the second scan
        query.copy_(normal(3, 16, seed=seed))
        rows.copy_(normal(1, 16, seed=seed).half() + 1e-3 * normal(9000, 16, seed=seed) if seed == 3 else rows)
        coded.codes.copy_(tigon.encode_items(rows).codes)
        coded.scales.copy_(tigon.encode_items(rows).scales)
        coded.error.copy_(tigon.encode_items(rows).error)
        graph.replay()
        assert_equal(got, tigon.filtered_topk(query, rows, 5))
