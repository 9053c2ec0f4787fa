"""Schema for an impression table: column roles, and the fields that models read."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.data.arrow import nearest
from tigon.data.schema import dump_fields, parse_field
from tigon.files import parse_json, read_json
from tigon.rank.data.fields import KINDS, Cross, Field, Id, Number, Time
from tigon.rank.data.labels import Label

# Usual column names by role, the likeliest first.
USUAL: dict[str, tuple[str, ...]] = {
    "request": ("session_id", "request_id", "request", "impression_id", "query_id", "qid", "search_id", "session"),
    "item": (
        "item_id", "item", "itemId", "movie_id", "product_id", "video_id", "doc_id", "news_id", "adgroup_id", "iid",
    ),
    "user": ("user_id", "user", "userId", "userid", "member_id", "visitor_id", "uid"),
    "time": ("timestamp", "time", "datetime", "date", "time_stamp", "event_time", "created_at", "ts"),
    "labels": ("label", "click", "clicked", "is_click", "clk", "target", "y"),
    "weight": ("sample_weight",),
}  # fmt: skip


@dataclass(frozen=True)
class Roles:
    """Column names for requests, items, users, times, labels, actions and weights.

    Args:
        item: column with the shown item. None: rows are features alone, as in some click tables.
        request: rows with the same value were shown together. None: rows with the same user and time; without those,
            each row is a request.
        user: identifies the history that a request reads.
        time: required for a history.
        labels: 0/1 columns, or comparisons such as "rating >= 4" and "like = rating >= 4".
        action: history columns that record the outcome.
        weight: row weight in losses.
    """

    item: str | None = None
    request: str | None = None
    user: str | None = None
    time: str | None = None
    labels: tuple[str, ...] = ()
    action: tuple[str, ...] = ()
    weight: str | None = None

    def __post_init__(self) -> None:
        for name in ("item", "request", "user", "time", "weight"):
            value = getattr(self, name)
            if not isinstance(value, (str, type(None))):
                raise ValueError(f"Schema: role {name!r} must be a column name, or none, got {value!r}.")
        for name in ("labels", "action"):
            value = getattr(self, name)
            columns = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (None,)
            if not all(isinstance(column, str) for column in columns):
                raise ValueError(f"Schema: role {name!r} must be a list of columns, got {value!r}.")
            object.__setattr__(self, name, columns)


class Schema:
    """A table's column roles, and a field for each column that models read.

    Args:
        roles: a `Roles`, or a dict with its arguments.
        fields: column name → field. The item's own id is the field named by `roles.item`, with side "item". Without
            items no field has that side.

    Attributes:
        context, items, rows: fields by side and name.
        history: event fields: item fields with `history`, and actions.
        labels: label names.
        is_open: whether any field is still unfitted.
        left_out: column → reason, for columns skipped by schema inference.

    Raises: ValueError if the item has no field, two labels share a name, a field's side contradicts its role, or a
        cross names unknown fields.
    """

    def __init__(self, roles: Roles | Mapping[str, Any], fields: Mapping[str, Field]) -> None:
        self.roles = roles if isinstance(roles, Roles) else _roles(roles)
        self.fields = dict(fields)
        self.left_out: dict[str, str] = {}
        for name, field in self.fields.items():
            if not isinstance(field, Field):
                raise ValueError(f"Schema: field {name!r} must be one of {', '.join(KINDS)}, got {_type(field)}.")
        item, time = (None if name is None else self.fields.get(name) for name in (self.roles.item, self.roles.time))
        if self.roles.item is None:
            for name in self.side("item"):
                raise ValueError(f"Schema: field {name!r} has side 'item', but roles.item names no item column.")
        elif not isinstance(item, Id) or item.side != "item":
            raise ValueError(f"Schema: the item {self.roles.item!r} must have a field Id(side='item'), got {item!r}.")
        if len(set(self.labels)) < len(self.labels):
            twice = next(name for name in self.labels if self.labels.count(name) > 1)
            raise ValueError(
                f"Schema: labels must have unique names, got {twice!r} more than once; NAME=COLUMN>=VALUE sets a name."
            )
        if time is not None and (not isinstance(time, Time) or time.side != "context"):
            raise ValueError(
                f"Schema: the time {self.roles.time!r} must have a field Time(side='context'), got {time!r}."
            )
        for name in self.roles.action:
            action = self.fields.get(name)
            if action is None or action.side != "action":
                raise ValueError(f"Schema: the action {name!r} must have a field with side 'action', got {action!r}.")
        for name in self.side("action"):
            if name not in self.roles.action:
                raise ValueError(f"Schema: field {name!r} has side 'action', but roles.action does not name it.")
        for name, field in self.fields.items():
            if isinstance(field, Cross):
                self._check_cross(name, field)

    def _check_cross(self, name: str, cross: Cross) -> None:
        for part in cross.of:
            if (why := self.why_no_cross(part)) is not None:
                raise ValueError(f"Schema: cross {name!r} must combine {why}")

    def why_no_cross(self, name: str) -> str | None:
        """The reason a field cannot be part of a cross, as the end of an error sentence; None if it can.

        Args:
            name: the field's name.
        """
        field = self.fields.get(name)
        if field is None:
            known = [one for one, of in self.fields.items() if not isinstance(of, Cross)]
            return f"fields in its schema, got {name!r}; {nearest(name, known)}"
        if isinstance(field, Cross) or not isinstance(field, (Id, Number)) or field.side == "action":
            return f"Id or Number fields of an impression, got {name!r}, {field.kind}."
        if isinstance(field, Number) and field.scale != "quantile":
            return f"numbers with scale 'quantile', which defines the bins, got {name!r} with scale {field.scale!r}."
        return None

    def side(self, side: str) -> dict[str, Field]:
        """The fields on a side, by name."""
        return {name: field for name, field in self.fields.items() if field.side == side}

    @property
    def context(self) -> dict[str, Field]:
        return self.side("context")

    @property
    def items(self) -> dict[str, Field]:
        return self.side("item")

    @property
    def rows(self) -> dict[str, Field]:
        return self.side("row")

    @property
    def history(self) -> dict[str, Field]:
        return {name: field for name, field in self.fields.items() if field.history or field.side == "action"}

    @property
    def labels(self) -> list[str]:
        """The label names: "like = rating >= 4" has the name `like`."""
        return [Label.parse(text).name for text in self.roles.labels]

    @property
    def is_open(self) -> bool:
        """Whether any field is still unfitted."""
        return any(field.is_open for field in self.fields.values())

    def replace(self, fields: Mapping[str, Field]) -> Schema:
        """A copy with replaced or added fields.

        Args:
            fields: fields by name; existing names are replaced.
        """
        return Schema(self.roles, {**self.fields, **fields})._because(self.left_out)

    def expandable(self) -> Schema:
        """This schema for newer data, whose new values get codes after the known vocabulary.

        `Impressions.read(…, schema=schema.expandable())` then knows the old and the new values, and
        `rank.expand_vocabularies` adds rows for the new values to a ranker. Number scales are unchanged.
        """
        coded = {name: field for name, field in self.fields.items() if getattr(field, "vocab", None) is not None}
        return self.replace({name: dataclasses.replace(field, grows=True) for name, field in coded.items()})  # type: ignore[call-arg]

    def _because(self, left_out: Mapping[str, str]) -> Schema:
        self.left_out = dict(left_out)
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and (self.roles, self.fields) == (other.roles, other.fields)

    __hash__ = None  # type: ignore[assignment]  # attributes are dicts

    def __repr__(self) -> str:
        return f"Schema({self.roles!r}, {', '.join(self.fields)})"

    # ---------------------------------------------------------------------------------------------------------- JSON

    def to_json(self) -> str:
        """Roles and fields as editable JSON."""
        roles = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self.roles).items()}
        fields = dump_fields(self.fields).items()
        rows = ",\n    ".join(f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in fields)
        return f'{{\n  "roles": {json.dumps(roles, ensure_ascii=False)},\n  "fields": {{\n    {rows}\n  }}\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """Parse a schema from JSON, as written by `to_json` or by hand.

        Args:
            text: {"roles": {"item": "item_id", …}, "fields": {"item_id": {"kind": "Id", "side": "item"}, …}}.

        Raises: ValueError for invalid JSON, or an unknown role, kind or option.
        """
        return cls._parse(parse_json(text, "Schema.from_json: the text"), "Schema.from_json: the text")

    @classmethod
    def _parse(cls, told: Any, name: str) -> Schema:
        if not all(isinstance(told.get(k), dict) for k in ("roles", "fields")):
            raise ValueError(f"{name} must hold an object with the objects 'roles' and 'fields'.")
        try:
            fields = {key: parse_field(f"Schema: field {key!r}", of, KINDS) for key, of in told["fields"].items()}
            return cls(_roles(told["roles"]), fields)
        except (TypeError, OverflowError, AttributeError) as error:  # an option value with the wrong type
            raise ValueError(f"{name} has an option with the wrong type: {error}.") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the schema as JSON.

        Args:
            path: the file, such as run/schema.json.
        """
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schema:
        """Load a schema from a JSON file.

        Args:
            path: the file.

        Raises: ValueError as `from_json`, and if the file is missing or cannot be read.
        """
        return cls._parse(read_json(path), str(path))


def _roles(told: Mapping[str, Any]) -> Roles:
    known = [field.name for field in dataclasses.fields(Roles)]
    for name in told:
        if name not in known:
            raise ValueError(f"Schema: there is no role {name!r}; {nearest(name, known)}")
    return Roles(**told)


def _type(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
