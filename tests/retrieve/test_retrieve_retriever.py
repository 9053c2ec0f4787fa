"""A retriever against plain torch: several vectors a query, reranking, folders, and what it refuses."""

import re

import pytest
import torch
from torch import nn

from tigon import retrieve
from tigon.retrieve import col


def made(metric="ip", ties=False, ids=None):
    torch.manual_seed(0)
    x = torch.randint(-2, 3, (300, 8)).float() if ties else torch.randn(300, 8)
    index = retrieve.Index(8, 400, "float32", metric, retrieve.Schema(group=retrieve.Category()))
    index.upsert(ids or list(range(300)), x, {"group": [i % 3 for i in range(300)]})
    return index, x


def best(scores, k):
    """Scores and rows, the best first, equal ones by row."""
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    return scores.gather(1, order), order


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("k", [1, 7, 300])
def test_the_max_of_several_vectors_is_that_of_all_items(metric, k):
    index, x = made(metric, ties=True)
    q = torch.randint(-2, 3, (5, 3, 8)).float()
    where = ["group == 0", None, "group != 1", None, "group == 2"]
    hits = retrieve.Retriever(lambda q: q, index).search(q, k, where)
    full = q @ x.T if metric == "ip" else -torch.cdist(q.double(), x.double()).square().round().float()
    full = full.amax(1)
    group = torch.arange(300) % 3
    for row, passes in ((0, group == 0), (2, group != 1), (4, group == 2)):
        full[row, ~passes] = -torch.inf
    scores, rows = best(full, k)
    assert torch.equal(hits.scores, scores)
    assert torch.equal(hits.ids, rows.masked_fill(scores == -torch.inf, -1))
    assert hits.exact.all()


def test_a_union_holds_the_best_of_each_vector_once():
    index, x = made()
    q = torch.randn(4, 3, 8)
    hits = retrieve.Retriever(lambda q: q, index)(q, 5, combine="union")
    each = (q @ x.T).topk(5).indices
    assert hits.ids.shape == (4, 15)
    for query in range(4):
        expected = sorted(set(each[query].flatten().tolist()))
        found = hits.ids[query][hits.ids[query] >= 0]
        assert sorted(found.tolist()) == expected
        by = (each[query][:, :, None] == found).any(1)  # the vectors that found each
        expected = (q[query] @ x[found].T).masked_fill(~by, -torch.inf).amax(0)
        torch.testing.assert_close(hits.scores[query, : len(found)], expected)
        assert (hits.scores[query].diff().nan_to_num(0) <= 0).all()


def test_rerank_sorts_the_candidates_of_the_scan_and_ties_go_by_row():
    index, x = made()
    q = torch.randn(4, 8)
    seen = []

    def rerank(query, items):
        seen.append(items)
        return (query[:, None] * items).sum(-1).abs().floor()  # many ties

    hits = retrieve.Retriever(lambda q: q, index).search(q, 6, col("group") == 1, rerank=rerank, candidates=40)
    scan = (q @ x.T).masked_fill(torch.arange(300) % 3 != 1, -torch.inf)
    rows = scan.topk(40).indices.sort(1).values
    assert torch.equal(seen[0], x[rows])
    scores, order = best((q[:, None] * x[rows]).sum(-1).abs().floor(), 6)
    assert torch.equal(hits.scores, scores)
    assert torch.equal(hits.ids, rows.gather(1, order))


def test_rerank_leaves_places_empty_where_fewer_pass():
    index, _ = made()
    index.delete(range(4, 300))
    hits = retrieve.Retriever(lambda q: q, index).search(torch.randn(2, 2, 8), 6, rerank=lambda q, x: x.sum(-1))
    assert (hits.ids[:, 4:] == -1).all()
    assert (hits.scores[:, 4:] == -torch.inf).all()
    assert hits.ids[:, :4].sort(1).values.tolist() == [[0, 1, 2, 3]] * 2


def test_one_vector_a_query_is_a_search_of_the_index():
    index, _ = made(ids=[f"i{n}" for n in range(300)])
    encoder = nn.Linear(4, 8)
    x = torch.randn(3, 4)
    found, expected = retrieve.Retriever(encoder, index)(x, [1, 3, 2]), index.search(encoder(x), [1, 3, 2])
    assert found.ids.tolist() == expected.ids.tolist()
    assert torch.equal(found.scores, expected.scores)

    class Texts:
        def encode(self, texts):
            return [[float(len(text))] * 8 for text in texts]

    hits = retrieve.Retriever(Texts(), index).search(["a", "bc"], 2)
    assert hits.ids.tolist() == index.search(torch.tensor([[1.0] * 8, [2.0] * 8]), 2).ids.tolist()


def test_a_folder_brings_it_back(tmp_path):
    pytest.importorskip("safetensors")
    index, _ = made()
    encoder = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
    encoder[1].weight.data.t_()  # strided
    x = torch.randn(3, 4)
    retriever = retrieve.Retriever(encoder, index)
    retriever.save_pretrained(tmp_path / "r")
    retriever.save_pretrained(tmp_path / "r")  # over what is there
    other = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
    again = retrieve.Retriever.from_pretrained(tmp_path / "r", other)
    assert torch.equal(again(x, 5).ids, retriever(x, 5).ids)
    assert torch.equal(again(x, 5).scores, retriever(x, 5).scores)
    names = sorted(p.name for p in (tmp_path / "r").iterdir())
    assert names[0] == "config.json"
    assert re.fullmatch(r"encoder-[0-9a-f]{16}\.safetensors", names[1])
    assert names[2:] == ["index", "tigon.lock"]
    load = retrieve.Retriever.from_pretrained
    with pytest.raises(ValueError, match="encoder must be given, a Sequential as saved"):
        load(tmp_path / "r")
    with pytest.raises(ValueError, match="encoder must be a module, like the saved encoder, got function"):
        load(tmp_path / "r", lambda q: q)
    with pytest.raises(ValueError, match="encoder does not match the saved weights"):
        load(tmp_path / "r", nn.Linear(4, 8))
    with pytest.raises(ValueError, match=r"folder must hold config\.json"):
        load(tmp_path, other)
    retrieve.Retriever(lambda q: q, index).save_pretrained(tmp_path / "f")
    assert load(tmp_path / "f", lambda q: q).search(torch.ones(1, 8), 3).ids.shape == (1, 3)


def test_what_it_refuses():
    index, _ = made()
    retriever = retrieve.Retriever(lambda q: q, index)
    q, several = torch.randn(2, 8), torch.randn(2, 3, 8)
    for call, words in (
        (lambda: retrieve.Retriever(3, index), "encoder must be a module, a function or have encode, got int"),
        (lambda: retrieve.Retriever(len, 3), "index must be an Index or a ShardedIndex, got int"),
        (lambda: retriever(q[:, :5]), r"\(queries, 8\) or \(queries, vectors, 8\).*got \(2, 5\)"),
        (lambda: retriever(q.long()), "must return floats, got torch.int64"),
        (lambda: retriever(object()), "must return a tensor or an array, got object"),
        (lambda: retriever(several, combine="sum"), "combine must be 'max' or 'union', got 'sum'"),
        (lambda: retriever(several, [1, 2]), r"k must be a single integer .* got \[1, 2\]"),
        (lambda: retriever(several, where=[None] * 6), "an expression for each of 2 queries, got 6"),
        (lambda: retriever(q, 9, rerank=lambda q, x: q, candidates=8), "candidates must be an integer from k, 9"),
        (lambda: retriever(q, 9, rerank=lambda q, x: q), r"scores \(2, 100\), got \(2, 8\)"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
