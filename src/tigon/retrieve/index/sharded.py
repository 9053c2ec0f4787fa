"""An index whose items are sharded over a process group, and searched by all ranks together.

Global row r is row r // ranks on rank r % ranks: items are balanced over the ranks, and local row order follows global
order. Every rank knows all ids and rows, allocates rows as a single-device index does, and keeps vectors, attributes
and codes for its own rows only. So an update needs no communication, and ties are broken as on one device.

A search scans the rank's rows for the whole batch. One all-gather exchanges k scores, rows and ids per query.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from tigon.data.values import Ints
from tigon.retrieve.arguments import read_int, read_path
from tigon.retrieve.filters.expressions import Where
from tigon.retrieve.filters.schema import Schema
from tigon.retrieve.index import snapshot
from tigon.retrieve.index.explain import Explanation
from tigon.retrieve.index.format import Metric, VectorFormat
from tigon.retrieve.index.hits import Hits
from tigon.retrieve.index.index import BaseIndex, copy_schema
from tigon.retrieve.index.memory import MemoryPlan
from tigon.retrieve.index.ranks import Ranks
from tigon.retrieve.index.request import SearchRequest
from tigon.retrieve.index.rows import ItemDirectory, spare_rows
from tigon.retrieve.index.search import Finish, finalize_scores, link_words, make_hits, scan_rows
from tigon.retrieve.index.table import RowTable
from tigon.retrieve.index.update_queue import UpdateQueue
from tigon.retrieve.index.writer import ItemWriter
from tigon.retrieve.links.links import LinkWeights
from tigon.retrieve.scan.merge import merge_answers, pack_answer
from tigon.retrieve.transfer import gather_rows, is_run

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


class Shard(ItemWriter):
    """Writes items to a sharded index: chooses global rows, and writes this rank's rows."""

    def __init__(self, table: RowTable, directory: ItemDirectory, ranks: Ranks) -> None:
        super().__init__(table)
        self._whole, self.ranks = directory, ranks

    @property
    def directory(self) -> ItemDirectory:
        """Each item's global row."""
        return self._whole

    def select_own(self, rows: Ints) -> Ints:
        """Select this rank's rows from global rows."""
        own: Ints = rows[rows % self.ranks.count == self.ranks.own] // self.ranks.count
        return own

    def place(self, rows: Ints, keys: Ints, vectors: Tensor, words: Ints, replaced: Ints) -> None:
        hidden = self.select_own(replaced)
        if is_run(rows):
            own: Any = slice(int((self.ranks.own - rows[0]) % self.ranks.count), None, self.ranks.count)
            own_vectors = vectors[own]
        else:
            own = np.flatnonzero(rows % self.ranks.count == self.ranks.own)
            own_vectors = vectors[torch.from_numpy(own).to(vectors.device)]
        if len(own_vectors):
            self.table.write(rows[own] // self.ranks.count, keys[own], own_vectors, words[:, own], hidden)
        elif len(hidden):
            self.table.hide(hidden)
        self._publish(rows, replaced)

    def hide(self, rows: Ints) -> None:
        own = self.select_own(rows)
        if len(own):
            self.table.hide(own)
        self._publish(rows[:0], rows)

    def _publish(self, shown: Ints, hidden: Ints) -> None:
        self._whole.rows.mark(shown, hidden)
        self._whole.rows.publish(shown, hidden)

    def extend(self, rows: int) -> None:
        self.table.grow(-(-rows // self.ranks.count))
        self._whole.rows.extend(rows)


def allocate_shard(format: VectorFormat, capacity: int, schema: Schema, ranks: Ranks) -> Shard:
    """Allocate free rows for this rank's share of the capacity."""
    directory = ItemDirectory(capacity, capacity + spare_rows(capacity))
    own = -(-directory.rows.total // ranks.count)
    return Shard(RowTable(format, ItemDirectory(own, own), schema, ranks.device), directory, ranks)


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
        self.pending, self._shards = UpdateQueue(), shard.ranks.count

    def _check_call(self, name: str, *arguments: Any) -> None:
        self.ranks.check_alike(name, *arguments)

    def __reduce__(self) -> Any:
        raise TypeError("ShardedIndex: an index over several processes cannot be copied or pickled: use save and load.")

    def __repr__(self) -> str:
        return f"ShardedIndex({self.extra_repr()}, rank {self.ranks.own} of {self.ranks.count})"

    def plan(self, capacity: int | None = None) -> MemoryPlan:
        """Compute this rank's memory, as `Index.plan`: its share on the device, and all ids on the host."""
        whole = super().plan(capacity)
        parts = ("vectors", "attributes", "ids", "live", "bias", "codes", "filters")
        return whole._replace(**{name: -(-getattr(whole, name) // self.ranks.count) for name in parts})

    def _run(self, request: SearchRequest, finish: Finish | None) -> Hits:
        """Run a request, with the same hits on all ranks; finish gets global rows."""
        table, ranks = self.table, self.ranks
        table.cache.prepare(request.filters, table)
        with table.scheduler.search_turn(table.device):
            scores, rows, is_exact = scan_rows(table, request)
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

    def explain(
        self, where: Where = None, k: int = 100, queries: int = 1, *, strict: bool = False,
        links: LinkWeights | None = None,
    ) -> Explanation:  # fmt: skip
        """Explain a search on this rank, as `Index.explain`."""
        own = super().explain(where, k, queries, strict=strict, links=links)
        exchanged = f"{self.ranks.count} ranks, which exchange {16 * k * queries:,} bytes each"
        return own._replace(text=f"{len(self):,} items on {exchanged}; rank {self.ranks.own}:\n{own.text}")

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
            snapshot.save_snapshot(
                self.writer, read_path("Index.save", "path", path), snapshot.OpenFolder(), self.ranks
            )

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
        path, ranks = read_path("Index.load", "path", path), Ranks("Index.load", mesh, device)

        def make(format: VectorFormat, capacity: int, schema: Schema) -> Shard:
            if format.codes == "sign":
                raise ValueError(
                    f"Index.load: {path} has codes 'sign', which a ShardedIndex does not support: load the index on "
                    "one device."
                )
            return allocate_shard(format, capacity, schema, ranks)

        index = cls.__new__(cls)
        index._compose(snapshot.load_snapshot(path, make, ranks))  # type: ignore[arg-type]
        return index


def _look_up_keys(rows: Tensor, known: Tensor, keys: Tensor) -> Tensor:
    """The keys of rows that are among the known rows."""
    ordered, order = known.flatten().sort()
    place = torch.searchsorted(ordered, rows.contiguous()).clamp(max=max(ordered.numel() - 1, 0))
    return keys.flatten()[order[place]] if ordered.numel() else rows
