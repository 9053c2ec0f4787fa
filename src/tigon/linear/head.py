"""The head that every fused-linear loss begins with: what is asked of x, weight and bias, and their product."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.runtime import autocast_dtype, check_tensors

ACCUMULATE = ("fp32", "weight")


def check_head(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, *, prefix: str = "", sequences: bool = False,
    beside: tuple[tuple[str, Tensor | None], ...] = (),
) -> torch.dtype:  # fmt: skip
    """Raise a ValueError for what does not fit, else return the dtype of the products: x's, or autocast's.

    Args:
        name: the operator's. prefix: what is before x, weight and bias in its arguments' names.
        x: (..., H), or (S, T, H) for a loss of sequences. weight: (V, H). bias: (V,) or None.
        beside: other tensors that go into the products, each with its name before it.
    """
    check_tensors(name, **{f"{prefix}x": x, f"{prefix}weight": weight, f"{prefix}bias": bias})
    if weight.dim() != 2 or (x.dim() != 3 if sequences else x.dim() == 0) or x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"{name}: {prefix}x must be ({'S, T' if sequences else '...'}, H) and {prefix}weight (V, H) with the same "
            f"H, got {tuple(x.shape)} and {tuple(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: {prefix}bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}.")
    if not x.dtype.is_floating_point:
        raise ValueError(f"{name}: {prefix}x must have a float dtype, got {x.dtype}.")
    autocast = autocast_dtype(x.device.type) if x.dtype != torch.float64 else None
    for argument, t in (("x", x), ("weight", weight), ("bias", bias), *beside):
        if t is None:
            continue
        if hasattr(t, "device_mesh"):
            raise ValueError(
                f"{name}: {prefix}{argument} must be a plain tensor, got a DTensor: gather it with full_tensor()."
            )
        if t.device != x.device:
            raise ValueError(f"{name}: {prefix}{argument} must be on {prefix}x's device {x.device}, got {t.device}.")
        if t.dtype != x.dtype and autocast is None:
            raise ValueError(f"{name}: {prefix}{argument} must have {prefix}x's dtype {x.dtype}, got {t.dtype}.")
    return autocast or x.dtype


def logits_dtype_of(name: str, compute: torch.dtype, logits_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the logits: that of the products, or wider where it is asked for."""
    if logits_dtype not in (None, compute, torch.float32):
        raise ValueError(f"{name}: logits_dtype must be None or torch.float32, got {logits_dtype}.")
    return compute if logits_dtype is None else torch.promote_types(compute, logits_dtype)


def logit_bytes(compute: torch.dtype, logits: torch.dtype) -> int:
    """Of a logit and of its gradient, which has a place of its own where it is narrower."""
    return logits.itemsize + (compute.itemsize if logits != compute else 0)


def check_accumulate(name: str, accumulate: str) -> None:
    if accumulate not in ACCUMULATE:
        raise ValueError(f"{name}: accumulate must be one of {ACCUMULATE}, got {accumulate!r}.")


def take(t: Tensor, rows: Tensor | slice) -> Tensor:
    """Rows of t: a range of them, or those whose numbers a tensor holds."""
    return t[rows] if isinstance(rows, slice) else t.index_select(0, rows)


def empty_logits(rows: int, V: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for (rows, V) logits, uninitialised; rows of 16 bytes and more begin at multiples of 16 bytes."""
    if not _strided(V, dtype):
        return like.new_empty(rows, V, dtype=dtype)
    step = 64 if V >= 1024 else 16 // dtype.itemsize  # whole cache lines, where they are little beside the budget
    return like.new_empty(rows, -(-V // step) * step, dtype=dtype)[:, :V]


def _strided(V: int, dtype: torch.dtype) -> bool:
    return V * dtype.itemsize >= 16 and V * dtype.itemsize % 16 != 0


def with_bias(weight: Tensor, bias: Tensor) -> Tensor:
    """(V, H + 1), padded by zeros to a multiple of 8: the bias is the weight of one more column, in which x is 1."""
    V, H = weight.shape
    both = weight.new_zeros(V, (H // 8 + 1) * 8)
    both[:, :H] = weight
    both[:, H] = bias
    return both


def class_blocks(V: int, dtype: torch.dtype) -> list[slice]:
    """The classes in the blocks that products take them in: all, or first as many as make rows of 16 bytes.

    Of GPT-2's 50257 classes, or of 200019, a product takes six times as long as of some fewer.
    """
    if V * dtype.itemsize % 16 == 0 or V < 1024:
        return [slice(0, V)]
    return [slice(0, V // 64 * 64), slice(V // 64 * 64, V)]


def product_into(out: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """out = or += a b, without a temporary of its size; out may be fp32 under half-precision factors."""
    if not b.shape[0]:  # a sum of nothing, as where a device has no classes
        if first:
            out.zero_()
    elif out.dtype == b.dtype:
        if first:
            torch.mm(a, b, out=out)
        else:
            out.addmm_(a, b)
    elif b.is_cuda or b.is_meta:
        if first:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
        else:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        a, b = a.to(out.dtype), b.to(out.dtype)
        if first:
            torch.mm(a, b, out=out)
        else:
            out.addmm_(a, b)


class Head(NamedTuple):
    """x (N, H), weight (V, H) and bias (V,) or None, in the compute dtype; where it is needed, their `with_bias`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    both: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, bias: Tensor | None, compute: torch.dtype) -> Head:
        x, weight, bias = x.to(compute), weight.to(compute), bias if bias is None else bias.to(compute)
        both = None
        if bias is not None and x.is_cuda and compute.itemsize == 2 and _strided(weight.shape[0], compute):
            # PyTorch rounds a GPU's product before it adds a bias to it, unless the result is contiguous.
            both = with_bias(weight, bias)
        return cls(x, weight, bias, both)

    def logits(self, x: Tensor, out: Tensor) -> Tensor:
        """out (n, V) ← x Wᵀ (+ bias) of n rows; out may be fp32 under half-precision factors."""
        if out.dtype != x.dtype:
            for block in class_blocks(self.weight.shape[0], x.dtype):
                product_into(out[:, block], x, self.weight[block].t(), first=True)
            return out if self.bias is None else out.add_(self.bias)
        if self.both is not None:
            wide = x.new_zeros(x.shape[0], self.both.shape[1])
            wide[:, : x.shape[1]] = x
            wide[:, x.shape[1]] = 1
            x = wide
        for block in class_blocks(self.weight.shape[0], x.dtype):
            if self.both is not None:
                torch.mm(x, self.both[block].t(), out=out[:, block])
            elif self.bias is None:
                torch.mm(x, self.weight[block].t(), out=out[:, block])
            else:
                torch.addmm(self.bias[block], x, self.weight[block].t(), out=out[:, block])
        return out

    def input_gradient(self, dlogits: Tensor, out: Tensor) -> Tensor:
        """out (n, H) ← dlogits W; out may be fp32."""
        # The few classes of a second block come first: their sum is small, and so is what rounding it costs.
        for i, block in enumerate(reversed(class_blocks(self.weight.shape[0], dlogits.dtype))):
            product_into(out, dlogits[:, block], self.weight[block], first=i == 0)
        return out
