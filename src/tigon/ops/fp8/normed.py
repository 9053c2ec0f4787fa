"""An RMS norm whose only result is its e4m3 rows, as an autograd node.

    total = x + residual;  rows = e4m3 of norm(total)        one pass, which writes no norm in bf16
    dtotal + dnorm ∂norm/∂total, dweight                     the kernel of `tigon.rms_norm`

Autograd hands gradients along tensors. The norm has none, so a handle with the norm's shape, one number of memory and
bf16 gradients stands in its place: products take the rows, and send the norm's gradient along the handle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tigon.kernels import make_function, use_triton, view_rows
from tigon.ops.fp8.constants import read_constant
from tigon.ops.fp8.norm_rows import norm_rows
from tigon.ops.fp8.recipe import Norm, Rows
from tigon.ops.fp8.reference import norm_again
from tigon.ops.rms_norm import MAX_TILE, _rms_norm_bwd, _rms_norm_fwd


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """The norm of (..., H) in e4m3 rows, and how to compute the norm again.

    handle: (..., H) bf16 of a single NaN, which carries the norm's gradient. rows: of the flattened tokens, (M, H).
    total: (..., H), the tensor that the norm is taken from. eps: as for `tigon.rms_norm`.
    """

    handle: Tensor
    rows: Rows
    total: Tensor
    norm: Norm
    eps: float


def norm_to_rows(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, *, eps: float, offset: float, cast: str,
    forked: bool = False,
) -> tuple[Tensor | None, Normed]:  # fmt: skip
    """The residual sum, and its norm in e4m3 rows.

    Args:
        x: (..., H) bf16, fp16 or fp32.
        residual: the stream that x is added to, likewise; or None.
        weight: (H,) or None. eps, offset, cast: as for `tigon.rms_norm`.
        forked: without a residual, return x as the stream, so that this node adds both gradients of x.
    Returns: (stream, norm). The stream is x + residual, rounded to their promoted dtype; x itself if forked; else None.
    """
    found = _norm_to_rows(x, residual, weight, eps, offset, cast, forked)
    total, handle, data, scale, rstd = found
    norm = Norm(rstd, weight, offset, cast)
    return total, Normed(handle, Rows(data, scale), x if total is None else total, norm, eps)


def _norm_to_rows_fwd(
    ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, cast: str,
    forked: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    ctx.set_materialize_grads(False)
    ctx.options, ctx.dtypes = (eps, offset, cast), (x.dtype, None if residual is None else residual.dtype)
    ctx.uses_kernels = use_triton(x, residual, weight)
    flat, beside = view_rows(x), None if residual is None else view_rows(residual)
    if beside is not None and beside.dtype != flat.dtype:  # a bf16 product and an fp32 stream, as under autocast
        dtype = torch.promote_types(flat.dtype, beside.dtype)
        flat, beside = flat.to(dtype), beside.to(dtype)
    summed, rstd, (data, scale) = norm_rows(flat, beside, weight, eps, offset, cast)
    total = x if residual is None else summed.view(x.shape)
    handle = read_constant(torch.nan, torch.bfloat16, x.device).expand(x.shape)
    ctx.save_for_backward(total, weight, rstd)
    ctx.mark_non_differentiable(data, scale, rstd)
    # A returned input becomes a view whose gradient arrives here; no memory is copied.
    return None if residual is None and not forked else total, handle, data, scale, rstd


def _backward(ctx: Any, dtotal: Tensor | None, dnorm: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    need_x, need_residual, need_weight, *_ = ctx.needs_input_grad
    need_d = need_x or need_residual
    d, dweight = dtotal, None
    if dnorm is not None:  # otherwise no product used the norm: the stream's gradient passes through
        total, weight, rstd = ctx.saved_tensors
        differentiate = _differentiate if ctx.uses_kernels else _differentiate_reference
        d, dweight = differentiate(dnorm, dtotal, total, weight, rstd, ctx.options, need_d, need_weight)
    dtype, other = ctx.dtypes
    return (
        None if d is None or not need_x else d.to(dtype), None if d is None or not need_residual else d.to(other),
        dweight if need_weight else None,
    )  # fmt: skip


def _differentiate(
    dnorm: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor | None, rstd: Tensor,
    options: tuple[Any, ...], need_d: bool, need_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # Rows that fit registers: the kernel computes 1/rms again, in one exchange with its other sum.
    if total.shape[-1] * total.element_size() <= MAX_TILE:
        rstd = rstd[:0]
    return _rms_norm_bwd(dnorm, dtotal, total, weight, rstd, *options, need_d, need_weight)


def _differentiate_reference(
    dnorm: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor | None, rstd: Tensor,
    options: tuple[Any, ...], need_d: bool, need_weight: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    _, offset, cast = options
    normal = total.float() * rstd.view(*total.shape[:-1], 1)
    dy = dnorm.float()
    wdy = dy if weight is None else dy * (weight.float() + offset)
    d = (wdy - normal * (wdy * normal).mean(-1, keepdim=True)) * rstd.view(*total.shape[:-1], 1)
    if dtotal is not None:
        d = d + dtotal.float()
    if weight is None:
        return d.to(total.dtype), None
    rounded = normal.to(total.dtype).float() if cast == "llama" else normal
    return d.to(total.dtype), (dy * rounded).reshape(-1, len(weight)).sum(0).to(weight.dtype)


_norm_to_rows = make_function(_norm_to_rows_fwd, _backward)


def norm_rows_again(total: Tensor, norm: Norm, eps: float) -> Tensor:
    """The norm of rows (M, H) in bf16."""
    if use_triton(total, norm.weight):
        y, _ = _rms_norm_fwd(total, norm.weight, eps, norm.offset, norm.cast)
        return y.to(torch.bfloat16)
    return norm_again(total, norm).to(torch.bfloat16)
