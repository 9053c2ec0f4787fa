"""Fronts of a server: what they answer is what the process of the index would, and each may go without the others."""

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
from serving import BINARY, ITEMS, KEY, SRC, D, Held, Process, X, ask, binary, check_answer, made, many_calls, until

from tigon.retrieve import Index
from tigon.retrieve.filters import attributes
from tigon.retrieve.serve import application, engine, frames, front, running
from tigon.retrieve.serve.app import Limits, Service
from tigon.retrieve.serve.application import Reply

# --------------------------------------------------------------------------------------------------------------- frames


def test_frames_come_whole_out_of_any_pieces():
    draw = np.random.default_rng(0)
    sent = [frames.frame(kind, number, draw.bytes(size)) for kind, number, size in [(3, 1, 0), (4, 2, 7), (1, 3, 3000)]]
    for size in (1, 5, 16, 17, 100, 10_000):
        stream, found = frames.Frames(), []
        whole = b"".join(sent)
        for start in range(0, len(whole), size):
            found += [(kind, n, bytes(body)) for kind, n, body in stream.feed(whole[start : start + size])]
        assert [frames.frame(*each) for each in found] == sent


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_frames_say_what_was_packed(dtype):
    query = np.arange(12).reshape(3, 4).astype(dtype)
    search = frames.Search([7, 9], [1, 2], query, [5, 1, 2048], ["a == 1", None, "a == 1"], True)
    found = frames.Search.of(memoryview(search.packed())[frames.HEAD.size :], 4)
    assert found._replace(query=None) == search._replace(query=None)
    assert found.query.dtype == dtype
    assert np.array_equal(found.query, query)
    scores = np.array([[1.5, -np.inf], [0.5, 0.25], [3, 2]], np.float32)
    ids, exact = np.array([[2**53 + 1, -1], [3, 4], [5, 6]]), np.array([True, False, True])
    answer = frames.Found.of(memoryview(frames.Found([7, 9], [1, 2], scores, ids, exact, None).packed())[16:])
    assert (answer.numbers, answer.counts) == ([7, 9], [1, 2])
    for got, wanted in ((answer.scores, scores), (answer.ids, ids), (answer.exact, exact)):
        assert np.array_equal(got, wanted)
    lengths = np.array([[3, -1], [0, 1], [2, 2]])
    strings = frames.Found([7, 9], [1, 2], scores, lengths, exact, "äbcdefg"[:7].encode())
    texts = frames.Found.of(memoryview(strings.packed())[16:]).ids
    assert texts.tolist() == [["äb", None], ["", "c"], ["de", "fg"]]
    reply = Reply(429, b"{}", headers=((b"retry-after", b"1"),))
    assert frames.reply_of(memoryview(frames.replied(1, reply))[16:]) == reply


# ------------------------------------------------------------------------------------------------- both in one process


def fronted(test, index=None, fronts=1, **options):
    """Run a test that is a coroutine of clients of fronts, a service and the fronts, over sockets in one process."""
    service = Service(made() if index is None else index, **options)

    async def run():
        loop = asyncio.get_running_loop()
        behind = engine.Fronts(service, [None] * fronts, 0.0, 10.0)
        async with contextlib.AsyncExitStack() as stack:
            clients, ends = [], []
            for place in range(fronts):
                here, there = socket.socketpair()
                _, link = await loop.create_unix_connection(lambda p=place: engine.Link(behind, p, None), sock=here)
                behind.links[place] = link
                _, end = await loop.create_unix_connection(lambda p=place: front.Link(p), sock=there)
                link.write(behind._hello())
                end.front = front.Front(await end.hello, end.transport)
                end.transport.write(frames.frame(frames.READY, 0))
                assert await link.ready
                transport = httpx.ASGITransport(end.front)
                clients.append(
                    await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://tigon"))
                )
                ends.append(end)
            try:
                await test(clients, service, [end.front for end in ends])
            finally:
                for end in ends:
                    end.ended = True
                    end.transport.close()
                    await end.closed

    try:
        asyncio.run(run())
    finally:
        service.close()


@pytest.mark.parametrize("strings", [False, True])
def test_fronts_answer_as_the_index_does(strings):
    index, calls = made(strings), many_calls()

    async def test(clients, service, fronts):
        asked = [ask(clients[i % 2], i, *call) for i, call in enumerate(calls)]
        wrong = [clients[i % 2].post("/search", json={"vectors": X, "where": "colour == 1"}) for i in range(4)]
        answers = await asyncio.gather(*asked, *wrong)
        for answer, call in zip(answers, calls, strict=False):
            check_answer(answer, index, *call)
        for answer in answers[len(calls) :]:
            assert (answer.status_code, "no column 'colour'" in answer.text) == (422, True)
        assert service.counters.batch._sum.get() / sum(b.get() for b in service.counters.batch._buckets) > 1
        assert not any(front.queries or front.searches for front in fronts)

    fronted(test, index, fronts=2)


def test_refusals_pages_and_updates_are_those_of_one_process():
    index = made()

    async def test(clients, service, fronts):
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

    fronted(test, index, fronts=2, key="secret", limits=Limits(body=1000, batch=4))


def test_metrics_are_of_all_fronts():
    async def test(clients, service, fronts):
        for i in range(6):
            await clients[i % 3].post("/search", json={"vectors": X * 2})
        await clients[2].post("/search", content="{")
        for ahead in range(2):  # what was asked for /metrics before counts, too
            text = (await clients[ahead].get("/metrics")).text
            found = {
                (sample.name, *sample.labels.values()): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
            assert found["tigon_requests_total", "/search", "200"] == 6
            assert found["tigon_requests_total", "/search", "422"] == 1
            assert found["tigon_request_seconds_count", "/search"] == 7
            assert found["tigon_queries_total",] == 12
            assert found.get(("tigon_requests_total", "/metrics", "200"), 0) == ahead

    fronted(test, fronts=3)


def test_texts_go_through_the_encoder_behind_the_fronts():
    def encode(texts):
        return torch.stack([torch.full((D,), float(len(text))) for text in texts])

    async def test(clients, service, fronts):
        found = await clients[0].post("/search", json={"texts": ["a", "bcd"], "k": 2})
        check_answer(found, service.index, encode(["a", "bcd"]), 2, None)
        assert (await clients[0].post("/search", json={"texts": ["a"], "k": 0})).status_code == 422

    fronted(test, encode=encode)


def test_the_queue_has_an_end_and_who_goes_away_leaves_it(monkeypatch):
    index = made()
    held = Held(index, monkeypatch)

    async def test(clients, service, fronts):
        body = {"vectors": X}
        tasks = [asyncio.ensure_future(clients[0].post("/search", json=body))]
        await until(lambda: held.sizes == [1])
        for waiting in range(1, 7):  # two are lined up behind the search, four wait
            tasks.append(asyncio.ensure_future(clients[waiting % 2].post("/search", json=body)))
            await until(lambda n=waiting: service.gate.queries + len(service.batcher) == n)
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

        service.batcher.queue += 2
        scope = {"type": "http", "path": "/search", "method": "POST", "headers": []}
        leaver = asyncio.ensure_future(fronts[0](scope, receive, None))
        tasks.append(asyncio.ensure_future(clients[0].post("/search", json=body)))  # in the same frame
        await until(lambda: service.gate.queries == 6)
        gone.set()
        await asyncio.wait_for(leaver, 10)
        await until(lambda: service.gate.queries == 5)
        held.go.set()
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
        assert sum(held.sizes) == 8, "who went away is not searched for"
        assert service.counters.dropped._value.get() == 1
        assert not any(front.queries or front.searches for front in fronts)

    fronted(test, index, fronts=2, limits=Limits(batch=2, queue=4))


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

    async def test(clients, service, fronts):
        bodies = [{"vectors": [[value] * D], "k": 2} for value in (1.0, 7.0, 2.0, 8.0)]
        answers = await asyncio.gather(*(clients[0].post("/search", json=body) for body in bodies))
        assert [answer.status_code for answer in answers] == [200, 503, 200, 500]
        assert answers[1].headers["retry-after"] == "1"

    fronted(test, index)


# ------------------------------------------------------------------------------------------------------------ processes


def test_what_a_front_knows_of_the_operator_is_so():
    from tigon.retrieve.scan import MOST

    assert application.MOST_K == MOST
    assert attributes.MOST_FILTERS >= application.MOST_FILTERS


def test_a_front_has_no_torch():
    code = "import sys, tigon.retrieve.serve.front; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": SRC}, stdout=subprocess.PIPE)
    loaded = {name.partition(".")[0] for name in done.stdout.decode().split()}
    assert "uvicorn" in loaded
    assert not loaded & {"torch", "fastapi", "prometheus_client", "pyarrow"}


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="fronts are counted in /proc")
def test_a_server_with_fronts_from_its_start_to_its_end(tmp_path):
    made().save(tmp_path / "index")
    # A search waits for 1.5 s where others are expected: the last had four queries.
    server = Process(tmp_path / "index", "--workers", "2", "--shutdown-delay", "0.5", "--wait", "1500")
    try:
        url = str(server.client.base_url)
        clients = [httpx.Client(base_url=url, headers={"x-api-key": "k"}, timeout=60) for _ in range(8)]
        # The system deals out connections: of eight, both fronts have some, but once in 128 times.
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
            except httpx.HTTPError:  # its front was killed; the next connection is had again
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
        assert "all that was taken is answered" in server.process.stderr.read()
        again = Index.open(tmp_path / "index")
        assert 5000 in again
        again.close()
    finally:
        server.end()


def test_a_front_ends_with_the_process_of_the_index():
    (bound,) = running._bound("127.0.0.1", 0, 1)
    here, there = socket.socketpair()
    with bound, here, there:
        arguments = map(str, (there.fileno(), bound.fileno(), 0))
        process = subprocess.Popen(
            [sys.executable, "-m", "tigon.retrieve.serve.front", *arguments], env=os.environ | {"PYTHONPATH": SRC},
            pass_fds=(there.fileno(), bound.fileno()), stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        there.close()
        service = Service(made())
        here.sendall(engine.Fronts(service, [bound], 0.0, 10.0)._hello())
        service.close()
        kind, _, _ = frames.HEAD.unpack(here.recv(frames.HEAD.size))
        assert kind == frames.READY
        process.send_signal(signal.SIGTERM)
        assert process.poll() is None
    said = process.communicate(timeout=30)[1]
    assert said == "tigon: retrieve serve: the process that holds the index has ended, and so do its fronts\n"
    assert process.returncode == 1


def test_a_port_is_had_by_one_server():
    for count in (1, 2):
        sockets = running._bound("127.0.0.1", 0, count)
        port = sockets[0].getsockname()[1]
        assert {each.getsockname()[1] for each in sockets} == {port}
        for other in (1, 2):
            with pytest.raises(OSError, match="in use"):
                running._bound("127.0.0.1", port, other)
        for each in sockets:
            each.close()


def test_fronts_that_do_not_start_are_said(monkeypatch):
    monkeypatch.setattr(engine.sys, "executable", "/bin/false")
    with pytest.raises(engine.Broken, match="a front ended before it was ready"):
        running.serve(Service(made()), "127.0.0.1", 0, workers=2)


@pytest.mark.skipif(sys.platform != "linux", reason="fronts are counted in /proc")
def test_a_front_that_cannot_be_started_again_ends_the_server(monkeypatch, capfd):
    def said(port):
        monkeypatch.setattr(engine.sys, "executable", "/bin/false")
        behind = [pid for pid in children(os.getpid()) if "serve.front" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(behind[0], signal.SIGKILL)

    with pytest.raises(engine.Broken, match="ended 3 times as soon as it was started"):
        running.serve(Service(made()), "127.0.0.1", 0, said=said, workers=2)
    assert capfd.readouterr().err.count("is started again") in (2, 3)  # by how long it lived
