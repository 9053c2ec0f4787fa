"""Searches a second and their latency, of a server: python benchmarks/serve_load.py --port 8000 --dim 128

Clients are connections in processes of their own. Each sends its next search when the last is answered, or with --rate
when it is due: latency then counts from that moment, so that a server that falls behind is not spared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import time
from importlib.metadata import version
from typing import Any

import httptools
import numpy as np

from tigon.retrieve.serve.messages import packed

WARM = 1.0  # seconds that do not count


class Client(asyncio.Protocol):
    """One connection. interval: seconds between two searches; 0: one after the other."""

    def __init__(self, requests: list[bytes], begin: float, end: float, interval: float, taken: list[float]) -> None:
        self.requests, self.begin, self.end, self.interval, self.taken = requests, begin, end, interval, taken
        self.done, self.refused, self.next = asyncio.get_running_loop().create_future(), 0, 0
        self.due = time.perf_counter() + np.random.default_rng(id(self) % 2**32).random() * interval

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.parser = httptools.HttpResponseParser(self)
        self._wait()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed a connection"))

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def _wait(self) -> None:
        left = self.due - time.perf_counter()
        if left > 0:
            asyncio.get_running_loop().call_later(left, self._send)
        else:
            self._send()

    def _send(self) -> None:
        if not self.interval:
            self.due = time.perf_counter()
        self.transport.write(self.requests[self.next % len(self.requests)])
        self.next += 1

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        if self.parser.get_status_code() != 200:
            self.refused += 1
        elif now > self.begin:
            self.taken.append(now - self.due)
        self.due += self.interval
        if now > self.end:
            self.done.set_result(None)
            self.transport.close()
        else:
            self._wait()


def requests_of(host: str, dim: int, k: int, wheres: list[str], queries: int, form: str, key: str, seed: int) -> Any:
    """16 requests of different queries; filters in turn."""
    draw = np.random.default_rng(seed)
    kind = "application/json" if form == "json" else "application/octet-stream"
    made = []
    for i in range(16):
        x = draw.standard_normal((queries, dim), dtype=np.float32)
        fields = {"k": k, "where": wheres[(seed + i) % len(wheres)] or None}
        if form == "json":
            body = json.dumps({**fields, "vectors": x.round(6).tolist()}).encode()
        else:
            body = packed({"vectors": x.astype(np.float16)}, fields)
        head = f"POST /search HTTP/1.1\r\nhost: {host}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n"
        made.append(f"{head}{f'x-api-key: {key}{chr(13)}{chr(10)}' if key else ''}\r\n".encode() + body)
    return made


def load(number: int, clients: int, interval: float, seconds: float, ready: Any, results: Any, about: dict) -> None:
    """One process of clients."""
    import uvloop

    async def run() -> tuple[list[float], int]:
        made = [requests_of(**about["request"], seed=1000 * number + i) for i in range(clients)]
        ready.wait()
        begin = time.perf_counter() + WARM
        taken: list[float] = []
        loop = asyncio.get_running_loop()
        pairs = [
            await loop.create_connection(
                lambda made=made[i]: Client(made, begin, begin + seconds, interval, taken), about["host"], about["port"]
            )
            for i in range(clients)
        ]
        await asyncio.gather(*(protocol.done for _, protocol in pairs))
        return taken, sum(protocol.refused for _, protocol in pairs)

    try:
        results.put(uvloop.run(run()))
    except Exception as error:
        results.put(error)


def measured(
    host: str, port: int, dim: int, k: int = 100, wheres: list[str] = [""], clients: int = 256, queries: int = 1,  # noqa: B006
    form: str = "binary", rate: float = 0.0, seconds: float = 3.0, processes: int | None = None, key: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Searches a second, median and 99th percentile in ms. rate: searches a second of all clients; 0: as they come."""
    count = min(clients, processes or max(1, (os.cpu_count() or 2) // 2))
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(count), context.Queue()
    request = {"host": host, "dim": dim, "k": k, "wheres": wheres, "queries": queries, "form": form, "key": key}
    about = {"host": host, "port": port, "request": request}
    interval = clients * queries / rate if rate else 0.0
    shares = [clients // count + (i < clients % count) for i in range(count)]
    started = [
        context.Process(target=load, args=(i, n, interval, seconds, ready, results, about))
        for i, n in enumerate(shares)
    ]
    for process in started:
        process.start()
    found = [results.get() for _ in started]
    for process in started:
        process.join()
    if errors := [one for one in found if isinstance(one, Exception)]:
        raise errors[0]
    taken = 1e3 * np.concatenate([one[0] for one in found])
    p50, p99 = (float(value) for value in np.percentile(taken, (50, 99)))
    return {
        "clients": clients, "queries": queries, "form": form, "k": k, "filters": len(wheres), "rate": rate,
        "searches_s": len(taken) * queries / seconds, "p50_ms": p50, "p99_ms": p99,
        "refused": sum(one[1] for one in found), "processes": count,
    }  # fmt: skip


def versions() -> dict[str, str]:
    names = ("torch", "fastapi", "uvicorn", "uvloop", "httptools", "pydantic")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def shown(row: dict[str, Any]) -> str:
    who = f"{row['clients']:4} clients × {row['queries']:3} queries, {row['form']:6} {row['filters']:2} filters"
    asked = f"{row['rate']:,.0f}/s asked" if row["rate"] else "one after another"
    return (
        f"{who}, {asked:18}"
        f"{row['searches_s']:10,.0f} searches/s  p50 {row['p50_ms']:8.2f}  p99 {row['p99_ms']:8.2f} ms"
        + (f"  {row['refused']:,} refused" if row["refused"] else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dim", type=int, required=True, help="width of the index's vectors")
    parser.add_argument("-k", type=int, default=100)
    parser.add_argument("--where", action="append", default=[], help="a filter; several: in turn")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--queries", type=int, default=1, help="of a request")
    parser.add_argument("--form", choices=("binary", "json"), default="binary")
    parser.add_argument("--rate", type=float, default=0.0, help="searches a second; 0: each client as fast as answered")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--key", default="")
    options = vars(parser.parse_args())
    row = measured(wheres=options.pop("where") or [""], **options)
    print(json.dumps({**row, "host_cpus": os.cpu_count(), **versions()}))
    print(shown(row))


if __name__ == "__main__":
    main()
