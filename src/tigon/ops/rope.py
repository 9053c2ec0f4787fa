"""Rotary position embedding: rotate each pair (x₁, x₂) in a head by the angle for its position.

    y₁ = x₁ · cos₁ − x₂ · sin₁        pairs: first half of the rotated dimensions with second half,
    y₂ = x₂ · cos₂ + x₁ · sin₂        or neighbours (interleaved)

Source: Su et al. 2021, https://arxiv.org/abs/2104.09864; halves as in GPT-NeoX and Llama, neighbours as in GPT-J and
Cohere. Angles for time, height and width: Qwen2-VL, https://arxiv.org/abs/2409.12191.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
    cdiv,
    differentiable,
    do_not_specialize,
    in_order,
    jit,
    launch,
    launcher,
    next_power_of_2,
    tl,
    unknown_keyword,
    use_triton,
)
from tigon.kernels.tiles.pairs import load_pairs, store_pairs, turn
from tigon.ops.example import Example, make_angles


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Options for `rope`, and except for mrope_section and arithmetic for `qk_norm_rope`.

    Args:
        interleaved: pairs are neighbours, (x[0], x[1]), (x[2], x[3]), …; cos and sin then hold each pair's angle twice
            in a row, as after `repeat_interleave(2, dim=-1)`.
        mrope_section: how many of the R/2 pairs use the first, the second and the third plane of angles (time, height,
            width). cos and sin are then (3, B, T, R) or (3, 1, T, R), and are not combined in memory.
        arithmetic: "fp32" rounds once, at the end. "native" rounds both products and their sum to the result's dtype,
            as eager code does; results and gradients are bitwise equal to eager's.
        angles: "twice" if cos and sin hold each pair's angle twice, as in transformers; "once" if they are (…, R/2), as
            in flash-attention and torchtitan. The shape is ambiguous: a cos half as wide as the head holds either all
            angles of the head once, or the angles of half a head twice.
    Raises: ValueError for invalid options.
    """

    interleaved: bool = False
    mrope_section: Sequence[int] | None = None
    arithmetic: Literal["fp32", "native"] = "fp32"
    angles: Literal["twice", "once"] = "twice"

    def __post_init__(self) -> None:
        if self.arithmetic not in ("fp32", "native"):
            raise ValueError(f"rope: arithmetic must be 'fp32' or 'native', got {self.arithmetic!r}.")
        if self.angles not in ("twice", "once"):
            raise ValueError(f"rope: angles must be 'twice' or 'once', got {self.angles!r}.")
        if self.mrope_section is not None:
            section = tuple(self.mrope_section)  # lists are not hashable
            object.__setattr__(self, "mrope_section", section)
            if len(section) != 3 or min(section) < 0:
                raise ValueError(f"rope: mrope_section must be three pair counts, got {section}.")

    def spread(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin with each pair's angle twice."""
        if self.angles == "twice":
            return cos, sin
        if self.interleaved:
            return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


DEFAULT = Rope()
NEIGHBOURS = Rope(interleaved=True)
HOMES = {field.name: f"config=tigon.Rope({field.name}=…)" for field in fields(Rope)}


def rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, unsqueeze_dim: int = 1, config: Rope = DEFAULT,
    **unknown: NoReturn,
) -> tuple[Tensor, Tensor] | Tensor:  # fmt: skip
    """Rotate q and k by position, in a single launch.

    Args:
        q: (B, H, T, D) for unsqueeze_dim=1, (B, T, H, D) for unsqueeze_dim=2; any float dtype and strides.
        k: like q, possibly with another head count; or None.
        cos, sin: (B, T, R), (1, T, R) or (T, R), R even and at most D. Only the first R dimensions of each head are
            rotated. cos and sin get no gradient.
        unsqueeze_dim: the head dimension, under transformers' name.
        config: a `tigon.Rope`: which dimensions form pairs, and the layout of cos and sin.
    Returns: q and k rotated, each in the promoted dtype with cos; only q if k is None.
    Raises: ValueError for invalid shapes or options, and for a cos or sin that requires a gradient.

    Replaces::

        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin

    and, with config.mrope_section and not interleaved, before it::

        cos, sin = (torch.cat([m[i % 3] for i, m in enumerate(a.split(mrope_section * 2, dim=-1))], dim=-1)
                    for a in (cos, sin))
    """
    if unknown:
        raise unknown_keyword("rope", unknown, HOMES)
    # The kernels expect each angle twice, as most models store it. Angles are small beside q and k: spreading them
    # takes two small launches and avoids a second form of every kernel.
    if config.angles != "twice":
        cos, sin = config.spread(cos, sin)
    section = config.mrope_section
    planes = (-1, -1) if section is None else _planes(section, cos)
    check_rotary("rope", q, k, cos, sin, unsqueeze_dim, 1 if section is None else 3)
    if not use_triton(q, k, cos, sin):
        rotated: tuple[Tensor, Tensor] | Tensor = _rotate(q, k, cos, sin, unsqueeze_dim, config)
        return rotated
    options: Any = (unsqueeze_dim, config.interleaved, *planes, config.arithmetic == "native", False)
    # A launch takes a single dtype for x and for y; a k with another dtype gets a separate launch.
    turned: tuple[Tensor, Tensor] = _rope(
        q, k if k is not None and k.dtype == q.dtype else None, cos, sin, *options, _promote(q, cos)
    )
    if k is None:
        return turned[0]
    if k.dtype != q.dtype:
        return turned[0], _rope(k, None, cos, sin, *options, _promote(k, cos))[0]
    return turned


def check_rotary(
    name: str, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int, planes: int = 1
) -> None:
    """Raise a ValueError, with the operator's name, if the tensors do not fit."""
    shape, angles = q.shape, cos.shape
    if unsqueeze_dim != 1 and unsqueeze_dim != 2:
        raise ValueError(
            f"{name}: unsqueeze_dim must be 1, for (B, H, T, D), or 2, for (B, T, H, D), got {unsqueeze_dim}."
        )
    if len(shape) != 4:
        raise ValueError(f"{name}: q must have four dimensions, got shape {tuple(shape)}.")
    B, T, D = shape[0], shape[3 - unsqueeze_dim], shape[3]
    if k is not None:
        other = k.shape
        if len(other) != 4:
            raise ValueError(f"{name}: k must have four dimensions, got shape {tuple(other)}.")
        if other[0] != B or other[3] != D or other[3 - unsqueeze_dim] != T:
            raise ValueError(f"{name}: k must match q {tuple(shape)} in all but the heads, got {tuple(other)}.")
    dims = len(angles)
    fits = dims == 3 or dims == 2 if planes == 1 else dims == 4 and angles[0] == planes
    R = angles[-1] if dims else 0
    if fits and dims > 2:
        fits = angles[-3] == B or angles[-3] == 1
    if not fits or angles[-2] != T or R % 2 or R > D or sin.shape != angles:
        wanted = f"({B}, {T}, R), (1, {T}, R) or ({T}, R)"
        if planes > 1:
            wanted = f"({planes}, {B}, {T}, R) or ({planes}, 1, {T}, R)"
        raise ValueError(
            f"{name}: cos and sin must both be {wanted} with R even and at most {D}, got {tuple(angles)} and "
            f"{tuple(sin.shape)}."
        )
    # A learned angle would silently stay untrained. Under no_grad nothing is lost.
    if (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled():
        wanting = " and ".join(side for side, t in (("cos", cos), ("sin", sin)) if t.requires_grad)
        raise ValueError(
            f"{name}: cos and sin must not require a gradient, as they get none, got {wanting} with one: detach them."
        )


def _planes(section: Sequence[int], cos: Tensor) -> tuple[int, int]:
    """Return the first pair of the second and of the third plane of angles."""
    half = cos.shape[-1] // 2 if cos.dim() else 0
    if sum(section) != half:
        raise ValueError(f"rope: config.mrope_section must sum to {half}, half the width of cos, got {tuple(section)}.")
    return section[0], section[0] + section[1]


def _promote(x: Tensor, cos: Tensor) -> torch.dtype:
    return x.dtype if x.dtype == cos.dtype else torch.promote_types(x.dtype, cos.dtype)


def rope_reference(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, unsqueeze_dim: int = 1, config: Rope = DEFAULT
) -> Any:
    return _rotate(q, k, *config.spread(cos, sin), unsqueeze_dim, config)


def _rotate(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int, config: Rope) -> Any:
    """The operator in plain PyTorch; cos and sin hold each angle twice."""
    interleaved, section = config.interleaved, config.mrope_section
    if section is not None:
        # Pair p holds dimensions p and R/2 + p, or 2p and 2p + 1: both use the pair's plane.
        sizes = [2 * n for n in section] if interleaved else [*section, *section]
        cos, sin = (
            torch.cat([m[i % 3] for i, m in enumerate(a.split(sizes, dim=-1))], dim=-1) for a in (cos, sin)
        )  # fmt: skip
    cos, sin = cos.unsqueeze(-3 if unsqueeze_dim == 1 else -2), sin.unsqueeze(-3 if unsqueeze_dim == 1 else -2)
    R = cos.shape[-1]

    def rotate(x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, cos.dtype)
        turned, rest, c, s = x[..., :R], x[..., R:], cos, sin
        if config.arithmetic == "fp32":
            turned, c, s = (t.to(torch.promote_types(dtype, torch.float32)) for t in (turned, c, s))
        if interleaved:
            other = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
        else:
            other = torch.cat((-turned[..., R // 2 :], turned[..., : R // 2]), dim=-1)
        y = (turned * c + other * s).to(dtype)
        return in_order(torch.cat((y, rest.to(dtype)), dim=-1) if rest.shape[-1] else y, x)

    return rotate(q) if k is None else (rotate(q), rotate(k))


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _turn_rounding(x1, x2, c1, c2, s1, s2, dtype: tl.constexpr, INVERSE: tl.constexpr):
    """Rotate with every product rounded. Compiled without contraction: a fused multiply-add would not round."""
    # Products of two 16-bit floats are exact in fp32: each product rounds once, as in eager code.
    a1, a2 = (x1 * c1).to(dtype).to(tl.float32), (x2 * c2).to(dtype).to(tl.float32)
    # Transposed rotation, dx = cos · dy + rotateᵀ(sin · dy): each sine goes with the upstream gradient of its own
    # column, hence s2 with x2 here, where the rotation has s1.
    if INVERSE:
        y1, y2 = a1 + (x2 * s2).to(dtype).to(tl.float32), a2 - (x1 * s1).to(dtype).to(tl.float32)
    else:
        y1, y2 = a1 - (x2 * s1).to(dtype).to(tl.float32), a2 + (x1 * s2).to(dtype).to(tl.float32)
    return y1, y2


# One program rotates BLOCK_T tokens × BLOCK_H heads of either q or k; heads are the fast index, q's before k's, so that
# concurrent programs share angles in L1.
# q, k, yq, yk: strides (b, t, h), so (B, H, T, D), (B, T, H, D) and slices of packed projections need no copy; y is
# never x, which torch may have saved. cos, sin: strides (cp, cb, ct) for plane, batch and time.
# tokens = B · T. HALF = R / 2 rotated pairs, padded to BLOCK_R; BLOCK_REST > 0: copy the remaining D − R dimensions, in
# y's dtype.
# SECOND, THIRD: the first pair in the planes of height and width, −1 for plain angles. NATIVE: round every product.
# INVERSE: transposed rotation, for gradients. FAR: head offsets need int64; int32 takes half the registers.
@jit
@do_not_specialize("T", "tokens")
def _rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, yq_ptr, yk_ptr, tokens, T, heads_q, heads_k, D, stride_cp, stride_cb, stride_ct,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_yqb, stride_yqt, stride_yqh, stride_ykb, stride_ykt, stride_ykh,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, NATIVE: tl.constexpr,
    INVERSE: tl.constexpr, FAR: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
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
    # Load angles in two dimensions and expand: with a single head a three-dimensional load takes a third more
    # registers.
    angle, known = (b * stride_cb + t * stride_ct)[:, None], (token < tokens)[:, None]
    c1, c2 = load_pairs(cos_ptr + angle, known, stride_cp, HALF, BLOCK_R, INTERLEAVED, SECOND, THIRD)
    s1, s2 = load_pairs(sin_ptr + angle, known, stride_cp, HALF, BLOCK_R, INTERLEAVED, SECOND, THIRD)
    c1, c2, s1, s2 = c1[:, None, :], c2[:, None, :], s1[:, None, :], s2[:, None, :]

    x_ptr = q_ptr if is_q else k_ptr
    y_ptr = yq_ptr if is_q else yk_ptr
    x_token = b * tl.where(is_q, stride_qb, stride_kb) + t * tl.where(is_q, stride_qt, stride_kt)
    y_token = b * tl.where(is_q, stride_yqb, stride_ykb) + t * tl.where(is_q, stride_yqt, stride_ykt)
    x_at = x_ptr + (x_token[:, None] + far[None, :] * tl.where(is_q, stride_qh, stride_kh))[:, :, None]
    y_at = y_ptr + (y_token[:, None] + far[None, :] * tl.where(is_q, stride_yqh, stride_ykh))[:, :, None]
    here = (known & (h < heads)[None, :])[:, :, None]
    x1, x2 = load_pairs(x_at, here, 0, HALF, BLOCK_R, INTERLEAVED, -1, -1)
    if NATIVE:
        y1, y2 = _turn_rounding(x1, x2, c1, c2, s1, s2, y_ptr.dtype.element_ty, INVERSE)
    else:
        y1, y2 = turn(x1, x2, c1, c2, s1, s2, INVERSE)
    store_pairs(y_at, here, y1, y2, HALF, BLOCK_R, INTERLEAVED)
    if BLOCK_REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        mask = here & (rest < D)
        tl.store(y_at + rest, tl.load(x_at + rest, mask=mask, other=0.0).to(y_ptr.dtype.element_ty), mask=mask)


# --------------------------------------------------------------------------------------------------------- launches


def _tile(half: int, heads: int) -> tuple[int, int, int, int]:
    """Return tokens, heads and pairs per program, and warps.

    512 pairs per warp, two 16-byte loads per thread from either half.
    """
    block_r = next_power_of_2(max(1, half))
    # With a third of the lanes padded (heads with 96 dimensions): more tokens and fewer heads.
    block_h = min(4 if block_r == half else 2, next_power_of_2(heads))
    return max(1, 512 // (block_r * block_h)), block_h, block_r, 1


def like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate memory in x's order, which attention expects for the result."""
    y = torch.empty_like(x, dtype=dtype)
    return y if y.stride(-1) == 1 else x.new_empty(x.shape, dtype=dtype)  # the kernels write unit strides


_OPTIONS = "int unsqueeze_dim, bool interleaved, int second, int third, bool native, bool inverse, ScalarType dtype"


def _rope_fake(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    unsqueeze_dim, *_, inverse, dtype = options
    if not inverse:
        return like(q, dtype), q.new_empty(0) if k is None else like(k, dtype)
    # Token-major for any gradient layout: the projection's backward then needs no copy.
    if unsqueeze_dim == 2:
        return q.new_empty(q.shape, dtype=dtype), q.new_empty(0 if k is None else k.shape, dtype=dtype)
    B, H, T, D = q.shape
    yq = torch.empty_strided((B, H, T, D), (T * H * D, D, H * D, 1), dtype=dtype, device=q.device)
    if k is None:
        return yq, q.new_empty(0)
    K = k.shape[1]
    return yq, torch.empty_strided((B, K, T, D), (T * K * D, D, K * D, 1), dtype=dtype, device=q.device)


@launcher(_rope_fake, rest=_OPTIONS)
def _rope_launch(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    unsqueeze_dim, interleaved, second, third, native, inverse, _ = options
    yq, yk = _rope_fake(q, k, cos, sin, *options)
    if yq.numel() == 0 and yk.numel() == 0:
        return yq, yk
    key = (
        options, q.shape, q.stride(), q.dtype, cos.shape, cos.stride(), sin.stride(), cos.dtype, sin.dtype,
        None if k is None else (k.shape, k.stride()),
    )  # fmt: skip
    cos, sin = unit_strides_alike(cos, sin)
    q = unit_stride(q)
    k_or_q, yk_or_yq = (q, yq) if k is None else (unit_stride(k), yk)  # without k: 0 heads

    def plan() -> Plan:
        time_dim, R, D = 3 - unsqueeze_dim, cos.shape[-1], q.shape[3]
        tokens = q.shape[0] * q.shape[time_dim]
        heads = [q.shape[unsqueeze_dim], 0 if k is None else k.shape[unsqueeze_dim]]
        strides = [
            s for x in (q, k_or_q, yq, yk_or_yq) for s in (x.stride(0), x.stride(time_dim), x.stride(unsqueeze_dim))
        ]
        block_t, block_h, block_r, warps = _tile(R // 2, max(heads))
        arguments = (
            tokens, q.shape[time_dim], *heads, D, *angle_strides(cos), *strides, R // 2, interleaved, second, third,
            native, inverse, far_apart(unsqueeze_dim, q, k_or_q, yq, yk_or_yq),
            block_t, block_h, block_r, next_power_of_2(D - R) if D > R else 0,
        )  # fmt: skip
        # Tokens from all sequences form a single dimension, so that short sequences waste no tile; each token finds its
        # batch index by division.
        grid = cdiv(tokens, block_t) * sum(cdiv(h, block_h) for h in heads)
        # Fused multiply-adds are off only for "native", where they would skip a rounding.
        return grid, arguments, {"num_warps": warps, "enable_fp_fusion": not native}

    launch(_rope_kernel, key, (q, k_or_q, cos, sin, yq, yk_or_yq), plan)
    return yq, yk


def far_apart(unsqueeze_dim: int, *tensors: Tensor | None) -> bool:
    """Return whether a head may start 2³¹ elements after the first, like the 33rd head with 512k tokens stored head by
    head.

    Only then are head offsets computed in 64 bits, which takes registers.
    """
    return any(x is not None and x.shape[unsqueeze_dim] * x.stride(unsqueeze_dim) >= 2**31 for x in tensors)


def unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def unit_strides_alike(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin with equal strides, as the kernels expect."""
    strides = cos.stride()
    return (cos, sin) if strides[-1] == 1 and strides == sin.stride() else (cos.contiguous(), sin.contiguous())


def angle_strides(cos: Tensor) -> tuple[int, int, int]:
    """Return the strides of planes, batch and time; 0 for missing or broadcast dimensions."""
    # (T, R) counts as a single batch with stride 0. torch allows any stride for a dimension of size 1: pass 0, since
    # the kernel multiplies the stride by the batch index.
    *leading, batch, time = cos.stride()[:-1] if cos.dim() > 2 else (0, cos.stride(0))
    return leading[0] if leading else 0, 0 if cos.dim() > 2 and cos.shape[-3] == 1 else batch, time


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, _, cos, sin, *ctx.options, _, _ = inputs
    ctx.save_for_backward(cos, sin)
    ctx.dtype = q.dtype


def _backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    need_dq, need_dk = ctx.needs_input_grad[:2]
    gq = gk = None
    if need_dq and dq is not None:
        gq, gk = _rope_launch(dq, dk if need_dk else None, *ctx.saved_tensors, *ctx.options, True, ctx.dtype)
        gk = None if dk is None or not need_dk else gk
    elif need_dk and dk is not None:
        gk, _ = _rope_launch(dk, None, *ctx.saved_tensors, *ctx.options, True, ctx.dtype)
    return gq, gk


_rope = differentiable(_rope_launch, _setup_context, _backward, outputs=2)


EXAMPLES = {
    "rope": Example("Rotary embeddings", ((2, 4, 64, 64), (2, 2, 64, 64)), lambda q, k: rope(q, k, *make_angles(q))),
}
