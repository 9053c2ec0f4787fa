"""Request and response bodies: JSON, or safetensors where speed counts.

In a safetensors body (`application/octet-stream`) fields may be tensors with the field's name; the other fields are
JSON under "request" in the metadata. A request in tensors gets a response in tensors.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, FailFast, Field, TypeAdapter, ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from tigon.files import parse_json
from tigon.retrieve.server.large_json import MAX_VALUES, Take, TooManyValues, parse_large_object

Array = npt.NDArray[Any]
BINARY, JSON = "application/octet-stream", "application/json"
# safetensors names for numpy dtypes.
DTYPES: dict[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"), "U8": np.dtype("u1"), "BOOL": np.dtype("?"),
}  # fmt: skip
MAX_CACHED_HEADER = 4096  # bytes in a tensor header
SMALL = 1 << 16  # bytes of JSON parsed in the event loop, which takes 7 ms at worst
CHUNK = 1 << 14  # numbers from rows that are converted to an array together
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class HashableFailFast(FailFast):
    """pydantic's own cannot be part of a union."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


# The first invalid element is enough for an error message; pydantic would describe each.
FIRST = HashableFailFast()
Rows = Annotated[list[Annotated[list[float], FIRST]], FIRST]
Ints = Annotated[list[int], FIRST]
Texts = Annotated[list[str], FIRST]
Filters = Annotated[list[str | None], FIRST]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    tensors: ClassVar[tuple[str, ...]] = ("vectors", "ids")


class SearchBody(Body):
    """Queries: vectors, or the input for the server's encoder: texts or features. One k and filter for all queries, or
    a list with one per query.
    """

    tensors: ClassVar[tuple[str, ...]] = ("vectors", "features")

    vectors: Rows | None = Field(None, description="(queries, dim)")
    texts: Texts | None = Field(None, description="text queries for the server's encoder")
    features: list[Any] | dict[str, list[Any]] | None = Field(
        None, description="a number, a list of numbers or a text for each query; or such a list for each feature name"
    )
    k: int | Ints = Field(10, description="items for each query, 1 to 2048")
    where: str | Filters | None = Field(None, description="a filter, such as country == 'us' and price <= 30")
    strict: bool = Field(False, description="whether a filter value that no item has is an error")


class UpsertBody(Body):
    """Items to insert, or to replace by id. A call is atomic."""

    ids: Ints | Texts = Field(description="item ids, all integers or all strings")
    vectors: Rows | None = Field(None, description="(items, dim)")
    table: dict[str, list[Any]] | None = Field(None, description="attributes, a list for each column")


class DeleteBody(Body):
    """Items to delete."""

    ids: Ints | Texts = Field(description="item ids; unknown ids are ignored")


B = TypeVar("B", bound=Body)


def parse_body(kind: type[B], content: bytes, binary: bool, dim: int) -> tuple[B, dict[str, Array]]:
    """A body's fields, and its arrays: the tensors, vectors as lists, and in large bodies integer ids as a list.

    Args:
        dim: the index's vector width.

    Raises: HTTPException, 422 or 413, for an invalid body.
    """
    try:
        if binary:
            return _parse_tensors(kind, content, dim)
        if len(content) <= SMALL:
            body = kind.model_validate_json(content)
            rows: Any = getattr(body, "vectors", None)
            return body, {} if rows is None else {"vectors": _to_matrix(rows, dim)}
        fields, arrays = _parse_fields(kind, content.decode(), "the body", dim)
        return kind.model_validate(fields), arrays
    except ValidationError as error:
        raise HTTPException(422, _describe(error)) from None
    except UnicodeDecodeError:
        raise HTTPException(422, "the body must be JSON in UTF-8.") from None


def is_small(content: bytes, binary: bool) -> bool:
    """Whether the JSON is small enough to parse in the event loop."""
    return (int.from_bytes(content[:8], "little") if binary else len(content)) <= SMALL


def _parse_fields(kind: type[B], text: str, name: str, dim: int) -> tuple[dict[str, Any], dict[str, Array]]:
    """Parse a body's fields; vectors and integer ids as arrays, if the body is large.

    Raises: HTTPException.
    """
    vectors, ids = _VectorReader(dim), _IdReader()
    take = {"vectors": vectors.take, "ids": ids.take}
    fields = _parse_object(text, name, {field: take[field] for field in take.keys() & kind.model_fields.keys()})
    arrays = {}
    if isinstance(fields.get("vectors"), list):
        vectors.rows += fields.pop("vectors")
        vectors.convert()
        arrays["vectors"] = np.concatenate(vectors.parts)
    if ids.parts:
        arrays["ids"] = np.concatenate(ids.parts)
    elif ids.texts:
        fields["ids"] = ids.texts
    return fields, arrays


def _parse_object(text: str, name: str, take: Mapping[str, Take]) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = parse_json(text, name) if len(text) <= SMALL else parse_large_object(text, take)
    except TooManyValues as error:
        raise HTTPException(413, f"{error}: send it in several requests.") from None
    except UnicodeEncodeError:
        raise HTTPException(422, f"{name} is not UTF-8 text.") from None
    except ValueError as error:
        sentence = str(error).split(";")[0]
        raise HTTPException(422, sentence if len(text) <= SMALL else f"{name} must be JSON: {sentence}.") from None
    return fields


class _VectorReader:
    """Reads rows of numbers, converting them to an array in chunks."""

    def __init__(self, dim: int) -> None:
        self.dim, self.count = dim, 0
        self.parts: list[Array] = []
        self.rows: list[Any] = []

    def take(self, rows: list[Any]) -> None:
        self.rows += rows
        # A row of another width is refused at once: it may be long.
        is_wrong = any(isinstance(row, list) and len(row) != self.dim for row in rows)
        if is_wrong or len(self.rows) * self.dim >= CHUNK:
            self.convert()

    def convert(self) -> None:
        _check_elements(_ROWS, self.rows, "vectors", self.count)
        self.parts.append(_to_matrix(self.rows, self.dim))
        self.count += len(self.rows)
        self.rows.clear()


def _to_matrix(rows: list[list[float]], dim: int) -> Array:
    """(n, dim) fp32."""
    wrong = next((len(row) for row in rows if len(row) != dim), dim)
    if wrong != dim:
        raise HTTPException(422, f"vectors must have {dim} numbers each, the index's dim, got {wrong:,}.")
    with np.errstate(over="ignore"):
        return np.array(rows, dtype=np.float32).reshape(-1, dim)


class _IdReader:
    """Reads integers, converted to arrays, or strings."""

    def __init__(self) -> None:
        self.count = 0
        self.parts: list[Array] = []
        self.texts: list[str] = []

    def take(self, ids: list[Any]) -> None:
        are_texts = isinstance(ids[0], str) if not self.count else bool(self.texts)
        _check_elements(_TEXTS if are_texts else _INTS, ids, "ids", self.count)
        self.count += len(ids)
        if are_texts:
            self.texts += ids
            if len(self.texts) > MAX_VALUES:
                raise TooManyValues(f"a request has at most {MAX_VALUES:,} ids that are strings")
            return
        try:
            self.parts.append(np.array(ids, dtype=np.int64))
        except OverflowError:
            raise HTTPException(422, "ids must be strings, or integers from -2**63 to 2**63 - 1.") from None


_ROWS, _INTS, _TEXTS = TypeAdapter(Rows), TypeAdapter(Ints), TypeAdapter(Texts)


def _check_elements(adapter: TypeAdapter[Any], elements: list[Any], name: str, first: int) -> None:
    """Raise an HTTPException for the first invalid element; elements are numbered from `first`."""
    try:
        adapter.validate_python(elements, strict=True)
    except ValidationError as error:
        raise HTTPException(422, _describe(error, name, first)) from None


def _describe(error: ValidationError, name: str | None = None, start: int = 0) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return f"the body must be JSON: {first['msg'].removeprefix('Invalid JSON: ')}."
    loc = first["loc"]
    if name is not None:
        loc = (name, int(loc[0]) + start, *loc[1:])
    place = ".".join(str(part)[:100] for part in loc)
    if first["type"] == "extra_forbidden":
        return f"{place} is not a field of this request."
    return f"{place or 'the body'}: {first['msg'][:1].lower()}{first['msg'][1:]}."


class TensorSpan(NamedTuple):
    """A tensor in a body: its byte range, counted from the end of the header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    first: int
    last: int


def _parse_tensors(kind: type[B], content: bytes, dim: int) -> tuple[B, dict[str, Array]]:
    """Parse fields and tensors from a safetensors body. Tensors are views into the body."""
    end = 8 + int.from_bytes(content[:8], "little")
    try:
        if len(content) < 8 or end > len(content):
            raise ValueError(f"the header should end at byte {end:,} of {len(content):,}")
        parse_header = _parse_header if end <= MAX_CACHED_HEADER else _parse_header.__wrapped__
        body, arrays, spans = parse_header(kind, content[8:end], dim)
        tensors = dict(arrays)
        for name, (dtype, shape, first, last) in spans.items():
            if last > len(content) - end:
                raise ValueError(f"{name} is not inside the body")
            tensors[name] = np.frombuffer(content[end + first : end + last], dtype).reshape(shape)
    except KeyError as error:
        raise HTTPException(
            422, f"the body must be safetensors with dtypes {', '.join(DTYPES)}, got {str(error)[:100]}."
        ) from None
    except ValidationError:
        raise
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise HTTPException(
            422, f"the body must be safetensors, with the request as JSON in its metadata: {error}."
        ) from None
    return body, tensors


@functools.lru_cache(1024)
def _parse_header(kind: type[B], text: bytes, dim: int) -> tuple[B, dict[str, Array], dict[str, TensorSpan]]:
    """The fields, the fields that a large request has as arrays, and the tensor spans.

    A client's headers are alike, and parsing a header takes longer than the rest of the request.
    """
    header = _parse_object(text.decode(), "the header", {})
    request = header.pop("__metadata__", {}).get("request", "{}")
    fields, arrays = _parse_fields(kind, request, "request in the metadata", dim)
    if both := (fields.keys() | arrays.keys()) & header.keys():
        raise HTTPException(422, f"{min(both)} must be a tensor or a field of the request, got both.")
    if unknown := {name for name in header if name.partition(".")[0] not in kind.tensors or name[:8] == "vectors."}:
        raise HTTPException(422, f"tensors must be named {' or '.join(kind.tensors)}, got {min(unknown)[:100]!r}.")
    spans = {}
    for name, tensor in header.items():
        dtype, shape, (first, last) = DTYPES[tensor["dtype"]], tensor["shape"], tensor["data_offsets"]
        if not shape or not 0 <= first <= last or any(n < 0 for n in shape):
            raise ValueError(f"{name[:100]} has the shape {str(shape)[:100]} at {first} to {last}")
        spans[name] = TensorSpan(dtype, tuple(shape), first, last)
    # Ids in a tensor need no element checks.
    return kind.model_validate({"ids": [], **fields} if "ids" in header else fields), arrays, spans


def parse_features(body: SearchBody, tensors: dict[str, Array]) -> tuple[Any, int]:
    """An encoder's input, arrays or lists of texts directly or by name, and the query count.

    Raises: HTTPException, 422, for unequal lengths, and for values that are neither numbers nor texts.
    """
    if body.texts is not None:
        return body.texts, len(body.texts)
    named: dict[str, Array | list[str]] = {
        name.partition(".")[2]: array for name, array in tensors.items() if name != "vectors"
    }
    if isinstance(body.features, dict):
        named |= {name: _parse_feature(name, values) for name, values in body.features.items()}
    elif body.features is not None:
        named[""] = _parse_feature("features", body.features)
    counts = {len(values) if isinstance(values, list) or values.ndim else 0 for values in named.values()}
    if len(counts) != 1 or ("" in named and len(named) > 1):
        raise HTTPException(
            422, f"features must have one value for each query, in each name, got {sorted(counts)} values."
        )
    return named.get("", named), counts.pop()


def _parse_feature(name: str, values: list[Any]) -> Array | list[str]:
    if values and all(isinstance(value, str) for value in values):
        return values
    try:
        # numpy would convert numbers beside a text to texts, each as long as the longest.
        array = np.asarray(values) if _are_numbers(values) else np.empty(0, dtype=object)
    except ValueError:
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "ifb" or not array.shape:
        raise HTTPException(
            422, f"{name} must be numbers, equally long lists of numbers, or texts, one for each query."
        )
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _are_numbers(values: list[Any]) -> bool:
    return all(_are_numbers(value) if isinstance(value, list) else isinstance(value, (int, float)) for value in values)


def pack_tensors(tensors: dict[str, Array], fields: dict[str, Any] | None = None) -> bytes:
    """Pack tensors and fields as safetensors."""
    kinds = tuple((name, array.dtype, array.shape) for name, array in tensors.items())
    header = _pack_header(kinds) if fields is None else _pack_header.__wrapped__(kinds, json.dumps(fields))
    return b"".join((header, *(array.tobytes() for array in tensors.values())))


@functools.lru_cache(1024)
def _pack_header(kinds: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...], request: str | None = None) -> bytes:
    header: dict[str, Any] = {} if request is None else {"__metadata__": {"request": request}}
    offset = 0
    for name, dtype, shape in kinds:
        size = dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": (offset, offset + size)}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class SearchResult(NamedTuple):
    """A request's scores, ids and exactness, as in `Hits`: numpy arrays on the host."""

    scores: Array
    ids: Array
    exact: Array

    def to_bytes(self, binary: bool) -> bytes:
        """The response body."""
        if not binary:
            counts = (self.scores > -np.inf).sum(1).tolist()
            rows = zip(self.ids.tolist(), self.scores.tolist(), counts, strict=True)
            ids, scores = zip(*((names[:n], values[:n]) for names, values, n in rows), strict=True) or ((), ())
            return to_json({"ids": ids, "scores": scores, "exact": self.exact.tolist()})
        tensors = {"scores": self.scores, "exact": self.exact}
        if self.ids.dtype != object:
            return pack_tensors({**tensors, "ids": self.ids})
        return pack_tensors(tensors, {"ids": self.ids.tolist()})
