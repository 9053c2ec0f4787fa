"""Sentences for options that do not fit, as the families' option objects raise them when they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_choice(name: str, argument: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: {argument} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def check_positive(name: str, **values: float | None) -> None:
    """Each a positive number, or None."""
    for argument, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name}: {argument} must be positive, got {value}.")


def check_share(name: str, **values: float | None) -> None:
    """Each from 0 to 1, or None."""
    for argument, value in values.items():
        if value is not None and not 0.0 <= value <= 1.0:
            raise ValueError(f"{name}: {argument} must lie in [0, 1], got {value}.")


def check_smoothing(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name}: label_smoothing must lie in [0, 1), got {value}.")
