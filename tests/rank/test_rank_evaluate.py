"""Scores of a table, and what is measured of them."""

import math

import pytest
import torch
from rank_made import Linear, Requests

from tigon import rank
from tigon.rank.evaluation.evaluate import is_better, parse_cutoffs, split_by_column
from tigon.rank.evaluation.score import score_batches

DATA = Requests.drawn(50, names=("click", "buy"))
RANKER = Linear(("click", "buy"))


def test_scores_are_those_of_the_ranker_row_by_row():
    RANKER.train()
    scored = rank.score(RANKER, DATA, rank.BatchOptions(requests=7))
    assert RANKER.training
    assert torch.equal(scored.offsets, DATA.offsets)
    assert torch.equal(scored.rows, torch.arange(len(DATA.x)))
    RANKER.eval()
    logits = RANKER(DATA.batch(torch.arange(50)))
    for label in ("click", "buy"):
        torch.testing.assert_close(scored.logits[label], logits[label].detach())
        assert not scored.logits[label].requires_grad
    torch.testing.assert_close(scored.score, logits["click"].sigmoid() + logits["buy"].sigmoid())
    assert scored.labels["buy"].tolist() == DATA.labels["buy"].tolist()
    by_tokens = rank.score(RANKER, DATA, rank.BatchOptions(tokens=20))
    torch.testing.assert_close(by_tokens.score, scored.score)
    assert len(list(score_batches(RANKER, DATA, rank.BatchOptions(requests=7)))) == math.ceil(50 / 7)
    with pytest.raises(ValueError, match=r"^rank\.score: data has no requests\.$"):
        rank.score(RANKER, Requests.drawn(0))


def test_requests_of_a_row_each_have_no_order_to_measure():
    data = Requests(torch.ones(60, dtype=torch.int64), DATA.x[:60], {name: y[:60] for name, y in DATA.labels.items()})
    found = rank.evaluate(rank.score(RANKER, data), draws=3)
    assert {label: list(names) for label, names in found.labels.items()} == {
        label: ["auc", "log_loss", "ece"] for label in ("click", "buy")
    }
    assert found.notes == []
    with pytest.raises(ValueError, match=r"a metric must be one of auc, log_loss, ece, or .* got 'ndcg@10'"):
        found.value("ndcg@10")


def test_products_in_bf16_change_the_scores_by_their_rounding():
    wide, narrow = (rank.score(RANKER, DATA, rank.BatchOptions(precision=p)).score for p in ("fp32", "bf16"))
    assert 0 < (wide - narrow).abs().max() < 0.02


def test_metrics_of_each_label_and_of_the_order_that_is_served():
    scored = rank.score(RANKER, DATA)
    found = rank.evaluate(scored, at=(1, 3))
    assert list(found.labels) == ["click", "buy", "click by score", "buy by score"]
    metrics, names = rank.metrics, ["auc", "log_loss", "ece", "gauc", "mrr", "ndcg@1", "hr@1", "ndcg@3", "hr@3"]
    for label in ("click", "buy"):
        s, y = scored.logits[label], scored.labels[label]
        assert list(found.labels[label]) == names
        assert found.labels[label]["auc"].value == metrics.auc(s, y)
        assert found.labels[label]["log_loss"].value == pytest.approx(metrics.log_loss(s.sigmoid(), y), rel=1e-5)
        assert found.labels[label]["ece"].value == pytest.approx(metrics.ece(s.sigmoid(), y), rel=1e-4)
        ndcg = metrics.ndcg(s, y, scored.offsets, k=3)
        assert found.labels[label]["ndcg@3"][:4] == (ndcg.mean, None, None, ndcg.left_out)
        assert list(found.labels[f"{label} by score"]) == names[3:]
        served = metrics.gauc(scored.score, y, scored.offsets)
        assert found.labels[f"{label} by score"]["gauc"].value == served.mean != metrics.gauc(s, y, scored.offsets).mean
    assert (found.rows, found.requests) == (len(DATA.x), 50)
    without = int((torch.segment_reduce(scored.labels["buy"], "sum", offsets=scored.offsets) == 0).sum())
    assert f"buy: {without} of 50 requests have no positive row: left out of NDCG, MRR and HR" in found.notes
    assert found.value("click:mrr") == found.labels["click"]["mrr"].value
    assert found.value("mrr") == (found.value("click:mrr") + found.value("buy:mrr")) / 2
    with pytest.raises(
        ValueError, match=r"must be one of auc, .*hr@3, or LABEL:METRIC .* from click, buy, .*, got 'map'"
    ):
        found.value("map")
    one = rank.evaluate(rank.score(Linear(), Requests.drawn(20)))
    assert list(one.labels) == ["click"]
    assert one.value("auc") == one.labels["click"]["auc"].value


def test_intervals_hold_the_value_and_draw_whole_requests():
    scored = rank.score(RANKER, DATA)
    found = rank.evaluate(scored, at=(3,), draws=60).labels["click"]
    assert all(one.low < one.value < one.high for one in found.values() if one.value != 1)
    expected = rank.metrics.bootstrap_interval(
        lambda w: rank.metrics.auc(scored.logits["click"], scored.labels["click"], weights=w), scored.offsets, draws=60
    )
    assert (found["auc"].low, found["auc"].high) == expected[:2]


def test_weights_of_rows_count_in_metrics_of_rows():
    data = Requests(DATA.sizes, DATA.x, DATA.labels, torch.arange(len(DATA.x)) % 3 * 0.5)
    scored = rank.score(RANKER, data)
    found = rank.evaluate(scored).labels["click"]
    logits, y = scored.logits["click"], scored.labels["click"]
    assert found["auc"].value == rank.metrics.auc(logits, y, weights=data.weights) != rank.metrics.auc(logits, y)


def test_one_class_is_said():
    data = DATA.with_labels(click=torch.ones(len(DATA.x)), buy=DATA.labels["buy"])
    found = rank.evaluate(rank.score(RANKER, data))
    assert math.isnan(found.labels["click"]["auc"].value)
    assert "click: all rows are 1, so AUC and ranking metrics are undefined" in found.notes
    with pytest.raises(ValueError, match=r"scored must have labels"):
        rank.evaluate(rank.score(RANKER, DATA.with_labels()))
    with pytest.raises(ValueError, match=r"at must be a positive integer, got 0"):
        rank.evaluate(rank.score(RANKER, DATA), at=(0,))


def test_parts_by_a_column_keep_rows_within_their_requests():
    scored = rank.score(RANKER, DATA)
    place = torch.cat([torch.arange(size) for size in DATA.sizes.tolist()]).tolist()
    parts = split_by_column(scored, place)
    assert list(parts) == ["0", "1", "2", "3", "4"]
    for name, part in parts.items():
        assert part.rows.tolist() == [row for row, p in enumerate(place) if p == int(name)]
        # A request that has no such row is none of this part, neither counted nor left out.
        assert part.offsets.diff().tolist() == [1] * sum(size > int(name) for size in DATA.sizes.tolist())
        assert rank.evaluate(part).requests == len(part.rows)
        assert torch.equal(part.logits["buy"], scored.logits["buy"][part.rows])
    numbers = torch.arange(len(DATA.x)).tolist()
    quarters = split_by_column(scored, [None, math.nan, *numbers[2:]])
    assert (
        max(len(p.rows) for p in list(quarters.values())[:4]) - min(len(p.rows) for p in list(quarters.values())[:4])
        <= 1
    )
    words = split_by_column(scored, [f"w{row % 30}" if row % 2 else "often" for row in numbers], most=3)
    assert [*words][::3] == ["often", "others"]
    assert len(words) == 4
    assert sum(len(part.rows) for part in words.values()) == len(numbers)
    click = rank.evaluate(parts["1"]).labels["click"]
    rows = torch.tensor(place) == 1
    assert click["auc"].value == rank.metrics.auc(scored.logits["click"][rows], scored.labels["click"][rows])


class Catalogue(Linear):
    places = torch.tensor([1, 3, 0, 10, 11, 2])

    def next_item_ranks(self, batch):
        assert not self.training
        return self.places[: batch.requests]


def test_places_among_all_items():
    found = rank.evaluate_next_items(Catalogue(), Requests.drawn(6), (3, 10), draws=50)
    values = found.labels["next item"]
    assert values["mrr"].value == pytest.approx((1 + 1 / 3 + 1 / 10 + 1 / 11 + 1 / 2) / 5)
    assert values["hr@3"].value == pytest.approx(3 / 5)
    assert values["hr@10"].value == pytest.approx(4 / 5)
    assert values["ndcg@3"].value == pytest.approx((1 + 1 / 2 + 1 / math.log2(3)) / 5)
    assert values["hr@3"].left_out == 1
    assert values["hr@3"].low < 3 / 5 < values["hr@3"].high
    assert found.notes == ["1 of 6 requests have no positive row, or its item is unknown to the schema: left out"]
    assert found.value("next item:hr@3") == found.value("hr@3")
    with pytest.raises(ValueError, match=r"^rank\.evaluate_next_items: Linear does not rank all items\.$"):
        rank.evaluate_next_items(Linear(), DATA)


def test_which_of_two_values_is_better():
    assert is_better("auc", 0.7, 0.6)
    assert not is_better("auc", 0.6, 0.6)
    assert is_better("click:log_loss", 0.3, 0.4)
    assert not is_better("ece", 0.4, 0.3)
    assert is_better("auc", 0.1, math.nan)
    assert not is_better("auc", math.nan, 0.1)
    assert (parse_cutoffs("ndcg@20"), parse_cutoffs("click:hr@3"), parse_cutoffs("auc")) == ((20,), (3,), ())
