"""Columns in memory: keys, numbers, times and hashes, of every kind of table."""

import datetime

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")

from tigon.data.arrow import arrow_columns, hashes, keys, kinds_agree, nearest, numbers, times  # noqa: E402
from tigon.data.values import BadValue  # noqa: E402


def test_tables_of_every_kind_are_read_alike():
    pandas = pytest.importorskip("pandas")
    columns = {"a": [1, 2], "b": ["x", None], "c": [[1], []]}
    forms = [
        columns, pa.table(columns), pandas.DataFrame(columns), pa.table(columns).to_batches()[0].to_pydict(),
        {**columns, "a": torch.tensor([1, 2])}, {**columns, "a": np.array([1, 2])},
        pa.table(columns).set_column(1, "b", pa.array(["x", None]).dictionary_encode()),
        pa.concat_tables([pa.table(columns).slice(0, 1), pa.table(columns).slice(1)]),
    ]  # fmt: skip
    for form in forms:
        assert {name: column.to_pylist() for name, column in arrow_columns("x", form).items()} == columns


@pytest.mark.parametrize("values", [[1, "word"], [[1], "word"]])
@pytest.mark.parametrize("kind", ["dict", "pandas"])
def test_a_column_of_several_kinds_gets_a_sentence(values, kind):
    table = {"a": values} if kind == "dict" else pytest.importorskip("pandas").DataFrame({"a": values})
    with pytest.raises(ValueError, match=r"^x: column 'a' must hold values with a common type: "):
        arrow_columns("x", table)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array(["a", "", None]), ["a", None, None]),
        (pa.array([3, None], pa.int16()), [3, None]),
        (pa.array([True, None, False]), [1, None, 0]),
        (pa.array([3.0, float("nan"), None, -7.0]), [3, None, None, -7]),
        (pa.array([2**64 - 1], pa.uint64()), [str(2**64 - 1)]),
        (pa.array([5], pa.uint64()), [5]),
        (pa.nulls(2), [None, None]),
        (pa.array([datetime.date(2026, 1, 31)]), ["2026-01-31"]),
    ],
)
def test_keys(column, expected):
    assert keys(column).to_pylist() == expected


@pytest.mark.parametrize(
    ("read", "column", "position", "said"),
    [
        (keys, pa.array([1.0, 2.5]), 1, "must be a string or an integer, got 2.5"),
        (keys, pa.array([None, 1e300]), 1, "must be a string or an integer, got 1e"),
        (keys, pa.array([[1]]), 0, "must be a string or an integer, got list"),
        (numbers, pa.array([1.0, float("inf")]), 1, "must be finite or missing, got inf"),
        (numbers, pa.array([None, "word"]), 0, "must be a number, got string 'word'"),
        (lambda c: times(c, "s"), pa.array([0.0, 1e30]), 1, "must be a time in s since 1970, got 1e"),
        (lambda c: times(c, "s"), pa.array(["2026-01-31", "soon"]), 1, "must be a time such as '2026-01-31'"),
        (lambda c: times(c, "s"), pa.array([True]), 0, "must be a time, got bool"),
    ],
)
def test_a_value_that_does_not_fit_is_named(read, column, position, said):
    with pytest.raises(BadValue, match=said) as caught:
        read(column)
    assert caught.value.position == position


def test_integers_and_strings_agree_as_strings():
    one, other, none = kinds_agree(
        [pa.array([1, None]), pa.array(["1", "b"], pa.large_string()), pa.nulls(1, pa.int64())]
    )
    assert (one.to_pylist(), other.to_pylist(), none.to_pylist()) == (["1", None], ["1", "b"], [None])
    assert {column.type for column in kinds_agree([pa.array([1]), pa.nulls(1, pa.large_string())])} == {pa.int64()}


def test_numbers():
    found = numbers(pa.array([1, None, 2**53 + 1]))
    assert np.isnan(found[1])
    assert found[[0, 2]].tolist() == [1.0, float(2**53)]
    assert numbers(pa.array([True, False])).tolist() == [1.0, 0.0]
    assert np.isnan(numbers(pa.nulls(1))).all()


@pytest.mark.parametrize(
    ("column", "unit"),
    [
        (pa.array([1_700_000_000, None]), "s"),
        (pa.array([1_700_000_000_000, None]), "ms"),
        (pa.array([1_700_000_000_000_000, None]), "us"),
        (pa.array([1_700_000_000_000_000_999, None]), "ns"),
        (pa.array([1_700_000_000.0, None]), "s"),
        (pa.array(["2023-11-14T22:13:20", None]), "s"),
        (pa.array(["2023-11-14 22:13:20", ""]), "s"),
        (pa.array(["2023-11-14T23:13:20+01:00", None]), "s"),
        (pa.array(["2023-11-14T22:13:20Z", None]), "s"),
        (pa.array([datetime.datetime(2023, 11, 14, 22, 13, 20), None]), "s"),
        (pa.array([datetime.datetime(2023, 11, 14, 22, 13, 20), None], pa.timestamp("ns", "Europe/Paris")), "s"),
    ],
)
def test_times(column, unit):
    found, missing = times(column, unit)
    assert missing.tolist() == [False, True]
    assert found[0] == 1_700_000_000_000_000


def test_times_with_and_without_a_zone_may_stand_together():
    found, _ = times(pa.array(["2023-11-14T23:13:20+01:00", "2023-11-14T22:13:20", "2023-11-14"]), "s")
    assert found.tolist() == [1_700_000_000_000_000, 1_700_000_000_000_000, 1_699_920_000_000_000]


def hash_by_a_loop(text):
    """The formula, a byte at a time."""
    mask, power = 2**64 - 1, 1
    h = len(text.encode())
    for byte in text.encode():
        power = power * 0x9E3779B97F4A7C15 & mask
        h = h + (byte + 1) * power & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        h = (h ^ h >> shift) * factor & mask
    return h ^ h >> 31


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.none(), st.text(max_size=12)), max_size=12))
def test_hashes_are_what_a_loop_computes(texts):
    found, missing = hashes(pa.array(texts, pa.large_string()))
    assert missing.tolist() == [text is None for text in texts]
    assert [h for h, text in zip(found.tolist(), texts, strict=True) if text is not None] == [
        hash_by_a_loop(text) for text in texts if text is not None
    ]


def test_hashes_of_numbers_spread_over_rows():
    found, _ = hashes(pa.array(np.arange(100_000)))
    filled = np.bincount((found % np.uint64(1000)).astype(np.int64), minlength=1000)
    # 100 in each of 1,000 rows on average, with a standard deviation of 10.
    assert 50 < filled.min() <= filled.max() < 150
    assert len(np.unique(found)) == 100_000


def test_a_name_that_is_near_is_told():
    assert nearest("itm_id", ["user_id", "item_id"]) == "did you mean 'item_id'?"
    assert nearest("CLICK", ["click", "x"]) == "did you mean 'click'?"
    assert nearest("zzz", ["a", "b"]) == "there are 'a', 'b'."
    assert nearest("zzz", []) == "there are no columns."


@pytest.mark.parametrize("unit", ["Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "15m"])
def test_times_of_every_unit_of_numpy_are_read(unit):
    stamps = np.array(["2020-01-01", "2021-06-01", "NaT"], f"datetime64[{unit}]")
    column = arrow_columns("x", {"t": stamps})["t"]
    found, missing = times(column, "s")
    assert missing.tolist() == [False, False, True]
    assert found[:2].tolist() == stamps[:2].astype("datetime64[us]").astype(int).tolist()


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ([10**30, 1], "'a' must hold 64-bit integers"),
        (["\ud800", "b"], "'a' must hold UTF-8 text"),
        (np.array([2**61, 1], "datetime64[h]"), "is out of range"),
        (np.array([1j, 2]), "values with a common type"),
    ],
)
def test_values_that_arrow_does_not_hold_get_a_sentence(column, words):
    with pytest.raises(ValueError, match=words):
        arrow_columns("x", {"a": column})
