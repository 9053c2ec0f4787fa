"""A server of an index: each client has what it would have alone, limits hold, and what was answered is kept."""

import asyncio
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors import numpy as tensors
from serving import (
    BINARY,
    ITEMS,
    KEY,
    D,
    Held,
    Process,
    X,
    ask,
    binary,
    check_answer,
    made,
    many_calls,
    run_server,
    serve,
    until,
    waiting_queries,
)
from starlette.applications import Starlette

from tigon import retrieve
from tigon.retrieve import Category, Index, Schema
from tigon.retrieve.server.service import Limits, Service

WORKERS = pytest.mark.parametrize("workers", [0, 2])


@WORKERS
@pytest.mark.parametrize("strings", [False, True])
def test_concurrent_requests_have_what_each_has_alone(strings, workers):
    index, calls = made(strings), many_calls()

    async def test(clients, service):
        asked = [ask(clients[i % 2], i, *call) for i, call in enumerate(calls)]
        wrong = [clients[i % 2].post("/search", json={"vectors": X, "where": "colour == 1"}) for i in range(4)]
        answers = await asyncio.gather(*asked, *wrong)
        for answer, call in zip(answers, calls, strict=False):
            check_answer(answer, index, *call)
        for answer in answers[len(calls) :]:
            assert (answer.status_code, "no column 'colour'" in answer.text) == (422, True)
        batch = service.index_backend.admission.metrics.batch
        assert batch._sum.get() > sum(bucket.get() for bucket in batch._buckets), "no more batches than queries"

    serve(test, index, workers)


def test_requests_that_come_together_are_one_search(monkeypatch):
    index = made()
    held = Held(index, monkeypatch)

    async def test(clients, service):
        client = clients[0]
        first = asyncio.ensure_future(client.post("/search", json={"vectors": [[1.0] * D]}))
        await until(lambda: held.sizes == [1])
        others = [asyncio.ensure_future(client.post("/search", json={"vectors": [[1.0] * D] * 2})) for _ in range(6)]
        await until(lambda: waiting_queries(service) == 12)
        held.go.set()
        assert {answer.status_code for answer in await asyncio.gather(first, *others)} == {200}
        assert held.sizes == [1, 8, 4]

    serve(test, index, limits=Limits(max_batch=8))


WRONG = [
    ("/search", b"{", 422, "the body must be JSON: EOF"),
    ("/search", b"[]", 422, "input should be an object"),
    ("/search", b"{}", 422, "a search must have exactly one of vectors, texts and features."),
    ("/search", {"vectors": X, "texts": ["a"]}, 422, "exactly one of"),
    ("/search", {"texts": ["a"]}, 422, "this server has no encoder"),
    ("/search", {"features": [1]}, 422, "this server has no encoder"),
    ("/search", {"vectors": X, "kk": 3}, 422, "kk is not a field of this request."),
    ("/search", {"vectors": [["1"] * D]}, 422, "vectors.0.0: input should be a valid number."),
    ("/search", b'{"vectors": [[NaN]]}', 422, "vectors.0.0: input should be a finite number"),
    ("/search", {"vectors": [[1.0] * 3]}, 422, "vectors must have 16 numbers each, the index's dim, got 3."),
    ("/search", {"vectors": [[1.0] * D, [1.0]]}, 422, "vectors must have 16 numbers each"),
    ("/search", {"vectors": []}, 422, "a request must have 1 to 4 queries, got 0"),
    ("/search", {"vectors": X * 5}, 413, "a request must have 1 to 4 queries, got 5"),
    ("/search", {"vectors": X, "k": 0}, 422, "k must be from 1 to 2,048"),
    ("/search", {"vectors": X, "k": [1, 2]}, 422, "a number for each of 1 queries"),
    ("/search", {"vectors": X, "k": True}, 422, "k.int: input should be a valid integer"),
    ("/search", {"vectors": X, "where": "colour == 'red'"}, 422, "no column 'colour'"),
    ("/search", {"vectors": X, "where": "part <"}, 422, "is not an expression"),
    ("/search", {"vectors": X, "where": [None, None]}, 422, "where must have a filter for each of 1 queries"),
    ("/search", {"vectors": X, "where": "kind == 'z'", "strict": True}, 422, "no item has the value 'z'"),
    ("/upsert", {"ids": [1], "vectors": [[1.0] * 3]}, 422, "vectors must have 16 numbers"),
    ("/upsert", {"ids": [1], "vectors": X * 2, "table": {"part": [1], "kind": ["a"]}}, 422, "a row for each"),
    ("/upsert", {"ids": [1], "vectors": X, "table": {"part": [1]}}, 422, "kind"),
    (
        "/upsert",
        {"ids": [1], "vectors": X, "table": {"part": [1], "kind": ["a"], "x": [1]}},
        422,
        "a column 'x' that the schema lacks",
    ),
    ("/upsert", {"ids": [1], "vectors": X, "table": {"part": [500], "kind": ["a"]}}, 422, "500"),
    ("/upsert", {"ids": ["x"], "vectors": X, "table": {"part": [1], "kind": ["a"]}}, 422, "ids must be int64"),
    ("/upsert", {"ids": [1]}, 422, "vectors must be given"),
    ("/delete", {"ids": ["x"]}, 422, "ids must be int64"),
    ("/delete", {"ids": [1.5]}, 422, "ids"),
    ("/nowhere", {}, 404, "Not Found"),
]


def test_what_is_wrong_is_said_and_changes_nothing():
    index = made()
    before = index.embeddings.clone()

    async def test(clients, service):
        for path, body, status, sentence in WRONG:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await clients[0].post(path, content=content, headers={"content-type": "application/json"})
            assert (answer.status_code, sentence in answer.json()["detail"]) == (status, True), answer.text
            assert (await clients[0].post("/search", json={"vectors": X, "k": 3})).status_code == 200
            assert len(index) == ITEMS
            assert torch.equal(index.embeddings, before)

    serve(test, index, limits=Limits(max_batch=4))


def test_bodies_of_tensors_that_are_none():
    good = binary(np.ones((1, D), np.float32))
    nan = np.ones((2, D), np.float32)
    nan[1, 3] = np.nan
    cases = [
        (b"", "the header should end at byte"),
        (b"\xff" * 20, "the header should end at byte"),
        (good[:-4], "vectors is not inside the body"),
        (tensors.save({"vectors": np.ones((1, D), np.int16)}), "'I16'"),
        (tensors.save({"vectors": np.ones((1, D), np.int32)}), "vectors must be floats"),
        (tensors.save({"queries": np.ones((1, D), np.float32)}), "must be named vectors or features"),
        (binary(nan), "NaN or infinity in query 1"),
        (binary(np.ones((1, D), np.float32), vectors=X), "got both"),
        (tensors.save({"vectors": np.ones((1, D), np.float32)}, metadata={"request": "3"}), "must hold an object"),
    ]

    async def test(clients, service):
        client = clients[0]
        for content, sentence in cases:
            answer = await client.post("/search", content=content, headers=BINARY)
            assert (answer.status_code, sentence in answer.json()["detail"]) == (422, True), answer.text
        assert (await client.post("/search", content=good, headers=BINARY)).status_code == 200

    serve(test)


@WORKERS
def test_updates_are_found_and_deleted(workers):
    index = made()

    async def test(clients, service):
        client = clients[0]
        x = np.eye(D, dtype=np.float32)[:2] * 100
        table = {"part": [7, 8], "kind": ["new", None]}
        body = {"ids": [1000, 1001], "vectors": x.tolist(), "table": table}
        assert (await client.post("/upsert", json=body)).json() == {"upserted": 2, "items": ITEMS + 2}
        ask = {"vectors": x.tolist(), "k": 1, "where": ["kind == 'new'", "kind is null"]}
        assert (await client.post("/search", json=ask)).json()["ids"] == [[1000], [1001]]
        ids = np.array([1002, 1003])
        content = tensors.save({"vectors": 2 * x, "ids": ids}, metadata={"request": json.dumps({"table": table})})
        assert (await client.post("/upsert", content=content, headers=BINARY)).json()["items"] == ITEMS + 4
        assert (await client.post("/search", json={"vectors": x.tolist(), "k": 1})).json()["ids"] == [[1002], [1003]]
        answer = await client.post("/delete", json={"ids": [1002, 1003, 5000]})
        assert answer.json() == {"deleted": 2, "items": ITEMS + 2}
        assert (await client.post("/search", json={"vectors": x.tolist(), "k": 1})).json()["ids"] == [[1000], [1001]]
        many = [f"{i}" for i in range(3)]
        assert (await client.post("/upsert", json={"ids": many, "vectors": X * 3})).status_code == 422
        assert (await client.post("/snapshot")).status_code == 404, "it has no folder"

    serve(test, index, workers)


@pytest.mark.parametrize(
    ("dtype", "metric", "exact", "other"),
    [
        ("float8_e4m3fn", "ip", "float16", "float32"), ("bfloat16", "ip", "float32", "float32"),
        ("float16", "l2", "float32", "float32"),
    ],
)  # fmt: skip
def test_queries_are_in_one_dtype_where_that_holds_their_numbers(dtype, metric, exact, other, monkeypatch):
    index = Index(D, ITEMS, dtype, metric)
    index.upsert(np.arange(ITEMS), torch.randn(ITEMS, D))
    search, asked = index.search, []

    def spied(query, k, where):
        asked.append(str(query.dtype).removeprefix("torch."))
        return search(query, k, where)

    monkeypatch.setattr(index, "search", spied)
    half = np.random.default_rng(3).standard_normal((2, D)).astype(np.float16)
    large = half.astype(np.float32) * 1e6

    async def test(clients, service):
        client = clients[0]
        for query, wanted in ((half, exact), (half.astype(np.float32) / 3, other), (large, other)):
            answers = [
                await client.post("/search", json={"vectors": query.tolist(), "k": 5}),
                await client.post("/search", content=binary(query, k=5), headers=BINARY),
            ]
            assert asked == [wanted] * 2
            for answer in answers:
                check_answer(answer, index, query, 5, None)
            asked.clear()

    serve(test, index)


def test_a_service_warms_up_what_requests_may_ask_for(monkeypatch):
    index = Index(D, ITEMS, "float16", schema=Schema(kind=Category()))
    index.upsert(np.arange(4), torch.randn(4, D), {"kind": ["a", "b", None, "a"]})
    warmup, asked = index.warmup, []

    def spied(query, k, where):
        asked.append((where, query.dtype, len(query), k))
        return warmup(query, k, where)

    monkeypatch.setattr(index, "warmup", spied)
    service = Service(index, limits=Limits(max_batch=32))
    assert service.warmup([5]) > 0
    sizes = [(dtype, count, 5) for dtype in (torch.float16, torch.float32) for count in (1, 16, 32)]
    assert asked[:18] == [(where, *size) for where in (None, "kind is null", "kind is not null") for size in sizes]
    assert [kind[1:] for kind in asked[18:]] == sizes
    assert all(len(kind[0]) == kind[2] for kind in asked[18:])
    service.close()


@WORKERS
def test_texts_go_through_the_encoder(workers):
    def encode(texts):
        assert threading.current_thread().name.startswith("tigon.retrieve.server encoder")
        return torch.stack([torch.full((D,), float(len(text))) for text in texts]).half()

    async def test(clients, service):
        answer = await clients[0].post("/search", json={"texts": ["a", "bcd"], "k": 2})
        check_answer(answer, service.index, torch.tensor([[1.0] * D, [3.0] * D]), 2, None)
        assert (await clients[0].post("/search", json={"texts": ["a"], "k": 0})).status_code == 422
        assert (await clients[1].get("/health")).json()["texts"] is True

    serve(test, workers=workers, encode=encode)


def test_features_go_through_the_encoder(monkeypatch):
    table = torch.randn(10, D, generator=torch.Generator().manual_seed(5))
    given = []

    def encode(features):
        assert not torch.is_grad_enabled()
        given.append(features)
        if isinstance(features, dict):
            return table[features["user"]] * features["weight"][:, None] + len(features.get("words", ()))
        return table[features] if features.dim() == 1 else features @ table[: features.shape[-1]]

    async def test(clients, service):
        client = clients[0]

        async def found(wanted, **features):
            answer = await client.post("/search", json={"k": 3, **features})
            check_answer(answer, service.index, wanted, 3, None)

        await found(table[[3, 1]], features=[3, 1])
        assert given[-1].dtype == torch.int64
        await found(table[:2] / 2, features=[[0.5, 0.0], [0.0, 0.5]])
        assert given[-1].dtype == torch.float32
        named = {"user": [3, 1], "weight": [0.5, 2.0]}
        weighed = table[[3, 1]] * torch.tensor([[0.5], [2.0]])
        await found(weighed, features=named)
        await found(weighed + 2, features={**named, "words": ["a", "b"]})
        assert given[-1]["words"] == ["a", "b"]
        arrays = {"features.user": np.array([3, 1]), "features.weight": np.array([0.5, 2.0], np.float32)}
        for tensors_, wanted in ((arrays, weighed), ({"features": np.array([3, 1])}, table[[3, 1]])):
            body = tensors.save(tensors_, metadata={"request": json.dumps({"k": 3})})
            check_answer(await client.post("/search", content=body, headers=BINARY), service.index, wanted, 3, None)
        for features, status, sentence in [
            ([], 422, "a request must have 1 to 4 queries, got 0"),
            ([1] * 5, 413, "a request must have 1 to 4 queries, got 5"),
            ({"user": [1], "weight": [1.0, 2.0]}, 422, "one value for each query, in each name, got [1, 2] values"),
            ({}, 422, "one value for each query"),
            ([[1, 2], [3]], 422, "features must be numbers, equally long lists of numbers, or texts"),
            ({"user": [None]}, 422, "user must be numbers"),
            ([11], 422, "the encoder rejected the input: IndexError: index 11 is out of bounds"),
            ({"user": [1]}, 422, "the encoder rejected the input: KeyError: 'weight'"),
            ([[[1.0, 0.0]]], 422, "the encoder must return a vector for each of 1 queries, got (1, 1, 16)"),
        ]:
            answer = await client.post("/search", json={"features": features})
            assert (answer.status_code, sentence in answer.json()["detail"]) == (status, True), answer.text
        both = tensors.save({"features": np.array([3]), "vectors": np.ones((1, D), np.float32)})
        assert "exactly one of" in (await client.post("/search", content=both, headers=BINARY)).text

    serve(test, encode=encode, limits=Limits(max_batch=4))


@WORKERS
def test_the_queue_has_an_end_and_who_goes_away_leaves_it(workers, monkeypatch):
    index = made()
    held = Held(index, monkeypatch)

    async def test(clients, service):
        body, queue = {"vectors": X}, service.index_backend.admission.queue
        tasks = [asyncio.ensure_future(clients[0].post("/search", json=body))]
        await until(lambda: held.sizes == [1])
        for waiting in range(1, 7):  # two are lined up behind the search, four wait
            tasks.append(asyncio.ensure_future(clients[waiting % 2].post("/search", json=body)))
            await until(lambda n=waiting: waiting_queries(service) == n)
        refused = await clients[1].post("/search", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "queue limit, 4" in refused.json()["detail"]
        # An ASGI client that goes away: the transport's own clients never do.
        asked, gone = asyncio.Event(), asyncio.Event()

        async def receive():
            if not asked.is_set():
                asked.set()
                return {"type": "http.request", "body": json.dumps(body).encode()}
            await gone.wait()
            return {"type": "http.disconnect"}

        queue.max_queue += 2
        scope = {"type": "http", "path": "/search", "method": "POST", "headers": []}
        leaver = asyncio.ensure_future(clients[0]._transport.app(scope, receive, None))
        tasks.append(asyncio.ensure_future(clients[0].post("/search", json=body)))  # in the same frame
        await until(lambda: queue.queries == 6)
        gone.set()
        await asyncio.wait_for(leaver, 10)
        await until(lambda: queue.queries == 5 or not workers)
        held.go.set()
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
        assert sum(held.sizes) == 8, "who went away is not searched for"
        assert service.index_backend.admission.metrics.dropped._value.get() == 1

    serve(test, index, workers, limits=Limits(max_batch=2, max_queue=4))


@WORKERS
def test_one_that_fails_in_a_search_fails_alone(workers, monkeypatch):
    index = made()
    search = index.search

    def failing(query, k, where):
        if (query == 7).any():
            raise torch.OutOfMemoryError("too large")
        if (query == 8).any():
            raise RuntimeError("a bug")
        return search(query, k, where)

    monkeypatch.setattr(index, "search", failing)

    async def test(clients, service):
        values = (1.0, 7.0, 2.0, 8.0) if workers else (1.0, 7.0, 2.0)  # a bug in one process is the ASGI server's
        bodies = [{"vectors": [[value] * D], "k": 2} for value in values]
        answers = await asyncio.gather(*(clients[0].post("/search", json=body) for body in bodies))
        assert [answer.status_code for answer in answers] == [200, 503, 200, 500][: len(values)]
        assert answers[1].headers["retry-after"] == "1"

    serve(test, index, workers)


def test_workers_refuse_as_one_process_does():
    async def test(clients, service):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(service), base_url="http://tigon") as plain:
            strict = {"vectors": X, "where": "kind == 'z'", "strict": True}
            for path, body in [
                ("/search", {"vectors": X * 5}), ("/search", {"texts": ["a"]}), ("/search", strict), ("/search", "{"),
                ("/upsert", {"ids": [1], "vectors": X, "table": {"part": [1]}}), ("/delete", {"ids": ["x"]}),
                ("/upsert", {"ids": [2**70], "vectors": X, "table": {"part": [1], "kind": ["a"]}}),
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

    serve(test, workers=2, key="secret", limits=Limits(max_body=1000, max_batch=4))


def test_keys_and_bodies():
    async def test(clients, service):
        client = clients[0]
        body = {"vectors": X}
        for headers, status in [
            ({}, 401),
            ({"authorization": "Bearer no"}, 401),
            ({"x-api-key": "séc".encode()}, 401),
            ({"authorization": "Bearer secret"}, 200),
            ({"x-api-key": "secret"}, 200),
        ]:
            answer = await client.post("/search", json=body, headers=headers)
            assert answer.status_code == status, answer.text
            if status == 401:
                assert answer.headers["www-authenticate"] == "Bearer"
            assert (await client.get("/metrics", headers=headers)).status_code == status
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/upsert", json={})).status_code == 401
        large = await client.post("/search", content=b"x" * 1001, headers={"x-api-key": "secret"})
        assert large.status_code == 413
        assert large.json()["detail"].startswith("the body must be at most 1,000 bytes, got 1,001")

        async def pieces():
            for _ in range(20):
                yield b"x" * 100

        for path in ("/search", "/upsert"):  # no length is told
            answer = await client.post(path, content=pieces(), headers={"x-api-key": "secret"})
            assert answer.status_code == 413

    serve(test, key="secret", limits=Limits(max_body=1000))


def test_no_answer_names_a_file_of_the_server(tmp_path, monkeypatch, capsys):
    index = made()
    index.save(tmp_path / "index")
    index = Index.open(tmp_path / "index")

    def full(*arguments, **options):
        raise OSError(28, f"Index: the journal {tmp_path}/index/snapshot-000001/journal could not store a record")

    def forked(*arguments, **options):
        raise ValueError(f"Index: the journal {index.journal.path} belongs to process 1")

    def damaged(*arguments, **options):
        raise ValueError(f"Index.save: {tmp_path}/index is damaged")

    async def test(clients, service):
        client = clients[0]
        for name, path, error, status in [
            ("delete", "/delete", full, 507), ("delete", "/delete", forked, 507), ("save", "/snapshot", full, 507),
            ("save", "/snapshot", damaged, 507),
        ]:  # fmt: skip
            monkeypatch.setattr(index, name, error)
            answer = await client.post(path, json={"ids": [1]})
            assert answer.status_code == status
            assert str(tmp_path) not in answer.text
        log = capsys.readouterr().err
        assert f"{tmp_path}/index is damaged" in log

    serve(test, index, path=tmp_path / "index")


def test_metrics_and_documentation():
    async def test(clients, service):
        client = clients[0]
        for k in (1, 2):
            await client.post("/search", json={"vectors": X * 3, "k": k})
        await client.post("/search", content=b"{")
        await client.get("/elsewhere")
        text = (await client.get("/metrics")).text
        found = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert found["tigon_requests_total", "/search", "200"] == 2
        assert found["tigon_requests_total", "/search", "422"] == 1
        assert found["tigon_requests_total", "other", "404"] == 1
        assert found["tigon_request_seconds_count", "/search"] == 3
        assert found["tigon_queries_total",] == 6
        assert found["tigon_batch_queries_sum",] == 6
        assert found["tigon_items",] == ITEMS
        assert found["tigon_capacity",] == 2 * ITEMS
        assert found["tigon_waiting_queries",] == 0
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert set(paths) == {"/search", "/upsert", "/delete", "/health", "/metrics"}
        schema = paths["/search"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(schema["properties"]) == {"vectors", "texts", "features", "k", "where", "strict"}
        page = await client.get("/docs")
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        assert "src=" not in page.text
        assert "http" not in page.text
        for text in ("POST /search", "POST /upsert", "GET /health", "a filter, such as country == &#x27;us&#x27;"):
            assert text in page.text

    serve(test)


def test_a_service_inside_an_application_answers_as_by_itself():
    async def test(clients, service):
        client = clients[0]
        outer = Starlette()
        outer.mount("/jobs", service)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(outer), base_url="http://outer/jobs") as inner:
            for content in (json.dumps({"vectors": X, "k": 3}), "{", '{"vectors": [[1]]}'):
                answers = [await one.post("/search", content=content, headers=KEY) for one in (client, inner)]
                assert answers[0].content == answers[1].content
                assert answers[0].status_code == answers[1].status_code
            assert (await inner.get("/health")).status_code == 200
            assert (await inner.post("/search", json={"vectors": X})).status_code == 401
            wrong = await inner.get("/search", headers=KEY)
            assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
            wrong = await inner.post("/health", headers=KEY)
            assert (wrong.status_code, set(wrong.headers["allow"].split(", "))) == (405, {"GET", "HEAD"})

    serve(test, key="secret")


# ------------------------------------------------------------------------------------------------------------ processes


def test_what_was_acknowledged_is_there_after_a_kill(tmp_path):
    made().save(tmp_path / "index")
    server = Process(tmp_path / "index")
    try:
        table = {"part": [1], "kind": ["late"]}
        for i in range(20):
            body = {"ids": [5000 + i], "vectors": X, "table": table}
            assert server.client.post("/upsert", json=body).json()["items"] == ITEMS + i + 1
            if i == 9:
                assert server.client.post("/snapshot").json()["items"] == ITEMS + 10
        assert server.client.post("/delete", json={"ids": [0, 5000]}).json()["deleted"] == 2
    finally:
        server.end()
    again = Index.open(tmp_path / "index")
    assert len(again) == ITEMS + 18
    assert all(5000 + i in again for i in range(1, 20))
    assert 0 not in again
    again.close()


@WORKERS
def test_sigterm_answers_what_is_in_flight(workers, tmp_path):
    made().save(tmp_path / "index")
    index = Index.open(tmp_path / "index")
    service = Service(index, key="k", limits=Limits(wait=1.0))  # a search waits: the last had four queries
    late, answers = {"vectors": X, "k": 3}, []

    def act(port):
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"x-api-key": "k"}, timeout=60)
        assert client.post("/search", json={"vectors": X * 4}).status_code == 200
        thread = threading.Thread(target=lambda: answers.append(client.post("/search", json=late)))
        thread.start()
        end = time.monotonic() + 20
        while "tigon_waiting_queries 1.0" not in client.get("/metrics").text:
            assert time.monotonic() < end
        os.kill(os.getpid(), signal.SIGTERM)
        while client.get("/health").json()["status"] != "draining":
            assert time.monotonic() < end
        refused = client.post("/search", json=late)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "shutting down" in refused.json()["detail"]
        thread.join(30)
        client.close()

    run_server(service, act, workers=workers, delay=0.5, is_signaled=True)
    assert [answer.status_code for answer in answers] == [200]
    Index.open(tmp_path / "index").close()  # nobody else has its journal


def test_the_index_imports_nothing_of_a_server():
    folder = Path(retrieve.__file__).parent
    for path in folder.rglob("*.py"):
        if not path.is_relative_to(folder / "server"):
            found = re.findall(r"^ *(?:from|import) (\w+)(?:\.retrieve\.(server))?", path.read_text(), re.MULTILINE)
            names = {name for names in found for name in names}
            assert not names & {"starlette", "uvicorn", "pydantic", "prometheus_client", "uvloop"}, path
            assert "server" not in names or path == folder / "cli" / "serve.py", path


def test_without_the_extra_the_command_names_it(monkeypatch):
    import importlib.util

    from tigon.cli import Problem
    from tigon.retrieve.cli.serve import ServeOptions, serve

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "starlette" else find(name, *rest)
    )
    with pytest.raises(Problem, match=r"tigon retrieve serve needs starlette: pip install '\.\[serve\]' in a checkout"):
        serve(ServeOptions(index=Path("nowhere")))


OPTIONS = {
    "port": 0, "max_body": 1000, "max_batch": 4, "max_queue": 8, "max_connections": 100, "warmup": "10",
    "device": "cpu",
}  # fmt: skip


ENCODERS = """
import torch

def make():
    return torch.nn.Linear(3, 16)

def wide():
    return torch.nn.Linear(4, 16)

class Encoders:
    number = staticmethod(lambda: 3)
    broken = staticmethod(lambda: 1 / 0)
"""


def test_a_retriever_is_served_with_the_encoder_that_is_imported(tmp_path, monkeypatch, capsys):
    from tigon.cli import Problem
    from tigon.retrieve import Retriever
    from tigon.retrieve.cli.serve import ServeOptions, serve
    from tigon.retrieve.server import run as server_run

    torch.manual_seed(0)
    encoder = torch.nn.Linear(3, D)
    Retriever(encoder, made()).save_pretrained(tmp_path / "retriever")
    (tmp_path / "served_encoder.py").write_text(ENCODERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("TIGON_API_KEY", raising=False)

    async def asked(service, body):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(service), base_url="http://localhost") as client:
            return await client.post("/search", json=body), await client.post("/snapshot")

    features = [[1.0, 0.5, -0.5], [0.0, 1.0, 2.0]]

    def run(service, *rest):
        body = {"features": features, "k": 3}
        if service.index_backend.encoder is None:
            body = {"vectors": encoder(torch.tensor(features)).tolist(), "k": 3}
        answer, snapshot = asyncio.run(asked(service, body))
        check_answer(answer, service.index, encoder(torch.tensor(features)).detach(), 3, None)
        assert snapshot.status_code == 200
        service.close()

    monkeypatch.setattr(server_run, "serve", run)
    serve(ServeOptions(index=tmp_path / "retriever", encoder="served_encoder:make", **OPTIONS))
    assert "queries must be vectors" not in capsys.readouterr().err
    serve(ServeOptions(index=tmp_path / "retriever", **OPTIONS))
    assert "no code: pass --encoder module:factory" in capsys.readouterr().err
    Retriever.from_pretrained(tmp_path / "retriever", torch.nn.Linear(3, D))
    for name, sentence in [
        ("served_encoder:none", "--encoder served_encoder:none cannot be imported"),
        ("no_such_module:make", "--encoder no_such_module:make cannot be imported: No module named"),
        ("served_encoder:Encoders.number", "must return a module, a function or an object with encode, got int"),
        ("served_encoder:Encoders.broken", "raised ZeroDivisionError: division by zero"),
        ("served_encoder:wide", "encoder does not match the saved weights"),
        ("served_encoder:__name__", "must be a function without arguments, got str"),
    ]:
        with pytest.raises(Problem, match=sentence):
            serve(ServeOptions(index=tmp_path / "retriever", encoder=name, **OPTIONS))


def test_options_that_are_wrong(tmp_path, monkeypatch):
    from tigon.cli import Problem
    from tigon.retrieve.cli.serve import ServeOptions, serve

    made().save(tmp_path / "index")
    monkeypatch.delenv("TIGON_API_KEY", raising=False)
    for change, sentence in [
        ({"max_queue": 3}, "--max-queue must be at least --max-batch, 4, got 3"),
        ({"api_key": ""}, "--api-key must be printable ASCII"),
        ({"warmup": "x"}, "--warmup must be integers"),
        ({"index": tmp_path / "none"}, "there is no index"),
        ({"index": tmp_path}, "retrieve serve: "),
        ({"host": "192.0.2.1"}, "cannot listen on 192.0.2.1:0"),
        ({"host": ""}, "--host must be an address"),
        ({"host": "a" * 300}, "cannot listen on"),
        ({"wait": float("inf")}, "--wait must be below 1,000,000, got inf"),
        ({"wait": float("nan")}, "--wait must be below 1,000,000, got nan"),
        ({"grace": float("inf")}, "--grace must be below 1,000,000, got inf"),
        ({"shutdown_delay": float("nan")}, "--shutdown-delay must be below 1,000,000, got nan"),
        ({"request_timeout": float("inf")}, "--request-timeout must be below 1,000,000, got inf"),
    ]:
        with pytest.raises(Problem, match=sentence):
            serve(ServeOptions(**{"index": tmp_path / "index", **OPTIONS, **change}))
    again = Index.open(tmp_path / "index")  # each has closed its journal
    again.close()
    held = Index.open(tmp_path / "index")
    with pytest.raises(Problem, match="is open for writing in another index or process"):
        serve(ServeOptions(index=tmp_path / "index", **OPTIONS))
    held.close()
