"""Layers in fewer bytes: linear layers split in parts with separate storage formats, and 8-bit embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.compress.packing import GROUP, dequantize_groups, pack, quantize_groups, split_groups, unpack
from tigon.kernels import use_triton
from tigon.ops.quantized_table import quantize_rows, quantized_embedding


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
        self.groups = split_groups(in_features, group)
        count = math.ceil(out_features * math.prod(self.groups) / 8) * bits
        self.register_buffer("codes", torch.zeros(count, dtype=torch.uint8))
        self.register_buffer("scales", torch.zeros(out_features, self.groups[0], 2, dtype=torch.int16))
        self.trained: Tensor | None = None  # fp32 scales during recovery

    @classmethod
    def quantize(cls, weight: Tensor, bits: int) -> Packed:
        """Quantize a matrix by rounding to nearest."""
        return cls.from_codes(*quantize_groups(weight, bits), weight.shape[1], bits)

    @classmethod
    def from_codes(cls, codes: Tensor, scales: Tensor, width: int, bits: int) -> Packed:
        """From `packing.quantize_groups`' codes (M, G, S) and scales (M, G, 2) for a matrix (M, width)."""
        layer = cls(width, len(codes), bits)
        layer.codes, layer.scales = pack(codes, bits), scales.view(torch.int16)
        return layer

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight (M, N)."""
        count = self.out_features * math.prod(self.groups)
        codes = unpack(self.codes, self.bits, count).view(self.out_features, *self.groups)
        scales = self.scales.view(torch.float16) if self.trained is None else self.trained
        return dequantize_groups(codes, scales, self.in_features, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantize(x.dtype))

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
    def from_factors(cls, outer: Tensor, inner: Tensor) -> LowRank:
        """From outer (M, r) and inner (r, N)."""
        with torch.device("meta"):
            layer = cls(inner.shape[1], outer.shape[0], len(inner))
        layer.inner.weight, layer.outer.weight = nn.Parameter(inner), nn.Parameter(outer)
        return layer

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The product (M, N)."""
        return (self.outer.weight @ self.inner.weight).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))  # type: ignore[no-any-return]


class SplitLinear(nn.Module):
    """y = x Wᵀ + b, with W split in parts: heavy neurons and the rest.

    Args:
        axis: "rows": the parts hold successive rows of W, for gate and up; "columns": successive columns, for down.
        parts: nn.Linear without a bias, Packed or LowRank.
        bias: (out_features,) or None.
        dtype: the replaced layer's dtype.
    """

    like: Tensor
    parts: Any
    in_features: int
    out_features: int

    def __init__(
        self, axis: str, parts: Sequence[nn.Module], bias: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        # Only carries the dtype for model.to(dtype): packed weights are integers.
        self.register_buffer("like", torch.zeros(0, dtype=dtype), persistent=False)
        self.axis = axis
        self.parts = nn.ModuleList(parts)
        self.bias = None if bias is None else nn.Parameter(bias)
        rows = axis == "rows"
        self.in_features = self.parts[0].in_features if rows else sum(part.in_features for part in self.parts)
        self.out_features = sum(part.out_features for part in self.parts) if rows else self.parts[0].out_features

    def forward(self, x: Tensor) -> Tensor:
        if self.axis == "rows":
            y = torch.cat([part(x) for part in self.parts], -1)
        else:
            pieces = x.split([part.in_features for part in self.parts], -1)
            first, *others = (part(piece) for part, piece in zip(self.parts, pieces, strict=True))
            y = sum(others, first)
        return y if self.bias is None else y + self.bias

    @property
    def weight(self) -> Tensor:
        """(out_features, in_features), dequantized, in the replaced layer's dtype."""
        dtype = self.like.dtype
        weights = [p.weight.to(dtype) if isinstance(p, nn.Linear) else p.dequantize(dtype) for p in self.parts]
        return torch.cat(weights, 0 if self.axis == "rows" else 1)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.axis}, bias={self.bias is not None}"


class ByteEmbedding(nn.Module):
    """Replaces nn.Embedding with a uint8 table; no gradient.

    codes: (N, D) uint8. scales: (N, 2), scale and offset as fp16 bits in int16. dtype: the output dtype.
    """

    codes: Tensor
    scales: Tensor
    like: Tensor

    def __init__(self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.register_buffer("codes", torch.zeros(num_embeddings, embedding_dim, dtype=torch.uint8))
        self.register_buffer("scales", torch.zeros(num_embeddings, 2, dtype=torch.int16))
        self.register_buffer("like", torch.zeros(0, dtype=dtype), persistent=False)  # as in SplitLinear

    @classmethod
    def quantize(cls, weight: Tensor) -> ByteEmbedding:
        """Quantize a float table (N, D)."""
        layer = cls(weight.shape[0], weight.shape[1], weight.dtype)
        codes, scales = quantize_rows(weight)
        layer.codes, layer.scales = codes, scales.view(torch.int16)
        return layer

    def forward(self, ids: Tensor) -> Tensor:
        # Bags with a single row each. Padding ids read their row as in nn.Embedding.
        codes, scales, flat = self.codes, self.scales.view(torch.float16), ids.reshape(-1, 1)
        if not use_triton(scales):  # the reference dequantizes a whole table, so pass only the rows looked up
            codes, scales = codes[flat[:, 0]], scales[flat[:, 0]]
            flat = torch.arange(len(flat), device=flat.device)[:, None]
        rows = quantized_embedding(codes, scales, flat, mode="sum", dtype=self.like.dtype)
        return rows.view(*ids.shape, self.embedding_dim)

    @property
    def weight(self) -> Tensor:
        """The dequantized table (N, D)."""
        scale, offset = self.scales.view(torch.float16).float().split(1, 1)
        return torch.addcmul(offset, self.codes.float(), scale).to(self.like.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, bits=8"


def make_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer with this weight and bias."""
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight.contiguous())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer
