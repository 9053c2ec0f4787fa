"""What the columns of a table of impressions are: their roles, and the fields that models read."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.data.arrow import nearest
from tigon.files import parse_json, read_json
from tigon.rank.data.fields import KINDS, Cross, Field, Id, Number, Time
from tigon.rank.data.labels import Label

# What columns are usually called, the likeliest first.
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
    """The columns of requests, items, users, times, labels, actions and weights.

    Args:
        item: the column of what was shown. None: each row is features alone, as those of a table of clicks may be.
        request: rows with the same value were shown together. None: rows of the same user and time; without those,
            each row by itself.
        user: whose history a request reads.
        time: when. A history needs it.
        labels: columns of 0 and 1, or comparisons that make them, such as "rating >= 4" and "like = rating >= 4".
        action: columns of a history that say what happened.
        weight: how much a row counts in losses.
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
                raise ValueError(f"Schema: role {name!r} must be the name of a column, or none, got {value!r}.")
        for name in ("labels", "action"):
            value = getattr(self, name)
            columns = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (None,)
            if not all(isinstance(column, str) for column in columns):
                raise ValueError(f"Schema: role {name!r} must be a list of columns, got {value!r}.")
            object.__setattr__(self, name, columns)


class Schema:
    """The roles of a table's columns, and a field for each column that models read.

    Args:
        roles: a `Roles`, or a dict of its arguments.
        fields: name of a column → its field. The item's own id is the field that `roles.item` names, of side "item".
            Without items no field has that side.

    Attributes:
        context, items, rows: the fields of each side, by name.
        history: the fields of events: those of items that events have, and the actions.
        labels: the names of the labels.
        is_open: whether a field is not fitted yet.
        left_out: column → the reason why an inferred schema skips the column.

    Raises: ValueError if the item has no field, two labels have one name, a field stands on a side where its role
        forbids it, or a cross is of fields that there are not.
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
                raise ValueError(f"Schema: field {name!r} has side 'item', but roles.item names no column of items.")
        elif not isinstance(item, Id) or item.side != "item":
            raise ValueError(f"Schema: the item {self.roles.item!r} must have a field Id(side='item'), got {item!r}.")
        if len(set(self.labels)) < len(self.labels):
            twice = next(name for name in self.labels if self.labels.count(name) > 1)
            raise ValueError(
                f"Schema: labels must differ in their names, got {twice!r} more often; NAME=COLUMN>=VALUE names one."
            )
        if time is not None and (not isinstance(time, Time) or time.side != "context"):
            raise ValueError(
                f"Schema: the time {self.roles.time!r} must have a field Time(side='context'), got {time!r}."
            )
        for name in self.roles.action:
            action = self.fields.get(name)
            if action is None or action.side != "action":
                raise ValueError(f"Schema: the action {name!r} must have a field of side 'action', got {action!r}.")
        for name in self.side("action"):
            if name not in self.roles.action:
                raise ValueError(f"Schema: field {name!r} has side 'action', but roles.action does not name it.")
        for name, field in self.fields.items():
            if isinstance(field, Cross):
                self._check_cross(name, field)

    def _check_cross(self, name: str, cross: Cross) -> None:
        for part in cross.of:
            if (why := self.why_no_cross(part)) is not None:
                raise ValueError(f"Schema: cross {name!r} must be of {why}")

    def why_no_cross(self, name: str) -> str | None:
        """The reason why a field cannot be part of a cross, as the end of an error sentence; None if it can.

        Args:
            name: of the field.
        """
        field = self.fields.get(name)
        if field is None:
            known = [one for one, of in self.fields.items() if not isinstance(of, Cross)]
            return f"fields of its schema, got {name!r}; {nearest(name, known)}"
        if isinstance(field, Cross) or not isinstance(field, (Id, Number)) or field.side == "action":
            return f"fields of its schema that are an Id or a Number of an impression, got {name!r}, {field.kind}."
        if isinstance(field, Number) and field.scale != "quantile":
            return f"numbers of scale 'quantile', which says where to cut them, got {name!r} of scale {field.scale!r}."
        return None

    def side(self, side: str) -> dict[str, Field]:
        """The fields of a side, by name."""
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
        """The names of the labels: of "like = rating >= 4", `like`."""
        return [Label.parse(text).name for text in self.roles.labels]

    @property
    def is_open(self) -> bool:
        """Whether a field is still to be fitted on data."""
        return any(field.is_open for field in self.fields.values())

    def replace(self, fields: Mapping[str, Field]) -> Schema:
        """This schema with other fields.

        Args:
            fields: in place of those of the same names, or besides.
        """
        return Schema(self.roles, {**self.fields, **fields})._because(self.left_out)

    def expandable(self) -> Schema:
        """This schema for newer data, whose new values get codes behind the known vocabulary.

        `Impressions.read(…, schema=schema.expandable())` then knows the old and the new values, and
        `rank.expand_vocabularies` gives a ranker rows for the new values. Scales of numbers stay as they are.
        """
        coded = {name: field for name, field in self.fields.items() if getattr(field, "vocab", None) is not None}
        return self.replace({name: dataclasses.replace(field, grows=True) for name, field in coded.items()})  # type: ignore[call-arg]

    def _because(self, left_out: Mapping[str, str]) -> Schema:
        self.left_out = dict(left_out)
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and (self.roles, self.fields) == (other.roles, other.fields)

    __hash__ = None  # type: ignore[assignment]  # as dicts

    def __repr__(self) -> str:
        return f"Schema({self.roles!r}, {', '.join(self.fields)})"

    # ---------------------------------------------------------------------------------------------------------- JSON

    def to_json(self) -> str:
        """Roles and fields as JSON, to be read and edited."""
        roles = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self.roles).items()}
        fields = {name: {"kind": field.kind, **field.options()} for name, field in self.fields.items()}
        rows = ",\n    ".join(f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in fields.items())
        return f'{{\n  "roles": {json.dumps(roles, ensure_ascii=False)},\n  "fields": {{\n    {rows}\n  }}\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """The schema of a text that `to_json` wrote, or that a person did.

        Args:
            text: {"roles": {"item": "item_id", …}, "fields": {"item_id": {"kind": "Id", "side": "item"}, …}}.

        Raises: ValueError if the text is no JSON, or a role, a kind or an option is unknown.
        """
        return cls._parse(parse_json(text, "Schema.from_json: the text"), "Schema.from_json: the text")

    @classmethod
    def _parse(cls, told: Any, name: str) -> Schema:
        if not all(isinstance(told.get(k), dict) for k in ("roles", "fields")):
            raise ValueError(f"{name} must hold an object with the objects 'roles' and 'fields'.")
        try:
            return cls(_roles(told["roles"]), {key: _field(key, options) for key, options in told["fields"].items()})
        except (TypeError, OverflowError, AttributeError) as error:  # a value of another type than its option's
            raise ValueError(f"{name} has an option of another type than it must be: {error}.") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the schema as JSON.

        Args:
            path: of the file, such as run/schema.json.
        """
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schema:
        """The schema of a JSON file.

        Args:
            path: of the file.

        Raises: ValueError as `from_json`, and if the file is missing or cannot be read.
        """
        return cls._parse(read_json(path), str(path))


def _roles(told: Mapping[str, Any]) -> Roles:
    known = [field.name for field in dataclasses.fields(Roles)]
    for name in told:
        if name not in known:
            raise ValueError(f"Schema: there is no role {name!r}; {nearest(name, known)}")
    return Roles(**told)


def _field(name: str, told: Any) -> Field:
    told = {"kind": told} if isinstance(told, str) else told
    kind = told.get("kind") if isinstance(told, dict) else told
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"Schema: field {name!r} must have a kind; got {kind!r}, {nearest(str(kind), KINDS)}")
    options = {key: value for key, value in told.items() if key != "kind"}
    known = [field.name for field in dataclasses.fields(KINDS[kind]) if field.init]
    for option in options:
        if option not in known:
            raise ValueError(f"Schema: field {name!r}: {kind} has no option {option!r}; {nearest(option, known)}")
    try:
        return KINDS[kind](**options)
    except ValueError as error:
        raise ValueError(f"Schema: field {name!r}: {error}") from None


def _type(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
