"""Multiply gradients from a loss's forward pass by the upstream gradient in the backward pass.

A loss at the end of the graph has upstream gradient 1, and no work is left. Otherwise each gradient is multiplied in
fp32 and rounded once. The result overwrites the gradient unless a later backward pass reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.kernels import cdiv, is_graph_retained, is_traced, jit, launch, tl, use_triton
from tigon.ops.linear.weight_gradient import Late, late, late_product, narrow_sum


def scale_gradients(
    gradients: Sequence[Tensor | tuple[Tensor, Tensor]], factor: Tensor, dtypes: Sequence[torch.dtype | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Each needed gradient, times the 0-d factor, in the dtype beside it. Call this in a backward pass.

    A pair is a dW in the two `weight_gradient.places` tensors.
    """
    # Gradients may be scaled in place, unless the graph is kept for another backward pass.
    ours = not is_traced(factor) and not is_graph_retained()
    return [
        _scale_gradient(gradient, factor, dtype, ours) if need and dtype is not None else None
        for gradient, dtype, need in zip(gradients, dtypes, needs, strict=True)
    ]


# y = x · factor over N elements, in fp32 and rounded once; each program loops over blocks. The host does not know the
# 0-d factor and must not wait, so the kernel decides: at the end of a graph the factor is 1, and in place each program
# then loads one number and exits.
@jit
def _scale_kernel(x_ptr, y_ptr, factor_ptr, N, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if not IN_PLACE or factor != 1.0:
        # int64: V · H exceeds 2³¹ elements for a large head.
        first = tl.program_id(0).to(tl.int64) * BLOCK
        for start in range(first, N, tl.num_programs(0).to(tl.int64) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < N, other=0.0).to(tl.float32)
            tl.store(y_ptr + at, (x * factor).to(y_ptr.dtype.element_ty), mask=at < N)


def _scale_gradient(gradient: Tensor | tuple[Tensor, Tensor], factor: Tensor, dtype: torch.dtype, ours: bool) -> Tensor:
    """gradient · factor, multiplied in fp32 and rounded once to dtype. With `ours` the gradient may be overwritten."""
    if isinstance(gradient, tuple):
        gradient, more = gradient
        if factors := late(gradient, more):
            return _scale_late(factors, factor, ours)
        # dW is still an fp32 sum, half inside the bf16 result. Factor and narrowing share the pass.
        if more.numel():
            return narrow_sum(gradient, more, factor, ours)
    in_place = ours and gradient.dtype == dtype
    if is_traced(gradient) or not use_triton(gradient):
        if in_place and factor.device.type == "cpu" and float(factor) == 1.0:
            return gradient
        return (gradient.to(factor.dtype) * factor).to(dtype)
    # A kept graph reads the gradient again, perhaps with another upstream gradient: the gradient must stay unscaled.
    out = gradient if in_place else torch.empty_like(gradient, dtype=dtype)
    n = gradient.numel()
    # At most 2048 programs, each looping over blocks: with factor 1 there are few to start and exit.
    plan = min(2048, cdiv(n, 4096)), (n, in_place, 4096), {"num_warps": 8}
    key = (n, in_place, gradient.dtype, dtype, factor.dtype)
    launch(_scale_kernel, key, (gradient, out, factor), lambda: plan)
    return out


def _scale_late(factors: Late, factor: Tensor, ours: bool) -> Tensor:
    """dW · factor from the product's factors: a part below 1 goes to x, a part above 1 to dlogits.

    So no x overflows, and dlogits match eager code's, where the upstream gradient comes first.
    """
    dlogits, x = factors
    up = factor.abs().clamp(min=1.0)
    if is_traced(dlogits) or not use_triton(dlogits):
        return late_product((dlogits.to(factor.dtype) * up).to(dlogits.dtype), x, factor / up)
    whole = dlogits.as_strided((dlogits.shape[0] * dlogits.stride(0),), (1,))
    scaled = _scale_gradient(whole, up, dlogits.dtype, ours)
    return late_product(scaled.as_strided(dlogits.shape, dlogits.stride()), x, factor / up)
