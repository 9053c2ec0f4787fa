"""Rows of an index, and the turns that searches and updates take.

An update writes rows that no search looks at: free ones, whose live bit is not set. One small write of live bits
between two searches then shows the new rows and hides those that they replace. A hidden row is free for later updates.

On a GPU updates have a stream of their own. The write of live bits waits, by events, for the searches before it, and
the searches after it wait for that write; the host waits for nothing. On the CPU a lock does the same.

The host's side of an update is Python, as that of a search is, and one of them runs at a time. So an update goes step
by step, and between two steps a search goes first: see `Turns.give_way`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tigon.data.values import Ints
from tigon.retrieve.fork import Forkable

# What capacity is short of the rows there are, so that items can be replaced in a full index: in pieces of as many.
SPARE = 4096
# Rows above which their numbers of bits are sorted, so that each is written once.
MANY = 4096
# Seconds. An update gives way after steps of STEP together, if there was a search in the last LATELY; it lets the
# interpreter go for PAUSE, in which a thread that waits for it wakes up, and waits for a search's host for PATIENCE.
STEP, LATELY, PAUSE, PATIENCE = 80e-6, 0.25, 1e-6, 5e-4
# Seconds that a fork waits for the update that another thread makes.
FORK = 1.0


def spare_rows(capacity: int) -> int:
    return min(capacity, max(SPARE, capacity // 256))


class Rows:
    """Which rows hold items, and which are free. The host's copy of the live bits."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.end = 0  # no row from here on was ever used
        self.count = 0
        self.live = np.zeros((total + 31) // 32, dtype=np.uint32)
        self.free = np.zeros(0, dtype=np.int64)

    @classmethod
    def of(cls, live: npt.NDArray[np.int32], total: int) -> Rows:
        """From live bits as the buffer has them."""
        rows = cls(total)
        rows.live = live.astype(np.int64).astype(np.uint32)
        there = rows.there()
        rows.count = int(there.sum())
        rows.end = int(there.nonzero()[0][-1]) + 1 if rows.count else 0
        rows.free = np.flatnonzero(~there[: rows.end])
        return rows

    def there(self) -> npt.NDArray[np.bool_]:
        """Whether a row holds an item."""
        bits = np.unpackbits(self.live.view(np.uint8), bitorder="little")
        return bits[: self.total].astype(bool)

    def extend(self, total: int) -> None:
        """Have more rows."""
        more = np.zeros((total + 31) // 32 - len(self.live), dtype=np.uint32)
        self.live = np.concatenate([self.live, more])
        self.total = total

    def available(self) -> int:
        return len(self.free) + self.total - self.end

    def allocate(self, count: int) -> Ints:
        """Rows to write to, ascending. They stay free until `show` is called for them."""
        again = self.free[:count]
        rows = np.concatenate([again, np.arange(self.end, self.end + count - len(again))])
        rows.sort()
        return rows

    def mark(self, shown: Ints, hidden: Ints) -> tuple[Ints, npt.NDArray[np.int32]]:
        """Set the live bits of rows, and clear those of others: which numbers of the bits become what."""
        one = np.uint32(1)
        np.bitwise_or.at(self.live, shown >> 5, one << (shown & 31).astype(np.uint32))
        np.bitwise_and.at(self.live, hidden >> 5, ~(one << (hidden & 31).astype(np.uint32)))
        places = words_of(np.concatenate([shown, hidden]))
        return places, self.live[places].view(np.int32)

    def show(self, shown: Ints, hidden: Ints) -> None:
        """After `mark`: searches that begin now see the rows, and see the others no more."""
        again = int((shown < self.end).sum())  # the first of the free ones, as `allocate` takes them
        self.free = np.concatenate([self.free[again:], hidden])
        self.end = max(self.end, int(shown.max()) + 1 if len(shown) else 0)
        self.count += len(shown) - len(hidden)


def words_of(rows: Ints) -> Ints:
    """The numbers of bits in which rows have theirs. Of rows that are few and not ascending some stand there twice."""
    if len(rows) > MANY:
        return np.unique(rows >> 5)
    places: Ints = rows >> 5
    if len(places) > 1:
        places = places[np.concatenate([[True], places[1:] != places[:-1]])]
    return places


class _Interrupted:
    """The lock of updates in a child that was forked while another thread held it."""

    def acquire(self, timeout: float = -1) -> bool:
        raise RuntimeError(
            "Index: this process was forked while another thread wrote to the index, whose copy here is only searched: "
            "fork between updates, or load the index in this process."
        )

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: Any) -> None:
        pass


class Turns(Forkable):
    """Searches and updates of one index, one after the other."""

    def __init__(self) -> None:
        self.writing: Any = threading.RLock()  # one update at a time
        self._forking: set[int] = set()  # threads that fork, which hold `writing`
        self._gave_way = 0.0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._searches: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        self._switched: torch.cuda.Event | None = None
        self._reset()
        self.survive_forks()

    def _reset(self) -> None:
        self.lock = threading.Lock()
        self.compiling = threading.Lock()  # one filter at a time
        self.searched = -LATELY  # when the last search was
        self._asking: dict[object, None] = {}  # searches that are not launched as a whole yet
        self._go = threading.Lock()  # which an update waits for while `_waits`, and a search that is launched releases
        self._waits = False

    def before_fork(self) -> None:
        with suppress(RuntimeError):  # a child that was interrupted forks
            if self.writing.acquire(timeout=FORK):
                self._forking.add(threading.get_ident())

    def after_fork(self, is_child: bool) -> None:
        if threading.get_ident() in self._forking:
            self._forking.discard(threading.get_ident())
            self.writing.release()
        elif is_child:  # another thread was writing, and what it wrote is not whole here
            self.writing = _Interrupted()
        if is_child:
            self._forking.clear()
            self._reset()

    def __deepcopy__(self, memo: Any) -> Turns:
        return Turns()

    def __reduce__(self) -> tuple[type[Turns], tuple[()]]:
        return Turns, ()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A search, from its first step on the host to its last: updates give way to it. It waits for none itself."""
        search = object()
        self._asking[search] = None
        self.searched = time.monotonic()
        try:
            yield
        finally:
            self._asking.pop(search, None)
            if self._waits:
                self._waits = False
                with suppress(RuntimeError):  # another search has released it just now
                    self._go.release()

    def give_way(self) -> None:
        """Between two steps of an update, which holds `writing` and no other lock: let searches go first.

        Python hands its lock over when it is released, if the thread that waits has woken up by then; an update that
        runs from one short release to the next keeps it for milliseconds, whoever waits.
        """
        now = time.monotonic()
        if now - self._gave_way < STEP or now - self.searched > LATELY:
            return
        time.sleep(PAUSE)
        if self._asking:
            self._go.acquire(blocking=False)
            self._waits = True
            if self._asking:  # still: it will see that an update waits
                self._go.acquire(timeout=PATIENCE)  # not for ever: searches may come without end
            self._waits = False
        self._gave_way = time.monotonic()

    @contextmanager
    def search(self, device: torch.device) -> Iterator[None]:
        """A search: on the stream that the caller has chosen."""
        with self.lock:
            ordered = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
            if not ordered:
                yield
                return
            stream = torch.cuda.current_stream(device)
            if self._switched is not None:
                stream.wait_event(self._switched)
            yield
            self._searches.setdefault(stream, torch.cuda.Event()).record(stream)

    @contextmanager
    def write(self, device: torch.device, *, given: bool = True) -> Iterator[None]:
        """Writing rows that no search looks at.

        given: whether what is written comes from the caller, whose stream may still compute it, and is waited for.
        """
        if device.type != "cuda":
            yield
            return
        stream = self._stream(device)
        if given:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield

    @contextmanager
    def switch(self, device: torch.device) -> Iterator[None]:
        """Writing what searches look at: after those that have begun, before those that will."""
        with self.lock:
            if device.type != "cuda":
                yield
                return
            stream = self._stream(device)
            for event in self._searches.values():
                stream.wait_event(event)
            self._searches.clear()
            with torch.cuda.stream(stream):
                yield
                self._switched = torch.cuda.Event()
                self._switched.record(stream)

    def settle(self, device: torch.device) -> None:
        """Let the caller's stream see all updates, for what reads the buffers themselves."""
        if device.type == "cuda" and self._switched is not None:
            torch.cuda.current_stream(device).wait_event(self._switched)
