"""Convert tables to tensors: group rows by request, look up features, sort events."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tigon.data.arrow import is_numeric, kinds_agree, numbers
from tigon.data.values import Ints
from tigon.rank.data.crosses import compute_crosses
from tigon.rank.data.fields import Cross, Field, Id, Time
from tigon.rank.data.in_memory import ColumnBuffer, InMemoryImpressions
from tigon.rank.data.labels import Label
from tigon.rank.data.schema import Roles, Schema
from tigon.rank.data.tables import NAME, SPOKEN, Tables, explain_value

# Numeric times above this, in microseconds, suggest the next smaller unit (see `Time`).
LATEST = 10**17
NO_TIMES = "so that no event after a request is read"


def materialize(tables: Tables, schema: Schema, labelled: bool) -> InMemoryImpressions:
    """Build the tensors.

    labelled: whether labels are required.
    Raises: ValueError for missing columns and values that do not fit.
    """
    roles, notes = schema.roles, list[str]()
    group, requests = group_requests(tables, roles)
    order = torch.from_numpy(np.argsort(group, kind="stable"))
    sizes = torch.from_numpy(np.bincount(group))
    offsets = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
    time = None
    if roles.time is not None and roles.time in tables.rows:
        time = earliest_times(read_times(tables, "rows", schema)[order], offsets)

    places = FieldReader(tables, schema, order, offsets)
    context = {
        name: ColumnBuffer(time) if name == roles.time and time is not None else places.read_context(name, field)
        for name, field in schema.context.items()
    }
    read = {name: field for name, field in {**schema.items, **schema.rows}.items() if not isinstance(field, Cross)}
    items = {name: places.read_candidates(name, field) for name, field in read.items()}
    items |= compute_crosses(schema, context, items, sizes)
    events = places.read_events(time, notes)
    labels = {name: values[order] for name, values in _labels(tables, roles, labelled).items()}
    partial = frozenset(name for name, values in labels.items() if bool(values.isnan().any()))
    weights = None
    if roles.weight is not None and (labelled or roles.weight in tables.rows):
        weights = _weights(tables, roles.weight)[order]
    context, items = (
        {k: v.compact(isinstance(schema.fields[k], Id)) for k, v in side.items()} for side in (context, items)
    )
    held = InMemoryImpressions(
        schema, requests, offsets, *events, time, context, items, labels, weights, order, notes, partial
    )
    _note(held, places)
    return held


def _labels(tables: Tables, roles: Roles, labelled: bool) -> dict[str, Tensor]:
    """(N,) per label, NaN for missing values.

    Raises: ValueError, if labels are required, for a missing label column and for a row without any label value.
    """
    labels = [*map(Label.parse, roles.labels)]
    result = {}
    for label in labels:
        if label.column in tables.rows or labelled:
            column = tables.column("rows", label.column, "a label")
            with explain_value("rows", label.column, "label"):
                result[label.name] = label.read(column, gaps=len(labels) > 1 or not labelled)
    if labelled and result:
        nothing = torch.stack([*result.values()]).isnan().all(0)
        if nothing.any():
            raise ValueError(
                f"{NAME}: row {int(nothing.nonzero()[0])} of {SPOKEN['rows']} has no value for any label, "
                f"{', '.join(result)}; a row must have at least one value."
            )
    return result


def group_requests(tables: Tables, roles: Roles) -> tuple[Ints, Any]:
    """Each row's request, numbered in row order, and the request ids."""
    import pyarrow as pa

    count = tables.count()
    if roles.request is not None:
        named = tables.keys("rows", roles.request, "what was shown together")
        if named.null_count:
            at = int(np.array(named.is_null()).argmax())
            raise ValueError(f"{NAME}: column {roles.request!r} (request), row {at}: every row must have a request.")
        coded = named.dictionary_encode()
        return np.array(coded.indices.cast("int64")), coded.dictionary
    if roles.user is None or roles.time is None or not {roles.user, roles.time} <= {*tables.rows}:
        return np.arange(count), None
    users = tables.keys("rows", roles.user, "the user").dictionary_encode()
    times = tables.rows[roles.time].dictionary_encode()
    codes = [np.array(one.indices.cast("int64").fill_null(-1)) + 1 for one in (users, times)]
    both = codes[0] * (len(times.dictionary) + 1) + codes[1]
    both = np.where(codes[0] == 0, -1 - np.arange(count), both)  # rows without a user are separate requests
    coded = pa.array(both).dictionary_encode()
    return np.array(coded.indices.cast("int64")), None


def read_times(tables: Tables, table: str, schema: Schema) -> Tensor:
    """(n,) int64 times for a table's rows.

    Raises: ValueError for a missing column or missing times.
    """
    name = schema.roles.time
    if name is None or name not in tables.columns(table):
        raise ValueError(
            f"{NAME}: {SPOKEN[table]} must have times, {NO_TIMES}; name the column by time=…, there are "
            f"{', '.join(map(repr, tables.columns(table)))}."
        )
    kind = schema.fields[name]
    result: Tensor = tables.encode(table, name, kind)
    if (missing := result == Time.MISSING).any():
        raise ValueError(
            f"{NAME}: column {name!r} (time) of {SPOKEN[table]}, row {int(missing.nonzero()[0])}: must be a time, "
            "got a missing value."
        )
    # With a unit different from training, all history events, even future events, would count as past.
    if (late := result > LATEST).any() and is_numeric(tables.columns(table)[name]):
        at = int(late.nonzero()[0])
        unit, value = getattr(kind, "unit", None), tables.columns(table)[name][at]
        raise ValueError(
            f"{NAME}: column {name!r} (time) of {SPOKEN[table]}, row {at}: must be a time in {unit} since 1970, got "
            f"{value}, a time after the year 5138."
        )
    return result


def earliest_times(time: Tensor, offsets: Tensor) -> Tensor:
    """(R,) earliest time among each request's rows: events before it precede all rows in the request."""
    return torch.from_numpy(np.minimum.reduceat(time.numpy(), offsets[:-1].numpy())) if len(time) else time


def _weights(tables: Tables, name: str) -> Tensor:
    with explain_value("rows", name, "weight"):
        found = numbers(tables.column("rows", name, "the weight"))
    if (wrong := ~(found >= 0)).any():
        at = int(wrong.argmax())
        raise ValueError(f"{NAME}: column {name!r} (weight), row {at}: must be 0 or more, got {found[at]:g}.")
    return torch.from_numpy(found.astype(np.float32))


class FieldReader:
    """Reads a schema's fields from the tables."""

    def __init__(self, tables: Tables, schema: Schema, order: Tensor, offsets: Tensor) -> None:
        self.tables, self.schema, self.roles = tables, schema, schema.roles
        self.order, self.offsets = order, offsets
        self.ones = order[offsets[:-1]]  # each request's first row
        self.in_order = bool((order == torch.arange(len(order))).all())
        self.sides: dict[tuple[str, str], Any] = {}
        self.lost: dict[tuple[str, str], int] = {}

    def read_context(self, name: str, field: Field) -> ColumnBuffer:
        if name not in self.tables.rows and name in self.tables.columns("users"):
            found = self._look_up("users", name, field, "rows")
            assert found.places is not None
            return ColumnBuffer(found.values, found.places[self.ones])
        values = self.tables.encode("rows", name, field)
        self._constant(name, values)
        return ColumnBuffer(values).select(self.ones)

    def _constant(self, name: str, values: Any) -> None:
        """Raise if a request's rows differ."""
        if not isinstance(values, Tensor):  # texts, or code lists
            numbered: dict[Any, int] = {}
            rows = values if isinstance(values, list) else map(tuple, values.lists())
            values = torch.tensor([numbered.setdefault(row, len(numbered)) for row in rows], dtype=torch.int64)
        different = None if name == self.roles.time else self._find_difference(values)
        if different is not None:
            raise ValueError(
                f"{NAME}: column {name!r} has side 'context', but differs within a request, between rows "
                f"{different[0]} and {different[1]}; use side 'row' for such columns."
            )

    def _find_difference(self, values: Tensor) -> tuple[int, int] | None:
        """Two rows of a request with different values: its first row and another; None if there are none."""
        inner = values[self.order]
        first = torch.repeat_interleave(inner[self.offsets[:-1]], self.offsets.diff())
        differ = (inner != first) & ~((inner != inner) & (first != first))  # NaN: missing
        if not differ.any():
            return None
        place = int(differ.nonzero()[0])
        request = int(torch.searchsorted(self.offsets, place, right=True)) - 1
        return int(self.ones[request]), int(self.order[place])

    def read_candidates(self, name: str, field: Field) -> ColumnBuffer:
        if field.side == "item" and name not in self.tables.rows and name in self.tables.columns("items"):
            found = self._look_up("items", name, field, "rows")
        else:
            found = ColumnBuffer(self.tables.encode("rows", name, field))
        return found if self.in_order else found.select(self.order)

    def read_events(
        self, time: Tensor | None, notes: list[str]
    ) -> tuple[Tensor, Tensor, dict[str, ColumnBuffer], Tensor]:
        """First and last event per request, event fields, and event times."""
        tables, roles = self.tables, self.roles
        none = torch.zeros(len(self.ones), dtype=torch.int64)
        fields = self.schema.history
        if tables.history is None:
            if fields:
                notes.append("The schema reads histories, but none was given: all histories are empty.")
            empty = {k: ColumnBuffer(v.encode(_nothing(v))).compact(v.kind == "Id") for k, v in fields.items()}
            return none, none, empty, none[:0]
        if roles.user is None:
            raise ValueError(f"{NAME}: a history needs users; name the column by user=….")
        if time is None:
            read_times(tables, "rows", self.schema)
        assert time is not None
        when = read_times(tables, "history", self.schema)
        user, actor = map(torch.from_numpy, tables.codes(roles.user, "the user")[0])
        if (rows := self._find_difference(user)) is not None:
            raise ValueError(
                f"{NAME}: rows {rows[0]} and {rows[1]} have the same request ({roles.request!r}) but different users "
                f"({roles.user!r}); a request must have a single user."
            )
        user = user[self.ones]
        if lost := int((actor < 0).sum()):
            notes.append(f"{lost:,} of {len(actor):,} events {_has(lost)} no user and are left out of histories.")
        order = torch.from_numpy(np.flatnonzero(actor.numpy() >= 0))
        order = order[sort_events(actor[order], when[order])]
        start, end, excluded = find_windows(actor[order], when[order], user, time)
        if (same := int(excluded.sum())) and not tables.own:
            events = "event" if same == 1 else "events"
            notes.append(f"Histories exclude {same:,} {events} at exactly the time of a request by the same user.")
        if len(order) and not (end > start).any() and not tables.own:
            notes.append(
                "No request has a history: check that both tables use the same user ids and events precede requests."
            )
        history = {k: self._read_event_field(k, v).select(order).compact(v.kind == "Id") for k, v in fields.items()}
        return start, end, history, when[order]

    def _read_event_field(self, name: str, field: Field) -> ColumnBuffer:
        if name not in self.tables.columns("history") and name in self.tables.columns("items"):
            return self._look_up("items", name, field, "history")
        return ColumnBuffer(self.tables.encode("history", name, field))

    def _look_up(self, side: str, name: str, field: Field, table: str) -> ColumnBuffer:
        """An item or user field looked up for another table's rows; missing for unknown ids."""
        import pyarrow as pa
        import pyarrow.compute as pc

        role = self.roles.item if side == "items" else self.roles.user
        assert role is not None
        if (side, table) not in self.sides:
            wanted, there = kinds_agree([self.tables.keys(where, role, f"the {side[:-1]}") for where in (table, side)])
            named = there.drop_null()
            if pc.count_distinct(named).as_py() < len(named):
                twice = next(one["values"] for one in pc.value_counts(named).to_pylist() if one["counts"] > 1)
                raise ValueError(
                    f"{NAME}: {SPOKEN[side]} must have each {role!r} once, but have {twice!r} more than once."
                )
            index = pc.index_in(wanted, value_set=named).cast("int64")
            # An extra last row with missing values serves unknown ids.
            self.lost[side, table] = index.null_count
            kept = np.flatnonzero(np.array(there.is_valid()))
            rows = np.append(kept, len(there))[np.array(index.fill_null(len(kept)))]
            self.sides[side, table] = torch.from_numpy(rows)
        column = self.tables.column(side, name, f"read as {field.kind}")
        column = pa.concat_arrays([column, pa.nulls(1, column.type)])
        with explain_value(side, name, field.kind):
            return ColumnBuffer(field.encode(column), self.sides[side, table])


def sort_events(user: Tensor, time: Tensor) -> Tensor:
    """(E,) event order by user code, then by time; stable."""
    by_time = time.sort(stable=True).indices
    return by_time[user[by_time].sort(stable=True).indices]


def find_windows(
    event_user: Tensor, event_time: Tensor, user: Tensor, time: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Find the events visible to each request, those of its user strictly before the request: a slice.

    Args:
        event_user, event_time: (E,) int64, sorted by `sort_events`. User codes are ≥ 0.
        user, time: (R,) int64; user −1 has no history.
    Returns: (R,) each: the slices' starts and ends, and the number of events at exactly the request's time, which are
        excluded.
    """
    user, time, event_time = user.contiguous(), time.contiguous(), event_time.contiguous()
    times = event_time.unique()
    # Combine user and time rank into a single number, so that one search handles both.
    width = len(times) + 1
    keys = event_user * width + torch.searchsorted(times, event_time)
    first = user * width
    start = torch.searchsorted(keys, first)
    end = torch.searchsorted(keys, first + torch.searchsorted(times, time))
    after = torch.searchsorted(keys, first + torch.searchsorted(times, time, right=True))
    return start, end, after - end


def _nothing(field: Field) -> Any:
    import pyarrow as pa

    return pa.array([], pa.list_(pa.int64()) if field.kind == "Ids" else pa.int64())


def _note(held: InMemoryImpressions, places: FieldReader) -> None:
    """Add notes on unusual data: gaps, labels with a single class, unknown items and users."""
    roles = held.schema.roles
    for name, values in held.labels.items():
        known = values[~values.isnan()]
        if gaps := len(values) - len(known):
            held.notes.append(
                f"Label {name!r} has no value in {gaps:,} of {len(values):,} rows: its loss and metrics skip these "
                "rows."
            )
        positive = int(known.sum())
        if positive in (0, len(known)):
            held.notes.append(
                f"Label {name!r} is {int(positive > 0)} in all {len(known):,} rows: with one class there is nothing "
                "to learn, and AUC is undefined."
            )
    for what, stored in (("rows", held.items), ("events", held.history)):
        if roles.item in stored:
            codes = stored[roles.item].values
            if unseen := int((codes == 0).sum()):
                held.notes.append(
                    f"{unseen:,} of {len(codes):,} {what} {_has(unseen)} an item that the schema does not know."
                )
    for (side, table), lost in places.lost.items():
        if lost:
            where, one = "rows" if table == "rows" else "events", "an item" if side == "items" else "a user"
            many = len(places.sides[side, table])
            held.notes.append(f"{lost:,} of {many:,} {where} {_has(lost)} {one} that is not among {SPOKEN[side]}.")


def _has(number: int) -> str:
    return "has" if number == 1 else "have"
