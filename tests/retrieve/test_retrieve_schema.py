"""Schemas: codes keep the order of values, tables of each kind give the same words, other values are refused."""

import datetime
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tigon.retrieve import Category, Number, Schema, Tags, Timestamp
from tigon.retrieve.filters.schema import name_rows

DAY, EPOCH = datetime.datetime(2026, 1, 31), datetime.datetime(1970, 1, 1)
TABLE = {
    "country": ["us", None, "ca", "us"],
    "tags": [["new", "sale"], [], None, ["new"]],
    "price": [19.99, None, -3.0, 0.0],
    "posted": [DAY + datetime.timedelta(hours=10, minutes=59), None, DAY + datetime.timedelta(days=1), EPOCH],
    "size": [3, 4, None, 0],
}  # fmt: skip


def schema():
    return Schema(country=Category(), tags=Tags(5), price=Number(), posted=Timestamp("h"), size=Number(0, 9, step=1))


def as_arrow():
    pa = pytest.importorskip("pyarrow")
    plain = pa.table({name: pa.array(values) for name, values in TABLE.items()})
    encoded = plain.set_column(0, "country", plain["country"].dictionary_encode())
    unsigned = encoded["country"].cast(pa.dictionary(pa.uint8(), pa.large_string()))  # polars has those
    chunked = pa.concat_tables([encoded.slice(0, 1), encoded.slice(1, 3)]).unify_dictionaries()
    return [plain, encoded, chunked, plain.to_batches()[0], plain.set_column(0, "country", unsigned)]


def as_pandas():
    pd = pytest.importorskip("pandas")
    plain = pd.DataFrame(TABLE)
    other = plain.assign(country=plain["country"].astype("category"), size=plain["size"].astype("Int64"))
    zoned = other.assign(posted=other["posted"].dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo"))
    sparse = plain.assign(price=plain["price"].astype(pd.SparseDtype("float64")))
    return [plain, other, zoned, sparse]


def as_polars():
    pl = pytest.importorskip("polars")
    plain = pl.DataFrame(TABLE)
    return [plain, plain.with_columns(pl.col("country").cast(pl.Categorical))]


def as_arrays():
    posted = np.array([t or "NaT" for t in TABLE["posted"]], dtype="datetime64[s]")
    price = torch.tensor([19.99, float("nan"), -3.0, 0.0], dtype=torch.float64)
    size = np.array([3, 4, np.nan, 0], dtype=np.float32)
    country = np.array(TABLE["country"], dtype=object)
    texts = [t and t.isoformat() for t in TABLE["posted"]]
    sets = [frozenset(tags) if tags else tags for tags in TABLE["tags"]]
    return [
        {**TABLE, "posted": posted, "price": price, "size": size, "country": country},
        {**TABLE, "posted": texts, "tags": sets},
        {**TABLE, "tags": [np.array(tags) if tags else tags for tags in TABLE["tags"]]},
    ]


def facts(made, encoded):
    """What the words say, whatever numbers the values of vocabularies were given."""
    made.grow_vocabularies(encoded.growth)
    countries = [None if c == 0 else made["country"].values[c - 1] for c in made.decode("country", encoded.words)]
    (place,) = made.places["tags"]
    bits = (encoded.words[place.word] & place.mask) >> place.shift
    tags = [{t for i, t in enumerate(made["tags"].values) if b >> i & 1} for b in bits]
    return countries, tags, [made.decode(name, encoded.words).tolist() for name in ("price", "posted", "size")]


@pytest.mark.parametrize("kind", [as_arrays, as_arrow, as_pandas, as_polars])
def test_tables_of_each_kind_give_the_same_words(kind):
    made = schema()
    countries, tags, (price, posted, size) = facts(made, made.encode(TABLE))
    assert countries == TABLE["country"]
    assert tags == [set(t or ()) for t in TABLE["tags"]]
    assert size == [4, 5, 0, 1]
    assert posted == [1 + 24 * 20484 + 10, 0, 1 + 24 * 20485, 1]
    assert price[1] == 0 < price[2] < price[3] < price[0]
    for table in kind():
        made = schema()
        assert facts(made, made.encode(table)) == (countries, tags, [price, posted, size])


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=20))
def test_codes_of_float32_keep_the_order(values):
    codes = Schema(x=Number()).encode({"x": values}).words[0]
    order = np.argsort(np.array(values, dtype=np.float32), kind="stable")
    assert (np.diff(codes[order]) >= 0).all()
    assert ((codes[:, None] == codes) == np.equal.outer(np.array(values), np.array(values))).all()
    assert codes.min() > 0
    assert codes.max() < 2**32


@pytest.mark.parametrize(
    "column",
    [
        Number(0, 1, bits=8),
        Number(-3, 5, step=0.1),
        Number(10**18, 10**18 + 10**9, step=1),
        Number(0, 2**32 - 2, step=1),
    ],
)
def test_codes_of_a_grid_keep_the_order_within_their_bits(column):
    rng = np.random.default_rng(0)
    if isinstance(column.low, int) and column.step == 1:
        values = np.sort(rng.integers(column.low, column.high + 1, 1000))
        values[[0, -1]] = column.low, column.high
    else:
        values = np.sort(rng.uniform(column.low, column.high, 1000))
        values[[0, -1]] = column.low, column.high
    codes = Schema(x=column).encode({"x": values}).words[0]
    assert (np.diff(codes) >= 0).all()
    assert codes[0] == 1
    assert codes[-1] < 2**column.bits
    if column.step == 1:
        assert (codes - 1 == values - column.low).all()
    else:
        assert np.abs((codes - 1) * column.step + column.low - values).max() <= column.step / 2 * 1.001


def test_bits_are_packed_without_overlap_and_below_bit_63():
    made = Schema(a=Tags(100), b=Category(), c=Number(), d=Timestamp("D"), e=Number(0, 5, step=1), f=Category(3))
    taken = [0] * made.words
    for places in made.places.values():
        for place in places:
            assert not taken[place.word] & place.mask
            taken[place.word] |= place.mask
    assert max(taken) < 2**63
    assert made.words == 3
    assert sum(mask.bit_count() for mask in taken) == 100 + 16 + 32 + 16 + 3 + 2
    assert schema().words == 2
    assert Schema().words == 0


def test_json_brings_back_the_same_schema():
    made = Schema(
        a=Category(300, ["us", 'x"y', "中"]), b=Tags(70, [1, 2]), c=Number(), d=Number(0, 5, step=1),
        e=Number(-1.5, 2, bits=9, approximate=True), f=Timestamp("h", "2020-01-01", "2030-01-01"), g=Timestamp("D"),
    )  # fmt: skip
    again = Schema.from_json(made.to_json())
    assert again == made
    assert again.places == made.places
    assert again["a"].values == ["us", 'x"y', "中"]
    assert Schema.from_json('{"x": "Number", "t": {"kind": "Tags", "size": 3}}') == Schema(x=Number(), t=Tags(3))
    assert Schema(x=Number()) != Schema(y=Number())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "Schema.from_json: the text is not JSON"),
        ("[]", "Schema.from_json: the text must hold an object, got a list"),
        ('{"x": {"kind": "number"}}', "column 'x' must have a kind among .*, got 'number'; did you mean 'Number'"),
        ('{"x": {"kind": "Number", "lo": 3}}', "column 'x': Number has no option 'lo'; did you mean 'low'"),
        ('{"x": {"kind": "Tags"}}', "column 'x': missing 1 required"),
        (json.dumps({"x": {"kind": "Number", "low": 3, "high": 2}}), "Number: low must be below high"),
    ],
)
def test_bad_json_gets_a_sentence(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        Schema.from_json(text)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Category(0), "Category: size must be an integer from 1 to"),
        (lambda: Category(1, ["a", "b"]), "Category: values must be at most 1"),
        (lambda: Category(9, "abc"), "Category: values must be a list"),
        (lambda: Tags(5000), "Tags: size must be an integer from 1 to 4,032, got 5000"),
        (lambda: Number(low=3), "low and high must be given together"),
        (lambda: Number(step=3), "step and fewer than 32 bits need low and high"),
        (lambda: Number(0, 1, bits=4), "bits must be an integer from 8 to 32, got 4"),
        (lambda: Number(0, 1000, step=1, bits=8), "1,001 values from 0 to 1000 by 1 need 10 bits, more than 8"),
        (lambda: Number(0, 1e12, step=1), "need 40 bits, more than 32"),
        (lambda: Number(0, "9"), "high must be a finite number, got '9'"),
        (lambda: Timestamp("ms"), "unit must be 's', 'm', 'h' or 'D', got 'ms'"),
        (lambda: Timestamp("s", "1900-01-01", "2100-01-01"), "needs 33 bits, more than 32"),
        (lambda: Schema(x=3), "column 'x' must be one of Category, Tags, Number, Timestamp, got int"),
        (lambda: Schema(x=Category), r"Category\(\), not Category"),
        (lambda: Schema(has=Category()), "an identifier not reserved in filters, got 'has'"),
        (lambda: Schema(**{"a b": Category()}), "an identifier not reserved in filters, got 'a b'"),
    ],
)
def test_a_bad_column_gets_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


GOOD = {"country": ["us", "ca"], "tags": [[], ["a"]], "price": [1, 2], "posted": ["2026-01-01"] * 2, "size": [1, 2]}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"contry": ["us", "ca"]}, r"the table has a column 'contry' that the schema lacks; did you mean 'country'"),
        ({"size": None}, "the table must have the column 'size', a Number"),
        ({"size": [1]}, r"a table's columns must have the same length, but 'country' has 2.*'size' has 1"),
        ({"size": [1, 10]}, r"column 'size' \(Number\), id 22: must be from 0 to 9, got 10"),
        ({"size": [1, "2"]}, r"column 'size' \(Number\), id 22: must be a number, got str '2'"),
        ({"size": np.array([True, False])}, "id 11: must be a number, got bool"),
        ({"price": [16_777_217, 1]}, r"id 11: 16777217 is an integer that float32 cannot hold: give low, high"),
        ({"price": [0.5, 1e300]}, "id 22: 1e\\+300 is outside the float32 range"),
        ({"country": ["us", 3]}, r"column 'country' \(Category\), id 22: holds strings already, got int 3"),
        ({"country": ["us", 2.5]}, "id 22: must be a string or an integer, got float 2.5"),
        ({"country": ["us", ["ca"]]}, "id 22: must be a string or an integer, got list"),
        ({"tags": ["a", []]}, r"column 'tags' \(Tags\), id 11: must be a list of strings or integers, got str 'a'"),
        ({"tags": [[], ["a", 1]]}, "id 22: holds strings already, got int 1"),
        ({"tags": [[], list("abcdef")]}, r"id 22: is full: 'f' would be value 6 of 5; .* with Tags\(6\) or more"),
        ({"posted": [3, 4]}, "id 11: must be a time such as '2026-01-31' or a datetime, got int 3"),
        ({"posted": np.array([3, 4])}, "must be a time, got int64"),
        ({"posted": ["2026-01-01", "soon"]}, "id 22: must be a time such as .* got str 'soon'"),
        ({"posted": ["2026-01-01", "1960-01-01"]}, "id 22: must be from 1970-01-01T00:00:00 to 2106-02-07"),
        ({"country": np.zeros((2, 2))}, r"a column must have one dimension, got shape \(2, 2\)"),
        ({"country": 3}, "a column must be an array, a tensor or a list, got int"),
    ],
)  # fmt: skip
def test_a_table_that_does_not_fit_gets_a_sentence_and_changes_nothing(change, sentence):
    made = schema()
    before = made.to_json()
    table = {name: values for name, values in {**GOOD, **change}.items() if values is not None}
    with pytest.raises(ValueError, match=sentence):
        made.encode(table, name_rows([11, 22]), 2)
    assert made.to_json() == before


def test_a_table_of_no_known_kind_gets_a_sentence():
    with pytest.raises(ValueError, match=r"a table must be a pyarrow.Table, a pandas or polars DataFrame.*got int"):
        schema().encode(3)
    with pytest.raises(ValueError, match="a row for each of the 3 ids, got 2 rows"):
        schema().encode(GOOD, count=3)


@pytest.mark.parametrize(
    ("values", "kind", "sentence"),
    [
        ([1.5, None], Category(), "row 0: must be a string or an integer, got float 1.5"),
        ([None, "a"], Number(), "row 1: must be a number, got string"),
        ([None, 3], Timestamp(), "row 1: must be a time, got int64"),
        ([None, 3], Tags(3), "row 1: must be a list of strings or integers, got int64"),
        ([[], ["a", None]], Tags(3), "row 1: must be a list of strings or integers, got a list with null"),
        ([[], [], [1.5]], Tags(3), "row 2: must be a string or an integer, got float 1.5"),
    ],
)
def test_an_arrow_column_of_the_wrong_type_names_its_first_value(values, kind, sentence):
    pa = pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=sentence):
        Schema(x=kind).encode(pa.table({"x": pa.array(values)}))


def test_vocabularies_grow_when_what_was_encoded_is_taken():
    made = schema()
    first = made.encode(GOOD)
    assert first.growth == {"country": ["us", "ca"], "tags": ["a"]}
    assert made["country"].values == []
    made.grow_vocabularies(first.growth)
    version = made.version
    second = made.encode({**GOOD, "country": ["ca", "de"]})
    assert second.growth == {"country": ["de"]}
    assert made.decode("country", second.words).tolist() == [2, 3]
    made.grow_vocabularies(second.growth)
    assert made.version > version
    assert made.encode({**GOOD, "country": ["ca", "de"]}).growth == {}


def test_bits_of_tags_reach_over_words():
    made = Schema(t=Tags(130))
    encoded = made.encode({"t": [[i] for i in range(130)] + [list(range(130))]})
    made.grow_vocabularies(encoded.growth)
    unpacked = [
        [(int(encoded.words[p.word, row]) >> (p.shift + i)) & 1 for p in made.places["t"] for i in range(p.bits)]
        for row in range(131)
    ]
    assert np.array_equal(unpacked, np.vstack([np.eye(130, dtype=int), np.ones(130, dtype=int)]))
