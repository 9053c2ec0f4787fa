"""Convert impressions to prompt requests with the columns named in the templates."""

from __future__ import annotations

import datetime
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from tigon.data.arrow import numbers
from tigon.data.values import BadValue
from tigon.rank.data.fields import Field, Id, Ids, Number, Text, Time
from tigon.rank.data.impressions import Impressions
from tigon.rank.data.schema import Roles, Schema
from tigon.rank.data.tables import (
    OwnHistory,
    Tables,
    explain_value,
    find_roles,
    gather_tables,
    load_columns,
    load_history,
)
from tigon.rank.models.prompt.packing import Request
from tigon.rank.models.prompt.task import NAME
from tigon.rank.models.prompt.templates import AGO, Prompt, format_age

# Column prefix, followed by a task name: a teacher's score per row.
TEACHER = "teacher_"
# Maximum events per request; few prefixes hold more.
HISTORY = 512
# Requests gathered from the tables at once.
CHUNK = 256


def read_impressions(
    prompt: Prompt, data: Any, *, history: Any = None, items: Any = None, users: Any = None, labelled: bool = True
) -> Impressions:
    """Read impressions with the columns that a prompt names.

    Args:
        prompt: its `columns` give roles to columns with unusual names.
        data, history, items, users, labelled: as in `rank.Impressions.read`.
    Raises: ValueError for a column named in a template or label but missing from all tables, with the nearest name, and
        as `rank.Impressions.read`.
    """
    rows = load_columns(data)
    events = load_history(history)
    items, users = (None if side is None else load_columns(side) for side in (items, users))
    labels = _labels(prompt)
    try:
        roles = find_roles(rows, {**prompt.columns, "labels": labels, "action": ()}, events)
    except ValueError as error:
        raise ValueError(f"{error} Name the column in the prompt's columns.") from None
    tables = gather_tables(rows, events, items, users, roles)
    schema = _schema(prompt, tables, roles, labelled)
    # Keep history keywords, so that a split can check the history.
    past = history if isinstance(events, OwnHistory) else events
    return Impressions.read(rows, history=past, items=items, users=users, schema=schema, labelled=labelled)


def _labels(prompt: Prompt) -> list[str]:
    """Two-answer tasks as impression labels; other tasks are read from their column."""
    result = []
    for task in prompt.tasks.values():
        if task.read.compares:
            result.append(f"{task.name} = {task.read.text}")
        elif set(task.values) == {0.0, 1.0}:
            result.append(task.name if task.name == task.read.column else f"{task.name} = {task.read.column}")
    return result


def _schema(prompt: Prompt, tables: Tables, roles: Roles, labelled: bool) -> Schema:
    """Roles and fields for the columns in the templates, read unchanged."""
    questions = list(prompt.tasks)
    prompt.check_columns("profile", {*tables.rows, *tables.columns("users")})
    for part in ("candidate", *questions):
        prompt.check_columns(part, {*tables.rows, *tables.columns("items")})
    for task in prompt.tasks.values():
        if labelled and task.read.column not in tables.rows:
            tables.column("rows", task.read.column, f"the label column for task {task.name}")
    said = prompt.columns_in("event") - {AGO} if tables.history is not None else set()
    if tables.history is not None:
        prompt.check_columns("event", {*tables.columns("history"), *tables.columns("items")} - {str(roles.time)})
    shown = prompt.columns_in("candidate", *questions)
    if roles.item is None:
        raise ValueError(
            f"{NAME}: candidates need an item column, by item=…; there are {', '.join(map(repr, tables.rows))}."
        )
    item = Id(side="item", history=tables.history is not None)
    fields: dict[str, Field] = {roles.item: _with_vocabulary(tables, roles.item, item, ("rows", "history", "items"))}
    if roles.time is not None:
        fields[roles.time] = Time(side="context")
    for name in sorted(prompt.columns_in("profile") - {roles.item}):
        fields.setdefault(name, _field(tables, name, ("rows", "users"), "context"))
    for name in sorted(shown - {roles.item}):
        _check_free(fields, name)
        fields[name] = _field(tables, name, ("rows", "items"), "item", history=name in said)
    actions = []
    for name in sorted(said - shown - {roles.item}):
        _check_free(fields, name)
        if name in tables.columns("history"):
            actions.append(name)
            fields[name] = _field(tables, name, ("history",), "action")
        else:
            # An item feature that candidates have, but the candidate template does not use.
            fields[name] = _field(tables, name, ("items",), "item", history=True)
    told = {**{one: getattr(roles, one) for one in ("item", "request", "user", "time", "labels", "weight")}}
    return Schema(Roles(**told, action=tuple(actions)), fields)


def _check_free(fields: dict[str, Field], name: str) -> None:
    if name in fields:
        raise ValueError(
            f"{NAME}: {name!r} is used for requests and for candidates or events; a column can belong to only one side."
        )


def _field(tables: Tables, name: str, where: tuple[str, ...], side: Any, history: bool = False) -> Field:
    import pyarrow.types as types

    kind = next(tables.columns(table)[name].type for table in where if name in tables.columns(table))
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _with_vocabulary(tables, name, Ids(side=side, history=history), where)
    if types.is_temporal(kind):
        return Time(side=side, history=history)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_boolean(kind):
        if any(_is_large(tables.columns(table)[name]) for table in where if name in tables.columns(table)):
            return _with_vocabulary(tables, name, Id(side=side, history=history), where)
        return Number("none", side=side, history=history)
    return (
        _with_vocabulary(tables, name, Id(side=side), where) if side == "action" else Text(side=side, history=history)
    )


def _is_large(column: Any) -> bool:
    """Whether a column is integer-valued with values beyond fp32's exact range."""
    try:
        x = numbers(column)
    except BadValue:
        return False
    x = x[~np.isnan(x)]
    return bool((x == np.floor(x)).all() and (x.astype(np.float32) != x).any())


def _with_vocabulary(tables: Tables, name: str, field: Field, where: tuple[str, ...]) -> Field:
    """A field with a vocabulary over all tables, independent of the training split: it only maps codes back to text."""
    found = []
    for table in where:
        if name in tables.columns(table):
            with explain_value(table, name, field.kind):
                found.append(field.values(tables.columns(table)[name]))
    return field.fit(found)


class Requests(Sequence[Request]):
    """Impressions as prompt requests, created lazily.

    Args:
        data: from `read_impressions`, with the same prompt.
        prompt: the `Prompt`.
        history_max: maximum events per request, newest first.
    """

    def __init__(self, data: Impressions, prompt: Prompt, *, history_max: int = HISTORY) -> None:
        self.data, self.prompt, self.history_max = data, prompt, history_max
        whole = data.batch(torch.arange(len(data)), history_max=0, device="cpu")
        self.first = whole.offsets.tolist()
        self.labels: dict[str, list[int]] = {}
        self.teacher: dict[str, list[Sequence[float] | None]] = {}
        for name, task in prompt.tasks.items():
            if (values := _find_column(data, task.read.column)) is not None:
                right = [task.find_answer({task.read.column: value}) for value in values]
                self.labels[name] = [-1 if at is None else at for at in right]
            if (values := _find_column(data, TEACHER + name)) is not None:
                self.teacher[name] = [_teacher_probabilities(name, task.values, p) for p in values]

    def __len__(self) -> int:
        return len(self.data)

    @overload
    def __getitem__(self, index: int) -> Request: ...

    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...

    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        if isinstance(index, slice):
            return self.__getitems__(list(range(*index.indices(len(self)))))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.__getitems__([index % len(self)])[0]

    def __getitems__(self, indices: list[int]) -> list[Request]:
        """Requests by index, in one gather."""
        batch = self.data.batch(torch.tensor(indices, dtype=torch.int64), history_max=self.history_max, device="cpu")
        schema, prompt = self.data.schema, self.prompt
        context = _values(batch.context, schema.context, prompt.columns_in("profile"))
        items = _values(batch.items, {**schema.items, **schema.rows}, prompt.columns_in("candidate", *prompt.tasks))
        events = _values(batch.history, schema.history, prompt.columns_in("event"))
        events[AGO] = [format_age(seconds) for seconds in batch.age.tolist()]
        first, past = batch.offsets.tolist(), batch.history_offsets.tolist()
        own = [slice(self.first[i], self.first[i + 1]) for i in indices]
        return [
            Request(
                _rows(items, first[r], first[r + 1]),
                _rows(context, r, r + 1)[0],
                _rows(events, past[r], past[r + 1]),
                {name: values[own[r]] for name, values in self.labels.items()},
                {name: values[own[r]] for name, values in self.teacher.items()},
            )
            for r in range(batch.requests)
        ]

    def __iter__(self) -> Iterator[Request]:
        for start in range(0, len(self), CHUNK):
            yield from self.__getitems__(list(range(start, min(start + CHUNK, len(self)))))

    def counts(self) -> dict[str, list[int]]:
        """Right-answer counts by task, over all requests' rows."""
        return {
            name: [at.count(k) for k in range(len(self.prompt.tasks[name].answers))] for name, at in self.labels.items()
        }

    @property
    def digest(self) -> str:
        """Digest for a run's record: over the request count and some texts."""
        step = max(1, len(self) // CHUNK)
        told = repr((len(self), self.data.rows, self.__getitems__(list(range(0, len(self), step))[:CHUNK])))
        return hashlib.sha256(told.encode()).hexdigest()[:16]


def _find_column(data: Impressions, name: str) -> list[Any] | None:
    try:
        return data.column(name)
    except ValueError:  # no such column
        return None


def _teacher_probabilities(task: str, values: list[float], p: float | None) -> list[float] | None:
    """All answers' probabilities from a teacher's probability for answer 1."""
    if set(values) != {0.0, 1.0}:
        raise ValueError(
            f"{NAME}: column {TEACHER + task!r} is a teacher's probability, but task {task} has other answers."
        )
    if p is not None and not 0 <= p <= 1:
        raise ValueError(f"{NAME}: column {TEACHER + task!r} must hold probabilities from 0 to 1, got {p!r}.")
    return None if p is None else [p if value == 1 else 1 - p for value in values]


def _rows(columns: dict[str, list[Any]], start: int, stop: int) -> list[dict[str, Any]]:
    return [{name: values[i] for name, values in columns.items()} for i in range(start, stop)]


def _values(found: dict[str, Any], fields: dict[str, Field], named: set[str]) -> dict[str, list[Any]]:
    """The named fields' values as in the tables."""
    return {name: _decode(values, fields[name]) for name, values in found.items() if name in named}


def _decode(values: Any, field: Field) -> list[Any]:
    if isinstance(values, list):
        return values
    if isinstance(field, Ids):
        words = field.vocab or ()
        codes, ends = values.values.tolist(), values.offsets.tolist()
        return [[words[c - 1] for c in codes[a:b] if c] for a, b in itertools.pairwise(ends)]
    listed = values.tolist() if isinstance(values, Tensor) else list(values)
    if isinstance(field, Id):
        words = field.vocab or ()
        return [words[code - 1] if code else None for code in listed]
    if isinstance(field, Time):
        zone = datetime.timezone.utc
        return [None if t == Time.MISSING else datetime.datetime.fromtimestamp(t / 1e6, zone) for t in listed]
    return listed
