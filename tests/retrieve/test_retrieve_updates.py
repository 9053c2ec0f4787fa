"""Updates against a dict, step by step in random order."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tigon.retrieve import Category, Index, Number, Schema, Tags, col
from tigon.retrieve.index import rows as rows_module
from tigon.retrieve.storage import disk

D = 4
IDS = st.lists(st.integers(0, 25), min_size=1, max_size=12)
COUNTRIES = ["us", "ca", None]


class Items(RuleBasedStateMachine):
    """An index and a dict from ids to (version, country, tags)."""

    @initialize(strings=st.booleans(), spare=st.integers(1, 5), metric=st.sampled_from(["ip", "l2"]))
    def begin(self, strings, spare, metric):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(rows_module, "SPARE", spare)
        for name in ("flush", "flush_folder"):  # takes most of the time, and nobody is killed here
            self.patch.setattr(disk, name, lambda *args: None)
        self.folder = Path(tempfile.mkdtemp())
        self.name = (lambda n: f"item {n}") if strings else int
        self.metric, self.version, self.known = metric, 0, {}
        schema = Schema(country=Category(2), tags=Tags(3), version=Number(0, 1000, step=1))
        self.index = Index(D, 20, "float32", metric, schema)
        self.index.save(self.folder)
        self.index = Index.open(self.folder)

    def teardown(self):
        if hasattr(self, "patch"):
            self.index.close()
            shutil.rmtree(self.folder)
            self.patch.undo()

    def items(self, numbers):
        """The next version of some items."""
        versions = [self.version + i + 1 for i in range(len(numbers))]
        self.version += len(numbers)
        countries = [COUNTRIES[(n + v) % 3] for n, v in zip(numbers, versions, strict=True)]
        tags = [[(n + v) % 3] * ((n * v) % 2) for n, v in zip(numbers, versions, strict=True)]
        x = torch.tensor([[float(v)] * D for v in versions])
        return versions, countries, tags, x

    @rule(numbers=IDS)
    def upsert(self, numbers):
        versions, countries, tags, x = self.items(numbers)
        ids = [self.name(n) for n in numbers]
        table = {"country": countries, "tags": tags, "version": versions}
        new = {*ids} - {*self.known}
        if len(self.known) + len(new) > self.index.capacity:
            with pytest.raises(ValueError, match=f"{len(new)} new items do not fit"):
                self.index.upsert(ids, x, table)
            return
        self.index.upsert(ids, x, table)
        self.known.update(zip(ids, zip(versions, countries, tags, strict=True), strict=True))

    @rule(numbers=IDS, bad=st.sampled_from(["vector", "number", "vocabulary"]))
    def refused(self, numbers, bad):
        numbers = [*numbers, 1, 2, 3]
        versions, countries, tags, x = self.items(numbers)
        if bad == "vector":
            x[-1, 1] = float("nan")
        elif bad == "number":
            versions[-1] = 5000
        else:
            countries[-3:] = ["x", "y", "z"]
        with pytest.raises(ValueError, match=r"finite|must be from 0|is full|do not fit"):
            self.index.upsert(
                [self.name(n) for n in numbers], x, {"country": countries, "tags": tags, "version": versions}
            )

    @rule(numbers=IDS)
    def delete(self, numbers):
        ids = [self.name(n) for n in numbers]
        assert self.index.delete(ids) == len({*ids} & {*self.known})
        for id in ids:
            self.known.pop(id, None)

    @precondition(lambda self: self.index.capacity < 60)
    @rule(more=st.integers(0, 40))
    def grow(self, more):
        self.index.grow(self.index.capacity + more)

    @rule()
    def save(self):
        self.index.save(self.folder)

    @rule(saved=st.booleans())
    def open(self, saved):
        if saved:
            self.index.save(self.folder)
        self.index.close()
        self.index = Index.open(self.folder)

    @invariant()
    def a_search_finds_every_item(self):
        self.found(None, lambda *item: True)

    @rule(version=st.integers(0, 60), tag=st.integers(0, 2))
    def search(self, version, tag):
        where = (col("version") >= version) & ~col("tags").has(tag) & ~(col("country") == "us")
        self.found(where, lambda v, c, t: v >= version and tag not in t and c == "ca")

    def found(self, where, passes):
        assert len(self.index) == len(self.known)
        wanted = {id: item[0] for id, item in self.known.items() if passes(*item)}
        hits = self.index.search(torch.ones(1, D), k=30, where=where)
        got = {id: s for id, s in zip(hits.ids[0].tolist(), hits.scores[0].tolist(), strict=True) if s > -float("inf")}
        score = (lambda v: 4.0 * v) if self.metric == "ip" else (lambda v: -4.0 * (v - 1) ** 2)
        expected = sorted(((score(v), id) for id, v in wanted.items()), reverse=True)[:30]
        assert got == {id: s for s, id in expected}
        if where is not None and wanted:
            assert self.index.explain(where).share > 0


Items.TestCase.settings = settings(
    max_examples=20, stateful_step_count=15, deadline=None, derandomize=True, database=None
)
TestItems = Items.TestCase
