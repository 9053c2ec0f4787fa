"""Per-head RMS normalization, then rotary embedding, in a single pass over q and k.

    n = x / sqrt(mean(x²) + eps) · (offset + weight)        over the D dimensions of a head
    y = rope(n)                                             tigon.rope: rotate each pair (n₁, n₂) by its angle

Source: Qwen3 (https://arxiv.org/abs/2505.09388) and Gemma 3 (https://arxiv.org/abs/2503.19786), whose attention
normalizes queries and keys; Zhang & Sennrich 2019 and Su et al. 2021 for the two halves.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
    cdiv,
    check_tensors,
    differentiable,
    do_not_specialize,
    in_order,
    jit,
    launch,
    launcher,
    multiprocessors,
    next_power_of_2,
    tl,
    unknown_keyword,
    use_triton,
)
from tigon.kernels.tiles.pairs import load_pairs, store_pairs, turn
from tigon.ops.example import Example, make_angles
from tigon.ops.rms_norm import CASTS, Cast
from tigon.ops.rope import (
    DEFAULT,
    HOMES,
    NEIGHBOURS,
    Rope,
    angle_strides,
    check_rotary,
    far_apart,
    like,
    rope_reference,
    unit_stride,
    unit_strides_alike,
)
from tigon.ops.sum_rows import sum_rows


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, *, eps: float = 1e-6,
    offset: float = 0.0, cast: Cast = "llama", unsqueeze_dim: int = 1, config: Rope = DEFAULT, **unknown: NoReturn,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Normalize each head in q and k, scale the head, and rotate it by position, in a single launch.

    Args:
        q: (B, H, T, D) for unsqueeze_dim=1, (B, T, H, D) for unsqueeze_dim=2; any strides. The results keep q's memory
            order: for a transposed view of a projection, token by token.
        k: like q, possibly with another head count; q's dtype.
        q_weight, k_weight: (D,).
        cos, sin: (B, T, R), (1, T, R) or (T, R), as for `tigon.rope`; R < D rotates the first R dimensions of the
            normalized head. They get no gradient.
        eps: added to the mean square, in squared units of q and k.
        offset: added to the weights; Gemma stores weight − 1 and uses 1.0.
        cast: intermediate rounding, as for `tigon.rms_norm`:
            "llama"  round x·rstd to x's dtype, then scale; the result has the promoted dtype of x, weight and cos.
            "gemma"  no intermediate rounding; the result has the promoted dtype of x and cos.
            "none"   no intermediate rounding; the result has the promoted dtype of x, weight and cos.
            Scale and rotation run in fp32 and are rounded once: eager code rounds after the scale, after either
            product and after the sum.
        unsqueeze_dim, config: as for `tigon.rope`; no mrope_section, and arithmetic "fp32".
    Returns: normalized and rotated q and k. The backward pass saves only the inputs.
    Raises: ValueError for invalid shapes, dtypes or options, and for a cos or sin that requires a gradient.

    Replaces (cast="llama")::

        q, k = q_norm(q), k_norm(k)                      # LlamaRMSNorm over the last dimension
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
    """
    if unknown:
        raise unknown_keyword("qk_norm_rope", unknown, HOMES)
    if config is not DEFAULT:
        _check_config(config)
        cos, sin = config.spread(cos, sin)
    check_rotary("qk_norm_rope", q, k, cos, sin, unsqueeze_dim)
    if cast not in CASTS:
        raise ValueError(f"qk_norm_rope: cast must be one of {CASTS}, got {cast!r}.")
    if q.dtype != k.dtype or not q.dtype.is_floating_point:
        raise ValueError(f"qk_norm_rope: q and k must have one float dtype, got {q.dtype} and {k.dtype}.")
    D = q.shape[-1]
    if not (isinstance(q_weight, Tensor) and isinstance(k_weight, Tensor)):
        check_tensors("qk_norm_rope", q_weight=q_weight, k_weight=k_weight)
    if q_weight.shape != (D,) or k_weight.shape != (D,) or q_weight.dtype != k_weight.dtype:
        raise ValueError(
            f"qk_norm_rope: q_weight and k_weight must both be ({D},) with one dtype, got {tuple(q_weight.shape)} "
            f"{q_weight.dtype} and {tuple(k_weight.shape)} {k_weight.dtype}."
        )
    if not use_triton(q, k, q_weight, k_weight, cos, sin):
        return qk_norm_rope_reference(
            q, k, q_weight, k_weight, cos, sin, eps=eps, offset=offset, cast=cast, unsqueeze_dim=unsqueeze_dim,
            config=NEIGHBOURS if config.interleaved else DEFAULT,
        )  # fmt: skip
    dtype = _out_dtype(q, q_weight, cos, cast)
    result: tuple[Tensor, Tensor] = _qk_norm_rope(
        q, k, q_weight, k_weight, cos, sin, eps, offset, cast == "llama", unsqueeze_dim, config.interleaved, dtype
    )
    return result


def _check_config(config: Rope) -> None:
    for name, value in (("mrope_section", config.mrope_section), ("arithmetic", config.arithmetic)):
        if value != getattr(DEFAULT, name):
            raise ValueError(
                f"qk_norm_rope: config.{name} must be left out, got {value!r}: use rms_norm and rope for it."
            )


def qk_norm_rope_reference(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, *, eps: float = 1e-6,
    offset: float = 0.0, cast: str = "llama", unsqueeze_dim: int = 1, config: Rope = DEFAULT,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        acc = torch.promote_types(x.dtype, torch.float32)
        y = x.to(acc) * torch.rsqrt(x.to(acc).square().mean(-1, keepdim=True) + eps)
        if cast == "llama":
            y = y + (y.to(x.dtype).to(acc) - y).detach()  # rounded value, unrounded gradient
        return y * (weight.to(acc) + offset)

    y = rope_reference(norm(q, q_weight), norm(k, k_weight), cos, sin, unsqueeze_dim=unsqueeze_dim, config=config)
    dtype = _out_dtype(q, q_weight, cos, cast)
    return in_order(y[0].to(dtype), q), in_order(y[1].to(dtype), k)


def _out_dtype(x: Tensor, weight: Tensor, cos: Tensor, cast: str) -> torch.dtype:
    dtype = x.dtype
    if cast != "gemma" and weight.dtype != dtype:
        dtype = torch.promote_types(dtype, weight.dtype)
    return dtype if cos.dtype == dtype else torch.promote_types(dtype, cos.dtype)


# ---------------------------------------------------------------------------------------------------------- kernels


# One single-warp program normalizes and rotates BLOCK_T tokens × BLOCK_H heads of either q or k; heads are the fast
# index, q's before k's.
# q, k, yq, yk: strides (b, t, h), so packed projections need no copy and y keeps x's memory order. wq, wk (D,). cos,
# sin: strides (cb, ct), shared by all heads.
# tokens = B · T. HALF = R / 2 rotated pairs, padded to BLOCK_R; BLOCK_REST > 0: D − R dimensions that are normalized
# but not rotated.
# ROUND: round x · rstd to x's dtype before the weight (Llama). FAR: head offsets need int64; int32 takes half the
# registers.
@jit
@do_not_specialize("T", "tokens")
def _qk_norm_rope_fwd_kernel(
    q_ptr, k_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, yq_ptr, yk_ptr, tokens, T, heads_q, heads_k, D, eps, offset,
    stride_cb, stride_ct, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_yqb, stride_yqt, stride_yqh, stride_ykb, stride_ykt, stride_ykh,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ROUND: tl.constexpr, FAR: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    blocks_q = tl.cdiv(heads_q, BLOCK_H)
    blocks = blocks_q + tl.cdiv(heads_k, BLOCK_H)
    block = tl.program_id(0) % blocks
    is_q = block < blocks_q
    heads = tl.where(is_q, heads_q, heads_k)
    h = tl.where(is_q, block, block - blocks_q) * BLOCK_H + tl.arange(0, BLOCK_H)
    far = h
    if FAR:
        far = h.to(tl.int64)
    token = tl.program_id(0) // blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    b, t = (token // T).to(tl.int64), (token % T).to(tl.int64)
    # Select pointers instead of branching: q and k share the code and its registers.
    x_ptr = q_ptr if is_q else k_ptr
    w_ptr = wq_ptr if is_q else wk_ptr
    y_ptr = yq_ptr if is_q else yk_ptr
    x_token = b * tl.where(is_q, stride_qb, stride_kb) + t * tl.where(is_q, stride_qt, stride_kt)
    y_token = b * tl.where(is_q, stride_yqb, stride_ykb) + t * tl.where(is_q, stride_yqt, stride_ykt)
    x_at = x_ptr + (x_token[:, None] + far[None, :] * tl.where(is_q, stride_qh, stride_kh))[:, :, None]
    y_at = y_ptr + (y_token[:, None] + far[None, :] * tl.where(is_q, stride_yqh, stride_ykh))[:, :, None]
    here = ((token < tokens)[:, None] & (h < heads)[None, :])[:, :, None]

    x1, x2 = load_pairs(x_at, here, 0, HALF, BLOCK_R, INTERLEAVED, -1, -1)
    # Load angles and weights for every row, in the row's layout, through L1: values loaded once per tile would have to
    # move between threads.
    angle = (b * stride_cb + t * stride_ct)[:, None, None] + tl.zeros((BLOCK_T, BLOCK_H, 1), tl.int64)
    c1, c2 = load_pairs(cos_ptr + angle, here, 0, HALF, BLOCK_R, INTERLEAVED, -1, -1)
    s1, s2 = load_pairs(sin_ptr + angle, here, 0, HALF, BLOCK_R, INTERLEAVED, -1, -1)
    w_at = w_ptr + tl.zeros((BLOCK_T, BLOCK_H, 1), tl.int32)
    w1, w2 = load_pairs(w_at, here, 0, HALF, BLOCK_R, INTERLEAVED, -1, -1)
    squares = tl.sum(x1 * x1 + x2 * x2, 2)
    if BLOCK_REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        there = here & (rest < D)
        x3 = tl.load(x_at + rest, mask=there, other=0.0).to(tl.float32)
        squares += tl.sum(x3 * x3, 2)
    rstd = tl.rsqrt(squares / D + eps)[:, :, None]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    n1, n2 = _hat(x1, rstd, dtype, ROUND) * (w1 + offset), _hat(x2, rstd, dtype, ROUND) * (w2 + offset)
    y1, y2 = turn(n1, n2, c1, c2, s1, s2, False)
    store_pairs(y_at, here, y1, y2, HALF, BLOCK_R, INTERLEAVED)
    if BLOCK_REST > 0:
        w3 = tl.load(w_at + rest, mask=there, other=0.0).to(tl.float32)
        y3 = _hat(x3, rstd, dtype, ROUND) * (w3 + offset)
        tl.store(y_at + rest, y3.to(y_ptr.dtype.element_ty), mask=there)


@jit
def _hat(x, rstd, dtype: tl.constexpr, ROUND: tl.constexpr):
    y = x * rstd
    if ROUND:
        y = y.to(dtype).to(tl.float32)
    return y


# Computes dx for all heads of q, or of k, tile by tile in a persistent loop, and dW in registers until the last tile: 8
# pairs per thread, 16 registers for both sums. Recomputes rstd, since dx reads the row anyway.
# n = xhat · w with xhat = x · rstd. dn, g = dn · w: gradients of n and xhat. dx = (g − xhat · mean(g · xhat)) · rstd.
# dy, x, dx: strides (b, t, h). dw: the program's row of partial sums, which sum_rows adds in a fixed order. Other
# arguments as in the forward kernel.
# STAGES is 3 only for heads with 128 dimensions: on an H200 the prefetch cost more than it gained at other widths.
@jit
def _bwd_heads(
    dy_ptr, x_ptr, w_ptr, cos_ptr, sin_ptr, dx_ptr, dw_ptr, tokens, T, heads, D, eps, offset, stride_cb, stride_ct,
    stride_dyb, stride_dyt, stride_dyh, stride_xb, stride_xt, stride_xh, stride_dxb, stride_dxt, stride_dxh,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ROUND: tl.constexpr, NEED_DW: tl.constexpr,
    FAR: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dx for all heads of a tensor, and the program's share of dW."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    w_at = w_ptr + tl.zeros((BLOCK_T, BLOCK_H, 1), tl.int32)
    everywhere = tl.full((BLOCK_T, BLOCK_H, 1), 1, tl.int1)
    w1, w2 = load_pairs(w_at, everywhere, 0, HALF, BLOCK_R, INTERLEAVED, -1, -1)
    w1, w2 = w1 + offset, w2 + offset
    dw1 = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_R), tl.float32)
    dw2 = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_R), tl.float32)
    if BLOCK_REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        w3 = tl.load(w_at + rest, mask=everywhere & (rest < D), other=0.0).to(tl.float32) + offset
        dw3 = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_REST), tl.float32)
    # Heads are the fast index: concurrent programs share their tokens' angles.
    blocks = tl.cdiv(heads, BLOCK_H)
    for tile in tl.range(tl.program_id(0), tl.cdiv(tokens, BLOCK_T) * blocks, tl.num_programs(0), num_stages=STAGES):
        h = tile % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
        far = h
        if FAR:
            far = h.to(tl.int64)
        token = tile // blocks * BLOCK_T + tl.arange(0, BLOCK_T)
        b, t = (token // T).to(tl.int64), (token % T).to(tl.int64)
        here = ((token < tokens)[:, None] & (h < heads)[None, :])[:, :, None]
        x_at = x_ptr + ((b * stride_xb + t * stride_xt)[:, None] + far[None, :] * stride_xh)[:, :, None]
        dy_at = dy_ptr + ((b * stride_dyb + t * stride_dyt)[:, None] + far[None, :] * stride_dyh)[:, :, None]
        x1, x2 = load_pairs(x_at, here, 0, HALF, BLOCK_R, INTERLEAVED, -1, -1)
        dy1, dy2 = load_pairs(dy_at, here, 0, HALF, BLOCK_R, INTERLEAVED, -1, -1)
        angle = (b * stride_cb + t * stride_ct)[:, None, None] + tl.zeros((BLOCK_T, BLOCK_H, 1), tl.int64)
        c1, c2 = load_pairs(cos_ptr + angle, here, 0, HALF, BLOCK_R, INTERLEAVED, -1, -1)
        s1, s2 = load_pairs(sin_ptr + angle, here, 0, HALF, BLOCK_R, INTERLEAVED, -1, -1)
        dn1, dn2 = turn(dy1, dy2, c1, c2, s1, s2, True)
        g1, g2 = dn1 * w1, dn2 * w2
        squares, products = tl.sum(x1 * x1 + x2 * x2, 2), tl.sum(g1 * x1 + g2 * x2, 2)
        if BLOCK_REST > 0:
            there = here & (rest < D)
            x3 = tl.load(x_at + rest, mask=there, other=0.0).to(tl.float32)
            dn3 = tl.load(dy_at + rest, mask=there, other=0.0).to(tl.float32)
            g3 = dn3 * w3
            squares += tl.sum(x3 * x3, 2)
            products += tl.sum(g3 * x3, 2)
        rstd = tl.rsqrt(squares / D + eps)[:, :, None]
        if NEED_DW:
            dw1 += dn1 * _hat(x1, rstd, dtype, ROUND)
            dw2 += dn2 * _hat(x2, rstd, dtype, ROUND)
            if BLOCK_REST > 0:
                dw3 += dn3 * _hat(x3, rstd, dtype, ROUND)
        if dx_ptr is not None:
            # products uses x, not xhat: apply the factor rstd once per head.
            mean = products[:, :, None] * rstd / D
            dx_at = dx_ptr + ((b * stride_dxb + t * stride_dxt)[:, None] + far[None, :] * stride_dxh)[:, :, None]
            dx1, dx2 = (g1 - x1 * rstd * mean) * rstd, (g2 - x2 * rstd * mean) * rstd
            store_pairs(dx_at, here, dx1, dx2, HALF, BLOCK_R, INTERLEAVED)
            if BLOCK_REST > 0:
                dx3 = (g3 - x3 * rstd * mean) * rstd
                tl.store(dx_at + rest, dx3.to(dx_ptr.dtype.element_ty), mask=there)
    if NEED_DW:
        inside = tl.full((1,), 1, tl.int1)
        store_pairs(dw_ptr, inside, _sum_tile(dw1), _sum_tile(dw2), HALF, BLOCK_R, INTERLEAVED)
        if BLOCK_REST > 0:
            tl.store(dw_ptr + rest, _sum_tile(dw3), mask=rest < D)


@jit
def _sum_tile(x):
    return tl.sum(tl.sum(x, 0), 0)


# Persistent grid: each program walks over tiles of q, then over tiles of k, so that registers hold a single dW's sums
# at a time.
# dyq or dyk is None if that output is unused, or if neither the input nor its weight needs a gradient; dq, dk may be
# None.
# dw: (programs, wanted sums, D) fp32: dWq and dWk side by side, so that sum_rows adds both in a single launch. Other
# arguments as in `_bwd_heads`.
@jit
@do_not_specialize("T", "tokens")
def _qk_norm_rope_bwd_kernel(
    q_ptr, k_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, dyq_ptr, dyk_ptr, dq_ptr, dk_ptr, dw_ptr,
    tokens, T, heads_q, heads_k, D, eps, offset, stride_cb, stride_ct,
    stride_dyqb, stride_dyqt, stride_dyqh, stride_qb, stride_qt, stride_qh, stride_dqb, stride_dqt, stride_dqh,
    stride_dykb, stride_dykt, stride_dykh, stride_kb, stride_kt, stride_kh, stride_dkb, stride_dkt, stride_dkh,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ROUND: tl.constexpr, NEED_DWQ: tl.constexpr, NEED_DWK: tl.constexpr,
    FAR: tl.constexpr, BLOCK_TQ: tl.constexpr, BLOCK_HQ: tl.constexpr, BLOCK_TK: tl.constexpr, BLOCK_HK: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    if NEED_DWQ or NEED_DWK:
        dw_ptr += tl.program_id(0).to(tl.int64) * D * (NEED_DWQ + NEED_DWK)
    if dyq_ptr is not None:
        _bwd_heads(
            dyq_ptr, q_ptr, wq_ptr, cos_ptr, sin_ptr, dq_ptr, dw_ptr, tokens, T, heads_q, D, eps, offset,
            stride_cb, stride_ct, stride_dyqb, stride_dyqt, stride_dyqh, stride_qb, stride_qt, stride_qh,
            stride_dqb, stride_dqt, stride_dqh,
            HALF, INTERLEAVED, ROUND, NEED_DWQ, FAR, BLOCK_TQ, BLOCK_HQ, BLOCK_R, BLOCK_REST, STAGES,
        )  # fmt: skip
    if dyk_ptr is not None:
        if NEED_DWQ:
            dw_ptr += D
        _bwd_heads(
            dyk_ptr, k_ptr, wk_ptr, cos_ptr, sin_ptr, dk_ptr, dw_ptr, tokens, T, heads_k, D, eps, offset,
            stride_cb, stride_ct, stride_dykb, stride_dykt, stride_dykh, stride_kb, stride_kt, stride_kh,
            stride_dkb, stride_dkt, stride_dkh,
            HALF, INTERLEAVED, ROUND, NEED_DWK, FAR, BLOCK_TK, BLOCK_HK, BLOCK_R, BLOCK_REST, STAGES,
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- launches


def _fwd_tile(half: int, heads: int) -> tuple[int, int, int, int]:
    """Return tokens, heads and pairs per program, and warps.

    512 pairs, two 16-byte loads per thread from either half. Single-warp programs need no barriers, and many are in
    flight.
    """
    block_r = next_power_of_2(max(1, half))
    # Prefer heads to tokens: all heads of a token share angles.
    block_h = min(8, next_power_of_2(heads), max(1, 512 // block_r))
    return max(1, 512 // (block_r * block_h)), block_h, block_r, 1


def _bwd_tile(half: int) -> tuple[int, int, int, int, int]:
    """Return rows (token, head) per tile, maximal heads per tile, warps, stages, and programs per SM.

    With 8 pairs per thread 4 programs fit on an SM: some compute while others wait for memory.
    """
    # 1024 pairs on 128 threads. Tiles of q and k have equal row counts, split by each tensor's head count.
    return max(1, 1024 // next_power_of_2(max(1, half))), 16, 4, 3 if half == 64 else 1, 4


def _strides(x: Tensor | None, unsqueeze_dim: int) -> tuple[int, int, int]:
    """Return the strides of batch, time and heads; zeros for None."""
    return (0, 0, 0) if x is None else (x.stride(0), x.stride(3 - unsqueeze_dim), x.stride(unsqueeze_dim))


_OPTIONS = "float eps, float offset, bool rounded, int unsqueeze_dim, bool interleaved"


def _qk_norm_rope_fwd_fake(q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return like(q, others[-1]), like(k, others[-1])


@launcher(_qk_norm_rope_fwd_fake, rest=f"{_OPTIONS}, ScalarType dtype")
def _qk_norm_rope_fwd(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    eps, offset, rounded, unsqueeze_dim, interleaved, dtype = options
    yq, yk = like(q, dtype), like(k, dtype)
    if yq.numel() == 0 and yk.numel() == 0:
        return yq, yk
    # This key determines the copies below and the outputs' strides.
    key = (
        q.shape, q.stride(), q.dtype, k.shape, k.stride(), q_weight.dtype, cos.shape, cos.stride(), sin.stride(),
        cos.dtype, sin.dtype, *options,
    )  # fmt: skip
    cos, sin = unit_strides_alike(cos, sin)
    q, k, q_weight, k_weight = unit_stride(q), unit_stride(k), unit_stride(q_weight), unit_stride(k_weight)

    def plan() -> Plan:
        time, D, R = q.shape[3 - unsqueeze_dim], q.shape[3], cos.shape[-1]
        heads = q.shape[unsqueeze_dim], k.shape[unsqueeze_dim]
        block_t, block_h, block_r, warps = _fwd_tile(R // 2, max(heads))
        tokens = q.shape[0] * time
        arguments = (
            tokens, time, *heads, D, eps, offset, *angle_strides(cos)[1:],
            *(s for x in (q, k, yq, yk) for s in _strides(x, unsqueeze_dim)),
            R // 2, interleaved, rounded, far_apart(unsqueeze_dim, q, k, yq, yk),
            block_t, block_h, block_r, next_power_of_2(D - R) if D > R else 0,
        )  # fmt: skip
        return cdiv(tokens, block_t) * sum(cdiv(h, block_h) for h in heads), arguments, {"num_warps": warps}

    launch(_qk_norm_rope_fwd_kernel, key, (q, k, q_weight, k_weight, cos, sin, yq, yk), plan)
    return yq, yk


def _qk_norm_rope_bwd_fake(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, need: list[bool], *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        like(q, q.dtype) if need[0] else q.new_empty(0), like(k, k.dtype) if need[1] else q.new_empty(0),
        torch.empty_like(q_weight) if need[2] else q.new_empty(0),
        torch.empty_like(k_weight) if need[3] else q.new_empty(0),
    )  # fmt: skip


@launcher(_qk_norm_rope_bwd_fake, rest=_OPTIONS)
def _qk_norm_rope_bwd(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, need: list[bool], cos: Tensor, sin: Tensor,
    dyq: Tensor | None, dyk: Tensor | None, *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """need: dq, dk, dWq, dWk. dq and dWq need dyq; dk and dWk need dyk."""
    need_dq, need_dk, need_dwq, need_dwk = need
    eps, offset, rounded, unsqueeze_dim, interleaved = options
    dq, dk, dwq, dwk = results = _qk_norm_rope_bwd_fake(q, k, q_weight, k_weight, need)
    if q.numel() == 0 and k.numel() == 0:
        dwq.zero_()
        dwk.zero_()
        return results
    dyq, dyk = dyq if need_dq or need_dwq else None, dyk if need_dk or need_dwk else None
    # need is part of the key, since unwanted gradients are None to the kernel; so are the strides of dy, which autograd
    # chooses.
    key = (
        q.shape, q.stride(), q.dtype, k.shape, k.stride(), q_weight.dtype, cos.shape, cos.stride(), sin.stride(),
        cos.dtype, sin.dtype, *((None, None) if dy is None else (dy.stride(), dy.dtype) for dy in (dyq, dyk)),
        *options, *need,
    )  # fmt: skip
    cos, sin = unit_strides_alike(cos, sin)
    q, k, q_weight, k_weight = unit_stride(q), unit_stride(k), unit_stride(q_weight), unit_stride(k_weight)
    dyq, dyk = (dy if dy is None else unit_stride(dy) for dy in (dyq, dyk))
    D, half = q.shape[3], cos.shape[-1] // 2
    rows, most_heads, warps, stages, per_multiprocessor = _bwd_tile(half)
    # A persistent grid keeps the number of partial sums low; small tensors get about a program per tile.
    programs = min(1 + (q.numel() + k.numel()) // (D * rows), per_multiprocessor * multiprocessors(q.device))
    partial = q.new_empty((programs, need_dwq + need_dwk, D), dtype=torch.float32) if need_dwq or need_dwk else None
    outputs = dq if need_dq else None, dk if need_dk else None

    def plan() -> Plan:
        time, rest = q.shape[3 - unsqueeze_dim], D - 2 * half
        heads = q.shape[unsqueeze_dim], k.shape[unsqueeze_dim]
        blocks_h = (min(rows, most_heads, next_power_of_2(h)) for h in heads)
        arguments = (
            q.shape[0] * time, time, *heads, D, eps, offset, *angle_strides(cos)[1:],
            *(s for x in (dyq, q, outputs[0], dyk, k, outputs[1]) for s in _strides(x, unsqueeze_dim)),
            half, interleaved, rounded, need_dwq, need_dwk, far_apart(unsqueeze_dim, dyq, q, dyk, k, *outputs),
            *(n for h in blocks_h for n in (rows // h, h)),
            next_power_of_2(max(1, half)), next_power_of_2(rest) if rest else 0, stages,
        )  # fmt: skip
        return programs, arguments, {"num_warps": warps}

    launch(_qk_norm_rope_bwd_kernel, key, (q, k, q_weight, k_weight, cos, sin, dyq, dyk, *outputs, partial), plan)
    if partial is not None:
        first, second = (dwq, dwk) if need_dwq else (dwk, None)
        sum_rows(partial, first, second if need_dwk else None)
    return results


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.options = inputs[6:11]
    ctx.save_for_backward(*inputs[:6])


def _backward(ctx: Any, dyq: Tensor | None, dyk: Tensor | None) -> tuple[Tensor | None, ...]:
    need = [n and dy is not None for n, dy in zip(ctx.needs_input_grad[:4], (dyq, dyk, dyq, dyk), strict=True)]
    if not any(need):
        return ()
    *inputs, cos, sin = ctx.saved_tensors
    gradients = _qk_norm_rope_bwd(*inputs, need, cos, sin, dyq, dyk, *ctx.options)
    return tuple(g if n else None for g, n in zip(gradients, need, strict=True))


_qk_norm_rope = differentiable(_qk_norm_rope_fwd, _setup_context, _backward, outputs=2)


EXAMPLES = {
    "qk_norm_rope": Example(
        "Rotary embeddings",
        ((2, 4, 64, 64), (2, 2, 64, 64), (64,), (64,)),
        lambda q, k, wq, wk: qk_norm_rope(q, k, wq, wk, *make_angles(q)),
    ),
}
