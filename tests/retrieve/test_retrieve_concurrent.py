"""Searches beside a writer see whole items only, and rows that hold items are known from live bits."""

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tigon.retrieve import Category, Index, Number, Schema, col
from tigon.retrieve.index import scheduler, table, update_queue
from tigon.retrieve.index.writer import ItemWriter

SCHEMA = Schema(version=Number(), parity=Category())


@contextmanager
def writing(write):
    """Another thread calls write(2), write(3), …. Yields the versions so far."""
    failed, stop, versions = [], threading.Event(), [1]

    def work():
        try:
            while not stop.is_set():
                versions.append(versions[-1] + 1)
                write(versions[-1])
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield versions
    finally:
        stop.set()
        thread.join()
    assert not failed, failed


@pytest.mark.parametrize("full", [False, True])
def test_searches_beside_a_writer_see_whole_items_of_one_version(full, device):
    """Every component of a row, and its attribute, is its version: a mixture of two would have other sums."""
    dim, items, batch = 32, 200, 64
    index = Index(dim, items if full else 4 * items, "float32", schema=SCHEMA, device=device)

    def write(numbers, version):
        x = torch.full((len(numbers), dim), float(version), device=device)
        parity = np.full(len(numbers), ("even", "odd")[version % 2])
        index.upsert(numbers, x, {"version": np.full(len(numbers), version), "parity": parity})

    write(np.arange(items), 1)
    rng = np.random.default_rng(0)
    queries = torch.eye(dim, device=device)[[0, dim // 2, dim - 1, 1]]
    seen, searches, end = set(), 0, time.monotonic() + 0.7
    with writing(lambda version: write(rng.choice(items, batch, replace=False), version)) as versions:
        while time.monotonic() < end or searches < 20:
            threshold = versions[-1] - 3
            # Of filters that come again the bits are kept, and written beside the searches.
            where = [None, None, col("version") >= threshold, "parity == 'even'"]
            hits = index.search(queries, k=2 * items, where=where)
            alone = index.search(queries[3], k=2 * items, where=where[3])
            ids, scores = hits.ids.tolist(), hits.scores.tolist()
            for row in range(2):
                found = [i for i in ids[row] if i >= 0]
                assert sorted(found) == list(range(items))
            first, second = (dict(zip(i, s, strict=True)) for i, s in zip(ids[:2], scores[:2], strict=True))
            assert first == second
            newest = {i: s for i, s in zip(ids[2], scores[2], strict=True) if i >= 0}
            assert newest == {i: s for i, s in first.items() if s >= threshold and i >= 0}
            even = {i: s for i, s in zip(ids[3], scores[3], strict=True) if i >= 0}
            assert even == {i: s for i, s in first.items() if s % 2 == 0}
            assert not alone.scores[alone.scores > -torch.inf].remainder(2).any()
            seen.add(max(first.values()))
            searches += 1
    assert len(seen) > 3, "the writer wrote nothing while searches ran"
    assert len(index) == items
    assert len(index.table.cache) > 2


def test_a_call_of_several_pieces_becomes_visible_at_once(monkeypatch, device):
    """Every search finds all items in one version, although a call is written piece by piece."""
    dim, items = 16, 300
    monkeypatch.setattr(table, "PIECE", 7 * dim * 4)
    index = Index(dim, items, "float32", device=device)
    index.upsert(np.arange(items), torch.full((items, dim), 1.0, device=device))
    seen, end = set(), time.monotonic() + 0.4
    with writing(
        lambda version: index.upsert(np.arange(items), torch.full((items, dim), float(version), device=device))
    ):
        while time.monotonic() < end or (len(seen) < 3 and time.monotonic() < end + 20):
            hits = index.search(torch.eye(dim, device=device)[:1], k=items + 1)
            found = hits.scores[0, hits.ids[0] >= 0]
            assert len(found) == items
            assert (found == found[0]).all()
            seen.add(found[0].item())
    assert index.table.attributes.counts.items == items


class Together:
    """Threads whose upserts wait for their turn in the order of the calls, and are then made."""

    def __init__(self, index):
        self.index, self.threads, self.errors = index, [], {}
        index.table.scheduler.update_lock.acquire()

    def upsert(self, *arguments):
        number = len(self.threads)

        def call():
            try:
                self.index.upsert(*arguments)
            except Exception as error:
                self.errors[number] = error

        self.threads.append(threading.Thread(target=call))
        self.threads[-1].start()
        while len(self.index.pending.updates) <= number:
            time.sleep(1e-4)

    def made(self):
        """What each call raised, by its number."""
        self.index.table.scheduler.update_lock.release()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()
        assert not self.index.pending.updates
        return self.errors


def counted(monkeypatch):
    """How many calls are written at once, as they are."""
    written, write = [], ItemWriter.write

    def seen(writer, items):
        written.append(len(items.ids))
        write(writer, items)

    monkeypatch.setattr(ItemWriter, "write", seen)
    return written


def test_upserts_that_wait_are_made_as_one_in_their_order(monkeypatch, tmp_path):
    pytest.importorskip("safetensors")
    index = Index(2, 50, "float32", schema=SCHEMA)
    index.save(tmp_path)
    index = Index.open(tmp_path)
    written, known = counted(monkeypatch), {}
    together = Together(index)
    for version in range(1, 9):
        numbers = [version % 3, version, 20 + version]
        table = {"version": [version] * 3, "parity": ["even", "odd", "even"]}
        together.upsert(numbers, torch.full((3, 2), float(version)), table)
        known.update(dict.fromkeys(numbers, 2.0 * version))
    assert not together.made()
    assert written == [len(known)]
    index.close()
    for searched in (index, Index.load(tmp_path)):
        hits = searched.search(torch.ones(1, 2), k=len(known) + 1)
        assert dict(zip(hits.ids[0, :-1].tolist(), hits.scores[0, :-1].tolist(), strict=True)) == known


def test_a_call_that_is_refused_refuses_no_other(monkeypatch):
    """Nor does one that does not fit beside the others, or that is of another form."""
    index = Index(2, 6, "float32")
    index.upsert([0], torch.ones(1, 2))
    written, together = counted(monkeypatch), Together(index)
    together.upsert([1, 2], torch.ones(2, 2))
    together.upsert([2, 3], torch.tensor([[1.0, 1.0], [float("nan"), 1.0]]))
    together.upsert(["four"], torch.ones(1, 2))
    together.upsert([4, 5, 6, 7], torch.ones(4, 2))
    together.upsert(np.array([5, 0]), np.full((2, 2), 3.0))
    together.upsert(7, torch.ones(1, 2))
    errors = together.made()
    said = {number: str(error) for number, error in errors.items()}
    assert set(said) == {1, 2, 3, 5}
    assert "finite, got NaN or infinity for id 3" in said[1]
    assert "ids must be int64" in said[2]
    assert "4 new items do not fit: the index holds 3 of 6" in said[3]
    assert "ids must be a list" in said[5]
    assert written == [2, 2]
    hits = index.search(torch.ones(2), k=6)
    assert dict(zip(hits.ids[0].tolist(), hits.scores[0].tolist(), strict=True)) == {
        0: 6.0, 5: 6.0, 1: 2.0, 2: 2.0, -1: -float("inf")
    }  # fmt: skip


@pytest.mark.parametrize(
    "columns",
    [
        ([2**24 + 2], [0.5]),  # integers and floats: joined, 2**24 + 3 would be rounded as a float is
        (np.array([1], dtype=np.int64), np.array([0.5])),
        ([1], np.array([2])),
    ],
)
def test_columns_of_two_types_are_not_joined(columns, monkeypatch):
    index = Index(2, 6, schema=Schema(x=Number()))
    written, together = counted(monkeypatch), Together(index)
    for i, column in enumerate(columns):
        together.upsert([i], torch.ones(1, 2), {"x": column})
    assert not together.made()
    assert written == [1, 1]


def test_many_calls_are_made_in_parts(monkeypatch):
    monkeypatch.setattr(update_queue, "MOST", 5)
    index = Index(2, 50)
    written, together = counted(monkeypatch), Together(index)
    for start in (0, 2, 4, 6, 20):
        together.upsert(list(range(start, start + (9 if start == 6 else 2))), torch.ones(9 if start == 6 else 2, 2))
    assert not together.made()
    assert written == [4, 2, 9, 2]
    assert len(index) == 17


def test_a_call_that_was_interrupted_leaves_the_others_to_their_threads(monkeypatch):
    index = Index(2, 50)
    together, write = Together(index), ItemWriter.write

    def interrupted(writer, items):
        monkeypatch.setattr(ItemWriter, "write", write)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(ItemWriter, "write", interrupted)
    for i in range(4):
        together.upsert([i, 9], torch.full((2, 2), float(i)))
    assert not together.made()
    assert len(index) == 4  # 9, and all but that of the thread whose turn it was
    assert index.search(torch.ones(2), k=1).scores.item() == 2 * max(i for i in range(4) if i in index)
    assert index.search(torch.ones(2), k=2).ids.sum().item() == 9 + max(i for i in range(4) if i in index)


@pytest.mark.parametrize("journal", [False, True])
def test_threads_that_write_at_random_leave_what_each_wrote_last(journal, tmp_path, device):
    """Each thread has its own ids, and knows what it wrote; a searcher sees only what some thread wrote."""
    pytest.importorskip("safetensors")
    threads, own, dim = 4, 12, 8
    index = Index(dim, threads * own, "float32", schema=SCHEMA, device=device)
    index.save(tmp_path)
    index = Index.open(tmp_path, journal=journal, device=device)
    known, failed = [{} for _ in range(threads)], []

    def work(number):
        rng = np.random.default_rng(number)
        try:
            for version in range(1, 25):
                ids = number * own + rng.choice(own, rng.integers(1, own), replace=False)
                if rng.random() < 0.2:
                    assert index.delete(ids) == len({*ids.tolist()} & {*known[number]})
                    for id in ids.tolist():
                        known[number].pop(id, None)
                    continue
                x = torch.full((len(ids), dim), float(version))
                table = {"version": np.full(len(ids), version), "parity": ["even"] * len(ids)}
                if rng.random() < 0.2:
                    x[-1, 0] = float("nan")
                    with pytest.raises(ValueError, match="finite"):
                        index.upsert(ids, x, table)
                    continue
                index.upsert(ids, x, table)
                known[number].update(dict.fromkeys(ids.tolist(), version))
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    queries = torch.eye(dim, device=device)[[0, dim - 1]]
    while any(worker.is_alive() for worker in workers):
        hits = index.search(queries, k=threads * own, where=[None, "version >= 12"])
        first, late = (
            {i: s for i, s in zip(ids, scores, strict=True) if i >= 0}
            for ids, scores in zip(hits.ids.tolist(), hits.scores.tolist(), strict=True)
        )
        assert late == {i: s for i, s in first.items() if s >= 12}
    for worker in workers:
        worker.join()
    assert not failed, failed
    expected = {id: float(version) for each in known for id, version in each.items()}
    index.close()
    for searched in (index, Index.load(tmp_path)) if journal else (index,):
        hits = searched.search(torch.eye(dim, device=searched.device)[:1], k=threads * own)
        found = zip(hits.ids[0].tolist(), hits.scores[0].tolist(), strict=True)
        assert {i: s for i, s in found if i >= 0} == expected


def test_an_update_waits_for_a_search_between_its_steps(monkeypatch):
    """It does no step while a search is under way on the host, and goes on after its patience."""
    monkeypatch.setattr(scheduler, "STEP", 0.0)
    monkeypatch.setattr(scheduler, "PATIENCE", 30.0)
    index = Index(2, 50, schema=SCHEMA)
    steps, give_way = [], index.table.scheduler.yield_to_searches
    monkeypatch.setattr(index.table.scheduler, "yield_to_searches", lambda: (steps.append(0), give_way()))
    items = [0, 1], torch.ones(2, 2), {"version": [1, 2], "parity": ["even", "odd"]}
    index.upsert(*items)
    alone = len(steps)
    assert alone >= 4
    thread = threading.Thread(target=index.upsert, args=items)
    with index.table.scheduler.read_lock():
        thread.start()
        time.sleep(0.1)
        assert len(steps) == alone + 1
    thread.join(10)
    assert len(steps) > alone + 1
    monkeypatch.setattr(scheduler, "PATIENCE", 1e-3)
    thread = threading.Thread(target=index.upsert, args=items)
    with index.table.scheduler.read_lock():
        thread.start()
        thread.join(10)
        assert not thread.is_alive()


def test_an_update_without_searches_does_not_pause(monkeypatch):
    index = Index(2, 50)
    monkeypatch.setattr(scheduler, "STEP", 0.0)
    monkeypatch.setattr(scheduler.time, "sleep", lambda _: pytest.fail("paused"))
    index.upsert([0], torch.ones(1, 2))
    index.search(torch.ones(2), k=1)
    with pytest.raises(pytest.fail.Exception, match="paused"):
        index.upsert([0], torch.ones(1, 2))
    monkeypatch.setattr(scheduler, "RECENT", 0.0)
    index.upsert([0], torch.ones(1, 2))


def test_the_share_of_a_filter_follows_updates():
    """It is remembered from one search to the next, and no longer."""
    index = Index(2, 50, schema=SCHEMA)
    for version in range(1, 11):
        index.upsert([version], torch.ones(1, 2), {"version": [version], "parity": ["odd" if version % 2 else "even"]})
        assert index.explain("parity == 'odd'").share == index.explain("parity == 'odd'").share == pytest.approx(
            len(range(1, version + 1, 2)) / version
        )  # fmt: skip
    index.delete([1, 3, 5])
    assert index.explain("parity == 'odd'").share == pytest.approx(2 / 7)
