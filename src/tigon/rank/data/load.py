"""Load a user's tables, unify role names, and infer the schema."""

from __future__ import annotations

from typing import Any

from tigon.rank.data.infer import fit_schema, infer_fields
from tigon.rank.data.labels import Label
from tigon.rank.data.schema import Schema
from tigon.rank.data.tables import NAME, Tables, find_roles, find_side_tables, gather_tables, load_columns, load_history


def load_tables(
    data: Any, history: Any, items: Any, users: Any, schema: Schema | None, roles: dict[str, Any],
    labelled: bool = True,
) -> tuple[Tables, Schema]:  # fmt: skip
    """Tables and schema, inferred if not given. Open options are not fitted yet.

    Raises: ValueError for unreadable tables, and for roles together with a schema.
    """
    if schema is not None and roles:
        raise ValueError(f"{NAME}: schema= has the roles already, got {', '.join(roles)} besides.")
    rows = load_columns(data)
    history = load_history(history)
    near = find_side_tables(data)
    items, users = near.get("items") if items is None else items, near.get("users") if users is None else users
    items, users = (None if side is None else load_columns(side) for side in (items, users))
    found = find_roles(rows, roles, history) if schema is None else schema.roles
    if schema is not None and not labelled:  # ignore an all-missing label column
        columns = {Label.parse(text).column for text in found.labels}
        rows = {name: column for name, column in rows.items()
                if name not in columns or column.null_count < len(column)}  # fmt: skip
    tables = gather_tables(rows, history, items, users, found)
    return tables, infer_fields(tables, found) if schema is None else schema


def infer_schema(data: Any, *, history: Any = None, items: Any = None, users: Any = None, **roles: Any) -> Schema:
    """Infer a schema from the tables' column names, types and values, and fit it on the tables.

    Args:
        data, history, items, users, roles: as in `Impressions.read`.
    Raises: ValueError as `Impressions.read`.
    """
    tables, schema = load_tables(data, history, items, users, None, roles)
    return fit_schema(schema, tables)
