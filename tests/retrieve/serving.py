"""Indexes, requests and processes for the tests of servers."""

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors import numpy as tensors

from tigon.retrieve import Category, Index, Number, Schema
from tigon.retrieve.server import run as server_run
from tigon.retrieve.server import worker, worker_pool
from tigon.retrieve.server.service import Service

D, ITEMS = 16, 300
X = [[1.0] * D]
KINDS = ["a", "b", "c"]
KEY = {"x-api-key": "secret"}
BINARY = {"content-type": "application/octet-stream"}
SRC = str(Path(__file__).parents[2] / "src")


def made(strings=False):
    draw = np.random.default_rng(0)
    index = Index(D, 2 * ITEMS, "float32", schema=Schema(part=Number(0, 99, step=1), kind=Category()))
    ids = [f"item {i}" for i in range(ITEMS)] if strings else np.arange(ITEMS)
    table = {"part": draw.integers(0, 100, ITEMS), "kind": draw.choice(KINDS, ITEMS)}
    index.upsert(ids, torch.from_numpy(draw.standard_normal((ITEMS, D), dtype=np.float32)), table)
    return index


class Held:
    """A batcher's index whose searches wait until they are let go, and the sizes of what they were asked."""

    def __init__(self, index, monkeypatch):
        self.go, self.sizes = threading.Event(), []
        search = index.search

        def held(query, k, where):
            self.sizes.append(len(query))
            assert self.go.wait(20)
            return search(query, k, where)

        monkeypatch.setattr(index, "search", held)


async def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(1e-3)


def waiting_queries(service):
    return service.index_backend.admission.count_waiting()


def binary(query, **fields):
    return tensors.save({"vectors": query}, metadata={"request": json.dumps(fields)})


def same(ids, scores, hits):
    """A batch of another size may round the scores of a CPU otherwise. ids and scores: lists for each query."""
    wanted = hits.ids if isinstance(hits.ids, np.ndarray) else hits.ids.numpy()
    for row, values, names, expected in zip(ids, scores, wanted.tolist(), hits.scores.tolist(), strict=True):
        n = sum(score > -np.inf for score in expected)
        assert row == names[:n]
        assert values == pytest.approx(expected[:n], rel=1e-4, abs=1e-4)


def many_calls():
    """Queries, k and filters of requests: of one and of several queries, with one filter and with one for each."""
    draw = np.random.default_rng(1)
    wheres = [None, "part < 30", "kind == 'a'", "part >= 90", "part < 0 or part > 98"]
    calls = []
    for i in range(80):
        B = (1, 1, 3, 2)[i % 4]
        where = [wheres[(i + b) % 5] for b in range(B)] if i % 7 == 6 else wheres[i % 5]
        k = [1 + (i + b) % 9 for b in range(B)] if i % 4 == 3 else (5, 20, 500)[i % 3]
        query = draw.standard_normal((B, D), dtype=np.float32)
        calls.append((query.astype(np.float16) if i % 10 == 9 else query, k, where))
    return calls


async def ask(client, i, query, k, where):
    """Call i of `many_calls`, as tensors or as JSON."""
    if i % 3 == 2 or query.dtype == np.float16:
        return await client.post("/search", content=binary(query, k=k, where=where), headers=BINARY)
    return await client.post("/search", json={"vectors": query.tolist(), "k": k, "where": where})


def check_answer(answer, index, query, k, where):
    """An answer says what the index finds."""
    assert answer.status_code == 200, answer.text
    hits = index.search(query, k, where)
    if answer.headers["content-type"] == "application/json":
        found = answer.json()
    else:
        found = {name: array.tolist() for name, array in tensors.load(answer.content).items()}
        if isinstance(hits.ids, np.ndarray):
            size = int.from_bytes(answer.content[:8], "little")
            request = json.loads(answer.content[8 : 8 + size])["__metadata__"]["request"]
            found["ids"] = json.loads(request)["ids"]
        counts = [sum(score > -np.inf for score in row) for row in found["scores"]]
        for name in ("ids", "scores"):
            found[name] = [row[:n] for row, n in zip(found[name], counts, strict=True)]
    same(found["ids"], found["scores"], hits)
    assert found["exact"] == hits.exact.tolist()


def serve(test, index=None, workers=0, **options):
    """Run a coroutine of two clients and a service: clients of the service, or of workers in front of it, which have
    sockets to it in this process.
    """
    service = Service(made() if index is None else index, **options)

    async def run():
        apps = [service, service]
        backends, pool = [], worker_pool.WorkerPool(service, [None] * workers, 0.0, 10.0)
        for place in range(workers):
            here, there = socket.socketpair()
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_unix_connection(
                lambda p=place: worker_pool.WorkerConnection(service, p, None), sock=here
            )
            _, backend = await loop.create_unix_connection(lambda p=place: worker.RemoteBackend(p), sock=there)
            pool.greet(connection)
            apps[place] = await backend.hello
            backend.send("ready")
            assert await connection.ready
            backends.append(backend)
        clients = [httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tigon") for app in apps]
        try:
            async with clients[0], clients[1]:
                await test(clients, service)
                assert not any(backend.queries or backend.pending for backend in backends)
        finally:
            for backend in backends:
                backend.is_ended = True
                backend.transport.close()
                await backend.closed
            pool._metrics.cleanup()

    try:
        asyncio.run(run())
    finally:
        service.close()


def run_server(service, act, is_signaled=False, **options):
    """Run a server in this process while `act(port)` runs in a thread. SIGTERM follows, unless `act` has sent that.

    Returns: the seconds from the signal to the end.
    """
    errors, signaled = [], []

    def work(port):
        try:
            act(port)
        except BaseException as error:
            errors.append(error)
        finally:
            signaled.append(time.monotonic())
            if errors or not is_signaled:
                os.kill(os.getpid(), signal.SIGTERM)

    threads = []

    def start(port):
        threads.append(threading.Thread(target=work, args=(port,)))
        threads[0].start()

    try:
        server_run.serve(service, "127.0.0.1", 0, started=start, **options)
    finally:
        gc.unfreeze()  # what the server has frozen
        for thread in threads:
            thread.join(20)
    if errors:
        raise errors[0]
    return time.monotonic() - signaled[0]


class Process:
    """`tigon retrieve serve` of a folder."""

    def __init__(self, folder, *options):
        command = [sys.executable, "-m", "tigon", "retrieve", "serve", str(folder), "--port", "0", *options]
        env = os.environ | {"PYTHONPATH": SRC, "TIGON_API_KEY": "k"}
        self.process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        said = []  # a library may warn first
        while " at http://127.0.0.1:" not in (line := self.process.stderr.readline()):
            assert line, "".join(said)
            said.append(line)
        port = line.partition(" at http://127.0.0.1:")[2].partition(" ")[0]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"x-api-key": "k"}, timeout=60)

    def end(self):
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
