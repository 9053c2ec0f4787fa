"""Requests that were answered, counted: by each process for itself, and added up where Prometheus reads them."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

SECONDS = (5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7.5e-3, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Tally:
    """How many requests each path answered with which status, and how long they took."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        self.times: dict[str, list[int]] = {}  # requests by SECONDS, and beyond
        self.seconds: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self.requests)

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count a request. Paths are those that the server has, and one for all others."""
        self.requests[path, status] = self.requests.get((path, status), 0) + 1
        times = self.times.get(path)
        if times is None:
            times = self.times[path] = [0] * (len(SECONDS) + 1)
            self.seconds[path] = 0.0
        times[bisect_left(SECONDS, seconds)] += 1
        self.seconds[path] += seconds

    def take(self) -> dict[str, Any]:
        """What was counted, as JSON takes it. Counting begins anew."""
        taken = {
            "requests": [[path, status, count] for (path, status), count in self.requests.items()],
            "times": [[path, self.seconds[path], times] for path, times in self.times.items()],
        }
        self.__init__()  # type: ignore[misc]
        return taken

    def add(self, taken: dict[str, Any]) -> None:
        """Count what another has taken."""
        for path, status, count in taken["requests"]:
            self.requests[path, status] = self.requests.get((path, status), 0) + count
        for path, seconds, times in taken["times"]:
            here = self.times.get(path, [0] * len(times))
            self.times[path] = [a + b for a, b in zip(here, times, strict=True)]
            self.seconds[path] = self.seconds.get(path, 0.0) + seconds
