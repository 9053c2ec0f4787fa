"""Expressions: their meaning against plain Python, as Python and as text, and what they refuse."""

import contextlib
import operator
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tables_made import as_expression, as_text, expressions, tables, truth

from tigon.retrieve import Category, Expression, Index, Number, Schema, Tags, Timestamp, col, parse
from tigon.retrieve.filters import attributes
from tigon.retrieve.filters.clauses import build_row_filter, compile_clauses
from tigon.retrieve.filters.value_counts import ValueCounts

SCHEMA = Schema(
    country=Category(),
    tags=Tags(48),
    price=Number(),
    rank=Number(0, 100, step=5),
    posted=Timestamp("h"),
    shop=Category(200_000),
)


def passing(expression, schema, words):
    found = build_row_filter(compile_clauses(expression, schema), schema)
    return found.mask(torch.from_numpy(words)).tolist()


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_a_filter_passes_what_the_expression_is_true_for(data):
    schema, kinds, table = data.draw(tables())
    tree = data.draw(expressions(kinds))
    encoded = schema.encode(table)
    schema.grow_vocabularies(encoded.growth)
    expression = as_expression(tree)
    try:
        found = passing(expression, schema, encoded.words)
    except ValueError as error:
        found = None
        refused = "clauses that must all hold" in str(error)
    assume(found is not None or not refused)
    rows = [{name: values[i] for name, values in table.items()} for i in range(12)]
    assert found == [truth(tree, kinds, row) is True for row in rows]
    for text in (as_text(tree), str(expression)):
        assert passing(parse(text), schema, encoded.words) == found, text
    assert (encoded.words >= 0).all()  # bit 63 is never used


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("country in ('us','ca') and not tags has 'spam' and price <= 30",
         col("country").is_in(["us", "ca"]) & ~col("tags").has("spam") & (col("price") <= 30)),
        ("COUNTRY = 'us'".replace("COUNTRY", "country"), col("country") == "us"),
        ("country <> 'us'", col("country") != "us"),
        ("country in ('us')", col("country").is_in(["us"])),
        ("country NOT IN ['us']", ~col("country").is_in(["us"])),
        ("3 <= price < 5", (col("price") >= 3) & (col("price") < 5)),
        ("price between -3 and +5 and country == 'us'", col("price").between(-3, 5) & (col("country") == "us")),
        ("price BETWEEN 1 AND 2 or price between 4 and 5", col("price").between(1, 2) | col("price").between(4, 5)),
        ("not price is null", ~col("price").is_null()),
        ("price is not null", ~col("price").is_null()),
        ("tags has_any ('a', 'b') or tags has_all ['c']", col("tags").has_any(["a", "b"]) | col("tags").has_all(["c"])),
        ("posted >= '2026-01-01' and\n posted < '2026-02-01'",
         (col("posted") >= np.datetime64("2026-01-01")) & (col("posted") < np.datetime64("2026-02-01"))),
        ("not (country == 'us' or country == 'ca')", ~((col("country") == "us") | (col("country") == "ca"))),
        ("not not country == 'has @ spam'", col("country") == "has @ spam"),
    ],
)  # fmt: skip
def test_text_says_the_same_as_python(text, meant):
    assert parse(text) == meant
    assert parse(str(meant)) == meant


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "where: the text is empty"),
        ("price <=", "not an expression"),
        ("price", "price alone is not a condition: compare the column"),
        ("__import__('os').system('x')", r"'\.' is not supported"),
        ("(lambda: 1)", "':' is not supported|lambda"),
        ("f(price) == 1", r"expected a column name, got f\(price\)"),
        ("price == f(1)", r"f\(1\) is not a value"),
        ("price == [x for x in y]", "is not a value"),
        ("price @ 'x'", "'@' is not supported"),
        ("price + 1 == 2", r"expected a column name, got price \+ 1"),
        ("price == null", "no value equals null: write is null"),
        ("country == us", "expected a value, got us: put strings in quotes, 'us'"),
        ("country is 'us'", "is must be followed by null or not null"),
        ("price between 1", "not an expression"),
        ("country == f'{price}'", "not an expression"),
        ("country == b'us'", "is not a value"),
        ("price if price else price", "is not a condition"),
        ("(" * 5000 + "price == 1" + ")" * 5000, "not an expression"),
        ("price == 1; price", "';' is not supported"),
    ],
)
def test_other_text_is_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse(text)


WORDS = st.sampled_from(
    ["price", "country", "has", "in", "(", ")", ",", "'a'", "1", "and", "or", "not", "==", "between"]
)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.text(max_size=40) | st.lists(WORDS).map(" ".join))
def test_any_text_is_an_expression_or_gets_a_sentence(text):
    said = ""
    try:
        found = parse(text)
    except ValueError as error:
        said = str(error)
    assert said.startswith("where: ") or isinstance(found, Expression)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: col("contry") == "us", r"where: there is no column 'contry'; did you mean 'country', a Category\."),
        (lambda: col("zzz") == 1, "there is no column 'zzz'; there are 'country', 'tags'"),
        (lambda: col("country") < "us", r"'country' is a Category: < is not supported, use ==, !=, is_in, is_null\."),
        (lambda: col("country").has("us"), "column 'country' is a Category: has is not supported"),
        (lambda: col("tags") == "a", "'tags' is a Tags: == is not supported, use has, has_any, has_all, is_null"),
        (lambda: col("price") <= "30", "column 'price' is a Number: compare with numbers, got str '30'"),
        (lambda: col("country") == 1.5, "column 'country' is a Category: compare with strings or integers"),
        (lambda: col("rank") <= 7, "7 lies between the steps 5 and 10; compare with a step, or create the column"),
        (lambda: col("posted") < "2026-01-01T00:30", "is not a whole 'h'; compare with 2026-01-01T00:00:00 or 2026"),
        (lambda: col("posted") < "soon", "compare with times such as '2026-01-31', got str 'soon'"),
        (lambda: col("posted") < 3, "compare with times such as '2026-01-31', got int 3"),
    ],
)
def test_a_filter_that_does_not_fit_the_schema_gets_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        compile_clauses(make(), SCHEMA)


@pytest.mark.parametrize(
    ("make", "kind", "sentence"),
    [
        (lambda: col("a") == None, ValueError, r"use is_null\(\)"),  # noqa: E711
        (lambda: col("a") == col("b"), ValueError, r"a column must be compared with a value, got col\('b'\)"),
        (lambda: col("a").is_in("us"), ValueError, r"col\('a'\).is_in must get a list of values, got str 'us'"),
        (lambda: (col("a") == 1) and (col("b") == 1), TypeError, "combine with &, |"),
        (lambda: 1 < col("a") < 3, TypeError, r"x.between\(a, b\)"),
        (lambda: (col("a") == 1) & True, TypeError, "& combines expressions, got bool True"),
        (lambda: col("a b"), ValueError, "must be an identifier, got 'a b'"),
    ],
)
def test_a_mistake_in_python_gets_a_sentence(make, kind, sentence):
    with pytest.raises(kind, match=sentence):
        make()


def test_a_value_that_no_item_has_passes_nothing_or_is_an_error():
    assert compile_clauses(col("country") == "zz", SCHEMA) == [((), ())]
    assert compile_clauses(col("tags").has("zz"), SCHEMA) == [((), ())]
    assert compile_clauses(~col("tags").has("zz"), SCHEMA) == []
    for expression in (col("country") == "zz", col("tags").has("zz"), col("country").is_in(["zz"])):
        with pytest.raises(ValueError, match=r"no item has the value 'zz' \(strict=True\)"):
            compile_clauses(expression, SCHEMA, strict=True)


def test_conditions_on_one_column_are_one_test():
    both = compile_clauses((col("price") > 3) & (col("price") <= 5) & (col("price") != 9), SCHEMA)
    assert len(both) == 1
    assert len(build_row_filter(both, SCHEMA).clauses[0]) == 1
    schema = Schema(tags=Tags(3, ["a", "b", "c"]))
    assert len(compile_clauses(col("tags").has("a") & col("tags").has("b"), schema)) == 1
    assert len(compile_clauses(~col("tags").has("a") & ~col("tags").has("b"), schema)) == 1
    assert compile_clauses(col("tags").has("a") & ~col("tags").has("a"), schema) == [((), ())]
    assert compile_clauses(col("tags").has("a") | ~col("tags").has("a"), schema) == []
    assert compile_clauses(col("price").is_null() | ~col("price").is_null(), SCHEMA) == []
    implied = (col("price") < 3) & ((col("price") < 5) | (col("country") == "us"))
    assert len(compile_clauses(implied, SCHEMA)) == 1


def test_a_large_is_in_becomes_ranges_or_a_bitmap():
    schema = Schema(shop=Category(200_000, range(1000)), country=Category(10, ["us", "ca"]))
    shops = np.arange(1001) - 1
    words = schema.encode({"shop": [None, *range(1000)], "country": ["us", *["ca"] * 1000]}).words
    for wanted, tests in ((list(range(10, 500)), 1), (list(range(0, 32, 2)), 16), (list(range(0, 900, 2)), 1)):
        found = build_row_filter(compile_clauses(col("shop").is_in(wanted), schema), schema)
        assert [len(clause) for clause in found.clauses] == [tests]
        assert found.mask(torch.from_numpy(words)).tolist() == np.isin(shops, wanted).tolist()
        turned = build_row_filter(compile_clauses(~col("shop").is_in(wanted), schema), schema)
        expected = ~np.isin(shops, wanted) & (shops >= 0)
        assert turned.mask(torch.from_numpy(words)).tolist() == expected.tolist()
        either = build_row_filter(compile_clauses(col("shop").is_in(wanted) | (col("country") == "us"), schema), schema)
        assert either.mask(torch.from_numpy(words)).tolist() == (np.isin(shops, wanted) | (shops < 0)).tolist()


def test_too_many_clauses_name_the_part_to_simplify():
    names = [f"c{i}" for i in range(40)]
    schema = Schema(**{name: Category(3, [0, 1]) for name in names})
    both = col("c0") == 1
    for name in names[1:18]:
        both = both & (col(name) == 1)
    with pytest.raises(ValueError, match="becomes 18 clauses that must all hold, more than 16"):
        compile_clauses(both, schema)
    pairs = (col("c0") == 1) & (col("c1") == 1)
    for i in range(2, 40, 2):
        pairs = pairs | ((col(names[i]) == 1) & (col(names[i + 1]) == 1))
    with pytest.raises(ValueError, match="Simplify 'c0 == 1 and c1 == 1 or c2 == 1 and c3 == 1") as raised:
        compile_clauses((col("c5") == 0) & pairs, schema)
    assert len(str(raised.value)) < 500
    many = col("c0") == 1
    for name in names[1:20]:
        many = many | (col(name) == 1)
    with pytest.raises(ValueError, match="a part needs 20 tests, more than 16: simplify the conditions on c0, c1"):
        build_row_filter(compile_clauses(many, schema), schema)
    number = Schema(price=Number())
    with pytest.raises(ValueError, match="'price' has 17 value ranges"):
        build_row_filter(compile_clauses(col("price").is_in([3**i / 4 for i in range(17)]), number), number)


def test_the_estimated_share_follows_the_counts():
    rng = np.random.default_rng(0)
    n = 20_000
    table = {
        "country": rng.choice(["us", "ca", "de", None], n, p=[0.5, 0.2, 0.2, 0.1]).tolist(),
        "tags": [[t for t, p in (("a", 0.3), ("b", 0.1)) if rng.random() < p] for _ in range(n)],
        "price": rng.exponential(30, n),
        "rank": rng.integers(0, 21, n) * 5,
        "posted": np.datetime64("2026-01-01", "s") + rng.integers(0, 86_400 * 100, n),
        "shop": rng.integers(0, 1000, n),
    }
    encoded = SCHEMA.encode(table)
    schema = Schema.from_json(SCHEMA.to_json())
    schema.grow_vocabularies(encoded.growth)
    counts = ValueCounts(schema)
    counts.add(encoded.words)
    for expression in (
        col("country") == "us", ~(col("country") == "us"), col("country").is_null(), col("tags").has("a"),
        ~col("tags").has_any(["a", "b"]), col("tags").has_all(["a", "b"]), col("price") <= 30, col("rank") >= 50,
        col("posted").between("2026-02-01", "2026-03-01"), col("shop").is_in(range(100)), col("country") == "zz",
        (col("country") == "us") & (col("price") > 10), (col("country") == "us") | (col("price") > 10),
    ):  # fmt: skip
        share = counts.estimate_share(compile_clauses(expression, schema))
        true = np.mean(passing(expression, schema, encoded.words))
        assert abs(share - true) <= 0.02, (str(expression), share, true)
    before = {name: bins.copy() for name, bins in counts.bins.items()}
    counts.add(encoded.words[:, :500])
    counts.add(encoded.words[:, :500], sign=-1)
    assert counts.items == n
    assert all((counts.bins[name] == bins).all() for name, bins in before.items())


# ------------------------------------------------------------------------------------------------------ cost and memory


def every_other(first, last):
    return f"n in ({', '.join(map(str, range(first, last, 2)))})"


def many(part, joiner=" or ", size=60_000):
    parts = [part(i) for i in range(size // (len(part(9999)) + len(joiner)))]
    return joiner.join(parts)


COSTLY = {
    "two lists": f"{every_other(0, 14_000)} and {every_other(1, 14_000)}",
    "two lists, or another": f"({every_other(0, 12_000)} or c == 1) and ({every_other(1, 12_000)} or c == 1)",
    "many or": many(lambda i: f"n == {2 * i}"),
    "many and": many(lambda i: f"n != {2 * i}", " and "),
    "many bands": many(lambda i: f"n between {9 * i} and {9 * i + 5}"),
    "no tags": many(lambda i: "g is null"),
    "tags": many(lambda i: f"g has_all ({i % 4000}, {i % 3999 + 1})"),
    "products": " or ".join(f"({every_other(i, 3000 + i)} and c == {i})" for i in range(7)),
    "a chain": "<".join(["n", "1"] * 20_000),
    "wide and narrow": "n < 2000000 or " + every_other(3_000_001, 3_000_041),
    "wide bands": " or ".join(f"n between {i} and {i + 2000}" for i in range(0, 4_000_000, 4000)),
}


@pytest.mark.parametrize("case", COSTLY)
def test_a_filter_takes_seconds_at_most(case):
    schema = Schema(n=Number(0, 4_000_000, step=1), c=Category(4_000_000), g=Tags(4032))
    begun = time.thread_time()
    found = None
    with contextlib.suppress(ValueError):
        found = build_row_filter(compile_clauses(parse(COSTLY[case]), schema), schema)
    literals = [literal for clause in found.clauses for literal in clause] if found else []
    assert sum(len(literal.codes or ()) for literal in literals) <= 2**16
    assert time.thread_time() - begun < 4


def test_equal_parts_are_compiled_once(monkeypatch):
    from tigon.retrieve.filters import clauses

    compiled, right = [], clauses._compile_comparison
    monkeypatch.setattr(clauses, "_compile_comparison", lambda *given: compiled.append(given[0]) or right(*given))
    compile_clauses(parse("c == 1 or c == 2 or c == 1"), Schema(c=Category(4)))
    assert [part.value for part in compiled] == [1, 2]


def test_wide_and_narrow_ranges_are_exact():
    schema = Schema(n=Number(0, 4_000_000, step=1))
    values = [0, 1, 1_999_999, 2_000_000, 2_000_001, 3_000_000, 3_000_001, 3_000_002, 3_000_039, 3_000_041, None]
    words = schema.encode({"n": values}).words
    text = "n < 2000000 or " + every_other(3_000_001, 3_000_041)
    listed = set(range(3_000_001, 3_000_041, 2))
    expected = [value is not None and (value < 2_000_000 or value in listed) for value in values]
    assert passing(parse(text), schema, words) == expected
    inverse = [value is not None and not passes for value, passes in zip(values, expected, strict=True)]
    assert passing(~parse(text), schema, words) == inverse


def test_numbers_beyond_float64_are_compared():
    values = [-np.inf, -1e38, 0.0, 1e38, np.inf, None]
    schema = Schema(price=Number(), rank=Number(0, 10, step=5))
    words = schema.encode({"price": values, "rank": [0, 5, 10, None, 0, 5]}).words
    for digits in (39, 309, 400, 1200):
        for bound in (10**digits, -(10**digits)):
            for name, compare in (("<", operator.lt), ("<=", operator.le), (">", operator.gt), (">=", operator.ge)):
                expected = [value is not None and compare(value, bound) for value in values]
                assert passing(parse(f"price {name} {bound}"), schema, words) == expected, (name, digits)
            assert passing(parse(f"rank < {bound}"), schema, words)[0] == (bound > 0)
            assert not any(passing(parse(f"price == {bound}"), schema, words))


def test_values_that_nothing_can_hold_get_a_sentence():
    deep = col("price") == 1
    for i in range(2000):
        deep = (deep & (col("price") == i)) | (col("rank") == 5)
    index = Index(4, 10, schema=SCHEMA)
    index.upsert(["a"], torch.ones(1, 4), {name: [None] for name in SCHEMA.columns})
    for where, sentence in [
        (f"price <= 1{'0' * 5000}", "is not an expression"),
        (f"country == 0x{'f' * 2000}", "an integer must have at most 4,096 bits"),
        ("posted >= '0001-01-01T00:00+14:00'", "compare with times"),
        ("posted <= '9999-12-31T23:59:59-14:00'", "compare with times"),
        (deep, "nests too deeply"),
        ("(" * 30_000 + "price == 1" + ")" * 30_000, "is not an expression"),
    ]:
        with pytest.raises(ValueError, match=sentence) as raised:
            index.search(torch.ones(1, 4), 1, where)
        assert len(str(raised.value)) < 600


def test_large_filters_that_are_evicted_leave_no_memory(monkeypatch):
    monkeypatch.setattr(attributes, "MOST_FILTER_BYTES", 1 << 20)
    index = Index(4, 8, "float32", schema=Schema(large=Number(0, 4_000_000, step=1)))
    index.upsert([0], torch.ones(1, 4), {"large": [0]})

    def search(first):
        index.search(torch.ones(1, 4), 1, f"large in ({', '.join(str(first + 2 * i) for i in range(1500))})")

    search(0)
    before = sys.getallocatedblocks()
    for i in range(1, 25):
        search(3001 * i)
    assert sys.getallocatedblocks() - before < 40_000, "each filter has some 5,000 objects"
