"""The logits of several heads, stacked: a head for each codebook of a sound. They wait like each head's own.

    lm_logits = torch.stack([head(hidden) for head in heads], dim=1)        noted
    logits = lm_logits[:, :, -length:]                                      noted
    loss = F.cross_entropy(logits[:, codebook].view(-1, V), target)         the loss of one head's lazy logits

Anything else builds the stack.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.fusion.logits.deferred import Deferred


class StackedLogits(Deferred):
    """torch.stack(parts, at), reshaped to `shape` where that is given. parts: lazy logits of one shape and dtype."""

    fields = ("parts", "at", "shape", "built")

    def __init__(self, parts: list[Any], at: int, shape: torch.Size | None = None) -> None:
        self.parts, self.at = parts, at
        self.shape = self._stacked_shape() if shape is None else shape
        self.built: Tensor | None = None

    def _stacked_shape(self) -> torch.Size:
        own = self.parts[0].shape
        return torch.Size((*own[: self.at], len(self.parts), *own[self.at :]))

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.parts[0].dtype
        return dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def build(self, why: str = "") -> Tensor:
        if self.built is None:
            # With a graph wherever the first reader is: the stack was made while gradients were recorded.
            with torch.enable_grad():
                parts = [part.build(why) if hasattr(part, "build") else part for part in self.parts]
                self.built = torch.stack(parts, self.at).reshape(self.shape)
        return self.built

    def __getitem__(self, index: Any) -> Any:
        """One head's logits, or the stack of the same rows and words of every head."""
        given = index if isinstance(index, tuple) else (index,)
        full = (*given, *(slice(None),) * (len(self.shape) - len(given)))
        own, others = full[self.at], (*full[: self.at], *full[self.at + 1 :])
        noted = self.built is None and self.shape == self._stacked_shape() and len(full) == len(self.shape)
        if not noted or not all(type(i) is slice for i in others):
            return self.build("__getitem__")[index]
        if type(own) is int:
            return self.parts[own][others]
        # Where some heads are left out, these get a gradient of zero, not none.
        if type(own) is not slice or own != slice(None):
            return self.build("__getitem__")[index]
        return StackedLogits([part[others] for part in self.parts], self.at)

    def reshape(self, *shape: Any) -> Any:
        if self.built is not None:
            return self.built.reshape(*shape)
        with torch.device("meta"):
            return StackedLogits(self.parts, self.at, torch.empty(self.shape).reshape(*shape).shape)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.build("pickle").__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return repr(self.built) if self.built is not None else (
            f"StackedLogits(shape={tuple(self.shape)}, dtype={self.dtype}, not built)"
        )  # fmt: skip
