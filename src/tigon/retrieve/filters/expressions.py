"""Expressions over columns, which select the items in a search.

    col("country").is_in(["us", "ca"]) & ~col("tags").has("spam") & (col("price") <= 30)

As in SQL, an expression is true, false or unknown: a comparison with a missing value is unknown, `~` of unknown is
unknown, and an item passes where the expression is true. So neither `col("price") <= 30` nor its negation matches an
item without a price; `| col("price").is_null()` does. Tags are never unknown: an item without tags has none, and passes
`~col("tags").has("spam")`.

Source: three-valued logic is Kleene's; SQL-92, section 8.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tigon.data.values import describe, is_missing
from tigon.retrieve.arguments import as_list

Scalar = str | int | float


class Expression:
    """A condition on an item. Combine expressions with `&`, `|` and `~`."""

    def __and__(self, other: Expression) -> Expression:
        return combine(And, (self, _require_expression(other, "&")))

    def __or__(self, other: Expression) -> Expression:
        return combine(Or, (self, _require_expression(other, "|")))

    def __invert__(self) -> Expression:
        return self.part if isinstance(self, Not) else Not(self)

    def __bool__(self) -> bool:
        raise TypeError(
            f"where: {self} has no truth value: combine with &, | and ~ instead of and, or and not, write "
            "(a <= x) & (x <= b) or x.between(a, b) instead of a <= x <= b, and x.is_in(…) instead of in."
        )

    def __str__(self) -> str:
        """The expression as text that `parse` reads."""
        raise NotImplementedError


@dataclass(frozen=True)
class Comparison(Expression):
    """A column, an operation that its kind supports, and a value: a number or string, or a tuple."""

    column: str
    operation: str
    value: Any = None

    def __str__(self) -> str:
        if self.operation == "null":
            return f"{self.column} is null"
        if isinstance(self.value, tuple):
            listed = ", ".join(map(_to_text, self.value))
            return f"{self.column} {self.operation} ({listed}{',' * (len(self.value) == 1)})"
        return f"{self.column} {self.operation} {_to_text(self.value)}"


@dataclass(frozen=True)
class Not(Expression):
    part: Expression

    def __str__(self) -> str:
        return f"not {self.part}" if isinstance(self.part, Comparison) else f"not ({self.part})"


@dataclass(frozen=True)
class And(Expression):
    parts: tuple[Expression, ...]

    def __str__(self) -> str:
        return " and ".join(f"({part})" if isinstance(part, Or) else str(part) for part in self.parts)


@dataclass(frozen=True)
class Or(Expression):
    parts: tuple[Expression, ...]

    def __str__(self) -> str:
        return " or ".join(map(str, self.parts))


class ColumnReference:
    """Reference an index column by name. Comparing it gives an expression.

    Comparisons are `==`, `!=`, `<`, `<=`, `>` and `>=` with a value, and the methods below. The column's kind decides
    which are supported.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"col: a column name must be an identifier, got {name!r}.")
        self.name = name

    def __eq__(self, value: object) -> Expression:  # type: ignore[override]
        return Comparison(self.name, "==", to_scalar(value))

    def __ne__(self, value: object) -> Expression:  # type: ignore[override]
        return Comparison(self.name, "!=", to_scalar(value))

    def __lt__(self, value: Any) -> Expression:
        return Comparison(self.name, "<", to_scalar(value))

    def __le__(self, value: Any) -> Expression:
        return Comparison(self.name, "<=", to_scalar(value))

    def __gt__(self, value: Any) -> Expression:
        return Comparison(self.name, ">", to_scalar(value))

    def __ge__(self, value: Any) -> Expression:
        return Comparison(self.name, ">=", to_scalar(value))

    __hash__ = None  # type: ignore[assignment]

    def is_in(self, values: Iterable[Any]) -> Expression:
        """Whether the value is among the values."""
        return Comparison(self.name, "in", _read_scalars(self.name, "is_in", values))

    def between(self, low: Any, high: Any) -> Expression:
        """Whether the value is from low to high, both included."""
        return Comparison(self.name, ">=", to_scalar(low)) & Comparison(self.name, "<=", to_scalar(high))

    def has(self, value: Any) -> Expression:
        """Whether the tags have this value."""
        return Comparison(self.name, "has", to_scalar(value))

    def has_any(self, values: Iterable[Any]) -> Expression:
        """Whether the tags contain at least one value."""
        return Comparison(self.name, "has_any", _read_scalars(self.name, "has_any", values))

    def has_all(self, values: Iterable[Any]) -> Expression:
        """Whether the tags contain each value."""
        return Comparison(self.name, "has_all", _read_scalars(self.name, "has_all", values))

    def is_null(self) -> Expression:
        """Whether the value is missing; for tags, whether there are none."""
        return Comparison(self.name, "null")

    def __repr__(self) -> str:
        return f"col({self.name!r})"


def col(name: str) -> ColumnReference:
    """Reference an index column, to be compared: `col("price") <= 30`.

    Args:
        name: the column's name in the schema.

    Returns: a reference to the column, which operators and methods compare with values.
    """
    return ColumnReference(name)


def to_scalar(value: Any) -> Scalar:
    """Convert a filter value to a string, an int or a float. Times become their ISO text."""
    if isinstance(value, (ColumnReference, Expression)):
        raise ValueError(f"where: a column must be compared with a value, got {value!r}.")
    if is_missing(value):
        raise ValueError(f"where: no value equals a missing value, {value!r}: use is_null().")
    if isinstance(value, np.datetime64):
        return str(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (datetime.datetime, datetime.date)):
        return value.isoformat()
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (str, int, float)):
        return value
    raise ValueError(f"where: a column must be compared with a string, a number or a time, got {type(value).__name__}.")


def _read_scalars(name: str, method: str, values: Any) -> tuple[Scalar, ...]:
    if (listed := as_list(values)) is None:
        raise ValueError(f"where: col({name!r}).{method} must get a list of values, got {describe(values)}.")
    return tuple(to_scalar(value) for value in listed)


def combine(kind: type[And] | type[Or], expressions: Iterable[Expression]) -> Expression:
    """Combine expressions; parts with the same operator are merged."""
    parts: list[Expression] = []
    for expression in expressions:
        parts += expression.parts if isinstance(expression, kind) else (expression,)
    return parts[0] if len(parts) == 1 else kind(tuple(parts))


def _require_expression(other: Any, operator: str) -> Expression:
    if isinstance(other, Expression):
        return other
    raise TypeError(
        f"where: {operator} combines expressions, got {type(other).__name__} {other!r}: put comparisons in "
        f"parentheses, as in (col('a') == 1) {operator} (col('b') <= 2)."
    )


def _to_text(value: Scalar) -> str:
    if isinstance(value, float) and value in (float("inf"), -float("inf")):
        return "1e999" if value > 0 else "-1e999"
    return repr(value)


# A filter as the caller gives it; None: all items pass.
Where = Expression | str | None
