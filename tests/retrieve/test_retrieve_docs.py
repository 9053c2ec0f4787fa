"""The pages on retrieval say what the library has."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "retrieve"


def test_the_table_of_columns_says_what_the_columns_have():
    from tigon.retrieve import Category, Number, Tags, Timestamp

    text = (DOCS / "filters.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)\([^|]*\| [^|]* \| [^|]* \| ([^|]*) \|$", text, re.MULTILINE))
    spoken = {"in": ["is_in"], "null": ["is_null"], "has_any": ["has", "has_any"]}
    for kind in (Category, Tags):
        expected = [word for operation in kind.operations for word in spoken.get(operation, [operation])]
        assert re.findall(r"`([^`]+)`", rows[kind.kind]) == expected
    assert [Timestamp(unit).bits for unit in ("s", "m", "h", "D")] == [32, 27, 21, 16]
    assert {*re.findall(r"`([^`]+)`", text.partition("| `Number()`")[2].split("|")[3])} == {
        word for operation in (*Number.operations, "between") for word in spoken.get(operation, [operation])
    }
