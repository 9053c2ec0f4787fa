"""A server whose index is in its own process: searches, updates, snapshots, health and counters."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic_core import to_json

import tigon
from tigon.retrieve.batching import Batcher, Overloaded
from tigon.retrieve.index.index import Index
from tigon.retrieve.serve import documented, messages
from tigon.retrieve.serve.application import AGAIN, TEXT, About, Application, Limits, Reply
from tigon.retrieve.serve.counters import Counters
from tigon.retrieve.serve.messages import Answer, Array, Wrong
from tigon.retrieve.serve.waiting import Gate

Encode = Callable[[Any], Any]
WRITERS = 8  # updates that come together are made together, those that wait for the journal

__all__ = ["Limits", "Service"]


class Service(Application):
    """An ASGI application around an index.

    Args:
        index: that is served. The service closes its journal at the end.
        path: where /snapshot saves it; None: there is no /snapshot.
        key: that a request must bear; None: none.
        encode: from a list of texts, a tensor of features on the index's device, or a dict of these, to vectors
            (n, dim), in a thread of its own. None: queries are vectors.
        limits: on requests.
        hosts: without a key, names that a request's Host may have beside IP addresses and localhost, so that no web
            page reaches the service by a name of its own; None: any, where another server checks them.
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
        half = index.metric == "ip" and index.dtype in (torch.float16, torch.float8_e4m3fn)
        about = About(index.dim, half, index.table.is_over_parameter, encode is not None)
        super().__init__(about, key, limits, documented.pages(path is not None), hosts)
        self.key, self.index, self.path, self.encode = key, index, path, encode
        self.batcher = Batcher(index, most=limits.batch, wait=limits.wait, queue=max(limits.queue, limits.batch))
        self.gate = Gate(self.batcher)
        self.counters = self.gate.counters = Counters(
            self.tally, lambda: self.gate.queries + len(self.batcher), lambda: len(index), lambda: index.capacity
        )
        self._writers = ThreadPoolExecutor(WRITERS, "tigon.retrieve.serve")
        self._encoder = ThreadPoolExecutor(1, "tigon.retrieve.serve encoder")
        self._compiler = ThreadPoolExecutor(1, "tigon.retrieve.serve filters")
        self._saving = asyncio.Lock()
        self.posts = {"/upsert": self.upsert, "/delete": self.delete}
        if path is not None:
            self.posts["/snapshot"] = self.snapshot
        self.gets = {"/health": self.health, "/metrics": self.metrics}

    def warmup(self, k: Sequence[int]) -> float:
        """Compile the kernels of the searches that requests may ask for, with and without filters.

        Args:
            k: of the searches.

        Returns: the seconds that it took. On a CPU there is nothing to compile.
        Raises: ValueError for an empty index.
        """
        wheres: list[Any] = [None]
        if column := next(iter(self.index.schema.columns), None):
            few, many = f"{column} is null", f"{column} is not null"
            wheres += [few, many, [few, many, None]]
        queries = [n for n in (1, 16, 32, 64, 128) if n < self.limits.batch] + [self.limits.batch]
        dtype = ["float16", "float32"] if self.about.half else ["float32"]
        return sum(self.index.warmup(k, queries, where, dtype=dtype) for where in wheres)

    def close(self) -> None:
        """Answer what waits, then close the journal."""
        self.draining = True
        self.batcher.close()
        for executor in (self._reader, self._compiler, self._encoder):
            executor.shutdown(cancel_futures=True)
        self._writers.shutdown()
        self.index.close()

    # -------------------------------------------------------------------------------------------------------- searches

    def ask(self, query: Array, ks: list[int], wheres: list[str | None], strict: bool) -> asyncio.Future[Answer]:
        return self.gate.ask(query, ks, wheres, strict)

    async def check_filters(self, wheres: set[str], strict: bool) -> None:
        if wrong := await self.compile_filters(wheres, strict):
            raise next(iter(wrong.values()))

    async def compile_filters(self, wheres: set[str], strict: bool) -> dict[str | None, Exception]:
        """Compile filters in a thread, but for those that are kept. Returns the errors of those that do not fit."""
        new = [where for where in wheres if not self.index.table.attributes.is_compiled(where, strict)]
        if not new:
            return {}
        return await asyncio.get_running_loop().run_in_executor(self._compiler, self._compile, new, strict)

    def _compile(self, wheres: list[str], strict: bool) -> dict[str | None, Exception]:
        wrong: dict[str | None, Exception] = {}
        for where in wheres:
            try:
                self.gate.check(where, strict)
            except Exception as error:
                wrong[where] = error
        return wrong

    def is_crowded(self) -> bool:
        return self.gate.queries > self.limits.batch

    async def encoded(
        self, body: messages.SearchBody, tensors: dict[str, Array], content: bytes, binary: bool, receive: Any
    ) -> Reply:
        assert self.encode is not None
        size = messages.text_size(content, binary)
        given, count = await self.off_loop(size, messages.features_of, body, tensors)
        self.check_count(count)  # before the encoder's work
        loop = asyncio.get_running_loop()
        device = self.index.device
        query = await loop.run_in_executor(self._encoder, _encoded, self.encode, given, device)
        if query.shape[:-1] != (count,):
            raise Wrong(422, f"the encoder must give a vector for each of {count} queries, got {query.shape}.")
        return await self.searched(self.matrix(query), body, binary, receive)

    # --------------------------------------------------------------------------------------------------------- updates

    async def upsert(self, content: bytes, binary: bool) -> Reply:
        body, tensors = await self.read(messages.UpsertBody, content, binary)
        vectors: Any = tensors.get("vectors", body.vectors)
        if (vectors is None) != self.about.fixed:
            raise Wrong(422, "vectors must be given, unless the index is over a parameter.")
        ids: Any = tensors.get("ids", body.ids)
        if vectors is not None:
            vectors = self.matrix(vectors)
        if not len(ids):
            return _json({"upserted": 0, "items": len(self.index)})
        await self._written(self.index.upsert, ids, vectors, body.table)
        return _json({"upserted": len(ids), "items": len(self.index)})

    async def delete(self, content: bytes, binary: bool) -> Reply:
        body, tensors = await self.read(messages.DeleteBody, content, binary)
        deleted = await self._written(self.index.delete, tensors.get("ids", body.ids))
        return _json({"deleted": deleted, "items": len(self.index)})

    async def snapshot(self, content: bytes = b"", binary: bool = False) -> Reply:
        assert self.path is not None
        async with self._saving:
            begun = time.perf_counter()
            await self._written(self.index.save, self.path)
        return _json({"items": len(self.index), "seconds": round(time.perf_counter() - begun, 3)})

    async def _written(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """An update in a thread. It is made as a whole also if its client goes away meanwhile."""
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self._writers, function, *arguments))

    # --------------------------------------------------------------------------------------------------------- the rest

    async def health(self, content: bytes = b"", binary: bool = False) -> Reply:
        about: dict[str, Any] = {
            "status": "draining" if self.draining else "ok", "items": len(self.index), "capacity": self.index.capacity,
            "dim": self.index.dim, "metric": self.index.metric, "device": str(self.index.device),
            "texts": self.encode is not None, "journal": self.index.journal is not None, "version": tigon.__version__,
        }  # fmt: skip
        if self.key is None:  # /health needs no key, and the names of columns are nobody else's business
            about["columns"] = list(self.index.schema.columns)
        return _json(about, 503 if self.draining else 200)

    async def metrics(self, content: bytes = b"", binary: bool = False) -> Reply:
        return Reply(200, self.counters.text(), TEXT)

    def refusal(self, error: Exception) -> Reply:
        closed = isinstance(error, RuntimeError) and "closed" not in str(error) and "shutting down" not in str(error)
        for kind, status, headers in _REASONS:
            if isinstance(error, kind) and not (kind is RuntimeError and closed):
                if isinstance(error, OSError):  # the message names files
                    print(f"tigon: retrieve serve: {error}", file=sys.stderr, flush=True)
                    said = "the index cannot be written: its disk is full or broken, as the server's log says."
                else:
                    said = str(error)
                for name in _NAMES:
                    said = said.removeprefix(name)
                if self.path is not None:
                    said = said.replace(str(self.path.absolute()), "the index").replace(str(self.path), "the index")
                return super().refusal(Wrong(status, said, headers))
        return super().refusal(error)


_REASONS: tuple[tuple[type[Exception], int, tuple[tuple[bytes, bytes], ...]], ...] = (
    (Overloaded, 429, AGAIN),
    (ValueError, 422, ()),
    (torch.OutOfMemoryError, 503, AGAIN),
    (OSError, 507, ()),
    (RuntimeError, 503, AGAIN),
)
_NAMES = ("Index.search: ", "Index.upsert: ", "Index.delete: ", "Index.save: ", "Batcher.search: ", "retrieve: ")


def _json(content: dict[str, Any], status: int = 200) -> Reply:
    return Reply(status, to_json(content))


@torch.no_grad()
def _encoded(encode: Encode, given: Any, device: torch.device) -> Array:
    """The vectors of what an encoder takes: texts as they are, arrays as tensors on the index's device.

    Raises: Wrong, 422, if it does not take it.
    """
    try:
        if isinstance(given, dict):
            vectors = encode({name: _tensor(values, device) for name, values in given.items()})
        else:
            vectors = encode(_tensor(given, device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        line = (str(error).splitlines() or [""])[0][:1000]
        raise Wrong(422, f"the encoder does not take this: {type(error).__name__}: {line}") from error
    found: Array = vectors.detach().float().cpu().numpy() if isinstance(vectors, torch.Tensor) else np.asarray(vectors)
    return found


def _tensor(values: Array | list[str], device: torch.device) -> torch.Tensor | list[str]:
    return values if isinstance(values, list) else torch.from_numpy(values.copy()).to(device)
