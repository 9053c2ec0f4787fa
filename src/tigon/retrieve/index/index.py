"""An index: vectors, attributes and ids in rows of memory, searched exactly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tigon.retrieve.arguments import read_int, read_path
from tigon.retrieve.filters.expressions import Where
from tigon.retrieve.filters.schema import Schema
from tigon.retrieve.ids import find_row
from tigon.retrieve.index import snapshot
from tigon.retrieve.index.calibration import Calibration, calibrate_codes
from tigon.retrieve.index.explain import Explanation, explain_search
from tigon.retrieve.index.format import Codes, Metric, VectorFormat
from tigon.retrieve.index.hits import Hits
from tigon.retrieve.index.memory import MemoryPlan
from tigon.retrieve.index.parameter_index import make_table, parse_weight
from tigon.retrieve.index.request import SearchRequest
from tigon.retrieve.index.search import Finish, Searcher
from tigon.retrieve.index.table import RowTable, allocate_table
from tigon.retrieve.index.update_queue import UpdateQueue
from tigon.retrieve.index.writer import ItemWriter, pack_ids, pack_items
from tigon.retrieve.links.links import LinkWeights
from tigon.retrieve.storage.journal import Journal


class BaseIndex:
    """The part that `Index` and `ShardedIndex` share: an index by its rows, their writer and their searcher."""

    table: RowTable
    writer: ItemWriter
    searcher: Searcher

    @property
    def schema(self) -> Schema:
        return self.table.schema

    @property
    def embeddings(self) -> Tensor:
        """(rows, dim), the vectors of all rows, free rows among them."""
        return self.table.embeddings

    @property
    def dim(self) -> int:
        return self.table.format.dim

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    @property
    def metric(self) -> Metric:
        return self.table.format.metric

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def capacity(self) -> int:
        return self.writer.directory.capacity

    def __len__(self) -> int:
        return len(self.writer.directory)

    def __contains__(self, id: object) -> bool:
        row = find_row(self.writer.directory.ids, id)
        return row >= 0 and self.writer.directory.rows.is_live(row)

    def extra_repr(self) -> str:
        format = self.table.format
        text = f"{len(self):,} of {self.capacity:,} items × {self.dim}, {str(self.dtype)[6:]}, {self.metric!r}"
        text += f", {self.schema!r}" if self.schema.words else ""
        if format.codes is not None:
            text += f", {format.codes} codes" + (f" of {format.bits} bits" if format.codes == "sign" else "")
        return text

    def limit_filter_cache(self, size: int | None = None) -> None:
        """Limit the memory of the cache of filters, which holds the bits of filters that recur. The cache is emptied.

        Args:
            size: in bytes; a filter takes an eighth of a byte a row. 0: no filter is cached. None: the default, the
                size of one word of attributes, and at most 1 GiB.

        Raises: ValueError if the size is negative.
        """
        size = None if size is None else read_int("Index.limit_filter_cache", "size", size, least=0)
        self.table.limit_cache(size)

    @torch.no_grad()
    def search(
        self, query: Any, k: int | Sequence[int] = 100, where: Where | Sequence[Where] = None, *,
        strict: bool = False, candidates: int | None = None, links: LinkWeights | None = None, alpha: float = 1.0,
    ) -> Hits:  # fmt: skip
        """The k best items that pass, for each query. All that pass are scored, unless the index has codes "sign".

        Args:
            query: (B, dim) floats, or (dim,) for one query.
            k: 1 to 2048, or one for each query.
            where: an expression or its text, None for all items; or one for each query.
            strict: whether a value in a filter that no item has is an error. Otherwise it lets no item through.
            candidates: with codes "sign": how many items are scored exactly, those with the best codes; None for five
                times k, and at least 256. 0: all are.
            links: of the queries, what `Links.weigh` returns. The score of an item is then alpha times that of its
                vector plus the weights of the links to its attributes. Codes are not read; all items that pass are
                scored.
            alpha: how much vectors count beside links; 0 ranks by links alone. Other than 1 it makes the query fp32.

        Returns: `Hits`, with −inf and id −1 where fewer than k items pass.
        Raises: ValueError for shapes that do not fit and for filters that do not fit the schema.
        """
        options: dict[str, Any] = {"strict": strict, "candidates": candidates, "links": links, "alpha": alpha}
        with self.table.scheduler.read_lock():  # updates yield while the request is parsed, too
            return self._run(self.parse(query, k, where, **options))

    def parse(self, query: Any, k: Any = 100, where: Any = None, **options: Any) -> SearchRequest:
        """A request for `run`, of the arguments of `search`."""
        return SearchRequest.parse(self.table, query, k, where, **options)

    @torch.no_grad()
    def run(self, request: SearchRequest, finish: Finish | None = None) -> Hits:
        """The hits of a request, which is not checked again.

        Args:
            request: of `parse`.
            finish: a function of scores and rows (B, k) that returns those of the hits, before an update can change a
                row; `Hits.explain` then knows no links.

        Returns: `Hits`.
        """
        with self.table.scheduler.read_lock():
            return self._run(request, finish)

    def _run(self, request: SearchRequest, finish: Finish | None = None) -> Hits:
        return self.searcher.run(request, finish)


class Index(BaseIndex, nn.Module):
    """Items with vectors, attributes and ids, of which a search returns the best that pass a filter, exactly.

    There is nothing to build: an item is found from the moment it is written. Vectors, attribute words, live bits and
    ids are buffers, so that `state_dict` and `.to` work.

    Args:
        dim: the width of the vectors.
        capacity: how many items there is room for.
        dtype: of the stored vectors: "float16", "bfloat16", "float32" or "float8_e4m3fn".
        metric: "ip", the inner product; "cosine", for which vectors are scaled to length 1 when they are written; "l2",
            whose scores are squared distances with a minus.
        schema: the columns that items can be filtered by. The index has a copy.
        device: where the buffers are.
        codes: "int8" keeps the vectors in 8 bits a number as well, which a search on a GPU reads first. It finds the
            same. "sign" keeps the signs of random projections, which a search of few queries reads first where that is
            faster: it may then miss some of the best, which `Hits.exact` says. `calibrate` shows how many.
        bits: how many signs of an item: 64, 128, 256, 512 or 1024.

    Raises: ValueError for numbers that are not positive, an unknown dtype, metric, kind of codes or number of bits.
    """

    def __init__(
        self, dim: int, capacity: int, dtype: str | torch.dtype = "float16", metric: Metric = "ip",
        schema: Schema | None = None, device: torch.device | str | None = None, codes: Codes = None, bits: int = 512,
    ) -> None:  # fmt: skip
        super().__init__()
        format = VectorFormat.parse("Index", dim, dtype, metric, codes, bits)
        capacity = read_int("Index", "capacity", capacity)
        self._compose(allocate_table(format, capacity, copy_schema("Index", schema), device))

    def _compose(self, table: RowTable) -> None:
        self.table = table
        self.writer = ItemWriter(table)
        self.searcher = Searcher(table)
        self.pending = UpdateQueue()
        self.folder = snapshot.OpenFolder()

    @classmethod
    def _from_table(cls, table: RowTable) -> Index:
        index = cls.__new__(cls)
        nn.Module.__init__(index)
        index._compose(table)
        return index

    @classmethod
    def over(
        cls, parameter: Tensor | nn.Embedding, ids: Any = None, table: Any = None, schema: Schema | None = None,
        metric: Literal["ip", "l2"] = "ip", codes: Codes = None, bits: int = 512,
    ) -> Index:  # fmt: skip
        """An index over the rows of a parameter, such as an embedding that is trained: no copy, never stale.

        A search sees the weights of that moment. Optimizer steps and searches belong on one stream. From a step until
        `refresh` a search reads the weights alone, not their codes.

        Args:
            parameter: (items, dim), or a torch.nn.Embedding, whose weight is meant.
            ids: of the rows. None: the numbers of the rows.
            table: the attributes of the rows, if there is a schema.
            schema: the columns that items can be filtered by.
            metric: "ip" or "l2".
            codes, bits: as of an Index.

        Returns: an Index whose vectors are the parameter itself; it is not among the index's own parameters.
        Raises: ValueError if the parameter has another shape, or ids or table do not fit it.
        """
        weight = parse_weight(parameter, metric)
        format = VectorFormat.parse("Index.over", weight.shape[1], "float32", metric, codes, bits)
        format = replace(format, dtype=weight.dtype)  # any float dtype
        return cls._from_table(make_table(weight, format, copy_schema("Index.over", schema), ids, table))

    @property
    def journal(self) -> Journal | None:
        """The journal that updates are written to; None for an index whose updates stay in memory."""
        return self.folder.journal

    def __repr__(self) -> str:
        return f"Index({self.extra_repr()})"

    # ------------------------------------------------------------------------------------------------------- updates

    @torch.no_grad()
    def upsert(self, ids: Any, embeddings: Any = None, table: Any = None) -> None:
        """Write items: new ones, and new versions of those whose ids are there. All of a call, or nothing.

        Calls of several threads that wait for each other are made together, in the order in which they came.

        Args:
            ids: int64 or strings, all of a kind. The last of equal ids counts.
            embeddings: (items, dim) floats, finite. None for an index over a parameter.
            table: the items' attributes: a pyarrow.Table, a pandas or polars DataFrame, or a dict of arrays. None if
                there is no schema.

        Raises: ValueError, with the first id that it is about, if anything does not fit; nothing is written then.
        """
        self.pending.upsert(self.table.scheduler.update_lock, self._write, ids, embeddings, table)

    def _write(self, ids: Any, embeddings: Any, table: Any) -> None:
        items = self.writer.parse(ids, embeddings, table)
        self.writer.reserve(items)
        if self.folder.journal is not None:
            self.folder.journal.append("upsert", pack_items(items))
        self.writer.write(items)

    @torch.no_grad()
    def delete(self, ids: Any) -> int:
        """Take items out.

        Args:
            ids: those that are not there are passed over.

        Returns: how many were there.
        Raises: ValueError if ids are of another kind than the index's.
        """
        with self.table.scheduler.update_lock:
            read, keys, rows = self.writer.find("Index.delete", ids)
            if len(rows) and self.folder.journal is not None:
                self.folder.journal.append("delete", pack_ids(read))
            self.writer.remove(keys, rows)
            return len(rows)

    @torch.no_grad()
    def grow(self, capacity: int) -> None:
        """Make room for more items. Until all is copied, the old buffers are there, too.

        Args:
            capacity: how many items there is room for then.

        Raises: ValueError if that is less than there is room for, or for an index over a parameter.
        """
        if self.table.is_over_parameter:
            raise ValueError("Index.grow: an index over a parameter has its rows; make the parameter larger.")
        capacity = read_int("Index.grow", "capacity", capacity)
        with self.table.scheduler.update_lock:
            before = self.capacity
            self.writer.grow(capacity)
            try:
                if self.folder.journal is not None:
                    self.folder.journal.append("grow", {"capacity": torch.tensor([capacity])})
            except BaseException:
                self.table.directory.capacity = before  # or the journal would hold more items than it knows room for
                raise

    @torch.no_grad()
    def refresh(self) -> None:
        """Make all codes anew from the vectors: for an index over a parameter, after steps that have changed it.

        Only a search with the codes of the weights as they are reads them; a search before reads the weights, and finds
        the same.
        """
        with self.table.scheduler.update_lock, self.table.scheduler.exclusive(self.device):
            self.table.rebuild_codes()

    def plan(self, capacity: int | None = None) -> MemoryPlan:
        """The memory of the index, or of one like it with another capacity.

        Args:
            capacity: None for the capacity of the index.

        Returns: a MemoryPlan, to be printed.
        """
        return self.writer.plan(self.capacity if capacity is None else read_int("Index.plan", "capacity", capacity))

    # -------------------------------------------------------------------------------------------------------- search

    @torch.no_grad()
    def warmup(
        self, k: int | Sequence[int] = 100, queries: int | Sequence[int] = 1, where: Where | Sequence[Where] = None,
        *, strict: bool = False, dtype: str | torch.dtype | Sequence[str | torch.dtype] | None = None,
    ) -> float:  # fmt: skip
        """Compile the kernels of searches to come, by running such searches.

        A GPU compiles kernels at the first search of a kind, which then takes seconds. Kernels depend on k, on the
        number of queries by classes up to 16, 32, 64, 128 and beyond, on their dtype, on how many items there are, and
        on whether there is a filter; another filter of about the same share needs no other kernel.

        Args:
            k, queries: of the searches; or lists, of which all combinations are run.
            where: an expression or its text; None for all items; a list for searches with a filter for each query.
            strict: as in `search`.
            dtype: of the queries, "float16", "bfloat16" or "float32"; or a list. None: the index's, and float32 for one
                of float8_e4m3fn.

        Returns: the seconds that it took. On a CPU there is nothing to compile.
        Raises: ValueError for an empty index, and for arguments that do not fit the index.
        """
        begun = time.perf_counter()
        self.searcher.warm(k, queries, where, strict, dtype)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begun

    @torch.no_grad()
    def calibrate(
        self,
        queries: Any,
        k: int = 100,
        bits: Sequence[int] = (64, 128, 256, 512),
        candidates: Sequence[int] | None = None,
    ) -> Calibration:
        """The recall that codes "sign" would have with these items and queries, whatever codes the index has.

        Codes of each number of bits are made beside the index, one after the other. Updates wait meanwhile.

        Args:
            queries: (B, dim) floats, such as the index will be asked.
            k: of the searches.
            bits: numbers of signs.
            candidates: how many items are scored exactly. None: 2, 4 and 10 times k.

        Returns: a Calibration, to be printed: recall@k by bits and candidates, bytes, and the time of a query.
        Raises: ValueError for queries, bits and candidates that do not fit, and for an empty index.
        """
        with self.table.scheduler.update_lock:
            return calibrate_codes(self.table, queries, k, bits, candidates)

    def explain(
        self, where: Where = None, k: int = 100, queries: int = 1, *, strict: bool = False,
        links: LinkWeights | None = None,
    ) -> Explanation:  # fmt: skip
        """The effect of a filter, and the plan of a search with it. Nothing is searched.

        Args:
            where: an expression or its text.
            k, queries: of the search.
            strict: as in `search`.
            links: of as many queries, as in `search`.

        Returns: an Explanation, to be printed.
        Raises: ValueError for filters that do not fit the schema.
        """
        with self.table.scheduler.update_lock:
            return explain_search(self.table, where, k, queries, strict=strict, links=links)

    # --------------------------------------------------------------------------------------------------------- state

    def save(self, path: str | Path) -> None:
        """Write the index to a folder. A kill at any moment, or a full disk, leaves the old snapshot or the new one.

        Updates wait meanwhile, searches do not.

        Args:
            path: the folder, made if it is not there. An index that it holds is replaced; other files stay.

        Raises: ValueError if the path is a file, if another index or process has opened it or saves to it, or for an
            index over a parameter; OSError if the disk is full.
        """
        if self.table.is_over_parameter:
            raise ValueError("Index.save: an index over a parameter is saved with the model: use its state_dict.")
        with self.table.scheduler.update_lock:
            snapshot.save_snapshot(self.table, self.folder, read_path("Index.save", "path", path))

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str | None = None) -> Index:
        """The index of a folder that `save` wrote, with the updates of its journal.

        Args:
            path: the folder. device: where the buffers will be.

        Returns: the index. Its updates stay in memory.
        Raises: ValueError if there is no index, or if a file is damaged.
        """
        return cls._from_table(snapshot.load_snapshot(read_path("Index.load", "path", path), device))

    @classmethod
    def open(
        cls, path: str | Path, journal: bool = True, device: torch.device | str | None = None, *,
        repair: bool = False,
    ) -> Index:  # fmt: skip
        """The index of a folder, which no other index or process can open or save to until `close`.

        With a journal each update is on the disk before it is made: after a kill or with a full disk the index comes
        back with the last whole update. `save` to the same folder begins a new journal.

        Args:
            path: the folder that `save` wrote.
            journal: False for updates that stay in memory until `save`.
            device: where the buffers will be.
            repair: whether a journal with a damaged record is cut off before it. Otherwise that is an error.

        Returns: the index.
        Raises: ValueError if there is no index, if it is open already, or if a file is damaged.
        """
        path = read_path("Index.open", "path", path)
        table, folder = snapshot.open_snapshot(path, device, journal=journal, repair=repair)
        index = cls._from_table(table)
        index.folder = folder
        return index

    def close(self) -> None:
        """Close the journal, and let others open the folder. Later updates stay in memory."""
        with self.table.scheduler.update_lock:
            self.folder.close()


def copy_schema(name: str, schema: Any) -> Schema:
    """The index's own copy of a schema, whose vocabularies grow with the items."""
    if schema is not None and not isinstance(schema, Schema):
        raise ValueError(f"{name}: schema must be a Schema, got {type(schema).__name__}.")
    return Schema() if schema is None else Schema.from_json(schema.to_json())
