"""Integer arguments from Python, numpy or torch."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tigon.data.values import describe, shorten
from tigon.kernels import check_tensors


def as_int(value: Any) -> int | None:
    """Convert any integer within 64 bits to Python's int; None for everything else, including True and False."""
    if isinstance(value, (bool, np.bool_)) or getattr(value, "ndim", 0) != 0:
        return None
    try:
        number = operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return number if -(2**63) <= number < 2**63 else None


def read_int(name: str, argument: str, value: Any, least: int = 1) -> int:
    """Parse an integer argument.

    Raises: ValueError if the value is not an integer within 64 bits, or is below the least.
    """
    number = as_int(value)
    if number is None or number < least:
        wanted = {1: "a positive integer", 0: "an integer, 0 or more"}.get(least, f"an integer from {least:,}")
        raise ValueError(f"{name}: {argument} must be {wanted}, got {shorten(value)}.")
    return number


def as_number(value: Any) -> float | None:
    """Convert any number to Python's float; None for everything else, including True, False and NaN."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else math.nan
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    return None if math.isnan(number) else number


def as_list(values: Any) -> list[Any] | None:
    """Convert a list, an array or another collection to a list; None for text, mappings and scalars."""
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__"):
        return None
    try:
        return list(values)
    except TypeError:  # arrays and tensors without dimensions
        return None


def require_tensors(name: str, **arguments: Any) -> None:
    """Raise a ValueError for an argument that is not a tensor, including None."""
    check_tensors(name, **arguments)
    missing = next((argument for argument, value in arguments.items() if value is None), None)
    if missing is not None:
        raise ValueError(f"{name}: {missing} must be a tensor, got None.")


def as_tensor(name: str, argument: str, values: Any) -> Tensor:
    """A detached tensor, from a tensor or an array of numbers.

    Raises: ValueError for anything else.
    """
    if not isinstance(values, Tensor):
        try:
            values = torch.as_tensor(np.require(values, requirements="W"))  # torch warns about read-only arrays
        except (TypeError, ValueError):
            got = type(values).__name__
            raise ValueError(f"{name}: {argument} must be a tensor or an array of numbers, got {got}.") from None
    tensor: Tensor = values.detach()
    return tensor


def read_path(name: str, argument: str, path: Any) -> Path:
    """Parse a path argument.

    Raises: ValueError for a value that is not a path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"{name}: {argument} must be a path, got {describe(path)}.")
    return Path(path)


def read_ints(name: str, argument: str, values: Any) -> list[int]:
    """Parse a positive integer or a list of positive integers.

    Raises: ValueError for anything else.
    """
    listed = as_list(values)
    read = [as_int(value) for value in ([values] if listed is None else listed)]
    numbers = [number for number in read if number is not None and number >= 1]
    if len(numbers) < len(read):
        raise ValueError(f"{name}: {argument} must be a positive integer or a list of them, got {shorten(values)}.")
    return numbers
