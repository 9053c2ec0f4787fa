"""What fronts and the process of the index say to each other, over a socket of their own.

A frame is a head and a body. The head has the kind of the frame, a number, and the bytes of the body. Requests have
numbers, by which answers find them; those that come together are one frame, since each costs the process of the index
some 20 µs of Python, whatever it holds.

    from the index   HELLO: what a front has to know. FOUND, REFUSED: of searches. REPLIED: of calls. COUNT: asks for
                     COUNTED. DRAIN: end, after so many seconds.
    from a front     READY. SEARCH. CANCEL: nobody waits for request `number`. CALL: a request of another kind. COUNTED:
                     a tally.

Both ends are processes of one machine and one installation: numbers have the machine's order of bytes.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from tigon.retrieve.serve.application import Reply
from tigon.retrieve.serve.messages import KEPT, Array

HELLO, FOUND, REFUSED, REPLIED, COUNT, DRAIN, READY, SEARCH, CANCEL, CALL, COUNTED = range(11)
HEAD = struct.Struct("=IIQ")
_SEARCH = struct.Struct("=IIIBB")  # requests, queries, bytes of filters, whether fp16, whether strict
_FOUND = struct.Struct("=IIIB")  # requests, queries, results of a query, whether ids are strings
_CALL = struct.Struct("=HB")  # bytes of the path, whether the content is tensors
_REPLIED = struct.Struct("=HI")  # status, bytes of what goes with the content


class Frames:
    """Frames out of a stream's pieces."""

    def __init__(self) -> None:
        self._rest = b""
        self._more: list[bytes] = []
        self._missing = 0  # bytes of the frame that has begun

    def feed(self, data: bytes) -> Iterator[tuple[int, int, memoryview]]:
        """The frames that are complete with these bytes: kind, number, body. A body is valid as long as it is held."""
        if self._missing > len(data):
            self._missing -= len(data)
            self._more.append(data)
            return
        if self._rest or self._more:
            data = b"".join((self._rest, *self._more, data))
            self._rest, self._more = b"", []
        view = memoryview(data)
        start = 0
        self._missing = 0
        while start + HEAD.size <= len(data):
            kind, number, size = HEAD.unpack_from(data, start)
            end = start + HEAD.size + size
            if end > len(data):
                self._missing = end - len(data)
                break
            yield kind, number, view[start + HEAD.size : end]
            start = end
        self._rest = data[start:]


def frame(kind: int, number: int, *parts: bytes | memoryview) -> bytes:
    return b"".join((HEAD.pack(kind, number, sum(map(len, parts))), *parts))


def of_json(kind: int, content: Any, number: int = 0) -> bytes:
    return frame(kind, number, json.dumps(content).encode())


class Search(NamedTuple):
    """Requests that are searched for together. numbers, counts: (requests,), their numbers and how many queries each
    has. query: (queries, dim) of one dtype. ks: of each query. wheres: of each query."""

    numbers: list[int]
    counts: list[int]
    query: Array
    ks: list[int]
    wheres: list[str | None]
    strict: bool

    def packed(self) -> bytes:
        filters: dict[str, int] = {}
        which = [-1 if where is None else filters.setdefault(where, len(filters)) for where in self.wheres]
        texts = json.dumps(list(filters)).encode() if filters else b""
        half = self.query.dtype == np.float16
        head = _SEARCH.pack(len(self.numbers), len(self.query), len(texts), half, self.strict)
        numbers = np.array((*self.numbers, *self.counts, *self.ks, *which), dtype=np.int32)
        return frame(SEARCH, 0, head, numbers.tobytes(), texts, self.query.tobytes())

    @staticmethod
    def of(body: memoryview, dim: int) -> Search:
        requests, queries, size, half, strict = _SEARCH.unpack_from(body)
        start = _SEARCH.size
        count = 2 * (requests + queries)
        numbers = np.frombuffer(body, np.int32, count, start).tolist()
        start += 4 * count
        texts = bytes(body[start : start + size])
        filters = _filters(texts) if size <= KEPT else _filters.__wrapped__(texts)
        query = np.frombuffer(body, np.float16 if half else np.float32, queries * dim, start + size)
        ks, which = numbers[2 * requests : 2 * requests + queries], numbers[2 * requests + queries :]
        return Search(
            numbers[:requests], numbers[requests : 2 * requests], query.reshape(queries, dim), ks,
            [filters[i] for i in which], bool(strict),
        )  # fmt: skip


@functools.lru_cache(1024)
def _filters(texts: bytes) -> tuple[str | None, ...]:
    return (*(json.loads(texts) if texts else ()), None)  # at −1


def joined(searches: list[Search], most: int) -> list[Search]:
    """The same requests in fewer searches, of at most so many queries each."""
    if len(searches) == 1:
        return searches
    alike: dict[Any, list[list[Search]]] = {}
    for search in searches:
        groups = alike.setdefault((search.query.dtype, search.strict), [[]])
        if sum(len(other.query) for other in groups[-1]) + len(search.query) > most:
            groups.append([])
        groups[-1].append(search)
    return [_one(group) for groups in alike.values() for group in groups if group]


def _one(group: list[Search]) -> Search:
    def whole(name: str) -> list[Any]:
        return list(chain.from_iterable(getattr(one, name) for one in group))

    query = np.concatenate([one.query for one in group])
    return Search(whole("numbers"), whole("counts"), query, whole("ks"), whole("wheres"), group[0].strict)


class Found(NamedTuple):
    """Answers to requests. counts: queries of each. ids: (queries, k) int64, or lengths (queries, k) of strings, −1
    where there is none, that stand one after another in names."""

    numbers: list[int]
    counts: list[int]
    scores: Array
    ids: Array
    exact: Array
    names: bytes | None

    @staticmethod
    def joined(answers: list[Found]) -> list[Found]:
        """The same answers in fewer frames: those with equally many results."""
        if len(answers) == 1:
            return answers
        alike: dict[int, list[Found]] = {}
        for found in answers:
            alike.setdefault(found.scores.shape[1], []).append(found)
        return [
            Found(
                list(chain.from_iterable(found.numbers for found in group)),
                list(chain.from_iterable(found.counts for found in group)),
                np.concatenate([found.scores for found in group]), np.concatenate([found.ids for found in group]),
                np.concatenate([found.exact for found in group]),
                None if group[0].names is None else b"".join(found.names or b"" for found in group),
            )
            for group in alike.values()
        ]  # fmt: skip

    def packed(self) -> bytes:
        queries, k = self.scores.shape
        head = _FOUND.pack(len(self.numbers), queries, k, self.names is not None)
        numbers = np.array((*self.numbers, *self.counts), dtype=np.int32).tobytes()
        arrays = self.ids.tobytes(), self.scores.tobytes(), self.exact.tobytes()
        return frame(FOUND, 0, head, numbers, *arrays, self.names or b"")

    @staticmethod
    def of(body: memoryview) -> Found:
        """With ids as an index's hits have them: int64, or strings."""
        requests, queries, k, strings = _FOUND.unpack_from(body)
        start = _FOUND.size
        numbers = np.frombuffer(body, np.int32, 2 * requests, start).tolist()
        start += 8 * requests
        size = queries * k
        ids = np.frombuffer(body, np.int64, size, start)
        scores = np.frombuffer(body, np.float32, size, start + 8 * size).reshape(queries, k)
        exact = np.frombuffer(body, np.bool_, queries, start + 12 * size)
        if strings:
            ids = _strings(ids, bytes(body[start + 12 * size + queries :]))
        return Found(numbers[:requests], numbers[requests:], scores, ids.reshape(queries, k), exact, None)


def _strings(lengths: Array, names: bytes) -> Array:
    found = np.empty(len(lengths), dtype=object)
    ends = np.cumsum(np.maximum(lengths, 0)).tolist()
    start = 0
    for i, (length, end) in enumerate(zip(lengths.tolist(), ends, strict=True)):
        found[i] = names[start:end].decode() if length >= 0 else None
        start = end
    return found


def call(number: int, path: str, content: bytes, binary: bool) -> bytes:
    return frame(CALL, number, _CALL.pack(len(path), binary), path.encode(), content)


def called(body: memoryview) -> tuple[str, bytes, bool]:
    size, binary = _CALL.unpack_from(body)
    return bytes(body[_CALL.size : _CALL.size + size]).decode(), bytes(body[_CALL.size + size :]), bool(binary)


def replied(number: int, reply: Reply) -> bytes:
    about = json.dumps(about_of(reply)).encode()
    return frame(REPLIED, number, _REPLIED.pack(reply.status, len(about)), about, reply.content)


def reply_of(body: memoryview) -> Reply:
    status, size = _REPLIED.unpack_from(body)
    kind, headers = json.loads(bytes(body[_REPLIED.size : _REPLIED.size + size]))
    return Reply(status, bytes(body[_REPLIED.size + size :]), kind.encode(), headers_of(headers))


def about_of(reply: Reply) -> list[Any]:
    return [reply.kind.decode(), [[name.decode(), value.decode()] for name, value in reply.headers]]


def headers_of(headers: list[list[str]]) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((name.encode(), value.encode()) for name, value in headers)
