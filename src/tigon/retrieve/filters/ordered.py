"""Ordered columns: numbers and times, whose codes keep the order of their values."""

from __future__ import annotations

import math
import sys
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from tigon.data.values import BadValue, Ints, Value, as_time, is_missing, read_numbers, read_times, shorten
from tigon.retrieve.arguments import as_int
from tigon.retrieve.filters.columns import Coded, Ranges, complement

ORDERED = ("<", "<=", ">", ">=")


class Grid(Coded):
    """A column whose values lie on a grid: code 1 is the lowest point, and each step adds 1 to the code."""

    operations = ("==", "!=", "in", "null", *ORDERED)
    points: int

    def position(self, value: Any) -> tuple[int, bool]:
        """The last grid point at or below a bound, not clipped, and whether the bound is that point."""
        raise NotImplementedError

    def ranges(self, operation: str, value: Any, strict: bool) -> Ranges:
        below, on = self.position(value)
        if operation in ("==", "!="):
            at = ((below + 1, below + 1),) if on and 0 <= below < self.points else ()
            return at if operation == "==" else complement(at, self.top)
        if operation in ("<", "<="):
            last = below if operation == "<=" or not on else below - 1
            return ((1, min(last, self.points - 1) + 1),) if last >= 0 else ()
        first = below if operation == ">=" and on else below + 1
        return ((max(first, 0) + 1, self.top),) if first < self.points else ()


class Number(Grid):
    """A number. Without low and high it is stored as float32; with them, as the nearest of evenly spaced values.

    Values are rounded to the nearest float32 or the nearest step when they are written, and filters compare the rounded
    values. A filter bound is rounded to float32 in the same way. A bound between two steps is an error, or rounded
    inward with `approximate=True`: no value outside the bound passes.

    Args:
        low, high: the least and the greatest value.
        step: the spacing, by default the finest that `bits` allow.
        bits: 8 to 32. By default 32, or as many as the steps need.
        approximate: whether bounds between two steps are rounded inward.
    """

    kind = "Number"

    def __init__(
        self, low: float | None = None, high: float | None = None, step: float | None = None, bits: int | None = None,
        approximate: bool = False,
    ) -> None:  # fmt: skip
        low, high, step = (_read_finite(name, value) for name, value in (("low", low), ("high", high), ("step", step)))
        if bits is not None:
            number = as_int(bits)
            if number is None or not 8 <= number <= 32:
                raise ValueError(f"Number: bits must be an integer from 8 to 32, got {bits!r}.")
            bits = number
        if (low is None) != (high is None):
            raise ValueError(f"Number: low and high must be given together, got low={low!r}, high={high!r}.")
        if low is None or high is None:
            if step is not None or bits not in (None, 32):
                raise ValueError(
                    "Number: step and fewer than 32 bits need low and high, the smallest and largest values."
                )
            self.bits, self.points = 32, 2**32 - 1
        else:
            if not low < high:
                raise ValueError(f"Number: low must be below high, got low={low!r}, high={high!r}.")
            if step is None:
                step = (high - low) / (2 ** (bits or 32) - 2)
            if step <= 0:
                raise ValueError(f"Number: step must be above 0, got {step!r}.")
            steps = (high - low) / step
            if not steps < 2**64:  # also rejects infinity and NaN
                raise ValueError(f"Number: values from {low!r} to {high!r} by {step!r} need more than 32 bits.")
            self.points = math.floor(steps + 1e-6) + 1
            self.bits = bits or self.points.bit_length()
            if self.points >= 2**self.bits or self.bits > 32:
                raise ValueError(
                    f"Number: {self.points:,} values from {low!r} to {high!r} by {step!r} need "
                    f"{self.points.bit_length()} bits, more than {min(self.bits, 32)}."
                )
        self.low, self.high, self.step, self.approximate = low, high, step, bool(approximate)

    def options(self) -> dict[str, Any]:
        given = {
            "low": self.low,
            "high": self.high,
            "step": self.step,
            "bits": self.bits,
            "approximate": self.approximate,
        }
        if self.bits < 8:  # as many as the steps need
            del given["bits"]
        return given

    def codes(self, column: Any) -> tuple[Ints, list[Value]]:
        values, missing = read_numbers(column)
        if self.low is None or self.high is None or self.step is None:
            codes = self._float_codes(values, missing)
        else:
            if isinstance(self.low, int) and isinstance(self.step, int) and values.dtype == np.int64:
                # Exact beyond 2**53. A value out of the range may wrap around, and is refused below.
                places = (values - self.low + self.step // 2) // self.step
            else:
                with np.errstate(over="ignore", invalid="ignore"):
                    near = (values.astype(np.float64) - self.low) / self.step
                places = np.rint(np.clip(np.where(missing, 0, near), -1, self.points)).astype(np.int64)
            outside = ~missing & ((values < self.low) | (values > self.high) | (places < 0))
            if outside.any():
                at = int(np.argmax(outside))
                raise BadValue(at, f"must be from {self.low!r} to {self.high!r}, got {values[at].item()!r}")
            codes = np.minimum(places, self.points - 1) + 1
        return np.where(missing, 0, codes), []

    @staticmethod
    def _float_codes(values: npt.NDArray[Any], missing: npt.NDArray[np.bool_]) -> Ints:
        with np.errstate(over="ignore"):
            narrow = values.astype(np.float32)
        if values.dtype == np.int64:
            back = np.where(np.abs(narrow) < 2.0**63, narrow, np.float32(0)).astype(np.int64)
            wrong = ~missing & (back != values)
            said = "is an integer that float32 cannot hold: give low, high and step=1"
        else:
            wrong = ~missing & np.isinf(narrow) & ~np.isinf(values)
            said = "is outside the float32 range"
        if wrong.any():
            at = int(np.argmax(wrong))
            raise BadValue(at, f"{values[at].item()!r} {said}")
        return float_codes(np.where(missing, np.float32(0), narrow))

    def _float(self, value: Any) -> tuple[np.float32, bool]:
        """A bound as float32, and whether comparing with that float32 is equivalent to comparing with the bound."""
        with np.errstate(over="ignore"):
            # numpy raises for an integer beyond float64, but gives infinity for a float.
            bound = np.float32(value if abs(value) < 2**1000 else (math.inf if value > 0 else -math.inf))
        if isinstance(value, int) and (np.isinf(bound) or int(bound) != value):
            if float(bound) > value:
                bound = np.nextafter(bound, np.float32(-np.inf))
            return bound, False
        if np.isinf(bound) and not math.isinf(value):  # beyond float32: between its largest number and infinity
            return (np.finfo(np.float32).max if value > 0 else np.float32(-np.inf)), False
        return bound, True

    def _check(self, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(f"compare with numbers, got {type(value).__name__} {value!r}")

    def position(self, value: Any) -> tuple[int, bool]:
        self._check(value)
        if self.low is None or self.step is None:
            bound, exact = self._float(value)
            return int(float_codes(np.array([bound], dtype=np.float32))[0]) - 1, exact
        if value < self.low or value > self.high:
            return (-1 if value < self.low else self.points), False
        if all(isinstance(v, int) for v in (value, self.low, self.step)):
            below, rest = divmod(value - self.low, self.step)
            on = rest == 0
        else:
            place = (value - self.low) / self.step
            on = abs(place - round(place)) <= 1e-6
            below = round(place) if on else math.floor(place)
        if not on and not self.approximate:
            around = [self.low + (below + i) * self.step for i in (0, 1)]
            raise self.error(
                f"{value!r} lies between the steps {around[0]!r} and {around[1]!r}; compare with a step, or create the "
                "column with approximate=True to round bounds inward"
            )
        return int(below), on


def _read_finite(name: str, value: Any) -> Any:
    """Parse a `Number` argument as a Python int or float.

    Raises: ValueError for anything but None and a finite number in float range.
    """
    value = value.item() if isinstance(value, np.generic) else value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and abs(value) <= sys.float_info.max):
        raise ValueError(f"Number: {name} must be a finite number, got {shorten(value)}.")
    return value


class Timestamp(Grid):
    """A time, rounded down to a unit. Times without a zone are in UTC.

    Filters compare the rounded times. A bound that is not a whole unit is an error, or rounded inward with
    `approximate=True`.

    Args:
        unit: "s", "m", "h" or "D".
        low, high: the first and the last time, by default the range that 32 bits in seconds cover: 1970 to 2106-02-07.
        approximate: whether bounds between two units are rounded inward.
    """

    kind = "Timestamp"
    UNITS: ClassVar[dict[str, int]] = {"s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "D": 86_400_000_000}

    def __init__(
        self,
        unit: Literal["s", "m", "h", "D"] = "s",
        low: Any = "1970-01-01",
        high: Any = "2106-02-07",
        approximate: bool = False,
    ) -> None:
        if not isinstance(unit, str) or unit not in self.UNITS:
            raise ValueError(f"Timestamp: unit must be 's', 'm', 'h' or 'D', got {unit!r}.")
        self.unit, self.approximate = unit, bool(approximate)
        ends = []
        for name, value in (("low", low), ("high", high)):
            time = None if is_missing(value) else as_time(value)
            if time is None:
                raise ValueError(f"Timestamp: {name} must be a time such as '2026-01-31', got {value!r}.")
            ends.append(time // self.UNITS[unit])
        if ends[0] >= ends[1]:
            raise ValueError(f"Timestamp: low must be before high, got low={low!r}, high={high!r}.")
        self.first, self.last = ends
        self.points = ends[1] - ends[0] + 1
        self.bits = self.points.bit_length()
        if self.bits > 32:
            raise ValueError(f"Timestamp: {low} to {high} by {unit!r} needs {self.bits} bits, more than 32.")

    def options(self) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "low": self._text(self.first),
            "high": self._text(self.last),
            "approximate": self.approximate,
        }

    def _text(self, place: int) -> str:
        return str(
            np.datetime64(place * self.UNITS[self.unit], "us").astype(f"datetime64[{'D' if self.unit == 'D' else 's'}]")
        )

    def codes(self, column: Any) -> tuple[Ints, list[Value]]:
        times, missing = read_times(column)
        places = times // self.UNITS[self.unit]
        outside = ~missing & ((places < self.first) | (places > self.last))
        if outside.any():
            at = int(np.argmax(outside))
            got = np.datetime64(int(times[at]), "us")
            raise BadValue(at, f"must be from {self._text(self.first)} to {self._text(self.last)}, got {got}")
        return np.where(missing, 0, places - self.first + 1), []

    def position(self, value: Any) -> tuple[int, bool]:
        time = as_time(value)
        if time is None:
            raise self.error(f"compare with times such as '2026-01-31', got {type(value).__name__} {value!r}")
        below, rest = divmod(time, self.UNITS[self.unit])
        if rest and not self.approximate and self.first <= below <= self.last:
            raise self.error(
                f"{value} is not a whole {self.unit!r}; compare with {self._text(below)} or {self._text(below + 1)}, "
                "or create the column with approximate=True to round bounds inward"
            )
        return below - self.first, rest == 0


def float_codes(values: npt.NDArray[np.float32]) -> Ints:
    """Integers from 1 in float order: negative floats with all bits inverted, others with the top bit set."""
    bits = (values + np.float32(0)).view(np.uint32)  # -0 + 0 is 0
    codes: Ints = np.where(bits >> 31 == 1, ~bits, bits | np.uint32(2**31)).astype(np.int64)
    return codes
