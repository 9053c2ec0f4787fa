"""Workers of a server: what they answer is what the process of the index would, and each may go without the others."""

import asyncio
import contextlib
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
from prometheus_client.parser import text_string_to_metric_families
from serving import (
    BINARY,
    ITEMS,
    KEY,
    SRC,
    D,
    Held,
    Process,
    X,
    ask,
    binary,
    check_answer,
    made,
    many_calls,
    until,
    waiting_queries,
)

from tigon.retrieve import Index
from tigon.retrieve.filters import attributes
from tigon.retrieve.server import frames, requests, run, worker, worker_pool
from tigon.retrieve.server.service import Limits, Service

# --------------------------------------------------------------------------------------------------------------- frames


def test_frames_come_whole_out_of_any_pieces():
    draw = np.random.default_rng(0)
    sent = [("a",), ("b", 1, [2, 3]), ("c", draw.bytes(3000), None)]
    whole = b"".join(frames.pack_frame(*call) for call in sent)
    for size in (1, 5, 16, 17, 100, 10_000):
        reader, received = frames.FrameReader(), []
        for start in range(0, len(whole), size):
            received += reader.feed(whole[start : start + size])
        assert received == sent


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int64, bool])
def test_arrays_and_tables_go_through_a_frame(dtype):
    array = np.arange(12).reshape(3, 4).astype(dtype)
    table = {"a": list(range(40_000)), "b": [None, ["x", "\ud800"], 2**70, 1.5], "c": []}
    call = frames.encode_arrays({"x": array, "texts": ["a"]}), frames.split_table(table), frames.split_table(None)
    ((features, pieces, nothing),) = frames.FrameReader().feed(frames.pack_frame(*call))
    features = frames.decode_arrays(features)
    assert features["texts"] == ["a"]
    assert features["x"].dtype == dtype
    assert np.array_equal(features["x"], array)
    assert (frames.join_table(pieces), frames.join_table(nothing)) == (table, None)


@pytest.mark.parametrize("strings", [False, True])
def test_hits_go_through_a_frame(strings):
    index = made(strings)
    hits = index.search(torch.ones(2, D), 200, "part < 30")
    arrays = hits.scores.numpy(), hits._keys.numpy(), hits.exact.numpy()
    result = worker_pool.MergedSearch.convert(None, *arrays, hits._ids)
    ((*arrays, names),) = frames.FrameReader().feed(frames.pack_frame(*result))
    scores, ids, exact = map(frames.decode_arrays, arrays)
    if strings:
        ids = worker._decode_strings(ids, names)
        assert ids[0, -1] is None
    assert np.array_equal(ids, hits.ids if strings else hits.ids.numpy())
    assert np.array_equal(scores, hits.scores.numpy())
    assert np.array_equal(exact, hits.exact.numpy())


# ------------------------------------------------------------------------------------------------- both in one process


def behind_workers(test, index=None, workers=1, **options):
    """Run a test that is a coroutine of clients of workers, a service and the workers, over sockets in one process."""
    service = Service(made() if index is None else index, **options)

    async def run():
        loop = asyncio.get_running_loop()
        pool = worker_pool.WorkerPool(service, [None] * workers, 0.0, 10.0)
        async with contextlib.AsyncExitStack() as stack:
            clients, backends = [], []
            for place in range(workers):
                here, there = socket.socketpair()
                _, connection = await loop.create_unix_connection(
                    lambda p=place: worker_pool.WorkerConnection(service, p, None), sock=here
                )
                _, backend = await loop.create_unix_connection(lambda p=place: worker.RemoteBackend(p), sock=there)
                pool.greet(connection)
                app = await backend.hello
                backend.send("ready")
                assert await connection.ready
                client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tigon")
                clients.append(await stack.enter_async_context(client))
                backends.append(backend)
            try:
                await test(clients, service, backends)
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


@pytest.mark.parametrize("strings", [False, True])
def test_workers_answer_as_the_index_does(strings):
    index, calls = made(strings), many_calls()

    async def test(clients, service, workers):
        asked = [ask(clients[i % 2], i, *call) for i, call in enumerate(calls)]
        wrong = [clients[i % 2].post("/search", json={"vectors": X, "where": "colour == 1"}) for i in range(4)]
        answers = await asyncio.gather(*asked, *wrong)
        for answer, call in zip(answers, calls, strict=False):
            check_answer(answer, index, *call)
        for answer in answers[len(calls) :]:
            assert (answer.status_code, "no column 'colour'" in answer.text) == (422, True)
        batch = service.index_backend.admission.metrics.batch
        assert batch._sum.get() > sum(bucket.get() for bucket in batch._buckets)
        assert not any(each.queries or each.pending for each in workers)

    behind_workers(test, index, workers=2)


def test_refusals_pages_and_updates_are_those_of_one_process():
    index = made()

    async def test(clients, service, workers):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(service), base_url="http://tigon") as plain:
            strict = {"vectors": X, "where": "kind == 'z'"}
            for path, body in [
                ("/search", {"vectors": X * 5}), ("/search", {"vectors": [[1.0]]}), ("/search", {"texts": ["a"]}),
                ("/search", {**strict, "strict": True}), ("/search", strict), ("/search", "{"), ("/upsert", {}),
                ("/upsert", {"ids": [1], "vectors": X, "table": {"part": [1]}}), ("/delete", {"ids": ["x"]}),
                ("/upsert", {"ids": [2**70], "vectors": X, "table": {"part": [1], "kind": ["a"]}}),
                ("/upsert", {"ids": ["x"], "vectors": X, "table": {"part": [1], "kind": ["a"]}}),
                ("/snapshot", {}), ("/nowhere", {}),
            ]:  # fmt: skip
                content = body if isinstance(body, str) else json.dumps(body)
                a, b = [await one.post(path, content=content, headers=KEY) for one in (plain, clients[0])]
                assert (a.status_code, a.content, a.headers) == (b.status_code, b.content, b.headers), path
            for path in ("/health", "/docs", "/openapi.json", "/search"):
                a, b = [await one.get(path, headers=KEY) for one in (plain, clients[1])]
                assert (a.status_code, a.content) == (b.status_code, b.content)
            assert (await clients[0].post("/search", json={"vectors": X})).status_code == 401
            assert (await clients[0].post("/search", content=b"x" * 1001, headers=KEY)).status_code == 413
            table = {"part": [7, 8], "kind": ["new", None]}
            body = {"ids": [1000, 1001], "vectors": X * 2, "table": table}
            done = await clients[0].post("/upsert", json=body, headers=KEY)
            assert done.json() == {"upserted": 2, "items": ITEMS + 2}
            query = binary(np.ones((1, D), np.float32), k=1, where="kind == 'new'")
            found = await clients[1].post("/search", content=query, headers=KEY | BINARY)
            check_answer(found, index, np.ones((1, D), np.float32), 1, "kind == 'new'")
            assert (await clients[1].post("/delete", json={"ids": [1000]}, headers=KEY)).json()["deleted"] == 1

    behind_workers(test, index, workers=2, key="secret", limits=Limits(max_body=1000, max_batch=4))


def test_texts_go_through_the_encoder_behind_the_workers():
    def encode(texts):
        return torch.stack([torch.full((D,), float(len(text))) for text in texts])

    async def test(clients, service, workers):
        found = await clients[0].post("/search", json={"texts": ["a", "bcd"], "k": 2})
        check_answer(found, service.index, encode(["a", "bcd"]), 2, None)
        assert (await clients[0].post("/search", json={"texts": ["a"], "k": 0})).status_code == 422

    behind_workers(test, encode=encode)


def test_the_queue_has_an_end_and_who_goes_away_leaves_it(monkeypatch):
    index = made()
    held = Held(index, monkeypatch)

    async def test(clients, service, workers):
        body = {"vectors": X}
        tasks = [asyncio.ensure_future(clients[0].post("/search", json=body))]
        await until(lambda: held.sizes == [1])
        for waiting in range(1, 7):  # two are lined up behind the search, four wait
            tasks.append(asyncio.ensure_future(clients[waiting % 2].post("/search", json=body)))
            await until(lambda n=waiting: waiting_queries(service) == n)
        refused = await clients[1].post("/search", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "beyond 4" in refused.json()["detail"]
        asked, gone = asyncio.Event(), asyncio.Event()

        async def receive():
            if not asked.is_set():
                asked.set()
                return {"type": "http.request", "body": json.dumps(body).encode()}
            await gone.wait()
            return {"type": "http.disconnect"}

        service.index_backend.admission.queue.max_queue += 2
        scope = {"type": "http", "path": "/search", "method": "POST", "headers": []}
        leaver = asyncio.ensure_future(workers[0].hello.result()(scope, receive, None))
        tasks.append(asyncio.ensure_future(clients[0].post("/search", json=body)))  # in the same frame
        await until(lambda: service.index_backend.admission.queue.queries == 6)
        gone.set()
        await asyncio.wait_for(leaver, 10)
        await until(lambda: service.index_backend.admission.queue.queries == 5)
        held.go.set()
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
        assert sum(held.sizes) == 8, "who went away is not searched for"
        assert service.index_backend.admission.metrics.dropped._value.get() == 1
        assert not any(each.queries or each.pending for each in workers)

    behind_workers(test, index, workers=2, limits=Limits(max_batch=2, max_queue=4))


def test_of_a_frame_that_fails_only_those_fail_that_fail_alone(monkeypatch):
    index = made()
    search = index.search

    def failing(query, k, where):
        if (query == 7).any():
            raise torch.OutOfMemoryError("too large")
        if (query == 8).any():
            raise RuntimeError("a bug")
        return search(query, k, where)

    monkeypatch.setattr(index, "search", failing)

    async def test(clients, service, workers):
        bodies = [{"vectors": [[value] * D], "k": 2} for value in (1.0, 7.0, 2.0, 8.0)]
        answers = await asyncio.gather(*(clients[0].post("/search", json=body) for body in bodies))
        assert [answer.status_code for answer in answers] == [200, 503, 200, 500]
        assert answers[1].headers["retry-after"] == "1"

    behind_workers(test, index)


# ------------------------------------------------------------------------------------------------------------ processes


def test_what_a_worker_knows_of_the_operator_is_so():
    from tigon.retrieve.scan import MOST

    assert requests.MAX_K == MOST
    assert attributes.MOST_FILTERS >= requests.MAX_FILTERS


def test_a_worker_has_no_torch():
    code = "import sys, tigon.retrieve.server.worker; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": SRC}, stdout=subprocess.PIPE)
    loaded = {name.partition(".")[0] for name in done.stdout.decode().split()}
    assert "uvicorn" in loaded
    assert not loaded & {"torch", "pyarrow"}


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="workers are counted in /proc")
def test_a_server_with_workers_from_its_start_to_its_end(tmp_path):
    made().save(tmp_path / "index")
    # A search waits for 1.5 s where others are expected: the last had four queries.
    server = Process(tmp_path / "index", "--workers", "2", "--shutdown-delay", "0.5", "--wait", "1500")
    try:
        url = str(server.client.base_url)
        clients = [httpx.Client(base_url=url, headers={"x-api-key": "k"}, timeout=60) for _ in range(8)]
        # The system deals out connections: of eight, both workers have some, but once in 128 times.
        search = {"vectors": X * 4, "k": 3}
        wanted = [client.post("/search", json=search).json()["ids"] for client in clients]
        assert all(ids == wanted[0] for ids in wanted)
        assert httpx.post(url.rstrip("/") + "/search", json=search).status_code == 401
        # A client that does not wait for its answer.
        with socket.create_connection((server.client.base_url.host, server.client.base_url.port)) as leaver:
            body = json.dumps(search).encode()
            leaver.sendall(
                b"POST /search HTTP/1.1\r\nhost: x\r\nx-api-key: k\r\ncontent-length: %d\r\n\r\n" % len(body)
            )
            leaver.sendall(body)
        first = children(server.process.pid)
        assert len(first) == 2
        os.kill(first[0], signal.SIGKILL)
        assert "ended with status -9, and is started again" in server.process.stderr.readline()
        answered = 0
        for client in clients:
            try:
                answered += client.post("/search", json=search).json()["ids"] == wanted[0]
            except httpx.HTTPError:  # its worker was killed; the next connection is had again
                assert client.post("/search", json=search).json()["ids"] == wanted[0]
        assert answered >= 1
        assert len(set(children(server.process.pid)) - {first[0]}) == 2
        table = {"part": [1], "kind": ["late"]}
        assert clients[0].post("/upsert", json={"ids": [5000], "vectors": X, "table": table}).status_code == 200
        answers = []
        late = {"vectors": X, "k": 3}
        thread = threading.Thread(target=lambda: answers.append(clients[0].post("/search", json=late)))
        assert clients[1].post("/search", json=search).status_code == 200
        thread.start()
        end = time.monotonic() + 20
        while "tigon_waiting_queries 1.0" not in clients[1].get("/metrics").text:
            assert time.monotonic() < end
        server.process.terminate()
        for pid in children(server.process.pid):  # as where the whole group gets the signal
            os.kill(pid, signal.SIGTERM)
        while clients[1].get("/health").json()["status"] != "draining":
            assert time.monotonic() < end
        refused = clients[1].post("/search", json=late)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        thread.join(30)
        assert [answer.status_code for answer in answers] == [200]
        assert server.process.wait(30) == 0
        assert "all accepted requests are answered" in server.process.stderr.read()
        again = Index.open(tmp_path / "index")
        assert 5000 in again
        again.close()
    finally:
        server.end()


@pytest.mark.skipif(sys.platform != "linux", reason="workers need Linux")
def test_metrics_are_of_all_workers(tmp_path):
    made().save(tmp_path / "index")
    server = Process(tmp_path / "index", "--workers", "3")
    try:
        url = str(server.client.base_url)
        clients = [httpx.Client(base_url=url, headers={"x-api-key": "k"}, timeout=60) for _ in range(6)]
        for client in clients:  # the system deals out their connections
            assert client.post("/search", json={"vectors": X * 2}).status_code == 200
        clients[2].post("/search", content="{")
        for already in range(2):  # an earlier request of /metrics counts, too
            text = clients[already].get("/metrics").text
            values = {
                (sample.name, *sample.labels.values()): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
            assert values["tigon_requests_total", "/search", "200"] == 6
            assert values["tigon_requests_total", "/search", "422"] == 1
            assert values["tigon_request_seconds_count", "/search"] == 7
            assert values["tigon_queries_total",] == 12
            assert values["tigon_items",] == ITEMS
            assert values.get(("tigon_requests_total", "/metrics", "200"), 0) == already
    finally:
        server.end()


def test_a_worker_ends_with_the_process_of_the_index():
    (bound,) = run.bind_sockets("127.0.0.1", 0, 1)
    here, there = socket.socketpair()
    with bound, here, there:
        arguments = map(str, (there.fileno(), bound.fileno(), 0))
        process = subprocess.Popen(
            [sys.executable, "-m", "tigon.retrieve.server.worker", *arguments], env=os.environ | {"PYTHONPATH": SRC},
            pass_fds=(there.fileno(), bound.fileno()), stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        there.close()
        service = Service(made())
        hello = tuple(service.info), None, tuple(service.limits), None, 1
        here.sendall(frames.pack_frame("hello", *hello))
        service.close()
        assert list(frames.FrameReader().feed(here.recv(1000))) == [("ready",)]
        process.send_signal(signal.SIGTERM)
        assert process.poll() is None
    said = process.communicate(timeout=30)[1]
    assert said == "tigon: retrieve serve: the process that holds the index has ended, and so do its workers\n"
    assert process.returncode == 1


def test_a_port_is_had_by_one_server():
    for count in (1, 2):
        sockets = run.bind_sockets("127.0.0.1", 0, count)
        port = sockets[0].getsockname()[1]
        assert {each.getsockname()[1] for each in sockets} == {port}
        for other in (1, 2):
            with pytest.raises(OSError, match="in use"):
                run.bind_sockets("127.0.0.1", port, other)
        for each in sockets:
            each.close()


def test_workers_that_do_not_start_are_said(monkeypatch):
    monkeypatch.setattr(worker_pool.sys, "executable", "/bin/false")
    with pytest.raises(worker_pool.WorkerError, match="a worker ended before it was ready"):
        run.serve(Service(made()), "127.0.0.1", 0, workers=2)


@pytest.mark.skipif(sys.platform != "linux", reason="workers are counted in /proc")
def test_a_worker_that_cannot_be_started_again_ends_the_server(monkeypatch, capfd):
    def started(port):
        monkeypatch.setattr(worker_pool.sys, "executable", "/bin/false")
        behind = [pid for pid in children(os.getpid()) if "server.worker" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(behind[0], signal.SIGKILL)

    with pytest.raises(worker_pool.WorkerError, match="ended 3 times as soon as it was started"):
        run.serve(Service(made()), "127.0.0.1", 0, started=started, workers=2)
    assert capfd.readouterr().err.count("is started again") in (2, 3)  # by how long it lived
