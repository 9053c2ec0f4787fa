"""RMS norm of a residual sum: s = residual + x, y = s / sqrt(mean(s²) + eps) · (offset + weight), fused.

Source: Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467

The kernels are `rms_norm`'s, whose launches accept a residual.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import differentiable, empty_rows, in_order, launcher, use_triton
from tigon.ops.example import ROWS, WEIGHT, Example
from tigon.ops.rms_norm import (
    Cast,
    _check,
    _empty_rstd,
    _forward,
    _out_dtype,
    _rms_norm_bwd,
    default_eps,
    rms_norm_reference,
)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float | None = None,
    offset: float = 0.0,
    cast: Cast = "llama",
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and normalise the sum, fused; the backward pass is fused likewise.

    Args:
        x: (..., N), a layer's output. residual: (..., N), the stream that x is added to; any float dtypes and strides.
        weight, eps, offset, cast: as for `rms_norm`, applied to the sum.
    Returns: (norm, sum), both in residual's memory order. The sum is rounded to the promoted dtype of x and residual,
        and the norm is computed from the rounded sum: the same numbers as from two separate steps.
    Raises: ValueError as `rms_norm`, and if residual and x differ in shape.

    Replaces::

        residual = residual + x
        y = rms_norm(residual, weight)
    """
    _check("add_rms_norm", x, weight, cast)
    if residual.shape != x.shape or not residual.dtype.is_floating_point:
        raise ValueError(
            f"add_rms_norm: residual must have x's shape {tuple(x.shape)} and a float dtype, "
            f"got {tuple(residual.shape)} {residual.dtype}."
        )
    if eps is None:
        eps = default_eps(torch.promote_types(x.dtype, residual.dtype))
    if not use_triton(x, residual, weight):
        return add_rms_norm_reference(x, residual, weight, eps=eps, offset=offset, cast=cast)
    result: tuple[Tensor, Tensor] = _add_rms_norm(x, residual, weight, eps, offset, cast)
    return result


def add_rms_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float | None = None,
    offset: float = 0.0,
    cast: str = "llama",
) -> tuple[Tensor, Tensor]:
    # residual + x rounds to the promoted dtype; the norm reads the rounded sum, as the model's two steps do.
    total = in_order(residual + x, residual)
    return rms_norm_reference(total, weight, eps=eps, offset=offset, cast=cast), total


# --------------------------------------------------------------------------------------------------------- launches


def _add_rms_norm_fwd_fake(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = x.dtype if x.dtype == residual.dtype else torch.promote_types(x.dtype, residual.dtype)
    # residual's memory order, as residual + x has.
    return empty_rows(residual, _out_dtype(dtype, weight, cast)), empty_rows(residual, dtype), _empty_rstd(x, dtype)


@launcher(_add_rms_norm_fwd_fake)
def _add_rms_norm_fwd(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str
) -> tuple[Tensor, Tensor, Tensor]:
    y, total, rstd = _add_rms_norm_fwd_fake(x, residual, weight, eps, offset, cast)
    _forward(x, residual, weight, y, total, rstd, eps, offset, cast)
    return y, total, rstd


# --------------------------------------------------------------------------------------------------------- autograd


def _add_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, weight, *ctx.options = inputs
    ctx.save_for_backward(output[1], weight, output[2])
    ctx.dtypes = x.dtype, residual.dtype


def _add_backward(ctx: Any, dy: Tensor | None, ds: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    need_x, need_r, need_dw, *_ = ctx.needs_input_grad
    d, dw = ds, None
    if dy is not None:
        d, dw = _rms_norm_bwd(dy, ds, *ctx.saved_tensors, *ctx.options, need_x or need_r, need_dw)
    dx = d.to(ctx.dtypes[0]) if need_x and d is not None else None
    dresidual = d.to(ctx.dtypes[1]) if need_r and d is not None else None
    return dx, dresidual, dw if need_dw else None


_add_rms_norm = differentiable(_add_rms_norm_fwd, _add_setup_context, _add_backward, outputs=2)


EXAMPLES = {
    "add_rms_norm": Example("Norms", (ROWS, ROWS, WEIGHT), add_rms_norm),
}
