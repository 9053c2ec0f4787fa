"""Tokens for a batch: one per request context, event and candidate.

    event     = LN(Σ its fields (item, item features, outcome) + time since the previous event)
    candidate = LN(Σ its fields (item, item features, row) + time since the newest event)

Field embeddings are initialised small, and the norm scales their sum to the magnitude of the layers' updates. Without
the norm, the residual stream would be dominated by the first layers' output and contain little about the item itself.

An event token contains no information about the reading request: neither the event's age nor the number of later
events. Tokens, keys and values therefore remain valid when events are appended. Candidates carry the history's age;
rotary positions encode how far back an event lies, through relative distance alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tigon.ops.embedding import embedding
from tigon.rank.data.batch import Batch
from tigon.rank.data.fields import Field, Id, Ids, Number, Text
from tigon.rank.data.ragged import Ragged
from tigon.rank.data.schema import Schema
from tigon.rank.models.ligr.config import LiGRConfig
from tigon.rank.models.ligr.layers import Norm

STD = 0.02
# Seconds are bucketed by powers of two, up to 2³⁰ (34 years). Code 0: no time.
BUCKETS = 32
HOUR, DAY = 3_600_000_000, 86_400_000_000  # microseconds


class FieldTokens(nn.Module):
    """(n, width) tokens for a field's values. Missing and unseen values contribute little: row 0 starts at zero.

    `Ids` values are a `Ragged`, or (n, most) integers padded with −1.
    """

    def __init__(self, field: Field, width: int) -> None:
        super().__init__()
        self.field = field
        self.query: nn.Parameter | None = None
        if isinstance(field, (Id, Ids)):
            if isinstance(field, Id) and field.hash != "mod":
                raise ValueError(f"LiGR: hash of an Id must be 'mod', got {field.hash!r}, which only LiRank reads.")
            dim = field.dim or width
            self.table = nn.Parameter(STD * torch.randn(field.rows, dim))
            with torch.no_grad():
                self.table[0] = 0
            self.project = nn.Linear(dim, width, bias=False) if dim != width else nn.Identity()
            if isinstance(field, Ids) and field.pool == "attention":
                self.query = nn.Parameter(torch.zeros(dim))
        elif isinstance(field, Number):
            self.slope = nn.Parameter(STD * torch.randn(width))
            self.missing = nn.Parameter(torch.zeros(width))
        else:  # Time, in UTC
            self.hour = nn.Parameter(STD * torch.randn(24, width))
            self.day = nn.Parameter(STD * torch.randn(7, width))
            self.missing = nn.Parameter(torch.zeros(width))

    def forward(self, value: Tensor | Ragged) -> Tensor:
        result: Tensor
        if isinstance(self.field, Ids):
            result = self.project(self._pool(value))
            return result
        assert isinstance(value, Tensor)
        if isinstance(self.field, Id):
            result = self.project(embedding(value, self.table))
            return result
        if isinstance(self.field, Number):
            x = value.unsqueeze(-1)
            known = ~x.isnan()
            return torch.where(known, torch.where(known, x, 0).to(self.slope) * self.slope, self.missing)
        known = (value != torch.iinfo(torch.int64).min).unsqueeze(-1)
        at = embedding(value // HOUR % 24, self.hour) + embedding(value // DAY % 7, self.day)
        return torch.where(known, at, self.missing)

    def _pool(self, value: Tensor | Ragged) -> Tensor:
        if isinstance(value, Tensor):
            return pool_padded(embedding(value.clamp(min=0), self.table), (value >= 0).unsqueeze(-1), self.query)
        return pool_lists(embedding(value.values, self.table), value.offsets, self.query)


def pool_lists(rows: Tensor, offsets: Tensor, query: Tensor | None) -> Tensor:
    """(n, D) from rows (m, D): each list's mean, or Σ softmax(rows · query) rows; 0 for an empty list.

    offsets: (n + 1,) int64.
    """
    if not len(rows):  # segment_reduce rejects empty input
        return rows.new_zeros(len(offsets) - 1, rows.shape[1]) + rows.sum()
    if query is None:
        return _segment_sums(rows, offsets) / offsets.diff().clamp(min=1).unsqueeze(1)
    scores, of = rows @ query, _segments(offsets, len(rows))
    top = torch.segment_reduce(scores.detach(), "max", offsets=offsets, unsafe=True, initial=-torch.inf)
    weights = (scores - top[of]).exp()
    return _segment_sums(rows * (weights / _segment_sums(weights, offsets)[of]).unsqueeze(1), offsets)


def pool_padded(rows: Tensor, there: Tensor, query: Tensor | None) -> Tensor:
    """(…, D): `pool_lists` for padded lists (…, most, D). there: (…, most, 1) bool mask."""
    if query is None:
        return torch.where(there, rows, 0).sum(-2) / there.sum(-2).clamp(min=1)
    scores = (rows @ query).unsqueeze(-1).masked_fill(~there, torch.finfo(rows.dtype).min)
    return (torch.where(there, scores.softmax(-2), 0) * rows).sum(-2)


def _segment_sums(x: Tensor, offsets: Tensor) -> Tensor:
    """Segment sums without atomics, hence bitwise reproducible."""
    return torch.segment_reduce(x, "sum", offsets=offsets, unsafe=True, initial=0)


def _segments(offsets: Tensor, count: int) -> Tensor:
    """(count,) int64, each row's segment."""
    return torch.searchsorted(offsets[1:].contiguous(), torch.arange(count, device=offsets.device), right=True)


class Tokens(nn.Module):
    """Token embeddings for a schema."""

    bounds: Tensor

    def __init__(self, schema: Schema, config: LiGRConfig) -> None:
        super().__init__()
        width, left_out = config.width, () if config.actions else schema.roles.action
        sides = {
            "context": schema.context,
            "events": {name: field for name, field in schema.history.items() if name not in left_out},
            "candidates": {**schema.items, **schema.rows},
        }
        # Texts are only used by prompt rankers.
        self.sides = {
            side: [name for name, field in fields.items() if not isinstance(field, Text)]
            for side, fields in sides.items()
        }
        fields = {name: field for side in sides.values() for name, field in side.items()}
        # Events and candidates share a field's table, so that candidates benefit from the events with the same item.
        # Column names may be invalid module names, so modules are keyed by number.
        self.names = sorted({name for names in self.sides.values() for name in names})
        self.fields = nn.ModuleList(FieldTokens(fields[name], width) for name in self.names)
        self.start = nn.Parameter(STD * torch.randn(width))
        self.candidate = nn.Parameter(torch.zeros(width))
        self.gap = nn.Parameter(STD * torch.randn(BUCKETS, width)) if config.ages else None
        self.newest = nn.Parameter(STD * torch.randn(BUCKETS, width)) if config.ages else None
        self.norm = Norm(width)
        # Integers are unaffected by dtype casts of the module.
        self.register_buffer("bounds", 2 ** torch.arange(1, BUCKETS - 1) - 1, persistent=False)
        self.width = width

    def field_tokens(self, name: str) -> FieldTokens:
        """A field's token module."""
        result = self.fields[self.names.index(name)]
        assert isinstance(result, FieldTokens)
        return result

    def _sum(self, side: str, values: dict[str, Any], start: Tensor) -> Tensor:
        for name in self.sides[side]:
            if name not in values:
                raise ValueError(f"LiGR: batch must have the {side} field {name!r}, got {sorted(values)}.")
            start = start + self.field_tokens(name)(values[name])
        return start

    def context(self, values: dict[str, Any] | None, requests: int) -> Tensor:
        """(requests, width). values: None for the start alone."""
        out: Tensor = self.norm(self.start if values is None else self._sum("context", values, self.start))
        return out.expand(requests, self.width)

    def events(self, values: dict[str, Any], gap: Tensor | None) -> Tensor:
        """(E, width). gap: (E,) seconds since the previous event, infinite for the first; only read with ages."""
        x = self._sum("events", values, self.start.new_zeros(self.width))
        if self.gap is not None and gap is not None:
            x = x + embedding(_bucket_seconds(gap, self.bounds), self.gap)
        out: Tensor = self.norm(x)
        return out

    def candidates(self, values: dict[str, Any], newest: Tensor | None) -> Tensor:
        """(C, width). newest: (C,) seconds since the request's newest event, infinite without events."""
        x = self._sum("candidates", values, self.candidate)
        if self.newest is not None and newest is not None:
            x = x + embedding(_bucket_seconds(newest, self.bounds), self.newest)
        out: Tensor = self.norm(x)
        return out


def _bucket_seconds(seconds: Tensor, bounds: Tensor) -> Tensor:
    """int64: 1 + ⌊log₂(1 + seconds)⌋, at most 31; 0 for infinite or NaN seconds.

    bounds: (30,) int64, 2ⁿ − 1. Uses comparisons, which are exact; a logarithm would be off at powers of two.
    """
    there = seconds.isfinite()
    whole = torch.where(there, seconds, 0).clamp(0, 2.0**BUCKETS).long()
    return torch.where(there, torch.bucketize(whole, bounds, right=True) + 1, 0)


def event_tokens(
    tokens: Tokens, batch: Batch, offsets: Tensor, since: Tensor | None = None, *, context: bool = True
) -> tuple[Tensor, Tensor]:
    """Tokens for a batch's history, and each request's newest event age, infinite without events.

    offsets: the batch's history_offsets, on the device.
    since: (R,), for appending: age of the newest encoded event at the batch's requests; only event tokens are returned.
        None: the batch has the whole history, and each request's events follow its context token.
    context: False for a context token without request fields.
    """
    R, age = len(offsets) - 1, batch.age.double()
    E = len(age)
    of = _segments(offsets, E)
    none = age.new_full((max(R, 1),), torch.inf)[:R]
    earlier = none if since is None else since
    newest = torch.where(offsets.diff() > 0, age[(offsets[1:] - 1).clamp(min=0)], earlier) if E else earlier
    first = torch.arange(E, device=age.device) == offsets[of]
    before = torch.where(first, earlier[of], age.roll(1)) if E else age
    events = tokens.events(batch.history, before - age)
    if since is not None:
        return events, newest
    # In [context, events], row p of request r is event p − r − 1, or request r's context.
    row = torch.arange(R + E, device=age.device)
    request = _segments(offsets + torch.arange(R + 1, device=age.device), R + E)
    is_context = row == offsets[request] + request
    source = torch.cat((tokens.context(batch.context if context else None, R), events))
    return source[torch.where(is_context, request, R + row - request - 1)], newest
