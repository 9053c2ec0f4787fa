"""Streams and events of a device without one, on a clock of their own; and a node's ranks in one process.

`Machine` stands where `torch.cuda` stands: Stream, Event, stream, current_stream. What is launched on a stream runs
when all that was enqueued before it is over, takes the time it is said to take, and is seen when that has passed, so
that whatever may be overtaken is overtaken, on every run alike. `Ranks` stands for a process group: its all-gather runs
when every rank has called it, on each rank's own stream, as NCCL's does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


class Machine:
    """launch(function, takes) is on the current stream; run() is what has been enqueued, to its end."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.now = 0.0  # the host's: nothing begins before it has been enqueued
        self.current = self.Stream()

    def Stream(self) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def launch(self, function: Callable[[], Any], takes: float = 1.0) -> None:
        self.current.enqueue(function=function, takes=takes)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while not until():
            self.pass_marks()
            ready = [stream for stream in self.streams if stream.items and stream.items[0].function]
            if not ready:
                break
            min(ready, key=Stream.end_of_next).run_next()
        assert until() or not any(stream.items for stream in self.streams), "streams wait for each other"

    def pass_marks(self) -> None:
        while any(stream.pass_marks() for stream in self.streams):  # what one records another may wait for
            pass


class Stream:
    def __init__(self, machine: Machine) -> None:
        self.machine, self.items, self.time = machine, deque(), 0.0

    def enqueue(self, function=None, takes=0.0, record=None, wait=None) -> None:
        self.items.append(
            SimpleNamespace(function=function, takes=takes, record=record, wait=wait, at=self.machine.now)
        )

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:  # an event that was never recorded is waited for by nobody, as in CUDA
            self.enqueue(wait=event.mark)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.machine)
        event.record(other)
        self.wait_event(event)

    def pass_marks(self) -> bool:
        passed = False
        while self.items and not self.items[0].function:
            item = self.items[0]
            if item.wait is not None and item.wait.time is None:
                break
            self.time = max(self.time, item.at, item.wait.time if item.wait else 0.0)
            if item.record is not None:
                item.record.time = self.time
            self.items.popleft()
            passed = True
        return passed

    def end_of_next(self) -> float:
        return max(self.time, self.items[0].at) + self.items[0].takes

    def run_next(self) -> None:
        self.time = self.end_of_next()
        self.items.popleft().function()


class Event:
    def __init__(self, machine: Machine) -> None:
        self.machine, self.mark = machine, None

    def record(self, stream: Stream) -> None:
        self.mark = SimpleNamespace(time=None)
        stream.enqueue(record=self.mark)

    def synchronize(self) -> None:
        if (mark := self.mark) is not None:

            def passed() -> bool:
                self.machine.pass_marks()
                return mark.time is not None

            self.machine.run(passed)
            self.machine.now = max(self.machine.now, mark.time)


class Ranks:
    """A process group, as far as an all-gather asks; member(i) is what rank i of it has.

    On a device's own streams, where nothing waits for what has not been recorded yet, it is launched by the last rank
    that calls: what the others do between their call and that one is not behind it.
    """

    def __init__(self, name: str, size: int, handle: Any, launch: Callable[..., None]) -> None:
        self.group_name, self.ranks, self.handle, self.launch = name, range(size), handle, launch
        self._begin()

    def member(self, rank: int) -> Any:
        return SimpleNamespace(
            group_name=self.group_name, size=lambda: len(self.ranks), rank=lambda: rank,
            all_gather=lambda output, x: self.all_gather(rank, output, x),
        )  # fmt: skip

    def all_gather(self, rank: int, output: Any, x: Any) -> None:
        calls, stream = self.calls, self.handle.current_stream()
        calls[rank] = output, x, stream
        if isinstance(self.handle, Machine):
            self._meet(rank, stream, self.arrived)
            self._take(rank, calls)
            self._meet(rank, stream, self.left)  # a rank's part is its own again when all have it
        elif len(calls) == len(self.ranks):
            for _, _, stream in calls.values():
                for _, _, other in calls.values():
                    stream.wait_stream(other)
            for i in self.ranks:
                with self.handle.stream(calls[i][2]):
                    self._take(i, calls)
        if len(calls) == len(self.ranks):
            self._begin()

    def _begin(self) -> None:
        self.calls: dict[int, tuple[Any, Any, Any]] = {}
        self.arrived, self.left = ([SimpleNamespace(time=None) for _ in self.ranks] for _ in range(2))

    def _take(self, rank: int, calls: dict[int, tuple[Any, Any, Any]]) -> None:
        for i, part in enumerate(calls[rank][0].chunk(len(self.ranks))):
            self.launch(lambda i=i, part=part: part.copy_(calls[i][1]))

    def _meet(self, rank: int, stream: Any, marks: list[Any]) -> None:
        stream.enqueue(record=marks[rank])
        for mark in marks:
            stream.enqueue(wait=mark)
