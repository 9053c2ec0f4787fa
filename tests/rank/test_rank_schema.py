"""Schemas: what is inferred of tables, JSON there and back, and what is refused."""

import json
import math

import pytest

pa = pytest.importorskip("pyarrow")

from tigon.rank import Id, Ids, Impressions, Number, Roles, Schema, Text, Time, infer_schema  # noqa: E402

ROWS = {
    "session_id": ["s1", "s1", "s2", "s2", "s3"],
    "user_id": ["u", "u", "v", "v", "u"],
    "timestamp": [100, 100, 200, 200, 300],
    "item_id": [7, 8, 7, 9, 8],
    "click": [1, 0, 0, 1, 0],
    "position": [1, 2, 1, 2, 1],
    "price": [1.5, 2.5, 1.5, 9.0, 2.5],
    "shown": [0.1, 0.7, 0.3, 0.2, 0.9],
    "device": ["tv", "tv", "phone", "phone", "tv"],
    "query": ["a long one of many words", "a long one of many words", "so is this one too", "so is this one too", "x"],
    "embedding": [[0.5]] * 5,
    "version": [3] * 5,
    "nothing": [None] * 5,
    "sample_weight": [1.0] * 5,
}
HISTORY = {
    "user": ["u", "v"], "item": [9, 8], "time": ["1970-01-01", "1970-01-02"], "rating": [5, 4], "volume": [0.5, 0.7],
}  # fmt: skip
ITEMS = {
    "item_id": [7, 8, 9], "genres": [["a"], ["a", "b"], []], "released": ["1995-01-01", "1996-02-03", None],
    "pages": [100, 2000, 35],
}  # fmt: skip
USERS = {"user_id": ["u", "v"], "age": [31, 44], "member": [True, False]}


def read(**changes):
    return Impressions.read(ROWS, **{"history": HISTORY, "items": ITEMS, "users": USERS} | changes)


def test_what_is_inferred():
    schema = read().schema
    assert schema.roles == Roles(
        item="item_id", request="session_id", user="user_id", time="timestamp", labels=("click",), action=("rating",),
        weight="sample_weight",
    )  # fmt: skip
    kinds = {name: (type(field), field.side, field.history) for name, field in schema.fields.items()}
    assert kinds == {
        "item_id": (Id, "item", True), "rating": (Id, "action", False), "timestamp": (Time, "context", False),
        "position": (Id, "row", False), "price": (Number, "item", False), "shown": (Number, "row", False),
        "device": (Id, "context", False), "query": (Text, "context", False),
        "genres": (Ids, "item", True), "released": (Time, "item", True), "pages": (Id, "item", True),
        "age": (Id, "context", False), "member": (Id, "context", False),
    }  # fmt: skip
    assert schema.left_out == {
        "user_id": "the history says who the user is", "click": "it says what happened",
        "embedding": "it holds lists of double", "version": "it has one value only", "nothing": "it has no values",
        "volume": "events alone have it; name it by action=… if it says what happened",
    }  # fmt: skip
    assert schema.fields["item_id"].vocab == (7, 8, 9)
    assert list(schema.history) == ["item_id", "rating", "genres", "released", "pages"]
    assert list(schema.context) == ["timestamp", "device", "query", "age", "member"]
    assert list(schema.rows) == ["position", "shown"]
    assert "price" in schema.items
    assert not schema.is_open


def test_without_a_history_the_user_is_a_feature():
    schema = Impressions.read(ROWS).schema
    assert schema.fields["user_id"] == Id(vocab=["u", "v"], side="context")
    assert schema.history == {}


def test_of_ones_own_events_the_labels_are_actions():
    schema = Impressions.read(
        {**ROWS, "rating": [5, 1, 2, 4, 3]}, history="self", labels=["like = rating >= 4", "click"]
    ).schema
    assert schema.labels == ["like", "click"]
    assert schema.roles.action == ("rating", "click")
    assert schema.fields["rating"] == Id(vocab=[1, 2, 3, 4, 5], side="action")
    assert "rating" not in schema.rows
    # Features of items in the impressions are features of events, too.
    assert schema.fields["price"].history


def test_many_values_are_hashed_but_not_the_items(monkeypatch):
    monkeypatch.setattr("tigon.rank.data.infer.MANY", 2)
    fields = read().schema.fields
    assert fields["item_id"].rows == 4
    assert fields["genres"].rows == 3
    assert Impressions.read({**ROWS, "page": list("abcde")}).schema.fields["page"].hash_rows == 2


def test_numbers_of_many_values_are_amounts_and_ids_by_name_are_not():
    n = 100
    table = {"item_id": list(range(n)), "click": [0, 1] * 50, "count": list(range(n)), "shop_id": list(range(n)),
             "score": [x / 7 for x in range(n)], "stars": [float(x % 5) for x in range(n)],
             "day": [f"2026-01-{1 + x % 28:02}" for x in range(n)]}  # fmt: skip
    fields = Impressions.read(table).schema.fields
    assert {name: type(field) for name, field in fields.items()} == {
        "item_id": Id, "count": Number, "shop_id": Id, "score": Number, "stars": Id, "day": Time,
    }  # fmt: skip
    # Each row is an item and a request by itself, which says nothing of sides.
    assert {field.side for name, field in fields.items() if name != "item_id"} == {"row"}


def test_a_schema_is_inferred_by_itself():
    assert infer_schema(ROWS, history=HISTORY, items=ITEMS, users=USERS) == read().schema
    assert infer_schema(ROWS, labels=["click"], request="user_id").roles.request == "user_id"


def test_bytes_are_no_field():
    for kind in (pa.binary(), pa.large_binary(), pa.binary(1), pa.binary_view()):
        table = {"item": [1, 2], "hash": pa.array([b"a", b"b"], pa.binary()).cast(kind)}
        assert "nothing that a model reads" in Impressions.read(table).schema.left_out["hash"]


def test_labels_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"^Schema: labels must differ in their names, got 'a' more often"):
        Impressions.read({"item": [1, 2], "stars": [1, 5]}, labels=["a = stars >= 4", "b = stars", "a = stars >= 5"])


def test_a_side_follows_from_most_rows():
    # Item 1 is shown twice, both times to ann: her job could be the item's. More of her rows say that it is hers.
    rows = {
        "request": [1, 1, 2, 2, 3], "user": ["ann"] * 4 + ["bob"], "item": [1, 2, 1, 3, 4], "click": [0, 1, 0, 1, 1],
        "job": ["nurse"] * 4 + ["cook"], "year": [5.5, 6.5, 5.5, 7.5, 8.5],
    }  # fmt: skip
    schema = Impressions.read(rows).schema
    assert schema.fields["job"].side == "context"
    assert schema.fields["year"].side == "item"


@pytest.mark.parametrize("index", ["__index_level_0__", "", "Unnamed: 0"])
def test_an_index_that_pandas_wrote_is_no_feature(index):
    schema = infer_schema({index: [10, 11, 12], "age": [1.5, 2.5, 4.5], "click": [0, 1, 0]})
    assert [*schema.fields] == ["age"]
    assert "index that pandas wrote" in schema.left_out[index]
    assert [*Schema({}, {index: Number()}).fields] == [index]  # whoever names it has it


def test_what_is_named_like_an_outcome_is_no_feature():
    schema = Impressions.read({**ROWS, "dwell_time": [0.5, 0.0, 0.1, 9.0, 3.0], "liked": [0, 1, 0, 1, 1]}).schema
    assert not {"dwell_time", "liked"} & set(schema.fields)
    assert schema.left_out["dwell_time"] == "it says what happened, by its name"


def test_json_there_and_back(tmp_path):
    schema = read().schema
    assert Schema.from_json(schema.to_json()) == schema
    schema.save(tmp_path / "schema.json")
    assert Schema.load(tmp_path / "schema.json") == schema
    told = json.loads(schema.to_json())
    assert told["roles"]["labels"] == ["click"]
    assert told["fields"]["device"] == {"kind": "Id", "side": "context", "vocab": ["phone", "tv"]}
    # What is written by hand: a kind alone, in place of its options.
    told["fields"]["shown"] = "Number"
    del told["fields"]["price"]
    edited = Schema.from_json(json.dumps(told))
    assert edited.is_open
    assert edited.fields["shown"] == Number()
    again = read(schema=edited).schema
    assert again.fields["shown"] == schema.fields["shown"]
    assert "price" not in again.fields
    assert "Schema(Roles(item='item_id'" in repr(schema)


ITEM = {"kind": "Id", "side": "item"}


def write(roles=None, **fields):
    return json.dumps({"roles": roles or {}, "fields": fields})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Schema.from_json: the text is not JSON"),
        ("[" * 200_000, "nests too deeply"),
        ("[]", "the text must hold an object, got a list"),
        ("{}", "must hold an object with the objects 'roles' and 'fields'"),
        (write(roles={"itm": "a"}), "there is no role 'itm'; did you mean 'item'"),
        (write(roles={"item": 3}), "role 'item' must be the name of a column, or none, got 3"),
        (write(roles={"labels": None}), "role 'labels' must be a list of columns, got None"),
        (write(roles={"labels": [1]}), r"role 'labels' must be a list of columns, got \[1\]"),
        (write(a=["Id"]), r"field 'a' must have a kind among .*, got \['Id'\]"),
        (write(a={"kind": ["Id"]}), "field 'a' must have a kind"),
        (write(a="id"), "field 'a' must have a kind among .*'id'; did you mean 'Id'"),
        (write(a={"kind": "Id", "hashrows": 3}), "field 'a': Id has no option 'hashrows'; did you mean 'hash_rows'"),
        (write(a={"kind": "Id", "hash_rows": {}}), "hash_rows must be an integer"),
        (write(a={"kind": "Id", "hash_rows": 10**30}), "hash_rows must be an integer"),
        (write(a={"kind": "Id", "vocab": [[1]]}), "vocab must hold strings or integers"),
        (write(a={"kind": "Id", "vocab": "ab"}), "field 'a': Id: vocab must be a list of values, got 'ab'"),
        (write(a={"kind": "Cross", "of": 5}), "field 'a': Cross: of must be a list of fields, got 5"),
        (write(a={"kind": "Number", "knots": ["x"]}), r"Number: knots must be a list of numbers, got \['x'\]"),
        (write(a={"kind": "Number", "spread": "x"}), "field 'a': Number: spread must be a number, got 'x'"),
        (write(a={"kind": "Number", "knots": [math.nan, 1], "scores": [0, 1]}), "field 'a': Number: knots must rise"),
        (write(a=ITEM), "field 'a' has side 'item', but roles.item names no column of items"),
        (write(roles={"item": "a"}), r"the item 'a' must have a field Id\(side='item'\), got None"),
        (write(roles={"item": "a"}, a="Id"), "the item 'a' must have a field"),
        (
            write(roles={"item": "a", "time": "t"}, a=ITEM, t="Time"),
            r"'t' must have a field Time\(side='context'\), got",
        ),
        (write(roles={"item": "a", "action": ["b"]}, a=ITEM), "the action 'b' must have a field of side 'action', got"),
        (write(a={"kind": "Id", "side": "action"}), "'a' has side 'action', but roles.action does not name it"),
    ],
)
def test_a_text_that_is_no_schema_gets_a_sentence(text, said):
    with pytest.raises(ValueError, match=said):
        Schema.from_json(text)


def test_a_field_that_is_none_gets_a_sentence(tmp_path):
    with pytest.raises(
        ValueError, match="field 'item' must be one of Id, Number, Ids, Cross, Text, Time, got the class Id"
    ):
        Schema(Roles("item"), {"item": Id})
    (tmp_path / "schema.json").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"schema.json is not UTF-8 text"):
        Schema.load(tmp_path / "schema.json")
