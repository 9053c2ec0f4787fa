"""What a server answers: searches, updates, snapshots, health and counters, and to whom.

`Service` is an ASGI application. The routes are FastAPI's, which documents them under /docs; around them stands what
every request passes: key, drain, the limit of its body, counters. A search goes past FastAPI's routing, which takes
twice the time of all the rest; both ways end in the same function.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fastapi import FastAPI, Request, Response
from pydantic_core import to_json

import tigon
from tigon.ops.filtered_topk import MOST as MOST_K
from tigon.retrieve.batching import Batcher, Overloaded
from tigon.retrieve.index import Index
from tigon.retrieve.serve import messages
from tigon.retrieve.serve.counters import Counters
from tigon.retrieve.serve.messages import Answer, Array, Wrong
from tigon.retrieve.serve.waiting import Gate

Encode = Callable[[list[str]], Any]
OPEN = ("/health", "/docs", "/openapi.json")  # without a key
AGAIN = ((b"retry-after", b"1"),)
WRITERS = 8  # updates that come together are made together, those that wait for the journal


class Limits(NamedTuple):
    """What a server takes.

    body: bytes of a request. batch: queries of a request, and of one search. queue: queries that wait. wait: seconds
    that a search waits for others at most.
    """

    body: int = 16 << 20
    batch: int = 256
    queue: int = 4096
    wait: float = 1e-3


class Reply(NamedTuple):
    status: int
    content: bytes
    kind: bytes = messages.JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Service:
    """An ASGI application around an index.

    Args:
        index: that is served. The service closes its journal at the end.
        path: where /snapshot saves it; None: there is no /snapshot.
        key: that a request must bear; None: none.
        encode: texts to vectors, (n, dim), in a thread of its own; None: queries are vectors.
        limits: on requests.
    """

    def __init__(
        self,
        index: Index,
        path: Path | None = None,
        key: str | None = None,
        encode: Encode | None = None,
        limits: Limits = Limits(),  # noqa: B008 - a tuple
    ) -> None:
        self.index, self.path, self.encode, self.limits = index, path, encode, limits
        self._key = None if key is None else key.encode()
        self.batcher = Batcher(index, most=limits.batch, wait=limits.wait, queue=max(limits.queue, limits.batch))
        self.gate = Gate(self.batcher)
        self.counters = self.gate.counters = Counters(
            lambda: self.gate.queries + len(self.batcher), lambda: len(index), lambda: index.capacity
        )
        self.draining = False
        self._writers = ThreadPoolExecutor(WRITERS, "tigon.retrieve.serve")
        self._encoder = ThreadPoolExecutor(1, "tigon.retrieve.serve encoder")
        self._saving = asyncio.Lock()
        self._paths = {"/search": self.search, "/upsert": self.upsert, "/delete": self.delete}
        if path is not None:
            self._paths["/snapshot"] = self.snapshot
        self.api = self._documented()

    def close(self) -> None:
        """Answer what waits, then close the journal."""
        self.draining = True
        self.batcher.close()
        self._encoder.shutdown()
        self._writers.shutdown()
        self.index.close()

    # -------------------------------------------------------------------------------------------------- every request

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.api(scope, receive, send)
            return
        begun = time.perf_counter()
        path: str = scope["path"]
        status = 499  # the client went away
        try:
            reply: Reply | None
            try:
                kind = self._checked(scope, path)
                if path == "/search" and scope["method"] == "POST":
                    reply = await self.search(await self._body(scope, receive), kind == messages.BINARY, receive)
                else:
                    reply, status = None, await self._routed(scope, receive, send)
            except Exception as error:
                reply = _refusal(error)
            if reply is not None:
                status = reply.status
                await _send(send, reply)
        except _Gone:
            pass
        finally:
            known = path in self._paths or path in OPEN or path == "/metrics"
            self.counters.answered(path if known else "other", status, time.perf_counter() - begun)

    def _checked(self, scope: Any, path: str) -> bytes | None:
        """The content type, of a request that may be answered."""
        kind = key = None
        for name, value in scope["headers"]:
            if name == b"content-type":
                kind = value.partition(b";")[0].strip().lower()
            elif name == b"authorization" and value[:7].lower() == b"bearer ":
                key = value[7:]
            elif name == b"x-api-key":
                key = value
            elif name == b"content-length" and int(value) > self.limits.body:
                raise self._too_large(int(value))
        if self._key is not None and path not in OPEN:
            if key is None:
                raise Wrong(401, "a key is needed: Authorization: Bearer KEY, or X-API-Key: KEY.", _BEARER)
            if not hmac.compare_digest(key, self._key):
                raise Wrong(401, "the key is not this server's.", _BEARER)
        if self.draining and path in self._paths:
            raise Wrong(503, "the server is shutting down.", (*AGAIN, (b"connection", b"close")))
        return kind

    def _too_large(self, size: int) -> Wrong:
        said = f"the body must be at most {self.limits.body:,} bytes, got {size:,}: send it in several requests."
        return Wrong(413, said, ((b"connection", b"close"),))

    async def _body(self, scope: Any, receive: Any) -> bytes:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        if not message.get("more_body", False):
            whole: bytes = message["body"]
            if len(whole) > self.limits.body:
                raise self._too_large(len(whole))
            return whole
        parts, size = [message["body"]], len(message["body"])
        while message.get("more_body", False):
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            parts.append(message["body"])
            size += len(message["body"])
            if size > self.limits.body:
                raise self._too_large(size)
        return b"".join(parts)

    async def _routed(self, scope: Any, receive: Any, send: Any) -> int:
        """By FastAPI, which is handed a body that was read. Returns the status."""
        body = await self._body(scope, receive) if scope["method"] in ("POST", "PUT", "PATCH") else b""
        status = 500
        given = False

        async def read() -> Any:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def sent(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        await self.api(scope, read, sent)
        return status

    # ---------------------------------------------------------------------------------------------------------- routes

    async def search(self, content: bytes, binary: bool, receive: Any = None) -> Reply:
        body, tensors = messages.read(messages.SearchBody, content, binary)
        query = await self._queries(body, tensors)
        count = len(query)
        if not 0 < count <= self.limits.batch:
            status = 422 if not count else 413
            raise Wrong(status, f"a request must have 1 to {self.limits.batch:,} queries, got {count:,}.")
        if not np.isfinite(query).all():
            bad = int((~np.isfinite(query)).any(1).argmax())
            raise Wrong(422, f"vectors must be finite, got NaN or infinity in query {bad}.")
        ks = [body.k] * count if isinstance(body.k, int) else body.k
        if len(ks) != count or not all(1 <= k <= MOST_K for k in ks):
            raise Wrong(422, f"k must be from 1 to {MOST_K:,}, or a list of one for each of {count} queries.")
        wheres = body.where if isinstance(body.where, list) else [body.where] * count
        if len(wheres) != count:
            raise Wrong(422, f"where must have a filter for each of {count} queries, got {len(wheres)}.")
        if body.strict:
            for where in wheres:
                self.gate.check_strictly(where)
        asked = self.gate.ask(query, ks, wheres)
        if receive is not None and self.gate.queries > self.limits.batch:
            found = await _while_there(asked, receive)
        else:
            found = await asked
        return Reply(200, found.written(binary), messages.BINARY if binary else messages.JSON)

    async def _queries(self, body: messages.SearchBody, tensors: dict[str, Array]) -> Array:
        if "ids" in tensors:
            raise Wrong(422, "a search has no ids.")
        query = tensors.get("vectors", body.vectors)
        if (query is None) == (body.texts is None):
            raise Wrong(422, "a search must have vectors or texts, one of both.")
        if body.texts is not None:
            if self.encode is None:
                raise Wrong(422, "texts need an encoder, and this server has none: send vectors.")
            if len(body.texts) > self.limits.batch:  # before the encoder's work
                raise Wrong(413, f"a request must have 1 to {self.limits.batch:,} queries, got {len(body.texts):,}.")
            loop = asyncio.get_running_loop()
            query = await loop.run_in_executor(self._encoder, _encoded, self.encode, body.texts)
        assert query is not None
        return self._matrix(query)

    def _matrix(self, vectors: Any) -> Array:
        try:
            matrix: Array = np.asarray(vectors, dtype=None if isinstance(vectors, np.ndarray) else np.float32)
        except ValueError:
            matrix = np.empty(0, np.float32)
        if matrix.ndim == 1 and isinstance(vectors, np.ndarray):
            matrix = matrix[None]
        if len(matrix) and (matrix.ndim != 2 or matrix.shape[1] != self.index.dim):
            got = f"{matrix.shape}" if matrix.ndim == 2 else "lists of other lengths"
            raise Wrong(422, f"vectors must have {self.index.dim} numbers each, the index's dim, got {got}.")
        if not len(matrix) and len(vectors):
            raise Wrong(422, f"vectors must have {self.index.dim} numbers each, the index's dim.")
        if matrix.dtype.kind != "f":
            raise Wrong(422, f"vectors must be floats, got {matrix.dtype}.")
        return matrix.astype(np.float32) if matrix.dtype == np.float64 else matrix

    async def upsert(self, content: bytes, binary: bool) -> Reply:
        body, tensors = messages.read(messages.UpsertBody, content, binary)
        vectors: Any = tensors.get("vectors", body.vectors)
        if (vectors is None) != self.index.fixed:
            raise Wrong(422, "vectors must be given, unless the index is over a parameter.")
        ids: Any = tensors.get("ids", body.ids)
        if vectors is not None:
            vectors = self._matrix(vectors)
        if not len(ids):
            return self._json({"upserted": 0, "items": len(self.index)})
        await self._written(self.index.upsert, ids, vectors, body.table)
        return self._json({"upserted": len(ids), "items": len(self.index)})

    async def delete(self, content: bytes, binary: bool) -> Reply:
        body, tensors = messages.read(messages.DeleteBody, content, binary)
        deleted = await self._written(self.index.delete, tensors.get("ids", body.ids))
        return self._json({"deleted": deleted, "items": len(self.index)})

    async def snapshot(self, content: bytes = b"", binary: bool = False) -> Reply:
        assert self.path is not None
        async with self._saving:
            begun = time.perf_counter()
            await self._written(self.index.save, self.path)
        return self._json({"items": len(self.index), "seconds": round(time.perf_counter() - begun, 3)})

    async def _written(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """An update in a thread. It is made as a whole also if its client goes away meanwhile."""
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self._writers, function, *arguments))

    def health(self) -> Reply:
        about = {
            "status": "draining" if self.draining else "ok", "items": len(self.index), "capacity": self.index.capacity,
            "dim": self.index.dim, "metric": self.index.metric, "device": str(self.index.device),
            "columns": list(self.index.schema.columns), "texts": self.encode is not None,
            "journal": self.index.journal is not None, "version": tigon.__version__,
        }  # fmt: skip
        return self._json(about, 503 if self.draining else 200)

    @staticmethod
    def _json(content: dict[str, Any], status: int = 200) -> Reply:
        return Reply(status, to_json(content))

    def _documented(self) -> FastAPI:
        api = FastAPI(title="tigon retrieve serve", version=tigon.__version__, redoc_url=None)
        for path, body, answer in (
            ("/search", messages.SearchBody, messages.Found),
            ("/upsert", messages.UpsertBody, messages.Upserted),
            ("/delete", messages.DeleteBody, messages.Deleted),
            ("/snapshot", None, messages.Snapshot),
        ):
            if path in self._paths:
                _route(api, path, self._paths[path], body, answer)

        async def health() -> Response:
            return _response(self.health())

        async def metrics() -> Response:
            return Response(self.counters.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

        api.get("/health", summary="Whether the server takes searches, and what index it has.")(health)
        api.get("/metrics", summary="Counters, in Prometheus' text format.")(metrics)
        return api


_BEARER = ((b"www-authenticate", b"Bearer"),)
_REASONS = (
    (Overloaded, 429, AGAIN),
    (ValueError, 422, ()),
    (torch.OutOfMemoryError, 503, AGAIN),
    (OSError, 507, ()),
    (RuntimeError, 503, AGAIN),
)


class _Gone(Exception):
    """The client went away: there is nobody to answer."""


def _refusal(error: Exception) -> Reply:
    """The answer to a request that raised.

    Raises: the error, if it is none that a request may raise.
    """
    if isinstance(error, Wrong):
        return Reply(error.status, to_json({"detail": error.sentence}), messages.JSON, error.headers)
    closed = isinstance(error, RuntimeError) and "closed" not in str(error) and "shutting down" not in str(error)
    for kind, status, headers in _REASONS:
        if isinstance(error, kind) and not (kind is RuntimeError and closed):
            said = str(error)
            for name in (
                "Index.search: ",
                "Index.upsert: ",
                "Index.delete: ",
                "Index.save: ",
                "Batcher.search: ",
                "retrieve: ",
            ):
                said = said.removeprefix(name)
            return Reply(status, to_json({"detail": said}), messages.JSON, headers)
    raise error


async def _send(send: Any, reply: Reply) -> None:
    headers = [
        (b"content-type", reply.kind), (b"content-length", str(len(reply.content)).encode()), *reply.headers,
    ]  # fmt: skip
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.content})


async def _while_there(asked: asyncio.Future[Answer], receive: Any) -> Answer:
    """The answer, unless the client goes away: its search is then taken from the queue."""
    gone = asyncio.ensure_future(receive())
    await asyncio.wait((asked, gone), return_when=asyncio.FIRST_COMPLETED)
    if asked.done():
        gone.cancel()
        return asked.result()
    asked.cancel()
    raise _Gone


def _encoded(encode: Encode, texts: list[str]) -> Array:
    vectors = encode(texts)
    found: Array = vectors.detach().float().cpu().numpy() if isinstance(vectors, torch.Tensor) else np.asarray(vectors)
    return found


def _response(reply: Reply) -> Response:
    headers = {name.decode(): value.decode() for name, value in reply.headers}
    return Response(reply.content, reply.status, headers, reply.kind.decode())


def _route(
    api: FastAPI, path: str, function: Callable[..., Awaitable[Reply]], body: type[messages.Body] | None, answer: Any
) -> None:
    """A route whose body is read here and not by FastAPI, which documents it."""

    async def route(request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            return _response(await function(await request.body(), kind.encode() == messages.BINARY))
        except Exception as error:
            return _response(_refusal(error))

    content: dict[str, Any] = {}
    if body is not None:
        binary = {"schema": {"type": "string", "format": "binary"}}
        described = {"schema": body.model_json_schema()}
        content = {"requestBody": {"content": {"application/json": described, "application/octet-stream": binary}}}
    refusals: dict[int | str, dict[str, Any]] = {n: {"model": messages.Refusal} for n in (401, 413, 422, 429, 503)}
    about = "Save a snapshot; the journal begins anew." if body is None else body.__doc__
    api.post(path, response_model=answer, responses=refusals, openapi_extra=content, summary=about)(route)
