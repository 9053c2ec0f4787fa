"""The terminal that the commands print to."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def screen(**options: Any) -> Console:
    """A console that prints what it is given: brackets and colons in the user's names are not markup."""
    return Console(markup=False, emoji=False, highlight=False, **options)
