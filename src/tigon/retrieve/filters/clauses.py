"""Expressions as conjunctions of clauses, which `tigon.RowFilter` tests.

Negations are pushed down to the comparisons, where each becomes the codes for which it is true: neither a comparison
nor its negation includes a missing value. A column's codes are united within a clause, and intersected between clauses
on that column alone, so that `3 <= price and price < 5` is one range test.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

from tigon.retrieve.filters.columns import Coded, Ranges, Tags, complement, intersect, is_within, unite
from tigon.retrieve.filters.expressions import And, Comparison, Expression, Not, Or
from tigon.retrieve.filters.schema import Schema
from tigon.retrieve.scan.filters import Literal, RowFilter

MOST = 16
# Intermediate clauses, before implied clauses are dropped: all are compared pairwise.
MOST_ON_THE_WAY = 128
# Intermediate code ranges that are compared or united, clauses times ranges: this many take about a second.
MOST_RANGES = 2**20
# A code bitmap is at most 512 KiB, and its filter holds each code as a Python number.
MOST_CODES, MOST_LISTED = 2**22, 2**16


class TagTest(NamedTuple):
    """Whether any, or all, tags in a set are set in a word, or the negation."""

    column: str
    place: int
    bits: int
    test: str
    negated: bool


class Clause(NamedTuple):
    """Holds if any part holds: code ranges by column name, and tag tests."""

    codes: tuple[tuple[str, Ranges], ...] = ()
    tags: tuple[TagTest, ...] = ()


Clauses = list[Clause]
NEVER: Clauses = [Clause()]


def compile_clauses(expression: Expression, schema: Schema, strict: bool = False) -> Clauses:
    """At most 16 clauses that hold together where the expression is true.

    Args:
        expression: over columns in the schema.
        strict: whether a category or tag that no item has is an error.

    Raises: ValueError for an unknown column or operation, and for more than 16 clauses.
    """
    clauses = _compile(expression, schema, strict, positive=True)
    _check_clauses(len(clauses), expression, MOST)
    return clauses


def _check_clauses(clauses: int, expression: Expression, most: int) -> None:
    if clauses > most:
        part = _find_culprit(expression)
        said = str(part)
        raise ValueError(
            f"where: the expression becomes {clauses} clauses that must all hold, more than {MOST}. Simplify "
            f"{said if len(said) <= 200 else said[:197] + '…'!r}: an `or` between `and` parts multiplies clauses; "
            "prefer is_in and between, or search twice."
        )


def _check_ranges(count: int) -> None:
    if count > MOST_RANGES:
        raise ValueError(
            f"where: the expression's values become {count:,} ranges to compare, more than "
            f"{MOST_RANGES:,}: list fewer values, or search twice."
        )


def _count_ranges(clauses: Clauses) -> int:
    return sum(len(ranges) for clause in clauses for _, ranges in clause.codes)


def _find_culprit(expression: Expression) -> Expression:
    """The part of an expression that probably produces most clauses: the longest."""
    part = expression
    while isinstance(part, (And, Not)):
        part = part.part if isinstance(part, Not) else max(part.parts, key=lambda one: len(str(one)))
    return expression if isinstance(part, Comparison) else part


def _compile(expression: Expression, schema: Schema, strict: bool, positive: bool) -> Clauses:
    if isinstance(expression, Not):
        return _compile(expression.part, schema, strict, not positive)
    if isinstance(expression, Comparison):
        return _compile_comparison(expression, schema, strict, positive)
    assert isinstance(expression, (And, Or))
    # Equal parts once: `tags is null` has a test for each word of tags, and a text may repeat it ten thousand times.
    parts = [_compile(part, schema, strict, positive) for part in dict.fromkeys(expression.parts)]
    if isinstance(expression, And) == positive:
        both = [clause for part in parts for clause in part]
        _check_clauses(len(both), expression, MOST_ON_THE_WAY)
        _check_ranges(len(both) * _count_ranges(both))
        return simplify(both)
    # Single-clause parts are united at once: pair by pair, each step would sort all codes again.
    clauses = NEVER
    united = unite_clauses(*(part[0] for part in parts if len(part) == 1))
    for part in ([] if united is None else [united], *(part for part in parts if len(part) != 1)):
        _check_clauses(len(clauses) * len(part), expression, MOST_ON_THE_WAY)
        unions = [unite_clauses(one, other) for one, other in product(clauses, part)]
        clauses = [clause for clause in unions if clause is not None and not _always(clause, schema)]
        _check_ranges(len(clauses) * _count_ranges(clauses))
        clauses = simplify(clauses)
    return clauses


def _always(clause: Clause, schema: Schema) -> bool:
    return any(ranges == ((0, schema[name].top),) for name, ranges in clause.codes)


# -------------------------------------------------------------------------------------------------------- comparisons


def _compile_comparison(expression: Comparison, schema: Schema, strict: bool, positive: bool) -> Clauses:
    column = schema[expression.column]
    operation = "has_any" if expression.operation == "has" else expression.operation
    if operation not in column.operations:
        there = ", ".join(map(_operation_name, column.operations))
        raise column.error(f"{_operation_name(expression.operation)} is not supported, use {there}")
    if isinstance(column, Tags):
        return _compile_tags(column, operation, expression, schema, strict, positive)
    assert isinstance(column, Coded)
    if operation == "null":
        ranges: Ranges = ((0, 0),)
        ranges = ranges if positive else complement(ranges, column.top, first=0)
    else:
        if operation == "in":
            ranges = unite(*(column.ranges("==", value, strict) for value in expression.value))
        else:
            ranges = column.ranges(operation, expression.value, strict)
        ranges = ranges if positive else complement(ranges, column.top)
    return [Clause(((column.name, ranges),) if ranges else ())]


def _operation_name(operation: str) -> str:
    return {"in": "is_in", "null": "is_null", "has_any": "has, has_any"}.get(operation, operation)


def _compile_tags(
    column: Tags, operation: str, expression: Comparison, schema: Schema, strict: bool, positive: bool
) -> Clauses:
    given = expression.value if isinstance(expression.value, tuple) else (expression.value,)
    places = schema.places[column.name]
    numbers = [] if operation == "null" else [column.number(value, strict) for value in given]
    known = 0
    for number in numbers:
        known |= 0 if number is None else 1 << number
    if operation == "null":  # none of all bits set
        operation, known, positive = "has_any", (1 << column.bits) - 1, not positive
    if operation == "has_all" and None in numbers:
        return NEVER if positive else []
    masks = [(i, known >> place.start & (1 << place.bits) - 1) for i, place in enumerate(places)]
    test = "any" if operation == "has_any" else "all"
    tests = [TagTest(column.name, i, bits, test, not positive) for i, bits in masks if bits]
    if (test == "any") == positive:
        return [Clause(tags=tuple(tests))]
    return [Clause(tags=(one,)) for one in tests]


# ------------------------------------------------------------------------------------------------------------ algebra


def unite_clauses(*clauses: Clause) -> Clause | None:
    """A clause that holds where any clause does; None if that is always true."""
    listed: dict[str, list[Ranges]] = {}
    for clause in clauses:
        for name, ranges in clause.codes:
            listed.setdefault(name, []).append(ranges)
    codes = {name: unite(*many) for name, many in listed.items()}
    tags: dict[tuple[str, int, bool], int] = {}
    kept: set[TagTest] = set()
    for tag in map(_any_of_one, (tag for clause in clauses for tag in clause.tags)):
        # "Any" tests unite to any tag in the union, negated "all" tests to not all tags in the union.
        if (tag.test == "any") != tag.negated:
            key = (tag.column, tag.place, tag.negated)
            tags[key] = tags.get(key, 0) | tag.bits
        else:
            kept.add(tag)
    for (name, place, negated), bits in tags.items():
        kept.add(TagTest(name, place, bits, "all" if negated else "any", negated))
    for (name, place, negated), bits in tags.items():
        if not negated and any(t.negated and t[:2] == (name, place) and not t.bits & ~bits for t in kept):
            return None  # any tag in a set, or not all tags in a subset: always true
    return Clause(tuple(sorted(codes.items())), tuple(sorted(kept)))


def _any_of_one(tag: TagTest) -> TagTest:
    """Any and all are the same for one bit: positive tests say any, negated tests all, so that they unite."""
    if tag.bits & (tag.bits - 1):
        return tag
    return tag._replace(test="all" if tag.negated else "any")


def simplify(clauses: Iterable[Clause]) -> Clauses:
    """Drop clauses that always hold or that others imply; unite clauses on a single column."""
    alone: dict[str, Ranges] = {}
    together: dict[tuple[str, int, bool], int] = {}
    rest: list[Clause] = []
    for clause in clauses:
        if len(clause.codes) == 1 and not clause.tags:
            ((name, ranges),) = clause.codes
            alone[name] = intersect(alone[name], ranges) if name in alone else ranges
        elif len(clause.tags) == 1 and not clause.codes and _all_of_one(clause.tags[0]) is not None:
            tag = clause.tags[0]
            key = (tag.column, tag.place, tag.negated)
            together[key] = together.get(key, 0) | tag.bits
        else:
            rest.append(clause)
    result = [Clause(((name, ranges),) if ranges else ()) for name, ranges in alone.items()]
    for (name, place, negated), bits in together.items():
        result.append(Clause(tags=(TagTest(name, place, bits, "any" if negated else "all", negated),)))
        if not negated and together.get((name, place, True), 0) & bits:
            return NEVER
    result += dict.fromkeys(rest)
    if Clause() in result:
        return NEVER
    result = list(dict.fromkeys(result))
    kept: Clauses = []
    for i, clause in enumerate(result):
        later = (other for other in result[i + 1 :] if not implies(clause, other))
        if not any(implies(other, clause) for other in (*kept, *later)):
            kept.append(clause)
    return kept


def _all_of_one(tag: TagTest) -> TagTest | None:
    """The test, if it unites with others where all must hold: all tags in a set, or none. None otherwise."""
    if not tag.bits & (tag.bits - 1):
        return tag
    return tag if (tag.test == "all") != tag.negated else None


def implies(one: Clause, other: Clause) -> bool:
    """Whether the other clause holds wherever this clause does, as far as the parts show."""
    wider = dict(other.codes)
    return all(name in wider and is_within(ranges, wider[name]) for name, ranges in one.codes) and all(
        any(_tag_implies(tag, t) for t in other.tags) for tag in one.tags
    )


def _tag_implies(one: TagTest, other: TagTest) -> bool:
    if one == other:
        return True
    if one[:2] != other[:2] or one.negated != other.negated:
        return False
    one, other = _any_of_one(one), _any_of_one(other)
    wide = "all" if one.negated else "any"
    return one.test == other.test == wide and not one.bits & ~other.bits


# ------------------------------------------------------------------------------------------------------------- filter


def build_row_filter(clauses: Clauses, schema: Schema) -> RowFilter:
    """The clauses as numbers that the kernels read.

    Raises: ValueError if a clause has more than 16 tests, which is more than code bitmaps can spare.
    """
    return RowFilter([_build_literals(clause, schema) for clause in clauses])


def _build_literals(clause: Clause, schema: Schema) -> list[Literal]:
    tests = []
    for tag in clause.tags:
        place = schema.places[tag.column][tag.place]
        tests.append(Literal(place.word, tag.bits << place.shift, tag.test, negated=tag.negated))
    columns = {name: _build_ranges(schema, name, ranges) for name, ranges in clause.codes}
    for name, ranges in sorted(clause.codes, key=lambda pair: -len(columns[pair[0]])):
        if len(tests) + sum(map(len, columns.values())) <= MOST:
            break
        room = MOST - len(tests) - sum(len(columns[other]) for other in columns if other != name)
        columns[name] = _build_bitmap(schema, name, ranges, room) or columns[name]
    literals = [*tests, *(literal for listed in columns.values() for literal in listed)]
    if len(literals) > MOST:
        most = max(columns, key=lambda name: len(columns[name]), default="")
        raise ValueError(
            f"where: a part needs {len(literals)} tests, more than {MOST}: simplify the conditions on "
            f"{', '.join([*columns, *dict.fromkeys(tag.column for tag in clause.tags)])}"
            + (f"; {most!r} has {len(columns[most])} value ranges." if most else ".")
        )
    return literals


def _build_ranges(schema: Schema, name: str, ranges: Ranges) -> list[Literal]:
    place = schema.places[name][0]
    outside = complement(ranges, schema[name].top, first=0)
    turned = len(outside) == 1 < len(ranges)
    return [
        Literal(place.word, place.mask, "range", low << place.shift, high << place.shift, turned)
        for low, high in (outside if turned else ranges)
    ]


def _build_bitmap(schema: Schema, name: str, ranges: Ranges, room: int) -> list[Literal]:
    """One test for the codes within the ranges, or outside them; the widest ranges stay separate tests where the codes
    would be too many; no test if even the rest is too many.

    room: the most tests.
    """
    outside = complement(ranges, schema[name].top, first=0)
    if literal := _build_codes(schema, name, ranges) or _build_codes(schema, name, outside, negated=True):
        return [literal]
    by_width = sorted(ranges, key=lambda pair: pair[0] - pair[1])
    wide, rest = by_width[: max(room - 1, 0)], by_width[max(room - 1, 0) :]
    literal = _build_codes(schema, name, unite(tuple(rest)))
    return [] if literal is None else [*_build_ranges(schema, name, unite(tuple(wide))), literal]


def _build_codes(schema: Schema, name: str, ranges: Ranges, negated: bool = False) -> Literal | None:
    """One test for the codes in the ranges; None for no codes or too many."""
    if not ranges or ranges[-1][1] >= MOST_CODES or sum(high - low + 1 for low, high in ranges) > MOST_LISTED:
        return None
    place = schema.places[name][0]
    codes = [code for low, high in ranges for code in range(low, high + 1)]
    return Literal(place.word, place.mask, "codes", negated=negated, codes=codes)
