"""Inputs x₀ for cross layers and MLP: a vector per candidate.

    Id, Ids   a table row; for lists the mean over rows, or attention with Ids(pool="attention")
    Id(qr)    E_q[⌊i/m⌋] ⊙ E_r[i mod m] for a hash i, two rows from small tables instead of a row from a large table
    Number    x · slope + shift, and a learned vector for missing values
    Time      a row for the hour, and a row for the weekday, in UTC

Tables with the same width are read with one launch for all their fields. Request fields are read once per request
rather than once per candidate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tigon.kernels import autocast_dtype
from tigon.ops.embedding import embedding
from tigon.rank.data.fields import Field, Id, Ids, Number, Text, Time
from tigon.rank.data.ragged import Ragged
from tigon.rank.data.schema import Schema
from tigon.rank.models.ligr.tokens import DAY, HOUR, pool_lists, pool_padded
from tigon.rank.models.lirank.config import Bits
from tigon.rank.models.lirank.embedding_tables import EmbeddingTables

STD = 0.01
SIDES = ("context", "rows")


class Column(NamedTuple):
    """A use of a table. part: the value read: "code", "quotient", "remainder", "hour", "day" or "attention"."""

    name: str
    part: str
    rows: int


class Group(nn.Module):
    """Fields whose tables share a width, in the order context, rows, attention; within a side, products come first."""

    def __init__(self, columns: dict[str, list[Column]], width: int, bits: Bits) -> None:
        super().__init__()
        self.columns = columns
        every = [column for side in (*SIDES, "attention") for column in columns[side]]
        self.tables = EmbeddingTables([column.rows for column in every], width, bits)
        # Quotients precede the same fields' remainders.
        self.products = {side: sum(c.part == "quotient" for c in columns[side]) for side in SIDES}
        self.first = {"context": 0, "rows": len(columns["context"])}
        self.first["attention"] = self.first["rows"] + len(columns["rows"])
        self.queries = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in columns["attention"])
        if bits == 32:
            self.reset(every)

    @torch.no_grad()
    def reset(self, every: list[Column]) -> None:
        """Initialise rows to small random values, and rows for missing and unseen values to zero."""
        nn.init.normal_(self.tables.weight, std=STD)
        for number, column in enumerate(every):
            rows = self.tables.column_weight(number)
            # A quotient row is a factor: near 1 it leaves the remainder's row unchanged.
            rows += float(column.part == "quotient")
            rows[0] = float(column.part == "quotient")

    def join_products(self, found: Tensor, side: str) -> Tensor:
        """(n, vectors · width) from bags (n, the side's columns, width)."""
        if products := self.products[side]:
            both = found[:, :products] * found[:, products : 2 * products]
            found = torch.cat((both, found[:, 2 * products :]), 1)
        return found.flatten(1)


class Inputs(nn.Module):
    """Maps candidates to input vectors.

    Args:
        schema: context, item and row fields are read; `Text` is ignored.
        width: embedding width for fields without `dim`. bits: table precision.

    Attributes:
        width: width of x₀. names: fields read, by side. vectors: widths of the vectors in x₀, one per table use and
            number, in order. owners: the field for each number in x₀.

    Raises: ValueError if there are no fields to read.
    """

    def __init__(self, schema: Schema, width: int, bits: Bits = 32) -> None:
        super().__init__()
        sides = {"context": schema.context, "rows": {**schema.items, **schema.rows}}
        self.fields = {side: {n: f for n, f in sides[side].items() if not isinstance(f, Text)} for side in SIDES}
        self.names = {side: list(self.fields[side]) for side in SIDES}
        if not any(self.names.values()):
            raise ValueError("LiRank: the schema must have a field that is not text, got none.")
        widths: dict[int, dict[str, list[Column]]] = {}
        self.numbers: dict[str, list[str]] = {side: [] for side in SIDES}
        for side, fields in self.fields.items():
            for name, field in fields.items():
                if isinstance(field, Number):
                    self.numbers[side].append(name)
                    continue
                group = widths.setdefault(
                    getattr(field, "dim", None) or width, {side: [] for side in (*SIDES, "attention")}
                )
                for column in _field_columns(name, field):
                    group["attention" if column.part == "attention" else side].append(column)
        for group in widths.values():
            for side in SIDES:
                order = {"quotient": 0, "remainder": 1}
                group[side].sort(key=lambda column: order.get(column.part, 2))
        self.groups = nn.ModuleList(Group(columns, dim, bits) for dim, columns in sorted(widths.items()))
        count = sum(map(len, self.numbers.values()))
        self.slope = nn.Parameter(STD * torch.randn(count, width))
        self.shift = nn.Parameter(torch.zeros(count, width))
        self.missing = nn.Parameter(torch.zeros(count, width))
        # A vector's field and width, in the order of `forward`.
        vectors: list[tuple[str, int]] = []
        for side in SIDES:
            for own in self._groups():
                attended = [column for column in own.columns["attention"] if column.name in self.fields[side]]
                # A product's two columns are one vector.
                columns = [column for column in own.columns[side] if column.part != "quotient"]
                vectors += [(column.name, own.tables.width) for column in (*columns, *attended)]
            vectors += [(name, width) for name in self.numbers[side]]
        self.vectors = [size for _, size in vectors]
        self.owners = [name for name, size in vectors for _ in range(size)]
        self.width = sum(self.vectors)

    def _groups(self) -> list[Group]:
        return [group for group in self.groups if isinstance(group, Group)]

    def tables(self) -> list[EmbeddingTables]:
        """The tables, one per width."""
        return [group.tables for group in self._groups()]

    def forward(
        self, context: dict[str, Any], rows: dict[str, Any], request: Tensor | None, *, plain: bool = False
    ) -> Tensor:
        """(C, width), in autocast's dtype or the weights'.

        context, rows: field values by side. request: (C,) int64, each row's request; None if each row is a separate
            request. plain: use torch operators alone; lists are then padded, (C, most) with −1.
        """
        dtype = autocast_dtype(self.slope.device.type) or self.slope.dtype
        values = {"context": context, "rows": rows}
        for side in SIDES:
            for name in self.names[side]:
                if name not in values[side]:
                    raise ValueError(f"LiRank: batch must have the field {name!r}, got {sorted(values[side])}.")
        pieces: dict[str, list[Tensor]] = {side: [] for side in SIDES}
        for group in self._groups():
            found = self._bags(group, values, request is None, plain, dtype)
            for side, bags in found.items():
                pieces[side].append(group.join_products(bags, side))
            for number, column in enumerate(group.columns["attention"]):
                side = "context" if column.name in self.fields["context"] else "rows"
                pieces[side].append(_pool_by_attention(group, number, values[side][column.name], plain, dtype))
        first = 0
        for side in SIDES:
            last = first + len(self.numbers[side])
            if first < last:
                x = torch.stack([values[side][name] for name in self.numbers[side]], 1)
                pieces[side].append(self._scale_numbers(x, slice(first, last)).to(dtype))
            first = last
        if request is not None and pieces["context"]:
            # index_select rather than indexing, whose GPU gradient sorts every number in x₀.
            pieces["context"] = [embedding(request, torch.cat(pieces["context"], 1))]
        every = [*pieces["context"], *pieces["rows"]]
        return torch.cat(every, 1) if len(every) > 1 else every[0]

    def _bags(
        self, group: Group, values: dict[str, dict[str, Any]], one_size: bool, plain: bool, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """(n, columns, width) per side with columns. one_size: both sides have the same row count."""
        given = {
            side: [_table_rows(column, self.fields[side][column.name], values[side][column.name]) for column in columns]
            for side in SIDES
            if (columns := group.columns[side])
        }
        if plain:
            return {
                side: torch.stack(
                    [_look_up_plain(group.tables, one, group.first[side] + n, dtype) for n, one in enumerate(of)], 1
                )
                for side, of in given.items()
            }
        if one_size and len(given) == 2:
            both = group.tables.bags([*given["context"], *given["rows"]], 0, dtype)
            sizes = [len(of) for of in given.values()]
            return dict(zip(given, both.split(sizes, 1), strict=True))
        return {side: group.tables.bags(of, group.first[side], dtype) for side, of in given.items()}

    def _scale_numbers(self, x: Tensor, which: slice) -> Tensor:
        """(n, numbers · width) vectors for numbers (n, numbers)."""
        x = x.unsqueeze(-1).to(self.slope.dtype)
        known = ~x.isnan()
        found = torch.where(known, x, 0) * self.slope[which] + self.shift[which]
        return torch.where(known, found, self.missing[which]).flatten(1)


def _field_columns(name: str, field: Field) -> list[Column]:
    """A field's table uses."""
    if isinstance(field, Time):
        return [Column(name, "hour", 25), Column(name, "day", 8)]
    if isinstance(field, Id) and field.hash == "qr":
        m = field.hash_rows or 0
        return [Column(name, "quotient", 1 - (1 - field.rows) // m), Column(name, "remainder", 1 + m)]
    assert isinstance(field, (Id, Ids))
    attends = isinstance(field, Ids) and field.pool == "attention"
    return [Column(name, "attention" if attends else "code", field.rows)]


def _table_rows(column: Column, field: Field, value: Any) -> Any:
    """Table rows for a column's values; 0 for missing values."""
    if column.part in ("hour", "day"):
        of = value // HOUR % 24 if column.part == "hour" else value // DAY % 7
        return torch.where(value == Time.MISSING, 0, 1 + of)
    if column.part in ("quotient", "remainder"):
        m = getattr(field, "hash_rows", 1)
        place = (value - 1).clamp(min=0)
        return torch.where(value > 0, 1 + (place // m if column.part == "quotient" else place % m), 0)
    return value


def _look_up_plain(tables: EmbeddingTables, value: Tensor, column: int, dtype: torch.dtype) -> Tensor:
    """(n, width): embeddings for codes (n,), or means over padded lists (n, most)."""
    if value.dim() == 1:
        return tables.look_up_plain(value, column, dtype)
    return pool_padded(tables.look_up_plain(value.clamp(min=0), column, dtype), (value >= 0).unsqueeze(-1), None)


def _pool_by_attention(group: Group, number: int, value: Any, plain: bool, dtype: torch.dtype) -> Tensor:
    """(n, width): attention from a learned query over each list's rows."""
    column, query = group.first["attention"] + number, group.queries[number].to(dtype)
    if plain:
        rows = group.tables.look_up_plain(value.clamp(min=0), column, dtype)
        return pool_padded(rows, (value >= 0).unsqueeze(-1), query)
    assert isinstance(value, Ragged)
    return pool_lists(group.tables.look_up(value.values, column, dtype), value.offsets, query)
