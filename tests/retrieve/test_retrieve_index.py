"""An index: searches against numpy, updates, ids of both kinds, and what is refused leaves it as it was."""

import copy
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from numerics import unit_roundoff

from tigon import retrieve, use_backend
from tigon.retrieve import Category, Index, Number, Schema, Tags, col
from tigon.retrieve import ids as ids_module
from tigon.retrieve.index import search
from tigon.retrieve.index import table as table_module

D = 24


@pytest.fixture(params=["int64", "str"])
def named(request):
    """From numbers to ids of a kind."""
    if request.param == "int64":
        return lambda numbers: torch.as_tensor(np.asarray(numbers) * 10**12 - 7)
    return lambda numbers: [f"item {n} é" for n in np.asarray(numbers).tolist()]


def plain(ids):
    return ids.tolist() if hasattr(ids, "tolist") else ids


def schema():
    return Schema(country=Category(), tags=Tags(70), price=Number())


def table(numbers, version=0):
    return {
        "country": [["us", "ca", None][(n + version) % 3] for n in numbers],
        "tags": [[f"t{n % 70}"] if n % 4 else [] for n in numbers],
        "price": [None if n % 5 == 0 else n / 2 for n in numbers],
    }


def vectors(count, seed=0, dtype=torch.float32):
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(device, named, metric="ip", dtype="float16", count=100, capacity=150):
    index = Index(D, capacity, dtype, metric, schema(), device=device)
    index.upsert(named(range(count)), vectors(count), table(range(count)))
    return index


def same(scores, others):
    """The same bits on a GPU; products of the CPU's library depend on the batch."""
    if scores.device.type == "cuda":
        assert torch.equal(scores, others)
    torch.testing.assert_close(scores, others)


def expected(metric, stored, q):
    stored, q = stored.double(), q.double()
    if metric == "l2":
        return -(q[:, None] - stored).square().sum(-1)
    if metric == "cosine":
        stored, q = (t / t.norm(dim=1, keepdim=True) for t in (stored, q))
    return q @ stored.t()


# -------------------------------------------------------------------------------------------------------------- search


@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn"])
def test_a_search_finds_the_best_of_all_that_pass(metric, dtype, device, named):
    if device.type == "cuda" and dtype == "float8_e4m3fn" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs float8")
    index = made(device, named, metric, dtype)
    q = vectors(5, seed=1)
    stored = vectors(100).to(index.dtype).float() if metric != "cosine" else vectors(100)
    scores = expected(metric, stored, q)
    prices = np.array([np.nan if n % 5 == 0 else n / 2 for n in range(100)])
    countries = np.arange(100) % 3
    passing = torch.from_numpy((prices <= 30) & (countries == 0))
    hits = index.search(q.to(device), k=60, where=(col("price") <= 30) & (col("country") == "us"))
    assert hits.scores.shape == (5, 60)
    assert hits.exact.tolist() == [True] * 5
    count = int(passing.sum())
    assert 10 < count < 60
    names = plain(named(range(100)))
    missing = None if isinstance(names[0], str) else -1
    for i in range(5):
        order = sorted(passing.nonzero()[:, 0].tolist(), key=lambda n: -scores[i, n])
        found = plain(hits.ids[i])
        assert set(found[:count]) == {names[n] for n in order}
        assert found[count:] == [missing] * (60 - count)
        assert (hits.scores[i, count:] == -torch.inf).all()
        best = torch.tensor([scores[i, names.index(name)] for name in found[:count]])
        size = 4 * float(scores.abs().max())
        slack = size * (unit_roundoff(torch.float32) * D + (unit_roundoff(index.dtype) if metric == "cosine" else 0))
        if dtype == "float8_e4m3fn" and metric == "cosine":
            slack = 0.2
        assert (hits.scores[i, :count].cpu().double() - best).abs().max() <= slack
        assert (hits.scores[i, :count].diff() <= 0).all()


def test_a_k_and_a_filter_for_each_query(device, named):
    index = made(device, named)
    q = vectors(4, seed=2).to(device)
    filters = [col("country") == "us", None, "country == 'us'", col("tags").has("t3")]
    hits = index.search(q, k=[3, 7, 1, 5], where=filters)
    assert hits.scores.shape == (4, 7)
    for i, k in enumerate([3, 7, 1, 5]):
        one = index.search(q[i], k=k, where=filters[i])
        assert plain(hits.ids[i])[:k] == plain(one.ids[0])
        same(hits.scores[i, :k], one.scores[0])
        assert (hits.scores[i, k:] == -torch.inf).all()
        assert all(x in (None, -1) for x in plain(hits.ids[i])[k:])


def test_equal_filters_are_one_object(device, named):
    index = made(device, named)
    one, other = (index.table.attributes.compile(col("price") <= 30) for _ in range(2))
    assert one is other
    assert index.table.attributes.compile("price <= 30").filter == one.filter
    index.upsert(named([1]), vectors(1), {"country": ["new"], "tags": [[]], "price": [1]})
    assert index.table.attributes.compile(col("country") == "new").clauses != [((), ())]


def test_an_empty_index_an_empty_batch_and_nothing_that_passes(device, named):
    index = Index(D, 10, schema=schema(), device=device)
    hits = index.search(vectors(2).to(device), k=3, where=col("country") == "us")
    assert hits.scores.tolist() == [[-float("inf")] * 3] * 2
    assert hits.ids.tolist() == [[-1] * 3] * 2
    assert len(hits.to_pandas()) == 0 if pytest.importorskip("pandas") else True
    index = made(device, named)
    hits = index.search(torch.empty(0, D, device=device), k=3)
    assert hits.scores.shape == (0, 3)
    assert len(hits) == 0
    hits = index.search(vectors(1), k=3, where="country == 'never'")
    assert hits.scores.tolist() == [[-float("inf")] * 3]
    with pytest.raises(ValueError, match=r"no item has the value 'never' \(strict=True\)"):
        index.search(vectors(1), where="country == 'never'", strict=True)


def test_out_of_memory_a_search_is_done_in_halves_once(device, named, monkeypatch):
    index = made(device, named)
    q = vectors(7, seed=3).to(device)
    whole = index.search(q, k=5, where=[None, "price < 20"] * 3 + [None])
    real, sizes = search.filtered_topk, []

    def small(query, *args, **kwargs):
        sizes.append(len(query))
        if len(query) > small.most:
            raise torch.OutOfMemoryError("out of memory")
        return real(query, *args, **kwargs)

    monkeypatch.setattr(search, "filtered_topk", small)
    small.most = 4
    halves = index.search(q, k=5, where=[None, "price < 20"] * 3 + [None])
    assert sizes == [7, 3, 4]
    same(halves.scores, whole.scores)
    assert plain(halves.ids) == plain(whole.ids)
    small.most = 2
    with pytest.raises(torch.OutOfMemoryError, match="memory for 4 queries at once; the index is unchanged"):
        index.search(q, k=5)
    small.most = 0
    with pytest.raises(torch.OutOfMemoryError, match="not enough device memory for 1 query at once"):
        index.search(q[0], k=5)
    monkeypatch.undo()
    assert plain(index.search(q, k=5, where=[None, "price < 20"] * 3 + [None]).ids) == plain(whole.ids)


def test_out_of_memory_grow_leaves_the_index_as_it_was(device, named, monkeypatch):
    index = made(device, named)
    before, real = contents(index), table_module._extend

    def small(index, name, total):
        if name == "item_ids":
            raise torch.OutOfMemoryError("out of memory")
        return real(index, name, total)

    monkeypatch.setattr(table_module, "_extend", small)
    with pytest.raises(torch.OutOfMemoryError, match=r"Index.grow: 400 items take .* KiB on the device.*unchanged"):
        index.grow(400)
    assert (index.capacity, contents(index)) == (150, before)
    monkeypatch.undo()
    index.grow(400)
    assert contents(index) == before


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda i: i.search(torch.zeros(2, 3)), r"query must be \(queries, 24\), .*, or \(24,\), got \(2, 3\)"),
        (lambda i: i.search("text"), "query must be a tensor or an array of numbers|must be"),
        (lambda i: i.search(torch.zeros(1, D).long()), "query must be floats, got torch.int64"),
        (lambda i: i.search(torch.zeros(1, D), k=0), "k must be"),
        (lambda i: i.search(torch.zeros(1, D), k="5"), "k must be an integer, or a list with an integer per query"),
        (lambda i: i.search(torch.zeros(2, D), k=[3]), r"positive integers, one for each of 2 queries, got \[3\]"),
        (lambda i: i.search(torch.zeros(2, D), where=[None]), "where must have an expression for each of 2"),
        (lambda i: i.search(torch.zeros(2, D), where=3), r"an expression of col\(…\), its text, None, or a"),
        (lambda i: i.search(torch.zeros(1, D), where=[3]), r"an expression of col\(…\) or its text, got int"),
        (lambda i: i.search(torch.zeros(1, D), where="pric < 3"), "there is no column 'pric'; did you mean 'price'"),
    ],
)  # fmt: skip
def test_a_bad_search_gets_a_sentence(call, sentence, named):
    with pytest.raises(ValueError, match=sentence):
        call(made("cpu", named))


# ------------------------------------------------------------------------------------------------------------- updates


def contents(index):
    """All items by their ids, as a search finds them: the vector comes back from scores of unit vectors."""
    eye = torch.eye(index.dim, device=index.device)
    hits = index.search(eye, k=max(len(index), 1))
    found = {}
    for column, (ids, scores) in enumerate(zip(plain(hits.ids), hits.scores.tolist(), strict=True)):
        for id, score in zip(ids, scores, strict=True):
            if score > -float("inf"):
                found.setdefault(id, [None] * index.dim)[column] = score
    return found


def test_more_than_the_capacity_gets_a_sentence_and_grow_makes_room(device, named):
    index = made(device, named, count=100, capacity=100)
    before = contents(index)
    with pytest.raises(
        ValueError, match=r"30 new items do not fit: the index holds 100 of 100. index.grow\(130\) adds capacity"
    ):
        index.upsert(named(range(80, 130)), vectors(50), table(range(80, 130)))
    assert contents(index) == before
    index.grow(130)
    assert contents(index) == before
    with pytest.raises(ValueError, match="capacity must be at least 130, the present capacity, got 50"):
        index.grow(50)


NAN = torch.full((2, D), 1.0)
NAN[1, 3] = float("nan")


@pytest.mark.parametrize(
    ("ids", "x", "more", "sentence"),
    [
        ([1, 2], NAN, {}, r"embeddings must be finite, got NaN or infinity for id 2\."),
        ([1, 2], NAN.nan_to_num(float("inf")), {}, "embeddings must be finite, got NaN or infinity for id 2"),
        ([1, 2], torch.tensor([[1.0], [1e6]]).expand(2, D), {}, "must fit float16, got larger numbers for id 2"),
        ([1, 2], torch.ones(2, D + 1), {}, r"must be \(items, 24\), the index's dim, got \(2, 25\), id 1 f"),
        ([1, 2], torch.ones(3, D), {}, "embeddings must have a row for each of the 2 ids, got 3"),
        ([1, 2], torch.ones(2, D).long(), {}, "embeddings must be floats, got torch.int64"),
        ([1, 2], None, {}, "embeddings must be"),
        ([1, -1], torch.ones(2, D), {}, "ids must not be -1"),
        ([1, "2"], torch.ones(2, D), {}, "ids must be all int64 or all strings, got str '2' at position 1"),
        ([1.5, 2], torch.ones(2, D), {}, "ids must be all int64 or all strings, got float 1.5 at position 0"),
        ("ab", torch.ones(2, D), {}, "ids must be a list of integers or strings, got str 'ab'"),
        (["a", "b"], torch.ones(2, D), {}, "ids must be int64, like the ids in the index, got str"),
        ([1, 2], torch.ones(2, D), {"contry": ["us"] * 2}, "'contry' that the schema lacks; did you mean 'country'"),
        ([1, 2], torch.ones(2, D), {"price": [1, "x"]}, r"'price' \(Number\), id 2: must be a number, got str 'x'"),
        ([1, 2], torch.ones(2, D), {"tags": [[f"new{i}" for i in range(70)]] * 2}, "id 1: is full: 'new"),
    ],
)  # fmt: skip
def test_what_does_not_fit_gets_a_sentence_and_nothing_is_written(ids, x, more, sentence, device):
    index = made(device, lambda numbers: np.asarray(numbers))
    state = {name: value.clone() for name, value in index.state_dict().items()}
    with pytest.raises(ValueError, match=sentence):
        index.upsert(ids, x, {**table([1, 2]), **more})
    after = index.state_dict()
    assert all(torch.equal(after[name].view(torch.uint8), value.view(torch.uint8)) for name, value in state.items())


def test_a_table_without_a_schema_gets_a_sentence():
    index = Index(D, 10)
    with pytest.raises(ValueError, match="the table has a column 'x' that the schema lacks: the index has no schema"):
        index.upsert([1], torch.ones(1, D), {"x": [1]})
    with pytest.raises(ValueError, match="the table must have the column 'country'"):
        Index(D, 10, schema=schema()).upsert([1], torch.ones(1, D))
    with pytest.raises(ValueError, match="a norm above 0 for cosine, got 0 for id 5"):
        Index(D, 10, metric="cosine").upsert([4, 5], torch.eye(D)[:2] * torch.tensor([[1.0], [0.0]]))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Index(0, 5), "dim must be a positive integer, got 0"),
        (lambda: Index(5, 2.5), "capacity must be a positive integer, got 2.5"),
        (lambda: Index(5, 5, "int8"), "dtype must be one of float16, bfloat16, float32, float8_e4m3fn, got int8"),
        (lambda: Index(5, 5, metric="dot"), "metric must be one of ip, cosine, l2, got 'dot'"),
        (lambda: Index(5, 5, schema={"a": 1}), "schema must be a Schema, got dict"),
        (
            lambda: Index.over(torch.zeros(3)),
            r"parameter must be a float tensor \(items, dim\), neither 0, or an Embedding, got \(3,\)",
        ),
        (lambda: Index.over(torch.zeros(3, 2), metric="cosine"), "metric must be 'ip' or 'l2', got 'cosine'"),
        (lambda: Index.over(torch.zeros(3, 2), ids=[1, 1, 2]), "ids must be 3 distinct ids"),
        (lambda: Index.over(torch.zeros(3, 2), schema=schema()), "table must hold the attributes"),
        (lambda: retrieve.plan_memory(0, 5), "plan_memory: items must be a positive integer, got 0"),
    ],
)
def test_a_bad_index_gets_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


# --------------------------------------------------------------------------------------------------------------- state


def test_state_dict_to_and_deepcopy_keep_the_items(device, named):
    index = made(device, named, "l2")
    index.delete(named([5, 6]))
    before = index.search(vectors(3).to(device), k=200, where="country == 'us'")
    other = Index(D, 150, metric="l2", schema=schema(), device=device)
    other.upsert(named([1000]), vectors(1), table([1]))
    other.load_state_dict(index.state_dict())
    through_a_file = Index(D, 150, metric="l2", schema=schema(), device=device)
    if find_spec("safetensors"):
        from safetensors.torch import load, save

        through_a_file.load_state_dict(load(save(index.state_dict())))
    else:
        through_a_file.load_state_dict(index.state_dict())
    for again in (other, through_a_file, copy.deepcopy(index), torch.nn.Sequential(index).cpu()[0]):
        found = again.search(vectors(3), k=200, where="country == 'us'")
        # Another device rounds otherwise, and near ties change places there.
        here = found.scores.device == before.scores.device
        for got, expected in zip(plain(found.ids), plain(before.ids), strict=True):
            assert got == expected if here else set(got) == set(expected)
        # −|q − x|² of an item beside itself is a difference of two numbers of the size of |q|².
        assert torch.allclose(found.scores.cpu(), before.scores.cpu(), atol=1e-4)
        assert len(again) == 98
        again.upsert(named([5, 200]), vectors(2), table([5, 200]))
        assert len(again) == 100
        assert "country" in str(again)
    assert other.table.bias.dtype == torch.float32
    narrow = copy.deepcopy(other).to(torch.bfloat16)
    assert (narrow.dtype, narrow.table.bias.dtype) == (torch.bfloat16, torch.float32)
    with pytest.raises(ValueError, match="the state belongs to an index with Schema"):
        Index(D, 150, metric="l2", schema=Schema(a=Number()), device=device).load_state_dict(
            index.state_dict(), strict=False
        )


def test_over_a_parameter_a_search_sees_the_weights_of_the_moment(device, named):
    model = torch.nn.Sequential(torch.nn.Embedding(40, D, device=device))
    index = Index.over(model[0], named(range(40)), table(range(40)), schema())
    assert index.embeddings.data_ptr() == model[0].weight.data_ptr()
    assert not list(index.parameters())
    assert "embeddings" not in index.state_dict()
    q = vectors(2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        scores = q @ model[0].weight.detach().t()
        hits = index.search(q, k=5)
        assert plain(hits.ids[0]) == [plain(named(range(40)))[n] for n in scores[0].argsort(descending=True)[:5]]
        model[0].weight.square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            model[0].weight[7] += q[0]
    assert index.delete(named([7])) == 1
    assert plain(named([7]))[0] not in plain(index.search(q, k=40).ids[0])
    index.upsert(named([7, 8]), table={"country": ["de", "de"], "tags": [[], []], "price": [1, 2]})
    assert set(plain(index.search(q[0], k=2, where="country == 'de'").ids[0])) == set(plain(named([7, 8])))
    assert len(index) == 40
    with pytest.raises(ValueError, match="embeddings must be None for an index over a parameter"):
        index.upsert(named([7]), q[:1], table([1]))
    with pytest.raises(ValueError, match="ids must be rows of the indexed parameter"):
        index.upsert(named([99]), None, table([1]))
    with pytest.raises(ValueError, match="an index over a parameter"):
        index.grow(100)
    distances = Index.over(model[0].weight, metric="l2").search(q, k=3)
    torch.testing.assert_close(
        distances.scores, -torch.cdist(q, model[0].weight.detach()).square().topk(3, largest=False)[0]
    )
    assert index.explain("country == 'de'").share == pytest.approx(2 / 40)


def test_an_index_that_was_cast_takes_items_in_its_dtype(device):
    index = Index(D, 10, "float32", device=device)
    index.upsert([1], torch.ones(1, D))
    index.half()
    index.upsert([2], torch.full((1, D), 2.0))
    assert index.dtype == torch.float16
    assert index.search(torch.ones(1, D), 2).ids.tolist() == [[2, 1]]
    with pytest.raises(ValueError, match="embeddings must fit float16, got larger numbers for id 3"):
        index.upsert([3], torch.full((1, D), 1e5))


def test_over_a_parameter_of_any_float_dtype(device):
    weight = torch.nn.Parameter(torch.eye(3, D, dtype=torch.float64, device=device))
    index = Index.over(weight)
    assert index.dtype == torch.float64
    assert index.search(torch.eye(3, D)[1:2].to(device), 1).ids.tolist() == [[1]]


def test_the_counts_follow_the_items(device, named):
    index = made(device, named)
    index.upsert(named(range(50)), vectors(50), table(range(50), version=1))
    index.delete(named(range(90, 100)))
    index.table.attributes.counts.settle(wait=True)
    fresh = copy.deepcopy(index)
    fresh.table.restart()
    assert fresh.table.attributes.counts.items == index.table.attributes.counts.items == 90
    assert fresh.table.attributes.counts.missing == index.table.attributes.counts.missing
    for name, bins in fresh.table.attributes.counts.bins.items():
        assert (np.trim_zeros(bins, "b") == np.trim_zeros(index.table.attributes.counts.bins[name], "b")).all()


def test_explain_says_what_passes(device, named):
    index = made(device, named)
    said = index.explain("country == 'us' and price < 20 and not tags has_any ('t1', 't2')")
    assert said.items == 100
    assert said.clauses == 3
    text = str(said)
    assert "country is 'us'" in text
    assert "tags has not any of 't1', 't2'" in text
    assert "price in 1 value range" in text
    assert index.explain().share == 1
    assert (index.explain().plan.kind, said.plan.kind) == ("dense", "compact")
    assert index.explain("country == 'us'", k=7, queries=3).plan.bytes > 100 * D * 2 / 3
    assert str(said.plan) in text  # on a GPU with the milliseconds to expect behind it


def test_plan_memory_is_what_the_buffers_take():
    for ids, capacity in ((lambda n: list(range(n)), 5000), (lambda n: [f"id{i}" for i in range(n)], 100)):
        index = Index(D, capacity, "bfloat16", "l2", schema())
        index.upsert(ids(50), vectors(50), table(range(50)))
        taken = sum(b.numel() * b.element_size() for b in index.buffers())
        assert index.plan().device_bytes == taken
        assert retrieve.plan_memory(capacity, D, "bfloat16", "l2", schema()).device_bytes == taken
    assert "together" in str(retrieve.plan_memory(20_000_000, 128))
    assert "filters" not in str(retrieve.plan_memory(20_000_000, 128))
    assert retrieve.plan_memory(20_000_000, 128, schema=schema()).filters == pytest.approx(8 * 20_000_000, rel=0.01)
    assert retrieve.plan_memory(10**9, 128, schema=schema()).filters == 2**30
    assert "for cached filters" in str(retrieve.plan_memory(20_000_000, 128, schema=schema()))
    assert retrieve.plan_memory(10**9, 128).vectors >= 256 * 10**9


# ----------------------------------------------------------------------------------------------------------------- ids


def test_strings_whose_hashes_collide_are_told_apart(monkeypatch):
    monkeypatch.setattr(ids_module.StringIds, "_hash", staticmethod(lambda text: len(text) % 3))
    index = Index(D, 200)
    names = [f"{n}" * (n % 7 + 1) for n in range(150)]
    index.upsert(names[:80], vectors(80))
    index.upsert(names[40:], vectors(110, seed=1))
    index.delete(names[10:20])
    rows = [*vectors(80)[:40].half().float().tolist(), *vectors(110, seed=1).half().float().tolist()]
    assert contents(index) == {n: r for i, (n, r) in enumerate(zip(names, rows, strict=True)) if not 10 <= i < 20}


def test_ids_of_other_kinds_of_columns():
    pa = pytest.importorskip("pyarrow")
    pd = pytest.importorskip("pandas")
    for ids in (pa.array([5, 6]), pd.Series([5, 6]), np.array([5, 6], dtype=np.uint8), (5, 6)):
        index = Index(D, 10)
        index.upsert(ids, torch.ones(2, D))
        assert 5 in index
        assert "5" not in index
    for ids in (pa.array(["a", "b"]), pd.Series(["a", "b"]), np.array(["a", "b"])):
        index = Index(D, 10)
        index.upsert(ids, torch.ones(2, D).numpy())
        assert "a" in index


def test_the_answer_names_its_items_whatever_is_written_later(device, named):
    index = made(device, named, count=20, capacity=20)
    hits = index.search(vectors(1).to(device), k=20)
    before = plain(hits.ids[0])
    index.delete(named(range(20)))
    index.upsert(named(range(100, 120)), vectors(20), table(range(20)))
    assert plain(hits.ids[0]) == before


# ---------------------------------------------------------------------------------------------------------------- hits


def test_hits_take_rows_of_tables_of_each_kind(device, named):
    pa, pd = pytest.importorskip("pyarrow"), pytest.importorskip("pandas")
    index = made(device, named)
    hits = index.search(vectors(2).to(device), k=3, where="price < 3")
    shown = plain(named(range(100)))
    frame = pd.DataFrame({"job": shown, "title": [f"title {n}" for n in range(100)]})
    wanted = [f"title {shown.index(i)}" for row in plain(hits.ids) for i in row]
    lists = {"job": shown, "title": frame["title"].tolist()}
    for taken in (
        hits.take(frame, id="job")["title"].tolist(),
        hits.take(pa.table(lists), id="job")["title"].to_pylist(),
        hits.take(lists, id="job")["title"],
        hits.take({**lists, "title": np.array(lists["title"])}, id="job")["title"].tolist(),
    ):
        assert taken == wanted
    if find_spec("polars"):
        polars = pytest.importorskip("polars")
        assert hits.take(polars.DataFrame(lists), id="job")["title"].to_list() == wanted
    if hits.ids.dtype != object:  # without a column of ids, ids are row numbers
        index = Index(D, 100, device=device)
        index.upsert(range(100), vectors(100))
        numbers = index.search(vectors(2).to(device), k=3)
        assert numbers.take(lists)["title"] == [f"title {n}" for n in numbers.ids.flatten().tolist()]
    kept = pa.table(lists, metadata={"made": "by hand"})
    assert hits.take(kept, id="job").schema.metadata == kept.schema.metadata
    taken = hits.take(pa.table(lists), id="job").to_pandas()
    assert taken.columns.tolist() == ["query", "rank", "score", "job", "title"]
    listed = hits.to_pandas()
    assert listed["rank"].tolist() == [0, 1, 2] * 2
    assert listed["query"].tolist() == [0, 0, 0, 1, 1, 1]
    assert listed["id"].tolist() == taken["job"].tolist()
    assert listed["score"].tolist() == hits.scores.flatten().tolist()
    for call, sentence in (
        (lambda: hits.take({"job": shown[50:]}, id="job"), "is not in the table's column 'job'"),
        (lambda: hits.take(lists, id="jobs"), "id must be a column in the table, 'job', 'title', got 'jobs'"),
        (lambda: hits.take({**lists, "score": shown}, id="job"), "the table must have no column 'score'"),
        (lambda: hits.take(lists), "id must name the column|is not a row of the table, which has 100 rows"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()


# -------------------------------------------------------------------------------------------------------------- kernels


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_kernels_find_what_the_reference_finds(metric, device, triton_backend):
    """With rows that were deleted, rows that are spare, a word of attributes that is not the first, and a bias."""
    index = made(device, lambda numbers: np.asarray(numbers), metric, count=140, capacity=150)
    index.delete(range(20, 30))
    index.upsert(range(5), vectors(5, seed=4), table(range(5), version=1))
    q = vectors(3, seed=1).to(device)
    calls = [
        {"where": None}, {"where": "country == 'us' and price < 40 or tags has 't60'"}, {"where": "country == 'never'"},
        {"where": ["country == 'us'", None, "tags has_any ('t1', 't68')"], "k": [3, 20, 10]},
    ]  # fmt: skip
    for call in calls:
        call = {"k": 20, **call}
        hits = index.search(q, **call)
        with use_backend("torch"):
            plain_hits = index.search(q, **call)
        torch.testing.assert_close(hits.scores, plain_hits.scores, rtol=1e-5, atol=1e-4)
        assert hits.ids.tolist() == plain_hits.ids.tolist()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("given", [torch.float16, torch.float32, torch.float64])
def test_vectors_are_finite_and_fit(dtype, given, device):
    """The largest numbers of a dtype are taken; infinity, NaN and what it cannot hold are not, wherever they stand."""
    index = Index(3, 20, dtype, device=device)
    top = min(torch.finfo(index.dtype).max, torch.finfo(given).max)
    if torch.tensor(top, dtype=given).to(index.dtype).float().isfinite():  # which rounding up may not be
        index.upsert([1, 2], torch.tensor([[top, -top, 0.0], [-top, 1.0, top]], dtype=given, device=device))
        assert len(index) == 2
    for bad in (float("inf"), -float("inf"), float("nan")):
        for place in range(3):
            x = torch.ones(4, 3, dtype=given, device=device)
            x[2, place] = bad
            with pytest.raises(ValueError, match="must be finite, got NaN or infinity for id 7"):
                index.upsert([5, 6, 7, 8], x)
    if torch.finfo(given).max > 4 * torch.finfo(index.dtype).max:
        x = torch.ones(2, 3, dtype=given, device=device)
        x[1, 0] = -4 * torch.finfo(index.dtype).max
        with pytest.raises(ValueError, match=f"must fit {dtype}, got larger numbers for id 6"):
            index.upsert([5, 6], x)
    assert 5 not in index
    index.upsert([3], torch.full((1, 3), 2.0).to(index.dtype).to(device))  # as they are kept
    assert index.search(torch.ones(3), k=1, where=None).scores.item() >= 6.0
