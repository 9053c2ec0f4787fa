"""Objects that stand for a tensor that is not computed yet, and act as that tensor wherever they are used.

Plain classes, not tensors, also for `isinstance`: Dynamo follows plain classes best.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor


class Deferred:
    """A subclass gives `build(why)`, the tensor. fields: the instance's attributes."""

    fields: ClassVar[tuple[str, ...]]

    def build(self, why: str = "") -> Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = {} if kwargs is None else kwargs
        return func(*as_tensor(list(args), name), **{k: as_tensor(a, name) for k, a in kwargs.items()})

    def __getattr__(self, name: str) -> Any:
        if name in type(self).fields:  # copy and pickle ask an uninitialised object
            raise AttributeError(name)
        return getattr(self.build(name), name)

    __hash__ = object.__hash__


def as_tensor(value: Any, why: str = "") -> Any:
    """Deferred objects as tensors, also in lists and tuples; any other value unchanged."""
    if isinstance(value, Deferred):
        return value.build(why)
    if type(value) in (list, tuple):
        return type(value)([as_tensor(v, why) for v in value])
    return value


def _make_method(name: str) -> Callable[..., Any]:
    def method(self: Deferred, *args: Any) -> Any:
        args = tuple(a.build(name) if isinstance(a, Deferred) else a for a in args)
        return getattr(self.build(name), name)(*args)

    return method


_OPERATORS = """
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod pow rpow matmul rmatmul neg pos abs invert
    eq ne lt le gt ge and or xor getitem setitem iter len bool float int index contains iadd isub imul itruediv
"""
for _name in _OPERATORS.split():
    setattr(Deferred, f"__{_name}__", _make_method(f"__{_name}__"))
