"""Schemas as JSON: one codec for the columns of `retrieve.Schema` and the fields of `rank.Schema`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, TypeVar

from tigon.data.arrow import nearest


class Field(Protocol):
    """A column's kind, with the arguments that rebuild it."""

    kind: ClassVar[str]

    def options(self) -> dict[str, Any]: ...


F = TypeVar("F", bound=Field)


def dump_fields(fields: Mapping[str, Field]) -> dict[str, dict[str, Any]]:
    """JSON values from which `parse_field` rebuilds each field."""
    return {name: {"kind": field.kind, **field.options()} for name, field in fields.items()}


def parse_field(name: str, told: Any, kinds: Mapping[str, type[F]]) -> F:
    """A field from its JSON value: {"kind": "Number", "low": 0, "high": 9}, or the kind alone.

    Args:
        name: prefix for error messages, which names the field.
        told: the JSON value. kinds: classes by kind.
    Raises: ValueError for an unknown kind or option, and options that do not fit.
    """
    options = dict(told) if isinstance(told, dict) else {"kind": told}
    kind = options.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"{name} must have a kind among {', '.join(kinds)}, got {kind!r}; {nearest(str(kind), kinds)}")
    known = inspect.signature(kinds[kind]).parameters
    for option in options:
        if option not in known:
            raise ValueError(f"{name}: {kind} has no option {option!r}; {nearest(option, known)}")
    try:
        return kinds[kind](**options)
    except TypeError as error:
        raise ValueError(f"{name}: {str(error).split('() ')[-1]}.") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
