"""Impressions by row groups: the batches of a table in memory, within a budget, drawn alike when a run goes on."""

import copy
import dataclasses
import gc

import pytest
import torch

pa = pytest.importorskip("pyarrow")
pytest.importorskip("accelerate")
import pyarrow.parquet as parquet  # noqa: E402

from tigon import rank  # noqa: E402
from tigon.rank.data.in_memory import InMemoryImpressions  # noqa: E402
from tigon.rank.data.stream import MIB, count_bytes  # noqa: E402

ROLES = {"request": "request", "user": "user", "item": "item", "time": "time", "labels": ["click"]}


def drawn(requests, seed=0):
    """Impressions of requests of 1 to 5 rows, an hour apart, and events before and between them."""
    draw = torch.Generator().manual_seed(seed)
    request = torch.repeat_interleave(torch.randint(1, 6, (requests,), generator=draw))
    n, e = len(request), requests // 2
    user = torch.randint(0, 9, (requests,), generator=draw)[request]
    item = torch.randint(0, 20, (n,), generator=draw)
    rows = {
        "request": [f"r{r}" for r in request.tolist()], "user": user.tolist(), "item": item.tolist(),
        "time": (request * 3600 + 50_000).tolist(), "price": torch.rand(n, generator=draw).tolist(),
        "tags": [["a", "b"][: i % 3] for i in item.tolist()], "click": (item % 2).tolist(),
        "unread": ["x" * 50] * n,
    }  # fmt: skip
    events = {
        "user": torch.randint(0, 12, (e,), generator=draw).tolist(),
        "item": torch.randint(0, 20, (e,), generator=draw).tolist(),
        "time": (torch.randint(0, requests, (e,), generator=draw) * 3600 + 1000).tolist(),
    }
    return rows, events


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """400 requests in two files, of 12 row groups that cut requests."""
    folder = tmp_path_factory.mktemp("streamed")
    rows, events = drawn(400)
    table = pa.table(rows)
    half = rows["request"].index("r217")
    parquet.write_table(table.slice(0, half), folder / "a.parquet", row_group_size=101)
    parquet.write_table(table.slice(half), folder / "b.parquet", row_group_size=101)
    return folder, rows, events


@pytest.fixture(scope="module")
def both(folder):
    """The table in memory, and by row groups."""
    place, rows, events = folder
    stream = rank.Stream.read(place, history=events, mebibytes=0.03, **ROLES)
    return rank.Impressions.read(rows, history=events, **ROLES), stream


def same(a, b):
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        for one, other in zip(x.values(), y.values(), strict=True) if isinstance(x, dict) else [(x, y)]:
            for left, right in zip(*([t] if isinstance(t, torch.Tensor) or t is None else t for t in (one, other)),
                                   strict=True):  # fmt: skip
                assert left is right or torch.equal(left, right), field.name


def by_request(batches):
    """By the first row of each request: its batch by itself."""
    found = {}
    for batch in batches:
        for r in range(batch.requests):
            rows, events = slice(*batch.offsets[r : r + 2]), slice(*batch.history_offsets[r : r + 2])
            history = batch.history["item"][events].tolist(), batch.age[events].tolist()
            items = batch.items["item"][rows].tolist(), batch.items["price"][rows].tolist()
            found[int(batch.rows[rows][0])] = (*items, batch.labels["click"][rows].tolist(), history)
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_has_the_batches_of_a_table_in_memory(both, device):
    whole, stream = both
    assert stream.schema == whole.schema
    assert (len(stream), stream.rows) == (len(whole), whole.rows)
    expected = whole.batch(torch.arange(len(whole)))
    found = list(stream.batches(requests=64, device=device))
    assert {batch.age.device.type for batch in found} == {batch.rows.device.type for batch in found} == {device}
    assert torch.equal(torch.cat([batch.rows.cpu() for batch in found]), expected.rows)
    assert by_request(found) == by_request([expected])
    assert all(batch.requests <= 64 for batch in found)
    one = next(iter(stream.batches(requests=7)))
    same(one, whole.batch(torch.arange(7)))
    assert by_request(stream.batches(tokens=40, history_max=3)) == by_request(whole.batches(tokens=40, history_max=3))


def test_an_order_is_drawn_among_row_groups_and_can_be_gone_on_with(both):
    whole, stream = both

    def rows(**more):
        options = {"shuffle": torch.Generator().manual_seed(3), **more}
        return [batch.rows for batch in stream.batches(**({"requests": 16} | options))]

    once = rows()
    assert torch.cat(once).sort().values.equal(torch.arange(whole.rows))
    ends = [int(part[0]) for part in once]
    assert ends != sorted(ends)
    assert not torch.cat(rows(shuffle=torch.Generator().manual_seed(4))).equal(torch.cat(once))
    for skip in (1, 9, len(once)):
        again = rows(skip=skip)
        assert len(again) == len(once) - skip
        assert all(a.equal(b) for a, b in zip(once[skip:], again, strict=True))
    many = rows(requests=None, tokens=50)
    assert all(a.equal(b) for a, b in zip(many[5:], rows(requests=None, tokens=50, skip=5), strict=True))


def test_what_is_in_memory_keeps_to_its_budget(both, monkeypatch):
    """Of tensors, by the garbage collector, at every batch; and row groups that are skipped are not read."""
    whole, stream = both
    budget, table = stream.mebibytes * MIB, count_bytes(whole._memory)
    assert table > 2 * budget
    gc.collect()
    before = {id(one) for one in gc.get_objects() if isinstance(one, InMemoryImpressions)}
    most = 0
    for _ in stream.batches(requests=50, shuffle=torch.Generator().manual_seed(0)):
        alive = (one for one in gc.get_objects() if isinstance(one, InMemoryImpressions) and id(one) not in before)
        most = max(most, sum(map(count_bytes, alive)))
    assert 0 < most <= budget
    assert 0 < stream.most <= budget
    loads = []
    load = rank.Stream._load
    monkeypatch.setattr(rank.Stream, "_load", lambda self, pieces: loads.append(pieces) or load(self, pieces))
    every = len(list(stream.batches(requests=50)))
    buffers, loads[:] = len(loads), []
    assert buffers > 4
    assert len(list(stream.batches(requests=50, skip=every - 1))) == 1
    assert len(loads) == 1


@pytest.mark.parametrize("by", ["time", "request"])
def test_a_split_is_that_of_a_table_in_memory(folder, by):
    place, rows, events = folder
    history = events if by == "time" else None
    whole = rank.Impressions.read(rows, history=history, **ROLES)
    stream = rank.Stream.read(place, history=history, mebibytes=0.2, **ROLES)
    options = {"by": by, "fraction": 0.2, "seed": 5}
    for expected, found in zip(whole.split(**options), stream.split(**options), strict=True):
        assert (len(found), found.rows, found.schema) == (len(expected), expected.rows, expected.schema)
        asked = expected.batch(torch.arange(len(expected)))
        assert torch.equal(torch.cat([batch.rows for batch in found.batches(requests=32)]), asked.rows)


def test_a_fit_goes_on_to_the_same_bits(both):
    _, stream = both
    train, held = stream.split(fraction=0.2)
    options = rank.FitOptions(lr=0.03, epochs=2, batch_size=128, history_max=5)
    states = {}

    def keep(progress):
        if progress.evaluation is None:
            states[progress.step] = copy.deepcopy(progress.state())

    def made():
        torch.manual_seed(0)
        return rank.LiGR(train.schema, rank.LiGRConfig(16, 1, 2, setwise_layers=0))

    ranker, again = made(), made()
    fitted = rank.fit(ranker, train, held, options, after=keep)
    assert fitted.history[-1]["auc"] > 0.6
    rank.fit(again, train, held, options, state=states[3])
    for name, value in ranker.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_rows_of_features_alone_are_streamed(tmp_path):
    """Each row is a request of its own, without users, items and times; texts count, too."""
    rows = {
        "color": ["red", "blue", "red"] * 40, "size": [0.5 * n for n in range(120)],
        "click": [n % 2 for n in range(120)],
        "said": ["some words of one who bought it"] * 119 + ["and of another one"],
    }  # fmt: skip
    parquet.write_table(pa.table(rows), tmp_path / "rows.parquet", row_group_size=17)
    stream = rank.Stream.read(tmp_path / "rows.parquet", mebibytes=0.02)
    whole = rank.Impressions.read(rows)
    assert (stream.schema, len(stream)) == (whole.schema, 120)
    expected = whole.batch(torch.arange(120))
    found = list(stream.batches(requests=50, device="cpu"))
    assert torch.equal(torch.cat([batch.rows for batch in found]), expected.rows)
    for name in ("color", "size"):
        assert torch.equal(torch.cat([batch.items[name] for batch in found]), expected.items[name])
    assert count_bytes(whole._memory) > 119 * len(rows["said"][0])
    ranker = rank.LiRank(stream.schema, rank.LiRankConfig(4, layers=1, rank=4, mlp=(8,)))
    fitted = rank.fit(ranker, stream, options=rank.FitOptions(epochs=1, batch_size=40))
    assert fitted.steps == sum(1 for _ in stream.batches(requests=40))


def test_what_cannot_be_streamed_gets_a_sentence(folder, tmp_path):
    place, rows, events = folder
    with pytest.raises(ValueError, match=r"mebibytes must hold two row groups, with up to 1\d\d rows and .* MiB each"):
        rank.Stream.read(place, mebibytes=0.001, **ROLES)
    with pytest.raises(ValueError, match=r"history must be a table of events, not the impressions themselves"):
        rank.Stream.read(place, history="self", **ROLES)
    order = [0, *range(2, len(rows["item"])), 1]
    parquet.write_table(pa.table(rows).take(order), tmp_path / "apart.parquet")
    together = rows["request"][0] == rows["request"][1]
    name = rows["request"][1] if together else rows["request"][0]
    with pytest.raises(ValueError, match=r"a request's rows must be contiguous, but the rows of 'r"):
        rank.Stream.read(tmp_path / "apart.parquet", **ROLES)
    assert name.startswith("r")
    (tmp_path / "rows.csv").write_text("item,click\n1,0\n")
    with pytest.raises(ValueError, match=r"read from files that end in \.parquet or \.pq, got .*rows.csv"):
        rank.Stream.read(tmp_path / "rows.csv")
    with pytest.raises(ValueError, match=r"there is no column 'itm' \(item\).*did you mean 'item'"):
        rank.Stream.read(place, history=events, **{**ROLES, "item": "itm"})
