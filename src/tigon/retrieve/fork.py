"""What a forked child does with objects whose locks other threads held: those threads are not in the child."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    def after_fork(self) -> None:
        """In a child, before anything else: make locks anew, and forget what other threads had begun."""


_objects: weakref.WeakSet[Forked] = weakref.WeakSet()


def register(object: Forked) -> None:
    """Call `object.after_fork()` in children that are forked while the object is there."""
    _objects.add(object)


def _after_fork() -> None:
    for each in [*_objects]:
        each.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
