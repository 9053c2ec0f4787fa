"""Labels: columns with 0 and 1, or comparisons between a column and a value."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tigon.data.arrow import is_numeric, keys, numbers
from tigon.data.values import BadValue

COMPARED = re.compile(r"^\s*(?:([\w.-]+)\s*=\s*(?!=))?\s*([\w.-]+)\s*(>=|<=|==|!=|>|<)\s*(\S.*?)\s*$")
RENAMED = re.compile(r"^\s*([\w.-]+)\s*=\s*([\w.-]+)\s*$")
COMPARE = {
    ">=": np.greater_equal, "<=": np.less_equal, ">": np.greater, "<": np.less, "==": np.equal, "!=": np.not_equal,
}  # fmt: skip


class Label(NamedTuple):
    """A label's name, column, and comparison; operation None: the column contains 0 and 1."""

    name: str
    column: str
    operation: str | None = None
    value: str = ""

    @classmethod
    def parse(cls, text: str) -> Label:
        """Parse "click", "rating >= 4", "like = rating >= 4" or "good = click"."""
        if found := COMPARED.match(text):
            name, column, operation, value = found.groups()
            value = value.strip("'\"")
            return cls(name or f"{column}{operation}{value}", column, operation, value)
        if found := RENAMED.match(text):
            return cls(*found.groups())
        return cls(text.strip(), text.strip())

    def read(self, column: Any, *, gaps: bool = False) -> Tensor:
        """(n,) float32, 0 and 1.

        gaps: whether missing values become NaN.
        Raises: BadValue for other values.
        """
        if self.operation in ("==", "!=") and not (_is_number(self.value) and is_numeric(column)):
            named = keys(column)
            missing = np.array(named.is_null())
            equal = np.array(named.cast("large_string").fill_null("")) == self.value
            values = equal if self.operation == "==" else ~equal
        else:
            try:
                x = numbers(column)
            except BadValue as error:
                if self.operation is not None:
                    raise
                raise BadValue(
                    error.position, f"{error}; a comparison turns texts into 0 and 1, such as '{self.column} == yes'"
                ) from None
            missing = np.isnan(x)
            if self.operation is None:
                wrong = ~missing & (x != 0) & (x != 1)
                if wrong.any():
                    at = int(wrong.argmax())
                    raise BadValue(at, f"must be 0 or 1, got {x[at]:g}; use a comparison, such as '{self.column} >= 4'")
                values = x == 1
            else:
                if not _is_number(self.value):
                    raise BadValue(0, f"{self.operation} needs a number, got {self.value!r}")
                with np.errstate(invalid="ignore"):
                    values = COMPARE[self.operation](x, float(self.value))
        if missing.any() and not gaps:
            raise BadValue(int(missing.argmax()), "must be 0 or 1, got a missing value")
        return torch.from_numpy(np.where(missing, np.nan, values).astype(np.float32))


def _is_number(text: str) -> bool:
    try:
        return not np.isnan(float(text))
    except ValueError:
        return False
