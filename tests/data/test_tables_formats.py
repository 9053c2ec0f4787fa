"""Files of every format become the table that was written, and files that cannot be read get a sentence."""

import gzip
import json

import pytest

pa = pytest.importorskip("pyarrow")

from pyarrow import csv, feather, ipc, parquet  # noqa: E402

from tigon import tables  # noqa: E402
from tigon.data import recbole  # noqa: E402

TABLE = pa.table({"user": ["a", "NA", ""], "n": [1, None, 3], "x": [0.5, -1.0, None], "click": [0, 1, 1]})
TAGGED = TABLE.append_column("tags", pa.array([["u", "v"], [], None], pa.list_(pa.string())))


def lines_of(table):
    return "".join(json.dumps(row) + "\n" for row in table.to_pylist())


def written(path, ending):
    path = path / f"rows{ending}"
    if ending == ".parquet":
        parquet.write_table(TAGGED, path)
    elif ending == ".feather":
        feather.write_feather(TAGGED, path)
    elif ending == ".arrow":
        with ipc.new_file(path, TAGGED.schema) as sink:
            sink.write_table(TAGGED)
    elif ending.startswith(".jsonl"):
        text = lines_of(TAGGED).encode()
        path.write_bytes(gzip.compress(text) if ending.endswith(".gz") else text)
    else:
        # Nulls of text would be written as "", and read as "" again.
        options = csv.WriteOptions(delimiter="\t" if ".tsv" in ending else ",", quoting_style="none")
        csv.write_csv(TABLE, path.with_suffix("") if ending.endswith(".gz") else path, options)
        if ending.endswith(".gz"):
            path.write_bytes(gzip.compress(path.with_suffix("").read_bytes()))
    return path


@pytest.mark.parametrize("ending", [".parquet", ".feather", ".arrow", ".jsonl", ".jsonl.gz", ".csv", ".tsv", ".csv.gz"])
def test_a_format_is_read_as_it_was_written(tmp_path, ending):
    expected = TABLE if ending[1:4] in ("csv", "tsv") else TAGGED
    assert tables.read("x", written(tmp_path, ending)).to_pylist() == expected.to_pylist()


def test_files_follow_one_another_and_integers_join_floats(tmp_path):
    (tmp_path / "1.csv").write_text("a,b\n1,2\n")
    (tmp_path / "2.csv").write_text("b,a\n0.5,3\n")
    (tmp_path / "notes.md").write_text("not a table")
    expected = [{"a": 1, "b": 2.0}, {"a": 3, "b": 0.5}]
    assert tables.read("x", tmp_path).to_pylist() == expected
    assert tables.read("x", [tmp_path / "2.csv", str(tmp_path / "1.csv")]).to_pylist() == [
        {"b": 0.5, "a": 3}, {"b": 2.0, "a": 1},
    ]  # fmt: skip


def test_a_column_that_turns_out_to_hold_fractions_late_is_one_of_floats(tmp_path):
    (tmp_path / "late.csv").write_text("x\n" + "1\n" * 600_000 + "0.5\n")
    table = tables.read("x", tmp_path / "late.csv")
    assert table.schema.field("x").type == pa.float64()
    assert table["x"][-1].as_py() == 0.5


def test_values_may_be_longer_than_a_block_and_have_line_breaks(tmp_path):
    """pyarrow reads blocks of a megabyte, and looks for their ends at line breaks."""
    review = 'fits, "really"\n' * 40
    rows = [{"n": n, "review": review + "."} for n in range(2200)]
    csv.write_csv(pa.Table.from_pylist(rows), tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").stat().st_size > 1_200_000
    assert tables.read("x", tmp_path / "rows.csv").to_pylist() == rows
    (tmp_path / "rows.jsonl").write_text(lines_of(pa.table({"review": [review * 3000, "short"]})))
    assert tables.read("x", tmp_path / "rows.jsonl").to_pylist() == [{"review": review * 3000}, {"review": "short"}]


def test_times_are_read_with_slashes_too(tmp_path):
    (tmp_path / "t.csv").write_text("t\n2017/5/6 0:30\n")
    assert str(tables.read("x", tmp_path / "t.csv")["t"][0].as_py()) == "2017-05-06 00:30:00"


# ----------------------------------------------------------------------------------------------------------- RecBole


def test_atomic_files_have_the_types_of_their_header(tmp_path):
    (tmp_path / "ml.inter").write_text("user_id:token\titem_id:token\trating:float\n1\t01\t3\n2\t7\t\n")
    (tmp_path / "ml.item").write_text(
        'item_id:token\ttitle:token_seq\tvector:float_seq\n01\tThe "Sting" 2\t0.5 -1\n7\t\t\n'
    )
    rows = tables.read("x", tmp_path)
    assert rows.to_pylist() == [
        {"user_id": "1", "item_id": "01", "rating": 3.0}, {"user_id": "2", "item_id": "7", "rating": None},
    ]  # fmt: skip
    items = tables.read("x", tmp_path / "ml.item").to_pylist()
    assert items[0] == {"item_id": "01", "title": ["The", '"Sting"', "2"], "vector": [0.5, -1.0]}
    assert items[1] == {"item_id": "7", "title": [], "vector": []}
    assert recbole.beside(tmp_path) == recbole.beside(tmp_path / "ml.inter") == {"items": tmp_path / "ml.item"}
    assert recbole.beside(tmp_path / "ml.item") == {}
    # Of several files of interactions, the only one of items is that of all of them.
    (tmp_path / "ml.test.inter").write_text("user_id:token\titem_id:token\n3\t7\n")
    assert tables.read("x", tmp_path).num_rows == 3
    for path in (tmp_path, tmp_path / "ml.test.inter"):
        assert recbole.beside(path) == {"items": tmp_path / "ml.item"}
    (tmp_path / "other.item").write_text("item_id:token\n1\n")
    assert recbole.beside(tmp_path / "ml.test.inter") == {}
    assert recbole.beside(tmp_path / "ml.inter") == {"items": tmp_path / "ml.item"}
    assert recbole.beside(tmp_path / "gone") == {}


# ----------------------------------------------------------------------------------------------------------- FuxiCTR

CONFIG = """
tiny:
    train_data: ../data/tiny/train.csv
    valid_data: ../data/tiny/valid.csv
    feature_cols:
        - {name: [userid, pid], active: True, dtype: str, type: categorical}
        - {name: price, active: True, dtype: float, type: numeric}
        - {name: clicks, active: True, dtype: str, type: sequence, splitter: ^, max_len: 5}
    label_col: {name: clk, dtype: float}
"""


def test_a_folder_of_fuxictr_is_read_by_its_config(tmp_path):
    (tmp_path / "dataset_config.yaml").write_text(CONFIG)
    (tmp_path / "train.csv").write_text("clk,userid,pid,price,clicks,hour\n0,07,a,3,170301,5\n1,8,b,4.5,12^9,6\n")
    (tmp_path / "valid.csv").write_text("clk,userid,pid,price,clicks,hour\n0,07,a,3,,7\n")
    assert tables.read("x", tmp_path).to_pylist() == [
        {"clk": 0.0, "userid": "07", "pid": "a", "price": 3.0, "clicks": ["170301"], "hour": 5},
        {"clk": 1.0, "userid": "8", "pid": "b", "price": 4.5, "clicks": ["12", "9"], "hour": 6},
    ]
    assert tables.read("x", tmp_path / "valid.csv")["clicks"].to_pylist() == [[]]
    parquet.write_table(pa.table({"clk": [1.0], "clicks": ["1^2"]}), tmp_path / "test.parquet")
    assert tables.read("x", tmp_path / "test.parquet")["clicks"].to_pylist() == [["1", "2"]]


# ------------------------------------------------------------------------------------------------------------ libsvm


def test_one_hot_fields_become_a_column_each(tmp_path):
    (tmp_path / "a.libfm").write_text("1 0:1 5:1 9:1\n-1 3:1 5:1 8:1 # said\n\n0 1:1 6:1 7:1\n")
    assert tables.read("x", tmp_path / "a.libfm").to_pydict() == {
        "label": [1.0, -1.0, 0.0], "field_0": [0, 3, 1], "field_1": [5, 5, 6], "field_2": [9, 8, 7],
    }  # fmt: skip


def test_few_features_become_columns_and_requests_are_kept(tmp_path):
    (tmp_path / "a.svm").write_text("2 qid:7 1:0.5 4:3\n0 qid:9 4:-1\n1 qid:9\n")
    assert tables.read("x", tmp_path / "a.svm").to_pydict() == {
        "label": [2.0, 0.0, 1.0], "qid": ["7", "9", "9"], "feature_1": [0.5, 0.0, 0.0], "feature_4": [3.0, -1.0, 0.0],
    }  # fmt: skip


def test_many_features_become_lists(tmp_path):
    (tmp_path / "ones.svm").write_text("1 3:1 5:1\n0 4:1\n1\n")
    assert tables.read("x", tmp_path / "ones.svm").to_pydict() == {
        "label": [1.0, 0.0, 1.0], "features": [[3, 5], [4], []],
    }  # fmt: skip
    (tmp_path / "wide.svm").write_text("".join(f"0 {i}:0.5\n" for i in range(1100)))
    wide = tables.read("x", tmp_path / "wide.svm")
    assert wide["features"][7].as_py() == [7]
    assert wide["values"][7].as_py() == [0.5]


# ------------------------------------------------------------------------------------------------------------ errors

FILES = {
    "cut.parquet": b"PAR1 not a table",
    "cut.jsonl": b'{"a": 1}\n{"a": ',
    "latin.csv": "name\nJosé\n".encode("latin-1"),
    "twice.csv": b"a,a\n1,2\n",
    "none.csv": b"a,b\n",
    "empty.csv": b"",
    "ragged.csv": b"a,b\n1,2,3\n",
    "plain.inter": b"user_id\titem_id\n1\t2\n",
    "word.svm": b"1 3:x\n",
    "alone.svm": b"1 3\n",
    "some.svm": b"1 qid:1 3:1\n0 3:1\n",
    "rows.xlsx": b"",
}
SAID = {
    "gone.csv": r"^x: there is no file .*gone.csv\.$",
    "cut.parquet": r"^x: .*cut.parquet cannot be read: .*\.$",
    "cut.jsonl": r"cut.jsonl cannot be read: JSON parse error",
    "latin.csv": r"latin.csv cannot be read: column 'name' must be in UTF-8",
    "twice.csv": r"twice.csv must name each column once, but has 'a' more often",
    "none.csv": r"none.csv has no rows",
    "empty.csv": r"empty.csv cannot be read: Empty CSV file",
    "ragged.csv": r"ragged.csv cannot be read: .*Expected 2 columns, got 3",
    "plain.inter": r"plain.inter cannot be read: the header must name columns as name:type with token.*got 'user_id'",
    "word.svm": r"word.svm cannot be read: labels, indices and values must be numbers: .*'x'",
    "alone.svm": r"alone.svm cannot be read: a line must be a label and index:value pairs, got '3'",
    "some.svm": r"some.svm cannot be read: either every line or none must have one qid",
    "rows.xlsx": r"a file must end in .parquet, .*, got .*rows.xlsx",
}


@pytest.mark.parametrize("file", SAID)
def test_a_file_that_cannot_be_read_gets_a_sentence(tmp_path, file):
    if file in FILES:
        (tmp_path / file).write_bytes(FILES[file])
    with pytest.raises(ValueError, match=SAID[file]):
        tables.read("x", tmp_path / file)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "holds no file that ends in"),
        ({"a.csv": "a\n1\n", "b.jsonl": '{"a": 1}\n'}, "must be of one format, got .csv, .jsonl"),
        ({"a.csv": "a\n1\n", "b.csv": "a\nword\n"}, "a.csv and the files after it differ in their columns"),
        ({"dataset_config.yaml": "a: {train_data: x.csv}"}, "names train_data x.csv, and there is no such file"),
        ({"dataset_config.yaml": "a: {label_col: {}}"}, "dataset_config.yaml must name train_data"),
        ({"dataset_config.yaml": "a: {b: 1}\nc: {d: 1}"}, "must describe one data set.*but describes a, c"),
        ({"dataset_config.yaml": "a: ["}, "dataset_config.yaml is not YAML"),
        ({"dataset_config.yaml": CONFIG, "train.csv": "price\nmuch\n"}, "train.csv cannot be read: .*'much'"),
    ],
)
def test_a_folder_that_cannot_be_read_gets_a_sentence(tmp_path, files, said):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        tables.read("x", tmp_path)


def test_no_file_gets_a_sentence():
    with pytest.raises(ValueError, match=r"^x: there is no file to read\.$"):
        tables.read("x", [])
