"""Metrics of ranked ids against slow loops."""

import math

import numpy as np
import pytest

from tigon.retrieve import metrics


def slow(ids, right):
    recalls, gains, ranks = [], [], []
    for row, one in zip(ids.tolist(), right, strict=True):
        if not one:
            continue
        hits = [rank for rank, name in enumerate(row, 1) if name in one]
        recalls.append(len(hits) / min(len(one), len(row)))
        best = sum(1 / math.log2(r + 1) for r in range(1, min(len(one), len(row)) + 1))
        gains.append(sum(1 / math.log2(r + 1) for r in hits) / best)
        ranks.append(1 / hits[0] if hits else 0.0)
    return [sum(values) / len(values) for values in (recalls, gains, ranks)]


@pytest.mark.parametrize("k", [1, 3, 10])
def test_metrics_are_those_of_a_loop(k):
    draw = np.random.default_rng(k)
    ids = np.stack([draw.permutation(30)[:k] for _ in range(50)])
    right = [set(draw.permutation(30)[: draw.integers(0, 6)].tolist()) for _ in range(50)]
    got = [metrics.recall(ids, right), metrics.ndcg(ids, right), metrics.mrr(ids, right)]
    assert got == pytest.approx(slow(ids, right))


def test_strings_places_without_an_item_and_no_truth():
    ids = np.array([["a", "b", None], ["c", None, None]], dtype=object)
    assert metrics.recall(ids, [{"b"}, {"a"}]) == 0.5
    assert metrics.mrr(ids, [{"b"}, {"a"}]) == 0.25
    assert math.isnan(metrics.recall(ids, [set(), set()]))
    assert metrics.overlap(ids, ids) == 1
    assert metrics.overlap(np.array([[3, 1]]), np.array([[1, -1]])) == 1
    with pytest.raises(ValueError, match="a set of ids for each of 2 queries, got 1"):
        metrics.recall(ids, [set()])
