"""Server counters for Prometheus."""

from __future__ import annotations

import os
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

SECONDS = (5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7.5e-3, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # set for prometheus_client to add up the counters over processes


class RequestMetrics:
    """Request counts and durations in a process that reads HTTP."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        labels = ("path", "status")
        self._requests = Counter("tigon_requests", "Requests answered.", labels, registry=self._registry)
        self._seconds = Histogram(
            "tigon_request_seconds", "Seconds from a request's first line to the response.", ("path",), buckets=SECONDS,
            registry=self._registry,
        )  # fmt: skip
        self._children: dict[tuple[str, int], tuple[Counter, Histogram]] = {}

    def observe(self, path: str, status: int, seconds: float) -> None:
        """Count a request. Known paths are labelled, all others share a label."""
        children = self._children.get((path, status))
        if children is None:
            children = self._requests.labels(path, str(status)), self._seconds.labels(path)
            self._children[path, status] = children
        children[0].inc()
        children[1].observe(seconds)

    def to_text(self) -> bytes:
        """This process's counters, or the sum over all workers."""
        registry = self._registry
        if FOLDER in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


class SearchMetrics:
    """Searches in the index process.

    Args:
        waiting, items, capacity: functions that return the present number.
    """

    def __init__(self, waiting: Callable[[], float], items: Callable[[], float], capacity: Callable[[], float]) -> None:
        registry = self._registry = CollectorRegistry()
        self.queries = Counter("tigon_queries", "Queries answered.", registry=registry)
        self.dropped = Counter("tigon_dropped_queries", "Queries of disconnected clients.", registry=registry)
        self.batch = Histogram("tigon_batch_queries", "Queries per search.", buckets=QUERIES, registry=registry)
        self.seconds = Histogram(
            "tigon_search_seconds", "Seconds per index search, for all its queries.", buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        for name, text, value in (
            ("tigon_waiting_queries", "Queries waiting for a search.", waiting),
            ("tigon_items", "Items in the index.", items),
            ("tigon_capacity", "Capacity in items.", capacity),
        ):
            Gauge(name, text, registry=registry).set_function(value)

    def to_text(self) -> bytes:
        return generate_latest(self._registry)
