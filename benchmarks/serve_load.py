"""Searches a second and their latency, of a server.

    python benchmarks/serve_load.py --port 8000 --dim 128 --where "price <= 30"     of one that runs
    python benchmarks/serve_load.py --items 15500000 --workers 0,8 --output results  of one that is started for it

The second fills an index with random vectors, on the GPU where there is one, with an attribute of which a share passes,
and starts a server with each number of fronts. The result file also has what a search cost the processor, in the
process of the index and in all fronts together, and how many queries a search had.

Clients are connections in processes of their own. Each sends its next search when the last is answered, or with --rate
when it is due: latency then counts from that moment, so that a server that falls behind is not spared.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httptools
import numpy as np

from tigon.retrieve.server.bodies import pack_tensors

FORMS = ("binary", "json", "json16")  # fp16 tensors; numbers as fp32 has them; numbers that fp16 holds
PACKAGES = ("starlette", "uvicorn", "uvloop", "httptools", "pydantic")

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
        elif self.begin < now <= self.end:
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
    kind = "application/octet-stream" if form == "binary" else "application/json"
    made = []
    for i in range(16):
        x = draw.standard_normal((queries, dim), dtype=np.float32)
        fields = {"k": k, "where": wheres[(seed + i) % len(wheres)] or None}
        if form == "binary":
            body = pack_tensors({"vectors": x.astype(np.float16)}, fields)
        else:
            x = x.round(6) if form == "json" else x.astype(np.float16)
            body = json.dumps({**fields, "vectors": x.tolist()}).encode()
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
    count = min(clients, processes or max(1, (os.cpu_count() or 2) // 4))
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
        "clients": clients, "queries": queries, "form": form, "k": k, "filters": len(wheres), "asked": rate,
        "searches_s": len(taken) * queries / seconds, "p50_ms": p50, "p99_ms": p99,
        "refused": sum(one[1] for one in found), "processes": count,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------- a server for the purpose


@dataclass
class Row:
    """Searches of a server with so many fronts.

    asked: searches a second that were asked for; 0: one after another. batch: queries of one search. index_us and
    fronts_us: of the processor, for each search.
    """

    items: int
    dim: int
    dtype: str
    share: float
    workers: int
    clients: int
    queries: int
    form: str
    k: int
    filters: int
    asked: float
    searches_s: float
    p50_ms: float
    p99_ms: float
    refused: int
    processes: int
    batch: float
    index_us: float
    fronts_us: float
    status: str = "ok"
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def served(items: int, dim: int, dtype: str, k: int, workers: list[int], where: str, batch: int, said: Any) -> None:
    """The process of a server: an index, and one server after another, each until SIGTERM."""
    import torch
    from harness.search_latency import fill_index

    from tigon.retrieve.server.run import serve
    from tigon.retrieve.server.service import Limits, Service

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    index = fill_index(items, dim, dtype, device)
    begun = time.perf_counter()
    if device.type == "cuda":
        sizes = sorted({1, 16, 32, 64, 128, batch})
        for size, kind in itertools.product(sizes, (torch.float16, torch.float32)):
            if size <= batch:
                index.warmup(torch.ones(size, dim, dtype=kind), k, where)
    said.send(time.perf_counter() - begun)
    for count in workers:
        serve(Service(index, limits=Limits(max_batch=batch)), "127.0.0.1", 0, started=said.send, workers=count)


def spent(pid: int) -> float:
    """Seconds of the processor that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def state(pid: int, port: int) -> dict[str, float]:
    """What a server has searched for and spent so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().splitlines()]
    known = {name: float(value) for name, _, value in lines if name.startswith("tigon_batch_queries_")}
    fronts = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {
        "queries": known["tigon_batch_queries_sum"], "searches": known["tigon_batch_queries_count"],
        "index": spent(pid), "fronts": sum(spent(int(front)) for front in fronts),
    }  # fmt: skip


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    """Start the servers and load them."""
    share = options.share
    where = f"part < {round(100 * share)}"
    context = multiprocessing.get_context("spawn")
    ours, said = context.Pipe()
    about = options.items, options.dim, options.dtype, options.k, options.workers, where, options.batch
    server = context.Process(target=served, args=(*about, said))
    begun = time.perf_counter()
    server.start()
    said.close()
    try:
        compiled = ours.recv()
        print(f"index in {time.perf_counter() - begun - compiled:.1f} s, kernels in {compiled:.1f} s", flush=True)
        for workers in options.workers:
            port = ours.recv()
            for rate in options.rates:
                for form in options.forms:
                    before = state(server.pid, port)
                    row = measured(
                        "127.0.0.1", port, options.dim, options.k, [where], options.clients, options.queries, form,
                        rate, options.seconds, options.processes,
                    )  # fmt: skip
                    after = state(server.pid, port)
                    here = {name: value - before[name] for name, value in after.items()}
                    yield Row(
                        options.items, options.dim, options.dtype, share, workers, **row,
                        batch=here["queries"] / max(here["searches"], 1),
                        index_us=1e6 * here["index"] / max(here["queries"], 1),
                        fronts_us=1e6 * here["fronts"] / max(here["queries"], 1),
                    )  # fmt: skip
            server.terminate()
        server.join(30)
    finally:
        server.kill()
        server.join()


def shown(row: dict[str, Any]) -> str:
    who = f"{row['clients']:4} clients × {row['queries']:3} queries, {row['form']:6} {row['filters']:2} filters"
    asked = f"{row['asked']:,.0f}/s asked" if row["asked"] else "one after another"
    fronts = f"{row['workers']:2} fronts, " if "workers" in row else ""
    cost = f"  batch {row['batch']:.0f}, µs {row['index_us']:.0f} + {row['fronts_us']:.0f}" if "batch" in row else ""
    return (
        f"{fronts}{who}, {asked:18}"
        f"{row['searches_s']:10,.0f} searches/s  p50 {row['p50_ms']:8.2f}  p99 {row['p99_ms']:8.2f} ms{cost}"
        + (f"  {row['refused']:,} refused" if row["refused"] else "")
    )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, help="of a server that runs; without, one is started")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--key", default="")
    parser.add_argument("--where", action="append", default=[], help="with --port: a filter; several: in turn")
    parser.add_argument("--dim", type=int, default=128, help="width of the index's vectors")
    parser.add_argument("-k", type=int, default=100)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--queries", type=int, default=1, help="of a request")
    parser.add_argument("--forms", default="binary", help=f"some of {','.join(FORMS)}")
    parser.add_argument(
        "--rates", type=numbers, default=[0], help="searches a second; 0: each client as fast as answered"
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--processes", type=int, help="of clients; default: one for four cores")
    parser.add_argument("--items", type=int, default=15_500_000, help="of the index for a server that is started")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--share", type=float, default=0.11, help="of the items that pass the filter")
    parser.add_argument("--workers", type=numbers, default=[0], help="fronts of each server, separated by commas")
    parser.add_argument("--batch", type=int, default=256, help="queries of one search")
    parser.add_argument("--output", type=Path, help="folder for the result file")
    options = parser.parse_args(arguments)
    options.forms = options.forms.split(",")
    if unknown := set(options.forms) - set(FORMS):
        parser.error(f"--forms must be some of {','.join(FORMS)}, got {min(unknown)}")
    if options.port is not None:
        for rate in options.rates:
            for form in options.forms:
                row = measured(
                    options.host, options.port, options.dim, options.k, options.where or [""], options.clients,
                    options.queries, form, rate, options.seconds, options.processes, options.key,
                )  # fmt: skip
                print(shown(row), flush=True)
        return
    from harness import report

    rows: list[Row] = []
    for row in rows_of(options):
        rows.append(row)
        print(shown(row.to_dict()), flush=True)
        if options.output is not None:
            versions = {name: version(name) for name in PACKAGES}
            content = report.result("serve", rows, host_cpus=os.cpu_count(), serving=versions)
            report.save(options.output / report.file_name(content), content)


if __name__ == "__main__":
    main()
