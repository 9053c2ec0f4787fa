"""What Prometheus reads of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from tigon.retrieve.serve.tally import SECONDS, Tally

QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Counters:
    """The counters of one server.

    Args:
        tally: of its requests.
        waiting, items, capacity: functions of what is there now.
    """

    def __init__(
        self, tally: Tally, waiting: Callable[[], float], items: Callable[[], float], capacity: Callable[[], float]
    ) -> None:
        registry = self.registry = CollectorRegistry()
        self.tally = tally
        registry.register(self)  # type: ignore[arg-type]  # for its collect
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

    def collect(self) -> Iterator[Metric]:
        """The tally's counters."""
        requests = CounterMetricFamily("tigon_requests", "Requests answered.", labels=("path", "status"))
        for (path, status), count in self.tally.requests.items():
            requests.add_metric((path, str(status)), count)
        yield requests
        seconds = HistogramMetricFamily(
            "tigon_request_seconds", "From a request's first line to its answer.", labels=("path",)
        )
        edges = [*map(str, SECONDS), "+Inf"]
        for path, times in self.tally.times.items():
            buckets = list(zip(edges, accumulate(times), strict=True))
            seconds.add_metric((path,), buckets, self.tally.seconds[path])  # type: ignore[arg-type]
        yield seconds

    def text(self) -> bytes:
        return generate_latest(self.registry)
