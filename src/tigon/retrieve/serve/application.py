"""What a server answers, but for the searching: who may ask, what fits, and how it is said.

`Application` is an ASGI application without an index, and without torch. `app.Service` is one that has the index in its
own process, `front.Front` one that passes on what it has checked to the process that has it.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
from pydantic_core import to_json

from tigon.retrieve.serve import messages
from tigon.retrieve.serve.messages import Answer, Array, Wrong
from tigon.retrieve.serve.tally import Tally

MOST_K = 2048  # as of `tigon.filtered_topk`
# Of a request: results, that is queries times k; different filters, of which an index keeps more compiled; and
# characters of these together. More than LONG_FILTER are not compiled in the event loop.
MOST_RESULTS, MOST_FILTERS, FILTER_TEXT, LONG_FILTER = 1 << 17, 256, 1 << 15, 500
BODIES = 16  # of the largest size, that the bodies of all requests may have together
DISCARDED = 4  # times the largest size: what is read and thrown away, so that the client reads its refusal
AGAIN = ((b"retry-after", b"1"),)
BEARER = ((b"www-authenticate", b"Bearer"),)
CLOSE = ((b"connection", b"close"),)
OPEN = ("/health", "/docs", "/openapi.json")  # without a key
LOCAL = ("localhost", "127.0.0.1", "::1")
TEXT, HTML = b"text/plain; version=0.0.4; charset=utf-8", b"text/html; charset=utf-8"

T = TypeVar("T")


class Limits(NamedTuple):
    """What a server takes.

    body: bytes of a request. batch: queries of a request, and of one search. queue: queries that wait. wait: seconds
    that a search waits for others at most. connections: of one process, and request_timeout: seconds in which a request
    must have come, and its answer been read; both are for `running.serve`, another ASGI server has its own.
    """

    body: int = 16 << 20
    batch: int = 256
    queue: int = 4096
    wait: float = 1e-3
    connections: int = 4096
    request_timeout: float = 60.0


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
        hosts: without a key, names that a request's Host may have beside IP addresses and localhost; None: any.
    """

    def __init__(
        self, about: About, key: str | None, limits: Limits, pages: dict[str, Reply], hosts: Sequence[str] | None
    ) -> None:
        self.about, self.limits, self.pages, self.hosts = about, limits, pages, hosts
        self._key = None if key is None else key.encode()
        self.draining = False
        self.tally = Tally()
        self._right_hosts: set[bytes | None] = set()
        self._reader = ThreadPoolExecutor(1, "tigon.retrieve.serve reader")
        self._body_bytes = 0  # of large requests that are not answered
        self.posts: dict[str, Route] = {}  # but for /search
        self.gets: dict[str, Route] = {}

    # ------------------------------------------------------------------------------------------- what a class is to say

    def ask(self, query: Array, ks: list[int], wheres: list[str | None], strict: bool) -> asyncio.Future[Answer]:
        """A search that fits. Raises: Wrong, or what `refusal` knows."""
        raise NotImplementedError

    async def check_filters(self, wheres: set[str], strict: bool) -> None:
        """Compile filters that may take long, outside of the event loop. Raises: what `refusal` knows."""
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
        try:
            kind = self._checked(scope, path)
        except Wrong as wrong:
            if CLOSE[0] in wrong.headers:
                await self._discard(scope, receive)
            raise
        method = scope["method"]
        if method == "POST":
            if path == "/search" or path in self.posts:
                content = await self._body(receive)
                try:
                    if path == "/search":
                        return await self.search(content, kind == messages.BINARY, receive)
                    return await self.posts[path](content, kind == messages.BINARY)
                finally:
                    if len(content) > messages.SMALL:
                        self._body_bytes -= len(content)
        elif method in ("GET", "HEAD"):
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
        kind = key = host = origin = None
        for name, value in scope["headers"]:
            if name == b"content-type":
                kind = value.partition(b";")[0].strip().lower()
            elif name == b"authorization" and value[:7].lower() == b"bearer ":
                key = value[7:]
            elif name == b"x-api-key":
                key = value
            elif name == b"host":
                host = value
            elif name == b"origin":
                origin = value
            elif name == b"content-length" and int(value[:20]) > self.limits.body:
                raise self._too_large(int(value[:20]))
        if self._key is None:
            self._check_browser(path, kind, host, origin)
        elif path not in OPEN:
            if key is None:
                raise Wrong(401, "a key is needed: Authorization: Bearer KEY, or X-API-Key: KEY.", BEARER)
            if not hmac.compare_digest(key, self._key):
                raise Wrong(401, "the key is not this server's.", BEARER)
        if self.draining and (path == "/search" or path in self.posts):
            raise Wrong(503, "the server is shutting down.", AGAIN + CLOSE)
        return kind

    def _check_browser(self, path: str, kind: bytes | None, host: bytes | None, origin: bytes | None) -> None:
        """Refuse what a foreign web page may have sent: without a key, nothing else tells it from the user."""
        if self.hosts is not None and host not in self._right_hosts:
            if not self._is_right_host(host):
                raise Wrong(403, "the Host of the request is none of this server's: --allowed-hosts names more.")
            if len(self._right_hosts) >= 256:
                self._right_hosts.clear()
            self._right_hosts.add(host)
        if origin is not None and origin.partition(b"://")[2].lower() != (host or b"").lower():
            raise Wrong(403, "a web page of another origin cannot use this server, since it has no API key.")
        if path in self.posts and kind not in (messages.JSON, messages.BINARY) and (kind or path != "/snapshot"):
            raise Wrong(415, "content-type must be application/json or application/octet-stream.")

    def _is_right_host(self, host: bytes | None) -> bool:
        """Whether a Host is an address, which no foreign name can be resolved to, or an allowed name."""
        assert self.hosts is not None
        text = (host or b"").decode("latin-1").lower()
        name = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
        if name in LOCAL or "*" in self.hosts or name in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _too_large(self, size: int) -> Wrong:
        said = f"the body must be at most {self.limits.body:,} bytes, got {size:,}: send it in several requests."
        return Wrong(413, said, CLOSE)

    async def _discard(self, scope: Any, receive: Any, size: int = 0) -> None:
        """Read what is left of a body that is refused. Closed before, the connection would be reset, and the client
        might not see the answer."""
        headers = dict(scope["headers"])
        if headers.get(b"expect") or int((headers.get(b"content-length") or b"0")[:20]) > DISCARDED * self.limits.body:
            return  # the client waits, or would send for too long
        while size <= DISCARDED * self.limits.body:
            message = await receive()
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return
            size += len(message["body"])

    async def _body(self, receive: Any) -> bytes:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        if not message.get("more_body", False):
            whole: bytes = message["body"]
            if len(whole) > self.limits.body:
                raise self._too_large(len(whole))
            if len(whole) > messages.SMALL:
                self._body_bytes += len(whole)
            return whole
        parts, size = [message["body"]], len(message["body"])
        self._body_bytes += size
        counted = size
        try:
            while message.get("more_body", False):
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                parts.append(message["body"])
                size += len(message["body"])
                counted += len(message["body"])
                self._body_bytes += len(message["body"])
                if size > self.limits.body or self._body_bytes > BODIES * self.limits.body:
                    parts.clear()
                    self._body_bytes -= counted
                    counted = 0
                    if message.get("more_body", False):
                        await self._discard({"headers": ()}, receive, size)
                    if size > self.limits.body:
                        raise self._too_large(size)
                    raise Wrong(503, "the server reads as many large requests as it can.", AGAIN + CLOSE)
            if size > messages.SMALL:
                counted = 0  # until the request is answered
        finally:
            self._body_bytes -= counted
        return b"".join(parts)

    async def read(self, kind: type[messages.B], content: bytes, binary: bool) -> tuple[messages.B, dict[str, Array]]:
        """A body and its tensors, as of `messages.read`."""
        size = messages.text_size(content, binary)
        return await self.off_loop(size, messages.read, kind, content, binary, self.about.dim)

    async def off_loop(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """What a function returns, called in a thread if it has so many bytes of JSON to work on."""
        if size <= messages.SMALL:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._reader, function, *arguments)

    # -------------------------------------------------------------------------------------------------------- searches

    async def search(self, content: bytes, binary: bool, receive: Any = None) -> Reply:
        """Answer the body of a search. receive: of ASGI, if it can tell that the client went away."""
        if len(content) <= messages.SMALL:
            body, tensors = messages.read(messages.SearchBody, content, binary, self.about.dim)
        else:
            body, tensors = await self.read(messages.SearchBody, content, binary)
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
        if count * max(ks) > MOST_RESULTS:
            raise Wrong(413, f"a request must have at most {MOST_RESULTS:,} results, queries times k.")
        wheres = body.where if isinstance(body.where, list) else [body.where] * count
        if len(wheres) != count:
            raise Wrong(422, f"where must have a filter for each of {count} queries, got {len(wheres)}.")
        if isinstance(body.where, list) or (body.where is not None and len(body.where) > LONG_FILTER):
            await self._check_filters(wheres, body.strict)
        asked = self.ask(_exactly(query, self.about.half), ks, wheres, body.strict)
        found = await (self._while_there(asked, receive) if receive is not None and self.is_crowded() else asked)
        return Reply(200, found.written(binary), messages.BINARY if binary else messages.JSON)

    async def _check_filters(self, wheres: list[str | None], strict: bool) -> None:
        distinct = {where for where in wheres if where is not None}
        if (size := sum(map(len, distinct))) <= LONG_FILTER:
            return
        if size > FILTER_TEXT or len(distinct) > MOST_FILTERS:
            said = f"{MOST_FILTERS} different filters, of {FILTER_TEXT:,} characters together"
            raise Wrong(422, f"a request must have at most {said}, got {len(distinct):,} of {size:,}.")
        await self.check_filters(distinct, strict)

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
            matrix: Array = vectors if isinstance(vectors, np.ndarray) else np.asarray(vectors, dtype=np.float32)
        except ValueError:
            matrix = np.empty(0, np.float32)
        if matrix.ndim == 0:
            raise Wrong(422, f"vectors must have {dim} numbers each, the index's dim.")
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
