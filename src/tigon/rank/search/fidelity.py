"""Trial data: a fraction of the rows, with large vocabularies hashed into smaller tables.

A trial only compares graphs, so the fit can be cheap. All trials in a search see the same rows in the same order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch

from tigon.rank.data.fields import Cross, Field, Id, Ids
from tigon.rank.data.ragged import Ragged
from tigon.rank.data.schema import Schema


class ReducedData:
    """A fraction of a table, with hashed codes.

    Args:
        data: `rank.Impressions`, or an object with the same `schema` and `batches`.
        share: fraction of the requests, 0 to 1: the first requests in each shuffled pass.
        rows: maximum codes per field; larger fields share codes.
    """

    def __init__(self, data: Any, share: float, rows: int | None) -> None:
        self.data, self.share = data, share
        fields = data.schema.fields
        self.sizes = {name: rows for name, field in fields.items() if rows is not None and _is_large(field, rows)}
        self.schema: Schema = data.schema
        if self.sizes:
            self.schema = Schema(
                data.schema.roles, {**fields, **{n: _hash_field(fields[n], m) for n, m in self.sizes.items()}}
            )

    def __len__(self) -> int:
        return max(1, math.ceil(self.share * len(self.data))) if len(self.data) else 0

    def batches(
        self, *, requests: int | None = None, tokens: int | None = None, shuffle: torch.Generator | None = None,
        history_max: int | None = None, device: Any = None, skip: int = 0,
    ) -> Iterator[Any]:  # fmt: skip
        """The table's batches, until the fraction is reached."""
        size: dict[str, int | None] = {"requests": requests} if tokens is None else {"tokens": tokens}
        drawn = 0 if requests is None else skip * requests
        for batch in self.data.batches(**size, shuffle=shuffle, history_max=history_max, device=device, skip=skip):
            if drawn >= len(self):
                return
            drawn += batch.requests
            yield self._reduce(batch) if self.sizes else batch

    def _reduce(self, batch: Any) -> Any:
        context, items = (
            {name: _fold_codes(value, self.sizes.get(name)) for name, value in side.items()}
            for side in (batch.context, batch.items)
        )
        return dataclasses.replace(batch, context=context, items=items)


def _is_large(field: Field, rows: int) -> bool:
    """Whether a field's table has more rows; quotient-remainder tables are small already."""
    return isinstance(field, (Id, Ids)) and getattr(field, "hash", "mod") == "mod" and field.rows > 1 + rows


def _hash_field(field: Any, rows: int) -> Field:
    if isinstance(field, Cross):  # codes are precomputed, so the cross's fields are irrelevant here
        return Id(hash_rows=rows, dim=field.dim, side=field.side)
    out: Field = dataclasses.replace(field, vocab=None, hash_rows=rows)
    return out


def _fold_codes(value: Any, rows: int | None) -> Any:
    """Fold codes from 1 into 1 … rows; 0 (missing or unseen) is unchanged."""
    if rows is None:
        return value
    if isinstance(value, Ragged):
        return Ragged(_fold_codes(value.values, rows), value.offsets)
    return torch.where(value > 0, 1 + (value - 1) % rows, value)
