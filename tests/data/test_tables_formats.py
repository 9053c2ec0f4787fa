"""Files of every format become the table that was written, and files that cannot be read get a sentence."""

import gzip
import json

import pytest

pa = pytest.importorskip("pyarrow")

from pyarrow import csv, feather, ipc, parquet  # noqa: E402

from tigon import data as tables  # noqa: E402

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
    (tmp_path / "late.csv").write_text("x,t\n" + "1,2017/5/6 0:30\n" * 70_000 + "0.5,2017/5/6 0:30\n")
    table = tables.read("x", tmp_path / "late.csv")
    assert str(table["t"][0].as_py()) == "2017-05-06 00:30:00"
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


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"cut.parquet": b"PAR1 not a table"}, r"^x: .*cut.parquet cannot be read: .*\.$"),
        ({"cut.jsonl": b'{"a": 1}\n{"a": '}, "cut.jsonl cannot be read: JSON parse error"),
        ({"latin.csv": "name\nJosé\n".encode("latin-1")}, "latin.csv cannot be read: column 'name' must be in UTF-8"),
        ({"twice.csv": b"a,a\n1,2\n"}, "twice.csv must name each column once, but repeats 'a'"),
        ({"none.csv": b"a,b\n"}, "none.csv has no rows"),
        ({"empty.csv": b""}, "empty.csv cannot be read: Empty CSV file"),
        ({"ragged.csv": b"a,b\n1,2,3\n"}, "ragged.csv cannot be read: .*Expected 2 columns, got 3"),
        ({"rows.xlsx": b""}, "a file must end in .parquet, .*, got .*rows.xlsx"),
        ({}, "holds no file that ends in"),
        ({"a.csv": b"a\n1\n", "b.jsonl": b'{"a": 1}\n'}, "must have the same format, got .csv, .jsonl"),
        ({"a.csv": b"a\n1\n", "b.csv": b"a\nword\n"}, "a.csv and later files have different columns"),
    ],
)
def test_what_cannot_be_read_gets_a_sentence(tmp_path, files, said):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        tables.read("x", tmp_path / next(iter(files)) if len(files) == 1 else tmp_path)


def test_no_file_gets_a_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"^x: there is no file to read\.$"):
        tables.read("x", [])
    with pytest.raises(ValueError, match=r"^x: there is no file .*gone.csv\.$"):
        tables.read("x", tmp_path / "gone.csv")
