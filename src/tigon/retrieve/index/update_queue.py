"""Merge concurrent upserts: one journal record, and one turn between searches.

A thread that waits for the update lock has left its call here. The thread that gets the lock makes all pending calls in
order of arrival; the other threads find their calls done. If the merged call does not fit, each call is made
separately, so that a refused call refuses no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tigon.retrieve.fork import Forkable

# The most items in a merged call.
MOST = 4096

Write = Callable[[Any, Any, Any], None]


class PendingUpdate:
    """One thread's upsert: its arguments, and afterwards its error."""

    def __init__(self, ids: Any, embeddings: Any, table: Any) -> None:
        self.arguments = ids, embeddings, table
        self.is_made = False
        self.error: Exception | None = None

    def __len__(self) -> int:
        try:
            return len(self.arguments[0])
        except TypeError:  # refused when its turn comes
            return 0


class UpdateQueue(Forkable):
    """Pending updates to one index, in order of arrival."""

    def __init__(self) -> None:
        self.updates: deque[PendingUpdate] = deque()
        self.survive_forks()

    def after_fork(self, is_child: bool) -> None:
        if is_child:
            self.updates.clear()

    def __reduce__(self) -> tuple[type[UpdateQueue], tuple[()]]:
        return UpdateQueue, ()  # a copy has none

    def upsert(self, lock: AbstractContextManager[Any], write: Write, ids: Any, embeddings: Any, table: Any) -> None:
        """Write items once the caller has the lock, unless another thread has already written them.

        Args:
            write: writes the items from one or several calls, under the lock.
        """
        if _is_on_gpu(ids, embeddings, table):  # only the caller's own stream knows when the values are ready
            with lock:
                write(ids, embeddings, table)
            return
        update = PendingUpdate(ids, embeddings, table)
        self.updates.append(update)
        try:
            with lock:
                while not update.is_made:
                    self._make([other for other in self._take() if not other.is_made], write)
        finally:
            update.is_made = True  # also after an interrupt: no thread waits for this call any more
        if update.error is not None:
            raise update.error

    def _take(self) -> list[PendingUpdate]:
        """The first update, and the following updates that can be merged."""
        taken = [self.updates.popleft()]
        items = len(taken[0])
        while self.updates and items + len(self.updates[0]) <= MOST:
            taken.append(self.updates.popleft())
            items += len(taken[-1])
        return taken

    def _make(self, updates: list[PendingUpdate], write: Write) -> None:
        try:
            arguments = _merge(updates) if len(updates) > 1 else None
            if arguments is not None:
                try:
                    write(*arguments)
                except Exception:  # each call is made separately below, which shows whose error it is
                    pass
                else:
                    for update in updates:
                        update.is_made = True
            for update in updates:
                if not update.is_made:
                    try:
                        write(*update.arguments)
                    except Exception as error:
                        update.error = error
                    update.is_made = True
        finally:
            self.updates.extendleft(update for update in reversed(updates) if not update.is_made)


def _is_on_gpu(*arguments: Any) -> bool:
    table = arguments[-1]
    columns = table.values() if isinstance(table, dict) else ()
    return any(isinstance(given, Tensor) and given.device.type != "cpu" for given in (*arguments, *columns))


def _merge(updates: list[PendingUpdate]) -> tuple[Any, Any, Any] | None:
    """Concatenate all updates' arguments; None where the result could differ from separate calls."""
    all_ids, embeddings, tables = zip(*(update.arguments for update in updates), strict=True)
    counts = [len(update) for update in updates]
    ids = _concatenate(all_ids)
    if ids is None or not all(isinstance(x, (Tensor, np.ndarray)) and x.ndim == 2 for x in embeddings):
        return None
    if [len(x) for x in embeddings] != counts or len({(type(x), x.dtype, x.shape[1]) for x in embeddings}) > 1:
        return None
    vectors = np.concatenate(embeddings) if isinstance(embeddings[0], np.ndarray) else torch.cat(embeddings)
    if all(table is None for table in tables):
        return ids, vectors, None
    if any(type(table) is not dict or table.keys() != tables[0].keys() for table in tables):
        return None
    columns: dict[Any, Any] = {}
    for name in tables[0]:
        column = [table[name] for table in tables]
        if [len(part) if isinstance(part, (list, np.ndarray)) else -1 for part in column] != counts:
            return None
        columns[name] = _concatenate(column)
        if columns[name] is None:
            return None
    return ids, vectors, columns


def _concatenate(columns: Any) -> Any:
    """Concatenate lists or arrays; None unless all values have the same type: a column with integers and floats is
    parsed differently from an integer column.
    """
    if all(type(column) is list for column in columns):
        values = [value for column in columns for value in column]
        return values if len({type(value) for value in values} - {type(None)}) <= 1 else None
    are_arrays = all(type(column) is np.ndarray and column.ndim == 1 for column in columns)
    if not are_arrays or len({column.dtype for column in columns}) > 1 or columns[0].dtype == object:
        return None
    return np.concatenate(columns)
