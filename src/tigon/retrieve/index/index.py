"""An index: vectors, attributes and ids in memory rows, searched exactly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
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
from tigon.retrieve.index.request import SearchRequest
from tigon.retrieve.index.search import Finish, run_search, warm_kernels
from tigon.retrieve.index.table import RowTable, allocate_table, make_parameter_table, parse_weight
from tigon.retrieve.index.update_queue import UpdateQueue
from tigon.retrieve.index.writer import ItemWriter, pack_ids, pack_items
from tigon.retrieve.links.links import LinkWeights
from tigon.retrieve.storage.journal import Journal


class BaseIndex:
    """The common base of `Index` and `ShardedIndex`: a row table and its writer."""

    table: RowTable
    writer: ItemWriter
    pending: UpdateQueue
    _shards = 1  # ranks that hold items

    @property
    def journal(self) -> Journal | None:
        """The journal that updates are written to; None for an index whose updates stay in memory."""
        return None

    def _check_call(self, name: str, *arguments: Any) -> None:
        """Called with the arguments of a call, before anything else."""

    @property
    def schema(self) -> Schema:
        return self.table.schema

    @property
    def embeddings(self) -> Tensor:
        """(rows, dim), all rows' vectors, including free rows."""
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
        """Limit the memory for cached bitmaps of recurring filters. The cache is emptied.

        Args:
            size: in bytes; a filter takes an eighth of a byte per row. 0: no filter is cached. None: the default, one
                attribute word per row, and at most 1 GiB.

        Raises: ValueError if the size is negative.
        """
        size = None if size is None else read_int("Index.limit_filter_cache", "size", size, least=0)
        self.table.limit_cache(size)

    @torch.no_grad()
    def search(
        self, query: Any, k: int | Sequence[int] = 100, where: Where | Sequence[Where] = None, *,
        strict: bool = False, candidates: int | None = None, links: LinkWeights | None = None, alpha: float = 1.0,
    ) -> Hits:  # fmt: skip
        """Find the k best passing items for each query. All passing items are scored, unless the index has codes
        "sign".

        Args:
            query: (B, dim) floats, or (dim,) for one query.
            k: 1 to 2048, or a list with a k per query.
            where: an expression or its text, None for all items; or a list with a filter per query.
            strict: whether a filter value that no item has is an error. Otherwise the value matches no item.
            candidates: with codes "sign": how many items are scored exactly, those with the best codes; None for five
                times k, and at least 256. 0: all items.
            links: the query links, as `Links.weigh` returns. An item's score is then alpha times its vector score plus
                the weights of the links to its attributes. Codes are not read; all passing items are scored.
            alpha: the weight of vectors beside links; 0 ranks by links alone. Values other than 1 make the query fp32.

        Returns: `Hits`, with −inf and id −1 where fewer than k items pass.
        Raises: ValueError for shapes that do not fit and for filters that do not fit the schema.
        """
        options: dict[str, Any] = {"strict": strict, "candidates": candidates, "links": links, "alpha": alpha}
        with self.table.scheduler.read_lock():  # updates yield while the request is parsed, too
            return self._run(self.parse(query, k, where, **options), None)

    def parse(self, query: Any, k: Any = 100, where: Any = None, **options: Any) -> SearchRequest:
        """Parse the arguments of `search` into a request for `run`."""
        self._check_call("search", query, k, where, *options.values())
        return SearchRequest.parse(self.table, query, k, where, **options)

    @torch.no_grad()
    def run(self, request: SearchRequest, finish: Finish | None = None) -> Hits:
        """Run a parsed request, without checking again.

        Args:
            request: from `parse`.
            finish: maps scores and rows (B, k) to those of the hits, before an update can change a row; `Hits.explain`
                then reports no links.

        Returns: `Hits`.
        """
        with self.table.scheduler.read_lock():
            return self._run(request, finish)

    def _run(self, request: SearchRequest, finish: Finish | None) -> Hits:
        return run_search(self.table, request, finish)

    @torch.no_grad()
    def warmup(self, query: Any, k: int | Sequence[int] = 100, where: Any = None, **options: Any) -> float:
        """Compile the kernels of a search in advance, by running the search.

        A GPU compiles kernels at the first search with a new configuration, which then takes seconds. Kernels depend on
        k, on the query count in classes up to 16, 32, 64, 128 and beyond, on the query dtype, on the item count, and on
        whether there is a filter; another filter with about the same share needs no other kernel.

        Args:
            query: (B, dim) floats, any numbers.
            k, where, options: as in `search`.

        Returns: the elapsed seconds. On a CPU there is nothing to compile.
        Raises: ValueError for an empty index, and for arguments that do not fit the index.
        """
        begun = time.perf_counter()
        if len(self) < self._shards:
            each = f" on each of {self._shards} ranks" if self._shards > 1 else ""
            raise ValueError(
                f"Index.warmup: the index must hold items{each}, since kernels depend on their number, got {len(self)}."
            )
        warm_kernels(self.table, self.parse(query, k, where, **options))
        self.search(query, k, where, **options)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begun

    def explain(
        self, where: Where = None, k: int = 100, queries: int = 1, *, strict: bool = False,
        links: LinkWeights | None = None,
    ) -> Explanation:  # fmt: skip
        """Explain a filter's effect, and the search plan with the filter, without searching.

        Args:
            where: an expression or its text.
            k, queries: the search sizes.
            strict: as in `search`.
            links: for as many queries, as in `search`.

        Returns: an Explanation, to be printed; for a `ShardedIndex` of this rank's items.
        Raises: ValueError for filters that do not fit the schema.
        """
        with self.table.scheduler.update_lock:
            return explain_search(self.table, where, k, queries, strict=strict, links=links)

    # ------------------------------------------------------------------------------------------------------- updates

    @torch.no_grad()
    def upsert(self, ids: Any, embeddings: Any = None, table: Any = None) -> None:
        """Insert items, or replace items with known ids. A call is atomic.

        Concurrent calls from several threads are merged, in order of arrival. Each rank of a `ShardedIndex` passes all
        items, and keeps those in its own rows.

        Args:
            ids: int64 or strings, all of the same type. The last among equal ids wins.
            embeddings: (items, dim) floats, finite. None for an index over a parameter.
            table: the items' attributes: a pyarrow.Table, a pandas or polars DataFrame, or a dict of arrays. None if
                there is no schema.

        Raises: ValueError, naming the first offending id, if anything does not fit; nothing is written then.
        """
        self._check_call("upsert", ids, embeddings, table)
        self.pending.upsert(self.table.scheduler.update_lock, self._write, ids, embeddings, table)

    def _write(self, ids: Any, embeddings: Any, table: Any) -> None:
        items = self.writer.parse(ids, embeddings, table)
        self.writer.reserve(items)
        if self.journal is not None:
            self.journal.append("upsert", pack_items(items))
        self.writer.write(items)

    @torch.no_grad()
    def delete(self, ids: Any) -> int:
        """Delete items.

        Args:
            ids: absent ids are ignored.

        Returns: the number of deleted items.
        Raises: ValueError if the id type is not the index's.
        """
        self._check_call("delete", ids)
        with self.table.scheduler.update_lock:
            read, keys, rows = self.writer.find("Index.delete", ids)
            if len(rows) and self.journal is not None:
                self.journal.append("delete", pack_ids(read))
            self.writer.remove(keys, rows)
            return len(rows)

    @torch.no_grad()
    def grow(self, capacity: int) -> None:
        """Make room for more items. The old buffers are kept until all is copied.

        Args:
            capacity: the new capacity; of a `ShardedIndex` the total over all ranks.

        Raises: ValueError if that is less than the present capacity, or for an index over a parameter.
        """
        capacity = read_int("Index.grow", "capacity", capacity)
        with self.table.scheduler.update_lock:
            before = self.capacity
            self.writer.grow(capacity)
            try:
                if self.journal is not None:
                    self.journal.append("grow", {"capacity": torch.tensor([capacity])})
            except BaseException:
                self.writer.directory.capacity = before  # or the journal would hold more items than its capacity
                raise

    def plan(self, capacity: int | None = None) -> MemoryPlan:
        """Compute the memory for this index, or for the same index with another capacity.

        Args:
            capacity: None for the index's capacity.

        Returns: a MemoryPlan, to be printed.
        """
        return self.writer.plan(self.capacity if capacity is None else read_int("Index.plan", "capacity", capacity))


class Index(BaseIndex, nn.Module):
    """Items with vectors, attributes and ids; a search returns the best items that pass a filter, exactly.

    There is no build step: an item is searchable as soon as it is written. Vectors, attribute words, live bits and ids
    are buffers, so that `state_dict` and `.to` work.

    Args:
        dim: the vector width.
        capacity: the most items.
        dtype: the stored vectors' dtype: "float16", "bfloat16", "float32" or "float8_e4m3fn".
        metric: "ip", the inner product; "cosine", for which vectors are scaled to length 1 when they are written; "l2",
            whose scores are negative squared distances.
        schema: the columns that items can be filtered by. The index keeps a copy.
        device: where the buffers are.
        codes: "int8" also keeps the vectors in 8 bits per number, which a search on a GPU reads first. Results are the
            same. "sign" keeps the signs of random projections, which a search with few queries reads first where that
            is faster: it may then miss some of the best items, as `Hits.exact` reports. `calibrate` measures how many.
        bits: signs per item: 64, 128, 256, 512 or 1024.

    Raises: ValueError for numbers that are not positive, or an unknown dtype, metric, code kind or bit count.
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
        """Build an index over a parameter's rows, such as a trained embedding: no copy, never stale.

        A search reads the present weights. Run optimizer steps and searches on one stream. Between a step and `refresh`
        a search reads the weights alone, not their codes.

        Args:
            parameter: (items, dim), or a torch.nn.Embedding, whose weight is used.
            ids: the rows' ids. None: row numbers.
            table: the rows' attributes, if there is a schema.
            schema: the columns that items can be filtered by.
            metric: "ip" or "l2".
            codes, bits: as in `Index`.

        Returns: an Index whose vectors are the parameter itself, which is not among the index's own parameters.
        Raises: ValueError if the parameter has another shape, or ids or table do not fit.
        """
        weight = parse_weight(parameter, metric)
        format = VectorFormat.parse("Index.over", weight.shape[1], "float32", metric, codes, bits)
        format = replace(format, dtype=weight.dtype)  # any float dtype
        schema = copy_schema("Index.over", schema)
        return cls._from_table(make_parameter_table(weight, format, schema, ids, table))

    @property
    def journal(self) -> Journal | None:
        """See `BaseIndex.journal`."""
        return self.folder.journal

    def __repr__(self) -> str:
        return f"Index({self.extra_repr()})"

    @torch.no_grad()
    def refresh(self) -> None:
        """Encode all vectors again: for an index over a parameter, after optimizer steps.

        Codes are read only while they match the weights; otherwise a search reads the weights, with the same results.
        """
        with self.table.scheduler.update_lock, self.table.scheduler.exclusive(self.device):
            self.table.rebuild_codes()

    @torch.no_grad()
    def calibrate(
        self,
        queries: Any,
        k: int = 100,
        bits: Sequence[int] = (64, 128, 256, 512),
        candidates: Sequence[int] | None = None,
    ) -> Calibration:
        """Measure the recall that codes "sign" would have with these items and queries, whatever codes the index has.

        Codes for each bit count are computed beside the index, in turn. Updates wait meanwhile.

        Args:
            queries: (B, dim) floats, representative queries.
            k: hits per query.
            bits: sign counts.
            candidates: how many items are scored exactly. None: 2, 4 and 10 times k.

        Returns: a Calibration, to be printed: recall@k by bits and candidates, bytes, and the time per query.
        Raises: ValueError for queries, bits and candidates that do not fit, and for an empty index.
        """
        with self.table.scheduler.update_lock:
            return calibrate_codes(self.table, queries, k, bits, candidates)

    # --------------------------------------------------------------------------------------------------------- state

    def save(self, path: str | Path) -> None:
        """Write the index to a folder. A kill at any moment, or a full disk, leaves either the old or the new snapshot.

        Updates wait meanwhile, searches do not.

        Args:
            path: the folder, created if missing. An index in the folder is replaced; other files stay.

        Raises: ValueError if the path is a file, if another index or process has opened the folder or saves to it, or
            for an index over a parameter; OSError if the disk is full.
        """
        if self.table.is_over_parameter:
            raise ValueError("Index.save: an index over a parameter is saved in the model's state_dict.")
        with self.table.scheduler.update_lock:
            snapshot.save_snapshot(self.writer, read_path("Index.save", "path", path), self.folder)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str | None = None) -> Index:
        """Load an index from a folder that `save` wrote, including journal updates.

        Args:
            path: the folder. device: where the buffers will be.

        Returns: the index. Its updates stay in memory.
        Raises: ValueError if there is no index, or if a file is damaged.
        """
        path = read_path("Index.load", "path", path)
        return cls._from_table(snapshot.load_snapshot(path, partial(allocate_items, device=device)).table)

    @classmethod
    def open(
        cls, path: str | Path, journal: bool = True, device: torch.device | str | None = None, *,
        repair: bool = False,
    ) -> Index:  # fmt: skip
        """Load an index and lock its folder, so that no other index or process can open or save to the folder until
        `close`.

        With a journal each update is on disk before it is applied: after a kill or a full disk the index recovers to
        the last complete update. `save` to the same folder starts a new journal.

        Args:
            path: the folder that `save` wrote.
            journal: False for updates that stay in memory until `save`.
            device: where the buffers will be.
            repair: whether a journal with a damaged record is truncated before that record. Otherwise that is an error.

        Returns: the index.
        Raises: ValueError if there is no index, if the index is open already, or if a file is damaged.
        """
        path = read_path("Index.open", "path", path)
        make = partial(allocate_items, device=device)
        writer, folder = snapshot.open_snapshot(path, make, journal=journal, repair=repair)
        index = cls._from_table(writer.table)
        index.folder = folder
        return index

    def close(self) -> None:
        """Close the journal, and unlock the folder. Later updates stay in memory."""
        with self.table.scheduler.update_lock:
            self.folder.close()


def allocate_items(format: VectorFormat, capacity: int, schema: Schema, device: Any) -> ItemWriter:
    """Allocate free rows for an index on one device."""
    return ItemWriter(allocate_table(format, capacity, schema, device))


def copy_schema(name: str, schema: Any) -> Schema:
    """The index's own copy of a schema, whose vocabularies grow with the items."""
    if schema is not None and not isinstance(schema, Schema):
        raise ValueError(f"{name}: schema must be a Schema, got {type(schema).__name__}.")
    return Schema() if schema is None else Schema.from_json(schema.to_json())
