"""Filters that come again: their bits are kept, follow every update, and never change an answer."""

import copy

import numpy as np
import pytest
import torch

from tigon.retrieve import Category, Index, Number, Schema, col
from tigon.retrieve.index import filter_cache, search
from tigon.retrieve.scan import RowBits

DIM = 8
FILTERS = ["kind == 'a'", "kind == 'b' and price <= 50", "price is null", "not kind == 'a' or price > 90", "price < 0"]


@pytest.fixture
def asked_of(monkeypatch):
    """What each search gives the operator as its filter."""
    seen = []

    def spied(*args, **options):
        seen.append(options.get("where"))
        return operator(*args, **options)

    operator = search.filtered_topk
    monkeypatch.setattr(search, "filtered_topk", spied)
    return seen


def schema():
    return Schema(kind=Category(), price=Number(0, 100, step=1))


def items(n, seed=0):
    rng = np.random.default_rng(seed)
    vectors = torch.from_numpy(rng.integers(-3, 4, (n, DIM)).astype(np.float32))
    price = np.where(rng.random(n) < 0.2, np.nan, rng.integers(0, 101, n))
    return vectors, {"kind": rng.choice(["a", "b", "c"], n), "price": price}


def made(n=300, capacity=400, device="cpu"):
    index = Index(DIM, capacity, "float32", schema=schema(), device=device)
    index.upsert(np.arange(n), *items(n))
    return index


def query(n=3, seed=9):
    return torch.from_numpy(np.random.default_rng(seed).integers(-3, 4, (n, DIM)).astype(np.float32))


def same(index, fresh, where, k=20):
    """As an index that keeps none. Ids of one score may lie in other rows: scores, and what passes, are compared."""
    got, want = (i.search(query(), k, where) for i in (index, fresh))
    assert torch.equal(got.scores, want.scores)
    for mine, other, scores in zip(got.ids, want.ids, got.scores, strict=True):
        least = scores[scores > -torch.inf].min() if (scores > -torch.inf).any() else torch.inf
        assert set(mine[scores > least].tolist()) == set(other[scores > least].tolist())


def test_a_filter_is_kept_from_its_second_search_on(asked_of, device):
    index = made(device=device)
    first, second, third = (index.search(query(), 10, FILTERS[1]) for _ in range(3))
    assert [isinstance(where, RowBits) for where in asked_of] == [False, True, True]
    for hits in (second, third):
        assert torch.equal(hits.scores, first.scores)
        assert torch.equal(hits.ids, first.ids)
    index.search(query(), 10, col("price") == 3)
    assert not isinstance(asked_of[-1], RowBits)
    index.search(query(), 10)
    assert asked_of[-1] is None


def test_a_filter_for_each_query_is_kept(asked_of, device):
    index, plain = made(device=device), made(device=device)
    plain.limit_filter_cache(0)
    for where in ([FILTERS[0], None, FILTERS[1]], [FILTERS[0], None, FILTERS[1]], [None, FILTERS[2], FILTERS[0]]):
        same(index, plain, where)
    kinds = [isinstance(where, RowBits) for where in asked_of]
    assert kinds == [False, False, True, False, True, False]  # the new one is tested beside those that are kept
    assert index.table.cache.places.keys() >= {index.table.attributes.compile(f).filter for f in FILTERS[:3]}
    same(index, plain, [None] * 3)


def test_bits_follow_every_update(asked_of, device):
    """Random updates, beside an index that keeps no filter."""
    index, plain = made(200, 300, device), made(200, 300, device)
    plain.limit_filter_cache(0)
    rng = np.random.default_rng(1)
    for step in range(40):
        ids = rng.choice(300, int(rng.integers(1, 60)), replace=False)
        ids = ids[: max(0, index.capacity - len(index)) + 20]
        new = np.array(
            [i for i in ids if i in index] + [i for i in ids if i not in index][: index.capacity - len(index)]
        )
        for i in (index, plain):
            if step % 3 == 2:
                i.delete(ids)
            elif len(new):
                i.upsert(new, *items(len(new), seed=step))
            if step == 20:
                i.grow(5000)
        same(index, plain, [FILTERS[int(f)] for f in rng.integers(0, len(FILTERS), 3)])
        same(index, plain, FILTERS[int(rng.integers(0, len(FILTERS)))])
    assert sum(isinstance(where, RowBits) for where in asked_of) > 40


def test_few_are_kept_of_many(device):
    index, plain = made(device=device), made(device=device)
    plain.limit_filter_cache(0)
    index.limit_filter_cache(2 * filter_cache.filter_bytes(index.table.words.shape[1]))
    for _ in range(2):
        for low in range(7):
            for _ in range(2):
                same(index, plain, col("price") >= low)
            assert len(index.table.cache) <= 2
            assert index.table.cache.bits.nbytes <= index.table.cache.limit
    used = [index.table.attributes.compile(str(col("price") >= low)).filter for low in (5, 6)]
    assert set(index.table.cache.places) == set(used)
    same(index, plain, [col("price") >= low for low in (1, 2, 3)])  # more than fit: tested by their attributes
    assert len(index.table.cache) <= 2
    with pytest.raises(ValueError, match=r"^Index.limit_filter_cache: size must be an integer, 0 or more, got -1"):
        index.limit_filter_cache(-1)


def test_an_index_over_a_parameter(device):
    weight = torch.nn.Parameter(torch.eye(40, DIM, device=device))
    index = Index.over(weight, table={"kind": ["a", "b"] * 20, "price": [1] * 40}, schema=schema())
    for _ in range(2):
        assert (index.search(query(1), 30, "kind == 'b'").ids[0][:20] % 2 == 1).all()
    index.upsert([0, 1], table={"kind": ["b", "a"], "price": [2, 2]})
    found = index.search(query(1), 30, "kind == 'b'").ids[0]
    assert 0 in found
    assert 1 not in found


def test_bits_are_no_part_of_copies_and_states(asked_of, device):
    index = made(device=device)
    for _ in range(2):
        index.search(query(), 5, FILTERS[0])
    other = copy.deepcopy(index)
    assert len(index.table.cache) == 1
    assert len(other.table.cache) == 0
    changed = made(device=device)
    changed.upsert(np.arange(300), *items(300, seed=5))
    index.load_state_dict(changed.state_dict())
    same(index, changed, FILTERS[0])


def test_no_filter_is_made_while_attributes_are_written(asked_of, device):
    """The search does not wait, and tests the attributes."""
    index = made(device=device)
    index.search(query(), 5, FILTERS[0])
    with index.table.cache.write_lock:
        index.search(query(), 5, FILTERS[0])
    index.search(query(), 5, FILTERS[0])
    assert [isinstance(where, RowBits) for where in asked_of] == [False, False, True]


@pytest.mark.gpu
def test_a_graph_reads_attributes(device):
    """Bits may be given up after a graph was captured."""
    index, q = made(device=device), query().to(device)
    for _ in range(3):
        index.search(q, 5, FILTERS[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hits = index.search(q, 5, FILTERS[0])
    index.limit_filter_cache(0)
    graph.replay()
    assert torch.equal(hits.scores, index.search(q, 5, FILTERS[0]).scores)


def test_warmup_runs_every_kind_of_search(asked_of, monkeypatch, device):
    index = made(device=device)
    before = index.search(query(), 10, FILTERS[0])
    operator, kinds, dtypes = search.filtered_topk, set(), set()

    def spied(q, x, k, **options):
        where = options["where"]
        kinds.add((len(q), k, type(where), options["live"] is None))
        dtypes.add(q.dtype)
        return operator(q, x, k, **options)

    monkeypatch.setattr(search, "filtered_topk", spied)
    assert index.warmup(query(), 5, FILTERS[1]) > 0
    assert kinds >= {(3, 5, RowBits, True), (3, 5, RowBits, False)}
    assert {kind[3] for kind in kinds if kind[2] is not RowBits} == {True, False}
    kinds.clear()
    index.warmup(query(4).bfloat16(), 70, [FILTERS[2], None, FILTERS[3], None])
    assert kinds >= {(4, 70, list, True), (4, 70, RowBits, True), (4, 70, RowBits, False)}
    assert dtypes == {torch.float32, torch.bfloat16}
    assert torch.equal(index.search(query(), 10, FILTERS[0]).scores, before.scores)


def test_warmup_refuses_what_a_search_refuses():
    with pytest.raises(ValueError, match=r"no column 'cost'"):
        made().warmup(query(), where="cost < 3")
    with pytest.raises(ValueError, match=r"^Index.warmup: the index must hold items, since"):
        Index(DIM, 10).warmup(query())


def test_explain_counts_the_bits_of_a_cached_filter(device):
    index = made(device=device)
    tested = index.explain(FILTERS[1]).plan.bytes
    for _ in range(2):
        index.search(query(), 5, FILTERS[1])
    assert index.explain(FILTERS[1]).plan.bytes == tested - 8 * 300 + 300 // 8
