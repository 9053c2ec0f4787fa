"""Random schemas, tables and expressions, and their meaning in plain Python."""

import datetime

import numpy as np
from hypothesis import strategies as st

from tigon.retrieve import Category, Number, Schema, Tags, Timestamp, col

START = datetime.datetime(2026, 1, 1)
COUNTRIES = ["us", "ca", "de", "it's", 'q"', "中"]
LABELS = ["spam", "new", "sale", 'x"y']

# Kinds of columns: how one is made, its values, and the bounds that filters compare it with.
NUMBERS = st.sampled_from([-(2.0**100), -1.5, -0.0, 0.0, 0.1, 1, 2, 16_777_217, 3e38, 1e39, float("inf")])
KINDS = {
    "category": (lambda: Category(), st.sampled_from(COUNTRIES), st.sampled_from([*COUNTRIES, "never"])),
    "flags": (lambda: Category(3), st.booleans(), st.sampled_from([True, False, 2])),
    "float": (
        lambda: Number(),
        st.sampled_from([-(2.0**100), -1.5, -0.0, 0.0, 0.1, 1.0, 2.0, 16_777_216.0, 16_777_218.0, float("inf")]),
        NUMBERS,
    ),
    "grid": (lambda: Number(-2, 10, step=0.25, approximate=True), st.integers(-8, 40).map(lambda i: i / 4), NUMBERS),
    "whole": (lambda: Number(-20, 1000, step=1), st.integers(-20, 1000), st.integers(-30, 1010)),
    "hours": (
        lambda: Timestamp("h", "2025-12-31", "2026-02-01", approximate=True),
        st.integers(-86_000, 86_400 * 30).map(lambda s: START + datetime.timedelta(seconds=s)),
        st.integers(-200_000, 86_400 * 40).map(lambda s: START + datetime.timedelta(seconds=s - s % 1800)),
    ),
    "tags": (lambda: Tags(8), st.lists(st.sampled_from(LABELS), max_size=3), st.sampled_from([*LABELS, "never"])),
    "many": (lambda: Tags(150), st.lists(st.integers(0, 140), max_size=6), st.integers(0, 149)),
}
OPERATIONS = {"==": "__eq__", "!=": "__ne__", "<": "__lt__", "<=": "__le__", ">": "__gt__", ">=": "__ge__"}


@st.composite
def tables(draw, rows=12):
    """A schema, the kind of each column by its name, and a list of values, None where missing, for each column."""
    kinds = {f"c{i}": k for i, k in enumerate(draw(st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=4)))}
    schema = Schema(**{name: KINDS[kind][0]() for name, kind in kinds.items()})
    table = {
        name: draw(st.lists(st.none() | KINDS[kind][1], min_size=rows, max_size=rows)) for name, kind in kinds.items()
    }
    return schema, kinds, table


@st.composite
def comparisons(draw, kinds):
    """(operation, column, value) of a column."""
    name = draw(st.sampled_from(list(kinds)))
    kind = kinds[name]
    bounds = KINDS[kind][2]
    if kind in ("tags", "many"):
        operation = draw(st.sampled_from(["has", "has_any", "has_all", "is_null"]))
    elif kind in ("category", "flags"):
        operation = draw(st.sampled_from(["==", "!=", "is_in", "is_null"]))
    else:
        operation = draw(st.sampled_from([*OPERATIONS, "is_in", "between", "is_null"]))
    if operation in ("is_in", "has_any", "has_all"):
        value = draw(st.lists(bounds, max_size=3))
    else:
        value = (draw(bounds), draw(bounds)) if operation == "between" else draw(bounds)
    return operation, name, value


def expressions(kinds):
    """Trees of ("and" | "or", left, right), ("not", part) and comparisons."""
    return st.recursive(
        comparisons(kinds),
        lambda parts: st.tuples(st.sampled_from(["and", "or"]), parts, parts) | st.tuples(st.just("not"), parts),
        max_leaves=5,
    )


def as_expression(tree):
    """The Python form."""
    if tree[0] == "not":
        return ~as_expression(tree[1])
    if tree[0] in ("and", "or"):
        left, right = as_expression(tree[1]), as_expression(tree[2])
        return left & right if tree[0] == "and" else left | right
    operation, name, value = tree
    if operation in OPERATIONS:
        return getattr(col(name), OPERATIONS[operation])(value)
    if operation == "is_null":
        return col(name).is_null()
    return col(name).between(*value) if operation == "between" else getattr(col(name), operation)(value)


def as_text(tree):
    """The text form, written by other code than the library's."""
    if tree[0] == "not":
        return f"not ({as_text(tree[1])})"
    if tree[0] in ("and", "or"):
        return f"({as_text(tree[1])}) {tree[0]} ({as_text(tree[2])})"
    operation, name, value = tree
    if operation == "is_null":
        return f"{name} is null"
    if operation == "between":
        return f"{name} between {literal(value[0])} and {literal(value[1])}"
    if operation in ("is_in", "has_any", "has_all"):
        return f"{name} {'in' if operation == 'is_in' else operation} [{', '.join(map(literal, value))}]"
    return f"{name} {operation} {literal(value)}"


def literal(value):
    if isinstance(value, datetime.datetime):
        return f"'{value.isoformat()}'"
    if isinstance(value, float) and value == float("inf"):
        return "1e999"
    return {True: "true", False: "FALSE"}[value] if isinstance(value, bool) else repr(value)


# ------------------------------------------------------------------------------------------------------------ meaning


def truth(tree, kinds, row):
    """True, False or None, unknown, for one row: a dict of values."""
    if tree[0] == "not":
        part = truth(tree[1], kinds, row)
        return None if part is None else not part
    if tree[0] in ("and", "or"):
        sides = [truth(part, kinds, row) for part in tree[1:]]
        decisive = tree[0] == "or"
        if decisive in sides:
            return decisive
        return None if None in sides else not decisive
    operation, name, value = tree
    kind = kinds[name]
    if kind in ("tags", "many"):
        tags = set(row[name] or ())
        if operation == "is_null":
            return not tags
        wanted = [value] if operation == "has" else value
        return all(v in tags for v in wanted) if operation == "has_all" else any(v in tags for v in wanted)
    if operation == "is_null":
        return row[name] is None
    if row[name] is None:
        return None
    stored = as_stored(kind, row[name])
    if operation == "is_in":
        return any(compare("==", kind, stored, v) for v in value)
    if operation == "between":
        return compare(">=", kind, stored, value[0]) and compare("<=", kind, stored, value[1])
    return compare(operation, kind, stored, value)


def as_stored(kind, value):
    if kind == "hours":
        return value.replace(minute=0, second=0, microsecond=0)
    return value


def compare(operation, kind, stored, bound):
    if kind == "float":
        stored = np.float32(stored)
        # A float is rounded as it was when it was written; an integer, and what is beyond float32, is not.
        if isinstance(bound, float) and abs(bound) < 3.5e38:
            bound = float(np.float32(bound))
        stored = float(stored)
    return getattr(type(stored), OPERATIONS[operation])(stored, bound) is True if operation in ("==", "!=") else {
        "<": lambda: stored < bound, "<=": lambda: stored <= bound,
        ">": lambda: stored > bound, ">=": lambda: stored >= bound,
    }[operation]()  # fmt: skip
