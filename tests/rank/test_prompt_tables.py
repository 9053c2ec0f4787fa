"""Tables as the requests of a prompt: whose columns, which events, and what the templates read of them."""

from __future__ import annotations

import pytest
import torch

pa = pytest.importorskip("pyarrow")
pytest.importorskip("transformers")
from prompts import TOLD, film, model, prompt, tokenizer  # noqa: E402

from tigon.rank.models.prompt import PromptRanker, Request, Requests, read_impressions  # noqa: E402

DAY = 86_400
ITEMS = pa.table({
    "film": list(range(8)), "title": [film(i)["title"] for i in range(8)], "year": [1990 + i for i in range(8)],
    "kinds": [["crime", "drama"], [], ["horror"], None, ["crime"], ["drama"], [], ["drama"]],
})  # fmt: skip
USERS = pa.table({"user_id": ["a", "b"], "age": [30.0, None], "occupation": ["cook", "pilot"]})
ROWS = pa.table({
    "session": [7, 7, 9, 7, 9], "user_id": ["a", "a", "b", "a", "b"], "film": [0, 1, 2, 3, 0],
    "timestamp": [20 * DAY] * 2 + [30 * DAY] + [20 * DAY, 30 * DAY], "rating": [5.0, 1, 4, None, 3],
})  # fmt: skip
HISTORY = pa.table({
    "user_id": ["a", "a", "b", "a"], "film": [4, 5, 6, 7], "timestamp": [19 * DAY, 10 * DAY, DAY, 20 * DAY],
    "rating": [4, 2, 3, 5],
})  # fmt: skip
COLUMNS = {"item": "film", "request": "session"}


def made(**changes):
    return prompt(**{"columns": COLUMNS, **changes})


def test_requests_say_what_the_tables_hold():
    asked = made(
        candidate="Film: {{ title }} ({{ year }}), {{ kinds|join(', ') or 'none' }}.",
        event="{{ title }} ({{ year }}): {{ rating }} of 5, {{ ago }} before",
    )
    rows = ROWS.set_column(4, "rating", [[5, 1, 4, 2, 3]])
    data = read_impressions(asked, rows, history=HISTORY, items=ITEMS, users=USERS)
    assert data.schema.labels == ["like"]
    first, second = Requests(data, asked)
    assert first.profile == {"age": 30.0, "occupation": "cook"}
    assert [asked.render("event", row) for row in first.events] == [  # the one at the request's time is left out
        "Psycho (1995): 2 of 5, 10 days before", "Casino (1994): 4 of 5, 1 day before",
    ]  # fmt: skip
    assert [asked.render("candidate", row) for row in first.candidates] == [
        "Film: Heat (1990), crime, drama.", "Film: Fargo (1991), none.", "Film: Brazil (1993), none.",
    ]  # fmt: skip
    assert first.labels == {"like": [0, 1, 1], "stars": [4, 0, 1]}
    assert asked.render("profile", second.profile) == "Age unknown, pilot."
    assert second.labels == {"like": [0, 1], "stars": [3, 2]}
    assert Requests(data, asked).counts() == {"like": [2, 3], "stars": [1, 1, 1, 1, 1]}


@pytest.mark.parametrize("floats", [False, True])
def test_large_whole_numbers_are_said_as_they_are(floats):
    """Each of these, and none of the others, is another number in fp32."""
    large = [9_780_134_685_991, 16_777_217, None, 3]
    items = {"item_id": [0, 1, 2, 3], "isbn": pa.array(large, pa.float64() if floats else pa.int64()),
             "price": [16_777_217.5, 1.5, 2.5, 4.0], "year": [1990, 1991, 1992, None]}  # fmt: skip
    asked = prompt(candidate="{{ isbn }}, {{ price }}, {{ year }}", profile=None, event=None, tasks={
        "like": {"question": "Yes?", "answers": {"yes": 1, "no": 0}, "label": "click"}})  # fmt: skip
    rows = {"session_id": [0] * 4, "item_id": [0, 1, 2, 3], "click": [1, 0, 0, 1]}
    (request,) = Requests(read_impressions(asked, rows, items=items), asked)
    said = [asked.render("candidate", row).split(", ") for row in request.candidates]
    assert [line[0] for line in said] == ["9780134685991", "16777217", "unknown", "3"]
    assert [line[1:] for line in said[1:]] == [["1.5", "1991"], ["2.5", "1992"], ["4", "unknown"]]


def test_scores_of_impressions_are_those_of_their_requests():
    asked = made()
    rows = ROWS.drop_columns(["rating"])
    own = PromptRanker(model().eval(), tokenizer(), asked)
    data = read_impressions(own.prompt, rows, history=HISTORY, items=ITEMS, users=USERS, labelled=False)
    got = own.score(data)["like"]
    by_hand = [
        Request(
            [film(0), film(1), film(3)], {"age": 30, "occupation": "cook"},
            [film(5, rating=2, ago="10 days"), film(4, rating=4, ago="1 day")],
        ),
        Request([film(2), film(0)], {"age": None, "occupation": "pilot"}, [film(6, rating=3, ago="29 days")]),
    ]  # fmt: skip
    torch.testing.assert_close(got, own.score(by_hand)["like"], rtol=0, atol=1e-6)
    assert data.item_ids == [0, 1, 3, 2, 0]


def test_the_impressions_as_their_own_history_and_a_teacher():
    rows = pa.table({
        "user": ["a"] * 3, "item": [1, 2, 3], "time": [DAY, 2 * DAY, 3 * DAY], "title": ["x", "y", "z"],
        "seen": ["whole", "half", "whole"], "click": [1, 0, 1], "teacher_click": [0.75, None, 0.5],
    })  # fmt: skip
    asked = prompt(
        profile=None, candidate="{{ title }} {{ item }}",
        event="{{ title }} {{ item }} {{ seen }} {{ click }} {{ ago }}",
        tasks={"click": {"question": "Clicked?", "answers": {"no": 0, "yes": 1}}},
    )  # fmt: skip
    data = read_impressions(asked, rows, history="self")
    listed = list(Requests(data, asked))
    assert [asked.render("event", row) for row in listed[2].events] == ["x 1 whole 1 2 days", "y 2 half 0 1 day"]
    assert [r.labels["click"] for r in listed] == [[1], [0], [1]]
    assert [r.teacher["click"] for r in listed] == [[[0.25, 0.75]], [None], [[0.5, 0.5]]]
    own = PromptRanker(model(), tokenizer(), asked)
    (batch,) = own.batches(Requests(data, asked), labelled=True)
    assert batch.has_teacher.tolist() == [True, False, True]
    assert own.loss(batch).isfinite()
    assert len(Requests(data, asked)[1:]) == 2
    assert Requests(data, asked)[-1] == listed[2]
    assert Requests(data, asked).digest == Requests(read_impressions(asked, rows, history="self"), asked).digest
    other = rows.set_column(3, "title", [["x", "y", "w"]])
    assert Requests(read_impressions(asked, other, history="self"), asked).digest != Requests(data, asked).digest


@pytest.mark.parametrize(
    ("changes", "tables", "sentence"),
    [
        ({"candidate": "{{ titel }}"}, {}, r"candidate names 'titel', .*did you mean 'title'\?"),
        ({"profile": "{{ agee }}"}, {}, r"profile names 'agee', .*did you mean 'age'\?"),
        ({"event": "{{ ratings }} {{ title }}"}, {}, r"event names 'ratings', .*did you mean 'rating'\?"),
        ({"event": "{{ title }} {{ timestamp }}"}, {}, r"event names 'timestamp', but there is no such column"),
        ({"columns": {"item": "film", "request": "sesion"}}, {}, r"no column 'sesion' .*'session'\? Name the"),
        ({"columns": {"items": "film"}}, {}, r"there is no argument 'items'"),
        ({"profile": "{{ title }}"}, {"data": ROWS.append_column("title", [["x"] * 5])}, r"'title' is used for"),
        ({}, {"data": ROWS.drop_columns(["rating"])}, r"must have the column 'rating', the label"),
        ({}, {"history": HISTORY.drop_columns(["timestamp"])}, r"the history must have"),
    ],
)  # fmt: skip
def test_what_does_not_fit_gets_a_sentence(changes, tables, sentence):
    given = {"data": ROWS, "history": HISTORY, "items": ITEMS, "users": USERS, **tables}
    with pytest.raises(ValueError, match=sentence):
        read_impressions(made(**changes), given.pop("data"), **given)


def test_a_teacher_of_other_answers():
    rows = ROWS.append_column("teacher_stars", [[0.5] * 5]).set_column(4, "rating", [[5, 1, 4, 2, 3]])
    asked = made(tasks={"stars": TOLD["tasks"]["stars"]})
    data = read_impressions(asked, rows, history=HISTORY, items=ITEMS, users=USERS)
    with pytest.raises(ValueError, match=r"column 'teacher_stars' is a teacher's probability, but"):
        Requests(data, asked)
