"""Checks and error messages for options, raised when a family's option object is made."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from tigon.kernels import unknown_keyword
from tigon.losses.head.chunk_options import ChunkOptions
from tigon.losses.head.head import Head
from tigon.ops.cross_entropy import CrossEntropy


def check_choice(name: str, argument: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: {argument} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def check_positive(name: str, **values: float | None) -> None:
    """Check that each value is positive or None."""
    for argument, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name}: {argument} must be positive, got {value}.")


def check_share(name: str, **values: float | None) -> None:
    """Check that each value is in [0, 1] or None."""
    for argument, value in values.items():
        if value is not None and not 0.0 <= value <= 1.0:
            raise ValueError(f"{name}: {argument} must lie in [0, 1], got {value}.")


def check_smoothing(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name}: label_smoothing must lie in [0, 1), got {value}.")


def make_keyword_error(name: str, unknown: Mapping[str, Any], config: type, **values: type) -> TypeError:
    """The error for unknown keywords, naming the object that has a field by that name.

    Args:
        name: the loss. unknown: the keywords that came. config: the option type.
        values: types for further arguments that hold several values, by argument name.
    """
    homes = {}
    # If two objects have a field by the same name, the last wins: softcap is the head's.
    for argument, home in {"chunks": ChunkOptions, **values, "config": config, "head": Head}.items():
        module = "tigon" if home in (Head, CrossEntropy) else "tigon.losses"
        for field in inspect.signature(home).parameters:
            homes[field] = f"{argument}={module}.{home.__name__}({field}=…)"
    return unknown_keyword(name, unknown, homes)
