"""Lazy logits for torch.compile: a plain object, since Dynamo follows plain classes best (see lazy.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.fusion.logits.recipe import Recipe, fusable, is_number


class CompiledLogits:
    """The (..., V) logits while torch.compile traces. Outside the compiled code they act as the tensor they build.

    CompiledLogits is not a Tensor, also for `isinstance`. Without gradients, where loops gather logits for metrics, the
    head under torch.compile therefore returns real logits.
    """

    def __init__(self, recipe: Recipe, origin: Any = None) -> None:
        self.recipe, self.origin = recipe, origin
        self.built: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.recipe.hidden.shape[:-1], self.recipe.weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        return self.recipe.dtype

    @property
    def device(self) -> torch.device:
        return self.recipe.hidden.device

    @property
    def ndim(self) -> int:
        return len(self.recipe.hidden.shape)

    def dim(self) -> int:
        return len(self.recipe.hidden.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def pending(self) -> bool:
        return self.built is None and (self.origin is None or self.origin[0].pending())

    def build(self, why: str = "") -> Tensor:
        if self.built is None:
            if self.origin is not None and not self.origin[0].pending():
                parent, view = self.origin
                self.built = view(parent.build(why))
            else:
                if not torch.compiler.is_compiling():
                    self.recipe.ledger.count_materialized_logits(why)
                self.built = self.recipe.logits()
        return self.built

    def __mul__(self, other: Any) -> Any:
        if is_number(other) and self.pending():
            return CompiledLogits(self.recipe.then("mul", other))
        return self.build("mul") * other

    __rmul__ = mul = __mul__

    def __truediv__(self, other: Any) -> Any:
        if is_number(other) and self.pending():
            return CompiledLogits(self.recipe.then("div", other))
        return self.build("div") / other

    div = __truediv__

    def __add__(self, other: Any) -> Any:
        recipe = self.recipe.plus(other) if self.pending() and self.origin is None else None
        return self.build("add") + other if recipe is None else CompiledLogits(recipe)

    add = __add__

    def tanh(self) -> Any:
        return CompiledLogits(self.recipe.then("tanh")) if self.pending() else self.build("tanh").tanh()

    def float(self) -> Any:
        return self.to(torch.float32)

    def to(self, *args: Any, **options: Any) -> Any:
        wanted = args[0] if len(args) == 1 and not options else options.get("dtype") if len(options) == 1 else None
        if self.pending():
            if wanted == self.dtype or (isinstance(wanted, torch.device) and wanted == self.device):
                return self
            if wanted == torch.float32:
                return CompiledLogits(self.recipe.then("cast", wanted))
        return self.build("to").to(*args, **options)

    def contiguous(self) -> Any:
        return self if self.pending() and self.origin is None else self.build("contiguous").contiguous()

    def view(self, *shape: Any) -> Any:
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            shape = tuple(shape[0])
        if self.pending() and self.origin is None and len(shape) == 2 and shape[1] == self.shape[-1]:
            hidden = self.recipe.hidden
            rows = hidden.numel() // hidden.shape[-1] if hidden.shape[-1] else -1
            if shape[0] in (-1, rows):
                recipe = self.recipe.rows(lambda h: h.reshape(-1, h.shape[-1]))
                return CompiledLogits(recipe, (self, lambda z: z.view(*shape)))
        return self.build("view").view(*shape)

    def reshape(self, *shape: Any) -> Any:
        return self.view(*shape) if self.pending() else self.build("reshape").reshape(*shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        first = args[0] if args else None
        if isinstance(first, CompiledLogits) and first.pending():
            if func is torch.tanh:
                return first.tanh()
            if func is F.cross_entropy:
                arguments = fusable(first, *args[1:], **kwargs)
                if arguments is not None:
                    return first.recipe.cross_entropy(*arguments)
        name = getattr(func, "__name__", "")
        return func(*_real(list(args), name), **{k: _real(a, name) for k, a in kwargs.items()})

    def __getattr__(self, name: str) -> Any:
        if name in ("recipe", "origin", "built"):  # copy and pickle ask an uninitialised object
            raise AttributeError(name)
        return getattr(self.build(name), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.build("pickle").__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return repr(self.built) if self.built is not None else (
            f"CompiledLogits(shape={tuple(self.shape)}, dtype={self.dtype}, not built)"
        )  # fmt: skip

    __hash__ = object.__hash__


def _real(value: Any, why: str) -> Any:
    if isinstance(value, CompiledLogits):
        return value.build(why)
    if type(value) in (list, tuple):
        return type(value)([_real(v, why) for v in value])
    return value


def _make_method(name: str) -> Callable[..., Any]:
    def method(self: CompiledLogits, *args: Any) -> Any:
        args = tuple(a.build(name) if isinstance(a, CompiledLogits) else a for a in args)
        return getattr(self.build(name), name)(*args)

    return method


_OPERATORS = """
    radd sub rsub rtruediv floordiv rfloordiv mod pow rpow matmul rmatmul neg pos abs invert eq ne lt le gt ge
    and or xor getitem setitem iter bool index contains array deepcopy iadd isub imul itruediv
"""
for _name in _OPERATORS.split():
    setattr(CompiledLogits, f"__{_name}__", _make_method(f"__{_name}__"))
