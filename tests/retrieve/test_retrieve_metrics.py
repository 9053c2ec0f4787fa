"""Metrics of search results and of full rankings against slow loops."""

import math

import numpy as np
import pytest
import torch

from tigon import data, retrieve
from tigon.retrieve import metrics


@pytest.mark.parametrize("k", [1, 3, 10])
def test_results_are_measured_as_by_a_loop(k):
    draw = np.random.default_rng(k)
    ids = np.stack([draw.permutation(30)[:k] for _ in range(50)])
    right = [set(draw.permutation(30)[: draw.integers(0, 6)].tolist()) for _ in range(50)]
    values = {name: [] for name in ("recall", "ndcg", "mrr", "hit_rate", "precision")}
    for row, one in zip(ids.tolist(), right, strict=True):
        hits = [rank for rank, name in enumerate(row, 1) if name in one]
        best = sum(1 / math.log2(r + 1) for r in range(1, min(len(one), k) + 1))
        values["recall"].append(len(hits) / len(one) if one else math.nan)
        values["ndcg"].append(sum(1 / math.log2(r + 1) for r in hits) / best if one else math.nan)
        values["mrr"].append((1 / hits[0] if hits else 0.0) if one else math.nan)
        values["hit_rate"].append(float(bool(hits)) if one else math.nan)
        values["precision"].append(len(hits) / k if one else math.nan)
    labelled = data.metrics.label_results(ids, right)
    for name, expected in values.items():
        found = getattr(data.metrics, name)(*labelled, k=k)
        assert found.values.tolist() == pytest.approx(expected, nan_ok=True)


def test_strings_places_without_an_item_and_no_truth():
    ids = np.array([["a", "b", None], ["c", None, None]], dtype=object)

    def recall(right):
        return data.metrics.recall(*data.metrics.label_results(ids, right), k=3).mean

    assert recall([{"b"}, {"a"}]) == 0.5
    assert math.isnan(recall([set(), set()]))
    assert data.metrics.overlap(ids, ids) == 1
    assert data.metrics.overlap(np.array([[3, 1]]), np.array([[1, -1]])) == 1
    for arguments, words in (
        ((ids, [set()]), "a set of ids for each of 2 queries, got 1"),
        ((ids, ["ab", "c"]), "right must be a list with a set of ids per query"),
        ((None, []), "ids must be an array"),
    ):
        with pytest.raises(ValueError, match=words):
            data.metrics.label_results(*arguments)


def slow_full_ranking(query, items, right, exclude, k):
    """As one would write it down: a list of all scores for each query, without what it has had."""
    values = {name: [] for name in ("recall", "ndcg", "mrr", "hit_rate")}
    shown = set()
    for q in range(len(query)):
        wanted = {i for who, i in right if who == q}
        if not wanted:
            continue
        hidden = {i for who, i in exclude if who == q}
        scores = [(-sum(a * b for a, b in zip(query[q], x, strict=True)), i) for i, x in enumerate(items)]
        ranked = [i for _, i in sorted(scores) if i not in hidden][:k]
        shown |= set(ranked)
        hits = [rank for rank, i in enumerate(ranked, 1) if i in wanted]
        best = sum(1 / math.log2(r + 1) for r in range(1, min(len(wanted), k) + 1))
        values["recall"].append(len(hits) / len(wanted))
        values["ndcg"].append(sum(1 / math.log2(r + 1) for r in hits) / best)
        values["mrr"].append(1 / hits[0] if hits else 0)
        values["hit_rate"].append(float(bool(hits)))
    found = {f"{name}@{k}": sum(each) / len(each) for name, each in values.items()}
    return found | {f"coverage@{k}": len(shown) / len(items)}


def drawn(queries=23, items=75, seed=0):
    g = torch.Generator().manual_seed(seed)
    # Small integers: ties, which both sides settle by row.
    query = torch.randint(-3, 4, (queries, 6), generator=g).float()
    table = torch.randint(-3, 4, (items, 6), generator=g).float()
    right = torch.stack(
        (torch.randint(0, queries, (300,), generator=g), torch.randint(0, items, (300,), generator=g)), 1
    )
    right = right[right[:, 0] != 4]  # one without any
    had = torch.rand(queries, items, generator=g) < 0.3
    had[7] = True
    had[7, 5:10] = False  # almost everything: fewer than k are left
    had[9] = False
    return query, table, torch.cat((right, right[:3])), had.nonzero()


@pytest.mark.parametrize("batch_size", [1, 8])
def test_all_items_are_ranked_as_a_loop_does(batch_size):
    query, table, right, exclude = drawn()
    got = metrics.evaluate(query, table, right, exclude, [1, 20], batch_size=batch_size)
    lists = [t.tolist() for t in (query, table, right, exclude)]
    for k in (1, 20):
        expected = slow_full_ranking(*lists, k)
        assert {name: got[name] for name in expected} == pytest.approx(expected)
    assert len(got) == 10
    plain = metrics.evaluate(query, table, right, k=20, batch_size=batch_size)
    assert plain == pytest.approx(slow_full_ranking(*lists[:3], [], 20))


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_an_index_is_ranked_by_its_ids_and_without_what_was_deleted(metric):
    query, table, right, exclude = drawn(seed=1)
    name = lambda rows: torch.stack((rows[:, 0], 1000 - rows[:, 1]), 1)  # noqa: E731
    index = retrieve.Index(6, 100, dtype="float32", metric=metric)
    index.upsert(1000 - torch.arange(75), table)
    index.delete([1000 - i for i in range(0, 75, 9)])
    more = torch.tensor([[2, 5000], [2, 6000]])  # right, and in no index
    got = metrics.evaluate(query, index, torch.cat((name(right), more)), torch.cat((name(exclude), more)), 20)
    right = torch.cat((right, torch.tensor([[2, 75], [2, 76]])))
    lists = [t.tolist() for t in (query, table, right, exclude)]
    if metric == "l2":  # −|q − x|² as a product
        lists[0] = [[*(2 * a for a in row), -1] for row in lists[0]]
        lists[1] = [[*row, sum(a * a for a in row)] for row in lists[1]]
    gone = [[q, i] for q in range(23) for i in range(0, 75, 9)]
    expected = slow_full_ranking(*lists[:3], lists[3] + gone, 20)
    expected["coverage@20"] *= 75 / len(index)
    assert got == pytest.approx(expected)
    over, right = retrieve.Index.over(table), right[:-2]
    assert metrics.evaluate(query, over, right, exclude) == metrics.evaluate(query, table, right, exclude)


def test_the_first_columns_of_a_ranking_are_a_ranking():
    rows, right = torch.tensor([[2, 0, 1], [1, 0, 2]]), torch.tensor([[0, 2], [1, 0]])
    assert metrics.ranking(rows[:, :2], right, [1, 2], 4) == metrics.ranking(rows[:, :2].clone(), right, [1, 2], 4)


def test_rankings_say_what_does_not_fit():
    query, table, right, exclude = drawn()
    nothing = metrics.evaluate(query, table, right[:0], exclude)
    assert all(math.isnan(value) for value in nothing.values())
    # The second query has nothing right: it is in no mean.
    assert metrics.ranking(torch.tensor([[2, -1], [1, 0]]), torch.tensor([[0, 2], [0, 3]]), 2, 4) == pytest.approx(
        {"recall@2": 0.5, "ndcg@2": 1 / (1 + 1 / math.log2(3)), "mrr@2": 1, "hit_rate@2": 1, "coverage@2": 0.25}
    )
    for arguments, words in (
        ((query[:, :5], table, right), r"query must be \(Q, 6\), as wide as the items, on cpu, got \(23, 5\)"),
        ((query, table, right.float()), r"right must be \(pairs, 2\) integers"),
        ((query, table, right + 30), "right must hold queries from 0 to 22, got 3"),
        ((query, table, torch.tensor([[3, 75]])), "right must hold rows among the 75 items, got 75 for query 3"),
        ((query, table, right, torch.tensor([[2, -1]])), "exclude must hold rows among the 75 items, got -1 for q"),
        ((query, table, right, None, [0]), r"k must be integers from 1 to 2,048, got \[0\]"),
    ):
        with pytest.raises(ValueError, match=words):
            metrics.evaluate(*arguments)
    with pytest.raises(ValueError, match="k must be integers from 1 to 2, got 3"):
        metrics.ranking(torch.tensor([[2, -1]]), right, 3, 75)
    named = retrieve.Index(6, 4)
    named.upsert(["a"], table[:1])
    with pytest.raises(ValueError, match="must have integer ids, got strings"):
        metrics.evaluate(query, named, right)
    assert metrics.evaluate(query, retrieve.Index(6, 4, dtype="float32"), right)["recall@20"] == 0
