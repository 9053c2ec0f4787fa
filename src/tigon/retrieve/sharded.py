"""An index whose items are split over the ranks of a group, and searched by all of them together.

Row r of the index is row r // ranks of rank r % ranks: the ranks hold as many items, whatever there are, and the order
of rows on a rank is that of the whole. Every rank knows ids and rows of all items, chooses rows as an index of one
device does, and keeps vectors, attributes and codes of its own rows alone. So an update exchanges nothing, and ties are
broken as on one device.

A search scans the rank's rows for the whole batch. One all-gather hands around k scores, rows and ids a query.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from tigon.data.values import Ints
from tigon.retrieve import coded, linking, searching, sharded_storage, writing
from tigon.retrieve.arguments import read_int, read_ints, read_path
from tigon.retrieve.counts import Counts
from tigon.retrieve.hits import Hits
from tigon.retrieve.ids import Ids, StringIds, find_row
from tigon.retrieve.index import Index, Metric, Where
from tigon.retrieve.links import LinkWeights
from tigon.retrieve.memory import MemoryPlan, dtype_of, plan_memory
from tigon.retrieve.ranks import Ranks
from tigon.retrieve.scan.merge import merged_answers, packed_answer
from tigon.retrieve.schema import Schema
from tigon.retrieve.searching import Explanation
from tigon.retrieve.updates import Rows, spare_rows

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

Finish = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class ShardRows(Rows):
    """Rows of a shard, which the whole index chooses."""

    def show(self, shown: Ints, hidden: Ints) -> None:
        self.end = max(self.end, int(shown.max()) + 1 if len(shown) else 0)
        self.count += len(shown) - len(hidden)


class Shard(Index):
    """The rows of one rank. Its table of ids is that of the whole index, and leads to rows of the whole."""

    def __init__(
        self, dim: int, rows: int, dtype: Any, metric: str, schema: Schema | None, device: Any, codes: str | None
    ) -> None:
        nn.Module.__init__(self)
        self.coding, self.bits = coded.checked("ShardedIndex", codes), 512
        self._prepare(dim, rows, metric, schema, fixed=False)
        dtype = dtype_of("ShardedIndex", dtype)
        self.register_buffer("embeddings", torch.zeros(rows, dim, dtype=dtype, device=device))
        self._buffers_of(rows, device)
        self._restart()

    def _restart(self) -> None:
        self.rows = ShardRows.of(self.live.cpu().numpy(), int(self.item_ids.shape[0]))
        self.counts = Counts(self.schema)
        self.coded_state = ()
        there = np.flatnonzero(self.rows.there())
        if len(there):
            self.counts.add(self.attributes.cpu().numpy()[:, there])


class ShardedIndex:
    """An `Index` whose items are split over the GPUs of a mesh. Ids and scores are those of one index with all items;
    on CPUs the last bits of scores may differ.

    All ranks make the same calls with the same arguments, in the same order, from one thread: each keeps its share of
    what is written, and each has the whole answer of a search. What does not fit is refused on all ranks, before
    anything is exchanged. Whether the arguments are the same is not checked, but with TIGON_CHECKS=1, which exchanges a
    hash of them before each call. A rank that fails alone, because its memory is full or its process dies, lets the
    others wait for as long as the group's timeout.

    Args:
        dim, capacity, dtype, metric, schema: as of an `Index`; capacity is that of all ranks together.
        device: of this rank's share. None: the current GPU if the mesh is one of GPUs, else the CPU.
        codes: "int8" or None. Codes "sign" are refused: which items they miss would depend on the number of ranks.
        mesh: a DeviceMesh of one dimension or a process group. None: all ranks.

    Raises: ValueError as `Index`, and if this process is not in the group.
    """

    fixed = False
    journal = None

    def __init__(
        self,
        dim: int,
        capacity: int,
        dtype: str | torch.dtype = "float16",
        metric: Metric = "ip",
        schema: Schema | None = None,
        device: torch.device | str | None = None,
        codes: Literal["int8"] | None = None,
        *,
        mesh: DeviceMesh | dist.ProcessGroup | None = None,
    ) -> None:
        dim, capacity = read_int("ShardedIndex", "dim", dim), read_int("ShardedIndex", "capacity", capacity)
        if codes not in (None, "int8"):
            raise ValueError(f"ShardedIndex: codes must be None or 'int8', got {codes!r}.")
        self.ranks = Ranks("ShardedIndex", mesh, device)
        self.capacity = capacity
        self.rows = Rows(capacity + spare_rows(capacity))
        rows = -(-self.rows.total // self.ranks.count)
        self.shard = Shard(dim, rows, dtype, metric, schema, self.ranks.device, codes)
        self.dim, self.metric, self.schema, self.turns = dim, metric, self.shard.schema, self.shard.turns

    def __reduce__(self) -> Any:
        raise TypeError("ShardedIndex: an index of several processes is not copied or pickled: save and load it.")

    @property
    def device(self) -> torch.device:
        return self.shard.device

    @property
    def dtype(self) -> torch.dtype:
        return self.shard.dtype

    @property
    def ids(self) -> Ids | None:
        return self.shard.ids

    @ids.setter
    def ids(self, ids: Ids | None) -> None:
        self.shard.ids = ids

    @property
    def counts(self) -> Counts:
        return self.shard.counts

    def __len__(self) -> int:
        return self.rows.count

    def __contains__(self, id: object) -> bool:
        return find_row(self.ids, id) >= 0

    def __repr__(self) -> str:
        kinds = f", {self.schema!r}" if self.schema.words else ""
        kinds += f", {self.shard.coding} codes" if self.shard.coding else ""
        held = f"{len(self):,} of {self.capacity:,} items × {self.dim}, {str(self.dtype)[6:]}, {self.metric!r}"
        return f"ShardedIndex({held}{kinds}, rank {self.ranks.own} of {self.ranks.count})"

    # ------------------------------------------------------------------------------------------------------- updates

    @torch.no_grad()
    def upsert(self, ids: Any, embeddings: Any, table: Any = None) -> None:
        """Write items, as `Index.upsert`; the rank keeps those whose rows are its own.

        Args:
            ids, embeddings, table: of all items, the same on all ranks.

        Raises: ValueError as `Index.upsert`, on all ranks; nothing is written then.
        """
        self.ranks.check_alike("upsert", ids, embeddings, table)
        with self.turns.writing:
            items = writing.prepared(cast(Any, self), ids, embeddings, table)
            writing.reserve(self.shard, items)
            self._write(items)

    def _write(self, items: writing.Prepared) -> None:
        writing.write(cast(Any, self), items, self._place)

    def _place(self, rows: Ints, keys: Ints, vectors: Tensor, words: Ints, replaced: Ints) -> None:
        """Of rows that were chosen for items this rank's, and all of them in what every rank knows."""
        gone = replaced[replaced % self.ranks.count == self.ranks.own] // self.ranks.count
        if writing.is_run(rows):
            first = int((self.ranks.own - rows[0]) % self.ranks.count)
            own: Any = slice(first, None, self.ranks.count)
            taken = vectors[own]
        else:
            own = np.flatnonzero(rows % self.ranks.count == self.ranks.own)
            taken = vectors[torch.from_numpy(own).to(vectors.device)]
        if len(taken):
            writing.place(self.shard, rows[own] // self.ranks.count, keys[own], taken, words[:, own], gone)
        elif len(gone):
            writing.remove(self.shard, gone)
        self._mark(rows, replaced)

    def _mark(self, shown: Ints, hidden: Ints) -> None:
        self.rows.mark(shown, hidden)
        self.rows.show(shown, hidden)

    @torch.no_grad()
    def delete(self, ids: Any) -> int:
        """Take items out.

        Args:
            ids: the same on all ranks; those that are not there are passed over.

        Returns: how many were there.
        Raises: ValueError if ids are of another kind than the index's.
        """
        self.ranks.check_alike("delete", ids)
        with self.turns.writing:
            _, keys, rows = writing.known(cast(Any, self), "Index.delete", ids)
            if len(rows):
                assert self.ids is not None
                self.ids.place(keys, np.full(len(keys), -1))
                own = rows[rows % self.ranks.count == self.ranks.own] // self.ranks.count
                if len(own):
                    writing.remove(self.shard, own)
                self._mark(rows[:0], rows)
            return len(rows)

    @torch.no_grad()
    def grow(self, capacity: int) -> None:
        """Make room for more items, as `Index.grow`.

        Args:
            capacity: of all ranks together.

        Raises: ValueError if that is less than there is room for.
        """
        capacity = read_int("ShardedIndex.grow", "capacity", capacity)
        if capacity < self.capacity:
            least = f"{self.capacity:,}, what there is"
            raise ValueError(f"ShardedIndex.grow: capacity must be at least {least}, got {capacity:,}.")
        with self.turns.writing:
            total = max(capacity + spare_rows(capacity), self.rows.total)
            writing.grow(self.shard, capacity, -(-total // self.ranks.count))
            self.rows.extend(total)
            self.capacity = capacity

    def keep_filters(self, size: int | None = None) -> None:
        """Say how much memory the bits of filters that come again may take on this rank, as `Index.keep_filters`.

        Args:
            size: in bytes; None: the default.

        Raises: ValueError if the size is negative.
        """
        self.shard.keep_filters(size)

    def plan(self, capacity: int | None = None) -> MemoryPlan:
        """The memory of this rank: its share on the device, and the tables of all ids on the host.

        Args:
            capacity: of all ranks together; None for that of the index.

        Returns: a MemoryPlan, to be printed; its `items` are those of all ranks.
        """
        ids = self.ids
        length = len(ids.blob) // max(ids.count, 1) if isinstance(ids, StringIds) else None
        kind = self.dtype, self.metric, self.schema, length, cast(Any, self.shard.coding)
        whole = plan_memory(self.capacity if capacity is None else capacity, self.dim, *kind)
        parts = ("vectors", "attributes", "ids", "live", "bias", "codes", "filters")
        return whole._replace(**{name: -(-getattr(whole, name) // self.ranks.count) for name in parts})

    # -------------------------------------------------------------------------------------------------------- search

    @torch.no_grad()
    def search(
        self,
        query: Any,
        k: int | Sequence[int] = 100,
        where: Where | Sequence[Where] = None,
        *,
        strict: bool = False,
        links: LinkWeights | None = None,
        alpha: float = 1.0,
    ) -> Hits:
        """The k best items that pass, for each query, of all ranks' items; on every rank the same.

        Args:
            query, k, where, strict, links, alpha: as of `Index.search`, the same on all ranks.

        Returns: `Hits`, with −inf and id −1 where fewer than k items pass.
        Raises: ValueError as `Index.search`, on all ranks.
        """
        return self._found(query, k, where, strict, None, links, alpha)

    def _found(
        self, query: Any, k: Any, where: Any, strict: bool, candidates: int | None, links: LinkWeights | None,
        alpha: float, finish: Finish | None = None,
    ) -> Hits:  # fmt: skip
        """As of an Index; finish has rows of the whole."""
        self.ranks.check_alike("search", query, k, where, strict, candidates, links, alpha)
        shard = self.shard
        with self.turns.asking():
            search = searching.asked(shard, query, k, where, strict, candidates, links, alpha)
            shard.kept.prepare(shard, search.filters)
            with self.turns.search(self.device):
                scores, rows, _ = searching.found_rows(shard, search)
                shown = None if search.links is None or finish else shard.attributes[: search.links.tags.words]
                packed = packed_answer(scores, rows, shard.item_ids, shown, self.ranks.own, self.ranks.count)
                scores, rows, ids, words = merged_answers(self.ranks.gathered(packed))
                known = rows, ids
                scores, rows = searching.answered(search, scores, rows)
                if finish is not None:
                    scores, rows = finish(scores, rows)
                    ids = _ids_of(rows, *known)
                if rows is not known[0]:
                    ids = torch.where(rows >= 0, ids, -1)
            exact = torch.ones(len(scores), dtype=torch.bool, device=self.device)
            kept = None if shown is None or search.links is None else linking.HitLinks(search.links, words)
            return Hits(scores, ids, exact, self.ids, kept)

    def vectors_at(self, rows: Tensor) -> Tensor:
        """The vectors (…, dim) of rows of the whole, below 0 zeros, from the ranks that hold them."""
        own = (rows >= 0) & (rows % self.ranks.count == self.ranks.own)
        at = torch.where(own, rows // self.ranks.count, 0)
        bits = self.shard.embeddings.view(torch.uint8)[at]
        bits = torch.where(own[..., None], bits, 0)  # so that a sum of bytes is that of the rank which holds the row
        return self.ranks.added(bits).view(self.dtype)

    @torch.no_grad()
    def warmup(
        self,
        k: int | Sequence[int] = 100,
        queries: int | Sequence[int] = 1,
        where: Where | Sequence[Where] = None,
        *,
        strict: bool = False,
        dtype: str | torch.dtype | Sequence[str | torch.dtype] | None = None,
    ) -> float:
        """Compile the kernels of searches to come, as `Index.warmup`, and open the ranks' connections.

        Args:
            k, queries, where, strict, dtype: as of `Index.warmup`.

        Returns: the seconds that it took.
        Raises: ValueError if a rank has no items, and for what does not fit the index.
        """
        begun = time.perf_counter()
        if len(self) < self.ranks.count:
            raise ValueError(f"ShardedIndex.warmup: each of {self.ranks.count} ranks must hold items, got {len(self)}.")
        searching.warm(self.shard, k, queries, where, strict, dtype)
        for B in read_ints("Index.warmup", "queries", queries):
            for n in read_ints("Index.warmup", "k", k):
                self.search(torch.ones(B, self.dim), n)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begun

    def explain(
        self,
        where: Where = None,
        k: int = 100,
        queries: int = 1,
        *,
        strict: bool = False,
        links: LinkWeights | None = None,
    ) -> Explanation:
        """What a filter does on this rank, and what a search with it costs there. Nothing is searched.

        Args:
            where, k, queries, strict, links: as of `Index.explain`.

        Returns: an Explanation of this rank's items, to be printed.
        Raises: ValueError for filters that do not fit the schema.
        """
        found = self.shard.explain(where, k, queries, strict=strict, links=links)
        own, count = self.ranks.own, self.ranks.count
        first = f"{len(self):,} items on {count} ranks, which exchange {16 * k * queries:,} bytes each; rank {own}:"
        return found._replace(text=f"{first}\n{found.text}")

    # --------------------------------------------------------------------------------------------------------- files

    def save(self, path: str | Path) -> None:
        """Write the index to a folder that all ranks see: a file for each rank, and what makes them count last.

        `Index.load` reads the folder, too.

        Args:
            path: the folder, made if it is not there. An index that it holds is replaced; other files stay.

        Raises: ValueError if the path is a file, or if another index or process has opened it or saves to it; OSError
            if a rank cannot write. All ranks raise then, and what was there is there still.
        """
        self.ranks.check_alike("save", str(path))
        with self.turns.writing:
            sharded_storage.save(self, read_path("Index.save", "path", path))

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: torch.device | str | None = None,
        *,
        mesh: DeviceMesh | dist.ProcessGroup | None = None,
    ) -> ShardedIndex:
        """The index of a folder that `save` wrote with any number of ranks, or `Index.save`.

        Args:
            path: the folder. device, mesh: as of the class.

        Returns: the index.
        Raises: ValueError on all ranks if there is no index, or if a file is damaged, by its checksum.
        """
        return sharded_storage.load(cls, read_path("Index.load", "path", path), device, mesh)


def _ids_of(rows: Tensor, known: Tensor, ids: Tensor) -> Tensor:
    """Ids of rows that are among the known ones."""
    ordered, at = known.flatten().sort()
    place = torch.searchsorted(ordered, rows.contiguous()).clamp(max=max(ordered.numel() - 1, 0))
    return ids.flatten()[at[place]] if ordered.numel() else rows
