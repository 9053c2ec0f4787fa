"""A server with the index in its own process: searches, updates, snapshots, health and counters."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from starlette.exceptions import HTTPException

import tigon
from tigon.retrieve.batch_queue import Overloaded
from tigon.retrieve.index.index import Index
from tigon.retrieve.server.admission import AdmissionQueue, AdmittedSearch
from tigon.retrieve.server.app import METHODS, RETRY, Application
from tigon.retrieve.server.bodies import Array, SearchResult
from tigon.retrieve.server.requests import IndexInfo, Limits, is_long

Encode = Callable[[Any], Any]
WRITERS = 8  # concurrent updates waiting for the journal are merged

__all__ = ["Limits", "Service"]


class Service(Application):
    """An ASGI application around an index.

    Args:
        index: the index to serve. The service closes its journal on shutdown.
        path: where /snapshot saves the index; None: there is no /snapshot.
        key: that a request must carry; None: none.
        encode: from a list of texts, a tensor with features on the index's device, or a dict of these, to vectors (n,
            dim); runs in a thread. None: queries are vectors.
        limits: on requests.
        hosts: without a key, names allowed as a request's Host beside IP addresses and localhost, so that no web page
            reaches the service by a foreign name; None: any, where another server checks them.
    """

    def __init__(
        self,
        index: Index,
        path: Path | None = None,
        key: str | None = None,
        encode: Encode | None = None,
        limits: Limits = Limits(),  # noqa: B008 - a tuple
        hosts: Sequence[str] | None = None,
    ) -> None:
        prefers_half = index.metric == "ip" and index.dtype in (torch.float16, torch.float8_e4m3fn)
        info = IndexInfo(index.dim, prefers_half, index.table.is_over_parameter, encode is not None, path is not None)
        self.index = index
        self.index_backend = IndexBackend(index, path, encode, limits)
        super().__init__(self.index_backend, info, key, limits, hosts)

    def warmup(self, k: Sequence[int]) -> float:
        """Compile the kernels for searches that requests may ask for, with and without filters.

        Args:
            k: hits per query.

        Returns: the seconds spent compiling. On a CPU there is nothing to compile.
        Raises: ValueError for an empty index.
        """
        wheres: list[Any] = [None]
        if column := next(iter(self.index.schema.columns), None):
            few, many = f"{column} is null", f"{column} is not null"
            wheres += [few, many, [few, many, None]]
        batch = self.limits.max_batch
        queries = [n for n in (1, 16, 32, 64, 128) if n < batch] + [batch]
        dtypes = [torch.float16, torch.float32] if self.info.prefers_half else [torch.float32]
        seconds = 0.0
        for where, dtype, count, hits in product(wheres, dtypes, queries, k):
            wanted = [where[i % len(where)] for i in range(count)] if isinstance(where, list) else where
            seconds += self.index.warmup(torch.ones(count, self.index.dim, dtype=dtype), hits, wanted)
        return seconds

    def close(self) -> None:
        """Finish running searches and updates, then close the journal."""
        self.draining = True
        super().close()
        self.index_backend.close()


class IndexBackend:
    """Answers checked requests from an index. Arguments as in `Service`."""

    def __init__(self, index: Index, path: Path | None, encode: Encode | None, limits: Limits) -> None:
        self.index, self.encoder = index, encode
        self.path = None if path is None else path.absolute()
        self.admission = AdmissionQueue(index, limits)
        self._writers = ThreadPoolExecutor(WRITERS, "tigon.retrieve.server update")
        self._encoder = ThreadPoolExecutor(1, "tigon.retrieve.server encoder")
        self._compiler = ThreadPoolExecutor(1, "tigon.retrieve.server filters")
        self._snapshot = asyncio.Lock()

    def close(self) -> None:
        self.admission.close()
        for executor in (self._compiler, self._encoder):
            executor.shutdown(cancel_futures=True)
        self._writers.shutdown()
        self.index.close()

    # ------------------------------------------------------------------------------------------------------ searches

    def is_crowded(self) -> bool:
        return self.admission.queue.queries > self.admission.queue.max_batch

    async def search(self, query: Array, k: list[int], where: list[str | None], strict: bool) -> SearchResult:
        new = self.find_new_filters(where, strict)
        errors = await self.compile_in_thread(new, strict) if is_long(new) else self.compile_filters(new, strict)
        if errors:
            raise next(iter(errors.values()))
        future: asyncio.Future[SearchResult] = asyncio.get_running_loop().create_future()
        try:
            self.admission.add(AdmittedSearch(query, k, where, future))
            return await future
        except Exception as error:
            raise to_http_exception(error) from None

    def find_new_filters(self, where: Collection[str | None], strict: bool) -> set[str]:
        """The filters that the index has not compiled."""
        distinct = {each for each in where if each is not None}
        return {each for each in distinct if not self.index.table.attributes.is_compiled(each, strict)}

    def compile_filters(self, where: Collection[str], strict: bool) -> dict[str | None, HTTPException]:
        """Compile filters. Returns the errors for filters that do not fit the index."""
        errors: dict[str | None, HTTPException] = {}
        for each in where:
            try:
                self.index.table.attributes.compile(each, strict)
            except Exception as error:
                errors[each] = to_http_exception(error)
        return errors

    async def compile_in_thread(self, where: Collection[str], strict: bool) -> dict[str | None, HTTPException]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._compiler, self.compile_filters, where, strict)

    async def call(self, method: str, *arguments: Any) -> Any:
        assert method in METHODS, method
        return await getattr(self, method)(*arguments)

    async def encode(self, features: Any) -> Array:
        return await asyncio.get_running_loop().run_in_executor(self._encoder, self._encode, features)

    @torch.no_grad()
    def _encode(self, features: Any) -> Array:
        """The vectors for an encoder's input: texts unchanged, arrays as tensors on the index's device."""
        assert self.encoder is not None
        try:
            if isinstance(features, dict):
                vectors = self.encoder({name: self._to_tensor(values) for name, values in features.items()})
            else:
                vectors = self.encoder(self._to_tensor(features))
        except torch.OutOfMemoryError as error:
            raise to_http_exception(error) from None
        except Exception as error:
            line = (str(error).splitlines() or [""])[0][:1000]
            detail = f"the encoder rejected the input: {type(error).__name__}: {line}"
            raise HTTPException(422, detail) from None
        array: Array = (
            vectors.detach().float().cpu().numpy() if isinstance(vectors, torch.Tensor) else np.asarray(vectors)
        )
        return array

    def _to_tensor(self, values: Array | list[str]) -> torch.Tensor | list[str]:
        return values if isinstance(values, list) else torch.from_numpy(values.copy()).to(self.index.device)

    # ------------------------------------------------------------------------------------------------------- updates

    async def upsert(self, ids: Any, vectors: Array | None, table: dict[str, list[Any]] | None) -> dict[str, Any]:
        if len(ids):
            await self._run_update(self.index.upsert, ids, vectors, table)
        return {"upserted": len(ids), "items": len(self.index)}

    async def delete(self, ids: Any) -> dict[str, Any]:
        deleted = await self._run_update(self.index.delete, ids)
        return {"deleted": deleted, "items": len(self.index)}

    async def snapshot(self) -> dict[str, Any]:
        async with self._snapshot:
            start = time.perf_counter()
            await self._run_update(self.index.save, self.path)
        return {"items": len(self.index), "seconds": round(time.perf_counter() - start, 3)}

    async def _run_update(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Update the index in a thread. The update completes even if its client disconnects meanwhile."""
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.shield(loop.run_in_executor(self._writers, function, *arguments))
        except Exception as error:
            raise to_http_exception(OSError(str(error)) if self._names_files(error) else error) from None

    def _names_files(self, error: Exception) -> bool:
        """Whether an error concerns the journal or the snapshot: no request is to blame."""
        paths = [path for path in (self.index.journal and self.index.journal.path, self.path) if path is not None]
        return isinstance(error, ValueError) and any(str(path) in str(error) for path in paths)

    # ------------------------------------------------------------------------------------------------------- the rest

    async def health(self) -> dict[str, Any]:
        return {
            "items": len(self.index), "capacity": self.index.capacity, "dim": self.index.dim,
            "metric": self.index.metric, "device": str(self.index.device), "texts": self.encoder is not None,
            "journal": self.index.journal is not None, "version": tigon.__version__,
            "columns": list(self.index.schema.columns),
        }  # fmt: skip

    async def metrics(self) -> bytes:
        return self.admission.metrics.to_text()


def to_http_exception(error: BaseException) -> HTTPException:
    """The HTTP error for an exception that the index raised.

    Raises: the exception itself, if neither a request, little memory nor a full disk causes it.
    """
    if isinstance(error, HTTPException):
        return error
    if isinstance(error, Overloaded):
        return HTTPException(error.status, str(error), RETRY)
    if isinstance(error, ValueError):
        return HTTPException(422, str(error))
    if isinstance(error, torch.OutOfMemoryError):
        return HTTPException(503, str(error), RETRY)
    if isinstance(error, OSError):
        print(f"tigon: retrieve serve: {error}", file=sys.stderr, flush=True)  # the message names files
        return HTTPException(507, "the index cannot be written: the disk is full or broken; see the server's log.")
    raise error
