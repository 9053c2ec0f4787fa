"""Searches beside a writer see whole items only, and rows that hold items are known from live bits."""

import threading
import time

import numpy as np
import pytest
import torch

from tigon.retrieve import Category, Index, Number, Schema, col, updates, writing

SCHEMA = Schema(version=Number(), parity=Category())


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
    failed, stop, versions = [], threading.Event(), [1]

    def writer():
        rng = np.random.default_rng(0)
        try:
            while not stop.is_set():
                versions[0] += 1
                write(rng.choice(items, batch, replace=False), versions[0])
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=writer)
    thread.start()
    queries = torch.eye(dim, device=device)[[0, dim // 2, dim - 1, 1]]
    seen, searches, end = set(), 0, time.monotonic() + 1.5
    try:
        while time.monotonic() < end or searches < 20:
            threshold = versions[0] - 3
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
    finally:
        stop.set()
        thread.join()
    assert not failed, failed
    assert len(seen) > 3, "the writer wrote nothing while searches ran"
    assert len(index) == items
    assert len(index.kept) > 2


def test_a_call_of_several_pieces_becomes_visible_at_once(monkeypatch, device):
    """Every search finds all items in one version, although a call is written piece by piece."""
    dim, items = 16, 300
    monkeypatch.setattr(writing, "PIECE", 7 * dim * 4)
    index = Index(dim, items, "float32", device=device)
    index.upsert(np.arange(items), torch.full((items, dim), 1.0, device=device))
    failed, stop = [], threading.Event()

    def writer():
        version = 1
        try:
            while not stop.is_set():
                version += 1
                index.upsert(np.arange(items), torch.full((items, dim), float(version), device=device))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=writer)
    thread.start()
    seen, end = set(), time.monotonic() + 1.0
    try:
        while time.monotonic() < end or len(seen) < 3:
            hits = index.search(torch.eye(dim, device=device)[:1], k=items + 1)
            found = hits.scores[0, hits.ids[0] >= 0]
            assert len(found) == items
            assert (found == found[0]).all()
            seen.add(found[0].item())
            assert not failed, failed
    finally:
        stop.set()
        thread.join()
    assert not failed, failed


def test_rows_come_back_from_live_bits():
    rng = np.random.default_rng(0)
    rows = updates.Rows(100)
    known = set()
    for _ in range(50):
        shown = rows.allocate(int(rng.integers(0, min(10, rows.available() + 1))))
        hidden = np.array(sorted(known)[: int(rng.integers(0, 12))], dtype=np.int64)
        places, bits = rows.show(shown, hidden)
        known = (known | set(shown.tolist())) - set(hidden.tolist())
        assert rows.count == len(known)
        assert set(np.flatnonzero(rows.there()).tolist()) == known
        assert set(places.tolist()) == {int(r) // 32 for r in (*shown, *hidden)}
        assert (rows.live[places].view(np.int32) == bits).all()
        again = updates.Rows.of(rows.live.view(np.int32), 100)
        assert (again.count, set(np.flatnonzero(again.there()).tolist())) == (len(known), known)
        assert again.available() == rows.available() == 100 - len(known)
        assert not set(rows.free.tolist()) & known
