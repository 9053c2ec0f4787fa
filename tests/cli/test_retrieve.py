"""`tigon retrieve`: from files of items to filtered answers."""

import datetime
import json

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("safetensors")
import pyarrow.csv as csv  # noqa: E402
import pyarrow.parquet as parquet  # noqa: E402

ITEMS, DIM = 300, 8
FLOATS = pa.list_(pa.float32())


def vectors(seed, count=ITEMS):
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


def table(**more):
    draw = np.random.default_rng(1)
    start = datetime.datetime(2026, 1, 1)
    columns = {
        "id": [f"job-{i}" for i in range(ITEMS)],
        "title": [f"Title {i}" for i in range(ITEMS)],
        "country": draw.choice(["us", "ca", "de"], ITEMS),
        "tags": [list(draw.choice(["spam", "new", "hot"], n, replace=False)) for n in draw.integers(0, 3, ITEMS)],
        "price": draw.uniform(0, 100, ITEMS),
        "stock": draw.integers(0, 50, ITEMS),
        "number": draw.integers(2**40, 2**40 + 1000, ITEMS),
        "posted": [start + datetime.timedelta(hours=i) for i in range(ITEMS)],
        "remote": draw.random(ITEMS) < 0.5,
        "embedding": pa.array(list(vectors(0)), type=FLOATS),
    }
    return pa.table(columns | more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("retrieve")
    parquet.write_table(table(), folder / "items.parquet")
    near = vectors(0)[:20] + 0.01
    np.save(folder / "queries.npy", near[:3])
    right = [[f"job-{i}"] for i in range(20)]
    queries = pa.table({"embedding": pa.array(list(near), type=FLOATS), "right": right})
    parquet.write_table(queries, folder / "queries.parquet")
    return folder


@pytest.fixture(scope="module")
def index(folder, here):
    built = here("retrieve", "build", folder / "items.parquet", "-o", folder / "jobs.index").ok()
    assert f"{ITEMS} items × {DIM}" in built.out
    for name, kind in (
        ("country", "Category"), ("tags", "Tags"), ("price", "Number"), ("posted", "Timestamp"), ("number", "Number"),
    ):  # fmt: skip
        assert any(name in line and kind in line for line in built.out.splitlines()), built.out
    assert "Warning" not in built.err
    return folder / "jobs.index"


def found(result):
    return [json.loads(line) for line in result.ok().out.splitlines()]


def test_a_filtered_search_is_that_of_numpy(folder, index, here):
    where = "country in ('us', 'ca') and not tags has 'spam' and price <= 60 and posted >= '2026-01-02' and remote == 1"
    rows = found(
        here("retrieve", "search", index, "--like", "job-7", "--where", where, "-k", 5, "--json",
              "--table", folder / "items.parquet", "--columns", "title,price")
    )  # fmt: skip
    items, matrix = table().to_pylist(), vectors(0).astype(np.float16).astype(np.float32)
    passing = [
        i for i, item in enumerate(items)
        if item["country"] in ("us", "ca") and "spam" not in item["tags"] and np.float32(item["price"]) <= 60
        and item["posted"] >= datetime.datetime(2026, 1, 2) and item["remote"]
    ]  # fmt: skip
    scores = matrix @ matrix[7]
    best = sorted(passing, key=lambda i: -scores[i])[:5]
    assert [row["id"] for row in rows] == [f"job-{i}" for i in best]
    assert [row["score"] for row in rows] == pytest.approx(scores[best].tolist(), rel=1e-5)
    assert [row["title"] for row in rows] == [f"Title {i}" for i in best]
    assert [row["price"] for row in rows] == [items[i]["price"] for i in best]


def test_a_table_and_what_a_filter_does(folder, index, here):
    shown = here("retrieve", "search", index, "--vectors", folder / "queries.npy", "-k", 2, "--explain",
                  "--where", "stock < 25").ok()  # fmt: skip
    assert shown.out.count("job-") == 6
    assert "query" in shown.out
    assert "stock in 1 value range" in shown.err
    assert "300 items; about" in shown.err
    nothing = here("retrieve", "search", index, "--like", "job-1", "--where", "country == 'fr'").ok()
    assert "no item passes" in nothing.out


def test_recall_is_whole_and_that_of_the_truth(folder, index, here):
    evaluated = ("retrieve", "evaluate", index, folder / "queries.parquet", "--truth", "right", "-k", "1,10")
    (first, tenth) = json.loads(here(*evaluated, "--json").ok().out)["rows"]
    assert (first["k"], tenth["k"]) == (1, 10)
    assert first["recall of the scan in fp32"] == tenth["recall of the scan in fp32"] == 1
    assert 0.1 < first["recall"] <= tenth["recall"] <= 1
    assert 0 < tenth["mrr"] <= tenth["ndcg"] <= 1
    assert "ndcg" in here(*evaluated).ok().out
    calibrated = ("retrieve", "calibrate", index, folder / "queries.parquet", "-k", "2", "--bits", "64")
    exact, few = json.loads(here(*calibrated, "--candidates", "2", "--json").ok().out)["rows"]
    assert exact["bits"] is None
    assert exact["recall"] == 1
    assert (few["bits"], few["candidates"]) == (64, 2)
    assert "recall@2" in here(*calibrated).ok().out
    here(*calibrated, "--bits", "64,a").problem("--bits must be positive integers, separated by commas, got 64,a")
    here(*calibrated, "--candidates", "1").problem("candidates must be integers from k, 2", "got 1")


def test_csv_vectors_from_a_file_and_numbers_as_ids(folder, here, tmp_path):
    plain = table().drop_columns(["embedding", "tags", "id"])
    csv.write_csv(plain, tmp_path / "items.csv")
    np.save(tmp_path / "x.npy", vectors(0))
    built = here("retrieve", "build", tmp_path / "items.csv", "--vectors", tmp_path / "x.npy", "--columns", "country",
                  "--metric", "cosine", "--batch-size", 64, "-o", tmp_path / "i")  # fmt: skip
    assert "ids: row numbers from 0 (--id selects a column)" in built.ok().out
    (row,) = found(here("retrieve", "search", tmp_path / "i", "--like", 250, "-k", 1, "--json"))
    assert row["id"] == 250
    assert row["score"] == pytest.approx(1, abs=1e-3)
    texts = [json.dumps(x) for x in vectors(0).tolist()]
    csv.write_csv(plain.append_column("v", [texts]).append_column("item_id", [range(ITEMS)]), tmp_path / "v.csv")
    here("retrieve", "build", tmp_path / "v.csv", "--vector", "v", "--columns", "stock", "--metric", "cosine", "-o",
          tmp_path / "j").ok()  # fmt: skip
    (row,) = found(
        here("retrieve", "search", tmp_path / "j", "--like", 250, "-k", 1, "--json", "--where", "stock >= 0")
    )
    assert row["id"] == 250


def test_a_schema_of_ones_own(folder, here, tmp_path):
    (tmp_path / "schema.json").write_text('{"country": "Category", "price": {"kind": "Number", "low": 0, "high": 50}}')
    build = ("retrieve", "build", folder / "items.parquet", "-o", tmp_path / "i", "--schema", tmp_path / "schema.json")
    here(*build).problem("price", "must be from 0 to 50", "'job-")
    assert not (tmp_path / "i").exists()
    (tmp_path / "schema.json").write_text('{"country": "Category"}')
    assert "filter columns" not in here(*build).ok().out
    here("retrieve", "search", tmp_path / "i", "--like", "job-1", "--where", "price < 3").problem("no column 'price'")
    (tmp_path / "schema.json").write_text('{"land": "Category"}')
    here(*build, "--overwrite").problem("must be a column in", "got 'land'")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("build", "nowhere.parquet", "-o", "x"), ("there is no file nowhere.parquet",)),
        (("build", "{items}", "-o", "{index}"), ("already exists; --overwrite replaces",)),
        (("build", "{items}", "-o", "x", "--vector", "titel"), ("--vector must be a column", "did you mean 'title'")),
        (("build", "{items}", "-o", "x", "--vector", "title"), ("'title', row 0", "must be numbers such as")),
        (("build", "{items}", "-o", "x", "--metric", "dot"), ("--metric must be one of ip, cosine, l2, got dot",)),
        (("build", "{queries}", "-o", "x", "--vectors", "{npy}"), ("a row for each of the 20 items, got 3",)),
        (("build", "{items}", "-o", "x", "--capacity", "10"), ("at least the 300 rows in", "got 10")),
        (("build", "{items}", "-o", "x", "--vectors", "{npy}", "--vector", "a"), ("are mutually exclusive",)),
        (("build", "{npy}", "-o", "x"), ("a file must end in .parquet",)),
        (("search", "{index}"), ("one of --vector, --vectors and --like must be given, got none",)),
        (("search", "{index}", "--vector", "1, 2"), ("must have 8 numbers", "got 2")),
        (("search", "{index}", "--vector", "a"), ("--vector must be numbers separated by commas, got 'a'",)),
        (("search", "{index}", "--like", "job-999"), ("--like must be an id in the index, got job-999",)),
        (("search", "{index}", "--like", "job-1", "--where", "cuntry == 'us'"), ("did you mean 'country'",)),
        (("search", "{index}", "--like", "job-1", "--where", "price <"), ("where",)),
        (("search", "nowhere", "--like", "job-1"), ("no index nowhere; create an index with tigon retrieve build",)),
        (("search", "{index}", "--like", "job-1", "--id", "id"), ("--id and --columns need --table",)),
        (("evaluate", "{index}", "{queries}", "-k", "0"), ("-k must be integers from 1 to 2,048",)),
        (("evaluate", "{index}", "{queries}", "--truth", "x"), ("--truth must be a column in", "right", "got 'x'")),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, tuple) else None,
)  # fmt: skip
def test_bad_input_gets_a_sentence(folder, index, here, arguments, words, tmp_path):
    places = {"items": folder / "items.parquet", "index": index, "queries": folder / "queries.parquet",
              "npy": folder / "queries.npy"}  # fmt: skip
    here("retrieve", *(word.format(**places) for word in arguments), cwd=tmp_path).problem(*words)
    assert not (tmp_path / "x").exists()


def test_rows_that_cannot_be_items(here, tmp_path):
    short = [list(x) for x in vectors(0).tolist()]
    short[7] = short[7][:3]
    parquet.write_table(table(embedding=pa.array(short, type=FLOATS)), tmp_path / "short.parquet")
    here("retrieve", "build", tmp_path / "short.parquet", "-o", tmp_path / "i").problem("row 7", "8 numbers", "got 3")
    wrong = vectors(0)
    wrong[9, 2] = np.nan
    parquet.write_table(table(embedding=pa.array(list(wrong), type=FLOATS)), tmp_path / "nan.parquet")
    here("retrieve", "build", tmp_path / "nan.parquet", "-o", tmp_path / "i").problem("NaN or infinity", "'job-9'")
    twice = table(id=["job-0" if i == 5 else f"job-{i}" for i in range(ITEMS)])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    built = here("retrieve", "build", tmp_path / "twice.parquet", "-o", tmp_path / "i").ok()
    assert "1 rows were replaced by later rows with the same id" in built.err
    assert f"{ITEMS - 1} items" in built.out


def columns(rows=60):
    return {
        "id": np.arange(rows),
        "v": np.random.default_rng(0).random((rows, 4)).tolist(),
        "price": np.arange(rows) / 7,
    }


def test_categories_of_pandas_and_odd_columns_are_items(here, tmp_path):
    odd = {
        "city": pa.array(["a", "b", None] * 20).dictionary_encode(), "nothing": pa.nulls(60), "has": ["x"] * 60,
        "wide": pa.array([2**64 - 1] * 60, pa.uint64()), "same": pa.array([2**40] * 60), "of": [{"a": 1}] * 60,
    }  # fmt: skip
    parquet.write_table(pa.table({**columns(), **odd}), tmp_path / "items.parquet")
    out = here("retrieve", "build", "items.parquet", "-o", "i", cwd=tmp_path).ok().out
    for words in (
        "city",
        "Category",
        "left out: the column is empty",
        "left out: the name is reserved in filters",
        "above 2**63",
    ):
        assert words in out, out
    done = here("retrieve", "search", "i", "--like", 5, "--where", "city == 'b'", "--json", cwd=tmp_path).ok()
    found = [json.loads(line) for line in done.out.splitlines()]
    assert {row["id"] % 3 for row in found} == {1}
    assert [row["rank"] for row in found] == [*range(1, 11)]
    build = ("retrieve", "build", "items.parquet", "-o", "j")
    here(*build, "--columns", "has", cwd=tmp_path).problem("--columns: cannot filter by has")
    here(*build, "--capacity", 10**13, cwd=tmp_path).problem("an index with 10,000,000,000,000 items", "GiB of memory")
    here("retrieve", "search", "i", "--like", 10**40, cwd=tmp_path).problem("--like must be an id in the index")


def test_files_that_are_wrong_further_down_get_a_sentence(here, tmp_path):
    build = ("retrieve", "build", "-o", "i")
    parquet.write_table(pa.table(columns(3000)), tmp_path / "whole.parquet", row_group_size=500, compression="none")
    content = bytearray((tmp_path / "whole.parquet").read_bytes())
    content[len(content) // 2 : len(content) // 2 + 400] = bytes(400)
    (tmp_path / "damaged.parquet").write_bytes(content)
    assert "Traceback" not in here(*build, "damaged.parquet", "--overwrite", cwd=tmp_path).err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "tigon.lock").touch()  # what a save leaves that found no room
    here("retrieve", "build", "whole.parquet", "-o", "full", "--overwrite", cwd=tmp_path).ok()
    here("retrieve", "build", "whole.parquet", "-o", ".", "--overwrite", cwd=tmp_path).problem(
        "contains the input whole.parquet"
    )


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((1, 2, 8)), "--vectors must be floats (queries, 8) or (8,), got (1, 2, 8) float64"),
        (np.zeros((1, 8), int), "got (1, 8) int64"),
        (np.float64(1), "got () float64"),
        (np.full((1, 8), np.nan), "finite numbers"),
        (np.zeros((2, 5)), "must have 8 numbers, like the index, got 5"),
        (np.array([{}], dtype=object), "must hold numbers, bools or texts, got Python objects"),
    ],
)
def test_queries_of_another_form_get_a_sentence(index, here, tmp_path, array, words):
    np.save(tmp_path / "q.npy", array)
    said = here("retrieve", "search", index, "--vectors", tmp_path / "q.npy").problem(words)
    assert "unsafely" not in said


@pytest.mark.parametrize(
    ("name", "arrays", "words"),
    [
        ("a.npz", {"indptr": [0, 2, 1, 2], "indices": [1, 0]}, "with consistent rows and columns"),
        ("a.npz", {"indptr": [0.0, 1.0], "indices": [1]}, "must have integer rows and columns"),
        ("a.txt", "0 999999999999\n", "from 0 to 2,147,483,647"),
        ("a.txt", f"0 {10**30}\n", "from 0 to 2,147,483,647"),
    ],
)
def test_pairs_of_impossible_numbers_get_a_sentence(here, tmp_path, name, arrays, words):
    pytest.importorskip("accelerate")
    file = tmp_path / name
    file.write_text(arrays) if isinstance(arrays, str) else np.savez(
        file, **{k: np.array(v) for k, v in arrays.items()}
    )
    here("retrieve", "train", file, "-o", tmp_path / "run").problem(words)
