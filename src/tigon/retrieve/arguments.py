"""Integers among arguments, of Python, numpy or torch."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from tigon.tables.values import shorten


def as_int(value: Any) -> int | None:
    """An integer of any type as Python's; None for everything else, among it True and False."""
    if isinstance(value, (bool, np.bool_)) or getattr(value, "ndim", 0):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def read_int(name: str, argument: str, value: Any, least: int = 1) -> int:
    """An integer argument.

    Raises: ValueError if the value is no integer, or below the least or from 2**63 on.
    """
    number = as_int(value)
    if number is None or not least <= number < 2**63:
        wanted = {1: "a positive integer", 0: "an integer, 0 or more"}.get(least, f"an integer from {least:,}")
        raise ValueError(f"{name}: {argument} must be {wanted}, got {shorten(value)}.")
    return number


def read_ints(name: str, argument: str, values: Any) -> list[int]:
    """An argument that is a positive integer or a list of such.

    Raises: ValueError for anything else.
    """
    is_list = hasattr(values, "__iter__") and not isinstance(values, (str, bytes)) and as_int(values) is None
    read = [as_int(value) for value in values] if is_list else [as_int(values)]
    found = [number for number in read if number is not None and 1 <= number < 2**63]
    if len(found) < len(read):
        raise ValueError(f"{name}: {argument} must be a positive integer or a list of them, got {shorten(values)}.")
    return found
