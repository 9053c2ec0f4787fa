"""Attention forwards that call tigon.rope: clones of the original code, with another function under that name."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tigon.models.forwards import transformed
from tigon.models.recipe import DTYPES
from tigon.models.recognize import Rotary, Unknown, is_rotary_function, recognize_rotary
from tigon.models.report import Ledger
from tigon.ops.rope import rope


class Clones:
    """Copies of attention forwards that see tigon.rope where their module has a rotary function, one per forward."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._found: dict[Any, dict[str, Rotary | Unknown]] = {}
        self._clones: dict[Any, Any] = {}

    def found(self, forward: Any) -> dict[str, Rotary | Unknown]:
        """The rotary functions that a forward calls by a global name."""
        if forward not in self._found:
            inner = inspect.unwrap(forward) if callable(forward) else None
            names = getattr(getattr(inner, "__code__", None), "co_names", ())
            candidates = {n: g for n in names if callable(g := getattr(inner, "__globals__", {}).get(n))}
            self._found[forward] = {n: recognize_rotary(g) for n, g in candidates.items() if is_rotary_function(g)}
        return self._found[forward]

    def of(self, forward: Any) -> Any:
        if forward not in self._clones:
            self._clones[forward] = self._clone(forward)
        return self._clones[forward]

    def _clone(self, forward: Any) -> Any:
        if not isinstance(forward, types.FunctionType):
            return Unknown("its forward is not a plain function")
        inner = getattr(forward, "__wrapped__", None)
        if inner is None:
            scope = dict(forward.__globals__)
            # Dynamo guards a global by the name of its module, where the plain function still is.
            scope.pop("__name__", None)
            for name, formula in self.found(forward).items():
                if isinstance(formula, Rotary):
                    scope[name] = _rotary(forward.__globals__[name], formula, self.ledger)
            return _rebuilt(forward, scope, forward.__closure__)
        # A decorator holds the function that it calls in a closure cell: give it the clone there.
        cells = forward.__closure__ or ()
        if sum(cell.cell_contents is inner for cell in cells) != 1:
            return Unknown("its forward is decorated in a way that cannot be cloned")
        clone = self._clone(inner)
        if isinstance(clone, Unknown):
            return clone
        closure = tuple(types.CellType(clone) if cell.cell_contents is inner else cell for cell in cells)
        outer = _rebuilt(forward, forward.__globals__, closure)
        outer.__wrapped__ = clone  # type: ignore[attr-defined]
        return outer


def _rebuilt(fn: types.FunctionType, scope: dict[str, Any], closure: Any) -> types.FunctionType:
    clone = types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, closure)
    clone.__kwdefaults__ = fn.__kwdefaults__
    clone.__dict__.update(fn.__dict__)
    return clone


def _rotary(plain: Callable[..., Any], formula: Rotary, ledger: Ledger) -> Callable[..., Any]:
    def apply(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        named = formula.unsqueeze and len(kwargs) == 1 and "unsqueeze_dim" in kwargs
        if args or (kwargs and not named) or not ledger.active or transformed() or not _tensors_fit(q, k, cos, sin):
            return plain(q, k, cos, sin, *args, **kwargs)
        flat = q.dim() == 3 and k.dim() == 3 and cos.dim() == 2 and formula.flat and not kwargs
        if flat:
            four, dim = (q[None], k[None], cos[None], sin[None]), 2
        else:
            four, dim = (q, k, cos, sin), kwargs.get("unsqueeze_dim", formula.default)
        if not _shapes_fit(*four, dim, formula):
            return plain(q, k, cos, sin, *args, **kwargs)
        ledger.count("rotary")
        turned = rope(*four, unsqueeze_dim=dim)
        if flat:
            turned = turned[0][0], turned[1][0]
        return (turned[0].to(q.dtype), turned[1].to(k.dtype)) if formula.keeps else turned

    return apply


def _tensors_fit(*tensors: Any) -> bool:
    if not all(isinstance(t, Tensor) and t.dtype in DTYPES for t in tensors):
        return False
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors[2:]))


def _shapes_fit(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dim: Any, formula: Rotary) -> bool:
    if dim not in (1, 2) or q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    batch, time, width = q.shape[0], q.shape[3 - dim], q.shape[3]
    if (k.shape[0], k.shape[3 - dim], k.shape[3]) != (batch, time, width):
        return False
    rotated = cos.shape[2]
    if cos.shape[0] not in (1, batch) or cos.shape[1] != time or rotated % 2 or rotated > width:
        return False
    return formula.full if rotated == width else formula.partial
