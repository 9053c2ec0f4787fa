"""Crosses: a single code for a combination of features in a row."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tigon.rank.data.fields import Cross, Field, Number
from tigon.rank.data.in_memory import ColumnBuffer
from tigon.rank.data.schema import Schema

# Number of quantile bins for numbers.
PARTS = 16


def compute_crosses(
    schema: Schema, context: Mapping[str, ColumnBuffer], items: Mapping[str, ColumnBuffer], sizes: Tensor
) -> dict[str, ColumnBuffer]:
    """Compute a schema's crosses from its other fields.

    context, items: values for R requests and N candidates, as passed to models. sizes: (R,) candidates per request.
    """
    parts: dict[str, Tensor] = {}

    def part(name: str) -> Tensor:
        if name not in parts:
            stored = context[name] if name in context else items[name]
            values = stored.values if stored.places is None else stored.values[stored.places]
            parts[name] = cross_codes(
                schema.fields[name], torch.repeat_interleave(values, sizes) if name in context else values
            )
        return parts[name]

    crosses = {name: field for name, field in schema.rows.items() if isinstance(field, Cross)}
    return {name: ColumnBuffer(_hash_codes([part(one) for one in field.of], field)) for name, field in crosses.items()}


def cross_codes(field: Field, values: Tensor) -> Tensor:
    """(N,) int64 codes for a field's values within a cross; 0 for a missing value."""
    if not isinstance(field, Number):
        return values.long()
    part = (PARTS * torch.special.ndtr(values.double())).clamp(max=PARTS - 1)
    return torch.where(values.isnan(), 0, part.nan_to_num().long() + 1)


def _hash_codes(codes: list[Tensor], field: Cross) -> Tensor:
    """(N,) int64 hash over a row's codes, identical on every machine; 0 if all codes are 0."""
    h = np.zeros(len(codes[0]), np.uint64)
    for one in codes:
        h = (h ^ one.numpy().astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        # splitmix64 mixing: each output bit depends on all input bits.
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        h ^= h >> np.uint64(31)
    missing = torch.stack(codes).amax(0) == 0
    return torch.where(missing, 0, 1 + torch.from_numpy((h % np.uint64(field.rows - 1)).astype(np.int64)))
