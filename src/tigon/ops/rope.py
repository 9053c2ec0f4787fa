"""Rotary position embedding: each pair (x₁, x₂) of a head is turned by the angle of its position.

    y₁ = x₁ · cos₁ − x₂ · sin₁        x₁ the first half of the rotated dimensions, x₂ the second
    y₂ = x₂ · cos₂ + x₁ · sin₂

Source: Su et al. 2021, https://arxiv.org/abs/2104.09864, in the half-rotation layout of GPT-NeoX and Llama.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.backend import cdiv, differentiable, launch, launcher, next_power_of_2, tl, triton, use_triton


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate q and k by their positions, in one launch, computed in fp32 and rounded once.

    Args:
        q: (B, H, T, D) for unsqueeze_dim=1, (B, T, H, D) for unsqueeze_dim=2; any strides.
        k: like q, with its own number of heads.
        cos, sin: (B, T, R), (1, T, R) or (T, R), R even and at most D. The first R dimensions of each head are rotated,
            the others pass unchanged. No gradient flows to them.
        unsqueeze_dim: where the head dimension stands, by the name that transformers uses.
    Returns: q and k rotated, in the promoted dtype of each with cos.
    Raises: ValueError for shapes that do not fit, and for a cos or sin that requires a gradient.

    Replaces::

        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
    """
    if unsqueeze_dim not in (1, 2):
        raise ValueError(
            f"rope: unsqueeze_dim must be 1, for (B, H, T, D), or 2, for (B, T, H, D), got {unsqueeze_dim}."
        )
    time_dim = 3 - unsqueeze_dim
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 4:
            raise ValueError(f"rope: {name} must have four dimensions, got shape {tuple(x.shape)}.")
    B, T, D = q.shape[0], q.shape[time_dim], q.shape[3]
    if (k.shape[0], k.shape[time_dim], k.shape[3]) != (B, T, D):
        raise ValueError(f"rope: k must match q {tuple(q.shape)} in all but the heads, got {tuple(k.shape)}.")
    R = cos.shape[-1] if cos.dim() else 0
    if cos.shape != sin.shape or tuple(cos.shape) not in ((B, T, R), (1, T, R), (T, R)) or R % 2 or R > D:
        raise ValueError(
            f"rope: cos and sin must both be ({B}, {T}, R), (1, {T}, R) or ({T}, R) with R even and at most {D}, "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}."
        )
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError("rope: cos and sin must not require a gradient: it would be lost. Detach them.")
    if not use_triton(q, k, cos, sin):
        return rope_reference(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    dtypes = [torch.promote_types(x.dtype, cos.dtype) for x in (q, k)]
    return _rope(cos, sin, q, k, unsqueeze_dim, False, *dtypes)


def rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(-3 if unsqueeze_dim == 1 else -2), sin.unsqueeze(-3 if unsqueeze_dim == 1 else -2)
    acc = torch.promote_types(torch.promote_types(q.dtype, cos.dtype), torch.float32)

    def rotate(x: Tensor) -> Tensor:
        R = cos.shape[-1]
        turned, rest = x[..., :R].to(acc), x[..., R:]
        x1, x2 = turned.chunk(2, dim=-1)
        y = turned * cos.to(acc) + torch.cat((-x2, x1), dim=-1) * sin.to(acc)
        dtype = torch.promote_types(x.dtype, cos.dtype)
        return torch.cat((y.to(dtype), rest.to(dtype)), dim=-1) if rest.shape[-1] else y.to(dtype)

    return rotate(q), rotate(k)


# ---------------------------------------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["T", "tokens"])
def _rope_kernel(
    cos_ptr, sin_ptr, q_ptr, k_ptr, yq_ptr, yk_ptr, tokens, T, heads_q, heads_k, D,
    stride_cb, stride_ct, stride_sb, stride_st, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_yqb, stride_yqt, stride_yqh, stride_ykb, stride_ykt, stride_ykh,
    HALF: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    # A flat grid over (tokens, heads of q then of k): small independent pieces, whose angles come from the L1 cache.
    blocks_q = tl.cdiv(heads_q, BLOCK_H)
    blocks = blocks_q + tl.cdiv(heads_k, BLOCK_H)
    block = tl.program_id(0) % blocks
    is_q = block < blocks_q
    heads = tl.where(is_q, heads_q, heads_k)
    h = tl.where(is_q, block, block - blocks_q) * BLOCK_H + tl.arange(0, BLOCK_H)
    token = tl.program_id(0) // blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    # int64: a batch of 2**31 elements is 512k tokens of 4096.
    b, t = (token // T).to(tl.int64), (token % T).to(tl.int64)

    pair = tl.arange(0, BLOCK_R)
    mask = (token < tokens)[:, None] & (pair < HALF)[None, :]
    cos_at = cos_ptr + (b * stride_cb + t * stride_ct)[:, None] + pair[None, :]
    sin_at = sin_ptr + (b * stride_sb + t * stride_st)[:, None] + pair[None, :]
    c1 = tl.load(cos_at, mask=mask, other=0.0).to(tl.float32)[:, None, :]
    c2 = tl.load(cos_at + HALF, mask=mask, other=0.0).to(tl.float32)[:, None, :]
    s1 = tl.load(sin_at, mask=mask, other=0.0).to(tl.float32)[:, None, :]
    s2 = tl.load(sin_at + HALF, mask=mask, other=0.0).to(tl.float32)[:, None, :]

    x_ptr = q_ptr if is_q else k_ptr
    y_ptr = yq_ptr if is_q else yk_ptr
    x_row = b * tl.where(is_q, stride_qb, stride_kb) + t * tl.where(is_q, stride_qt, stride_kt)
    y_row = b * tl.where(is_q, stride_yqb, stride_ykb) + t * tl.where(is_q, stride_yqt, stride_ykt)
    x_at = x_row[:, None] + h[None, :] * tl.where(is_q, stride_qh, stride_kh)
    y_at = y_row[:, None] + h[None, :] * tl.where(is_q, stride_yqh, stride_ykh)
    here = (token < tokens)[:, None] & (h < heads)[None, :]

    mask = here[:, :, None] & (pair < HALF)[None, None, :]
    x_half = x_ptr + x_at[:, :, None] + pair[None, None, :]
    y_half = y_ptr + y_at[:, :, None] + pair[None, None, :]
    x1 = tl.load(x_half, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_half + HALF, mask=mask, other=0.0).to(tl.float32)
    if INVERSE:  # the transpose of the rotation, for the gradient
        y1, y2 = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        y1, y2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    tl.store(y_half, y1.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_half + HALF, y2.to(y_ptr.dtype.element_ty), mask=mask)
    if BLOCK_REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, None, :]
        mask = here[:, :, None] & (rest < D)
        x = tl.load(x_ptr + x_at[:, :, None] + rest, mask=mask, other=0.0)
        tl.store(y_ptr + y_at[:, :, None] + rest, x.to(y_ptr.dtype.element_ty), mask=mask)


# --------------------------------------------------------------------------------------------------------- launches


def _rope_fake(cos, sin, q, k, unsqueeze_dim, inverse, dtype_q, dtype_k):
    def like(x, dtype):
        if x is None:
            return cos.new_empty(0)
        if not inverse:
            y = torch.empty_like(x, dtype=dtype)  # the strides of x: attention takes it as it was
            return y if y.stride(-1) == 1 else x.new_empty(x.shape, dtype=dtype)  # the kernel writes unit strides
        if unsqueeze_dim == 2:
            return x.new_empty(x.shape, dtype=dtype)
        # Token-major memory whatever layout the gradient came in: the projection's backward reads it without a copy.
        _, H, T, D = x.shape
        return torch.empty_strided(x.shape, (T * H * D, D, H * D, 1), dtype=dtype, device=x.device)

    return like(q, dtype_q), like(k, dtype_k)


@launcher(
    "(Tensor cos, Tensor sin, Tensor? q, Tensor? k, int unsqueeze_dim, bool inverse, ScalarType dtype_q,"
    " ScalarType dtype_k) -> (Tensor, Tensor)",
    _rope_fake,
)
def _rope_launch(
    cos: Tensor, sin: Tensor, q: Tensor | None, k: Tensor | None, unsqueeze_dim: int, inverse: bool,
    dtype_q: torch.dtype, dtype_k: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    yq, yk = _rope_fake(cos, sin, q, k, unsqueeze_dim, inverse, dtype_q, dtype_k)
    given = [(x, y) for x, y in ((q, yq), (k, yk)) if x is not None and y.numel()]
    if len(given) == 2 and (q.dtype != k.dtype or dtype_q != dtype_k):  # type: ignore[union-attr]
        launches = [given[:1], given[1:]]
    else:
        launches = [given] if given else []
    for pairs in launches:
        xs, ys = zip(*pairs, strict=True)
        _rotate(cos, sin, xs, ys, unsqueeze_dim, inverse)
    return yq, yk


def _rotate(
    cos: Tensor, sin: Tensor, xs: tuple[Tensor, ...], ys: tuple[Tensor, ...], unsqueeze_dim: int, inverse: bool
) -> None:
    """One launch for one or two tensors of one dtype."""
    B, T, D, R = xs[0].shape[0], xs[0].shape[3 - unsqueeze_dim], xs[0].shape[3], cos.shape[-1]
    if cos.shape != (B, T, R):
        cos, sin = cos.expand(B, T, R), sin.expand(B, T, R)
    cos, sin, *xs = (a if a.stride(-1) == 1 else a.contiguous() for a in (cos, sin, *xs))  # type: ignore[assignment]
    # A single tensor stands in both places, with no heads in the second. The outputs' strides follow from the inputs'.
    tensors = (cos, sin, xs[0], xs[-1], ys[0], ys[-1])
    inputs = [(t.shape, t.stride(), t.dtype) for t in tensors[:4]]
    key = (unsqueeze_dim, inverse, len(xs), ys[0].dtype, *inputs)

    def plan():
        heads = [xs[0].shape[unsqueeze_dim], xs[-1].shape[unsqueeze_dim] if len(xs) == 2 else 0]
        strides = [s for t in tensors[2:] for s in (t.stride(0), t.stride(3 - unsqueeze_dim), t.stride(unsqueeze_dim))]
        # 512 pairs a warp: two 16-byte loads a thread from either half.
        block_r = next_power_of_2(max(1, R // 2))
        block_h = min(4, next_power_of_2(max(heads)))
        block_t = max(1, 512 // (block_r * block_h))
        blocks = sum(cdiv(h, block_h) for h in heads)
        arguments = (
            B * T, T, *heads, D, cos.stride(0), cos.stride(1), sin.stride(0), sin.stride(1), *strides,
            R // 2, block_t, block_h, block_r, next_power_of_2(D - R) if D > R else 0, inverse,
        )  # fmt: skip
        return cdiv(B * T, block_t) * blocks, arguments, {"num_warps": 1}

    launch(_rope_kernel, key, tensors, plan)


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    cos, sin, q, k, ctx.unsqueeze_dim = inputs[:5]
    ctx.save_for_backward(cos, sin)
    ctx.dtypes = q.dtype, k.dtype


def _backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    dq, dk = (dq if ctx.needs_input_grad[2] else None), (dk if ctx.needs_input_grad[3] else None)
    gq = gk = None
    if dq is not None or dk is not None:
        gq, gk = _rope_launch(*ctx.saved_tensors, dq, dk, ctx.unsqueeze_dim, True, *ctx.dtypes)
    return None, None, None if dq is None else gq, None if dk is None else gk, None, None, None, None


_rope = differentiable(_rope_launch, _setup_context, _backward, outputs=2)
