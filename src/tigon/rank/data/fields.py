"""Field kinds: conversion from columns to tensors.

    Id       vocabulary value, or hashed               int64 (n,), 0 for a missing or unseen value
    Number   scaled to about N(0, 1)                   float32 (n,), NaN for a missing value
    Ids      list of ids                               Ragged int64
    Cross    several features in a row, combined       int64 (n,), 0 if all are missing
    Text     unchanged                                 list of str
    Time     microseconds since 1970 in UTC            int64 (n,)

Open options, such as a vocabulary or a number's quantiles, are fitted once, on the training data.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tigon.data.arrow import hashes, keys, kinds_agree, numbers, times
from tigon.data.values import BadValue
from tigon.rank.data.ragged import Ragged

Side = Literal["context", "item", "row", "action"]
Scale = Literal["quantile", "log", "none"]
Pool = Literal["mean", "attention"]
Unit = Literal["s", "ms", "us", "ns"]
Hash = Literal["mod", "qr"]
# Number of knots for piecewise linear quantile scaling.
KNOTS = 256
# Maximum number of distinct hashes: codes are stored as int32.
MOST_CODES = 2**31 - 2


@dataclass(frozen=True)
class Field:
    """A table column and its conversion to a tensor.

    Args:
        side: "context": one value per request, such as a user feature. "item": an item feature, also looked up for
            history events. "row": known only for the impression itself, such as its position. "action": the outcome
            recorded with a history event.
        history: whether events have this item feature.
    """

    kind: ClassVar[str]
    side: Side = dataclasses.field(default="row", kw_only=True)
    history: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self._check_choice("side", Side)
        if self.history and self.side != "item":
            raise ValueError(f"{self.kind}: history=True is for fields with side 'item', got side {self.side!r}.")

    @property
    def is_open(self) -> bool:
        """Whether options remain to be fitted."""
        return False

    def fit(self, columns: Sequence[Any]) -> Field:
        """Return this field with its open options fitted.

        columns: results from `values` for each table that has the column.
        """
        return self

    def values(self, column: Any) -> Any:
        """The data that `fit` needs from a column, as small as possible.

        Raises: BadValue for a value with the wrong type.
        """
        return column

    def encode(self, column: Any) -> Any:
        """Convert a pyarrow array.

        Raises: BadValue for a value with the wrong type.
        """
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """JSON options from which this field can be rebuilt."""
        result = {}
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if value != one.default:
                result[one.name] = list(value) if isinstance(value, tuple) else value
        return result

    def _check_list(self, name: str, holds: type | tuple[type, ...], what: str) -> tuple[Any, ...]:
        """Validate a list option and return a tuple. Rejects strings, which Python would iterate by character."""
        value = getattr(self, name)
        if isinstance(value, Iterable) and not isinstance(value, str):
            listed = tuple(value)
            if all(isinstance(one, holds) for one in listed):
                return listed
        raise ValueError(f"{self.kind}: {name} must be a list of {what}, got {value!r}.")

    def _check_choice(self, name: str, words: Any) -> None:
        if getattr(self, name) not in get_args(words):
            known = ", ".join(map(repr, get_args(words)))
            raise ValueError(f"{self.kind}: {name} must be one of {known}, got {getattr(self, name)!r}.")


@dataclass(frozen=True)
class _Coded(Field):
    """Values with codes: 1 and up in vocabulary order, or text hashes."""

    vocab: tuple[str | int, ...] | None = None
    hash_rows: int | None = None
    dim: int | None = None
    grows: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grows and self.vocab is None:
            raise ValueError(f"{self.kind}: grows=True needs a vocab to append new values to, got none.")
        if self.vocab is not None and self.hash_rows is not None:
            raise ValueError(f"{self.kind}: vocab and hash_rows are mutually exclusive, got both.")
        for name in ("hash_rows", "dim"):
            value = getattr(self, name)
            least = 2 if name == "hash_rows" else 1
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (is_integer and least <= value < 2**62):
                what = (
                    "a positive integer" if least == 1 else "an integer of at least 2 (with 1, all values share a code)"
                )
                raise ValueError(f"{self.kind}: {name} must be {what}, got {value!r}.")
        if self.vocab is not None:
            object.__setattr__(self, "vocab", self._check_list("vocab", object, "values"))
            kinds = {type(value) for value in self.vocab}
            if not kinds <= {str} and not kinds <= {int}:
                named = ", ".join(sorted(kind.__name__ for kind in kinds))
                raise ValueError(f"{self.kind}: vocab must hold only strings or only integers, got {named}.")
            if len(set(self.vocab)) < len(self.vocab):
                raise ValueError(f"{self.kind}: vocab must name each value once.")

    @property
    def is_open(self) -> bool:
        return self.grows or (self.vocab is None and self.hash_rows is None)

    @property
    def rows(self) -> int:
        """Number of codes, including 0: the embedding table's rows."""
        if self.is_open:
            raise ValueError(f"{self.kind}: vocab and hash_rows are both missing; read data with this schema first.")
        return 1 + (len(self.vocab) if self.vocab is not None else self._hashes)

    @property
    def _hashes(self) -> int:
        """Number of distinct hashes."""
        return self.hash_rows or 0

    def fit(self, columns: Sequence[Any]) -> Field:
        import pyarrow as pa
        import pyarrow.compute as pc

        if not self.is_open:
            return self
        found = kinds_agree([*columns, self._vocab_array])
        values = pc.unique(pa.concat_arrays(found[:-1])).drop_null() if columns else found[-1].slice(0, 0)
        values = values.take(pc.sort_indices(values))
        if self.vocab:
            if found[-1].type != self._vocab_array.type:
                raise ValueError(
                    f"vocab holds integers such as {self.vocab[0]}, so a new value must be an integer, got "
                    f"{next(v for v in values.to_pylist() if not re.fullmatch('-?[0-9]+', v))!r}."
                )
            # Known values keep their codes when new values are added.
            values = values.filter(pc.invert(pc.is_in(values, found[-1])))
        return dataclasses.replace(self, vocab=(*(self.vocab or ()), *values.to_pylist()), grows=False)

    def values(self, column: Any) -> Any:
        """The distinct keys."""
        import pyarrow.compute as pc

        return pc.unique(keys(column))

    @functools.cached_property
    def _vocab_array(self) -> Any:
        import pyarrow as pa

        values = self.vocab or ()
        return pa.array(values, pa.int64() if values and isinstance(values[0], int) else pa.large_string())

    def codes(self, column: Any) -> Tensor:
        """(n,) int64 codes for the output of `keys`."""
        import pyarrow.compute as pc

        if self.is_open:
            raise ValueError(f"{self.kind}: vocab and hash_rows are both missing; read data with this schema first.")
        if self.hash_rows is not None:
            hashed, missing = hashes(column)
            codes = np.where(missing, 0, 1 + (hashed % np.uint64(self._hashes)).astype(np.int64))
            return torch.from_numpy(codes)
        column, known = kinds_agree([column, self._vocab_array])
        found = pc.index_in(column, value_set=known).cast("int64")
        return torch.from_numpy(np.array(pc.add(found, 1).fill_null(0)))


@dataclass(frozen=True)
class Id(_Coded):
    """A categorical string or integer, such as an item. Code 0 is a missing or unknown value.

    Args:
        vocab: values for codes 1, 2, …; None: the values in the data, sorted.
        hash_rows: hash values to this number of codes instead of using a vocabulary.
        dim: embedding width; None for the model's default.
        hash: with hash_rows m: "mod": m codes, a table row each. "qr": m² codes, at most 2³¹ − 2; the embedding is the
            product of two rows, selected by quotient and remainder modulo m, from two tables with m rows; supported by
            `rank.LiRank`. Source: Shi et al. 2020, https://arxiv.org/abs/1909.02107
        grows: with a vocab: append the data's new values, as `Schema.expandable` requests.
        side: "context" (request), "item", "row" (impression) or "action" (event).
        history: with side "item": whether events have the field too.
    """

    kind = "Id"
    hash: Hash = "mod"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("hash", Hash)
        if self.hash == "qr" and self.hash_rows is None:
            raise ValueError("Id: hash 'qr' needs hash_rows, the number of rows in each table.")

    @property
    def _hashes(self) -> int:
        rows = self.hash_rows or 0
        return min(rows * rows, MOST_CODES) if self.hash == "qr" else rows

    def encode(self, column: Any) -> Tensor:
        return self.codes(keys(column))


@dataclass(frozen=True)
class Ids(_Coded):
    """A list of strings or integers, such as genres, truncated to its last `max` values. A missing list is empty.

    Args:
        vocab, hash_rows, dim, grows: as in `Id`.
        max: maximum list length; the last values are kept.
        pool: how a model pools the list into a vector: "mean" or "attention".
        side, history: as in `Id`.
    """

    kind = "Ids"
    max: int = 50
    pool: Pool = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("pool", Pool)
        if not isinstance(self.max, int) or self.max < 1:
            raise ValueError(f"Ids: max must be a positive integer, got {self.max!r}.")

    def values(self, column: Any) -> Any:
        """The distinct keys."""
        return super().values(_as_list_column(column).flatten())

    def encode(self, column: Any) -> Ragged:
        column = _as_list_column(column)
        lengths = torch.from_numpy(np.array(column.value_lengths().fill_null(0).cast("int64")))
        offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
        try:
            codes = self.codes(keys(column.flatten()))
        except BadValue as error:
            row = int(torch.searchsorted(offsets[1:], error.position, right=True))
            raise BadValue(row, f"must be a list of strings or integers: {error}") from None
        kept = lengths.clamp(max=self.max)
        return Ragged(codes, offsets).slices(offsets[1:] - kept, kept)


def _as_list_column(column: Any) -> Any:
    import pyarrow as pa
    import pyarrow.types as types

    kind = column.type
    if types.is_null(kind):
        return pa.nulls(len(column), pa.list_(pa.int64()))
    if types.is_fixed_size_list(kind):
        return column.cast(pa.list_(kind.value_type))
    if not (types.is_list(kind) or types.is_large_list(kind)):
        raise BadValue(0, f"must be a list of strings or integers, got {kind}")
    return column


@dataclass(frozen=True)
class Number(Field):
    """A number, scaled to about N(0, 1). Missing values are NaN.

    Args:
        scale: "quantile": by rank among the fitted data, clamped at both ends. "log": sign(x) log(1 + |x|), centred and
            divided by its standard deviation. "none": unchanged.
        knots, scores: for scale "quantile": increasing numbers and their outputs; linear in between.
        center, spread: for scale "log": subtracted value, then divisor.
        side, history: as in `Id`.
    """

    kind = "Number"
    scale: Scale = "quantile"
    knots: tuple[float, ...] = ()
    scores: tuple[float, ...] = ()
    center: float | None = None
    spread: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("scale", Scale)
        for name in ("knots", "scores"):
            object.__setattr__(self, name, self._check_list(name, (int, float), "numbers"))
        for name in ("center", "spread"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise ValueError(f"Number: {name} must be a number, got {value!r}.")
        if len(self.knots) != len(self.scores) or not all(a < b for a, b in pairwise(self.knots)):
            raise ValueError(
                f"Number: knots must rise, with a score each, got {len(self.knots)} and {len(self.scores)} scores."
            )
        if self.spread is not None and not self.spread > 0:
            raise ValueError(f"Number: spread must be above 0, got {self.spread!r}.")

    @property
    def is_open(self) -> bool:
        return (self.scale == "quantile" and not self.knots) or (self.scale == "log" and self.spread is None)

    def fit(self, columns: Sequence[Any]) -> Field:
        if not self.is_open:
            return self
        x = np.concatenate([np.zeros(0), *columns])
        x = x[~np.isnan(x)]
        if self.scale == "log":
            x = np.sign(x) * np.log1p(np.abs(x))
            spread = float(x.std()) if len(x) else 0.0
            return dataclasses.replace(self, center=float(x.mean()) if len(x) else 0.0, spread=spread or 1.0)
        if not len(x):
            return dataclasses.replace(self, knots=(0.0,), scores=(0.0,))
        x.sort()
        levels = (np.arange(KNOTS) + 0.5) / KNOTS
        knots = np.unique(np.concatenate((x[[0, -1]], x[(levels * len(x)).astype(np.int64)])))
        # Use a number's mid-rank, so that frequent numbers are not outliers.
        rank = (np.searchsorted(x, knots) + np.searchsorted(x, knots, side="right")) / (2 * len(x))
        scores = torch.special.ndtri(torch.from_numpy(rank)).numpy()
        seen = np.interp(x, knots, scores)
        scores = (scores - seen.mean()) / (float(seen.std()) or 1.0)
        return dataclasses.replace(self, knots=tuple(knots.tolist()), scores=tuple(scores.tolist()))

    def values(self, column: Any) -> npt.NDArray[np.float64]:
        """The numbers."""
        return numbers(column)

    def encode(self, column: Any) -> Tensor:
        x = numbers(column)
        if self.is_open:
            raise ValueError(f"Number: scale {self.scale!r} is not fitted; read data with this schema first.")
        if self.scale == "quantile":
            x = np.where(np.isnan(x), np.nan, np.interp(x, self.knots, self.scores))
        elif self.scale == "log":
            x = (np.sign(x) * np.log1p(np.abs(x)) - (self.center or 0.0)) / (self.spread or 1.0)
        return torch.from_numpy(x.astype(np.float32))


@dataclass(frozen=True)
class Cross(Id):
    """A combination of several impression features: a hashed code per combination of values.

    Models treat a cross as an `Id`. Numbers are binned into sixteen quantiles. `rank.find_interactions` suggests useful
    combinations.

    Args:
        of: names of two or more fields in the same schema: `Id`, or `Number` with scale "quantile", on any side except
            "action".
        hash_rows: number of codes.
        dim, hash: as in `Id`.
        vocab, grows: None and False; combinations are hashed.
        side, history: "row" and False, whatever the features' sides: events have no crosses.
    """

    kind = "Cross"
    of: tuple[str, ...] = ()
    # Dataclass inheritance puts base fields first; making those keyword-only lets `of` be positional.
    vocab: None = dataclasses.field(default=None, init=False, repr=False)
    grows: bool = dataclasses.field(default=False, init=False, repr=False)
    hash_rows: int | None = dataclasses.field(default=100_000, kw_only=True)
    dim: int | None = dataclasses.field(default=None, kw_only=True)
    hash: Hash = dataclasses.field(default="mod", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "of", (self.of,) if isinstance(self.of, str) else self._check_list("of", object, "fields")
        )
        super().__post_init__()
        if self.side != "row":
            raise ValueError(f"Cross: side must be 'row', got {self.side!r}.")
        if self.hash_rows is None:
            raise ValueError("Cross: hash_rows must be an integer of at least 2, got None.")
        if len(set(self.of)) < max(2, len(self.of)) or not all(isinstance(name, str) for name in self.of):
            raise ValueError(f"Cross: of must name two fields or more, each once, got {self.of!r}.")

    def encode(self, column: Any) -> Tensor:
        raise ValueError(f"Cross: values come from the fields {', '.join(map(repr, self.of))}, not from a column.")


@dataclass(frozen=True)
class Text(Field):
    """A text, unchanged; missing values become "". List values are joined by spaces.

    Sequence models skip texts; prompt models read them.

    Args:
        side, history: as in `Id`.
    """

    kind = "Text"

    def encode(self, column: Any) -> list[str]:
        import pyarrow as pa
        import pyarrow.compute as pc

        try:
            if pa.types.is_nested(column.type):
                column = pc.binary_join(column.cast(pa.list_(pa.string())), " ")
            return [text or "" for text in column.cast(pa.large_string()).to_pylist()]
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise BadValue(0, f"must be a text, got {column.type}") from None


@dataclass(frozen=True)
class Time(Field):
    """A time, as int64 microseconds since 1970 in UTC. Naive times are taken as UTC; a missing value is −2⁶³.

    Args:
        unit: for numeric times: "s", "ms", "us" or "ns" since 1970. None: the unit that places the latest time between
            1973 and 5138, seconds for smaller numbers.
        side, history: as in `Id`.
    """

    kind = "Time"
    MISSING: ClassVar[int] = -(2**63)
    unit: Unit | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit is not None:
            self._check_choice("unit", Unit)

    @property
    def is_open(self) -> bool:
        return self.unit is None

    def values(self, column: Any) -> float:
        """The largest number; 0 for non-numeric times."""
        import pyarrow.types as types

        if not (types.is_integer(column.type) or types.is_floating(column.type)):
            return 0.0
        return float(np.nanmax(np.abs(numbers(column)), initial=0.0))

    def fit(self, columns: Sequence[Any]) -> Field:
        if not self.is_open:
            return self
        units: tuple[Unit, ...] = ("s", "ms", "us", "ns")
        largest = max(columns, default=0.0)
        place = 0 if largest < 1e11 else min(3, 1 + int(math.log10(largest / 1e11) // 3))
        return dataclasses.replace(self, unit=units[place])

    def encode(self, column: Any) -> Tensor:
        found, missing = times(column, self.unit or "s")
        return torch.from_numpy(np.where(missing, self.MISSING, found))


KINDS: dict[str, type[Field]] = {kind.kind: kind for kind in (Id, Number, Ids, Cross, Text, Time)}
