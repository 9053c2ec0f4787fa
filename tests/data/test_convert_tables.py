"""`examples/convert_tables.py` reads other libraries' formats with their types."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("yaml")

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = """
tiny:
    feature_cols:
        - {name: [userid, pid], active: True, dtype: str, type: categorical}
        - {name: clicks, active: True, dtype: str, type: sequence, splitter: ^, max_len: 5}
    label_col: {name: clk, dtype: float}
"""


@pytest.fixture(scope="module")
def convert():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import convert_tables
    finally:
        sys.path.remove(str(EXAMPLES))
    return convert_tables


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "ml.item", 'item_id:token\ttitle:token_seq\tvector:float_seq\n01\tThe "Sting" 2\t0.5 -1\n7\t\t\n',
            {"item_id": ["01", "7"], "title": [["The", '"Sting"', "2"], []], "vector": [[0.5, -1.0], []]},
        ),
        ("ml.inter", "user:token\trating:float\n1\t3\n2\t\n", {"user": ["1", "2"], "rating": [3.0, None]}),
        (
            "train.csv", "clk,userid,pid,clicks,hour\n0,07,a,170301,5\n1,8,b,,6\n",
            {"clk": [0.0, 1.0], "userid": ["07", "8"], "pid": ["a", "b"], "clicks": [["170301"], []], "hour": [5, 6]},
        ),
        (
            "a.libfm", "1 0:1 5:1 9:1\n-1 3:1 5:1 8:1 # said\n\n0 1:1 6:1 7:1\n",
            {"label": [1, -1, 0], "field_0": [0, 3, 1], "field_1": [5, 5, 6], "field_2": [9, 8, 7]},
        ),
        (
            "a.svm", "2 qid:7 1:0.5 4:3\n0 qid:9 4:-1\n1 qid:9\n",
            {"label": [2, 0, 1], "qid": ["7", "9", "9"], "feature_1": [0.5, 0, 0], "feature_4": [3, -1, 0]},
        ),
    ],
)  # fmt: skip
def test_files_are_read_with_their_types(convert, tmp_path, name, text, expected):
    (tmp_path / "dataset_config.yaml").write_text(CONFIG)
    (tmp_path / name).write_text(text)
    assert convert.read(tmp_path / name).to_pydict() == expected


def test_many_features_become_lists(convert, tmp_path):
    (tmp_path / "wide.svm").write_text("".join(f"0 {i}:0.5\n" for i in range(1100)))
    wide = convert.read(tmp_path / "wide.svm")
    assert (wide["features"][7].as_py(), wide["values"][7].as_py()) == ([7], [0.5])
