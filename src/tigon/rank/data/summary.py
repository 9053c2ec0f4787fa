"""Impression summaries: counts, label rates, and field statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.rank.data.fields import Field, Time
from tigon.rank.data.impressions import Impressions
from tigon.rank.data.in_memory import ColumnBuffer
from tigon.rank.data.ragged import Ragged


def summarize(data: Impressions) -> dict[str, Any]:
    """The JSON summary shown by `tigon rank inspect` for a table.

    Args:
        data: impressions.
    Returns: request, row and event counts; candidates and events per request; the time range; the positive rate by
        label; per field its kind, side, values and missing rate; reasons for skipped columns; notes.
    """
    held, schema = data._memory, data.schema
    events = held.last - held.first
    return {
        "requests": len(data),
        "rows": data.rows,
        "events": len(held.event_time),
        "candidates": _spread(held.offsets.diff()),
        "history": _spread(events) | {"empty": _share(events == 0)},
        "time": None if held.time is None else [format_time(held.time.min()), format_time(held.time.max())],
        "labels": {name: _share(values[~values.isnan()] > 0) for name, values in held.labels.items()},
        "roles": {name: value for name, value in vars(schema.roles).items() if value},
        "fields": [_field(name, field, data) for name, field in schema.fields.items()],
        "left_out": schema.left_out,
        "notes": data.notes,
    }


def find_constant_fields(data: Impressions) -> list[str]:
    """Warn about fields with the same value in all rows: a message for each."""
    first: dict[str, Tensor] = {}
    varies = {data.schema.roles.time}
    for batch in data.batches(requests=1 << 16, history_max=0):
        for side in (batch.context, batch.items):
            for name, values in side.items():
                if name in varies or not isinstance(values, Tensor) or not len(values):
                    continue
                like = first.setdefault(name, values[0])
                same = (values == like) | ((values != values) & (like != like))  # NaN: missing
                if not bool(same.all()):
                    varies.add(name)
        if varies >= {*batch.context, *batch.items}:
            break
    return [
        f"Field {name!r} has one value in all {data.rows:,} rows: nothing can be learned from this field."
        for name in first
        if name not in varies and data.rows > 1
    ]


def format_time(time: Tensor | int) -> str:
    """Format microseconds since 1970 as UTC text."""
    import numpy as np

    return str(np.datetime64(int(time), "us")).replace("T", " ").removesuffix(".000000")


def _spread(counts: Tensor) -> dict[str, Any]:
    if not len(counts):
        return {"mean": 0.0, "most": 0}
    return {"mean": round(float(counts.double().mean()), 2), "most": int(counts.max())}


def _share(flags: Tensor) -> float:
    return round(float(flags.double().mean()), 4) if len(flags) else 0.0


def _field(name: str, field: Field, data: Impressions) -> dict[str, Any]:
    held = data._memory
    sides: dict[str, dict[str, ColumnBuffer]] = {"context": held.context, "action": held.history}
    return {
        "name": name,
        "kind": field.kind,
        "side": field.side,
        "history": field.history or field.side == "action",
        "values": getattr(field, "rows", 1) - 1 or None,
        "missing": _missing(field, sides.get(field.side, held.items)[name]),
    }


def _missing(field: Field, stored: ColumnBuffer) -> float:
    """Fraction of rows with a missing or unknown value."""
    values: Any = stored.values
    if isinstance(values, Ragged):
        missing = values.lengths == 0
    elif isinstance(values, list):
        missing = torch.tensor([not text for text in values], dtype=torch.bool)
    elif field.kind == "Number":
        missing = values.isnan()
    else:
        missing = values == (Time.MISSING if field.kind == "Time" else 0)
    return _share(missing if stored.places is None else missing[stored.places.to(missing.device)])
