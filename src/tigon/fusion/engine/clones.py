"""Clones of a forward: the same code, or a part of it, with other globals, behind the same decorators."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from tigon.fusion.engine.reasons import Reason


def clone(forward: Any, rebuild: Callable[[types.FunctionType], types.FunctionType | Reason]) -> Any:
    """The forward with its innermost function replaced by `rebuild` of it, or the Reason why it cannot be."""
    if not isinstance(forward, types.FunctionType):
        return Reason("its forward is not a plain function")
    inner = getattr(forward, "__wrapped__", None)
    if inner is None:
        return rebuild(forward)
    # A decorator holds the function that it calls in a closure cell: the clone goes into that cell.
    cells = forward.__closure__ or ()
    if sum(cell.cell_contents is inner for cell in cells) != 1:
        return Reason("its forward is decorated in a way that cannot be cloned")
    made = clone(inner, rebuild)
    if isinstance(made, Reason):
        return made
    closure = tuple(types.CellType(made) if cell.cell_contents is inner else cell for cell in cells)
    outer = rebuilt(forward, forward.__globals__, closure)
    outer.__wrapped__ = made  # type: ignore[attr-defined]
    return outer


def name_of(forward: Any) -> str:
    """The qualified name of the function inside the decorators of a forward; a clone has the same name."""
    inner = inspect.unwrap(forward)
    return f"{inner.__module__}.{inner.__qualname__}"


def rebuilt(
    fn: types.FunctionType, scope: dict[str, Any], closure: Any, code: types.CodeType | None = None
) -> types.FunctionType:
    """A function like `fn`, with these globals, closure and code."""
    made = types.FunctionType(fn.__code__ if code is None else code, scope, fn.__name__, fn.__defaults__, closure)
    made.__kwdefaults__, made.__qualname__ = fn.__kwdefaults__, fn.__qualname__
    made.__module__ = fn.__module__
    made.__dict__.update(fn.__dict__)
    return made
