"""Detect fields that leak a label, and crosses whose values occur in single rows.

A field that records the outcome leaks the label. Field values are binned; each bin is scored by its positive rate in
one half of the rows, and the scores' AUC is measured in the other half. Ids unique to a row are thus not reported,
while leaks through unordered values are found.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tigon.data import metrics
from tigon.rank.data.batch import Batch
from tigon.rank.data.crosses import cross_codes
from tigon.rank.data.fields import Cross, Number, Time
from tigon.rank.data.impressions import Impressions
from tigon.rank.data.schema import Schema

# Report fields with a higher AUC.
TELLS = 0.99
ROWS = 50_000
# With fewer rows, or fewer in either class, an AUC near 1 is not significant.
FEWEST_ROWS, FEWEST = 200, 20
BINS = 64
# Report a cross if a smaller fraction of rows shares its value with another row. Tables above COUNTED rows are skipped:
# a sample does not show whether the other rows share the values.
SHARED, COUNTED = 0.5, 1_000_000


def find_leaky_fields(data: Impressions, *, seed: int = 0) -> list[str]:
    """Warn about fields that alone predict a label with an AUC above 0.99: a message for each.

    data: with labels. Samples 50,000 rows at most. Texts and lists are skipped.
    """
    values, labels = _rows(data, seed)
    result = []
    for label, y in labels.items():
        known = ~y.isnan()
        y = y[known]
        if len(y) < FEWEST_ROWS or min(float(y.sum()), float((1 - y).sum())) < FEWEST:
            continue
        for name, x in values.items():
            if (auc := _auc(x[known], y)) > TELLS:
                result.append(
                    f"Field {name!r} alone predicts label {label!r}, with AUC {auc:.4f}. If the field is recorded "
                    "afterwards, remove the field from the schema: a row to score will not have its value."
                )
    return result


def find_rare_crosses(data: Impressions) -> list[str]:
    """Warn about crosses most of whose values occur in a single row: a message for each.

    Skips tables above a million rows.
    """
    crosses = {name: field for name, field in data.schema.rows.items() if isinstance(field, Cross)}
    if not crosses or not FEWEST_ROWS <= data.rows <= COUNTED:
        return []
    names = {one for field in crosses.values() for one in field.of}
    batches = data.batches(tokens=1 << 16, history_max=0, device="cpu")
    parts = [_field_codes(batch, data.schema, names) for batch in batches]
    result = []
    for name, field in crosses.items():
        values = torch.stack([torch.cat([part[one] for part in parts]) for one in field.of], 1)
        count = values.unique(dim=0, return_counts=True)[1]
        shared = 1 - float((count == 1).sum()) / data.rows
        if shared < SHARED:
            result.append(
                f"Cross {name!r}: {shared:.0%} of the rows share their values with another row; what the ranker learns "
                "from the others does not generalize. Compare with a fit without the cross, or cross smaller fields."
            )
    return result


def _field_codes(batch: Batch, schema: Schema, names: Iterable[str]) -> dict[str, Tensor]:
    """(candidates,) int64 codes for these fields, as used in crosses."""
    request = torch.repeat_interleave(batch.offsets.diff())
    codes = {}
    for name in names:
        values = batch.context[name][request] if name in batch.context else batch.items[name]
        assert isinstance(values, Tensor)
        codes[name] = cross_codes(schema.fields[name], values)
    return codes


def _rows(data: Impressions, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Bins per field, and labels, for sampled rows."""
    fields, parts, rows = data.schema.fields, list[dict[str, Tensor]](), 0
    labels: list[dict[str, Tensor]] = []
    draw = torch.Generator().manual_seed(seed)
    for batch in data.batches(tokens=1 << 13, history_max=0, shuffle=draw, device="cpu"):
        request = torch.repeat_interleave(batch.offsets.diff())
        sides = {**{name: (x, request) for name, x in batch.context.items()},
                 **{name: (x, None) for name, x in batch.items.items()}}  # fmt: skip
        part = {name: x if of is None else x[of] for name, (x, of) in sides.items() if isinstance(x, Tensor)}
        parts.append(part)
        labels.append(batch.labels)
        rows += batch.candidates
        if rows >= ROWS:
            break
    if not parts:
        return {}, {}
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    values = {
        name: _bins(torch.where(x == Time.MISSING, torch.nan, x.double()) if isinstance(fields[name], Time) else x)
        if isinstance(fields[name], (Number, Time)) else x
        for name, x in columns.items()
    }  # fmt: skip
    return values, {name: torch.cat([part[name] for part in labels]) for name in labels[0]}


def _bins(x: Tensor) -> Tensor:
    """(n,) int64 bins with similar counts; frequent and missing values get separate bins."""
    there = x[~x.isnan()].sort().values
    if not len(there):
        return torch.zeros(len(x), dtype=torch.int64)
    edges = there[(torch.arange(1, BINS) * len(there)) // BINS].unique()
    place = x.nan_to_num()
    # Separate bins for values on an edge and between two edges.
    found = torch.searchsorted(edges, place) + torch.searchsorted(edges, place, right=True)
    return torch.where(x.isnan(), 2 * len(edges) + 1, found)


def _auc(x: Tensor, y: Tensor) -> float:
    """Mean AUC over both halves, using rates from the other half."""
    bins, code = x.unique(return_inverse=True)
    half = torch.arange(len(y)) % 2 == 0
    found = []
    for counted in (half, ~half):
        of, mean = code[counted], y[counted].double().mean()
        ones = torch.zeros(len(bins), dtype=torch.float64).index_add_(0, of, y[counted].double())
        rate = (ones + mean) / (of.bincount(minlength=len(bins)) + 1)
        found.append(metrics.auc(rate[code[~counted]], y[~counted]))
    return sum(found) / 2
