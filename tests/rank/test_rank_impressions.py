"""Impressions: batches are what loops over the tables find, nothing of the future is in them, bad input is refused."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")

from tigon.data.values import BadValue  # noqa: E402
from tigon.rank import Batch, Id, Ids, Impressions, Number, Ragged, Roles, Schema, Text, Time  # noqa: E402
from tigon.rank.data.labels import Label  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SCHEMA = Schema(
    Roles("item", request="request", user="user", time="time", labels=("click",), action=("rating",), weight="weight"),
    {
        "item": Id(vocab=["a", "b", "c"], side="item", history=True),
        "rating": Number(scale="none", side="action"),
        "tags": Ids(vocab=[1, 2, 3], max=2, side="item", history=True),
        "price": Number(scale="none", side="row"),
        "time": Time(unit="s", side="context"),
        "age": Number(scale="none", side="context"),
    },
)
ITEMS = {"item": ["b", "a"], "tags": [[3, 2, 1], [1]]}
USERS = {"user": [1, 0], "age": [41.0, 40.0]}
TAGS = {"a": [1], "b": [2, 1]}
CODES = {"a": 1, "b": 2, "c": 3}
NAMES = st.sampled_from(["a", "b", "c", "z"])


@st.composite
def tables(draw):
    """Impressions of a few requests, in any order, and events; times meet."""
    rows = []
    for request in range(draw(st.integers(1, 5))):
        user, time = draw(st.one_of(st.none(), st.integers(0, 2))), draw(st.integers(0, 4))
        for _ in range(draw(st.integers(1, 4))):
            later = draw(st.integers(0, 1))
            rows.append(
                (
                    f"r{request}",
                    user,
                    time + later,
                    draw(NAMES),
                    draw(st.integers(0, 1)),
                    draw(st.floats(0, 1, width=32)),
                )
            )
    rows = draw(st.permutations(rows))
    events = draw(
        st.lists(
            st.tuples(st.one_of(st.none(), st.integers(0, 3)), st.integers(0, 5), NAMES, st.integers(1, 5)), max_size=12
        )
    )
    return rows, events


def columns(rows, names):
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def read(rows, events, **more):
    table = columns(rows, ["request", "user", "time", "item", "click", "price"])
    table["weight"] = [1.0 + i for i in range(len(rows))]
    history = columns(events, ["user", "time", "item", "rating"])
    return Impressions.read(table, history=history, items=ITEMS, users=USERS, schema=SCHEMA, **more)


def by_loops(rows, events, history_max):
    """For each request, in the order in which they come: its rows, its time, its user and its events."""
    found = {}
    for place, row in enumerate(rows):
        found.setdefault(row[0], []).append(place)
    for places in found.values():
        user, time = rows[places[0]][1], min(rows[place][2] for place in places)
        own = sorted(
            (event for event in events if None is not event[0] == user and event[1] < time), key=lambda event: event[1]
        )
        yield places, time, user, own[max(0, len(own) - history_max) :] if history_max else []


def floats(values):
    return [None if math.isnan(x) else x for x in values]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(drawn=tables(), history_max=st.integers(0, 4), seed=st.integers(0, 99))
def test_a_batch_is_what_loops_find(device, drawn, history_max, seed):
    rows, events = drawn
    data = read(rows, events).to(device)
    expected = list(by_loops(rows, events, history_max))
    assert len(data) == len(expected)
    assert data.rows == len(rows)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    batch = data.batch(order, history_max=history_max)
    assert (batch.requests, batch.candidates) == (len(data), len(rows))
    assert batch.offsets.device.type == batch.history_offsets.device.type == "cpu"
    tags, remembered = batch.items["tags"].lists(), batch.history["tags"].lists()
    for r, which in enumerate(order.tolist()):
        places, time, user, own = expected[which]
        here = slice(int(batch.offsets[r]), int(batch.offsets[r + 1]))
        shown = [rows[place] for place in places]
        assert batch.rows[here].tolist() == places
        assert batch.items["item"][here].tolist() == [CODES.get(row[3], 0) for row in shown]
        assert batch.items["price"][here].tolist() == [row[5] for row in shown]
        assert tags[here] == [TAGS.get(row[3], []) for row in shown]
        assert batch.labels["click"][here].tolist() == [row[4] for row in shown]
        assert batch.weights[here].tolist() == [1.0 + place for place in places]
        assert batch.context["time"][r] == time * 10**6
        assert floats([batch.context["age"][r]]) == [{0: 40.0, 1: 41.0}.get(user)]
        then = slice(int(batch.history_offsets[r]), int(batch.history_offsets[r + 1]))
        assert batch.history["item"][then].tolist() == [CODES.get(event[2], 0) for event in own]
        assert batch.history["rating"][then].tolist() == [event[3] for event in own]
        assert remembered[then] == [TAGS.get(event[2], []) for event in own]
        assert batch.age[then].tolist() == [time - event[1] for event in own]
    assert (batch.age > 0).all()


ROWS = {
    "request": ["x", "y", "x", "z"], "user": [1, 2, 1, 1], "time": [10, 20, 10, 30], "item": ["a", "b", "c", "new"],
    "click": [1, 0, 0, 1],
}  # fmt: skip
EVENTS = {
    "user": [1, 1, 1, 2, None],
    "time": [9, 10, 29, 20, 1],
    "item": ["b", "a", "q", "c", "a"],
    "click": [1, 0, 1, 1, 1],
}


def test_what_was_counted_is_told():
    schema = Impressions.read(ROWS, history=EVENTS).schema
    vocab = {"item": Id(vocab=["a", "b", "c"], side="item", history=True)}
    data = Impressions.read(ROWS, history=EVENTS, items={"item": ["a"], "tags": [[1]]}, schema=schema.replace(vocab))
    assert data.notes == [
        "1 of 5 events has no user and are left out of histories.",
        "Histories exclude 2 events at exactly the time of a request by the same user.",
        "1 of 4 rows has an item that the schema does not know.",
        "1 of 4 events has an item that the schema does not know.",
    ]
    assert Impressions.read({**ROWS, "click": [0] * 4}).notes == [
        "Label 'click' is 0 in all 4 rows: with one class there is nothing to learn, and AUC is undefined."
    ]


def test_what_a_side_table_lacks_is_missing_and_counted():
    items = {"item": ["a", "b", None], "size": [1.5, 2.5, 9.5], "tags": [["u"], ["u", "v"], ["w"]]}
    data = Impressions.read(ROWS, history=EVENTS, items=items)
    batch = data.batch(torch.arange(3))
    assert batch.items["size"].isnan().tolist() == [False, True, False, True]
    assert batch.items["tags"].lists() == [[1], [], [1, 2], []]
    assert "2 of 4 rows have an item that is not among the items." in data.notes
    assert "2 of 5 events have an item that is not among the items." in data.notes


def test_histories_that_are_empty_are_told():
    said = "No request has a history: check that both tables use the same user ids and events precede requests."
    strangers = {**EVENTS, "user": ["ann"] * 5}
    assert said in Impressions.read(ROWS, history=strangers).notes
    data = Impressions.read(ROWS, history=EVENTS)
    assert said not in data.notes
    bare = Impressions.read(ROWS, schema=data.schema)
    assert bare.notes == ["The schema reads histories, but none was given: all histories are empty."]
    assert bare.batch(torch.arange(3)).history["item"].tolist() == []


def test_side_tables_may_call_their_ids_id():
    data = Impressions.read(ROWS, items={"id": ["a", "b"], "size": [1.5, 2.5]}, users={"id": [2, 1], "age": [0.5, 0.7]})
    batch = data.batch(torch.arange(3))
    assert batch.items["size"].isnan().tolist() == [False, True, False, True]
    assert batch.context["age"].isnan().sum() == 0


@pytest.mark.parametrize(
    ("label", "name", "expected"),
    [
        ("rating >= 4", "rating>=4", [0, 1, 1]),
        ("rating<4", "rating<4", [1, 0, 0]),
        ("good = rating == 5.0", "good", [0, 0, 1]),
        ("rating != 5", "rating!=5", [1, 1, 0]),
        ("end == 'tv off'", "end==tv off", [0, 1, 0]),
        ("kept=end != tv off", "kept", [1, 0, 1]),
        ("seen = flag", "seen", [1, 0, 1]),
    ],
)
def test_labels_that_compare(label, name, expected):
    rows = {"item": [1, 2, 3], "rating": [1.0, 4.0, 5.0], "end": ["x", "tv off", "y"], "flag": [True, False, True]}
    data = Impressions.read(rows, labels=[label])
    assert {k: v.tolist() for k, v in data.batch(torch.arange(3)).labels.items()} == {name: expected}
    assert data.schema.labels == [name]
    # What a label is made of is no feature.
    assert Label.parse(label).column not in data.schema.fields


def test_names_and_columns_follow_the_requests():
    data = Impressions.read({**ROWS, "word": ["k", "l", "m", "n"]}, history=EVENTS)
    assert data.request_ids == ["x", "y", "z"]
    assert data.item_ids == ["a", "c", "b", "new"]
    assert data.column("word") == ["k", "m", "l", "n"]
    assert repr(data) == "Impressions(3 requests, 4 rows, 4 events)"
    _, held = data.split(fraction=0.3)
    assert held.request_ids == ["z"]
    assert held.column("word") == ["n"]
    with pytest.raises(ValueError, match="there is no column 'wrd'; did you mean 'word'"):
        data.column("wrd")


def test_without_a_column_of_requests_user_and_time_are_one():
    rows = {name: column for name, column in ROWS.items() if name != "request"}
    data = Impressions.read(rows)
    assert data.item_ids == ["a", "c", "b", "new"]
    assert len(data) == 3
    assert data.request_ids == [0, 1, 3]
    nobody = Impressions.read({**rows, "user": [None, 2, None, None]})
    assert nobody.item_ids == ["a", "b", "c", "new"]
    assert len(nobody) == 4
    alone = Impressions.read({"item": ["a", "b", "a"], "click": [0, 1, 1]})
    assert len(alone) == 3
    assert alone.batch(torch.tensor([2])).items["item"].tolist() == [1]


def test_ones_own_events_and_ones_own_positives():
    for history, expected in (("self", [[], [], [1, 3]]), ("positives", [[], [], [1]])):
        data = Impressions.read(ROWS, history=history)
        batch = data.batch(torch.arange(3))
        ends = batch.history_offsets.tolist()
        assert [batch.history["item"][a:b].tolist() for a, b in pairwise(ends)] == expected
        assert data.notes == []
    assert batch.history["click"].tolist() == [1]
    assert data.schema.fields["click"].vocab == (1,)


@pytest.mark.parametrize("word", ["self", "positives"])
def test_what_follows_knows_of_what_was_before(tmp_path, word):
    pa.parquet = pytest.importorskip("pyarrow.parquet")
    whole = {"user": [1, 2, 1, 2, 1], "time": [1, 2, 3, 4, 5], "item": list("abcab"), "click": [1, 0, 0, 1, 1]}
    before, after = ({k: v[part] for k, v in whole.items()} for part in (slice(0, 3), slice(3, 5)))
    pa.parquet.write_table(pa.table(before), tmp_path / "train.parquet")
    schema = Impressions.read(whole, history=word).schema
    expected = Impressions.read(whole, history=word, schema=schema).batch(torch.tensor([3, 4]))
    unlabelled = {name: column for name, column in after.items() if name != "click"}
    for rows, labelled in ((after, True), (unlabelled, False)):
        data = Impressions.read(rows, history=[word, tmp_path / "train.parquet"], schema=schema, labelled=labelled)
        batch = data.batch(torch.arange(2))
        assert batch.history["item"].tolist() == expected.history["item"].tolist()
        assert batch.history["click"].tolist() == expected.history["click"].tolist()
        assert batch.age.tolist() == expected.age.tolist()
    # What is to be scored tells of no events by itself.
    alone = Impressions.read(unlabelled, history=word, schema=schema, labelled=False)
    assert alone.batch(torch.arange(2)).events == 0


def test_tables_to_score_need_no_labels():
    data = Impressions.read(ROWS, history=EVENTS)
    rows = {name: column for name, column in ROWS.items() if name != "click"}
    with pytest.raises(ValueError, match="the impressions must have the column 'click', a label; there are 'request'"):
        Impressions.read(rows, history=EVENTS, schema=data.schema)
    bare = Impressions.read(rows, history=EVENTS, schema=data.schema, labelled=False)
    assert bare.batch(torch.arange(3)).labels == {}
    empty = {**ROWS, "click": [None] * 4}
    bare = Impressions.read(empty, history=EVENTS, schema=data.schema, labelled=False)
    assert bare.batch(torch.arange(3)).labels == {}


def test_times_of_another_unit_than_that_of_training_are_refused():
    """Milliseconds read as seconds would lie behind all events, so that histories had the future in them."""
    data = Impressions.read(ROWS, history=EVENTS)
    later = {**ROWS, "time": [1_700_000_000_000] * 4}
    with pytest.raises(ValueError, match=r"row 0: must be a time in s since 1970, got 1700000000000, a time after the"):
        Impressions.read(later, history=EVENTS, schema=data.schema)


# ----------------------------------------------------------------------------------------------------------- batches


def wide(requests, seed=0):
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 6, (requests,), generator=g)
    n = int(sizes.sum())
    rows = {"session": torch.arange(requests).repeat_interleave(sizes), "user": torch.zeros(n, dtype=torch.int64),
            "time": torch.arange(requests).repeat_interleave(sizes), "item": torch.randint(0, 9, (n,), generator=g),
            "click": torch.randint(0, 2, (n,), generator=g)}  # fmt: skip
    return Impressions.read(rows, history="self", request="session")


def test_batches_have_every_request_once_and_keep_to_their_budget():
    data = wide(40)
    whole = data.batch(torch.arange(40), history_max=7)
    for options in ({"requests": 7}, {"tokens": 30}, {"tokens": 1}):
        found = list(data.batches(**options, history_max=7))
        assert torch.cat([batch.rows for batch in found]).equal(whole.rows)
        assert torch.cat([batch.history["item"] for batch in found]).equal(whole.history["item"])
        sizes = [batch.candidates + batch.events for batch in found]
        if "tokens" in options:
            assert all(b.requests == 1 or size <= options["tokens"] for b, size in zip(found, sizes, strict=True))
            # The next request would not have fitted in.
            after = [int(b.offsets[1] + b.history_offsets[1]) for b in found[1:]]
            assert all(size + more > options["tokens"] for size, more in zip(sizes, after, strict=False))
        else:
            assert [batch.requests for batch in found] == [7] * 5 + [5]


def test_an_order_is_drawn_and_can_be_gone_on_with():
    data = wide(40)

    def rows(**more):
        return [batch.rows for batch in data.batches(requests=6, shuffle=torch.Generator().manual_seed(3), **more)]

    once = rows()
    assert not torch.cat(once).equal(torch.arange(data.rows))
    assert torch.cat(once).sort().values.equal(torch.arange(data.rows))
    assert all(a.equal(b) for a, b in zip(once[4:], rows(skip=4), strict=True))
    assert rows(skip=9) == []


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_moves_as_a_whole(device):
    items = {
        "item": list(range(9)),
        "tags": [["a"]] * 9,
        "text": ["a long text of words"] * 5 + ["or another one of them"] * 4,
    }
    rows = {"user": [1, 1], "time": [1, 2], "item": [3, 4], "click": [0, 1], "sample_weight": [1.0, 2.0]}
    data = Impressions.read(rows, history="self", items=items)
    batch = data.batch(torch.tensor([1, 0]), device=device)
    for moved in (batch, data.batch(torch.tensor([1, 0])).to(device), data.to(device).batch(torch.tensor([1, 0]))):
        assert isinstance(moved, Batch)
        tensors = [moved.age, moved.rows, moved.weights, moved.labels["click"], moved.items["item"],
                   moved.history["item"], *moved.items["tags"], moved.context["time"]]  # fmt: skip
        assert {tensor.device.type for tensor in tensors} == {device}
        assert isinstance(moved.items["tags"], Ragged)
        assert moved.items["text"] == ["a long text of words"] * 2
        assert moved.items["item"].tolist() == batch.items["item"].tolist()


def test_histories_far_apart_are_told_in_seconds():
    data = Impressions.read(
        {"user": [1], "time": ["2026-01-31T00:00:00.000001"], "item": ["a"], "click": [1]},
        history={"user": [1, 1], "time": ["2026-01-31", "1999-01-31"], "item": ["a", "b"]},
    )
    age = data.batch(torch.tensor([0])).age
    assert age.dtype == torch.float64
    assert age.tolist() == [852076800.000001, 1e-6]


# ------------------------------------------------------------------------------------------------------------- split


def test_a_split_by_time_holds_the_latest_and_keeps_one_time_together():
    data = wide(40)
    train, held = data.split(fraction=0.25)
    assert (len(train), len(held)) == (30, 10)
    assert held.request_ids == list(range(30, 40))
    # What was before is known, in whichever part.
    batch = held.batch(torch.tensor([0]))
    assert batch.events == train.rows
    assert batch.age.min() == 1
    tied = Impressions.read({"user": list(range(6)), "time": [1, 1, 2, 3, 3, 3], "item": [1] * 6, "click": [0, 1] * 3})
    assert [len(part) for part in tied.split(fraction=0.2)] == [3, 3]
    assert [len(part) for part in data.split(fraction=0)] == [40, 0]
    assert [len(part) for part in data.split(fraction=1)] == [0, 40]


def test_a_split_by_request_depends_on_the_seed_alone():
    rows = {"request": list(range(50)), "item": [1, 2] * 25, "click": [0, 1] * 25}
    data = Impressions.read(rows)
    parts = [data.split(by="request", fraction=0.2, seed=seed) for seed in (0, 0, 1)]
    ids = [[part.request_ids for part in pair] for pair in parts]
    assert ids[0] == ids[1] != ids[2]
    assert sorted(ids[0][0] + ids[0][1]) == list(range(50))
    assert len(ids[0][1]) == 10


REQUESTS = st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 1)), st.integers(0, 6), NAMES), min_size=2,
                    max_size=7)  # fmt: skip
LATER = st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 1)), st.integers(0, 7), NAMES), max_size=6)


@settings(max_examples=40, deadline=None)
@given(rows=REQUESTS, events=LATER)
def test_no_history_to_train_on_tells_of_a_request_that_is_held_out(rows, events):
    """A click of a held-out request, in the history of a later request of its user, is refused and nothing else."""
    table = columns(rows, ["user", "time", "item"])
    table |= {"request": [*range(len(rows))], "click": [n % 2 for n in range(len(rows))]}
    data = Impressions.read(table, history=columns(events, ["user", "time", "item"]), user="user", item="item")
    half = len(rows) // 2
    held = set(torch.randperm(len(rows), generator=torch.Generator().manual_seed(4))[:half].tolist())
    told = [
        place for place, (user, time, item) in enumerate(events) if user is not None
        and any(rows[r][0] == user and rows[r][2] == item and rows[r][1] <= time for r in held)
        and any(rows[r][0] == user and time < rows[r][1] for r in {*range(len(rows))} - held)
    ]  # fmt: skip
    if not told:
        train, other = data.split(by="request", fraction=half / len(rows), seed=4)
        assert set(other.request_ids) == held
        assert len(train) == len(rows) - half
        return
    some = "1 event is" if len(told) == 1 else f"{len(told)} events are"
    with pytest.raises(ValueError, match=rf"by must be 'time' if .* held-out requests: {some} for .*row {told[0]} "):
        data.split(by="request", fraction=half / len(rows), seed=4)


def test_a_split_fits_on_what_is_trained():
    rows = {"user": [1] * 6, "time": [1, 2, 3, 4, 5, 6], "item": ["a", "b", "a", "b", "late", "a"], "click": [0, 1] * 3,
            "price": [1.0, 2.0, 3.0, 2.5, 1e6, 1e7]}  # fmt: skip
    for history in ("self", {"user": [1, 1], "time": [3, 5], "item": ["a", "later"]}):
        data = Impressions.read(rows, history=history)
        train, held = data.split(fraction=0.3)
        assert data.schema.fields["item"].vocab[-1].startswith("late")
        assert train.schema == held.schema
        assert train.schema.fields["item"].vocab == ("a", "b")
        assert train.schema.fields["price"].knots[-1] == 3.0
        assert held.batch(torch.arange(2)).items["item"].tolist() == [0, 1]
        assert 0 in held.batch(torch.arange(2)).history["item"]
        assert 0 not in train.batch(torch.arange(4)).history["item"]
    # A schema of training stays as it is.
    again, _ = Impressions.read(rows, history="self", schema=Impressions.read(rows, history="self").schema).split(
        fraction=0.3
    )
    assert again.schema.fields["item"].vocab == ("a", "b", "late")


def test_rows_without_items_are_features_alone():
    rows = {"ad": ["a", "b", "a"], "hour": [3, 4, 4], "price": [1.5, 2.5, 3.5], "click": [1, 0, 1]}
    data = Impressions.read(rows)
    assert data.schema.roles.item is None
    assert {name: field.side for name, field in data.schema.fields.items()} == dict.fromkeys(
        ("ad", "hour", "price"), "row"
    )
    assert (len(data), data.rows, data.request_ids) == (3, 3, [0, 1, 2])
    batch = data.batch(torch.tensor([2, 0]))
    assert (batch.items["ad"].tolist(), batch.labels["click"].tolist(), batch.context) == ([1, 1], [1, 1], {})
    with pytest.raises(
        ValueError, match=r"^rank\.Impressions: these impressions have no item column; name the column by"
    ):
        _ = data.item_ids
    assert Schema.from_json(data.schema.to_json()) == data.schema
    # One-hot fields are ids, however many values there are.
    one_hot = {"field_0": list(range(80)), "field_1": [100 + i % 50 for i in range(80)]}
    fields = Impressions.read({"label": [i % 2 for i in range(80)], **one_hot}).schema.fields
    assert {name: field.kind for name, field in fields.items()} == {"field_0": "Id", "field_1": "Id"}


# ------------------------------------------------------------------------------------------------------------ errors


def change(columns):
    return {name: column for name, column in {**ROWS, **columns}.items() if column is not None}


def refuse(rows, options, said):
    with pytest.raises(ValueError, match=f"^rank.Impressions: .*{said}.*") as caught:
        Impressions.read(rows, **options)
    assert not isinstance(caught.value, BadValue)
    assert str(caught.value).endswith((".", "?"))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"item": None}, "the history must go with impressions with items; name the column by item=…, there are 'req"),
        ({"click": [0, 2, 1, 0]}, "'click' .label. of the impressions, row 1: must be 0 or 1, got 2.*'click >= 4'"),
        ({"click": [0, None, 1, 0]}, "'click' .label.*row 1: must be 0 or 1, got a missing value"),
        ({"click": list("abab")}, "'click' .label.*row 0: must be a number, got string 'a'"),
        ({"time": None}, "the impressions must have times, so that no event after a request"),
        ({"time": [1, None, 1, 1]}, "'time' .time. of the impressions, row 1: must be a time, got a missing"),
        ({"time": ["soon"] * 4}, "'time' .Time. of the impressions, row 0: must be a time such as"),
        (
            {"time": [1_700_000_000_000] * 4},
            "one unit, but looks in the impressions like ms, and in the history",
        ),
        ({"user": None}, "a history needs users; name the column by user="),
        ({"user": [1, 2, 3, 1]}, "rows 0 and 2 have the same request .'request'. but different users"),
        ({"request": ["x", None, "x", "z"]}, "column 'request' .request., row 1: every row must have a request"),
        ({"sample_weight": [1.0, -1, 1, 1]}, "column 'sample_weight' .weight., row 1: must be 0 or more, got -1"),
        ({"sample_weight": ["a"] * 4}, "'sample_weight' .weight. of the impressions, row 0: must be a number"),
        ({"item": [0.5, 1.0, 1.0, 1.0]}, "'item' .Id. of the impressions, row 0: must be a string or an integer"),
        ({"x": [1.0, math.inf, 2.0, 3.5]}, "'x' .Number. of the impressions, row 1: must be finite or missing"),
    ],
)
def test_columns_that_cannot_be_read_get_a_sentence(columns, said):
    refuse(change(columns), {"history": EVENTS}, said)


@pytest.mark.parametrize(
    ("history", "said"),
    [
        ({**EVENTS, "time": None}, "a column must be an array, a tensor or a list, got NoneType"),
        ({"user": [1], "item": ["a"]}, "the history must have the column 'time' .time.; there are"),
        ({"who": [1], "item": ["a"], "time": [1]}, "the history must have the column 'user' .user."),
        ({**EVENTS, "time": [1, 2, None, 3, 4]}, "'time' .time. of the history, row 2: must be a time"),
        (["self", "gone.csv"], "there is no file gone.csv"),
        (["self", "positives"], "a history must name one of 'self' and 'positives', got both"),
    ],
)
def test_histories_that_cannot_be_read_get_a_sentence(history, said):
    refuse(ROWS, {"history": history}, said)


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        (ROWS, {"item": "itm"}, r"there is no column 'itm' \(item\) in the impressions; did you mean 'item'"),
        (ROWS, {"labels": ["clik"]}, "must have the column 'clik', a label; did you mean 'click'"),
        (ROWS, {"labls": ["click"]}, "there is no argument 'labls'; did you mean 'labels'"),
        (ROWS, {"labels": ["click >= word"]}, "row 0: >= needs a number, got 'word'"),
        (ROWS, {"labels": [], "history": "positives"}, "history='positives' needs labels, but the impressions have"),
        (ROWS, {"schema": SCHEMA, "item": "item"}, "schema= already defines the roles, got also item"),
        (ROWS, {"history": EVENTS, "action": ["raing"]}, "the history must have the column 'raing', an action; there"),
        (ROWS, {"items": {"item": ["a", "a"], "n": [1, 2]}}, "the items must have each 'item' once, but have 'a' more"),
        (ROWS, {"items": {"thing": ["a"]}}, "the items must have the column 'item' .item.; there are 'thing'"),
        (change({"item": None}), {"items": {"item": [1]}}, "the items must go with impressions with items; name the"),
        (
            change({"user": None}),
            {"users": {"user": [1], "age": [2]}},
            "a user table needs a user column in the impressions",
        ),
        ("gone.parquet", {}, "there is no file gone.parquet"),
        (7, {}, "a table must be a pyarrow.Table, a pandas or polars DataFrame, or a dict of arrays, got int"),
        ({}, {}, "the impressions must have columns, got none"),
    ],
)
def test_arguments_that_cannot_be_read_get_a_sentence(rows, options, said):
    refuse(rows, options, said)


def test_a_context_that_differs_within_a_request_gets_a_sentence():
    schema = Schema(Roles("item", request="request"), {"item": Id(side="item"), "device": Id(side="context")})
    with pytest.raises(
        ValueError, match=r"column 'device' has side 'context', but differs .* between rows 0 and 2; use side"
    ):
        Impressions.read({**ROWS, "device": ["tv", "tv", "phone", "tv"]}, schema=schema)
    missing = Schema(Roles("item", request="request"), {"item": Id(side="item"), "device": Number(side="context")})
    for kind, values in ((Text, ["a", "b", "a", "c"]), (Ids, [[1], [1, 2], None, [1]])):
        schema = Schema(Roles("item", request="request"), {"item": Id(side="item"), "x": kind(side="context")})
        held = Impressions.read({**ROWS, "x": [values[0], values[1], values[0], values[3]]}, schema=schema)
        assert len(held.batch(torch.arange(3)).context["x"][0]) > 0
        with pytest.raises(ValueError, match=r"column 'x' has side 'context', but differs .* between rows 0 and 2"):
            Impressions.read({**ROWS, "x": [values[0], values[1], values[1], values[3]]}, schema=schema)
    nan = math.nan
    data = Impressions.read({**ROWS, "device": [nan, 1.0, nan, 2.0]}, schema=missing)
    assert data.batch(torch.tensor([0])).context["device"].isnan().all()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda d: d.batch(torch.tensor([3])), "Impressions.batch: indices must be from 0 to 2, got 3 to 3"),
        (lambda d: d.batch(torch.tensor([-1])), "Impressions.batch: indices must be from 0 to 2, got -1 to -1"),
        (
            lambda d: d.batch(torch.tensor([0.0])),
            r"Impressions.batch: indices must be \(R,\) int64, got \(1,\) torch.float32",
        ),
        (lambda d: d.batch(torch.tensor([0]), history_max=-1), "history_max must be 0 or more, got -1"),
        (
            lambda d: next(d.batches()),
            "Impressions.batches: give requests or tokens, a positive number, got requests=None",
        ),
        (lambda d: next(d.batches(requests=1, tokens=1)), "give requests or tokens"),
        (
            lambda d: next(d.batches(tokens=0)),
            "give requests or tokens, a positive number, got requests=None, tokens=0",
        ),
        (lambda d: d.split(by="user", fraction=0.1), "Impressions.split: by must be 'time' or 'request', got 'user'"),
        (lambda d: d.split(fraction=2), "Impressions.split: fraction must be from 0 to 1, got 2"),
        (
            lambda d: d.split(by="request", fraction=0.5),
            "by must be 'time' if the impressions serve as history",
        ),
        (lambda d: Impressions.read(change({"time": None})).split(fraction=0.5), "by='time' needs times"),
    ],
)
def test_a_call_that_makes_no_sense_gets_a_sentence(call, said):
    data = Impressions.read(ROWS, history="self")
    with pytest.raises(ValueError, match=said):
        call(data)


def test_no_request_is_a_batch_too():
    batch = Impressions.read(ROWS, history=EVENTS).batch(torch.tensor([], dtype=torch.int64))
    assert (batch.requests, batch.candidates, batch.events) == (0, 0, 0)
    assert batch.items["item"].dtype == torch.int64
