"""Upserts that several threads ask for at once, made as one: one record of the journal, one turn between searches.

A thread that waits for its turn has left its call here. The thread whose turn it is makes all calls that wait, in the
order in which they came; the others find theirs made. If the calls together do not fit, each is made by itself, so that
a call that is refused refuses no other.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tigon.retrieve import writing
from tigon.retrieve.fork import Forkable

if TYPE_CHECKING:
    from tigon.retrieve.index import Index

# Items of calls that are made together.
MOST = 4096


class Call:
    """An upsert of one thread: its arguments, and once it is made what it raises."""

    def __init__(self, ids: Any, embeddings: Any, table: Any) -> None:
        self.arguments = ids, embeddings, table
        self.made = False
        self.error: Exception | None = None


class Waiting(Forkable):
    """The calls that wait for their turn, in their order."""

    def __init__(self) -> None:
        self.calls: deque[Call] = deque()
        self.survive_forks()

    def after_fork(self, is_child: bool) -> None:
        if is_child:
            self.calls.clear()

    def __deepcopy__(self, memo: Any) -> Waiting:
        return Waiting()

    def __reduce__(self) -> tuple[type[Waiting], tuple[()]]:
        return Waiting, ()

    def take(self) -> list[Call]:
        """The first call, and those behind it that can be made with it."""
        taken = [self.calls.popleft()]
        items = _items(taken[0])
        while self.calls and items + _items(self.calls[0]) <= MOST:
            taken.append(self.calls.popleft())
            items += _items(taken[-1])
        return taken


def upsert(index: Index, ids: Any, embeddings: Any, table: Any) -> None:
    """Write items when it is the caller's turn, or find that another thread has written them."""
    if _on_a_gpu(ids, embeddings, table):  # where only the caller's own stream knows when they are there
        with index.turns.writing:
            _write(index, ids, embeddings, table)
        return
    call = Call(ids, embeddings, table)
    index.waiting.calls.append(call)
    try:
        with index.turns.writing:
            while not call.made:
                _make(index, [other for other in index.waiting.take() if not other.made])
    finally:
        call.made = True  # also if it was interrupted: nobody asks for it any more
    if call.error is not None:
        raise call.error


def _on_a_gpu(*arguments: Any) -> bool:
    table = arguments[-1]
    columns = table.values() if isinstance(table, dict) else ()
    return any(isinstance(given, Tensor) and given.device.type != "cpu" for given in (*arguments, *columns))


def _make(index: Index, calls: list[Call]) -> None:
    try:
        arguments = _together(index, calls) if len(calls) > 1 else None
        if arguments is not None and _is_written(index, arguments):
            for call in calls:
                call.made = True
        for call in calls:
            if not call.made:
                try:
                    _write(index, *call.arguments)
                except Exception as error:
                    call.error = error
                call.made = True
    finally:
        for call in reversed(calls):  # those of others, if this thread was interrupted
            if not call.made:
                index.waiting.calls.appendleft(call)


def _is_written(index: Index, arguments: tuple[Any, Any, Any]) -> bool:
    try:
        _write(index, *arguments)
    except Exception:  # whose it is shows when each is made by itself
        return False
    return True


def _write(index: Index, ids: Any, embeddings: Any, table: Any) -> None:
    items = writing.prepared(index, ids, embeddings, table)
    writing.reserve(index, items)
    if index.journal is not None:
        index.journal.upsert(items)
    writing.write(index, items)


# ----------------------------------------------------------------------------------------------------------- together


def _items(call: Call) -> int:
    try:
        return len(call.arguments[0])
    except TypeError:  # which is refused in its turn
        return 0


def _together(index: Index, calls: list[Call]) -> tuple[Any, Any, Any] | None:
    """The arguments of all calls one after another; None where that could mean something else than one by one."""
    ids, embeddings, tables = zip(*(call.arguments for call in calls), strict=True)
    counts = [_items(call) for call in calls]
    joined = _joined(ids)
    if joined is None or index.fixed:
        return None
    wanted = [(n, index.dim) for n in counts]
    if [x.shape if isinstance(x, (Tensor, np.ndarray)) else None for x in embeddings] != wanted:
        return None
    if len({(type(x), x.dtype) for x in embeddings}) > 1:
        return None
    vectors = embeddings[0]
    if isinstance(vectors, np.ndarray):
        vectors = np.concatenate(embeddings)
    else:
        vectors = torch.cat(embeddings)
    if all(table is None for table in tables):
        return joined, vectors, None
    if any(type(table) is not dict or table.keys() != tables[0].keys() for table in tables):
        return None
    columns: dict[Any, Any] = {}
    for name in tables[0]:
        if any(_size(table[name]) != n for table, n in zip(tables, counts, strict=True)):
            return None
        columns[name] = _joined([table[name] for table in tables])
        if columns[name] is None:
            return None
    return joined, vectors, columns


def _size(column: Any) -> int:
    return len(column) if isinstance(column, (list, np.ndarray)) else -1


def _joined(columns: Any) -> Any:
    """Lists or arrays one after another, if the values of all are of one type: a column of integers and floats is read
    otherwise than one of integers. None if they are not."""
    if all(type(column) is list for column in columns):
        joined = [value for column in columns for value in column]
        return joined if len({type(value) for value in joined} - {type(None)}) <= 1 else None
    arrays = all(type(column) is np.ndarray and column.ndim == 1 for column in columns)
    if not arrays or len({column.dtype for column in columns}) > 1 or columns[0].dtype == object:
        return None
    return np.concatenate(columns)
