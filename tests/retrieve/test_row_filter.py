"""Filters of rows: clauses and literals against loops of Python, the numbers of their table, and what is refused."""

from __future__ import annotations

import random

import pytest
import torch

import tigon
from tigon.retrieve.scan import filters

Literal = tigon.RowFilter.Literal


def drawn_literal(draw: random.Random) -> Literal:
    """Of any test, over three words whose numbers are small, or reach the highest bit that may be used."""
    word, negated = draw.randrange(3), draw.random() < 0.3
    low_bit = draw.choice((0, 3, 31, 55))
    mask = draw.randrange(1, 256) << low_bit
    test = draw.choice(filters.TESTS)
    if test == "range":
        low, high = draw.randrange(256) << low_bit, draw.randrange(256) << low_bit
        return Literal(word, mask, "range", low, high, negated)
    if test == "codes":
        # A field of neighbouring bits, as codes are, and codes that it cannot hold.
        codes = [draw.randrange(40) for _ in range(draw.randrange(9))]
        return Literal(word, 15 << low_bit, "codes", 0, 0, negated, codes)
    return Literal(word, mask, test, 0, 0, negated)


def drawn_filter(seed: int) -> tigon.RowFilter:
    draw = random.Random(seed)
    clauses = [[drawn_literal(draw) for _ in range(draw.choice((0, 1, 1, 2, 3)))] for _ in range(draw.randrange(4))]
    return tigon.RowFilter(clauses)


def drawn_attributes(n: int, seed: int = 0) -> torch.Tensor:
    """(3, n), each of the fields that `drawn_literal` asks for present."""
    g = torch.Generator().manual_seed(seed)
    fields = [torch.randint(0, 256, (3, n), generator=g) << at for at in (0, 8, 31)]
    return sum(fields) | (torch.randint(0, 256, (3, n), generator=g) << 55)


def passes(row_filter: tigon.RowFilter, words: list[int]) -> bool:
    """One row, as the docstrings say it."""

    def holds(literal: Literal) -> bool:
        bits = words[literal.word] & literal.mask
        if literal.test == "codes":
            lowest = next(i for i in range(63) if literal.mask >> i & 1)
            found = bits >> lowest in literal.codes
        else:
            found = {
                "any": bits != 0, "all": bits == literal.mask, "range": literal.low <= bits <= literal.high
            }[literal.test]  # fmt: skip
        return found != literal.negated

    return all(any(holds(literal) for literal in clause) for clause in row_filter.clauses)


def by_table(row_filter: tigon.RowFilter, words: list[int]) -> bool:
    """One row, as the kernels read the table: one test for all, of unsigned numbers, or a bit of a bitmap."""
    bitmaps = row_filter.bitmaps.tolist()
    keep, some = True, False
    for word, mask, low, span, flags, shift, start, _ in row_filter.table.tolist():
        bits = words[word] & mask
        if flags & filters.CODES:
            code = bits >> shift
            holds = code < span and bool(bitmaps[start + code // 32] >> code % 32 & 1)
        else:
            holds = (bits - low) % 2**64 <= span
        some |= holds != bool(flags & filters.NEGATED)
        if flags & filters.LAST_OF_CLAUSE:
            keep, some = keep and some, False
    return keep


@pytest.mark.parametrize("seed", range(30))
def test_masks_and_tables_are_what_the_clauses_say(seed, device):
    row_filter, attributes = drawn_filter(seed), drawn_attributes(60, seed)
    want = [passes(row_filter, row) for row in attributes.t().tolist()]
    assert row_filter.mask(attributes.to(device)).tolist() == want
    assert [by_table(row_filter, row) for row in attributes.t().tolist()] == want
    flags = row_filter.table[:, filters.FLAGS]
    assert [bool(f & filters.LAST_OF_FILTER) for f in flags] == [False] * (len(flags) - 1) + [True]
    assert row_filter.table[-1, filters.BITS] == len(row_filter.bitmaps)


def test_bounds_beyond_what_a_word_holds(device):
    attributes = torch.tensor([[0, 1, 2**63 - 1]], device=device)
    every = 2**63 - 1
    assert tigon.RowFilter([[Literal(0, every, "range", -5, 2**70)]]).mask(attributes).tolist() == [True] * 3
    assert tigon.RowFilter([[Literal(0, every, "range", 1, every)]]).mask(attributes).tolist() == [False, True, True]
    assert tigon.RowFilter([[Literal(0, every, "range", 3, 2)]]).mask(attributes).tolist() == [False] * 3


def test_filters_are_compared_by_what_they_say(device):
    clauses = [[Literal(0, 3), Literal(1, 8, "codes", codes=[1, 0, 1])]]
    one, other = tigon.RowFilter(clauses), tigon.RowFilter([[*clauses[0]]], device=device)
    assert one == other
    assert hash(one) == hash(other)
    assert one != tigon.RowFilter([])
    assert one != "a filter"
    assert {one: 1}[other] == 1
    moved = one.to(device)
    assert one.to(device) is moved
    assert moved == one
    assert moved.table.device == torch.ones((), device=device).device
    assert moved.to("cpu") == one
    assert "1 clauses of 2 literals" in repr(one)


@pytest.mark.parametrize(
    ("clauses", "message"),
    [
        ("abc", r"clauses must be a sequence of sequences of RowFilter.Literal, got str"),
        (Literal(0, 1), r"clauses must be a sequence of sequences of RowFilter.Literal, got Literal"),
        ([Literal(0, 1)], r"clauses\[0\] must be a sequence of RowFilter.Literal, got Literal"),
        ([[(0, 1)]], r"clauses\[0\]\[0\] must be a RowFilter.Literal, got tuple"),
        ([[Literal(0, 1)]] * 17, r"clauses must be at most 16, got 17"),
        ([[Literal(0, 1)], [Literal(0, 1)] * 17], r"clauses\[1\] must have at most 16 literals, got 17"),
        ([[Literal(-1, 1)]], r"clauses\[0\]\[0\].word must be a row of attributes, 0 or more, got -1"),
        ([[Literal(0, 2**63)]], r"clauses\[0\]\[0\].mask must be bits below 2\*\*63, got 9223372036854775808"),
        ([[Literal(0, 1.0)]], r"clauses\[0\]\[0\].mask must be an int, got float"),
        ([[Literal(0, 1, "none")]], r"clauses\[0\]\[0\].test must be one of any, all, range, codes, got 'none'"),
        ([[Literal(0, 1, "codes")]], r"clauses\[0\]\[0\].codes must be a sequence of ints, got NoneType"),
        ([[Literal(0, 1, "codes", codes=[2**31])]], r"codes must be ints from 0 to 2\*\*31 - 1, got 2147483648"),
    ],
)
def test_what_is_refused(clauses, message):
    with pytest.raises(ValueError, match=f"RowFilter: .*{message}"):
        tigon.RowFilter(clauses)
