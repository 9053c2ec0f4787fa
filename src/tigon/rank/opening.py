"""From what a user gives to tables with one name for each role, and their schema."""

from __future__ import annotations

from typing import Any

from tigon.rank.infer import infer
from tigon.rank.labels import Label
from tigon.rank.schema import Schema
from tigon.rank.tables import NAME, Tables, gather, load, own_or_loaded, roles_of, sides


def opened(
    data: Any, history: Any, items: Any, users: Any, schema: Schema | None, roles: dict[str, Any],
    labelled: bool = True,
) -> tuple[Tables, Schema]:  # fmt: skip
    """Tables and schema, which is inferred where none is given. What it leaves open is not fitted yet.

    Raises: ValueError for what cannot be read, and for roles beside a schema.
    """
    if schema is not None and roles:
        raise ValueError(f"{NAME}: schema= has the roles already, got {', '.join(roles)} besides.")
    rows = load(data)
    history = own_or_loaded(history)
    near = sides(data)
    items, users = near.get("items") if items is None else items, near.get("users") if users is None else users
    items, users = (None if side is None else load(side) for side in (items, users))
    found = roles_of(rows, roles, history) if schema is None else schema.roles
    if schema is not None and not labelled:  # a column of labels that holds none is as good as absent
        columns = {Label.of(text).column for text in found.labels}
        rows = {name: column for name, column in rows.items()
                if name not in columns or column.null_count < len(column)}  # fmt: skip
    tables = gather(rows, history, items, users, found)
    return tables, infer(tables, found) if schema is None else schema
