"""The MLP of a LiRank over its fields: whose each number is, strengths by hand, planted pairs, and bad input."""

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

from tigon import rank
from tigon.rank.models.lirank.model import row_requests

FIELDS = {
    "country": rank.Id(side="context"), "age": rank.Number(side="context"), "banner": rank.Id(hash_rows=5, hash="qr"),
    "size": rank.Number(), "site": rank.Id(dim=3), "tags": rank.Ids(pool="attention"), "kinds": rank.Ids(),
    "seen": rank.Time(), "one": rank.Id(vocab=("x",)),
}  # fmt: skip


def table(rows=300, seed=0):
    draw = np.random.default_rng(seed)
    request = np.sort(draw.integers(0, rows // 2, rows))
    words = np.array(["a", "b", "c", "d"])
    return {
        "request": request, "country": words[request % 3].tolist(), "age": (request % 7).astype(float),
        "banner": draw.integers(0, 30, rows), "size": np.where(draw.random(rows) < 0.1, np.nan, draw.normal(size=rows)),
        "site": words[draw.integers(0, 4, rows)].tolist(),
        "tags": [words[draw.integers(0, 4, n)].tolist() for n in draw.integers(0, 3, rows)],
        "kinds": [words[draw.integers(0, 4, 2)].tolist() for _ in range(rows)],
        "seen": 1_700_000_000 + draw.integers(0, 10**6, rows), "one": ["x"] * rows,
        "click": draw.integers(0, 2, rows), "like": draw.integers(0, 2, rows),
    }  # fmt: skip


def read(**more):
    schema = rank.Schema(rank.Roles(request="request", labels=("click", "like")), FIELDS)
    return rank.Impressions.read({**table(), **more}, schema=schema)


def ranker(data, **options):
    torch.manual_seed(1)
    made = rank.LiRank(data.schema, rank.LiRankConfig(4, rank=2, layers=1, **options))
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn_like(p))
        for name, b in made.named_buffers():
            if name.endswith("running_var"):
                b.uniform_(0.5, 2)
    return made.eval()


def x0(made, data):
    batch = data.batch(torch.arange(len(data)))
    return made.inputs(batch.context, batch.items, row_requests(batch, torch.device("cpu"))).detach().double()


def test_a_number_of_the_inputs_belongs_to_the_field_that_changes_it():
    data = read()
    made = ranker(data)
    owners = made.inputs.owners
    assert len(owners) == made.inputs.width
    before, rows = x0(made, data), table()
    for name in FIELDS:
        if name == "one":
            continue
        order = np.arange(len(rows[name]))[::-1] if name not in ("country", "age") else None
        other = [rows[name][n] for n in order] if order is not None else [rows[name][0]] * len(rows[name])
        changed = rank.Impressions.read({**rows, name: other}, schema=made.schema)
        differ = (x0(made, changed) != before).any(0)
        assert differ.tolist() == [owner == name for owner in owners], name


@pytest.mark.parametrize("label", [None, "click", "like"])
@pytest.mark.parametrize(
    "options",
    [
        {"mlp": (6, 5), "tower_mlp": (4,), "towers": {"a": ["click"], "b": ["like"]},
         "weights": {"click": 1, "like": 3}},
        {"mlp": (6,), "cross": "none", "norm": "layer"},
        {"mlp": (), "cross": "none", "tower_mlp": (5, 4), "towers": {"a": ["click"], "b": ["like"]}},
    ],
)  # fmt: skip
def test_strengths_by_hand(options, label):
    data = read()
    made = ranker(data, **options)
    found = rank.extract_mlp(made, data, label)
    assert found.left_out == {"one": "it is constant over all rows"}
    assert set(found.names) == set(FIELDS) - {"one"}
    x, owners = x0(made, data), made.inputs.owners

    def weight(layer):
        norm = layer.norm
        spread = (norm.running_var + norm.eps).sqrt() if hasattr(norm, "running_var") else 1.0
        return (layer.linear.weight * (norm.weight / spread)[:, None]).detach().double().abs()

    def signed(layer):
        return weight(layer) * layer.linear.weight.detach().sign()

    towers = [*made.towers.hidden]
    # Of each label the absolute weights from the first layer to it, one product after another.
    reach = {}
    for n, names in enumerate(made.towers.labels):
        for place, name in enumerate(names):
            total = made.towers.heads[n].weight[place].detach().double().abs()
            for layer in reversed([*towers[n]][0 if made.mlp is not None else 1 :]):
                total = total @ weight(layer)
            if made.mlp is not None:
                total = total[0 if made.cross is None else made.inputs.width :]
                for layer in reversed([*made.mlp][1:]):
                    total = total @ weight(layer)
            reach[name] = total
    weights = {name: made.score_weights[name] if label is None else float(name == label) for name in reach}
    if made.mlp is not None:
        first, want = signed(made.mlp[0]), sum(weights[name] * one for name, one in reach.items())
    else:
        first = torch.cat([signed(tower[0]) for tower in towers])
        want = torch.cat([weights[name] * one for name, one in reach.items()])
    network = found.network
    np.testing.assert_allclose(network.reach, want.numpy(), rtol=1e-6)
    for place, name in enumerate(found.names):
        own = [n for n, owner in enumerate(owners) if owner == name]
        adds = x[:, own] @ first[:, own].T
        np.testing.assert_allclose(network.first[:, place], adds.std(0, correction=0).numpy(), rtol=1e-4, err_msg=name)
    pairs = rank.find_interactions(found, order=2)
    assert len(pairs) == 28
    assert pairs.notes == list(found.notes)


def test_a_planted_pair_is_found_and_becomes_a_cross():
    draw = np.random.default_rng(0)
    rows = {name: draw.integers(0, 4, 1000) for name in ("a", "b", "c", "d")}
    rows["click"] = ((rows["a"] + rows["b"]) % 2 ^ (draw.random(1000) < 0.05)).astype(int)
    schema = rank.Schema({"labels": ["click"]}, {name: rank.Id() for name in "abcd"})
    data = rank.Impressions.read(rows, schema=schema)
    torch.manual_seed(0)
    made = rank.LiRank(data.schema, rank.LiRankConfig(4, "none", mlp=(16,), gate=False))
    rank.fit(made, data, None, rank.FitOptions(epochs=6, batch_size=50, lr=0.03))
    pairs = rank.find_interactions(rank.extract_mlp(made, data), order=2)
    assert pairs[0].features == ("a", "b")
    assert pairs[0].share > 0.6
    small = rank.find_interactions(rank.extract_mlp(rank.quantize_tables(made), data), order=2)
    assert small[0].strength == pytest.approx(pairs[0].strength, rel=0.05)
    crossed = data.schema.replace(pairs.crosses(1, schema=data.schema))
    assert list(crossed.rows)[-1] == "a × b"
    # What the schema has is not made again.
    assert list(pairs.crosses(1, schema=crossed)) != ["a × b"]


def test_crosses_of_a_schema_pass_over_what_has_none():
    data = read()
    pairs = rank.find_interactions(rank.extract_mlp(ranker(data), data), order=2)
    allowed = {"country", "age", "banner", "size", "site"}
    crosses = pairs.crosses(100, schema=data.schema)
    assert len(crosses) == 10
    assert {name for one in crosses.values() for name in one.of} == allowed
    data.schema.replace(crosses)
    with pytest.raises(ValueError, match=r"must combine Id or Number fields of an impression"):
        data.schema.replace(pairs.crosses(100))


@pytest.mark.parametrize(
    ("options", "label", "said"),
    [
        ({"mlp": ()}, None, "must have an MLP over its fields, by mlp=…, got one without"),
        ({"mlp": (), "tower_mlp": (4,)}, None, "must have an MLP over its fields"),
        ({}, "clik", "there is no label 'clik'; did you mean 'click'"),
    ],
)
def test_bad_rankers(options, label, said):
    data = read()
    with pytest.raises(ValueError, match=said):
        rank.extract_mlp(ranker(data, **options), data, label)


def test_bad_data():
    data = read()
    made = ranker(data)
    still = rank.Impressions.read({name: values[:1] for name, values in table().items()}, schema=data.schema)
    with pytest.raises(
        ValueError, match=r"there must be two fields that vary, got 0 .country: it is constant over all"
    ):
        rank.extract_mlp(made, still)
    other = rank.Impressions.read(table(seed=3), schema=rank.Schema(data.schema.roles, FIELDS))
    with pytest.raises(ValueError, match="extract_mlp: data must be read with the ranker's schema"):
        rank.extract_mlp(made, other)
    with pytest.raises(ValueError, match=r"the result of rank.extract_mlp\(ranker, data\).*got the LiRank itself"):
        rank.find_interactions(made)
    with pytest.raises(ValueError, match="names and spread must be omitted: the ranker's fields"):
        rank.find_interactions(rank.extract_mlp(made, data), spread=[1.0])
    ligr = rank.LiGR(
        rank.Schema(rank.Roles("banner", labels="click"), {"banner": rank.Id(side="item", vocab=(1,))}),
        rank.LiGRConfig(8, 1),
    )
    with pytest.raises(ValueError, match=r"must be a rank.LiRank, whose MLP reads row fields, got a LiGR"):
        rank.extract_mlp(ligr, data)
    with torch.no_grad():
        made.mlp[0].linear.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="weights must be finite, but some in layer 1 are not"):
        rank.extract_mlp(made, data)
