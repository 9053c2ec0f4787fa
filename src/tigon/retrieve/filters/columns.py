"""Column kinds: how values become codes, and which codes pass a comparison.

A column's code takes some bits in an int64 word. Code 0 stands for a missing value; the others keep the values' order.
A comparison becomes code ranges, so that a search compares integers only.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from tigon.data.values import BadValue, Ints, Value, as_value, is_writable, read_categories, read_lists, shorten
from tigon.retrieve.arguments import as_int, as_list

# Inclusive, ascending code ranges with gaps between them.
Ranges = tuple[tuple[int, int], ...]


class Column:
    """The base class of all kinds: a number of bits, and a name once the column is in a schema."""

    kind: ClassVar[str]
    operations: ClassVar[tuple[str, ...]]
    name: str = ""
    bits: int

    @property
    def top(self) -> int:
        """The highest code."""
        return (1 << self.bits) - 1

    def options(self) -> dict[str, Any]:
        """The arguments that recreate this column."""
        raise NotImplementedError

    def error(self, text: str) -> ValueError:
        return ValueError(f"where: column {self.name!r} is a {self.kind}: {text}.")

    def __repr__(self) -> str:
        given = ", ".join(
            f"{k}={v!r}" for k, v in self.options().items() if k != "values" and v is not None and v is not False
        )
        return f"{self.kind}({given})"


class Coded(Column):
    """A column with one code per row."""

    def codes(self, column: Any) -> tuple[Ints, list[Value]]:
        """Each row's code, and the values to add to the vocabulary."""
        raise NotImplementedError

    def ranges(self, operation: str, value: Any, strict: bool) -> Ranges:
        """The codes for which `column operation value` is true."""
        raise NotImplementedError

    def describe(self, ranges: Ranges) -> str:
        """Describe the rows that pass code ranges, as text."""
        if ranges == ((0, 0),):
            return f"{self.name} is missing"
        if ranges == ((1, self.top),):
            return f"{self.name} is not missing"
        return f"{self.name} in {len(ranges)} value range{'s' * (len(ranges) != 1)}"


# --------------------------------------------------------------------------------------------------------- vocabulary


class Vocabulary(Column):
    """A column that numbers its values in order of first occurrence."""

    def __init__(self, size: int, values: Any, most: int) -> None:
        number = as_int(size)
        if number is None or not 1 <= number <= most:
            raise ValueError(f"{self.kind}: size must be an integer from 1 to {most:,}, got {size!r}.")
        self.size = size = number
        self.values: list[Value] = []
        self.numbers: dict[Value, int] = {}
        listed = as_list(values)
        kept = [None] if listed is None else [as_value(v) for v in listed]
        read = [v for v in kept if v is not None]
        texts = sum(isinstance(v, str) for v in read)
        if len(read) < len(kept) or 0 < texts < len(read) or not all(map(is_writable, read)):
            raise ValueError(f"{self.kind}: values must be a list of strings or of integers, got {shorten(values)}.")
        if len(read) > size:
            raise ValueError(f"{self.kind}: values must be at most {size:,} (size), got {len(read):,}.")
        self.extend(read)

    def extend(self, values: list[Value]) -> None:
        """Add values to the vocabulary; known values are ignored."""
        for value in values:
            if value not in self.numbers:
                self.numbers[value] = len(self.values)
                self.values.append(value)

    def options(self) -> dict[str, Any]:
        return {"size": self.size, "values": list(self.values)}

    def number_values(self, values: list[Value], first: Any) -> tuple[Ints, list[Value]]:
        """Number the values, including new values; also returns the new values.

        first: the position of the first row that has value i, called only for an error.
        """
        new: dict[Value, int] = {}
        numbers = np.empty(len(values) + 1, dtype=np.int64)
        numbers[-1] = -1  # a missing value's number, index −1
        kept = self.values[0] if self.values else None
        for i, value in enumerate(values):
            kept = value if kept is None else kept
            if isinstance(value, str) != isinstance(kept, str):
                held = "strings" if isinstance(kept, str) else "integers"
                raise BadValue(first(i), f"holds {held} already, got {type(value).__name__} {value!r}")
            number = self.numbers.get(value)
            if number is None:
                number = new.setdefault(value, len(self.values) + len(new))
                if number >= self.size:
                    raise BadValue(
                        first(i),
                        f"is full: {value!r} would be value {number + 1:,} of {self.size:,}; "
                        f"create the column with {self.kind}({number + 1}) or more",
                    )
            numbers[i] = number
        return numbers, list(new)

    def list_names(self, numbers: list[int]) -> str:
        """The first few names in a list."""
        names = [repr(self.values[n]) for n in numbers[:5] if n < len(self.values)]
        return ", ".join(names) + (f" and {len(numbers) - 5:,} more" if len(numbers) > 5 else "")

    def number(self, value: Any, strict: bool) -> int | None:
        """A filter value's number; None if no item ever had the value."""
        kept = as_value(value)
        if kept is None:
            raise self.error(f"compare with strings or integers, got {type(value).__name__} {value!r}")
        if self.values and isinstance(kept, str) != isinstance(self.values[0], str):
            held = "strings" if isinstance(self.values[0], str) else "integers"
            raise self.error(f"the column holds {held}, got {type(kept).__name__} {kept!r}")
        number = self.numbers.get(kept)
        if number is None and strict:
            raise self.error(f"no item has the value {kept!r} (strict=True)")
        return number


class Category(Coded, Vocabulary):
    """A string or integer from a set, such as a country. The set grows as values are written.

    Args:
        size: the most distinct values. The column takes ⌈log₂(size + 1)⌉ bits.
        values: initial values.
    """

    kind = "Category"
    operations = ("==", "!=", "in", "null")

    def __init__(self, size: int = 65_535, values: Any = ()) -> None:
        super().__init__(size, values, 2**32 - 1)
        self.bits = self.size.bit_length()

    def codes(self, column: Any) -> tuple[Ints, list[Value]]:
        indices, values = read_categories(column)
        numbers, new = self.number_values(values, lambda i: int(np.argmax(indices == i)))
        return numbers[indices] + 1, new

    def ranges(self, operation: str, value: Any, strict: bool) -> Ranges:
        number = self.number(value, strict)
        at = () if number is None else ((number + 1, number + 1),)
        return at if operation == "==" else complement(at, self.top)

    def describe(self, ranges: Ranges) -> str:
        few = [code - 1 for low, high in ranges if low for code in range(low, min(high, low + 99) + 1)][:100]
        if few and few[-1] < len(self.values) and len(few) == sum(high - low + 1 for low, high in ranges):
            return f"{self.name} is {self.list_names(few)}"
        return super().describe(ranges)


class Tags(Vocabulary):
    """Any number of strings or integers from a set, such as labels. One bit per value; the set grows up to its size.

    An item without a list has no tags.

    Args:
        size: the most distinct tags, at most 4032.
        values: initial tags.
    """

    kind = "Tags"
    operations = ("has_any", "has_all", "null")

    def __init__(self, size: int, values: Any = ()) -> None:
        super().__init__(size, values, 64 * 63)
        self.bits = self.size

    def tags(self, column: Any) -> tuple[Ints, Ints, list[Value]]:
        """Rows and the bits set in them, and the tags to add to the vocabulary."""
        rows, indices, values = read_lists(column)
        numbers, new = self.number_values(values, lambda i: int(rows[np.argmax(indices == i)]))
        return rows, numbers[indices], new


# ------------------------------------------------------------------------------------------------------------- ranges


def complement(ranges: Ranges, top: int, first: int = 1) -> Ranges:
    """The codes from first to top outside the ranges."""
    left, start = [], first
    for low, high in ranges:
        if low > start:
            left.append((start, low - 1))
        start = max(start, high + 1)
    if start <= top:
        left.append((start, top))
    return tuple(left)


def unite(*many: Ranges) -> Ranges:
    """The codes in either set."""
    united: list[tuple[int, int]] = []
    for low, high in sorted(pair for ranges in many for pair in ranges):
        if united and low <= united[-1][1] + 1:
            united[-1] = (united[-1][0], max(united[-1][1], high))
        else:
            united.append((low, high))
    return tuple(united)


def intersect(one: Ranges, other: Ranges) -> Ranges:
    """The codes in both sets."""
    shared: list[tuple[int, int]] = []
    i = j = 0
    while i < len(one) and j < len(other):
        low, high = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if low <= high:
            shared.append((low, high))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return tuple(shared)


def is_within(one: Ranges, other: Ranges) -> bool:
    """Whether the second ranges contain the first."""
    return intersect(one, other) == one
