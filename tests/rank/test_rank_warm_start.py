"""Going on from a ranker: Fisher information by its definition, the written penalty, rows that keep their places."""

import dataclasses

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")
pytest.importorskip("safetensors")
pytest.importorskip("accelerate")

from tigon import rank
from tigon.rank.data.fields import Id, Ids, Number
from tigon.rank.training.warm_start import QuadraticPenalty


def table(rows=160, banners=5, seed=0, **more):
    draw = np.random.default_rng(seed)
    banner = draw.integers(banners, size=rows)
    return {
        "banner": [f"b{b}" for b in banner], "visitor": draw.integers(4, size=rows) + 10,
        "tags": [[f"t{b}", f"t{b % 2}"] for b in banner], "size": draw.normal(size=rows),
        "click": (draw.random(rows) < np.where(banner % 2, 0.8, 0.2)).astype(int), **more,
    }  # fmt: skip


FIELDS = {
    "banner": Id(), "visitor": Id(dim=4), "hashed": Id(hash_rows=3, hash="qr"), "tags": Ids(pool="attention", dim=4),
    "size": Number(scale="none"),
}  # fmt: skip
OPEN = rank.Schema(rank.Roles(labels=("click",)), {n: f for n, f in FIELDS.items() if n != "hashed"})


@pytest.fixture(scope="module")
def data():
    return rank.Impressions.read(table(), schema=OPEN)


def made(data, **options):
    torch.manual_seed(0)
    return rank.LiRank(data.schema, rank.LiRankConfig(**{"width": 4, "layers": 1, "rank": 2, "mlp": (5,), **options}))


# ------------------------------------------------------------------------------------------------- how sure the data is


def test_fisher_is_the_mean_square_of_a_row_s_gradient(data):
    weight = np.random.default_rng(1).random(160) * 2
    roles = rank.Roles(labels=("click",), weight="w")
    data = rank.Impressions.read(table(w=weight), schema=rank.Schema(roles, data.schema.fields))
    ranker = made(data)
    with torch.no_grad():
        for p in ranker.parameters():
            p.add_(0.2 * torch.randn_like(p))
    ranker.train()
    draws = [rank.FisherPrior.estimate(ranker, data, rank.BatchOptions(80), seed=seed, label_weights={"click": 2.0})
             for seed in range(40)]  # fmt: skip
    assert ranker.training
    ranker.eval()
    names = dict(ranker.named_parameters())
    expected = {name: torch.zeros_like(p) for name, p in names.items()}
    for batch in data.batches(requests=1):
        z = ranker(batch)["click"][0]
        p = float(z.detach().sigmoid())
        # E over y of ((σ(z) − y) ∂z/∂w)²; twice a label's loss is twice its information.
        scale = 2 * p * (1 - p) * float(batch.weights[0])
        grads = torch.autograd.grad(z, list(names.values()), allow_unused=True)
        for of, g in zip(expected.values(), grads, strict=True):
            if g is not None:
                of += scale * g.square() / len(data)
    for name in names:
        found = torch.stack([prior.fisher[name] for prior in draws])
        error = (found.mean(0) - expected[name]).abs()
        assert (error <= 5 * found.std(0) / len(draws) ** 0.5 + 1e-7).all(), name
        assert torch.equal(draws[0].weights[name], names[name])
    assert float(expected["towers.heads.0.weight"].abs().max()) > 1e-3


def test_at_most_so_many_batches_are_read(data):
    class Counted:
        schema, seen = data.schema, 0

        def __len__(self):
            return len(data)

        def batches(self, **options):
            for batch in data.batches(**options):
                self.seen += 1
                yield batch

    counted = Counted()
    rank.FisherPrior.estimate(made(data), counted, rank.BatchOptions(10), batches=3)
    assert counted.seen <= 4


def test_the_pull_is_the_gradient_of_the_penalty(data):
    ranker = made(data)
    names = dict(ranker.named_parameters())
    draw = torch.Generator().manual_seed(0)

    def prior():
        fisher = {name: torch.rand(p.shape, generator=draw) for name, p in names.items()}
        weights = {name: torch.randn(p.shape, generator=draw) for name, p in names.items()}
        fisher["inputs.slope"].zero_()  # nothing holds it
        return rank.FisherPrior(weights, fisher)

    first, last = prior(), prior()
    before = {name: torch.randn(p.shape, generator=draw) for name, p in names.items()}
    for name, p in names.items():
        p.grad = None if name == "inputs.shift" else before[name].clone()
    QuadraticPenalty(ranker, [first, last], 0.3).add()
    added = {name: p.grad - (0 if name == "inputs.shift" else before[name]) for name, p in names.items()}
    penalty = 0.15 * sum(
        ((p - one.weights[name]).square() * one.fisher[name]).sum()
        for one in (first, last)
        for name, p in names.items()
    )
    for (name, found), g in zip(added.items(), torch.autograd.grad(penalty, list(names.values())), strict=True):
        torch.testing.assert_close(found, g, rtol=1e-4, atol=1e-5, msg=name)
    assert not added["inputs.slope"].any()


def test_a_fit_stays_near_what_its_anchor_is_sure_of(data):
    ranker = made(data)
    rank.fit(ranker, data, None, rank.FitOptions(lr=0.02, epochs=2, batch_size=40))
    prior = rank.FisherPrior.estimate(ranker, data)
    other = rank.Impressions.read(table(seed=1, click=np.arange(160) % 2), schema=data.schema)
    off = {}
    for strength in (0.0, 1000.0):
        going = rank.expand_vocabularies(ranker, data.schema)
        options = rank.FitOptions(lr=0.01, epochs=3, batch_size=40, prior_strength=strength)
        rank.fit(going, other, None, options, priors=[prior])
        off[strength] = sum(
            float((prior.fisher[name].cpu() * (p.detach().cpu() - prior.weights[name].cpu()).square()).sum())
            for name, p in going.named_parameters()
        )
    assert off[1000.0] < 0.3 * off[0.0]


# --------------------------------------------------------------------------------------------------- rows keep places


def newer(schema, **more):
    return rank.Impressions.read(table(banners=9, seed=2, **more), schema=schema.expandable())


@pytest.mark.parametrize("calibrate", [False, "banner"])
def test_a_grown_ranker_scores_old_rows_to_the_same_bits(data, calibrate):
    ranker = made(data, calibrate=calibrate).eval()
    with torch.no_grad():
        for p in ranker.parameters():
            p.add_(0.3 * torch.randn_like(p))
    new = newer(data.schema, visitor=np.arange(160) % 7 + 8)
    assert new.schema.fields["banner"].vocab == ("b0", "b1", "b2", "b3", "b4", "b5", "b6", "b7", "b8")
    assert new.schema.fields["visitor"].vocab == (10, 11, 12, 13, 8, 9, 14)
    assert not new.schema.is_open
    grown = rank.expand_vocabularies(ranker, new.schema)
    assert not grown.training
    again = rank.Impressions.read(table(), schema=new.schema)
    assert torch.equal(rank.score(grown, again).score, rank.score(ranker, data).score)
    prior = rank.FisherPrior.estimate(ranker, data)
    onto = prior.expand_to(ranker, grown)
    same = {name for name, p in grown.named_parameters() if torch.equal(onto.weights[name], p)}
    assert same == set(onto.weights)
    for name, h in onto.fisher.items():
        assert float(h.sum()) == pytest.approx(float(prior.fisher[name].sum()), rel=1e-5)
    rank.fit(grown, new, None, rank.FitOptions(epochs=1, batch_size=80), priors=[onto])


def test_rankers_of_histories_grow_too():
    def read(rows, schema=None):
        roles = {} if schema is not None else {"labels": ["click"]}
        return rank.Impressions.read(rows, schema=schema, **roles)

    old = read({"item": ["a", "b", "c", "a"], "click": [0, 1, 0, 1]})
    torch.manual_seed(0)
    ranker = rank.LiGR(old.schema, rank.LiGRConfig(width=8, layers=1, heads=2)).eval()
    new = read({"item": ["0", "b", "d", "a"], "click": [0, 1, 0, 1]}, old.schema.expandable())
    grown = rank.expand_vocabularies(ranker, new.schema)
    again = read({"item": ["a", "b", "c", "a"], "click": [0, 1, 0, 1]}, new.schema)
    assert torch.equal(rank.score(grown, again).score, rank.score(ranker, old).score)
    onto = rank.FisherPrior.estimate(ranker, old).expand_to(ranker, grown)
    rank.fit(grown, new, None, rank.FitOptions(epochs=1), priors=[onto])


def test_the_part_to_train_on_says_what_is_new(data):
    rows = table(rows=40, banners=5, seed=3, banner=["b1"] * 20 + ["x"] * 10 + ["y"] * 10)
    rows["at"] = [f"2026-01-{1 + n // 2:02d}" for n in range(40)]
    schema = rank.Schema(rank.Roles(labels=("click",), time="at"), data.schema.expandable().fields)
    train, held = rank.Impressions.read(rows, schema=schema).split(fraction=0.25)
    assert train.schema.fields["banner"].vocab == ("b0", "b1", "b2", "b3", "b4", "x")
    assert held.schema == train.schema


def test_priors_and_growing_schemas_are_saved(data, tmp_path):
    ranker = made(data)
    first, last = (rank.FisherPrior.estimate(ranker, data, seed=seed) for seed in (0, 1))
    rank.save_priors(tmp_path, [first, last])
    found = rank.load_priors(tmp_path)
    assert len(found) == 2
    for one, other in zip(found, (first, last), strict=True):
        for part in ("weights", "fisher"):
            mine, saved = getattr(one, part), getattr(other, part)
            assert mine.keys() == saved.keys()
            assert all(torch.equal(mine[name], saved[name]) for name in mine)
    growing = data.schema.expandable()
    assert growing.is_open
    assert rank.Schema.from_json(growing.to_json()) == growing


# ----------------------------------------------------------------------------------------------------------- bad input


def test_vocabularies_that_changed_otherwise_are_refused(data, tmp_path):
    ranker, fields = made(data), data.schema.fields

    def refuse(said, **changed):
        with pytest.raises(ValueError, match=said):
            rank.expand_vocabularies(ranker, data.schema.replace(changed))

    vocab = fields["banner"].vocab

    def banner(*values):
        return dataclasses.replace(fields["banner"], vocab=values)

    refuse("for 'banner' 'b1' in place of 'b0', whose row it would read", banner=banner("b1", "b0", *vocab[2:]))
    refuse("for 'banner' none in place of 'b4'", banner=banner(*vocab[:-1]))
    refuse("different options for 'size'", size=Number(scale="log", center=0.0, spread=2.0))
    refuse("different options for 'visitor'", visitor=dataclasses.replace(fields["visitor"], dim=8))
    refuse("difference in 'more': the ranker has no such field", more=Number(scale="none"))
    turned = rank.Schema(data.schema.roles, dict(reversed(fields.items())))
    with pytest.raises(ValueError, match="fields in the ranker's order, banner, visitor"):
        rank.expand_vocabularies(ranker, turned)
    with pytest.raises(ValueError, match=r"must have the ranker's labels \['click'\], got \['size>=0'\]"):
        rank.expand_vocabularies(ranker, rank.Schema(rank.Roles(labels=("size >= 0",)), fields))
    with pytest.raises(ValueError, match=r"column 'visitor' .* vocab holds integers such as 10, .* got 'anna'"):
        newer(data.schema, visitor=["anna"] * 160)
    with pytest.raises(ValueError, match="grows=True needs a vocab"):
        Id(grows=True)
    with pytest.raises(ValueError, match=r"which rank\.save_priors writes"):
        rank.load_priors(tmp_path)


def test_fits_that_an_anchor_says_nothing_of_are_refused(data):
    ranker = made(data)
    prior = rank.FisherPrior.estimate(ranker, data)
    for options, said in (
        ({"loss": "softmax"}, "loss must be bce on impressions .* got softmax"),
        ({"table_optimizer": "row-adagrad"}, "table_optimizer must be adamw with priors"),
    ):
        with pytest.raises(ValueError, match=said):
            rank.fit(ranker, data, None, rank.FitOptions(**options), priors=[prior])
    new = newer(data.schema)
    with pytest.raises(ValueError, match=r"whose inputs.groups.0.tables.weight is .*prior.expand_to\(old, ranker\)"):
        rank.fit(rank.expand_vocabularies(ranker, new.schema), new, None, rank.FitOptions(), priors=[prior])
    with pytest.raises(ValueError, match="prior_strength must be at least 0"):
        rank.FitOptions(prior_strength=-1.0)
