"""Prompt tasks: a question about each candidate, its answers, and the label for the right answer.

z_k = h · w_k for answer k's first token;   p = softmax(z);   score = Σ_k value_k p_k
"""

from __future__ import annotations

import ast
import contextlib
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

NAME = "rank.prompt"
COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A question about a candidate.

    Args:
        name: the task's name, and the name of the predicted label.
        question: a template over the candidate's columns.
        answers: answer text → value. Answers must have different first tokens.
        label: determines the right answer: a comparison between a column and a number or text, such as "rating >= 4",
            for answers with values 1 and 0; or a column with answer values. None: the column with the task's name.
        weight: loss weight relative to other tasks.

    Raises: ValueError for a name that is not an identifier, fewer than two answers, values that are not distinct
        numbers, an invalid label, and a non-positive weight.
    """

    name: str
    question: str
    answers: Mapping[str, float]
    label: str | None = None
    weight: float = 1.0
    read: Label = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        where = f"{NAME}: task {self.name}"
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"{NAME}: a task's name must be a word, such as long_view, got {self.name!r}.")
        if not isinstance(self.answers, Mapping) or len(self.answers) < 2:
            raise ValueError(f'{where}: answers must name at least two answers with their values, as {{"yes": 1, …}}.')
        for answer, value in self.answers.items():
            if not isinstance(answer, str) or not answer.strip():
                said = "; YAML reads yes and no as true and false unless they are quoted"
                raise ValueError(
                    f"{where}: an answer must be a text, got {answer!r}{said if isinstance(answer, bool) else ''}."
                )
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{where}: the value of answer {answer!r} must be a number, got {value!r}.")
        if len(set(self.answers.values())) < len(self.answers):
            raise ValueError(f"{where}: the values of answers must differ, got {list(self.answers.values())}.")
        if isinstance(self.weight, bool) or not isinstance(self.weight, (int, float)) or not 0 < self.weight < math.inf:
            raise ValueError(f"{where}: weight must be a positive number, got {self.weight!r}.")
        object.__setattr__(self, "read", Label.parse(where, self.name if self.label is None else self.label))
        if self.read.compares and not {0, 1} <= set(self.answers.values()):
            raise ValueError(f"{where}: the label is a comparison, so answers must have the values 1 and 0.")

    def to_dict(self) -> dict[str, Any]:
        """The task's entry in prompt.yaml."""
        told = {"question": self.question, "answers": dict(self.answers), "label": self.label, "weight": self.weight}
        return {name: value for name, value in told.items() if value not in (None, 1)}

    @property
    def values(self) -> list[float]:
        return [float(value) for value in self.answers.values()]

    def find_answer(self, row: Mapping[str, Any]) -> int | None:
        """The right answer's index for a candidate; None if its label is missing.

        Raises: ValueError for a candidate without the label's column, and for a value without an answer.
        """
        value = self.read(row)
        if value is None:
            return None
        if value not in self.values:
            raise ValueError(
                f"{NAME}: task {self.name}: label {self.read.text!r} is {value:g} in a row, but no answer has this "
                f"value; the answers have {', '.join(f'{one:g}' for one in self.values)}."
            )
        return self.values.index(value)


class Label:
    """A column, or its comparison with a number or a text. No other expression is ever evaluated."""

    def __init__(self, where: str, text: str, column: str, compare: type | None = None, other: Any = None) -> None:
        self.where, self.text, self.column, self.other = where, text, column, other
        self.compares = compare is not None
        self.compare = COMPARE[compare] if compare is not None else None

    @classmethod
    def parse(cls, where: str, text: Any) -> Label:
        try:
            node = ast.parse(str(text).strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            node = None
        if isinstance(node, ast.Name):
            return cls(where, str(text), node.id)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.left, ast.Name):
            other, kind = node.comparators[0], type(node.ops[0])
            minus = isinstance(other, ast.UnaryOp) and isinstance(other.op, ast.USub)
            constant = other.operand if isinstance(other, ast.UnaryOp) and minus else other
            value = constant.value if isinstance(constant, ast.Constant) else None
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if kind in COMPARE and (number or (isinstance(value, str) and not minus)):
                return cls(where, str(text), node.left.id, kind, -value if minus else value)  # type: ignore[operator]
        raise ValueError(
            f"{where}: label must be a column, or a comparison with a number or a text, as in 'rating >= 4', got "
            f"{text!r}."
        )

    def __call__(self, row: Mapping[str, Any]) -> float | None:
        """A row's label, None if missing."""
        if self.column not in row:
            raise ValueError(f"{self.where}: label {self.text!r}: a candidate has no column {self.column!r}.")
        value = row[self.column]
        if is_missing(value):
            return None
        other = self.other
        if isinstance(other, str):
            # As in `rank.Impressions`: in numeric columns "4" is a number and equals 4.0.
            with contextlib.suppress(ValueError):
                other = float(other) if isinstance(value, (int, float)) else other
            value = str(value) if isinstance(other, str) else value
        elif not isinstance(value, (int, float)):
            try:
                value = float(value)
            except (TypeError, ValueError):
                raise ValueError(
                    f"{self.where}: label {self.text!r} needs numbers, but column {self.column!r} holds {value!r}."
                ) from None
        return float(value) if self.compare is None else float(self.compare(value, other))


def is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
