"""Crosses: fields made of several others, in a schema, in files and in batches."""

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

from tigon import rank

ITEM = rank.Id(side="item")


def schema_of(**fields):
    own = {
        "item": ITEM, "country": rank.Id(side="context"), "price": rank.Number(), "position": rank.Id(),
        "tags": rank.Ids(), "log": rank.Number(scale="log"), **fields,
    }  # fmt: skip
    return rank.Schema(rank.Roles("item", request="request", labels="click"), own)


def table(rows=400, seed=0):
    draw = np.random.default_rng(seed)
    request = np.sort(draw.integers(0, rows // 4, rows))
    countries = np.array(["at", "be", "ch", None], dtype=object)
    return {
        "request": request, "item": draw.integers(0, 9, rows), "country": countries[request % 4].tolist(),
        "price": np.where(draw.random(rows) < 0.1, np.nan, draw.exponential(size=rows)),
        "position": draw.integers(1, 4, rows), "tags": [["a"]] * rows, "log": draw.exponential(size=rows),
        "click": draw.integers(0, 2, rows),
    }  # fmt: skip


def test_a_cross_tells_combinations_apart():
    crosses = {
        "country × item": rank.Cross(("country", "item"), hash_rows=1_000_000),
        "price × position × item": rank.Cross(["price", "position", "item"], hash_rows=1_000_000, dim=4),
    }
    data = rank.Impressions.read(table(), schema=schema_of(**crosses))
    batch = data.batch(torch.arange(len(data)))
    request = torch.repeat_interleave(torch.arange(batch.requests), batch.offsets.diff())
    price = batch.items["price"]
    part = torch.where(price.isnan(), -1, (16 * torch.special.ndtr(price.double())).clamp(max=15).nan_to_num().long())
    parts = {
        "country × item": (batch.context["country"][request], batch.items["item"]),
        "price × position × item": (part, batch.items["position"], batch.items["item"]),
    }
    for name, values in parts.items():
        codes = batch.items[name]
        assert codes.dtype == torch.int64
        assert 0 < int(codes.min()) <= int(codes.max()) < data.schema.fields[name].rows
        combined = torch.stack(values, 1)
        _, own = combined.unique(dim=0, return_inverse=True)
        _, found = codes.unique(return_inverse=True)
        # The same combination has the same code, and, in so many codes, others have others.
        assert len({*zip(own.tolist(), found.tolist(), strict=True)}) == int(own.max()) + 1 == int(found.max()) + 1
    assert len({int(code) for code in batch.items["country × item"]}) > 20


def test_order_counts_and_missing_values_are_code_0():
    data = {"item": [1, 2, 1, 2], "a": [1, 2, None, None], "b": [2, 1, 1, None], "click": [0, 1, 0, 1]}
    fields = {"item": ITEM, "a": rank.Id(), "b": rank.Id(), "ab": rank.Cross(("a", "b")), "ba": rank.Cross(("b", "a"))}
    schema = rank.Schema(rank.Roles("item", labels="click"), fields)
    batch = rank.Impressions.read(data, schema=schema).batch(torch.arange(4))
    assert len(set(batch.items["ab"].tolist())) == 4
    assert batch.items["ab"][3] == 0
    assert (batch.items["ab"][:3] != batch.items["ba"][:3]).all()
    # The codes are those of every machine: runs are scored where they were not fitted.
    assert batch.items["ab"].tolist() == [46897, 76771, 7536, 0]


def test_a_schema_with_crosses_is_its_file(tmp_path):
    schema = schema_of(both=rank.Cross(("country", "item"), hash_rows=7))
    schema.save(tmp_path / "schema.json")
    assert rank.Schema.load(tmp_path / "schema.json") == schema
    assert '"both": {"kind": "Cross", "hash_rows": 7, "of": ["country", "item"]}' in schema.to_json()
    data = rank.Impressions.read(table(), schema=schema)
    train, held = data.split(by="request", fraction=0.5, seed=0)
    both = rank.Impressions.read(table(), schema=train.schema)
    for part in (train, held):
        mine = part.batch(torch.arange(len(part)))
        same = both.batch(torch.arange(len(both))).items["both"]
        whole = dict(zip(both.batch(torch.arange(len(both))).rows.tolist(), same.tolist(), strict=True))
        assert mine.items["both"].tolist() == [whole[row] for row in mine.rows.tolist()]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: rank.Cross(("a",)), "of must name two fields or more, each once, got"),
        (lambda: rank.Cross("ab"), "of must name two fields or more, each once, got"),
        (lambda: rank.Cross(("a", "a")), "of must name two fields or more, each once, got"),
        (lambda: rank.Cross(("a", 2)), "of must name two fields or more, each once, got"),
        (lambda: rank.Cross(("a", "b"), hash_rows=None), "hash_rows must be an integer of at least 2, got None"),
        (lambda: rank.Cross(("a", "b"), hash_rows=0), "hash_rows must be a"),
        (lambda: rank.Cross(("a", "b"), side="item"), "side must be 'row', got 'item'"),
        (lambda: schema_of(x=rank.Cross(("item", "contry"))), "'x' must combine fields in its schema, got 'contry'"),
        (lambda: schema_of(x=rank.Cross(("item", "tags"))), "Id or Number fields of an impression, got 'tags', Ids"),
        (lambda: schema_of(x=rank.Cross(("item", "log"))), "scale 'quantile', .* got 'log' with scale 'log'"),
        (
            lambda: schema_of(x=rank.Cross(("item", "price")), y=rank.Cross(("x", "item"))),
            "Id or Number fields of an impression, got 'x', Cross",
        ),
        (
            lambda: rank.Schema.from_json(
                '{"roles": {"item": "i"}, "fields": {"i": {"kind": "Id", "side": "item"}, '
                '"x": {"kind": "Cross", "vocab": [1]}}}'
            ),
            "field 'x': Cross has no option 'vocab'",
        ),
        (lambda: rank.Cross(("a", "b")).encode([1]), "values come from the fields 'a', 'b', not from a column"),
    ],
)  # fmt: skip
def test_a_cross_that_means_nothing_gets_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
