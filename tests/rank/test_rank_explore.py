"""Exploring: the posterior is the written sum, draws have its covariance, and requests have a draw each."""

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")
pytest.importorskip("safetensors")

from tigon import rank
from tigon.rank.models.explorer import WeightSampler

ROWS = 240


def table(rows=ROWS, seed=0):
    draw = np.random.default_rng(seed)
    banner, size = draw.integers(6, size=rows), draw.normal(size=rows)
    return {
        "request": np.arange(rows) // 4, "banner": [f"b{b}" for b in banner], "size": size,
        "click": (draw.random(rows) < 1 / (1 + np.exp(-size))).astype(int), "long": (banner < 2).astype(int),
    }  # fmt: skip


@pytest.fixture(scope="module")
def data():
    return rank.Impressions.read(table(), labels=["click", "long"])


@pytest.fixture
def ranker(data):
    torch.manual_seed(0)
    found = rank.LiRank(
        data.schema,
        rank.LiRankConfig(width=4, layers=1, rank=2, mlp=(5,), towers={"a": ["click"], "b": ["long"]},
                        tower_mlp=(3,))).eval()  # fmt: skip
    with torch.no_grad():
        for p in found.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return found


def features(ranker, data, label):
    (batch,) = data.batches(requests=len(data))
    with torch.no_grad():
        phi = ranker.features(batch, label).double()
    return torch.cat((phi, phi.new_ones(len(phi), 1)), 1), batch


@pytest.mark.parametrize("label", ["click", "long"])
def test_the_precision_is_the_sum_over_the_rows(ranker, data, label):
    found = rank.Explorer.fit(ranker, data, rank.BatchOptions(7), ridge=0.5)
    phi, batch = features(ranker, data, label)
    with torch.no_grad():
        p = ranker(batch)[label].double().sigmoid()
    expected = 0.5 * torch.eye(4).double() + sum(q * (1 - q) * torch.outer(x, x) for q, x in zip(p, phi, strict=True))
    torch.testing.assert_close(found.precision[label], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(phi @ found.mean[label], torch.logit(p), rtol=1e-4, atol=1e-5)


def test_row_weights_count_rows(ranker):
    once = {**table(), "sample_weight": np.where(np.arange(ROWS) < 40, 2.0, 0.0)}
    twice = {name: [*values[:40], *values[:40]] for name, values in table().items()}
    twice["request"] = np.arange(80) // 4
    of = {}
    for name, rows in (("weighted", once), ("twice", twice)):
        schema = ranker.schema
        if name == "weighted":
            schema = rank.Schema(rank.Roles(request="request", labels=("click", "long"), weight="sample_weight"),
                                 schema.fields)  # fmt: skip
        of[name] = rank.Explorer.fit(ranker, rank.Impressions.read(rows, schema=schema))
    torch.testing.assert_close(of["weighted"].precision["click"], of["twice"].precision["click"], rtol=1e-5, atol=1e-5)


def test_of_a_large_table_a_part_counts_for_all(ranker, data):
    whole = rank.Explorer.fit(ranker, data).precision["click"]
    part = rank.Explorer.fit(ranker, data, rank.BatchOptions(4), rows=120).precision["click"]
    assert not torch.equal(part, whole)
    assert 0.8 < float(part.trace() / whole.trace()) < 1.25


def test_draws_have_the_mean_and_the_covariance():
    precision = torch.tensor([[4.0, 1.0], [1.0, 0.5]]).double()
    mean = torch.tensor([1.0, -2.0]).double()
    found = rank.Explorer({"click": mean}, {"click": precision})
    w = WeightSampler(found, 0.5, seed=3).weights("click", 40_000)
    # Three standard errors of each.
    covariance = 0.25 * precision.inverse()
    off = 3 * (covariance.diag() / 40_000).sqrt()
    assert ((w.mean(0) - mean).abs() < off).all()
    scale = covariance.diag().sqrt()
    assert ((w.T.cov() - covariance) / torch.outer(scale, scale)).abs().max() < 3 * 2**0.5 / 200


def test_a_request_has_one_draw(ranker, data):
    explorer = rank.Explorer.fit(ranker, data)
    found = rank.score(ranker, data, sampler=rank.sample_weights(ranker, 0.7, seed=5))
    phi, batch = features(ranker, data, "long")
    w = WeightSampler(explorer, 0.7, 5).weights("long", len(data))
    request = torch.repeat_interleave(batch.offsets.diff())
    torch.testing.assert_close(found.logits["long"], (phi * w[request]).sum(1).float(), rtol=1e-4, atol=1e-4)
    # A matter of the seed, and not of how requests are cut.
    again = rank.score(ranker, data, rank.BatchOptions(7), sampler=rank.sample_weights(ranker, 0.7, seed=5))
    torch.testing.assert_close(again.score, found.score, rtol=1e-5, atol=1e-6)
    other = rank.score(ranker, data, sampler=rank.sample_weights(ranker, 0.7, seed=6))
    assert (other.score - found.score).abs().max() > 0.05
    plain = rank.score(ranker, data)
    mean = rank.score(ranker, data, sampler=rank.sample_weights(ranker, 0.0, seed=5))
    torch.testing.assert_close(mean.score, plain.score, rtol=1e-6, atol=1e-6)
    assert (found.score - plain.score).abs().mean() > 0.01


def test_calibration_comes_behind_the_draw(data):
    torch.manual_seed(1)
    ranker = rank.LiRank(data.schema, rank.LiRankConfig(width=4, layers=1, rank=2, mlp=(5,), calibrate=True)).eval()
    with torch.no_grad():
        for layer in ranker.isotonic:
            layer.bias.fill_(1.5)
    rank.Explorer.fit(ranker, data)
    drawn = rank.score(ranker, data, sampler=rank.sample_weights(ranker, 1e-6)).logits["click"]
    torch.testing.assert_close(drawn, rank.score(ranker, data).logits["click"], rtol=1e-3, atol=1e-3)


def test_choices_count_which_candidate_a_draw_puts_first(ranker, data):
    explorer = rank.Explorer.fit(ranker, data)
    found = rank.estimate_propensities(ranker, data, 0.8, label="click", draws=50, seed=2)
    phi, _ = features(ranker, data, "click")
    z = (phi @ WeightSampler(explorer, 0.8, 2).weights("click", 50).T).view(-1, 4, 50)
    expected = torch.nn.functional.one_hot(z.argmax(1), 4).double().mean(1).flatten()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.view(-1, 4).sum(1), torch.ones(len(data)))
    greedy = rank.estimate_propensities(ranker, data, 0.0, draws=3).view(-1, 4)
    assert torch.equal(greedy.argmax(1), rank.score(ranker, data).logits["click"].view(-1, 4).argmax(1))


def test_it_is_saved_beside_the_ranker(ranker, data, tmp_path):
    rank.Explorer.fit(ranker, data)
    ranker.save_pretrained(tmp_path)
    loaded = rank.Ranker.from_pretrained(tmp_path)
    assert torch.equal(
        rank.score(loaded, data, sampler=rank.sample_weights(loaded, 1.0)).score,
        rank.score(ranker, data, sampler=rank.sample_weights(ranker, 1.0)).score,
    )
    small = rank.quantize_tables(ranker)
    torch.testing.assert_close(
        rank.score(small, data, sampler=rank.sample_weights(small, 1.0)).score,
        rank.score(ranker, data, sampler=rank.sample_weights(ranker, 1.0)).score,
        atol=0.05,
        rtol=0,
    )
    ranker.explorer = None
    ranker.save_pretrained(tmp_path)
    assert rank.Ranker.from_pretrained(tmp_path).explorer is None


def test_candidates_of_histories_are_explored_too():
    rows = table(40) | {"item": [f"i{n % 7}" for n in range(40)]}
    data = rank.Impressions.read(rows, labels=["click"])
    torch.manual_seed(0)
    ranker = rank.LiGR(data.schema, rank.LiGRConfig(width=8, layers=1, heads=2)).eval()
    explorer = rank.Explorer.fit(ranker, data)
    (batch,) = data.batches(requests=len(data))
    with torch.no_grad():
        phi = ranker.label_features(batch)["click"]
        weight, bias = ranker.last_layer()["click"]
        torch.testing.assert_close(phi @ weight + bias, ranker(batch)["click"])
    assert explorer.precision["click"].shape == (9, 9)
    drawn = rank.score(ranker, data, sampler=rank.sample_weights(ranker, 1.0)).logits["click"]
    assert (drawn - rank.score(ranker, data).logits["click"]).abs().mean() > 0.1


def test_sentences(ranker, data):
    with pytest.raises(ValueError, match=r"explore needs rank.Explorer.fit\(ranker, data\) first"):
        rank.score(ranker, data, sampler=rank.sample_weights(ranker, 0.1))
    rank.Explorer.fit(ranker, data)
    with pytest.raises(ValueError, match="explore must be at least 0, got -1"):
        rank.score(ranker, data, sampler=rank.sample_weights(ranker, -1.0))
    with pytest.raises(ValueError, match="label must be one of click, long, got 'buy'"):
        rank.estimate_propensities(ranker, data, 0.1, label="buy")
    with torch.no_grad():
        ranker.towers.heads[0].weight.add_(0.1)
    with pytest.raises(ValueError, match="weights, which have changed since"):
        rank.score(ranker, data, sampler=rank.sample_weights(ranker, 0.1))
    with pytest.raises(ValueError, match="ridge must be above 0, got 0"):
        rank.Explorer.fit(ranker, data, ridge=0)
    module = torch.nn.Identity()
    module.schema = data.schema
    with pytest.raises(ValueError, match="a ranker with a last layer per label; Identity has no last layer"):
        rank.Explorer.fit(module, data)
