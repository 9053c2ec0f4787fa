"""Frozen weights that a checkpoint holds in e4m3, multiplied by as they are: no number of a weight is rounded again.

    scales            y = x Wᵀ                         dx = dy W
    one, or one for   x rounded row by row; the        dy · scale[n] rounded row by row; the same bytes, transposed.
    each channel n    scale stands behind the sum      One scale for the whole weight stands behind the sum
    one for each      x rounded in blocks of 128       dy rounded in blocks of 128; bytes and scales, transposed
    128 × 128 block

Bytes are transposed where dx needs them, and not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tigon.kernels import add_anchor, make_function, view_rows
from tigon.ops.fp8.blocks import quantize_blocks
from tigon.ops.fp8.columns import transpose_rows
from tigon.ops.fp8.constants import read_constant
from tigon.ops.fp8.products import multiply_blocks, multiply_rows
from tigon.ops.fp8.recipe import ALIGNMENT, BLOCK, Rows, Weight
from tigon.ops.fp8.reference import expand_blocks
from tigon.ops.fp8.rows import quantize_rows
from tigon.ops.fp8.untraced import run_untraced


# eq=False: compare by identity, since `==` on tensors returns a tensor.
@dataclass(frozen=True, eq=False)
class StoredFP8:
    """A frozen weight (N, K) in e4m3 with scales, as a `tigon.ops.linear.lora.Frozen`: multiplied by in another dtype.

    Args:
        data: (N, K) e4m3.
        scale: 0-d or of one number; (N,) or (N, 1); or for each block, with blocks at the ends that may be smaller.
        blocks: rows and columns of a block, or None.
    Raises: ValueError for another dtype, or scales of another shape.
    """

    data: Tensor
    scale: Tensor
    blocks: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.data.dtype != torch.float8_e4m3fn or self.data.dim() != 2:
            raise ValueError(
                f"{type(self).__name__}: data must be (N, K) torch.float8_e4m3fn, got {tuple(self.data.shape)} "
                f"{self.data.dtype}."
            )
        if not self.fits(self.data, self.scale, self.blocks):
            raise ValueError(
                f"{type(self).__name__}: scale must have one number, one for each row of data "
                f"{tuple(self.data.shape)}, or one for each block {self.blocks}, got {tuple(self.scale.shape)}."
            )

    @staticmethod
    def fits(data: Tensor, scale: Tensor, blocks: tuple[int, int] | None) -> bool:
        """Whether scales have the shape for these bytes."""
        if blocks is None:
            return scale.numel() == 1 or tuple(scale.shape) in ((len(data),), (len(data), 1))
        return tuple(scale.shape) == tuple(-(-size // b) for size, b in zip(data.shape, blocks, strict=True))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def device(self) -> torch.device:
        return self.data.device

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight as a plain tensor: multiplied in fp32, and rounded once."""
        if self.blocks is not None:
            return expand_blocks(self.data, self.scale, self.blocks).to(dtype)
        return (self.data.float() * self.scale.float().reshape(-1, 1)).to(dtype)

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ: (M, K) → (M, N) in x's dtype."""
        return torch.mm(x, self.dense(x.dtype).t())

    def input_gradient(self, dy: Tensor) -> Tensor:
        """dy W: (M, N) → (M, K) in dy's dtype."""
        return torch.mm(dy, self.dense(dy.dtype))


@dataclass(frozen=True, eq=False)
class FrozenChannels(StoredFP8):
    """A `tigon.ops.linear.lora.FrozenFP8` with a scale for each row, or one for all; N and K are multiples of 16.

    block: None, rows have one scale each. fold: (N,) fp32, which the caller multiplies into dy before quantising the
    rows for `multiply_transposed`; None where one scale serves all rows.
    """

    block = None

    @property
    def fold(self) -> Tensor | None:
        return None if self.scale.numel() == 1 else self.scale.float().reshape(-1)

    def multiply(self, rows: Rows) -> Tensor:
        """x Wᵀ: (M, K) rows → (M, N) bf16."""
        scale = self.scale.float().reshape(-1).expand(len(self.data)).contiguous()
        return multiply_rows(rows, Weight(self.data, scale))

    def multiply_transposed(self, rows: Rows) -> Tensor:
        """dy W: (M, N) rows, of dy · fold unless that is None → (M, K) bf16."""
        K = self.data.shape[1]
        one = read_constant(1.0, torch.float32, self.data.device)
        scale = self.scale.float().reshape(-1) if self.fold is None else one
        return multiply_rows(rows, Weight(transpose_rows(self.data), scale.expand(K).contiguous()))

    def product(self, x: Tensor) -> Tensor:
        return self.multiply(quantize_rows(x))

    def input_gradient(self, dy: Tensor) -> Tensor:
        fold = self.fold
        return self.multiply_transposed(quantize_rows(dy if fold is None else dy * fold))


@dataclass(frozen=True, eq=False)
class FrozenBlocks(StoredFP8):
    """A `tigon.ops.linear.lora.FrozenFP8` with a scale for each block of 128 × 128; N and K are multiples of 128.

    block: 128, rows come from `quantize_blocks`. fold: None.
    """

    block = BLOCK
    fold = None

    def multiply(self, rows: Rows) -> Tensor:
        """x Wᵀ: (M, K) rows → (M, N) bf16."""
        return multiply_blocks(rows, self.data, self.scale.float())

    def multiply_transposed(self, rows: Rows) -> Tensor:
        """dy W: (M, N) rows → (M, K) bf16."""
        return multiply_blocks(rows, transpose_rows(self.data), self.scale.float().t())

    def product(self, x: Tensor) -> Tensor:
        return self.multiply(quantize_blocks(x))

    def input_gradient(self, dy: Tensor) -> Tensor:
        return self.multiply_transposed(quantize_blocks(dy))


def freeze_fp8(data: Tensor, scale: Tensor, blocks: tuple[int, int] | None) -> StoredFP8:
    """The representation with products in FP8 where the sizes allow them; else one that is made dense."""
    step = ALIGNMENT if blocks is None else BLOCK
    fits = blocks in (None, (BLOCK, BLOCK)) and not any(size % step for size in data.shape) and data.numel()
    if not fits or not data.is_contiguous():
        return StoredFP8(data, scale, blocks)
    return FrozenChannels(data, scale) if blocks is None else FrozenBlocks(data, scale, blocks)


def multiply_frozen(x: Tensor, weight: StoredFP8) -> Tensor:
    """x Wᵀ with a gradient for x alone, which keeps neither x nor a dense weight.

    Args:
        x: (..., K) in bf16; or for a plain `StoredFP8` in any float dtype.
    Returns: (..., N) in x's dtype.
    """
    y: Tensor = run_untraced(_multiply_frozen, x, weight)[0]
    return y


def _multiply_frozen_fwd(ctx: Any, x: Tensor, weight: StoredFP8) -> tuple[Tensor, ...]:
    ctx.set_materialize_grads(False)
    ctx.weight = weight
    y = weight.product(view_rows(x))
    return (y.view(*x.shape[:-1], y.shape[1]), *add_anchor(ctx, (x,), (0,)))


def _multiply_frozen_bwd(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, None]:
    dx: Tensor = ctx.weight.input_gradient(view_rows(dy))
    return dx.view(*dy.shape[:-1], dx.shape[1]), None


_multiply_frozen = make_function(_multiply_frozen_fwd, _multiply_frozen_bwd)
