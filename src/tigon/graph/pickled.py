"""Read pickles with numeric arrays, CSR matrices, dicts and lists, without executing code.

Uses the standard library's pure Python unpickler, restricted to a short opcode list and a few names, each mapped to a
reader in this file instead of the named function. NumPy receives only an array's dtype, shape and bytes, after
validation. scipy is not required.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tigon.files import DamagedFileError

# Fixed-size numbers and bools, by dtype string: no Python objects, records, texts or times.
_NUMERIC = re.compile(r"[<>=|]?([iu][1248]|f[248]|b1)")
_OPCODES = (
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG",
    "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "EMPTY_LIST", "LIST", "APPEND",
    "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_DICT", "GET", "BINGET", "LONG_BINGET",
    "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GLOBAL", "STACK_GLOBAL",
)  # fmt: skip


class CSRMatrix:
    """A pickled scipy CSR matrix: values, column indices and row pointers."""

    data: npt.NDArray[Any]
    indices: npt.NDArray[Any]
    indptr: npt.NDArray[Any]
    shape: tuple[int, int]

    def set_state(self, state: Any) -> None:
        parts = [state[name] for name in ("data", "indices", "indptr")]
        arrays = [part.value if isinstance(part, _Array) else None for part in parts]
        shape = state["_shape"] if "_shape" in state else state["shape"]
        rows, columns = (_whole(size) for size in shape)
        data, indices, indptr = arrays
        if data is None or indices is None or indptr is None:
            raise ValueError("a matrix without its arrays")
        fits = data.ndim == indices.ndim == indptr.ndim == 1 and len(data) == len(indices) and len(indptr) == rows + 1
        whole = all(x.dtype.kind in "iu" for x in (indices, indptr))
        if not fits or not whole or indptr[0] != 0 or indptr[-1] != len(data) or (np.diff(indptr) < 0).any():
            raise ValueError("a matrix with inconsistent arrays")
        if len(indices) and not 0 <= indices.min() <= indices.max() < columns:
            raise ValueError("a matrix with a column index out of range")
        self.data, self.indices, self.indptr, self.shape = data, indices, indptr, (rows, columns)


class _Dtype:
    """A dtype. Its state contains the byte order."""

    value: np.dtype[Any]

    def __init__(self, spelled: Any, *_: Any) -> None:
        if not isinstance(spelled, str) or not _NUMERIC.fullmatch(spelled):
            name = repr(spelled[:40]) if isinstance(spelled, str) else "of another kind"
            raise ValueError(f"dtype {name}, but only numbers are allowed")
        self.value = np.dtype(spelled)

    def set_state(self, state: Any) -> None:
        _, order, *more = state
        if order not in ("<", ">", "=", "|") or any(one is not None for one in more[:3]):
            raise ValueError("a dtype with fields, but only numbers are allowed")
        self.value = self.value.newbyteorder(order)


class _Array:
    """An array, empty until its state is set."""

    value: npt.NDArray[Any]

    def __init__(self, *_: Any) -> None:
        self.value = np.zeros(0)

    def set_state(self, state: Any) -> None:
        _, shape, dtype, is_fortran, content = state
        sizes = [_whole(size) for size in shape]
        if len(sizes) > 8:
            raise ValueError(f"an array of {len(sizes)} dimensions")
        numbers = _numbers(dtype, content, math.prod(sizes))
        self.value = numbers.reshape(sizes, order="F" if is_fortran is True or is_fortran == 1 else "C").copy()


def _whole(size: Any) -> int:
    if type(size) is not int or not 0 <= size < 2**31:
        raise ValueError(f"a size of {size}" if type(size) is int else "a size that is not an integer")
    return size


def _numbers(dtype: Any, content: Any, count: int) -> npt.NDArray[Any]:
    """Decode `count` numbers from bytes, or from text that Python 2 wrote as bytes."""
    if not isinstance(dtype, _Dtype):
        raise ValueError("an array without a dtype")
    raw = content.encode("latin1") if isinstance(content, str) else content
    if not isinstance(raw, bytes) or len(raw) != count * dtype.value.itemsize:
        raise ValueError("an array whose size does not match its bytes")
    return np.frombuffer(raw, dtype.value)


def _scalar(dtype: Any, content: Any) -> Any:
    return _numbers(dtype, content, 1)[0].item()


def _bytes(text: Any, encoding: Any) -> bytes:
    """Bytes as Python 3 pickles them for Python 2; only Latin 1 is allowed."""
    # A list may contain itself repeatedly, so its text can have any size.
    if not isinstance(text, str):
        raise ValueError("bytes that are not written as text")
    return text.encode("latin1")


class _Name:
    """A name allowed in a pickle and its replacement; None if the name is only valid as an argument."""

    __slots__ = ("read",)

    def __init__(self, read: Callable[..., Any] | None) -> None:
        self.read = read


_NAMES: dict[tuple[str, str], _Name] = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Name(_Array) for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _Name(_scalar) for core in ("core", "_core")},
    ("numpy", "ndarray"): _Name(None),
    ("numpy", "dtype"): _Name(_Dtype),
    **{(f"scipy.sparse.{module}", "csr_matrix"): _Name(CSRMatrix) for module in ("csr", "_csr")},
    **{(builtins, "list"): _Name(None) for builtins in ("__builtin__", "builtins")},
    ("_codecs", "encode"): _Name(_bytes),
    ("collections", "defaultdict"): _Name(lambda *_: {}),
}


_Machine: Any = pickle._Unpickler


class _Unpickler(_Machine):  # type: ignore[misc]
    """The standard library's Python unpickler with a dict as memo: numbers in a file cannot set an allocation size."""

    dispatch: ClassVar[dict[int, Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it needs {module}.{name}, but only arrays and lists are allowed")
        return _NAMES[module, name]

    def _call(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, _Name) or name.read is None or not isinstance(arguments, tuple):
            raise pickle.UnpicklingError("it calls an object that is not a function")
        self.append(name.read(*arguments))

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, (_Array, _Dtype, CSRMatrix)):
            raise pickle.UnpicklingError("it sets state on an object without state")
        made.set_state(state)

    def _set_items(self) -> None:
        items = self.pop_mark()
        self._set(items[::2], items[1::2])

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key], [value])

    def _dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set(items[::2], items[1::2])

    def _set(self, keys: list[Any], values: list[Any]) -> None:
        into = self.stack[-1]
        # Hashing deeply nested tuples could take forever.
        if not isinstance(into, dict) or not all(type(key) in (int, str) for key in keys):
            raise pickle.UnpicklingError("it has a dict whose keys are neither numbers nor text")
        into.update(zip(keys, values, strict=True))

    for _name in _OPCODES:
        dispatch[getattr(pickle, _name)[0]] = _Machine.dispatch[getattr(pickle, _name)[0]]
    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = _call
    dispatch[pickle.BUILD[0]] = _build
    dispatch[pickle.SETITEM[0]], dispatch[pickle.SETITEMS[0]] = _set_item, _set_items
    dispatch[pickle.DICT[0]] = _dict


def read_pickle(file: Path) -> Any:
    """Read a pickle with arrays, `CSRMatrix` objects, dicts, lists, numbers and texts.

    Raises: DamagedFileError for a file that cannot be read, is not a pickle, or contains other objects.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DamagedFileError(f"{file} cannot be read ({error.strerror}).") from error
    try:
        found = _Unpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a damaged pickle can raise any exception
        raise DamagedFileError(f"{file} is not a pickle of arrays: {error}.") from error
    return found.value if isinstance(found, _Array) else found
