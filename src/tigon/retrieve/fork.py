"""Objects with locks in forked children, which lack the parent's other threads."""

from __future__ import annotations

import os
import weakref


class Forkable:
    """An object with locks that calls `survive_forks` once."""

    def survive_forks(self) -> None:
        _objects.add(self)

    def before_fork(self) -> None:
        """Called in the thread that forks."""

    def after_fork(self, is_child: bool) -> None:
        """Called in the forking thread, in both processes. In the child: recreate locks, and forget other threads."""


_objects: weakref.WeakSet[Forkable] = weakref.WeakSet()


def _before() -> None:
    for each in [*_objects]:
        each.before_fork()


def _after(is_child: bool) -> None:
    for each in [*_objects]:
        each.after_fork(is_child)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before, after_in_parent=lambda: _after(is_child=False), after_in_child=lambda: _after(is_child=True)
    )
