"""Linear layers split in two parts, heavy neurons and the rest, with separate storage formats."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.compress.packing import GROUP, groups_of, pack, quantize_groups, unpack, widen_groups

Part = nn.Module  # nn.Linear without a bias, Packed, LowRank or Stacked


class Packed(nn.Module):
    """A low-bit weight (M, N), dequantized for each product.

    codes: bytes from `packing.pack`. scales: (M, G, 2), fp16 bits in int16, because model.to(dtype) would round float
        scales.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, in_features: int, out_features: int, bits: int, group: int = GROUP) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bits, self.group = in_features, out_features, bits, group
        self.groups = groups_of(in_features, group)
        count = math.ceil(out_features * math.prod(self.groups) / 8) * bits
        self.register_buffer("codes", torch.zeros(count, dtype=torch.uint8))
        self.register_buffer("scales", torch.zeros(out_features, self.groups[0], 2, dtype=torch.int16))
        self.trained: Tensor | None = None  # fp32 scales during recovery

    @classmethod
    def of(cls, weight: Tensor, bits: int, group: int = GROUP) -> Packed:
        """Quantize a matrix by rounding to nearest."""
        return cls.holding(*quantize_groups(weight, bits, group), weight.shape[1], bits, group)

    @classmethod
    def holding(cls, codes: Tensor, scales: Tensor, width: int, bits: int, group: int = GROUP) -> Packed:
        """From `packing.quantize_groups`' codes (M, G, S) and scales (M, G, 2) for a matrix (M, width)."""
        made = cls(width, len(codes), bits, group)
        made.codes, made.scales = pack(codes, bits), scales.view(torch.int16)
        return made

    def unpacked(self) -> tuple[Tensor, Tensor]:
        """Codes (M, G, S) uint8, and scales (M, G, 2): fp16, or the trainable fp32 scales."""
        count = self.out_features * math.prod(self.groups)
        codes = unpack(self.codes, self.bits, count).view(self.out_features, *self.groups)
        return codes, self.scales.view(torch.float16) if self.trained is None else self.trained

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight (M, N)."""
        return widen_groups(*self.unpacked(), self.in_features, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.widened(x.dtype))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bits={self.bits}"


class LowRank(nn.Module):
    """A weight (M, N) as the product (M, r) @ (r, N)."""

    def __init__(self, in_features: int, out_features: int, rank: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.inner = nn.Linear(in_features, rank, bias=False)
        self.outer = nn.Linear(rank, out_features, bias=False)

    @classmethod
    def of(cls, outer: Tensor, inner: Tensor) -> LowRank:
        """From outer (M, r) and inner (r, N)."""
        with torch.device("meta"):
            made = cls(inner.shape[1], outer.shape[0], len(inner))
        made.inner.weight, made.outer.weight = nn.Parameter(inner), nn.Parameter(outer)
        return made

    def widened(self, dtype: torch.dtype) -> Tensor:
        return (self.outer.weight @ self.inner.weight).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))  # type: ignore[no-any-return]


class Stacked(nn.Module):
    """Two parts with the same input and concatenated outputs: low-rank gate and up in one layer."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.in_features, self.out_features = first.in_features, first.out_features + second.out_features

    def widened(self, dtype: torch.dtype) -> Tensor:
        return torch.cat((self.first.widened(dtype), self.second.widened(dtype)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.first(x), self.second(x)), -1)


class SplitLinear(nn.Module):
    """y = x Wᵀ + b, with W split in two parts with separate storage formats.

    Args:
        axis: "rows": the parts hold W's first and last rows, for gate and up; "columns": its first and last columns,
            for down.
        halves: 2 if W stacks gate above up; each half then has rows in both parts.
        heavy, rest: nn.Linear without a bias, Packed, LowRank or Stacked; either may be None.
        bias: (out_features,) or None.
        dtype: the replaced layer's dtype.
    """

    like: Tensor

    def __init__(
        self, axis: str, heavy: Part | None, rest: Part | None, bias: Tensor | None = None, *, halves: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        # Only carries the dtype for model.to(dtype): packed weights are integers.
        self.register_buffer("like", torch.zeros(0, dtype=dtype), persistent=False)
        self.axis, self.halves = axis, halves
        self.heavy, self.rest = heavy, rest
        self.bias = None if bias is None else nn.Parameter(bias)
        parts: list[Any] = [part for part in (heavy, rest) if part is not None]
        rows = axis == "rows"
        self.in_features = parts[0].in_features if rows else sum(part.in_features for part in parts)
        self.out_features = sum(part.out_features for part in parts) if rows else parts[0].out_features

    def parts(self) -> Iterator[Any]:
        """The parts that exist, heavy first."""
        return (part for part in (self.heavy, self.rest) if part is not None)

    def forward(self, x: Tensor) -> Tensor:
        if self.axis == "rows":
            y = self._joined([part(x) for part in self.parts()])
        else:
            places = x.split([part.in_features for part in self.parts()], -1)
            first, *others = (part(own) for part, own in zip(self.parts(), places, strict=True))
            y = sum(others, first)
        return y if self.bias is None else y + self.bias

    def _joined(self, results: list[Tensor], dim: int = -1) -> Tensor:
        if len(results) == 1:
            return results[0]
        pieces = zip(*(y.chunk(self.halves, dim) for y in results), strict=True)
        return torch.cat([piece for half in pieces for piece in half], dim)

    @property
    def weight(self) -> Tensor:
        """(out_features, in_features), dequantized, for code that reads a layer's weight dtype or device."""
        return self.widened(self.like.dtype)

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The whole weight W, dense."""
        found = [part.weight.to(dtype) if isinstance(part, nn.Linear) else part.widened(dtype) for part in self.parts()]
        return self._joined(found, 0) if self.axis == "rows" else torch.cat(found, 1)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.axis}, bias={self.bias is not None}"


def layout_of(layer: SplitLinear) -> dict[str, Any]:
    """JSON layout from which `built` creates a layer with the same parts."""
    sizes = [_of_part(part) for part in (layer.heavy, layer.rest)]
    return {"axis": layer.axis, "halves": layer.halves, "bias": layer.bias is not None, "parts": sizes}


def _of_part(part: Any) -> list[Any] | None:
    if part is None:
        return None
    if isinstance(part, Stacked):
        return ["stacked", _of_part(part.first), _of_part(part.second)]
    size = [part.in_features, part.out_features]
    if isinstance(part, Packed):
        return ["bits", *size, part.bits, part.group]
    return ["rank", *size, part.rank] if isinstance(part, LowRank) else ["dense", *size]


def built(layout: dict[str, Any]) -> SplitLinear:
    """An empty layer with this layout, on the default device and in the default dtype."""
    heavy, rest = (None if row is None else _part(row) for row in layout["parts"])
    layer = SplitLinear(layout["axis"], heavy, rest, halves=layout["halves"])
    if layout["bias"]:
        layer.bias = nn.Parameter(torch.empty(layer.out_features))
    return layer


def _part(row: list[Any]) -> Part:
    kind, *sizes = row
    if kind == "stacked":
        return Stacked(*map(_part, sizes))
    if kind == "dense":
        return nn.Linear(sizes[0], sizes[1], bias=False)
    made: Part = {"bits": Packed, "rank": LowRank}[kind](*sizes)
    return made
