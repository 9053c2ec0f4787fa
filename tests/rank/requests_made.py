"""Requests by hand: every kind of field, any lengths."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tigon.rank.data.batch import Batch, select_rows
from tigon.rank.data.fields import Id, Ids, Number, Time
from tigon.rank.data.ragged import Ragged
from tigon.rank.data.schema import Schema

ITEMS = 30
SCHEMA = Schema(
    {"item": "item", "labels": ["click", "like"], "action": ["what", "stars"]},
    {
        "item": Id(hash_rows=ITEMS, side="item", history=True),
        "genres": Ids(hash_rows=6, side="item", history=True, dim=4),
        "words": Ids(hash_rows=9, side="item", pool="attention"),
        "position": Number(scale="none", side="row"),
        "age": Number(scale="none", side="context"),
        "country": Id(vocab=("de", "fr"), side="context"),
        "at": Time(side="context"),
        "what": Id(vocab=("click", "view"), side="action"),
        "stars": Number(scale="none", side="action"),
    },
)


def values(schema: Schema, names: dict, n: int, draw: torch.Generator) -> dict:
    made = {}
    for name in names:
        field = schema.fields[name]
        if isinstance(field, Ids):
            counts = torch.randint(0, 4, (n,), generator=draw)
            offsets = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
            made[name] = Ragged(torch.randint(0, field.rows, (int(offsets[-1]),), generator=draw), offsets)
        elif isinstance(field, Id):
            made[name] = torch.randint(0, field.rows, (n,), generator=draw).int()
        elif isinstance(field, Time):
            made[name] = torch.randint(0, 2**50, (n,), generator=draw)
            made[name][1::3] = torch.iinfo(torch.int64).min  # missing
        else:
            made[name] = torch.randn(n, generator=draw)
            made[name][::3] = torch.nan  # missing
    return made


def batch(histories: list[int], candidates: list[int], schema: Schema = SCHEMA, seed: int = 0) -> Batch:
    """Requests with so many events and candidates each. Ages are whole seconds, up to months."""
    draw = torch.Generator().manual_seed(seed)
    E, C = sum(histories), sum(candidates)
    ages = [torch.randint(1, 10**7, (n,), generator=draw).sort(descending=True).values for n in histories]
    return Batch(
        offsets(candidates), offsets(histories),
        values(schema, schema.context, len(histories), draw),
        values(schema, {**schema.items, **schema.rows}, C, draw),
        values(schema, schema.history, E, draw),
        torch.cat([torch.zeros(0, dtype=torch.int64), *ages]).double(),
        {name: torch.randint(0, 2, (C,), generator=draw).float() for name in schema.labels},
        None, torch.arange(C),
    )  # fmt: skip


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def chosen(made: Batch, candidates: list[list[int]] | None = None, events: list[list[int]] | None = None) -> Batch:
    """The same requests with these of their candidates, and these of their events, by their place in the request."""
    found = made
    if candidates is not None:
        rows = _rows(made.offsets, candidates)
        found = dataclasses.replace(
            found, offsets=offsets([len(c) for c in candidates]), rows=made.rows[rows],
            items={name: select_rows(value, rows) for name, value in made.items.items()},
            labels={name: value[rows] for name, value in made.labels.items()},
        )  # fmt: skip
    if events is not None:
        rows = _rows(made.history_offsets, events)
        found = dataclasses.replace(
            found, history_offsets=offsets([len(e) for e in events]), age=made.age[rows],
            history={name: select_rows(value, rows) for name, value in made.history.items()},
        )  # fmt: skip
    return found


def _rows(starts: Tensor, places: list[list[int]]) -> Tensor:
    return torch.tensor([int(starts[r]) + p for r, one in enumerate(places) for p in one], dtype=torch.int64)


def of_request(made: Batch, r: int) -> Batch:
    """Request r alone."""
    here = torch.tensor([r])
    n = len(made.offsets) - 1
    kept = chosen(
        made, [[*range(int(made.offsets.diff()[s]))] if s == r else [] for s in range(n)],
        [[*range(int(made.history_offsets.diff()[s]))] if s == r else [] for s in range(n)],
    )  # fmt: skip
    return dataclasses.replace(
        kept, offsets=kept.offsets[[0, -1]], history_offsets=kept.history_offsets[[0, -1]],
        context={name: select_rows(value, here) for name, value in made.context.items()},
    )  # fmt: skip


def randomly(ranker: torch.nn.Module, seed: int = 0, std: float = 0.4) -> torch.nn.Module:
    """fp64, with weights so large that every part of the model moves the logits."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in ranker.double().parameters():
            weight.copy_(std * torch.randn(weight.shape, generator=draw, dtype=torch.float64))
    return ranker.eval()
