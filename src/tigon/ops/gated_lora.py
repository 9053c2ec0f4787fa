"""A gated unit with low-rank adapters on gate and up: y = act(gate + tg Bgᵀ) · (up + tu Buᵀ), in one pass.

gate and up are the frozen layers' results only. With torch, an adapter's part is written, read in the frozen product's
epilogue, and written again, for tensors 3.5 times the hidden width in Llama. The gated unit reads both tensors anyway:
this kernel adds the adapter parts to the loaded tiles, in fp32, with tensor-core products with inner size r.

    forward     reads gate, up; writes y
    backward    reads dy, gate, up; writes dgate and dup
    dy          only from the frozen layer behind: the part from its adapter, u A, is added to the tile as well

The adapters' own gradients are products of dgate, dup and y with r other columns. Up to rank 16 the backward pass makes
these products from its tiles, and `gated_lora_gradients` returns them; y is written only if dropout masks lie between y
and the adapter behind. Beyond rank 16 `gated_lora_backward` writes y over dy and leaves all products to the caller.

Source: Hu et al. 2021, LoRA, https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import cdiv, dense_like, jit, launch, launcher, multiprocessors, next_power_of_2, register_limit, tl
from tigon.ops.acts import ACTS
from tigon.ops.gated import gated_reference

# Largest rank served. Beyond, reading the adapters' tiles again costs more than writing their parts once: at rank 64
# and 8192 x 14336 on an H100 the backward pass took 0.90 ms, a separate pass with torch's sums 0.61 ms.
WIDEST = 32
# Largest rank for which the backward pass also makes the products. On an H100, 8192 x 14336: 0.68 ms instead of 1.02 at
# rank 16, and 1.16 instead of 1.10 at rank 32, where the sums take the registers that a second program would need.
SUMMED = 16
# Registers per thread in that pass: with 228 no third program fits on a multiprocessor, and 0.68 ms become 0.87.
REGISTERS = 168


class Added(NamedTuple):
    """An adapter's part of a tensor (M, N): scale · t bᵀ.

    t: (M, r), with unit stride along r, in the tensor's dtype.
    b: (N, r), or (r, N) for an adapter's A; any float dtype, narrowed to t's after scaling.
    """

    t: Tensor
    b: Tensor
    scale: float = 1.0


Adapters = tuple[Added, Added, "Added | None"]  # gate's, up's, and the layer behind's, for the gradient


def gated_lora_reference(gate: Tensor, up: Tensor, added: tuple[Added, Added], act: str) -> Tensor:
    """act(gate + tg Bgᵀ) · (up + tu Buᵀ) for (M, N) tensors; the inner sums are not rounded."""
    acc = torch.promote_types(gate.dtype, torch.float32)
    # The adapter's part is added in fp32 before the activation. Eager code rounds the sum to bf16 first.
    g, u = (w.to(acc) + (a.t.to(acc) @ a.b.to(acc).t()) * a.scale for w, a in zip((gate, up), added, strict=True))
    return gated_reference(g, u, act).to(gate.dtype)


# ---------------------------------------------------------------------------------------------------------- kernels


# y = act(gate + tg Bgᵀ) · (up + tu Buᵀ). A program owns BLOCK_N columns and loops over ROWS rows, so that B, larger
# than a gate tile, is read once. Columns are the fast grid index: concurrent programs share rows, and t comes from the
# cache.
#   g, u, y: gate and up (M, N) with separate row strides, as slices of a fused projection have; y dense.
#   tg, tu, bg, bu: (M, RG), (M, RU) with row strides; (N, RG), (N, RU). Ranks are padded to R, at least 16.
#   scale_g, scale_u: multiplied into B once, in fp32; the result is rounded to the tiles' dtype for the tensor cores.
@jit
def _gated_lora_fwd_kernel(
    g_ptr, u_ptr, y_ptr, tg_ptr, tu_ptr, bg_ptr, bu_ptr, M, N, ROWS, stride_gm, stride_um, stride_tgm, stride_tum,
    scale_g, scale_u, RG: tl.constexpr, RU: tl.constexpr, ACT: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(N, BLOCK_N)
    block, part = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    cols, r = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, R)
    inside, within = (cols < N)[None, :], (cols < N)[:, None]
    kind = g_ptr.dtype.element_ty
    bg = tl.load(bg_ptr + cols[:, None] * RG + r[None, :], mask=within & (r < RG)[None, :], other=0.0)
    bu = tl.load(bu_ptr + cols[:, None] * RU + r[None, :], mask=within & (r < RU)[None, :], other=0.0)
    bg, bu = (bg.to(tl.float32) * scale_g).to(kind).T, (bu.to(tl.float32) * scale_u).to(kind).T
    for first in tl.range(part * ROWS, min(part * ROWS + ROWS, M), BLOCK_M, num_stages=STAGES):
        rows = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_M)
        here = (rows < M)[:, None]
        mask = here & inside
        tg = tl.load(tg_ptr + rows[:, None] * stride_tgm + r[None, :], mask=here & (r < RG)[None, :], other=0.0)
        tu = tl.load(tu_ptr + rows[:, None] * stride_tum + r[None, :], mask=here & (r < RU)[None, :], other=0.0)
        g = tl.load(g_ptr + rows[:, None] * stride_gm + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        u = tl.load(u_ptr + rows[:, None] * stride_um + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        a, _ = ACT(tl.dot(tg, bg, g))
        tl.store(y_ptr + rows[:, None] * N + cols[None, :], (a * tl.dot(tu, bu, u)).to(kind), mask=mask)


# dgate, dup and y recomputed, with the adapters' products. A program owns BLOCK_N columns and loops over ROWS rows:
# sums over rows stay in registers, sums over columns are written once per column block. Columns are the fast grid
# index: concurrent programs share rows, and t comes from the cache.
#   dy, g, u, dg, du, y: (M, N), contiguous, so that a single set of addresses serves all; y optional. y may be dy,
#     dg may be g, du may be u. dy comes only from the frozen layer behind; td · ad, the adapter's part, is added in
# fp32.
#   tg, tu, td, bg, bu, ad: (M, r) with row strides; (N, RG), (N, RU); (RD, N). td and ad are optional.
#   thin (blocks, M, THIN), fp32, optional: per row dgate Bg, dup Bu and, WITH_T, y Aᵀ, side by side, per column block.
#   wide (parts, 3, R, N), fp32, optional: dBgᵀ, dBuᵀ (WITH_B) and dA (WITH_A) per row part.
# `_thin_sums_kernel` and `_wide_sums_kernel` add the partial sums in a fixed order: atomics would not be deterministic.
@jit
def _gated_lora_bwd_kernel(
    dy_ptr, g_ptr, u_ptr, dg_ptr, du_ptr, y_ptr, thin_ptr, wide_ptr, tg_ptr, tu_ptr, td_ptr, bg_ptr, bu_ptr, ad_ptr,
    M, N, ROWS, stride_tgm, stride_tum, stride_tdm, scale_g, scale_u, scale_d, RG: tl.constexpr, RU: tl.constexpr,
    RD: tl.constexpr, ACT: tl.constexpr, R: tl.constexpr, WITH_B: tl.constexpr, WITH_A: tl.constexpr,
    WITH_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(N, BLOCK_N)
    block, part = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    cols, r = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, R)
    inside, within = (cols < N)[None, :], (cols < N)[:, None]
    kind = g_ptr.dtype.element_ty
    bg = tl.load(bg_ptr + cols[:, None] * RG + r[None, :], mask=within & (r < RG)[None, :], other=0.0)
    bu = tl.load(bu_ptr + cols[:, None] * RU + r[None, :], mask=within & (r < RU)[None, :], other=0.0)
    bg, bu = (bg.to(tl.float32) * scale_g).to(kind), (bu.to(tl.float32) * scale_u).to(kind)
    if td_ptr is not None:
        first_ad = ad_ptr + r[:, None] * tl.cast(N, tl.int64) + cols[None, :]
        ad = (tl.load(first_ad, mask=(r < RD)[:, None] & inside, other=0.0).to(tl.float32) * scale_d).to(kind)
    dbg = tl.zeros((R, BLOCK_N), tl.float32)
    dbu = tl.zeros((R, BLOCK_N), tl.float32)
    dad = tl.zeros((R, BLOCK_N), tl.float32)
    THIN: tl.constexpr = 3 * R if WITH_T else 2 * R
    for first in tl.range(part * ROWS, min(part * ROWS + ROWS, M), BLOCK_M, num_stages=STAGES):
        rows = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_M)
        here = (rows < M)[:, None]
        mask, at = here & inside, rows[:, None] * N + cols[None, :]
        tg = tl.load(tg_ptr + rows[:, None] * stride_tgm + r[None, :], mask=here & (r < RG)[None, :], other=0.0)
        tu = tl.load(tu_ptr + rows[:, None] * stride_tum + r[None, :], mask=here & (r < RU)[None, :], other=0.0)
        if td_ptr is not None:
            td = tl.load(td_ptr + rows[:, None] * stride_tdm + r[None, :], mask=here & (r < RD)[None, :], other=0.0)
        # All three tiles are read before the first store, because results may alias them.
        g = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(u_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        g = tl.dot(tg, bg.T, g)
        u = tl.dot(tu, bu.T, u)
        if td_ptr is not None:
            dy = tl.dot(td, ad, dy)
        a, da = ACT(g)
        # A single result at a time, to limit registers. y is rounded as in the forward pass: the products with y use
        # the same numbers as the layer behind.
        y = (a * u).to(kind)
        if y_ptr is not None:
            tl.store(y_ptr + at, y, mask=mask)
        if WITH_T:
            own = thin_ptr + (block * tl.cast(M, tl.int64) + rows)[:, None] * THIN + 2 * R + r[None, :]
            tl.store(own, tl.dot(y, ad.T), mask=here)
        # r rows, not r columns: products with 64 or more rows would use larger tensor-core instructions, whose operands
        # take shared memory.
        if WITH_A:
            dad = tl.dot(td.T, y, dad)
        du = (dy * a).to(kind)
        tl.store(du_ptr + at, du, mask=mask)
        if thin_ptr is not None:
            own = thin_ptr + (block * tl.cast(M, tl.int64) + rows)[:, None] * THIN + R + r[None, :]
            tl.store(own, tl.dot(du, bu), mask=here)
        if WITH_B:
            dbu = tl.dot(tu.T, du, dbu)
        dg = (dy * u * da).to(kind)
        tl.store(dg_ptr + at, dg, mask=mask)
        if thin_ptr is not None:
            own = thin_ptr + (block * tl.cast(M, tl.int64) + rows)[:, None] * THIN + r[None, :]
            tl.store(own, tl.dot(dg, bg), mask=here)
        if WITH_B:
            dbg = tl.dot(tg.T, dg, dbg)
    if wide_ptr is not None:
        total = wide_ptr + (part * 3 * R + r)[:, None] * tl.cast(N, tl.int64) + cols[None, :]
        if WITH_B:
            tl.store(total, dbg * scale_g, mask=inside)
            tl.store(total + R * tl.cast(N, tl.int64), dbu * scale_u, mask=inside)
        if WITH_A:
            tl.store(total + 2 * R * tl.cast(N, tl.int64), dad * scale_d, mask=inside)


# u (M, RG + RU) and t (M, RD) from `thin`, summed over column blocks in a fixed order. A program owns BLOCK_M rows and
# a single kind (0: gate's u, 1: up's u, 2: t). KINDS is the fast grid index: a row's sums are adjacent, so neighbours
# share cache lines. Padded ranks are dropped: u is dense, gate's columns before up's.
@jit
def _thin_sums_kernel(
    thin_ptr, u_ptr, t_ptr, M, BLOCKS, RG: tl.constexpr, RU: tl.constexpr, RD: tl.constexpr, R: tl.constexpr,
    KINDS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) // KINDS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    r, which = tl.arange(0, R), tl.program_id(0) % KINDS
    here = (rows < M)[:, None]
    THIN: tl.constexpr = R * KINDS
    # Sixteen blocks at a time: sequential loads would be bound by memory latency, not bandwidth.
    total = tl.zeros((BLOCK_M, R), tl.float32)
    for first in range(0, BLOCKS, 16):
        block = first + tl.arange(0, 16)
        row = block[:, None] * tl.cast(M, tl.int64) + rows[None, :]
        at = thin_ptr + row[:, :, None] * THIN + which * R + r[None, None, :]
        mask = (block < BLOCKS)[:, None, None] & (rows < M)[None, :, None]
        total += tl.sum(tl.load(at, mask=mask, other=0.0), 0)
    if which == 2:
        if t_ptr is not None:
            at = t_ptr + rows[:, None] * RD + r[None, :]
            tl.store(at, total.to(t_ptr.dtype.element_ty), mask=here & (r < RD)[None, :])
    else:
        own = tl.where(which == 0, RG, RU)
        at = u_ptr + rows[:, None] * (RG + RU) + which * RG + r[None, :]
        tl.store(at, total.to(u_ptr.dtype.element_ty), mask=here & (r < own)[None, :])


# dBg (N, RG), dBu (N, RU) and dAd (RD, N) from `wide`, summed over row parts in a fixed order. A program owns BLOCK_N
# columns and a single kind (0: dBg, 1: dBu, 2: dAd); dB is stored transposed. A program for an unneeded kind does not
# store the sums.
@jit
def _wide_sums_kernel(
    wide_ptr, dbg_ptr, dbu_ptr, dad_ptr, N, PARTS, RG: tl.constexpr, RU: tl.constexpr, RD: tl.constexpr,
    R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    cols = (tl.program_id(0) // 3).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    r, which = tl.arange(0, R), tl.program_id(0) % 3
    inside = (cols < N)[None, :]
    total = tl.zeros((R, BLOCK_N), tl.float32)
    for part in range(PARTS):
        at = wide_ptr + ((part * 3 + which) * R + r)[:, None] * tl.cast(N, tl.int64) + cols[None, :]
        total += tl.load(at, mask=inside, other=0.0)
    if which == 0:
        if dbg_ptr is not None:
            tl.store(dbg_ptr + cols[None, :] * RG + r[:, None], total, mask=inside & (r < RG)[:, None])
    elif which == 1:
        if dbu_ptr is not None:
            tl.store(dbu_ptr + cols[None, :] * RU + r[:, None], total, mask=inside & (r < RU)[:, None])
    else:
        if dad_ptr is not None:
            at = dad_ptr + r[:, None] * tl.cast(N, tl.int64) + cols[None, :]
            tl.store(at, total, mask=inside & (r < RD)[:, None])


# --------------------------------------------------------------------------------------------------------- launches


def _tile(R: int) -> tuple[int, int, int]:
    """Rows, columns and warps per program: the fastest among fifteen on an H100, at two shapes.

    Few rows, so that registers leave room for many programs to hide memory latency. With 64 rows the products would use
    the larger tensor-core instructions, whose operands take shared memory, and 64 x 32 at rank 64 read out of bounds as
    compiled by Triton 3.6.
    """
    return (16, 128, 4) if R <= 16 else (32, 64, 4)


def gated_lora_forward(gate: Tensor, up: Tensor, added: tuple[Added, Added], act: str) -> Tensor:
    """act(gate + tg Bgᵀ) · (up + tu Buᵀ) for gate and up (M, N), with unit stride along N."""
    (tg, bg, scale_g), (tu, bu, scale_u) = added
    return _gated_lora_fwd(gate, up, tg, tu, bg.contiguous(), bu.contiguous(), scale_g, scale_u, act)


def gated_lora_backward(
    dy: Tensor, gate: Tensor, up: Tensor, added: Adapters, act: str,
    into: tuple[Tensor, Tensor], y: Tensor | None,
) -> None:  # fmt: skip
    """Write dgate and dup into the given tensors, which may be gate and up, and the unit's result into y, if given.

    dy: (M, N), the gradient of the unit's result without the part from its adapter, the third in `added`, whose b is
        (r, N); the whole gradient if that is None. y may be dy. All (M, N) tensors are contiguous.
    """
    block_m, block_n, warps = _tile(_pad_rank(added))
    _backward(dy, gate, up, added, act, into, y, None, (block_m, block_n, block_m, 1), {"num_warps": warps})


class Gradients(NamedTuple):
    """The adapters' products with dgate, dup and the unit's result y.

    u: (M, rg + ru), the gradients of tg and tu side by side, in the tensors' dtype.
    db_gate, db_up: (N, rg), (N, ru). da: (rd, N), for the layer behind. All in fp32; None if not requested.
    t: (M, rd), y (scale · A)ᵀ for the layer behind, in the tensors' dtype; None if not requested.
    """

    u: Tensor
    db_gate: Tensor | None
    db_up: Tensor | None
    da: Tensor | None
    t: Tensor | None


def gated_lora_gradients(
    dy: Tensor, gate: Tensor, up: Tensor, added: Adapters, act: str, into: tuple[Tensor, Tensor],
    y: Tensor | None, *, b: bool, a: bool, t: bool,
) -> Gradients:  # fmt: skip
    """Like `gated_lora_backward`, plus all products for the adapters' gradients; for ranks up to SUMMED.

    y: see there. Needed if the layer behind drops elements of y: `added` then has None for that layer.
    b, a, t: the requested gradients. a and t belong to the layer behind, the third in `added`.
    Deterministic: a second launch adds the sums over columns and over rows in a fixed order.
    """
    M, N = gate.shape
    ranks = rg, ru, rd = _ranks(added)
    u, seen = gate.new_empty(M, rg + ru), gate.new_empty(M, rd) if t else None
    db_gate, db_up, da = (
        gate.new_empty(*shape, dtype=torch.float32) if want else None
        for shape, want in (((N, rg), b), ((N, ru), b), ((rd, N), a))
    )
    found = Gradients(u, db_gate, db_up, da, seen)
    if not gate.numel():
        for empty in found:
            if empty is not None:
                empty.zero_()
        return found
    R, block_m, block_n = _pad_rank(added), 16, 128
    blocks, steps = cdiv(N, block_n), cdiv(M, block_m)
    # Six programs per multiprocessor: three run at a time, and the second half evens out their run times.
    rows = cdiv(steps, max(1, min(steps, 6 * multiprocessors(gate.device) // blocks))) * block_m
    parts, kinds = cdiv(M, rows), 3 if t else 2
    thin = gate.new_empty(blocks, M, kinds, R, dtype=torch.float32)
    wide = gate.new_empty(parts, 3, R, N, dtype=torch.float32)
    # The register limit lets three programs share a multiprocessor, to hide memory latency.
    options = {"num_warps": 4, **register_limit(gate.device, REGISTERS)}
    _backward(dy, gate, up, added, act, into, y, (thin, wide, b, a, t), (block_m, block_n, rows, 2), options)
    launch(
        _thin_sums_kernel, (M, N, ranks, t, u.dtype), (thin, u, seen),
        lambda: (cdiv(M, 16) * kinds, (M, blocks, *ranks, R, kinds, 16), {"num_warps": 4}),
    )  # fmt: skip
    if a or b:
        launch(
            _wide_sums_kernel, (M, N, ranks, a, b), (wide, db_gate, db_up, da),
            lambda: (cdiv(N, 64) * 3, (N, parts, *ranks, R, 64), {"num_warps": 4}),
        )  # fmt: skip
    return found


def sums_along(gate: Tensor, ranks: Sequence[int]) -> bool:
    """Whether `gated_lora_gradients` is faster. AMD's compiler keeps part of the sums in memory."""
    return max(ranks) <= SUMMED and bool(register_limit(gate.device, REGISTERS))


def _ranks(added: Adapters) -> tuple[int, int, int]:
    gate, up, behind = added
    return gate.b.shape[1], up.b.shape[1], 1 if behind is None else behind.b.shape[0]


def _pad_rank(added: Adapters) -> int:
    """The tiles' rank: tensor cores multiply with inner size 16."""
    return max(16, next_power_of_2(max(_ranks(added))))


def _backward(
    dy: Tensor, gate: Tensor, up: Tensor, added: Adapters, act: str, into: tuple[Tensor, Tensor],
    y: Tensor | None, sums: tuple[Tensor, Tensor, bool, bool, bool] | None, tile: tuple[int, int, int, int],
    options: dict[str, int],
) -> None:  # fmt: skip
    """Launch the kernel shared by both backward functions. tile: rows and columns, rows per program, stages."""
    M, N = gate.shape
    if not gate.numel():
        return
    (tg, bg, scale_g), (tu, bu, scale_u), behind = added
    td, ad, scale_d = (None, None, 1.0) if behind is None else (behind.t, behind.b.contiguous(), behind.scale)
    bg, bu = bg.contiguous(), bu.contiguous()
    thin, wide, b, a, t = sums if sums is not None else (None, None, False, False, False)
    block_m, block_n, rows, stages = tile
    tensors = dy, gate, up, *into, y, thin, wide, tg, tu, td, bg, bu, ad
    strides = tg.stride(0), tu.stride(0), None if td is None else td.stride(0)
    scales, ranks = (scale_g, scale_u, scale_d), _ranks(added)

    def plan() -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        arguments = (
            M, N, rows, *strides, *scales, *ranks, ACTS[act].tile, _pad_rank(added), b, a, t, block_m, block_n, stages
        )  # fmt: skip
        return cdiv(N, block_n) * cdiv(M, rows), arguments, options

    kinds = gate.dtype, bg.dtype, bu.dtype, None if ad is None else ad.dtype
    key = (M, N, rows, strides, scales, ranks, act, b, a, t, y is None, thin is None, kinds)
    launch(_gated_lora_bwd_kernel, key, tensors, plan)


@launcher(dense_like)
def _gated_lora_fwd(
    gate: Tensor, up: Tensor, tg: Tensor, tu: Tensor, bg: Tensor, bu: Tensor, scale_g: float, scale_u: float, act: str
) -> Tensor:
    M, N = gate.shape
    y = dense_like(gate)
    if not y.numel():
        return y
    tensors = gate, up, y, tg, tu, bg, bu
    strides = gate.stride(0), up.stride(0), tg.stride(0), tu.stride(0)
    ranks = bg.shape[1], bu.shape[1]
    R = max(16, next_power_of_2(max(ranks)))
    block_m, block_n = 32, 128
    blocks, steps = cdiv(N, block_n), cdiv(M, block_m)
    # Many programs per multiprocessor, but several tiles per program: on an H100 the fastest among 36 choices, or
    # within 2 %, at five shapes; 1.04 times the time for the bytes. In whole tiles: more column blocks mean more rows
    # per program.
    rows = cdiv(steps, max(1, min(steps, 32 * multiprocessors(gate.device) // blocks))) * block_m

    def plan() -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        arguments = (M, N, rows, *strides, scale_g, scale_u, *ranks, ACTS[act].tile, R, block_m, block_n, 3)
        return blocks * cdiv(M, rows), arguments, {"num_warps": 4}

    kinds = gate.dtype, bg.dtype, bu.dtype
    launch(_gated_lora_fwd_kernel, (M, N, rows, strides, scale_g, scale_u, ranks, act, kinds), tensors, plan)
    return y
