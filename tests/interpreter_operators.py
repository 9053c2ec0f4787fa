"""Fast paths for tensor operators in Triton's interpreter, for operands with the same type.

Triton's own path from `a + b` to `np.add` goes through a dozen functions that check types, shapes and constants, with
the same result each time. Here a single function covers the most frequent operands: two tensors with equal dtype and
equal shapes, or with a number among them, and a tensor with a Python number. Other operands take Triton's path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter

WHOLE = {"int32": np.int32, "int64": np.int64, "uint32": np.uint32}
NUMPY = WHOLE | {"fp32": np.float32}
SIGNED, BITS = frozenset(("int32", "int64")), frozenset((*WHOLE, "int1"))
WIDTH = {"int32": 32, "uint32": 32, "int64": 64}


def _quotient(a: Any, b: Any) -> Any:
    return (a - np.fmod(a, b)) // b


# Name, numpy function, dtypes, whether the result is a truth value.
TABLE: list[tuple[str, Callable[[Any, Any], Any], frozenset[str], bool]] = [
    ("add", np.add, frozenset(NUMPY), False),
    ("sub", np.subtract, frozenset(NUMPY), False),
    ("mul", np.multiply, frozenset(NUMPY), False),
    ("truediv", np.divide, frozenset(("fp32",)), False),
    ("floordiv", _quotient, SIGNED, False),
    ("mod", np.fmod, SIGNED, False),
    ("and", np.bitwise_and, BITS, False),
    ("or", np.bitwise_or, BITS, False),
    ("xor", np.bitwise_xor, BITS, False),
    ("gt", np.greater, frozenset(NUMPY), True),
    ("ge", np.greater_equal, frozenset(NUMPY), True),
    ("lt", np.less, frozenset(NUMPY), True),
    ("le", np.less_equal, frozenset(NUMPY), True),
    ("eq", np.equal, frozenset(NUMPY), True),
    ("ne", np.not_equal, frozenset(NUMPY), True),
]
OPERATORS = {f"__{name}__": (f, kinds, truth, False) for name, f, kinds, truth in TABLE} | {
    f"__r{name}__": (f, kinds, truth, True) for name, f, kinds, truth in TABLE if not truth
}

# Casts that are astype in numpy too. Triton's path is longer, and checks the same two types each time.
WIDENS = frozenset(
    (source, to)
    for source, targets in {
        "int1": ("int32", "int64", "fp32"), "int8": ("int32", "int64", "fp32"), "uint8": ("int32", "int64", "fp32"),
        "int32": ("int64", "fp32"), "fp16": ("fp32",),
    }.items()
    for to in targets
)  # fmt: skip

_constants: dict[tuple[type, Any, str], np.ndarray] = {}
_truth_types: dict[int, Any] = {}


def _constant(value: Any, kind: str) -> np.ndarray | None:
    """A Python number in the dtype, or None if Triton has to convert the number."""
    if not isinstance(value, int | float):  # a sum of constants may be a tensor inside a constant
        return None
    found = _constants.get((type(value), value, kind))
    if found is not None:
        return found
    if type(value) is int and kind in WHOLE:
        limits = np.iinfo(WHOLE[kind])
        fits = limits.min <= value <= limits.max
    elif type(value) is int and kind == "fp32":
        fits = abs(value) <= 2**24
    else:
        # -0.0 and 0.0 are equal, and would share a cache entry; numbers that fp32 cannot hold are fp64.
        fits = type(value) is float and kind == "fp32" and value != 0 and 2**-126 <= abs(value) <= 2**127
    if not fits:
        return None
    if len(_constants) > 4096:
        _constants.clear()
    found = _constants[type(value), value, kind] = np.array([value], dtype=NUMPY[kind])
    return found


def _made(data: np.ndarray, stored: Any, type_: Any, like: core.tensor, dtype: Any) -> core.tensor:
    """A tensor with the shape of `like`, without repeated checks. stored: the handle's dtype."""
    handle = object.__new__(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, stored, {}
    made = object.__new__(core.tensor)
    made.handle, made.type, made.dtype, made.shape, made.numel = handle, type_, dtype, like.shape, like.numel
    return made


def _truth_type(like: core.tensor) -> Any:
    found = _truth_types.get(id(like.shape))  # shapes are shared, and stay (interpreter.py)
    if found is None:
        found = _truth_types[id(like.shape)] = like.type.with_element_ty(core.int1)
    return found


def at_once(name: str, general: Callable[..., Any]) -> Callable[..., Any]:
    """The operator with that name; `general` is Triton's."""
    function, kinds, truth, swapped = OPERATORS[name]
    tensor, adds = core.tensor, name == "__add__"

    def operate(self, other):
        kind = self.dtype.name
        if kind not in kinds:
            return (_moved(self, other) if adds else None) or general(self, other)
        like = self
        if type(other) is tensor:
            if other.dtype.name != kind:
                return general(self, other)
            if self.shape is not other.shape and other.shape:
                if self.shape:
                    return general(self, other)
                like = other
            number = other.handle.data
        else:
            if type(other) is core.constexpr:
                other = other.value
            number = _constant(other, kind)
            if number is None:
                return general(self, other)
        data = function(number, self.handle.data) if swapped else function(self.handle.data, number)
        if truth:
            return _made(data, core.int1, _truth_type(like), like, core.int1)
        return _made(data, self.dtype, like.type, like, self.dtype)

    return operate


def _moved(pointer: core.tensor, steps: Any) -> core.tensor | None:
    """pointer + steps, or None if Triton has to compute the sum."""
    if not pointer.dtype.is_ptr():
        return None
    like, type_ = pointer, pointer.type
    if type(steps) is core.tensor:
        if steps.dtype.name not in SIGNED:
            return None
        if pointer.shape is not steps.shape and steps.shape:
            if pointer.shape:
                return None
            like, type_ = steps, steps.type.with_element_ty(pointer.dtype)
        offset = steps.handle.data.astype(np.uint64)
    else:
        steps = steps.value if type(steps) is core.constexpr else steps
        offset = _constant(steps, "int32") if type(steps) is int and steps >= 0 else None
        if offset is None:
            return None
        offset = offset.astype(np.uint64)
    width = max(1, pointer.handle.get_element_ty().primitive_bitwidth // 8)
    return _made(pointer.handle.data + width * offset, pointer.handle.dtype, type_, like, pointer.dtype)


def widened(tensor: core.tensor, to: Any) -> core.tensor | None:
    """The tensor in a dtype that holds all its numbers, or None for casts not listed here."""
    source = tensor.dtype.name
    if (source, to.name) in WIDENS:
        data = tensor.handle.data.astype(interpreter._get_np_dtype(to))
    elif (source, to.name) == ("bf16", "fp32"):  # bf16 is the upper half of fp32's bits
        data = (tensor.handle.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        return None
    return _made(data, to, tensor.type.with_element_ty(to), tensor, to)
