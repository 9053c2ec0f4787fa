"""Links: planted edges come back, the fit is the optimum of its formula, and edges add up to what a search adds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tigon import retrieve
from tigon.retrieve.links import logistic
from tigon.retrieve.links.links import LinkOptions, Links

PLANTED = {
    ("occupation", "nurse", "tags", "ward"): 2.5, ("occupation", "pilot", "tags", "night"): 2.0,
    ("occupation", "cook", "tags", "ward"): -2.5, ("hobbies", "chess", "kind", 7): 2.0,
}  # fmt: skip
QUERIES = retrieve.Schema(occupation=retrieve.Category(), hobbies=retrieve.Tags(3))
ITEMS = retrieve.Schema(tags=retrieve.Tags(6), kind=retrieve.Category(), price=retrieve.Number())
COLUMNS = {"query_schema": QUERIES, "item_schema": ITEMS, "query_id": "id", "item_id": "id"}
LABELS = ["ward", "night", "new", "remote", "team", "lead"]


def fit(queries, items, pairs, *, columns=COLUMNS, **options):
    return Links.fit(queries, items, pairs, **columns, options=LinkOptions(**{"l1": 2e-3} | options))


def drawn(rng, values, most):
    return [rng.choice(values, rng.integers(0, most + 1), replace=False).tolist() for _ in range(600)]


def made():
    """Queries, items, and pairs that are confirmed with the probability of the planted edges."""
    rng = np.random.default_rng(3)
    hobbies = drawn(rng, ["chess", "golf", "music"], 2)
    queries = {"id": np.arange(600) * 3, "occupation": rng.choice(["nurse", "pilot", "cook", "clerk"], 600).tolist()}
    queries |= {"hobbies": hobbies, "age": np.arange(600)}
    items = {"id": [f"i{n}" for n in range(600)], "tags": drawn(rng, LABELS, 3)}
    items |= {"kind": rng.integers(6, 9, 600), "price": np.ones(600)}
    pairs = []
    for q, i in rng.integers(0, 600, (24_000, 2)):
        has = {("occupation", queries["occupation"][q]), *(("hobbies", h) for h in hobbies[q])}
        of = {("kind", int(items["kind"][i])), *(("tags", t) for t in items["tags"][i])}
        z = -2 + sum(weight for edge, weight in PLANTED.items() if edge[:2] in has and edge[2:] in of)
        if rng.random() < 1 / (1 + np.exp(-z)):
            pairs.append((int(q) * 3, f"i{i}"))
    return queries, items, pairs


@pytest.fixture(scope="module")
def data():
    return made()


@pytest.fixture(scope="module")
def links(data):
    return fit(*data)


@pytest.fixture(scope="module")
def few(data):
    """The data with an eighth of the pairs, where what was recovered does not matter: a fit is a tenth of the work."""
    queries, items, pairs = data
    return queries, items, pairs[:500]


@pytest.fixture(scope="module")
def links_of_few(few):
    return fit(*few)


def test_planted_edges_are_recovered(links):
    found = links.edges(None).to_pylist()
    weights = {tuple(edge.values())[:4]: edge["weight"] for edge in found}
    planted = {tuple(map(str, edge)): weight for edge, weight in PLANTED.items()}
    for edge, weight in planted.items():
        assert weights[edge] * weight > 0.2
    # Of 7 × 9 pairs of attributes the penalty leaves few others, which are lighter.
    others = [abs(weight) for edge, weight in weights.items() if edge not in planted]
    assert len(others) <= 12
    assert max(others, default=0) < min(abs(weights[edge]) for edge in planted)
    assert [edge["weight"] for edge in found] == sorted(weights.values(), reverse=True)


def test_a_larger_penalty_keeps_fewer_edges(few, links_of_few):
    assert len(links_of_few) > len(fit(*few, l1=1e-2)) > 0
    assert len(fit(*few, l1=1.0)) == 0
    every = fit(*few, l1=0)
    assert len(every) == 63


def test_edges_from_a_weight_on(links):
    every = links.edges(None)
    assert len(every) == len(links)
    assert links.edges().num_rows == sum(weight >= 0 for weight in every["weight"].to_pylist())
    assert links.edges(0.5).num_rows == sum(weight >= 0.5 for weight in every["weight"].to_pylist()) < len(every)
    assert every.schema.field("item_value").type == "string"  # of text and integers


def test_the_fit_is_the_optimum(data):
    """Against the optimality conditions of the formula, computed from dense features in fp64."""
    g = torch.Generator().manual_seed(0)
    F = (torch.rand(500, 20, generator=g) < 0.2).double()
    truth = torch.zeros(20, dtype=torch.float64)
    truth[:3] = torch.tensor([2.0, -2.0, 1.5])
    target = (torch.rand(500, generator=g) < torch.sigmoid(F @ truth - 0.5)).double()
    row, features = F.nonzero(as_tuple=True)
    starts = torch.searchsorted(row, torch.arange(500))
    for l1 in (0.02, 0.005):
        fitted = logistic.fit(features, starts, target, 20, l1, 2000)
        assert fitted.converged
        r = torch.sigmoid(F @ fitted.weights + fitted.intercept) - target
        slope = F.t() @ r / 500
        there = fitted.weights != 0
        assert 0 < there.sum() < 20
        assert (slope[~there].abs() <= l1 * (1 + 1e-2)).all()
        assert torch.allclose(slope[there], -l1 * fitted.weights[there].sign(), atol=1e-2 * l1)
        assert abs(r.mean()) <= 1e-2 * l1


def test_examples_without_attributes(data):
    """Only the intercept can tell what it is: the share of the confirmed ones."""
    none = torch.zeros(0, dtype=torch.int64)
    target = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    fitted = logistic.fit(none, torch.zeros(4, dtype=torch.int64), target, 0, 0.1, 100)
    assert fitted.converged
    assert fitted.intercept == pytest.approx(np.log(1 / 3))


def test_too_few_steps_warn(data):
    with pytest.warns(UserWarning, match=r"Links.fit: not converged in 2 steps"):
        fit(*data, steps=2)


def test_the_same_seed_gives_the_same_bits(few, links_of_few):
    again, other = (fit(*few, seed=seed) for seed in (0, 1))
    assert again.edges(None).equals(links_of_few.edges(None))
    assert again.bias == links_of_few.bias
    assert not other.edges(None).equals(links_of_few.edges(None))


def test_pairs_of_any_kind(few, links_of_few):
    import pandas
    import pyarrow

    queries, items, pairs = few
    q, i = zip(*pairs, strict=True)
    for given in (pandas.DataFrame({"q": q, "i": i}), pyarrow.table({"a": q, "b": i})):
        found = fit(pyarrow.table(queries), pandas.DataFrame(items), given)
        assert found.edges(None).equals(links_of_few.edges(None))
    rows = np.array([(a // 3, int(b[1:])) for a, b in pairs])
    by_rows = fit(queries, items, rows, columns=COLUMNS | {"query_id": None, "item_id": None})
    assert by_rows.edges(None).equals(links_of_few.edges(None))


def test_explanations_leave_out_what_no_edge_knows(links):
    some = links.explain({"occupation": "nurse", "hobbies": []}, {"tags": ["ward", "never"], "kind": None})
    assert len(some) == 1
    assert str(some[0]).startswith("occupation=nurse → tags=ward, +")
    assert links.explain({"occupation": "astronaut", "hobbies": None}, {"tags": ["ward"], "kind": 7}) == []


def test_a_filter_lets_through_where_an_edge_leads(data, links):
    queries = {"occupation": ["nurse", "clerk", "nurse"], "hobbies": [[], [], ["chess"]]}
    ward, nothing, both = links.filter(queries, min_weight=0.3)
    assert str(ward) == "tags has_any ('ward',)"
    assert str(both) == "tags has_any ('ward',) or kind in (7,)"
    index = retrieve.Index(4, 600, schema=ITEMS)
    items = data[1]
    index.upsert(items["id"], torch.ones(600, 4), {name: items[name] for name in ITEMS})
    hits = index.search(torch.ones(2, 4), k=600, where=[ward, nothing])
    has = {name for name, tags in zip(items["id"], items["tags"], strict=True) if "ward" in tags}
    assert {name for name in hits.ids[0] if name is not None} == has
    assert all(name is None for name in hits.ids[1])


def test_files(links, tmp_path):
    path = tmp_path / "links.safetensors"
    for _ in range(2):  # what is there is replaced
        links.save(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    loaded = Links.load(path)
    assert loaded.edges(None).equals(links.edges(None))
    assert loaded.bias == links.bias
    queries = {"occupation": ["nurse", "pilot"], "hobbies": [["chess"], []]}
    assert torch.equal(loaded.weigh(queries).weights, links.weigh(queries).weights)
    assert loaded.weigh(queries).values == links.weigh(queries).values
    safetensors = pytest.importorskip("safetensors.numpy")
    assert set(safetensors.load_file(path)) == {"about", "query", "item", "weight"}


def test_a_disk_that_is_full_leaves_what_was_there(links, tmp_path, monkeypatch):
    path = tmp_path / "links.safetensors"
    links.save(path)
    before = path.read_bytes()

    def full(file, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tigon.retrieve.storage.disk.write", full)
    with pytest.raises(OSError, match="No space"):
        links.save(path)
    assert path.read_bytes() == before
    assert len([*tmp_path.iterdir()]) == 1


SMALL = {"a": ["x", "y"], "id": [1, 2]}, {"b": [["u"], ["v"]], "id": ["p", "q"]}
PLAIN = {"query_schema": retrieve.Schema(a=retrieve.Category()), "item_schema": retrieve.Schema(b=retrieve.Tags(2))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": []}, r"pairs must hold at least one confirmed pair, got none"),
        ({"pairs": np.zeros((0, 2), dtype=int)}, r"pairs must hold at least one confirmed pair, got none"),
        ({"pairs": [(0, 0, 0)]}, r"pairs must be \(query, item\) pairs"),
        ({"pairs": np.zeros((2, 3), dtype=int)}, r"pairs must be \(pairs, 2\), each a query and an item, got \(2, 3\)"),
        ({"pairs": {"q": [0]}}, r"pairs must be a two-column table, queries and items, got 'q'"),
        ({"pairs": [(0, 2)]}, r"pairs name 2 for items, but the table has 2 rows"),
        ({"pairs": [("1", 1)]}, r"pairs must name queries by row number when no id column is given, got text"),
        ({"pairs": [(3, 0)], "query_id": "id"}, r"pairs name 3, which is not in the column 'id' for queries"),
        ({"pairs": [(0, "r")], "item_id": "id"}, r"pairs name 'r', which is not in the column 'id' for items"),
        ({"pairs": [(0, 1)], "item_id": "id"}, r"ids for items are text in the table and integers in pairs"),
        ({"query_id": "no"}, r"the table for queries must have the id column 'no'"),
        ({"queries": {"a": ["x", "y"], "id": [1, 1]}, "query_id": "id"}, r"the column 'id' for queries .* repeats 1"),
        ({"queries": {"A": ["x", "y"]}}, r"the table for queries must have the column 'a', a Category; there are 'A'"),
        ({"items": {"b": ["u", "v"]}}, r"column 'b' \(Tags\) for items, row 0: must be a list of strings or integers"),
        ({"query_schema": PLAIN}, r"query_schema must be a retrieve.Schema, got dict"),
        ({"query_schema": retrieve.Schema(a=retrieve.Number())}, r"columns in query_schema must be .* 'a', a Number"),
        ({"item_schema": retrieve.Schema(b=retrieve.Number())}, r"item_schema must have a Category or"),
        ({"pairs": [(0, 0), (0, 1)]}, r"pairs must leave some pairs unconfirmed, got every query with every item"),
    ],
)  # fmt: skip
def test_what_is_refused(change, message):
    given = {"queries": SMALL[0], "items": SMALL[1], "pairs": [(0, 0)], **PLAIN, **change}
    tables = [given.pop(name) for name in ("queries", "items", "pairs")]
    with pytest.raises(ValueError, match=f"^Links.fit: {message}"):
        Links.fit(*tables, **given)


def test_options_that_are_refused():
    with pytest.raises(ValueError, match=r"^LinkOptions: l1 must be a number, 0 or more, got -1"):
        LinkOptions(l1=-1)
    with pytest.raises(ValueError, match=r"^LinkOptions: negatives must be a positive integer, got 0"):
        LinkOptions(negatives=0)


def test_columns_that_are_wanting(links):
    for call in (links.weigh, links.filter):
        with pytest.raises(ValueError, match=r"queries must have the column 'hobbies', a Tags; there is 'hobby'\.$"):
            call({"occupation": ["nurse"], "hobby": [[]]})
    with pytest.raises(ValueError, match=r"Links.explain: attributes for queries must be a dict .* got str"):
        links.explain("nurse", {"tags": [], "kind": 7})
