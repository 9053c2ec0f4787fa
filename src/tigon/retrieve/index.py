"""An index: vectors, attributes and ids in buffers of a module, searched exactly."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from tigon.data.values import shorten
from tigon.retrieve import calibrating, coded, gathering, linking, over, searching, storage, writing
from tigon.retrieve.arguments import read_int, read_path
from tigon.retrieve.calibrating import Calibration
from tigon.retrieve.counts import Counts
from tigon.retrieve.folder_lock import FolderLock
from tigon.retrieve.gathering import Waiting
from tigon.retrieve.hits import Hits
from tigon.retrieve.ids import KINDS, Ids, IntIds, StringIds, find_row
from tigon.retrieve.journal import Journal
from tigon.retrieve.kept import Kept
from tigon.retrieve.links import LinkWeights
from tigon.retrieve.memory import MemoryPlan, dtype_of, plan_memory
from tigon.retrieve.schema import Schema
from tigon.retrieve.searching import Compiled, Explanation
from tigon.retrieve.updates import Rows, Turns, spare_rows
from tigon.retrieve.where import Expression

Metric = Literal["ip", "cosine", "l2"]
Where = Expression | str | None
Codes = Literal["int8", "sign"] | None
METRICS = ("ip", "cosine", "l2")


class Index(nn.Module):
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

    embeddings: Tensor
    attributes: Tensor
    live: Tensor
    item_ids: Tensor
    bias: Tensor | None
    codes: Tensor | None
    scales: Tensor | None
    error: Tensor | None
    projection: Tensor | None

    def __init__(
        self,
        dim: int,
        capacity: int,
        dtype: str | torch.dtype = "float16",
        metric: Metric = "ip",
        schema: Schema | None = None,
        device: torch.device | str | None = None,
        codes: Codes = None,
        bits: int = 512,
    ) -> None:
        super().__init__()
        dim, capacity = read_int("Index", "dim", dim), read_int("Index", "capacity", capacity)
        self.bits = read_int("Index", "bits", bits)
        self.coding = coded.checked("Index", codes, self.bits)
        self._prepare(dim, capacity, metric, schema, fixed=False)
        rows = capacity + spare_rows(capacity)
        kind, place = dtype_of("Index", dtype), torch.device(device or "cpu")
        try:
            self.register_buffer("embeddings", torch.zeros(rows, dim, dtype=kind, device=device))
            self._buffers_of(rows, place)
        except (RuntimeError, MemoryError) as error:
            if place.type != "cpu":  # a GPU's error is torch.OutOfMemoryError; a CPU's has no type of its own
                raise
            raise ValueError(
                f"Index: capacity must be as many items as memory holds, got {capacity:,} of width {dim:,}: {error}"
            ) from error
        self._restart()

    def _prepare(self, dim: int, capacity: int, metric: str, schema: Schema | None, fixed: bool) -> None:
        if not isinstance(metric, str) or metric not in METRICS:
            raise ValueError(f"Index: metric must be one of {', '.join(METRICS)}, got {shorten(metric)}.")
        if schema is not None and not isinstance(schema, Schema):
            raise ValueError(f"Index: schema must be a Schema, got {type(schema).__name__}.")
        self.dim, self.capacity, self.fixed = dim, capacity, fixed
        self.metric: Metric = metric  # type: ignore[assignment]
        self.schema = Schema() if schema is None else Schema.from_json(schema.to_json())
        self.ids: Ids | None = None
        self.turns = Turns()
        self.waiting = Waiting()
        self.journal: Journal | None = None
        self.folder_lock: FolderLock | None = None
        self.filters: dict[tuple[str, bool, int], Compiled] = {}
        self.tagged: dict[Any, Any] = {}
        self.kept = Kept()
        self._over: tuple[Tensor, ...] = ()
        self.coded_state: tuple[int, ...] | None = None  # of the parameter that the index is over, as its codes know it
        self.register_load_state_dict_post_hook(_loaded)

    def _buffers_of(self, rows: int, device: torch.device) -> None:
        self.register_buffer("attributes", torch.zeros(self.schema.words, rows, dtype=torch.int64, device=device))
        self.register_buffer("live", torch.zeros((rows + 31) // 32, dtype=torch.int32, device=device))
        self.register_buffer("item_ids", torch.full((rows,), -1, dtype=torch.int64, device=device))
        distances = self.metric == "l2" and not self.fixed
        self.register_buffer("bias", torch.zeros(rows, device=device) if distances else None)
        coded.begin(self, rows, device)

    @classmethod
    def over(
        cls,
        parameter: Tensor | nn.Embedding,
        ids: Any = None,
        table: Any = None,
        schema: Schema | None = None,
        metric: Literal["ip", "l2"] = "ip",
        codes: Codes = None,
        bits: int = 512,
    ) -> Index:
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
        index = cls.__new__(cls)
        nn.Module.__init__(index)
        index.bits = read_int("Index.over", "bits", bits)
        index.coding = coded.checked("Index.over", codes, index.bits)
        over.begin(index, parameter, schema, metric)
        over.fill(index, ids, table)
        return index

    def __getattr__(self, name: str) -> Any:
        if name == "embeddings" and self.__dict__.get("_over"):
            return self.__dict__["_over"][0].detach()
        return super().__getattr__(name)

    @property
    def device(self) -> torch.device:
        return self.live.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embeddings.dtype

    def __len__(self) -> int:
        return self.rows.count

    def __contains__(self, id: object) -> bool:
        row = find_row(self.ids, id)
        return row >= 0 and bool(self.rows.live[row >> 5] >> np.uint32(row & 31) & np.uint32(1))

    def extra_repr(self) -> str:
        kinds = f", {self.schema!r}" if self.schema.words else ""
        bits = f" of {self.bits} bits" if self.coding == "sign" else ""
        kinds += f", {self.coding} codes{bits}" if self.coding is not None else ""
        return f"{len(self):,} of {self.capacity:,} items × {self.dim}, {str(self.dtype)[6:]}, {self.metric!r}{kinds}"

    # ------------------------------------------------------------------------------------------------------- updates

    @torch.no_grad()
    def upsert(self, ids: Any, embeddings: Any = None, table: Any = None) -> None:
        """Write items: new ones, and new versions of those whose ids are there. All of a call, or nothing.

        Calls of several threads that wait for each other are made together, in the order in which they came.

        Args:
            ids: int64 or strings, all of a kind. Of equal ids the last counts.
            embeddings: (items, dim) floats, finite. None for an index over a parameter.
            table: the items' attributes: a pyarrow.Table, a pandas or polars DataFrame, or a dict of arrays. None if
                there is no schema.

        Raises: ValueError, with the first id that it is about, if anything does not fit; nothing is written then.
        """
        gathering.upsert(self, ids, embeddings, table)

    @torch.no_grad()
    def delete(self, ids: Any) -> int:
        """Take items out.

        Args:
            ids: those that are not there are passed over.

        Returns: how many were there.
        Raises: ValueError if ids are of another kind than the index's.
        """
        with self.turns.writing:
            read, keys, rows = writing.known(self, "Index.delete", ids)
            if len(rows):
                if self.journal is not None:
                    self.journal.delete(read)
                if not self.fixed:
                    self.ids.place(keys, np.full(len(keys), -1))  # type: ignore[union-attr]
                writing.remove(self, rows)
            return len(rows)

    @torch.no_grad()
    def grow(self, capacity: int) -> None:
        """Make room for more items. Until all is copied, the old buffers are there, too.

        Args:
            capacity: how many items there is room for then.

        Raises: ValueError if that is less than there is room for, or for an index over a parameter.
        """
        if self.fixed:
            raise ValueError("Index.grow: an index over a parameter has its rows; make the parameter larger.")
        capacity = read_int("Index.grow", "capacity", capacity)
        if capacity < self.capacity:
            raise ValueError(
                f"Index.grow: capacity must be at least {self.capacity:,}, what there is, got {capacity:,}."
            )
        with self.turns.writing:
            before = self.capacity
            writing.grow(self, capacity)
            try:
                if self.journal is not None:
                    self.journal.grow(capacity)
            except BaseException:
                self.capacity = before  # or the journal would hold more items than it knows room for
                raise

    @torch.no_grad()
    def refresh(self) -> None:
        """Make all codes anew from the vectors: for an index over a parameter, after steps that have changed it.

        Only a search with the codes of the weights as they are reads them; a search before reads the weights, and finds
        the same.
        """
        with self.turns.writing, self.turns.switch(self.device):
            coded.renew(self)

    def keep_filters(self, size: int | None = None) -> None:
        """Say how much memory the bits of filters that come again may take. Those that are kept are given up.

        Args:
            size: in bytes; a filter takes an eighth of a byte a row. 0: none are kept. None: the default, what one word
                of attributes takes, and at most 1 GiB.

        Raises: ValueError if the size is negative.
        """
        size = None if size is None else read_int("Index.keep_filters", "size", size, least=0)
        with self.turns.writing:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            with self.turns.lock:
                self.kept.limit = size
                self.kept.clear()

    def plan(self, capacity: int | None = None) -> MemoryPlan:
        """The memory of the index, or of one like it with another capacity.

        Args:
            capacity: None for that of the index.

        Returns: a MemoryPlan, to be printed.
        """
        length = None
        if isinstance(self.ids, StringIds):
            length = len(self.ids.blob) // max(self.ids.count, 1)
        codes: Any = self.coding
        kind = self.dtype, self.metric, self.schema, length, codes, self.bits
        return plan_memory(self.capacity if capacity is None else capacity, self.dim, *kind)

    # -------------------------------------------------------------------------------------------------------- search

    @torch.no_grad()
    def search(
        self,
        query: Any,
        k: int | Sequence[int] = 100,
        where: Where | Sequence[Where] = None,
        *,
        strict: bool = False,
        candidates: int | None = None,
        links: LinkWeights | None = None,
        alpha: float = 1.0,
    ) -> Hits:
        """The k best items that pass, for each query. All that pass are scored, unless the index has codes "sign".

        Args:
            query: (B, dim) floats, or (dim,) for one query.
            k: 1 to 2048, or one for each query.
            where: an expression or its text, None for all items; or one for each query.
            strict: whether a value in a filter that no item has is an error. Otherwise it lets no item through.
            candidates: with codes "sign": how many items are scored exactly, those with the best codes; None for five
                times k, and at least 256. 0: all are.
            links: of the queries, what `Links.of` returns. The score of an item is then alpha times that of the vectors
                plus the weights of the links to its attributes. Codes are not read, and all that pass are scored.
            alpha: how much vectors count beside links; 0 ranks by links alone. Other than 1 it makes the query fp32.

        Returns: `Hits`, with −inf and id −1 where fewer than k items pass.
        Raises: ValueError for shapes that do not fit and for filters that do not fit the schema.
        """
        return self._found(query, k, where, strict, candidates, links, alpha)

    def _found(
        self, query: Any, k: Any, where: Any, strict: bool, candidates: int | None, links: LinkWeights | None,
        alpha: float, finish: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> Hits:  # fmt: skip
        """A search. finish: makes scores and rows of the answer from those found, before an update can change a row."""
        with self.turns.asking():
            search = searching.asked(self, query, k, where, strict, candidates, links, alpha)
            self.kept.prepare(self, search.filters)
            with self.turns.search(self.device):
                scores, rows, all_scored = searching.found_rows(self, search)
                scores, rows = searching.answered(search, scores, rows)
                if finish is not None:
                    scores, rows = finish(scores, rows)
                ids = torch.where(rows >= 0, self.item_ids[rows.clamp(min=0)], -1)
                kept = linking.kept(self, search.links, rows) if finish is None else None
            exact = torch.full((len(scores),), all_scored, device=self.device)
            return Hits(scores, ids, exact, self.ids, kept)

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
        Raises: ValueError for an empty index, and for what does not fit it.
        """
        begun = time.perf_counter()
        searching.warm(self, k, queries, where, strict, dtype)
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
        """What codes "sign" would find of the exact answers, with these items and queries, whatever codes there are.

        Codes of each number of bits are made beside the index, one after the other. Updates wait meanwhile.

        Args:
            queries: (B, dim) floats, such as the index will be asked.
            k: of the searches.
            bits: numbers of signs.
            candidates: how many items are scored exactly. None: 2, 4 and 10 times k.

        Returns: a Calibration, to be printed: recall@k by bits and candidates, bytes, and the time of a query.
        Raises: ValueError for queries, bits and candidates that do not fit, and for an empty index.
        """
        with self.turns.writing:
            return calibrating.calibrated(self, queries, k, bits, candidates)

    def explain(
        self,
        where: Where = None,
        k: int = 100,
        queries: int = 1,
        *,
        strict: bool = False,
        links: LinkWeights | None = None,
    ) -> Explanation:
        """What a filter does, and what a search with it costs: the share that passes and the plan. Nothing is searched.

        On a GPU also the time of the plan's bytes or products, at rates that the first call measures.

        Args:
            where: an expression or its text.
            k, queries: of the search.
            strict: as in `search`.
            links: of as many queries, as in `search`.

        Returns: an Explanation, to be printed.
        Raises: ValueError for filters that do not fit the schema.
        """
        with self.turns.writing:
            self.counts.settle(wait=True)
            return searching.explained(self, where, k, queries, strict, links)

    # --------------------------------------------------------------------------------------------------------- state

    def save(self, path: str | Path) -> None:
        """Write the index to a folder. A kill at any moment, or a full disk, leaves what was there or all of this.

        Updates wait meanwhile, searches do not.

        Args:
            path: the folder, made if it is not there. An index that it holds is replaced; other files stay.

        Raises: ValueError if the path is a file, if another index or process has opened it or saves to it, or for an
            index over a parameter; OSError if the disk is full.
        """
        if self.fixed:
            raise ValueError("Index.save: an index over a parameter is saved with the model: use its state_dict.")
        with self.turns.writing:
            storage.save(self, read_path("Index.save", "path", path))

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str | None = None) -> Index:
        """The index of a folder that `save` wrote, with the updates of its journal.

        Args:
            path: the folder. device: where the buffers will be.

        Returns: the index. Its updates stay in memory.
        Raises: ValueError if there is no index, or if a file is damaged.
        """
        return storage.load(cls, read_path("Index.load", "path", path), device)

    @classmethod
    def open(
        cls,
        path: str | Path,
        journal: bool = True,
        device: torch.device | str | None = None,
        *,
        repair: bool = False,
    ) -> Index:
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
        return storage.open_index(cls, path, device, journal=journal, mend=repair)

    def close(self) -> None:
        """Close the journal, and let others open the folder. Later updates stay in memory."""
        with self.turns.writing:
            if self.journal is not None:
                self.journal.close()
            if self.folder_lock is not None:
                self.folder_lock.release()
            self.journal = self.folder_lock = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy as of this moment, for pickle: updates go on while it is written. It has no journal and no caches."""
        with self.turns.writing:
            self.turns.settle(self.device)
            state = self._copy_state()
            state |= copy.deepcopy({name: state[name] for name in ("ids", "rows", "counts", "schema")})
            state["_buffers"] = {k: None if v is None else v.clone() for k, v in state["_buffers"].items()}
            self._wait_for_copies()
            return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Index:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        with self.turns.writing:
            self.turns.settle(self.device)
            copied.__setstate__(copy.deepcopy(self._copy_state(), memo))
            self._wait_for_copies()
        return copied

    def _wait_for_copies(self) -> None:
        """Wait for copies on the GPU: an update in another stream would overtake them."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _copy_state(self) -> dict[str, Any]:
        """What a copy has of this index's attributes."""
        return {
            **self.__dict__, "journal": None, "folder_lock": None, "filters": {}, "tagged": {},
            "coded_state": None if self._over else (),
        }  # fmt: skip

    def _restart(self) -> None:
        """The host's side from the buffers: free rows, where ids are, and counts."""
        live = self.live.cpu().numpy()
        self.rows = Rows.of(live, int(self.item_ids.shape[0]))
        self.counts = Counts(self.schema)
        self.filters.clear()
        self.tagged.clear()
        self.coded_state = None if self._over else ()
        self.kept.clear()
        there = np.flatnonzero(self.rows.there())
        if isinstance(self.ids, StringIds):
            self.ids.rows.fill(-1)
        if len(there):
            keys = self.item_ids.cpu().numpy()[there]
            if not isinstance(self.ids, StringIds):
                self.ids = IntIds()
            self.ids.place(keys, there)
            words = self.attributes.cpu().numpy()[:, there]
            self.counts.add(words)

    def get_extra_state(self) -> Tensor:
        """What the buffers do not hold: the vocabularies, and the texts of ids."""
        texts = self.ids.texts() if isinstance(self.ids, StringIds) else None
        about = {"schema": self.schema.to_json(), "ids": self.ids.kind if self.ids is not None else None}
        head = json.dumps(about).encode()
        blob, ends = texts if texts is not None else (b"", np.zeros(0, dtype=np.int64))
        sizes = np.array([len(head), len(blob)], dtype=np.int64).tobytes()
        return torch.frombuffer(bytearray(sizes + head + blob + ends.tobytes()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        raw = state.cpu().numpy().tobytes()
        head, blob = (int(n) for n in np.frombuffer(raw[:16], dtype=np.int64))
        about = json.loads(raw[16 : 16 + head])
        schema = Schema.from_json(about["schema"])
        if schema.places != self.schema.places:
            raise ValueError(f"Index: the state is of an index with {schema!r}, not {self.schema!r}.")
        self.schema = schema
        ends = np.frombuffer(raw[16 + head + blob :], dtype=np.int64)
        texts = (raw[16 + head : 16 + head + blob], ends) if about["ids"] == "str" else ()
        self.ids = KINDS[about["ids"]](*texts) if about["ids"] else None

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with self.turns.writing, self.turns.lock:
            super()._load_from_state_dict(*args, **kwargs)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.turns.settle(self.device)
        super()._save_to_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Index:
        with self.turns.writing, self.turns.lock:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            before = self.dtype
            super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
            self.kept.clear()
            if self.bias is not None:  # half() is meant for the vectors
                self.bias = writing.distance_bias(self.embeddings)
            coded.applied(self, before)
        return self


def _loaded(index: Index, incompatible: Any) -> None:
    index._restart()
