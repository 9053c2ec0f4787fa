"""Searches of many threads as one: each call has what it would have alone, and no call suffers from another."""

import asyncio
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tigon.retrieve import Batcher, Category, Index, Number, Overloaded, Schema, col
from tigon.retrieve.batch_queue import BatchQueue, PendingSearch

D, ITEMS = 16, 400


def made(device, metric="ip", strings=False):
    draw = np.random.default_rng(0)
    index = Index(D, ITEMS, "float32", metric, Schema(part=Number(0, 99, step=1), kind=Category()), device)
    ids = [f"item {i}" for i in range(ITEMS)] if strings else np.arange(ITEMS)
    table = {"part": draw.integers(0, 100, ITEMS), "kind": draw.choice(["a", "b", "c"], ITEMS)}
    index.upsert(ids, torch.from_numpy(draw.standard_normal((ITEMS, D), dtype=np.float32)), table)
    return index


class Held:
    """An index whose searches wait until they are let go, and what they were asked."""

    def __init__(self, index, monkeypatch):
        self.go, self.begun, self.asked = threading.Event(), threading.Semaphore(0), []
        search = index.search

        def held(query, k, where):
            self.asked.append((len(query), k, where))
            self.begun.release()
            assert self.go.wait(10)
            return search(query, k, where)

        monkeypatch.setattr(index, "search", held)


def same(found, expected):
    """A batch of another size may round the scores of a CPU otherwise."""
    assert found.scores.device.type == "cpu"
    assert found.scores.shape == expected.scores.shape
    assert torch.allclose(found.scores, expected.scores.cpu(), rtol=1e-4, atol=1e-4)
    ids = [hits.ids if isinstance(hits.ids, np.ndarray) else hits.ids.cpu().numpy() for hits in (found, expected)]
    assert np.array_equal(*ids)
    assert torch.equal(found.exact, expected.exact.cpu())


def add(queue, count, now, dtype=np.float32):
    search = PendingSearch(np.zeros((count, D), dtype), list(range(1, count + 1)), [None] * count, Future())
    queue.add(search, now)
    return search


def test_when_a_batch_begins():
    queue = BatchQueue(max_batch=8, wait=1.0, max_queue=20)
    assert queue.delay(0.0) is None
    first = add(queue, 4, now=0.0)
    assert queue.delay(0.0) == 0, "as many as the last batch had: one"
    assert queue.take() == [[first]]
    add(queue, 1, now=10.0)
    assert queue.delay(10.25) == 0.75, "the last batch had four queries"
    assert queue.delay(12.0) == 0
    add(queue, 3, now=10.5)
    assert queue.delay(10.5) == 0
    large = add(queue, 5, now=11.0)
    assert sum(len(search.query) for search in queue.take()[0]) == 4, "nine queries are more than a batch"
    assert queue.take() == [[large]]


def test_searches_of_a_queue_are_refused_cancelled_and_grouped():
    queue = BatchQueue(max_batch=8, wait=1.0, max_queue=9)
    a, b, c, d = add(queue, 2, 0), add(queue, 3, 0, np.float16), add(queue, 1, 0), add(queue, 2, 0)
    with pytest.raises(Overloaded, match=r"8 queries are waiting, and 2 more exceed the queue limit, 9") as error:
        add(queue, 2, 0)
    assert error.value.status == 429
    c.future.cancel()
    assert queue.select(b, [True, False, True])
    assert (b.query.shape, b.k, queue.queries) == ((2, D), [1, 3], 7)
    assert queue.select(d, [False, False])
    assert queue.queries == 5
    assert queue.take() == [[a], [b]], "of one dtype each"
    assert (queue.queries, queue.select(a, [True, False]), len(a.query)) == (0, False, 2)


@pytest.mark.parametrize(("metric", "strings"), [("ip", False), ("l2", True), ("cosine", False)])
def test_calls_of_many_threads_have_what_each_has_alone(metric, strings, device):
    index = made(device, metric, strings)
    draw = torch.Generator().manual_seed(0)
    wheres = [None, "part < 30", "kind == 'a'", col("part") >= 90, "part < 0 or part > 98", "part < 30"]
    calls = []
    for i in range(60):
        B = (1, 1, 3, 0, 2)[i % 5]
        where = [wheres[(i + b) % 6] for b in range(B)] if i % 7 == 6 else wheres[i % 6]
        k = [1 + (i + b) % 9 for b in range(B)] if i % 4 == 3 else (5, 20, 500)[i % 3]
        query = torch.randn(B, D, generator=draw) if i % 5 != 1 else torch.randn(D, generator=draw)
        query = query.half() if i % 11 == 10 else query.double() if i % 11 == 9 else query
        calls.append((query.numpy() if i % 2 else query, k, where))
    with Batcher(index, max_batch=16) as batcher, ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda call: batcher.search(*call), calls))
    for call, hits in zip(calls, found, strict=True):
        same(hits, index.search(*call))


def test_what_waits_becomes_one_search(monkeypatch):
    index = made("cpu")
    held = Held(index, monkeypatch)
    with Batcher(index, max_batch=8, max_queue=100) as batcher:
        first = batcher.submit(torch.ones(D), 3)
        assert held.begun.acquire(timeout=10)
        others = [batcher.submit(torch.ones(2, D), 3, "part < 50") for _ in range(5)]
        assert len(batcher) == 10
        assert not first.done()
        held.go.set()
        assert [len(answer.result(10)) for answer in [first, *others]] == [1, 2, 2, 2, 2, 2]
        assert len(batcher) == 0
    # At most 8 queries; a filter and a k that all share go as one.
    assert held.asked == [(1, 3, None), (8, 3, "part < 50"), (2, 3, "part < 50")]


def test_a_call_waits_for_others_as_long_as_it_says():
    with Batcher(made("cpu"), wait=30.0) as batcher:
        batcher.search(torch.ones(2, D), 3, timeout=10)  # the next search waits for two queries
        first = batcher.submit(torch.ones(D), 3)
        time.sleep(0.1)
        assert not first.done()
        batcher.search(torch.ones(D), 3, timeout=10)
        assert first.done()
        batcher._queue.wait = 0.05
        batcher.search(torch.ones(D), 3, timeout=10)


def test_what_does_not_fit_is_refused_before_it_waits():
    index = made("cpu")
    with Batcher(index, max_batch=4) as batcher:
        x = torch.ones(D)
        for arguments, sentence in [
            ((torch.ones(3),), r"query must be \(queries, 16\)"),
            ((torch.ones(5, D),), r"query must be at most 4 queries \(max_batch\), got 5"),
            ((torch.ones(D).int(),), "query must be floats"),
            ((x, 0), "k must be from 1 to 2,048, got 0"),
            ((x, True), "k must be an integer, or a list with an integer per query, got True"),
            ((x, [1, 2]), "k must be positive integers, one for each of 1 queries"),
            ((x, 3, "colour == 'red'"), "no column 'colour'"),
            ((x, 3, ["part < 3"] * 2), "where must have an expression for each of 1 queries, got 2"),
            ((x, 3, 7), "where must be an expression"),
        ]:
            with pytest.raises(ValueError, match=sentence):
                batcher.submit(*arguments)
        with pytest.raises(ValueError, match="no item has the value 'z'"):
            batcher.search(x, 3, "kind == 'z'", strict=True)
        assert batcher.search(x, 3, "kind == 'z'").ids.tolist() == [[-1] * 3]


def test_a_search_that_fails_fails_alone(monkeypatch):
    index = made("cpu")
    search = index.search

    def failing(query, k, where):
        if (query == 7).any():
            raise torch.OutOfMemoryError("too large")
        return search(query, k, where)

    monkeypatch.setattr(index, "search", failing)
    with Batcher(index, max_batch=64, wait=0.1) as batcher:
        batcher._queue._last = 5
        answers = [batcher.submit(torch.full((1, D), float(value)), 3) for value in (1, 7, 2, 7, 3)]
        for answer, value in zip(answers, (1, 7, 2, 7, 3), strict=True):
            if value == 7:
                with pytest.raises(torch.OutOfMemoryError, match="too large"):
                    answer.result(10)
            else:
                same(answer.result(10), search(torch.full((1, D), float(value)), 3))


def test_a_queue_that_is_full_and_calls_that_take_too_long(monkeypatch):
    index = made("cpu")
    held = Held(index, monkeypatch)
    with Batcher(index, max_batch=2, max_queue=3) as batcher:
        first = batcher.submit(torch.ones(D), 3)
        assert held.begun.acquire(timeout=10)
        with pytest.raises(TimeoutError, match=r"no result within 0\.05 s; 1 queries waiting"):
            batcher.search(torch.zeros(D), 3, timeout=0.05)
        waiting = batcher.submit(torch.ones(2, D), 4)
        with pytest.raises(Overloaded, match=r"3 queries are waiting, and 1 more exceed the queue limit, 3"):
            batcher.search(torch.ones(D), 3)
        held.go.set()
        assert first.result(10).ids.shape == (1, 3)
        assert waiting.result(10).ids.shape == (2, 4)
        batcher.search(torch.ones(D), 3, timeout=10)
    assert [asked[:2] for asked in held.asked] == [(1, 3), (2, 4), (1, 3)], "who gave up is not searched for"


@pytest.mark.parametrize("drain", [True, False])
def test_close(drain, monkeypatch):
    index = made("cpu")
    held = Held(index, monkeypatch)
    batcher = Batcher(index, max_batch=2)
    running = batcher.submit(torch.ones(D), 3)
    assert held.begun.acquire(timeout=10)
    waiting = [batcher.submit(torch.ones(D), 3) for _ in range(5)]
    caller = ThreadPoolExecutor(1).submit(batcher.search, torch.ones(D), 3)
    while len(batcher) < 6:
        time.sleep(1e-3)
    closer = threading.Thread(target=batcher.close, args=(drain,))
    closer.start()
    while not batcher._closed:
        time.sleep(1e-3)
    with pytest.raises(RuntimeError, match="the batcher is closed"):
        batcher.search(torch.ones(D), 3)
    held.go.set()
    closer.join(10)
    assert not closer.is_alive()
    assert not batcher._worker.is_alive()
    assert running.result(0).ids.shape == (1, 3)
    for answer in waiting:
        if drain:
            assert answer.result(0).ids.shape == (1, 3)
        else:
            with pytest.raises(CancelledError):
                answer.result(0)
    if drain:
        assert caller.result(10).ids.shape == (1, 3)
    else:
        with pytest.raises(RuntimeError, match=r"Batcher.search: the batcher was closed before the search began\."):
            caller.result(10)
    batcher.close()


def test_an_event_loop_awaits(device):
    index = made(device)

    async def ask(batcher, value):
        return await asyncio.wrap_future(batcher.submit(torch.full((D,), value), 2))

    async def every():
        with Batcher(index) as batcher:
            return await asyncio.gather(*(ask(batcher, float(value)) for value in range(-9, 10)))

    for value, hits in zip(range(-9, 10), asyncio.run(every()), strict=True):
        same(hits, index.search(torch.full((D,), float(value)), 2))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_batch": 0}, "max_batch must be a positive integer, got 0"),
        ({"max_queue": True}, "max_queue must be a positive integer, got True"),
        ({"max_batch": 10, "max_queue": 9}, "max_queue must be at least max_batch, 10 queries, got 9"),
        ({"wait": -1}, "wait must be in seconds, 0 or more, got -1"),
        ({"wait": float("inf")}, "wait must be in seconds, 0 or more, got inf"),
    ],
)
def test_options_that_are_no_such(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Batcher(made("cpu"), **options)
