"""An index whose items are sharded over a process group, and searched by all ranks together.

Global row r is row r // ranks on rank r % ranks: items are balanced over the ranks, and local row order follows global
order. Every rank knows all ids and rows, allocates rows as a single-device index does, and keeps vectors, attributes
and codes for its own rows only. So an update needs no communication, and ties are broken as on one device.

A search scans the rank's rows for the whole batch. One all-gather exchanges k scores, rows and ids per query.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tigon.retrieve.arguments import read_int, read_ints, read_path
from tigon.retrieve.filters.expressions import Where
from tigon.retrieve.filters.schema import Schema
from tigon.retrieve.index import sharded_snapshot
from tigon.retrieve.index.explain import Explanation, explain_search
from tigon.retrieve.index.format import Metric, VectorFormat
from tigon.retrieve.index.hits import Hits
from tigon.retrieve.index.index import BaseIndex, copy_schema
from tigon.retrieve.index.memory import MemoryPlan
from tigon.retrieve.index.ranks import Ranks
from tigon.retrieve.index.request import SearchRequest
from tigon.retrieve.index.search import Finish, Searcher, finalize_scores, link_words, make_hits
from tigon.retrieve.index.shard import Shard, allocate_shard
from tigon.retrieve.links.links import LinkWeights
from tigon.retrieve.scan.merge import merge_answers, pack_answer
from tigon.retrieve.transfer import gather_rows

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


class ShardedIndex(BaseIndex):
    """An `Index` whose items are sharded over the GPUs in a mesh. Ids and scores equal those from one index with all
    items; on CPUs the last bits of scores may differ.

    All ranks make the same calls with the same arguments, in the same order, from one thread: each keeps its share of
    the items, and each returns the complete search result. Invalid arguments are refused on all ranks before any
    communication. Whether the ranks' arguments agree is checked only with TIGON_CHECKS=1, which exchanges a hash before
    each call. If a rank fails alone, because its memory is full or its process dies, the others wait until the group's
    timeout.

    Args:
        dim, capacity, dtype, metric, schema: as in `Index`; capacity is the total over all ranks.
        device: for this rank's share. None: the current GPU if the mesh is on GPUs, else the CPU.
        codes: "int8" or None. Codes "sign" are refused: the items they miss would depend on the rank count.
        mesh: a one-dimensional DeviceMesh or a process group. None: all ranks.

    Raises: ValueError as `Index`, and if this process is not in the group.
    """

    writer: Shard

    def __init__(
        self, dim: int, capacity: int, dtype: str | torch.dtype = "float16", metric: Metric = "ip",
        schema: Schema | None = None, device: torch.device | str | None = None, codes: Literal["int8"] | None = None,
        *, mesh: DeviceMesh | dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        if codes not in (None, "int8"):
            raise ValueError(f"ShardedIndex: codes must be None or 'int8', got {codes!r}.")
        format = VectorFormat.parse("ShardedIndex", dim, dtype, metric, codes, 512)
        capacity = read_int("ShardedIndex", "capacity", capacity)
        schema = copy_schema("ShardedIndex", schema)
        self._compose(allocate_shard(format, capacity, schema, Ranks("ShardedIndex", mesh, device)))

    def _compose(self, shard: Shard) -> None:
        self.ranks, self.table, self.writer = shard.ranks, shard.table, shard
        self.searcher = Searcher(shard.table)

    def __reduce__(self) -> Any:
        raise TypeError("ShardedIndex: an index of several processes is not copied or pickled: save and load it.")

    def __repr__(self) -> str:
        return f"ShardedIndex({self.extra_repr()}, rank {self.ranks.own} of {self.ranks.count})"

    # ------------------------------------------------------------------------------------------------------- updates

    @torch.no_grad()
    def upsert(self, ids: Any, embeddings: Any, table: Any = None) -> None:
        """Write items, as `Index.upsert`; each rank keeps the items in its own rows.

        Args:
            ids, embeddings, table: for all items, the same on all ranks.

        Raises: ValueError as `Index.upsert`, on all ranks; nothing is written then.
        """
        self.ranks.check_alike("upsert", ids, embeddings, table)
        with self.table.scheduler.update_lock:
            items = self.writer.parse(ids, embeddings, table)
            self.writer.reserve(items)
            self.writer.write(items)

    @torch.no_grad()
    def delete(self, ids: Any) -> int:
        """Delete items.

        Args:
            ids: the same on all ranks; absent ids are ignored.

        Returns: the number of deleted items.
        Raises: ValueError if the id type is not the index's.
        """
        self.ranks.check_alike("delete", ids)
        with self.table.scheduler.update_lock:
            _, keys, rows = self.writer.find("Index.delete", ids)
            self.writer.remove(keys, rows)
            return len(rows)

    @torch.no_grad()
    def grow(self, capacity: int) -> None:
        """Make room for more items, as `Index.grow`.

        Args:
            capacity: the total over all ranks.

        Raises: ValueError if that is less than the present capacity.
        """
        capacity = read_int("ShardedIndex.grow", "capacity", capacity)
        with self.table.scheduler.update_lock:
            self.writer.grow(capacity)

    def plan(self, capacity: int | None = None) -> MemoryPlan:
        """Compute this rank's memory: its share on the device, and the tables with all ids on the host.

        Args:
            capacity: the total over all ranks; None for the index's capacity.

        Returns: a MemoryPlan, to be printed; its `items` counts all ranks.
        """
        whole = self.writer.plan(self.capacity if capacity is None else read_int("Index.plan", "capacity", capacity))
        parts = ("vectors", "attributes", "ids", "live", "bias", "codes", "filters")
        return whole._replace(**{name: -(-getattr(whole, name) // self.ranks.count) for name in parts})

    # -------------------------------------------------------------------------------------------------------- search

    def parse(self, query: Any, k: Any = 100, where: Any = None, **options: Any) -> SearchRequest:
        """Parse the arguments of `search` into a request for `run`."""
        self.ranks.check_alike("search", query, k, where, *options.values())
        return SearchRequest.parse(self.table, query, k, where, **options)

    def _run(self, request: SearchRequest, finish: Finish | None = None) -> Hits:
        """Run a request, with the same hits on all ranks; finish gets global rows."""
        table, ranks = self.table, self.ranks
        table.cache.prepare(request.filters, table)
        with table.scheduler.search_turn(table.device):
            scores, rows, is_exact = self.searcher.scan(request)
            own_words = None if finish is not None else link_words(table, request)
            answer = pack_answer(scores, rows, table.item_ids, own_words, ranks.own, ranks.count)
            scores, rows, keys, words = merge_answers(ranks.gather(answer))
            merged_rows, merged_keys = rows, keys
            scores, rows = finalize_scores(request, scores, rows)
            if finish is not None:
                scores, rows = finish(scores, rows)
                keys = _look_up_keys(rows, merged_rows, merged_keys)
            if rows is not merged_rows:
                keys = torch.where(rows >= 0, keys, -1)
        hit_words = None if own_words is None else words
        return make_hits(request, scores, keys, is_exact, hit_words, self.writer.directory.ids)

    def gather_vectors(self, rows: Tensor) -> Tensor:
        """Gather the vectors (…, dim) for global rows from their ranks; zeros for negative rows."""
        is_own = (rows >= 0) & (rows % self.ranks.count == self.ranks.own)
        vectors = gather_rows(self.table.embeddings, torch.where(is_own, rows // self.ranks.count, 0))
        # Only the owner contributes nonzero bytes, so the sum is the owner's row.
        return self.ranks.sum(torch.where(is_own[..., None], vectors.view(torch.uint8), 0)).view(self.dtype)

    @torch.no_grad()
    def warmup(
        self, k: int | Sequence[int] = 100, queries: int | Sequence[int] = 1, where: Where | Sequence[Where] = None,
        *, strict: bool = False, dtype: str | torch.dtype | Sequence[str | torch.dtype] | None = None,
    ) -> float:  # fmt: skip
        """Compile search kernels in advance, as `Index.warmup`, and open the ranks' connections.

        Args:
            k, queries, where, strict, dtype: as in `Index.warmup`.

        Returns: the elapsed seconds.
        Raises: ValueError if a rank has no items, and for arguments that do not fit the index.
        """
        begun = time.perf_counter()
        if len(self) < self.ranks.count:
            raise ValueError(f"ShardedIndex.warmup: each of {self.ranks.count} ranks must hold items, got {len(self)}.")
        self.searcher.warm(k, queries, where, strict, dtype)
        for B in read_ints("Index.warmup", "queries", queries):
            for n in read_ints("Index.warmup", "k", k):
                self.search(torch.ones(B, self.dim), n)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begun

    def explain(
        self, where: Where = None, k: int = 100, queries: int = 1, *, strict: bool = False,
        links: LinkWeights | None = None,
    ) -> Explanation:  # fmt: skip
        """Explain a filter's effect on this rank, and the search plan there, without searching.

        Args:
            where, k, queries, strict, links: as in `Index.explain`.

        Returns: an Explanation for this rank's items, to be printed.
        Raises: ValueError for filters that do not fit the schema.
        """
        with self.table.scheduler.update_lock:
            own = explain_search(self.table, where, k, queries, strict=strict, links=links)
        count, rank = self.ranks.count, self.ranks.own
        first = f"{len(self):,} items on {count} ranks, which exchange {16 * k * queries:,} bytes each; rank {rank}:"
        return own._replace(text=f"{first}\n{own.text}")

    # --------------------------------------------------------------------------------------------------------- files

    def save(self, path: str | Path) -> None:
        """Write the index to a folder that all ranks see: a file per rank, and finally the manifest.

        `Index.load` reads the folder, too.

        Args:
            path: the folder, created if missing. An index in the folder is replaced; other files stay.

        Raises: ValueError if the path is a file, or if another index or process has opened the folder or saves to it;
            OSError if a rank cannot write. All ranks raise then, and the previous content is unchanged.
        """
        self.ranks.check_alike("save", str(path))
        with self.table.scheduler.update_lock:
            sharded_snapshot.save_shards(self.writer, read_path("Index.save", "path", path))

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: torch.device | str | None = None,
        *,
        mesh: DeviceMesh | dist.ProcessGroup | None = None,
    ) -> ShardedIndex:
        """Load an index from a folder that `save` wrote with any number of ranks, or `Index.save`.

        Args:
            path: the folder. device, mesh: as in the class.

        Returns: the index.
        Raises: ValueError on all ranks if there is no index, or if a file is damaged, by its checksum.
        """
        index = cls.__new__(cls)
        index._compose(sharded_snapshot.load_shards(read_path("Index.load", "path", path), device, mesh))
        return index


def _look_up_keys(rows: Tensor, known: Tensor, keys: Tensor) -> Tensor:
    """The keys of rows that are among the known rows."""
    ordered, order = known.flatten().sort()
    place = torch.searchsorted(ordered, rows.contiguous()).clamp(max=max(ordered.numel() - 1, 0))
    return keys.flatten()[order[place]] if ordered.numel() else rows
