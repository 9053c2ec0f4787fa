"""Searches with links: against fp64 scores in plain Python, for each metric, plan and dtype; and their explanations."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch

from tigon import retrieve
from tigon.retrieve import col
from tigon.retrieve.links.encoder import AttributeEncoder

TAGS = [f"t{n}" for n in range(70)]
SCHEMA = retrieve.Schema(tags=retrieve.Tags(80), kind=retrieve.Category(20), price=retrieve.Number())
N = 300


def edges(most=70, whole=False):
    """Links with weights that sums keep, from three attributes to every value."""
    rng = np.random.default_rng(1)
    queries = AttributeEncoder(
        "queries", {"job": "Category", "hobbies": "Tags"}, [("job", "a"), ("job", "b"), ("hobbies", "x")]
    )
    values = [*(("tags", tag) for tag in TAGS[:most]), *(("kind", n) for n in range(9)), ("tags", "never")]
    items = AttributeEncoder("items", {"tags": "Tags", "kind": "Category"}, values)
    query, item = np.meshgrid(np.arange(3), np.arange(len(values)), indexing="ij")
    weight = rng.integers(-9, 10, query.size) / (1 if whole else 7)
    kept = rng.random(query.size) < 0.7
    return retrieve.Links(
        queries, items, query.reshape(-1)[kept], item.reshape(-1)[kept], weight[kept].astype(np.float32), -1.0
    )


def made(seed=0, **options):
    rng = np.random.default_rng(seed)
    table = {
        "tags": [rng.choice(TAGS, n, replace=False).tolist() for n in rng.integers(0, 6, N)],
        "kind": [None if n > 9 else int(n) for n in rng.integers(0, 12, N)], "price": rng.random(N),
    }  # fmt: skip
    vectors = torch.from_numpy(rng.integers(-2, 3, (N, 8))).float()
    index = retrieve.Index(8, N + 1, schema=SCHEMA, **options)
    index.upsert(np.arange(N) + 1000, vectors, table)
    return index, vectors, table


QUERIES = {"job": ["a", "b", None, "z"], "hobbies": [["x"], [], ["x", "y"], None]}
QUERY = torch.from_numpy(np.random.default_rng(7).integers(-2, 3, (4, 8))).float()


def weights_of(links, table):
    """(4, N) in fp64: the sums of what Links.explain lists."""
    sums = torch.zeros(4, N, dtype=torch.float64)
    for b, i in itertools.product(range(4), range(N)):
        query = {name: QUERIES[name][b] for name in QUERIES}
        item = {"tags": table["tags"][i], "kind": table["kind"][i]}
        sums[b, i] = sum(edge.weight for edge in links.explain(query, item))
    return sums


@pytest.fixture(scope="module")
def whole():
    links, (_, vectors, table) = edges(whole=True), made()
    return links, vectors, table, weights_of(links, table)


def best(s, k):
    found = s.sort(dim=1, descending=True, stable=True)
    return found.values[:, :k], found.indices[:, :k] + 1000


# Interpreted, each metric once: the reference is asked of every pair.
SCANS = [
    (metric, alpha, backend)
    for metric, alpha, backend in itertools.product(("ip", "l2"), (1.0, 2, 0, -0.5), ("torch", "triton"))
    if backend == "torch" or torch.cuda.is_available() or (metric, alpha) in (("ip", 1.0), ("l2", -0.5))
]


@pytest.mark.parametrize(("metric", "alpha", "backend"), SCANS, indirect=["backend"])
def test_scores_are_those_of_vectors_and_links(metric, alpha, whole, backend, device):
    links, vectors, table, weights = whole
    index = made(metric=metric, device=device)[0]
    dot = QUERY.double() @ vectors.double().t()
    if metric == "l2":
        dot = 2 * dot - vectors.double().square().sum(1) - QUERY.double().square().sum(1, keepdim=True)
    hits = index.search(QUERY, k=20, links=links.weigh(QUERIES), alpha=alpha)
    scores, ids = best(alpha * dot + weights, 20)
    assert torch.equal(hits.scores.double().cpu(), scores)
    assert torch.equal(hits.ids.cpu(), ids)
    where = [col("price") < 0.5, None, "kind in (1, 2)", "tags has 't3'"]
    index.search(QUERY, k=5, where=where)
    for _ in range(2):  # by attributes, then by bits that are kept
        found = index.search(QUERY, k=5, where=where, links=links.weigh(QUERIES), alpha=alpha)
        masked = (alpha * dot + weights).clone()
        for b, passes in enumerate(
            (np.float32(table["price"]) < 0.5, np.ones(N, bool), np.isin(np.array(table["kind"], float), [1, 2]),
             ["t3" in tags for tags in table["tags"]])
        ):  # fmt: skip
            masked[b, ~torch.tensor(np.array(passes))] = -torch.inf
        scores, ids = best(masked, 5)
        assert torch.equal(found.scores.double().cpu(), scores)
        assert torch.equal(found.ids.cpu(), ids.masked_fill(scores == -torch.inf, -1))


@pytest.mark.parametrize("codes", ["int8", "sign"])
def test_codes_are_not_read(codes, whole, device):
    links, vectors, _, weights = whole
    index = made(codes=codes, device=device)[0]
    hits = index.search(QUERY, k=9, links=links.weigh(QUERIES))
    scores, ids = best(QUERY.double() @ vectors.double().t() + weights, 9)
    assert torch.equal(hits.scores.double().cpu(), scores)
    assert torch.equal(hits.ids.cpu(), ids)
    assert hits.exact.all()
    said = str(index.explain(k=9, queries=4, links=links.weigh(QUERIES)))
    assert f"are added in the scan; codes '{codes}' are not used, every matching item is scored" in said
    assert "int8 codes of" not in said


def test_an_explanation_of_the_plan_counts_the_words():
    index = made()[0]
    links = edges().weigh(QUERIES)
    with_links, without = index.explain(queries=4, links=links), index.explain(queries=4)
    # 70 tags take two words, of which one has the category as well; a value that no item has is none of them.
    count = len(links.values) - (("tags", "never") in links.values)
    assert count > 70
    assert f"links to {count} item values, in 2 words, are added in the scan" in str(with_links)
    steps = (with_links.plan.bytes - without.plan.bytes) / (8 * N)
    assert steps == 2
    assert with_links.plan.flop > without.plan.flop


@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
def test_parts_add_up_to_the_score(metric):
    index, vectors, table = made(metric=metric)
    links, alpha = edges(), 0.7
    g = torch.Generator().manual_seed(0)
    query = torch.randn(4, 8, generator=g)
    hits = index.search(
        query, k=[30, 3, 1, 30], where=[None, None, "price < 0", None], links=links.weigh(QUERIES), alpha=alpha
    )
    index.upsert(np.arange(N) + 1000, vectors, {**table, "tags": [[]] * N})  # explained is what was searched
    explained = hits.explain()
    assert [len(parts) for parts in explained] == [30, 3, 0, 30]
    x, q = vectors.double(), query.double()
    dot = q @ x.t()
    if metric == "cosine":
        dot = dot / q.norm(dim=1, keepdim=True) / x.norm(dim=1).clamp(min=1e-9)
    if metric == "l2":
        dot = -(q[:, None] - x).square().sum(2)
    for b, parts in enumerate(explained):
        for rank, part in enumerate(parts):
            i = part.id - 1000
            query_row = {name: QUERIES[name][b] for name in QUERIES}
            item = {"tags": table["tags"][i], "kind": table["kind"][i]}
            assert part.edges == links.explain(query_row, item)
            assert part.score == hits.scores[b, rank].item()
            assert part.vectors + sum(edge.weight for edge in part.edges) == pytest.approx(part.score, abs=1e-6)
            assert part.vectors == pytest.approx(alpha * dot[b, i].item(), abs=4e-3)
    assert any(part.edges for parts in explained for part in parts)


def test_without_links_a_score_has_one_part():
    hits = made()[0].search(QUERY, k=3)
    for b, parts in enumerate(hits.explain()):
        assert [part.id for part in parts] == hits.ids[b].tolist()
        assert all(part.vectors == part.score and part.edges == [] for part in parts)


def test_a_query_alone_has_the_bits_of_the_batch(triton_backend, monkeypatch, device):
    index, links = made(device=device)[0], edges()
    g = torch.Generator().manual_seed(2)
    query = torch.randn(4, 8, generator=g).to(device)
    many = index.search(query, k=7, links=links.weigh(QUERIES))
    monkeypatch.setattr("tigon.retrieve.links.links.FEW", 0)  # only the values of the query itself
    for b in range(4):
        alone = links.weigh({name: QUERIES[name][b : b + 1] for name in QUERIES})
        one = index.search(query[b], k=7, links=alone)
        assert torch.equal(one.scores[0], many.scores[b])
        assert torch.equal(one.ids[0], many.ids[b])


def test_values_that_come_later(whole):
    """Links to a value that no item has count from the moment an item has it; a loaded state begins anew."""
    links = edges(whole=True)
    index = made()[0]
    of = links.weigh({"job": ["a"], "hobbies": [["x"]]})
    (never,) = [w for w, value in zip(of.weights[0].tolist(), of.values, strict=True) if value == ("tags", "never")]
    assert never
    index.search(QUERY[:1], k=1, links=of)
    index.upsert([5], torch.zeros(1, 8), {"tags": [["never"]], "kind": [None], "price": [1.0]})
    other = copy.deepcopy(index)
    for one in (index, other):
        hits = one.search(QUERY[:1], k=N + 1, links=of)
        assert hits.scores[0, hits.ids[0].tolist().index(5)].item() == never
    changed = retrieve.Index(8, N + 1, schema=SCHEMA)
    changed.upsert([1], torch.zeros(1, 8), {"tags": [["never"]], "kind": [None], "price": [1.0]})
    assert changed.search(QUERY[:1], k=1, links=of).scores.item() == never


def test_links_to_values_that_no_item_has():
    index, links = made()[0], edges(0)
    links._weight[:] = 0
    plain, hits = index.search(QUERY, k=5), index.search(QUERY, k=5, links=links.weigh(QUERIES))
    assert torch.equal(plain.scores, hits.scores)
    none = retrieve.Index(8, 4, schema=SCHEMA)
    none.upsert([1], torch.ones(1, 8), {"tags": [[]], "kind": [None], "price": [1.0]})
    hits = none.search(torch.ones(4, 8), k=1, links=edges().weigh(QUERIES), alpha=2)
    assert hits.scores[:, 0].tolist() == [16.0] * 4
    assert [part.edges for parts in hits.explain() for part in parts] == [[]] * 4
    empty = retrieve.Index(8, 4, schema=SCHEMA).search(QUERY, k=2, links=edges().weigh(QUERIES))
    assert (empty.ids == -1).all()
    assert empty.explain() == [[]] * 4


def test_out_of_memory_halves_the_batch(whole, monkeypatch):
    links, *_ = whole
    index = made()[0]
    want = index.search(QUERY, k=5, links=links.weigh(QUERIES))
    search = retrieve.index.search.filtered_topk

    def small(query, *args, **options):
        if len(query) > 2:
            raise torch.OutOfMemoryError
        return search(query, *args, **options)

    monkeypatch.setattr("tigon.retrieve.index.search.filtered_topk", small)
    hits = index.search(QUERY, k=5, links=links.weigh(QUERIES))
    assert torch.equal(hits.scores, want.scores)
    assert torch.equal(hits.ids, want.ids)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"alpha": 2.0}, r"alpha must be 1 without links, since alpha weighs vectors against links, got 2.0"),
        ({"alpha": float("nan"), "links": "of"}, r"alpha must be a finite number, got nan"),
        ({"links": "itself"}, r"links must come from Links.weigh\(queries\), got Links"),
        ({"links": "short"}, r"links must be for 4 queries, like query, got 1"),
        ({"links": "other"}, r"links lead to an item column 'labels'; did you mean 'tags', a Tags"),
        ({"links": "number"}, r"links lead to values of 'price', a Number in the index"),
    ],
)
def test_what_is_refused(given, message):
    index, links = made()[0], edges()
    to = {name: AttributeEncoder("items", {name: "Category"}, [(name, 1)]) for name in ("labels", "price")}
    one = np.zeros(1, dtype=np.int64)
    others = {
        name: retrieve.Links(links.queries, side, one, one, np.ones(1, np.float32), 0.0) for name, side in to.items()
    }
    known = {
        "of": links.weigh(QUERIES), "itself": links, "short": links.weigh({"job": ["a"], "hobbies": [[]]}),
        "other": others["labels"].weigh(QUERIES), "number": others["price"].weigh(QUERIES),
    }  # fmt: skip
    given = {name: known.get(value, value) if name == "links" else value for name, value in given.items()}
    with pytest.raises(ValueError, match=f"^Index.search: {message}"):
        index.search(QUERY, k=3, **given)
