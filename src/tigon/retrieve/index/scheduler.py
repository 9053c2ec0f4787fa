"""Schedule searches and updates on one index.

An update writes rows that no search reads: free rows, whose live bit is not set. One small write to the live bits
between two searches then shows the new rows and hides the replaced rows. A hidden row is free for later updates.

On a GPU updates run on their own stream. The live-bit write waits, by events, for earlier searches, and later searches
wait for that write; the host never waits. On the CPU a lock does the same.

The host side of updates and searches is Python, and the interpreter runs one thread at a time. So an update proceeds in
steps, and searches go first between two steps: see `UpdateScheduler.yield_to_searches`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from tigon.retrieve.fork import Forkable

# Seconds. An update yields after STEP seconds of work, if there was a search in the last RECENT seconds: the update
# releases the interpreter for PAUSE, in which a waiting thread wakes up, and waits up to PATIENCE for a search's host
# side.
STEP, RECENT, PAUSE, PATIENCE = 80e-6, 0.25, 1e-6, 5e-4
# Seconds that a fork waits for another thread's update.
FORK = 1.0


class _InterruptedLock:
    """The update lock in a child that was forked while another thread held the lock."""

    def acquire(self, timeout: float = -1) -> bool:
        raise RuntimeError(
            "Index: this process was forked while another thread wrote to the index, and this process's copy can only "
            "be searched: fork between updates, or load the index in this process."
        )

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: Any) -> None:
        pass


class UpdateScheduler(Forkable):
    """A readers–writer lock over two streams: updates exclude each other, and never delay a search for long.

    Attributes:
        update_lock: held by the running update. launch_lock: held while a search is launched, and while an update
            publishes rows.
    """

    def __init__(self) -> None:
        self.update_lock: Any = threading.RLock()  # one update at a time
        self._forking: set[int] = set()  # threads inside fork, which hold `update_lock`
        self._last_yield = 0.0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._searches: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        self._published: torch.cuda.Event | None = None
        self._reset()
        self.survive_forks()

    def _reset(self) -> None:
        self.launch_lock = threading.Lock()
        self.last_search = -RECENT  # time of the last search
        self._running: dict[object, None] = {}  # searches that are not fully launched yet
        self._go = threading.Lock()  # an update waits for this lock while `_waits`; a launched search releases the lock
        self._waits = False

    def before_fork(self) -> None:
        with suppress(RuntimeError):  # a child with an interrupted lock forks
            if self.update_lock.acquire(timeout=FORK):
                self._forking.add(threading.get_ident())

    def after_fork(self, is_child: bool) -> None:
        if threading.get_ident() in self._forking:
            self._forking.discard(threading.get_ident())
            self.update_lock.release()
        elif is_child:  # another thread was writing: the child has an incomplete update
            self.update_lock = _InterruptedLock()
        if is_child:
            self._forking.clear()
            self._reset()

    def __reduce__(self) -> tuple[type[UpdateScheduler], tuple[()]]:
        return UpdateScheduler, ()  # a copy has its own locks

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    @contextmanager
    def read_lock(self) -> Iterator[None]:
        """A search's host side from first to last step: updates yield to the search, which never waits here."""
        search = object()
        self._running[search] = None
        self.last_search = time.monotonic()
        try:
            yield
        finally:
            self._running.pop(search, None)
            if self._waits:
                self._waits = False
                with suppress(RuntimeError):  # another search has released the lock at this moment
                    self._go.release()

    def yield_to_searches(self) -> None:
        """Let searches go first between two steps of an update that holds `update_lock` and no other lock.

        Python hands the interpreter over on release, if the waiting thread has woken up by then. With short releases
        only, an update would keep the interpreter for milliseconds.
        """
        now = time.monotonic()
        if now - self._last_yield < STEP or now - self.last_search > RECENT:
            return
        time.sleep(PAUSE)
        if self._running:
            self._go.acquire(blocking=False)
            self._waits = True
            if self._running:  # still running: the search will see that an update waits
                self._go.acquire(timeout=PATIENCE)  # bounded: searches may arrive endlessly
            self._waits = False
        self._last_yield = time.monotonic()

    @contextmanager
    def search_turn(self, device: torch.device) -> Iterator[None]:
        """A search on the caller's stream, ordered after the published updates."""
        with self.launch_lock:
            ordered = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
            if not ordered:
                yield
                return
            stream = torch.cuda.current_stream(device)
            if self._published is not None:
                stream.wait_event(self._published)
            yield
            self._searches.setdefault(stream, torch.cuda.Event()).record(stream)

    @contextmanager
    def update_stream(self, device: torch.device, *, from_caller: bool = True) -> Iterator[None]:
        """Write rows that no search reads, on the update stream.

        from_caller: whether the caller's stream may still compute the values, so that the update waits for that stream.
        """
        if device.type != "cuda":
            yield
            return
        stream = self._stream(device)
        if from_caller:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield

    @contextmanager
    def exclusive(self, device: torch.device) -> Iterator[None]:
        """Write rows that searches read: after all started searches, and before later searches."""
        with self.launch_lock:
            if device.type != "cuda":
                yield
                return
            stream = self._stream(device)
            for event in self._searches.values():
                stream.wait_event(event)
            self._searches.clear()
            with torch.cuda.stream(stream):
                yield
                self._published = torch.cuda.Event()
                self._published.record(stream)

    def wait_for_updates(self, device: torch.device) -> None:
        """Let the caller's stream see all updates, before reading the buffers directly."""
        if device.type == "cuda" and self._published is not None:
            torch.cuda.current_stream(device).wait_event(self._published)
