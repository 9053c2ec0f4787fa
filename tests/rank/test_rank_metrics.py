"""Metrics of ragged groups against loops over all orders of equal scores, and scikit-learn's where it is there."""

import math
from itertools import pairwise, permutations

import pytest
import torch

from tigon.rank import metrics

SIZES = [5, 1, 0, 6, 3, 4]
OFFSETS = torch.tensor([0, *SIZES]).cumsum(0)


def drawn(seed, tied, grades=4):
    """Group 4 has no positive. Tied: scores of three values."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(sum(SIZES), dtype=torch.float64, generator=draw)
    scores = torch.randint(0, 3, scores.shape, generator=draw).double() if tied else scores
    labels = torch.randint(0, grades, scores.shape, generator=draw)
    labels[12:15] = 0
    labels[0], labels[1] = grades - 1, 0
    return scores, labels


def orders(scores, labels):
    """Labels in every order that the scores allow, each as likely."""
    rows = [list(order) for order in permutations(range(len(scores)))]
    return [[labels[i] for i in row] for row in rows if all(scores[a] >= scores[b] for a, b in pairwise(row))]


def gains(labels, k, gain):
    value = (lambda y: 2**y - 1) if gain == "exponential" else float
    return sum(value(y) / math.log2(r + 1) for r, y in enumerate(labels[:k], 1))


def first(labels, k):
    return next((r for r, y in enumerate(labels[:k], 1) if y > 0), 0)


ONE = {
    "ndcg": lambda y, k: gains(y, k, "exponential") / gains(sorted(y, reverse=True), k, "exponential"),
    "mrr": lambda y, k: 1 / r if (r := first(y, k)) else 0.0,
    "hit_rate": lambda y, k: float(first(y, k) > 0),
    "recall": lambda y, k: sum(v > 0 for v in y[:k]) / sum(v > 0 for v in y),
    "precision": lambda y, k: sum(v > 0 for v in y[:k]) / k,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("k", [1, 3, 5, 20])
@pytest.mark.parametrize("name", ONE)
def test_a_metric_of_groups_is_that_of_a_loop(name, k, tied):
    scores, labels = drawn(k, tied)
    expected = []
    for a, b in pairwise(OFFSETS.tolist()):
        y = labels[a:b].tolist()
        every = orders(scores[a:b].tolist(), y) if sum(y) else []
        expected.append(sum(ONE[name](one, k) for one in every) / len(every) if every else math.nan)
    found = getattr(metrics, name)(scores, labels, OFFSETS, k=k)
    assert found.values.tolist() == pytest.approx(expected, rel=1e-12, nan_ok=True)
    counted = [value for value in expected if not math.isnan(value)]
    assert found.left_out == len(expected) - len(counted) >= 2
    assert found.mean == pytest.approx(sum(counted) / len(counted), rel=1e-12)
    weights = torch.rand(len(SIZES))
    weighted = getattr(metrics, name)(scores, labels, OFFSETS, k=k, weights=weights).mean
    pairs = [(w, v) for w, v in zip(weights.tolist(), expected, strict=True) if not math.isnan(v)]
    assert weighted == pytest.approx(sum(w * v for w, v in pairs) / sum(w for w, _ in pairs), rel=1e-12)


def slow_auc(scores, labels, weights):
    won, pairs = 0.0, 0.0
    for s, y, w in zip(scores, labels, weights, strict=True):
        for t, z, v in zip(scores, labels, weights, strict=True):
            if y and not z:
                won += w * v * ((s > t) + (s == t) / 2)
                pairs += w * v
    return won / pairs if pairs else math.nan


@pytest.mark.parametrize("tied", [False, True])
def test_auc_is_the_share_of_pairs(tied):
    scores, labels = drawn(3, tied, grades=2)
    weights = torch.rand(len(scores), dtype=torch.float64)
    ones = [1.0] * len(scores)
    rows = scores.tolist(), labels.tolist()
    assert metrics.auc(scores, labels) == pytest.approx(slow_auc(*rows, ones), rel=1e-12)
    assert metrics.auc(scores, labels, weights=weights) == pytest.approx(slow_auc(*rows, weights.tolist()), rel=1e-12)
    bounds = list(pairwise(OFFSETS.tolist()))
    expected = [slow_auc(rows[0][a:b], rows[1][a:b], ones[a:b]) for a, b in bounds]
    found = metrics.gauc(scores, labels.bool(), OFFSETS)
    assert found.values.tolist() == pytest.approx(expected, rel=1e-12, nan_ok=True)
    counted = [(b - a, value) for (a, b), value in zip(bounds, expected, strict=True) if not math.isnan(value)]
    assert found.mean == pytest.approx(sum(n * v for n, v in counted) / sum(n for n, _ in counted), rel=1e-12)
    assert found.left_out == len(SIZES) - len(counted) >= 3
    plain = metrics.gauc(scores, labels, OFFSETS, weights=torch.ones(len(SIZES))).mean
    assert plain == pytest.approx(sum(v for _, v in counted) / len(counted), rel=1e-12)


def test_log_loss_and_ece_are_those_of_loops():
    draw = torch.Generator().manual_seed(0)
    p = torch.rand(300, dtype=torch.float64, generator=draw)
    p[:4] = torch.tensor([0.0, 1.0, 0.2, 0.4])  # ends, and bounds of bins
    y = (torch.rand(300, dtype=torch.float64, generator=draw) < p).int()
    w = torch.randint(0, 3, (300,), generator=draw)
    rows = list(zip(p.tolist(), y.tolist(), w.tolist(), strict=True))
    for weights, used in ((None, [1] * 300), (w, w.tolist())):
        nats = sum(v * -math.log(a if b else 1 - a) for (a, b, _), v in zip(rows, used, strict=True) if 0 < a < 1)
        assert metrics.log_loss(p, y, weights=weights) == pytest.approx(nats / sum(used), rel=1e-12)
        error = 0.0
        for b in range(5):
            there = [
                (v, label - a)
                for (a, label, _), v in zip(rows, used, strict=True)
                if b / 5 < a <= (b + 1) / 5 or (b == 0 and a == 0)
            ]
            error += abs(sum(v * d for v, d in there))
        assert metrics.ece(p, y, bins=5, weights=weights) == pytest.approx(error / sum(used), rel=1e-12)
    assert metrics.log_loss(torch.tensor([0.0]), torch.tensor([1])) == pytest.approx(52 * math.log(2))
    assert metrics.ece(torch.tensor([0.75] * 4), torch.tensor([1, 1, 1, 0])) == 0


@pytest.mark.parametrize("tied", [False, True])
def test_the_numbers_are_those_of_scikit_learn(tied):
    sk = pytest.importorskip("sklearn.metrics")
    draw = torch.Generator().manual_seed(1)
    n = 600
    scores = torch.randn(n, dtype=torch.float64, generator=draw)
    scores = (8 * scores).round() / 8 if tied else scores
    labels = (torch.rand(n, generator=draw) < 0.2).int()
    w = torch.rand(n, dtype=torch.float64, generator=draw)
    for weights in (None, w):
        p = scores.sigmoid()
        close = {"rel": 1e-12}
        assert metrics.auc(scores, labels, weights=weights) == pytest.approx(
            sk.roc_auc_score(labels, scores, sample_weight=weights), **close
        )
        assert metrics.log_loss(p, labels, weights=weights) == pytest.approx(
            sk.log_loss(labels, p, sample_weight=weights), **close
        )
    grades = torch.randint(0, 5, (n,), generator=draw)
    offsets = torch.arange(0, n + 1, 100)
    for k in (None, 1, 10):
        found = metrics.ndcg(scores, grades, offsets, k=k, gain="linear")
        pairs = zip(grades.split(100), scores.split(100), strict=True)
        expected = [sk.ndcg_score(y[None], s[None], k=k) for y, s in pairs]
        assert found.values.tolist() == pytest.approx(expected, **close)


def test_what_is_not_defined_is_nan_and_counted():
    one = torch.ones(3)
    assert math.isnan(metrics.auc(one, one))
    empty = torch.zeros(0)
    for value in (metrics.auc(empty, empty), metrics.log_loss(empty, empty), metrics.ece(empty, empty)):
        assert math.isnan(value)
    for offsets, groups in ((None, 1), (torch.tensor([0]), 0), (torch.tensor([0, 0, 0]), 2)):
        for name in ("gauc", *ONE):
            options = {} if name == "gauc" else {"k": 2}
            found = getattr(metrics, name)(empty, empty, offsets, **options)
            assert math.isnan(found.mean)
            assert (found.left_out, len(found.values)) == (groups, groups)
            assert metrics.bootstrap_interval(found, draws=3) == pytest.approx((math.nan, math.nan, 3), nan_ok=True)


def test_large_ties_are_exact_enough():
    """20,000 rows of one score, of which 7 are right: the first of them is at n + 1 over 8 in the mean of ranks."""
    labels = torch.zeros(20_000)
    labels[:7] = 1
    scores = torch.zeros(20_000)
    assert metrics.recall(scores, labels, k=100).mean == pytest.approx(100 / 20_000, rel=1e-12)
    assert metrics.hit_rate(scores, labels, k=20_000).mean == pytest.approx(1, rel=1e-9)
    none = math.prod((19_900 - i) / (20_000 - i) for i in range(7))
    assert metrics.hit_rate(scores, labels, k=100).mean == pytest.approx(1 - none, rel=1e-9)


# ------------------------------------------------------------------------------------------------------------ intervals


def test_an_interval_holds_the_mean_as_often_as_it_says():
    """Of 100 samples whose metric is known, about 90 % of the intervals hold it: within 4 standard deviations."""
    draw = torch.Generator().manual_seed(0)
    held = 0
    for seed in range(100):
        values = torch.rand(100, dtype=torch.float64, generator=draw)
        found = metrics.GroupMetric(float(values.mean()), values, torch.ones_like(values), 0)
        low, high, left_out = metrics.bootstrap_interval(found, draws=200, level=0.9, seed=seed)
        held += low <= 0.5 <= high
        assert left_out == 0
    assert abs(held - 90) <= 4 * math.sqrt(100 * 0.9 * 0.1)


def test_groups_are_drawn_whole_and_blocks_change_nothing(monkeypatch):
    scores, labels = drawn(2, tied=False)
    found = metrics.recall(scores, labels, OFFSETS, k=2)
    several = metrics.bootstrap_interval(found, draws=50)
    assert several.low < found.mean < several.high
    assert several == metrics.bootstrap_interval(found, draws=50)
    assert several != metrics.bootstrap_interval(found, draws=50, seed=1)
    monkeypatch.setattr(metrics, "DRAWN", 1)
    assert metrics.bootstrap_interval(found, draws=50) == pytest.approx(several, rel=1e-14)

    seen = []

    def count(weights):
        seen.append(weights)
        return float(weights.sum())

    metrics.bootstrap_interval(count, OFFSETS, draws=20)
    for weights in seen:
        times = [weights[a:b].unique().tolist() for a, b in pairwise(OFFSETS.tolist()) if b > a]
        assert all(len(one) == 1 for one in times)
        assert sum(one[0] for one in times) <= len(SIZES)
    assert len({tuple(weights.tolist()) for weights in seen}) > 10


def test_the_interval_of_a_metric_of_all_rows():
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (600,), generator=draw)
    scores = labels + torch.randn(600, generator=draw)
    offsets = torch.arange(0, 601, 6)
    low, high, left_out = metrics.bootstrap_interval(
        lambda w: metrics.auc(scores, labels, weights=w), offsets, draws=100
    )
    assert low < metrics.auc(scores, labels) < high < low + 0.15
    assert left_out == 0
    two = torch.tensor([0, 1, 2])
    pair = metrics.bootstrap_interval(lambda w: metrics.auc(two[:2].float(), two[:2], weights=w), two, draws=100)
    assert pair[:2] == (1, 1)
    assert 25 < pair.left_out < 75  # one of the two groups alone, half the time
    nothing = metrics.bootstrap_interval(lambda w: float(w.mean()), torch.tensor([0]), draws=2)
    assert nothing == pytest.approx((math.nan, math.nan, 2), nan_ok=True)


# ------------------------------------------------------------------------------------------------------------ bad input


def test_bad_input_gets_a_sentence():
    s, y, off = torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), torch.tensor([0, 2])
    found = metrics.ndcg(s, y)
    bad = [
        (lambda: metrics.auc(s * torch.nan, y), "auc: scores must not be NaN, got nan at 0"),
        (lambda: metrics.auc(s, 2 * y), "auc: labels must be 0 or 1, got 2 at 1"),
        (lambda: metrics.auc(s, y, weights=-s), "auc: weights must not be negative or NaN, got -0.1 at 0"),
        (lambda: metrics.gauc(s, y, torch.tensor([0, 3])), "gauc: offsets must rise from 0 to 2"),
        (lambda: metrics.gauc(s, y, [0, 2]), "gauc: offsets must be a tensor, got list"),
        (lambda: metrics.gauc(s, y, off, weights=s), r"gauc: weights must be \(1,\), one per group, .* got \(2,\)"),
        (lambda: metrics.log_loss(4 * s - 1, y), "log_loss: probabilities must lie between 0 and 1, got -0.6 at 0"),
        (lambda: metrics.ece(s * torch.nan, y), "ece: probabilities must lie between 0 and 1, got nan at 0"),
        (lambda: metrics.ece(s, y, bins=0), "ece: bins must be a positive integer, got 0"),
        (lambda: metrics.ndcg(s, y - 1), "ndcg: labels must not be negative or NaN, got -1 at 0"),
        (lambda: metrics.ndcg(s, y, gain="log"), "ndcg: gain must be one of exponential, linear, got 'log'"),
        (lambda: metrics.ndcg(s, y, k=0), "ndcg: k must be a positive integer, got 0"),
        (lambda: metrics.recall(s, y, k=None), "recall: k must be a positive integer, got None"),
        (lambda: metrics.bootstrap_interval(found, off), "bootstrap_interval: offsets must be given for a function"),
        (lambda: metrics.bootstrap_interval(lambda w: 0.0), "bootstrap_interval: offsets must be given for a function"),
        (
            lambda: metrics.bootstrap_interval(found, level=95),
            "bootstrap_interval: level must lie between 0 and 1, got 95",
        ),
        (
            lambda: metrics.bootstrap_interval(found, draws=0),
            "bootstrap_interval: draws must be a positive integer, got 0",
        ),
    ]
    for call, said in bad:
        with pytest.raises(ValueError, match=rf"^metrics\.{said}"):
            call()


def test_metrics_are_computed_on_the_device(device):
    scores, labels = drawn(7, tied=True, grades=2)
    for name in ("gauc", *ONE):
        options = {} if name == "gauc" else {"k": 3}
        here = getattr(metrics, name)(scores, labels, OFFSETS, **options)
        there = getattr(metrics, name)(scores.to(device), labels.to(device), OFFSETS.to(device), **options)
        assert there.values.device.type == device.type
        torch.testing.assert_close(there.values.cpu(), here.values, rtol=1e-13, atol=0, equal_nan=True)
        assert metrics.bootstrap_interval(there, draws=20) == pytest.approx(
            metrics.bootstrap_interval(here, draws=20), rel=1e-12
        )
