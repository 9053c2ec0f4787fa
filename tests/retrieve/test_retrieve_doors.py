"""What is refused where values come in, before anything changes; and what has no elements at all."""

import copy
import datetime
import decimal
import pickle
import threading

import numpy as np
import pytest
import torch

from tigon import retrieve
from tigon.retrieve import Category, Index, Links, Number, Retriever, Schema, ShardedIndex, Tags, Timestamp, col

D = 4
SURROGATE = "a\ud800"


def table(rows=1, **columns):
    known = {"country": ["us"], "tags": [["x"]], "price": [1.0], "posted": ["2026-01-01"]}
    return {name: values * rows for name, values in (known | columns).items()}


def made(strings=True):
    index = Index(D, 20, schema=Schema(country=Category(), tags=Tags(5), price=Number(), posted=Timestamp()))
    index.upsert(["i0", "i1"] if strings else [0, 1], torch.eye(2, D), table(2))
    return index


# --------------------------------------------------------------------------------------------- text that is not UTF-8


@pytest.mark.parametrize(
    ("ids", "columns", "sentence"),
    [
        (["b", SURROGATE], {}, r"Index.upsert: ids must be text encodable in UTF-8, got str 'a\\ud800'"),
        (np.array(["b", SURROGATE]), {}, r"ids must be text encodable in UTF-8, got str 'a\\ud800'"),
        (["b", "c"], {"country": np.array([SURROGATE, "us"])}, r"'country' \(Category\), id 'b': must be UTF-8 text"),
        (["b", "c"], {"tags": [["new"], ["new", SURROGATE]]}, r"'tags' \(Tags\), id 'c': must be UTF-8 text"),
        (["b", "c"], {"country": [1, 10**5000]}, r"'country' .*, id 'c': must be a 64-bit integer, got int with"),
        (["b", "c"], {"tags": [[1], [2**63]]}, r"'tags' .*, id 'c': must be a 64-bit integer, got int 92233720"),
        (["b", "c"], {"country": [1e300, None]}, r"'country' .*, id 'b': must be a 64-bit integer, got int 1000"),
    ],
)
def test_text_that_cannot_be_written_is_refused_before_anything_changes(ids, columns, sentence, tmp_path):
    for index in (made(), Index(D, 20, schema=made().schema)):
        before = index.schema.to_json(), len(index), getattr(index.table.directory.ids, "kind", None)
        given = {name: columns.get(name, values) for name, values in table(2, price=[2.0], country=["new"]).items()}
        with pytest.raises(ValueError, match=sentence):
            index.upsert(ids, torch.ones(2, D), given)
        assert (index.schema.to_json(), len(index), getattr(index.table.directory.ids, "kind", None)) == before
        index.save(tmp_path / "a")
        assert len(Index.load(tmp_path / "a")) == len(index)


def test_bytes_of_arrow_that_are_not_utf8_are_refused():
    pa = pytest.importorskip("pyarrow")
    wrong = pa.array([b"ok", b"\xff\xfe"]).cast(pa.binary()).view(pa.string())
    with pytest.raises(ValueError, match=r"Index.upsert: ids must be UTF-8 text, got other bytes"):
        Index(D, 9).upsert(wrong, torch.ones(2, D))
    for column, values in (("country", wrong), ("tags", pa.ListArray.from_arrays([0, 1, 2], wrong))):
        given = pa.table({name: values if name == column else pa.array(v) for name, v in table(2).items()})
        with pytest.raises(ValueError, match=rf"column '{column}' .*: must be UTF-8 text, got other bytes"):
            made().upsert(["b", "c"], torch.ones(2, D), given)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Category(values=["us", SURROGATE]), "Category: values must be a list of strings or of integers"),
        (lambda: Tags(5, [SURROGATE]), "Tags: values must be a list of strings or of integers"),
        (lambda: Schema(**{SURROGATE: Category()}), "a column name must be an identifier"),
        (lambda: Schema.from_json('{"a": {"kind": "Category", "values": ["\\ud800"]}}'), "is not UTF-8 text"),
        (lambda: retrieve.parse(f"country == '{SURROGATE}'"), "where: the text must be encodable in UTF-8"),
        (lambda: made().search(torch.ones(1, D), 1, f"country == '{SURROGATE}'"), "encodable in UTF-8"),
        (lambda: made().delete([SURROGATE]), "Index.delete: ids must be text encodable in UTF-8"),
        (lambda: Index.over(torch.eye(2), ["a", SURROGATE]), "Index.over: ids must be text encodable in UTF-8"),
        (
            lambda: Links.fit({"a": ["x", SURROGATE]}, {"b": ["u", "v"]}, [(0, 0)], query_schema=Schema(a=Category()),
                              item_schema=Schema(b=Category())),
            r"Links.fit: column 'a' \(Category\) for queries, row 1: must be UTF-8 text",
        ),
        (
            lambda: Links.fit({"a": ["x", "y"]}, {"b": [["u"], [SURROGATE]]}, [(0, 0)],
                              query_schema=Schema(a=Category()), item_schema=Schema(b=Tags(5))),
            r"Links.fit: column 'b' \(Tags\) for items, row 1: must be UTF-8 text",
        ),
    ],
)  # fmt: skip
def test_every_door_refuses_such_text(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_a_filter_by_such_text_finds_nothing():
    index = made()
    assert (index.search(torch.ones(1, D), 2, col("country") == SURROGATE).scores == -torch.inf).all()
    assert SURROGATE not in index


# --------------------------------------------------------------------------------------------------- nothing at all


@pytest.mark.parametrize("strings", [False, True])
def test_an_index_without_items_goes_through_everything(strings, tmp_path):
    name = str if strings else int
    index = made(strings)
    index.delete(["i0", "i1"] if strings else [0, 1])
    index.save(tmp_path / "a")
    opened = Index.open(tmp_path / "a")
    opened.upsert([], torch.zeros(0, D), table(0))
    opened.upsert([name(7)], torch.ones(1, D), table())
    opened.delete([name(7)])
    opened.delete([])
    opened.close()
    for again in (Index.load(tmp_path / "a"), copy.deepcopy(index), pickle.loads(pickle.dumps(index))):
        assert len(again) == 0
        assert again.search(torch.ones(2, D), 3, "price < 2").scores.shape == (2, 3)
        assert again.search(torch.zeros(0, D), 3).scores.shape == (0, 3)
        assert str(again.plan())
        assert again.explain("country == 'us'").items == 0
        again.upsert([name(7)], torch.ones(1, D), table())
        assert name(7) in again
    state = Index(D, 20, schema=index.schema)
    state.load_state_dict(index.state_dict())
    assert len(state) == 0
    state.save(tmp_path / "b")
    assert len(Index.load(tmp_path / "b")) == 0
    Retriever(torch.nn.Linear(2, D), index).save_pretrained(tmp_path / "r")
    again = Retriever.from_pretrained(tmp_path / "r", torch.nn.Linear(2, D))
    assert again(torch.zeros(0, 2), 3).scores.shape == (0, 3)


def test_parameters_without_rows_or_pairs():
    for shape in ((0, D), (3, 0)):
        with pytest.raises(ValueError, match=r"Index.over: parameter must be .*, neither 0, .* got \((0, 4|3, 0)\)"):
            Index.over(torch.zeros(*shape))
    towers = retrieve.TwoTowers(3, 2, 4, torch.zeros(0, 2, dtype=torch.int64))
    user, item = towers(torch.zeros(0, 2, dtype=torch.int64))
    assert (user.shape, item.shape) == ((3, 4), (2, 4))
    assert user.isfinite().all()


def test_a_retriever_whose_encoder_is_towers_without_pairs_is_saved(tmp_path):
    towers, index = retrieve.TwoTowers(3, 2, D, torch.zeros(0, 2, dtype=torch.int64)), Index(D, 9)
    index.upsert([0, 1], torch.eye(2, D))
    encoder = torch.nn.Sequential(torch.nn.Linear(2, D))
    encoder.towers = towers
    Retriever(encoder, index).save_pretrained(tmp_path)
    Retriever.from_pretrained(tmp_path, encoder)


SCALARS = [torch.tensor(3), torch.tensor(2.5), np.array(3), np.float32(2), np.int64(3)]


@pytest.mark.parametrize("value", SCALARS, ids=repr)
def test_values_without_dimensions_get_a_sentence(value):
    index = made()
    for call in (
        lambda: index.upsert(value, torch.ones(1, D), table()),
        lambda: index.upsert(["b"], value, table()),
        lambda: index.upsert(["b"], torch.ones(1, D), table() | {"price": value}),
        lambda: index.upsert(["b"], torch.ones(1, D), table() | {"country": value}),
        lambda: index.upsert(["b"], torch.ones(1, D), table() | {"tags": value}),
        lambda: index.delete(value),
        lambda: index.search(value),
        lambda: Index.over(value),
        lambda: Index.over(torch.eye(2), value),
        lambda: Category(values=value),
        lambda: col("country").is_in(value),
    ):
        with pytest.raises(ValueError, match=r"^(Index\.\w+|retrieve|Category|where): "):
            call()


# ----------------------------------------------------------------------------------------------------------- numbers


def test_an_id_of_whatever_type_may_be_asked_for():
    integers, strings = made(strings=False), made()
    for id in (1, np.int64(1), np.uint8(1), torch.tensor(1)):
        assert id in integers
    for id in (1.0, 1.5, True, None, "1", b"1", 2**70, -(2**70), -1, float("nan"), [1], (1,), np.array([1]), object()):
        assert id not in integers
    assert "i0" in strings
    assert np.str_("i0") in strings
    for id in (0, None, b"i0", 1.5, ["i0"], object()):
        assert id not in strings
        assert id not in Index(D, 3)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, lambda n: torch.tensor(n), lambda n: np.array(n)])
def test_integers_of_numpy_and_torch_are_integers(kind, tmp_path):
    index = Index(kind(D), kind(20), schema=Schema(c=Category(kind(9)), t=Tags(kind(5))), codes="sign", bits=kind(64))
    index.upsert([1, 2], torch.eye(2, D), {"c": [1, 2], "t": [[1], []]})
    assert index.search(torch.ones(1, D), kind(2)).ids.shape == (1, 2)
    assert index.search(torch.ones(2, D), [kind(2), kind(1)]).ids.shape == (2, 2)
    index.grow(kind(30))
    index.limit_filter_cache(kind(0))
    index.warmup(torch.ones(1, D), kind(2))
    index.save(tmp_path)
    assert Index.load(tmp_path).capacity == 30
    with pytest.raises(ValueError, match="k must be an integer"):
        index.search(torch.ones(1, D), True)


def test_queries_that_are_not_finite_are_refused():
    index = made()
    query = torch.ones(3, D)
    query[1, 2] = torch.nan
    for wrong in (query, query.numpy(), query.nan_to_num(float("-inf")), query.half(), query.double() * 1e300):
        with pytest.raises(
            ValueError, match=r"Index.search: query must be finite, got NaN or infinity in query [01]\."
        ):
            index.search(wrong, 2)
    with pytest.raises(ValueError, match=r"query must be finite"):
        Retriever(lambda q: q, index)(query, 2)
    with retrieve.Batcher(index) as batcher, pytest.raises(ValueError, match="query must be finite"):
        batcher.search(query, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"low": 0, "high": 1, "step": 1e-320}, {"low": -1e308, "high": 1e308}, {"low": 0, "high": 10**400},
        {"low": 0, "high": 2**70, "step": 1}, {"low": np.float32("nan"), "high": 1},
        {"low": 0, "high": 1, "bits": 2**70},
    ],
)  # fmt: skip
def test_numbers_beyond_reason_get_a_sentence(options):
    with pytest.raises(ValueError, match=r"^Number: "):
        Number(**options)
    for end in ("low", "high"):
        with pytest.raises(ValueError, match=f"Timestamp: {end} must be a time"):
            Timestamp(**{end: np.datetime64("NaT")})


VALUES = [
    None, -1, 0.5, 2**63 - 1, float("inf"), "", "a\0", '"', "é\U0001f600", True, np.int8(3), np.str_("x"),
    decimal.Decimal(3), datetime.date(2026, 1, 1), np.datetime64("2026"), "2026-01-01T00:00Z",
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_whatever_is_taken_is_saved_and_read_back(value, tmp_path):
    kinds = Category(9), Tags(5), Number(), Number(-5, 5, step=0.5), Timestamp("D", "0001-01-01", "9999-12-31")
    for kind in kinds:
        column = [[value, value]] if isinstance(kind, Tags) else [value]
        for ids, given in (([1], column), ([value], [None])):
            index = Index(D, 5, schema=Schema(x=kind))
            try:
                index.upsert(ids, torch.ones(1, D), {"x": given})
            except ValueError:
                continue
            index.save(tmp_path)
            again = Index.load(tmp_path)
            assert (len(again), again.schema) == (1, index.schema)
            assert torch.equal(again.table.words[:, :1], index.table.words[:, :1])
            assert ids[0] in again


def test_a_decimal_that_is_nan_is_missing():
    index = made()
    index.upsert(["b"], torch.ones(1, D), table() | {"price": [decimal.Decimal("NaN")]})
    assert index.search(torch.ones(1, D), 3, "price is null").ids[0, 0] == "b"


# ------------------------------------------------------------------------------------------------------------- times


@pytest.mark.parametrize(
    "times",
    [
        np.array([18448479763309], "datetime64[s]"), np.array([-(2**62)], "datetime64[m]"),
        np.array([10**13], "datetime64[Y]"), np.array([10**16], "datetime64[ms]"),
        [None, np.datetime64(18448479763309, "s")],
    ],
    ids=str,
)  # fmt: skip
def test_times_that_would_wrap_around_are_refused(times):
    index = made()
    rows = len(times)
    with pytest.raises(ValueError, match=r"column 'posted' \(Timestamp\), id .*: must be a time within 290,000 years"):
        index.upsert([f"n{i}" for i in range(rows)], torch.ones(rows, D), table(rows) | {"posted": times})
    assert len(index) == 2


def test_times_of_arrow_that_would_wrap_around_are_refused():
    pa = pytest.importorskip("pyarrow")
    given = pa.table({**{k: pa.array(v) for k, v in table().items() if k != "posted"},
                      "posted": pa.array([18448479763309], pa.timestamp("s"))})  # fmt: skip
    with pytest.raises(ValueError, match="must be a time within 290,000 years"):
        made().upsert(["b"], torch.ones(1, D), given)


def test_times_of_every_unit_are_read():
    for unit in ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps"):
        index = made()
        day = np.datetime64("1970-01-01" if unit in ("Y", "W", "ps") else "2026-01-01")
        times = np.array([day, "NaT"]).astype(f"datetime64[{unit}]")
        index.upsert(["b", "c"], torch.ones(2, D), table(2) | {"posted": times})
        ids = index.search(torch.ones(1, D), 9, col("posted") == day.astype(object)).ids[0]
        assert ("b" in ids, "c" in ids) == (True, False), unit


@pytest.mark.parametrize(
    ("times", "unit"),
    [
        (["2026-01-01", "2030-01-01"], "s"), (["0001-01-01", "2026-01-01"], "m"), (["1969-01-01"], "m"),
        (["2026-01-01", "2200-01-01"], "m"), (["0001-01-01", "9999-12-31"], "h"), ([], "s"),
    ],
)  # fmt: skip
def test_a_column_of_times_that_is_described_holds_them(times, unit):
    pa = pytest.importorskip("pyarrow")
    from tigon.retrieve.cli import describe

    values = np.array(times, "datetime64[us]")
    column = describe._times(pa.chunked_array([pa.array(values)]), describe.TIMES)
    assert column.unit == unit
    assert len(column.codes(values)[0]) == len(times)


def test_times_that_no_column_holds_are_left_out():
    pa = pytest.importorskip("pyarrow")
    from tigon.retrieve.cli import describe

    for value, reason in ((18448479763309, "290,000 years"), (2**40, "outside the years 1 to 9999")):
        column = pa.chunked_array([pa.array([0, value], pa.timestamp("s"))])
        assert reason in describe._times(column, describe.TIMES)
    dates = pa.chunked_array([pa.array([datetime.date(1, 1, 1)])])
    assert describe._times(dates, describe.DATES).unit == "D"


# ------------------------------------------------------------------------------------------------------------- names


def named(*names):
    return Schema(**{name: Category() for name in names})


def test_a_column_whose_name_has_a_ligature_is_found():
    index = Index(D, 9, schema=named("\ufb01eld", "ok"))
    index.upsert([1, 2], torch.eye(2, D), {"\ufb01eld": ["a", "b"], "ok": [1, 2]})
    for where in ("\ufb01eld == 'a'", "field == 'a'", col("\ufb01eld") == "a", col("field") == "a", "not field == 'b'"):
        assert index.search(torch.ones(1, D), 2, where).ids.tolist() == [[1, -1]]
    with pytest.raises(ValueError, match="columns 'field' and '\ufb01eld' have the same name in filters"):
        named("field", "\ufb01eld")
    with pytest.raises(ValueError, match="an identifier not reserved in filters"):
        named("\uff49\uff4e")  # "in", in wide letters


@pytest.mark.parametrize(
    "text",
    [
        '{"a": {"kind": ["Category"]}}', '{"a": {"kind": {"x": 1}}}', '{"a": ["Category"]}', '{"a": null}', '{"a": 3}',
        '{"a": {"kind": "Category", "values": 5}}', '{"a": {"kind": "Category", "values": {"x": 1}}}',
        '{"a": {"kind": "Category", "values": [[1]]}}', '{"a": {"kind": "Category", "values": ["a", 1]}}',
        '{"a": {"kind": "Category", "size": "9"}}', '{"a": {"kind": "Tags", "size": 1e3}}',
        '{"a": {"kind": "Number", "low": "0", "high": 1}}', '{"a": {"kind": "Number", "bits": [8]}}',
        '{"a": {"kind": "Timestamp", "unit": ["s"]}}', '{"a": {"kind": "Timestamp", "low": 5}}', "[" * 200_000, "",
        "null",
        '{"a": {"kind": "Number", "low": 0, "high": 1' + "0" * 400 + "}}", "\ud800", b"\xff", None, 5, [],
    ],
    ids=lambda text: str(text)[:40].encode("ascii", "replace").decode(),
)  # fmt: skip
def test_descriptions_of_a_schema_that_make_no_sense_get_a_sentence(text):
    with pytest.raises(ValueError, match=r"^(Schema\.from_json|Category|Tags|Number|Timestamp): "):
        Schema.from_json(text)


def test_what_cannot_be_held_in_memory_gets_a_sentence():
    with pytest.raises(ValueError, match="Index: capacity must fit in memory"):
        Index(D, 10**15)


# ------------------------------------------------------------------------------------------------------------ copies


def test_copies_beside_updates_and_searches_are_of_one_moment():
    """Each update writes a pair of items and takes the pair before away."""
    index, stop, wrong = Index(D, 200, schema=Schema(n=Number())), threading.Event(), []
    index.upsert(["0a", "0b"], torch.ones(2, D), {"n": [0, 0]})

    def run(work):
        try:
            for n in range(10**9):
                if stop.is_set():
                    return
                work(n)
        except BaseException as error:
            wrong.append(error)

    def write(n):
        with index.table.scheduler.update_lock:
            index.upsert([f"{n + 1}a", f"{n + 1}b"], torch.full((2, D), float(n % 100)), {"n": [n % 100] * 2})
            index.delete([f"{n}a", f"{n}b"])

    def search(n):
        index.search(torch.ones(1, D), 3, f"n >= {n % 300}")

    threads = [threading.Thread(target=run, args=(work,)) for work in (write, search, search)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(8):
            for copied in (copy.deepcopy(index), pickle.loads(pickle.dumps(index))):
                assert len(copied) == 2
                hits = copied.search(torch.ones(1, D), 2)
                number = int(hits.ids[0, 0][:-1])
                assert sorted(hits.ids[0]) == [f"{number}a", f"{number}b"]
                assert hits.scores[0].tolist() == [D * ((number - 1) % 100 if number else 1)] * 2
                assert copied.table.attributes.counts.items == 2
                assert copied.table.attributes.counts.schema is copied.schema
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_copied_model_and_its_index_share_the_parameter():
    model = torch.nn.Module()
    model.table = torch.nn.Embedding(5, D)
    model.index = Index.over(model.table, codes="int8")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.index.embeddings.data_ptr() == copied.table.weight.data_ptr() != model.table.weight.data_ptr()
        assert torch.equal(copied.index.search(torch.ones(1, D), 3).ids, model.index.search(torch.ones(1, D), 3).ids)


def test_a_sharded_index_is_not_copied(process_group):
    index = ShardedIndex(D, 9)
    for call in (lambda: pickle.dumps(index), lambda: copy.deepcopy(index)):
        with pytest.raises(TypeError, match=r"ShardedIndex: an index over .* cannot be copied or pickled"):
            call()
