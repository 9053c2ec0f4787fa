"""Lazy logits for torch.compile: a plain object (see deferred.py) where lazy.py has a tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.fusion.logits.deferred import Deferred
from tigon.fusion.logits.recipe import Recipe, fusable, is_number


class CompiledLogits(Deferred):
    """The (..., V) logits while torch.compile traces. Outside the compiled code they act as the tensor they build.

    Without gradients, where loops gather logits for metrics, the
    head under torch.compile therefore returns real logits.
    """

    fields = ("recipe", "origin", "built")

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
        return super().__torch_function__(func, types, args, kwargs)

    def __array__(self, *args: Any) -> Any:
        return self.build("__array__").__array__(*args)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.build("__deepcopy__").__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.build("pickle").__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return repr(self.built) if self.built is not None else (
            f"CompiledLogits(shape={tuple(self.shape)}, dtype={self.dtype}, not built)"
        )  # fmt: skip
