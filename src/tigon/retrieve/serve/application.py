"""What a server answers, but for the searching: who may ask, what fits, and how it is said.

`Application` is an ASGI application without an index, and without torch. `app.Service` is one that has the index in its
own process, `front.Front` one that passes on what it has checked to the process that has it.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from pydantic_core import to_json

from tigon.retrieve.serve import messages
from tigon.retrieve.serve.messages import Answer, Array, Wrong
from tigon.retrieve.serve.tally import Tally

MOST_K = 2048  # as of `tigon.filtered_topk`
AGAIN = ((b"retry-after", b"1"),)
BEARER = ((b"www-authenticate", b"Bearer"),)
CLOSE = ((b"connection", b"close"),)
OPEN = ("/health", "/docs", "/openapi.json")  # without a key
TEXT, HTML = b"text/plain; version=0.0.4; charset=utf-8", b"text/html; charset=utf-8"

T = TypeVar("T")


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


class Gone(Exception):
    """The client went away: there is nobody to answer."""


class About(NamedTuple):
    """What requests have to fit.

    dim: of the index. half: whether queries become fp16 where that holds their numbers exactly; all others become fp32,
    which holds those of fp16. fixed: whether the vectors are a parameter's, so that updates have none. encodes: whether
    there is an encoder.
    """

    dim: int
    half: bool
    fixed: bool
    encodes: bool


Route = Callable[[bytes, bool], Awaitable[Reply]]


class Application:
    """An ASGI application: key, limits and drain, then one function for each path.

    Args:
        about: what requests have to fit. key: that a request must bear; None: none. limits: on requests.
        pages: answers that never change, by their paths.
    """

    def __init__(self, about: About, key: str | None, limits: Limits, pages: dict[str, Reply]) -> None:
        self.about, self.limits, self.pages = about, limits, pages
        self._key = None if key is None else key.encode()
        self.draining = False
        self.tally = Tally()
        self.posts: dict[str, Route] = {}  # but for /search
        self.gets: dict[str, Route] = {}

    # ------------------------------------------------------------------------------------------- what a class is to say

    def ask(self, query: Array, ks: list[int], wheres: list[str | None], strict: bool) -> asyncio.Future[Answer]:
        """A search that fits. Raises: Wrong, or what `refusal` knows."""
        raise NotImplementedError

    def forget(self, asked: asyncio.Future[Answer]) -> None:
        """Nobody waits for a search any more."""
        asked.cancel()

    def is_crowded(self) -> bool:
        """Whether searches wait so long that it pays to look whether their clients are still there."""
        raise NotImplementedError

    async def encoded(
        self, body: messages.SearchBody, tensors: dict[str, Array], content: bytes, binary: bool, receive: Any
    ) -> Reply:
        """A search whose queries are no vectors."""
        raise NotImplementedError

    def refusal(self, error: Exception) -> Reply:
        """The answer to a request that raised.

        Raises: the error, if it is none that a request may raise.
        """
        if isinstance(error, Wrong):
            return Reply(error.status, to_json({"detail": error.sentence}), messages.JSON, error.headers)
        raise error

    # -------------------------------------------------------------------------------------------------- every request

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await _lived(receive, send)
            return
        begun = time.perf_counter()
        path: str = scope["path"]
        if (root := scope.get("root_path", "")) and path.startswith(f"{root}/"):  # inside another application
            path = path[len(root) :]
        status = 499  # the client went away
        try:
            try:
                reply = await self._answered(scope, path, receive)
            except Gone:
                raise
            except Exception as error:
                reply = self.refusal(error)
            status = reply.status
            await _send(send, reply)
        except Gone:
            pass
        except Exception:
            status = 500
            raise
        finally:
            self.tally.answered(path if self._is_known(path) else "other", status, time.perf_counter() - begun)

    def _is_known(self, path: str) -> bool:
        return path == "/search" or path in self.posts or path in self.gets or path in self.pages

    async def _answered(self, scope: Any, path: str, receive: Any) -> Reply:
        kind = self._checked(scope, path)
        method = scope["method"]
        if method == "POST":
            if path == "/search":
                return await self.search(await self._body(receive), kind == messages.BINARY, receive)
            if path in self.posts:
                return await self.posts[path](await self._body(receive), kind == messages.BINARY)
        elif method == "GET":
            if path in self.gets:
                return await self.gets[path](b"", False)
            if path in self.pages:
                return self.pages[path]
        if self._is_known(path):
            allowed = b"GET" if path in self.gets or path in self.pages else b"POST"
            raise Wrong(405, "Method Not Allowed", ((b"allow", allowed),))
        raise Wrong(404, "Not Found")

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
                raise Wrong(401, "a key is needed: Authorization: Bearer KEY, or X-API-Key: KEY.", BEARER)
            if not hmac.compare_digest(key, self._key):
                raise Wrong(401, "the key is not this server's.", BEARER)
        if self.draining and (path == "/search" or path in self.posts):
            raise Wrong(503, "the server is shutting down.", AGAIN + CLOSE)
        return kind

    def _too_large(self, size: int) -> Wrong:
        said = f"the body must be at most {self.limits.body:,} bytes, got {size:,}: send it in several requests."
        return Wrong(413, said, CLOSE)

    async def _body(self, receive: Any) -> bytes:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        if not message.get("more_body", False):
            whole: bytes = message["body"]
            if len(whole) > self.limits.body:
                raise self._too_large(len(whole))
            return whole
        parts, size = [message["body"]], len(message["body"])
        while message.get("more_body", False):
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            parts.append(message["body"])
            size += len(message["body"])
            if size > self.limits.body:
                raise self._too_large(size)
        return b"".join(parts)

    # -------------------------------------------------------------------------------------------------------- searches

    async def search(self, content: bytes, binary: bool, receive: Any = None) -> Reply:
        """Answer the body of a search. receive: of ASGI, if it can tell that the client went away."""
        body, tensors = messages.read(messages.SearchBody, content, binary)
        query = tensors.get("vectors", body.vectors)
        features = body.features is not None or any(name.startswith("features") for name in tensors)
        if (query is not None) + (body.texts is not None) + features != 1:
            raise Wrong(422, "a search must have vectors, texts or features, one of them.")
        if query is None:
            if not self.about.encodes:
                raise Wrong(422, "texts and features need an encoder, and this server has none: send vectors.")
            return await self.encoded(body, tensors, content, binary, receive)
        return await self.searched(self.matrix(query), body, binary, receive)

    async def searched(self, query: Array, body: messages.SearchBody, binary: bool, receive: Any) -> Reply:
        """Answer a search whose queries are a matrix."""
        count = len(query)
        self.check_count(count)
        if not np.isfinite(query).all():
            bad = int((~np.isfinite(query)).any(1).argmax())
            raise Wrong(422, f"vectors must be finite, got NaN or infinity in query {bad}.")
        ks = [body.k] * count if isinstance(body.k, int) else body.k
        if len(ks) != count or not all(1 <= k <= MOST_K for k in ks):
            raise Wrong(422, f"k must be from 1 to {MOST_K:,}, or a list of one for each of {count} queries.")
        wheres = body.where if isinstance(body.where, list) else [body.where] * count
        if len(wheres) != count:
            raise Wrong(422, f"where must have a filter for each of {count} queries, got {len(wheres)}.")
        asked = self.ask(_exactly(query, self.about.half), ks, wheres, body.strict)
        found = await (self._while_there(asked, receive) if receive is not None and self.is_crowded() else asked)
        return Reply(200, found.written(binary), messages.BINARY if binary else messages.JSON)

    def check_count(self, count: int) -> None:
        if not 0 < count <= self.limits.batch:
            status = 422 if not count else 413
            raise Wrong(status, f"a request must have 1 to {self.limits.batch:,} queries, got {count:,}.")

    async def _while_there(self, asked: asyncio.Future[Answer], receive: Any) -> Answer:
        """The answer, unless the client goes away: its search is then taken from the queue."""
        gone = asyncio.ensure_future(receive())
        await asyncio.wait((asked, gone), return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            gone.cancel()
            return asked.result()
        self.forget(asked)
        raise Gone

    def matrix(self, vectors: Any) -> Array:
        """(n, dim) floats of a body.

        Raises: Wrong, 422.
        """
        dim = self.about.dim
        try:
            matrix: Array = np.asarray(vectors, dtype=None if isinstance(vectors, np.ndarray) else np.float32)
        except ValueError:
            matrix = np.empty(0, np.float32)
        if matrix.ndim == 1 and isinstance(vectors, np.ndarray):
            matrix = matrix[None]
        if len(matrix) and (matrix.ndim != 2 or matrix.shape[1] != dim):
            got = f"{matrix.shape}" if matrix.ndim == 2 else "lists of other lengths"
            raise Wrong(422, f"vectors must have {dim} numbers each, the index's dim, got {got}.")
        if not len(matrix) and len(vectors):
            raise Wrong(422, f"vectors must have {dim} numbers each, the index's dim.")
        if matrix.dtype.kind != "f":
            raise Wrong(422, f"vectors must be floats, got {matrix.dtype}.")
        return matrix.astype(np.float32) if matrix.dtype == np.float64 else matrix


def _exactly(query: Array, half: bool) -> Array:
    """The same numbers in the dtype that most searches have: those of one dtype are one search, and of 16 bits one
    product instead of two."""
    if query.dtype == (np.float16 if half else np.float32):
        return query
    if not half:
        return query.astype(np.float32)
    with np.errstate(over="ignore"):
        narrow = query.astype(np.float16)
    return narrow if np.array_equal(narrow, query) else query


async def _send(send: Any, reply: Reply) -> None:
    headers = [
        (b"content-type", reply.kind), (b"content-length", str(len(reply.content)).encode()), *reply.headers,
    ]  # fmt: skip
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.content})


async def _lived(receive: Any, send: Any) -> None:
    """ASGI's messages of begin and end, for servers that insist on them."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
