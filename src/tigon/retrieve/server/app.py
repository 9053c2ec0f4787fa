"""The server's ASGI application: access control, size limits, and responses.

`Application` has neither an index nor torch. Its backend is `service.IndexBackend`, which has the index in the same
process, or `worker.RemoteBackend`, which forwards requests to the index process.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, Response

from tigon.retrieve.server import openapi
from tigon.retrieve.server.bodies import BINARY, JSON, SMALL, Array, SearchResult, is_small
from tigon.retrieve.server.metrics import RequestMetrics
from tigon.retrieve.server.requests import (
    IndexInfo,
    Limits,
    SearchRequest,
    UpsertRequest,
    check_vectors,
    parse_ids,
    parse_queries,
)

MAX_BODIES = 16  # all request bodies together, in multiples of the largest size
MAX_DISCARDED = 4  # times the largest size: bytes read and discarded, so that the client reads its refusal
RETRY = {"retry-after": "1"}
CLOSE = {"connection": "close"}
OPEN_PATHS = ("/health", "/docs", "/openapi.json")  # without a key
UPDATES = ("/upsert", "/delete", "/snapshot")
METHODS = ("encode", "upsert", "delete", "snapshot", "health", "metrics")  # of the index process
LOCAL = ("localhost", "127.0.0.1", "::1")
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

T = TypeVar("T")
Post = Callable[[bytes, bool, Any], Awaitable[Response]]  # from the body, whether tensors, and ASGI's receive


class Backend(Protocol):
    """Answers checked requests. Each method may raise an HTTPException."""

    def is_crowded(self) -> bool:
        """Whether searches wait so long that checking for disconnected clients pays off."""

    async def search(self, query: Array, k: list[int], where: list[str | None], strict: bool) -> SearchResult:
        """A request that is cancelled before its search starts is skipped."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call one of `METHODS`: "encode" gives an array, "metrics" bytes, and the others a response's fields."""


class Application:
    """An ASGI application.

    Args:
        backend: answers the requests.
        info: on the index.
        key: that a request must carry; None: none.
        limits: on requests.
        hosts: without a key, names allowed as a request's Host beside IP addresses and localhost; None: any.
    """

    def __init__(
        self, backend: Backend, info: IndexInfo, key: str | None, limits: Limits, hosts: Sequence[str] | None
    ) -> None:
        self.backend, self.info, self.key, self.limits, self.hosts = backend, info, key, limits, hosts
        self.draining = False
        self.metrics = RequestMetrics()
        self.held_bytes = 0  # bytes in bodies being read, and in large bodies whose requests are not answered
        self._known_hosts: set[bytes | None] = set()
        self._parser = ThreadPoolExecutor(1, "tigon.retrieve.server parser")
        self._api = openapi.describe_api(info.has_snapshot)
        self._posts: dict[str, Post] = {"/search": self.search, "/upsert": self.upsert, "/delete": self.delete}
        if info.has_snapshot:
            self._posts["/snapshot"] = self.snapshot
        self._pages = {
            "/health": self.show_health, "/metrics": self.show_metrics, "/docs": self.show_docs,
            "/openapi.json": self.show_api,
        }  # fmt: skip

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise ValueError(f"the server supports only HTTP, got {scope['type']}.")
        start, status = time.perf_counter(), 499  # the client disconnected
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))  # inside another application

        async def send_response(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            try:
                self._check_access(scope, path)
                response = await self._answer(path, scope, receive)
            except HTTPException as error:
                if error.headers and "connection" in error.headers:
                    await self._discard(scope, receive)
                response = Response(to_json({"detail": error.detail}), error.status_code, error.headers, JSON)
            await response(scope, receive, send_response)
        except ClientDisconnect:
            pass
        except Exception:
            status = 500
            raise
        finally:
            known = path in self._posts or path in self._pages
            self.metrics.observe(path if known else "other", status, time.perf_counter() - start)

    async def _answer(self, path: str, scope: Any, receive: Any) -> Response:
        method = scope["method"]
        if method == "POST" and path in self._posts:
            content = await self.read_body(scope, receive)
            try:
                return await self._posts[path](content, scope["tigon.content_type"] == BINARY, receive)
            finally:
                self.release_body(content)
        if method in ("GET", "HEAD") and path in self._pages:
            return await self._pages[path]()
        if path in self._posts or path in self._pages:
            raise HTTPException(405, headers={"allow": "POST" if path in self._posts else "GET, HEAD"})
        raise HTTPException(404)

    # ------------------------------------------------------------------------------------------------ every request

    def _check_access(self, scope: Any, path: str) -> None:
        """Raise an HTTPException for a forbidden request. Sets the content type in the scope."""
        kind = key = host = origin = None
        for name, value in scope["headers"]:
            if name == b"content-type":
                kind = value.partition(b";")[0].strip().lower().decode("latin-1")
            elif name == b"authorization" and value[:7].lower() == b"bearer ":
                key = value[7:]
            elif name == b"x-api-key":
                key = value
            elif name == b"host":
                host = value
            elif name == b"origin":
                origin = value
            elif name == b"content-length" and int(value[:20]) > self.limits.max_body:
                raise self._too_large(int(value[:20]))
        scope["tigon.content_type"] = kind
        if self.key is None:
            self._check_browser(path, kind, host, origin)
        elif path not in OPEN_PATHS:
            bearer = {"www-authenticate": "Bearer"}
            if key is None:
                raise HTTPException(401, "a key is required: Authorization: Bearer KEY, or X-API-Key: KEY.", bearer)
            if not hmac.compare_digest(key, self.key.encode()):
                raise HTTPException(401, "the API key is wrong.", bearer)
        if self.draining and path in self._posts:
            raise HTTPException(503, "the server is shutting down.", RETRY | CLOSE)

    def _check_browser(self, path: str, kind: str | None, host: bytes | None, origin: bytes | None) -> None:
        """Refuse requests that a foreign web page may have sent: without a key, they look like the user's."""
        if self.hosts is not None and host not in self._known_hosts:
            if not self._is_known_host(host):
                raise HTTPException(403, "the request's Host is not allowed: add the name to --allowed-hosts.")
            if len(self._known_hosts) >= 256:
                self._known_hosts.clear()
            self._known_hosts.add(host)
        if origin is not None and origin.partition(b"://")[2].lower() != (host or b"").lower():
            raise HTTPException(403, "a web page from another origin cannot use a server without an API key.")
        if path in UPDATES and path in self._posts and kind not in (JSON, BINARY) and (kind or path != "/snapshot"):
            raise HTTPException(415, "content-type must be application/json or application/octet-stream.")

    def _is_known_host(self, host: bytes | None) -> bool:
        """Whether a Host is an address, which no foreign name resolves to, or an allowed name."""
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

    def _too_large(self, size: int) -> HTTPException:
        limit = f"the body must be at most {self.limits.max_body:,} bytes"
        return HTTPException(413, f"{limit}, got {size:,}: send it in several requests.", CLOSE)

    async def _discard(self, scope: Any, receive: Any) -> None:
        """Read the rest of a refused body. Closing earlier would reset the connection, and the client might not see the
        response.
        """
        limit = MAX_DISCARDED * self.limits.max_body
        headers = dict(scope["headers"])
        size = scope.get("tigon.received", 0)
        if (headers.get(b"expect") and not size) or int((headers.get(b"content-length") or b"0")[:20]) > limit:
            return  # the client waits for the response, or would send for too long
        while size <= limit and scope.get("tigon.more_body", True):
            message = await receive()
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return
            size += len(message["body"])

    async def read_body(self, scope: Any, receive: Any) -> bytes:
        """Read a request body; its bytes count in `held_bytes` until `release_body`.

        Raises: HTTPException, 413 or 503, for a body that is too large alone or beside others; ClientDisconnect.
        """
        parts: list[bytes] = []
        size, more = 0, True
        try:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                part, more = message["body"], message.get("more_body", False)
                parts.append(part)
                size += len(part)
                self.held_bytes += len(part)
                if size > self.limits.max_body or self.held_bytes > MAX_BODIES * self.limits.max_body:
                    scope["tigon.received"], scope["tigon.more_body"] = size, more
                    if size > self.limits.max_body:
                        raise self._too_large(size)
                    raise HTTPException(503, "too many large requests at once.", RETRY | CLOSE)
        except BaseException:
            self.held_bytes -= size
            parts.clear()  # the error holds this frame while the rest of the body is discarded
            raise
        if size <= SMALL:
            self.held_bytes -= size
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def release_body(self, content: bytes) -> None:
        """Called when the body's request is answered."""
        if len(content) > SMALL:
            self.held_bytes -= len(content)

    async def _parse(self, parse: Callable[..., T], content: bytes, binary: bool, *arguments: Any) -> T:
        """Parse a request, in a thread if the body has much JSON."""
        if is_small(content, binary):
            return parse(content, binary, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._parser, parse, content, binary, *arguments)

    def close(self) -> None:
        self._parser.shutdown(cancel_futures=True)

    # ----------------------------------------------------------------------------------------------------- responses

    async def search(self, content: bytes, binary: bool, receive: Any) -> Response:
        request = await self._parse(SearchRequest.parse, content, binary, self.info, self.limits)
        query = request.query
        if query is None:
            count = len(request.k)
            vectors: Array = await self.backend.call("encode", request.features)
            if vectors.shape[:-1] != (count,):
                raise HTTPException(
                    422, f"the encoder must return a vector for each of {count} queries, got {vectors.shape}."
                )
            query = parse_queries(check_vectors(vectors, self.info.dim), self.info)
        search = self.backend.search(query, request.k, request.where, request.strict)
        result = await (_while_connected(search, receive) if self.backend.is_crowded() else search)
        return Response(result.to_bytes(binary), media_type=BINARY if binary else JSON)

    async def upsert(self, content: bytes, binary: bool, receive: Any) -> Response:
        request = await self._parse(UpsertRequest.parse, content, binary, self.info)
        return _json_response(await self.backend.call("upsert", *request))

    async def delete(self, content: bytes, binary: bool, receive: Any) -> Response:
        ids = await self._parse(parse_ids, content, binary, self.info)
        return _json_response(await self.backend.call("delete", ids))

    async def snapshot(self, content: bytes, binary: bool, receive: Any) -> Response:
        return _json_response(await self.backend.call("snapshot"))

    async def show_health(self) -> Response:
        health = {"status": "draining" if self.draining else "ok", **await self.backend.call("health")}
        if self.key is not None:  # /health needs no key, but column names are not public
            del health["columns"]
        return _json_response(health, 503 if self.draining else 200)

    async def show_metrics(self) -> Response:
        searches = await self.backend.call("metrics")
        return Response(self.metrics.to_text() + searches, headers={"content-type": PROMETHEUS})

    async def show_docs(self) -> Response:
        policy = {"content-security-policy": openapi.CONTENT_POLICY}
        return HTMLResponse(openapi.render_page(self._api), headers=policy)

    async def show_api(self) -> Response:
        return _json_response(self._api)


async def _while_connected(search: Coroutine[Any, Any, T], receive: Any) -> T:
    """Await a search, which is cancelled if the client disconnects.

    Raises: ClientDisconnect.
    """
    searching = asyncio.ensure_future(search)
    leaving = asyncio.ensure_future(receive())
    await asyncio.wait((searching, leaving), return_when=asyncio.FIRST_COMPLETED)
    if searching.done():
        leaving.cancel()
        return searching.result()
    searching.cancel()
    raise ClientDisconnect


def _json_response(content: dict[str, Any], status: int = 200) -> Response:
    return Response(to_json(content), status, media_type=JSON)
