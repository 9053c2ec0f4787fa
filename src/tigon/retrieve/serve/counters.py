"""What Prometheus reads of a server."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7.5e-3, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Counters:
    """The counters of one server.

    Args:
        waiting, items, capacity: functions of what is there now.
    """

    def __init__(self, waiting: Callable[[], float], items: Callable[[], float], capacity: Callable[[], float]) -> None:
        registry = self.registry = CollectorRegistry()
        self._requests = Counter("tigon_requests", "Requests answered.", ("path", "status"), registry=registry)
        self._seconds = Histogram(
            "tigon_request_seconds", "From a request's first line to its answer.", ("path",), buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        self.queries = Counter("tigon_queries", "Queries of searches that were answered.", registry=registry)
        self.dropped = Counter("tigon_dropped_queries", "Queries whose clients went away first.", registry=registry)
        self.batch = Histogram("tigon_batch_queries", "Queries of one search.", buckets=QUERIES, registry=registry)
        self.search = Histogram(
            "tigon_search_seconds", "One search of the index, for all of its queries.", buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        for name, text, value in (
            ("tigon_waiting_queries", "Queries that wait for a search.", waiting),
            ("tigon_items", "Items in the index.", items),
            ("tigon_capacity", "Items that there is room for.", capacity),
        ):
            Gauge(name, text, registry=registry).set_function(value)
        self._answered: dict[tuple[str, int], tuple[Counter, Histogram]] = {}

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count a request. Paths are those that the server has, and one for all others."""
        found = self._answered.get((path, status))
        if found is None:
            found = self._requests.labels(path, str(status)), self._seconds.labels(path)
            self._answered[path, status] = found
        found[0].inc()
        found[1].observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
