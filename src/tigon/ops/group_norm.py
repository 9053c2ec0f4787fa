"""Group normalisation: y = (x − mean) / sqrt(var + eps) · weight + bias, over each sample's groups of channels.

Source: Wu & He 2018, https://arxiv.org/abs/1803.08494

A slab is a group's C / num_groups channels in a single sample, contiguous in memory. A program reads a slab tile by
tile for the sums, and again, from cache if possible, for the result. If there are too few slabs for the device,
several programs share a slab, and a launch for their partial sums precedes the launch for the result.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import (
    cdiv,
    check_tensors,
    differentiable,
    do_not_specialize,
    jit,
    launch,
    launcher,
    multiprocessors,
    next_power_of_2,
    shared_memory,
    tl,
    use_triton,
)
from tigon.ops.example import Example
from tigon.ops.sum_rows import sum_rows


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalise each group of channels to zero mean and unit variance, then scale by weight and shift by bias.

    Args:
        x: (B, C, ...), any float dtype. Computed in fp32 (fp64 for fp64). Batch and channels may have any strides; if
            the later dimensions are not dense, as in channels_last, x is copied first.
        num_groups: divides C; neighbouring channels form a group.
        weight, bias: (C,), or None for no scale or no shift, independently. Their dtype may differ from x's.
        eps: added to the variance, in squared units of x.
    Returns: x's shape and dtype, contiguous; rounded once, at the end.
    Raises: ValueError for an x without channels, a num_groups that does not divide them, a weight or bias that is not
        (C,), or a dtype that is not a float.

    Replaces::

        y = F.group_norm(x, num_groups, weight, bias, eps)
    """
    if not x.dtype.is_floating_point:
        raise ValueError(f"group_norm: x must have a float dtype, got {x.dtype}.")
    if x.dim() < 2:
        raise ValueError(f"group_norm: x must have at least two dimensions, (B, C, ...), got shape {tuple(x.shape)}.")
    channels = x.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"group_norm: num_groups must divide the {channels} channels of x, got {num_groups}.")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and getattr(t, "shape", None) != x.shape[1:2]:
            check_tensors("group_norm", **{name: t})
            raise ValueError(
                f"group_norm: {name} must have shape {(channels,)}, the channels of x {tuple(x.shape)}, "
                f"got {tuple(t.shape)}."
            )
    if not use_triton(x, weight, bias):
        return group_norm_reference(x, num_groups, weight, bias, eps=eps)
    return _group_norm(x, weight, bias, num_groups, eps)


def group_norm_reference(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    B, C, *space = x.shape
    y = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(B, num_groups, C // num_groups * math.prod(space))
    # Two passes: E(x²) − E(x)² would cancel.
    y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = y.reshape(B, C, math.prod(space))
    if weight is not None:
        y = y * weight[:, None]
    if bias is not None:
        y = y + bias[:, None]
    return y.to(x.dtype).reshape(x.shape).contiguous()


# ---------------------------------------------------------------------------------------------------------- kernels
#
# Each of the G groups has D channels with S spatial positions: a slab (D, S), contiguous in y and dx. Tiles are
# (BLOCK_C, BLOCK_S); a program has per_c × per_s tiles, fewer at the edges, and a slab parts_c × parts_s programs.
#   x, dy       strides between samples (xb, dyb) and between channels (xc, dyc); unit stride within a channel
#   w, b        weight and bias, (C,) or None
#   stats       (slabs, 2) fp32, mean and rstd
# The second reading walks tiles backwards: the tiles read last are still cached. Channel offsets are int64, spatial
# offsets int32.


@jit
def _part(D, S, parts_c, parts_s, per_c, per_s, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """This program's slab, part, first channel block, first spatial block, spatial block count and tile count."""
    slab = tl.program_id(0) // (parts_c * parts_s)
    part = tl.program_id(0) % (parts_c * parts_s)
    first_c = part // parts_s * per_c
    first_s = part % parts_s * per_s
    blocks_s = tl.minimum(per_s, tl.cdiv(S, BLOCK_S) - first_s)
    return slab, part, first_c, first_s, blocks_s, blocks_s * tl.minimum(per_c, tl.cdiv(D, BLOCK_C) - first_c)


@jit
def _tile(tile, first_c, first_s, blocks_s, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return a tile's channels within the group, and spatial positions."""
    c = (first_c + tile // blocks_s) * BLOCK_C + tl.arange(0, BLOCK_C)
    s = (first_s + tile % blocks_s) * BLOCK_S + tl.arange(0, BLOCK_S)
    return c, s


@jit
def _sums_about(
    x_ptr, D, S, stride_xc, first_c, first_s, blocks_s, tiles,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return (about, Σ (x − about), Σ (x − about)²) over a program's tiles, with `about` the first tile's mean: within
    sqrt(tiles) standard deviations of the overall mean, so that a difference of squares loses no digits."""
    c, s = _tile(0, first_c, first_s, blocks_s, BLOCK_C, BLOCK_S)
    mask = (c < D)[:, None] & (s < S)[None, :]
    x = tl.load(x_ptr + c.to(tl.int64)[:, None] * stride_xc + s[None, :], mask=mask, other=0.0).to(tl.float32)
    filled = tl.minimum(BLOCK_C, D - first_c * BLOCK_C) * tl.minimum(BLOCK_S, S - first_s * BLOCK_S)
    about = tl.sum(tl.sum(x, 1), 0) / filled
    total = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    squares = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        c, s = _tile(tile, first_c, first_s, blocks_s, BLOCK_C, BLOCK_S)
        mask = (c < D)[:, None] & (s < S)[None, :]
        x = tl.load(x_ptr + c.to(tl.int64)[:, None] * stride_xc + s[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.where(mask, x - about, 0.0)
        total += x
        squares += x * x
    return about, tl.sum(tl.sum(total, 1), 0), tl.sum(tl.sum(squares, 1), 0)


# A program: a part of a slab. Writes (mean, Σ (x − mean)², count) to part (programs, 3), for slabs that several
# programs share. The cut is that of the forward launch, whose programs find their slab's parts side by side.
@jit
@do_not_specialize("parts_c", "parts_s", "per_c", "per_s")
def _group_norm_stats_kernel(
    x_ptr, part_ptr, G, D, S, stride_xb, stride_xc, parts_c, parts_s, per_c, per_s,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write each part's (mean, Σ (x − mean)², count)."""
    slab, _, first_c, first_s, blocks_s, tiles = _part(D, S, parts_c, parts_s, per_c, per_s, BLOCK_C, BLOCK_S)
    x_ptr += (slab // G).to(tl.int64) * stride_xb + (slab % G * D).to(tl.int64) * stride_xc
    about, total, squares = _sums_about(
        x_ptr, D, S, stride_xc, first_c, first_s, blocks_s, tiles, BLOCK_C, BLOCK_S, STAGES
    )
    channels = tl.minimum(per_c * BLOCK_C, D - first_c * BLOCK_C)
    count = channels * 1.0 * tl.minimum(per_s * BLOCK_S, S - first_s * BLOCK_S)
    part_ptr += tl.program_id(0) * 3
    tl.store(part_ptr, about + total / count)
    # An infinite sum of squares stays infinite, and rstd is then 0: inf − inf would be NaN, read as no variance.
    tl.store(part_ptr + 1, tl.maximum(squares - tl.minimum(total * total, 3.4e38) / count, 0.0))
    tl.store(part_ptr + 2, count)


# A program: a slab (part is None), or part of a slab with the statistics kernel's (slabs, parts, 3). All programs of a
# slab combine the parts again, from a few numbers in L2, in place of a launch in between.
@jit
@do_not_specialize("parts_c", "parts_s", "per_c", "per_s")
def _group_norm_fwd_kernel(
    x_ptr, w_ptr, b_ptr, part_ptr, y_ptr, stats_ptr, G, D, S, stride_xb, stride_xc, parts_c, parts_s, per_c, per_s, eps,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    slab, part, first_c, first_s, blocks_s, tiles = _part(D, S, parts_c, parts_s, per_c, per_s, BLOCK_C, BLOCK_S)
    group = slab % G * D
    x_ptr += (slab // G).to(tl.int64) * stride_xb + group.to(tl.int64) * stride_xc
    y_ptr += slab.to(tl.int64) * D * S
    count = D * 1.0 * S
    if part_ptr is None:
        about, total, squares = _sums_about(
            x_ptr, D, S, stride_xc, first_c, first_s, blocks_s, tiles, BLOCK_C, BLOCK_S, STAGES
        )
        shift = total / count
        mean = about + shift
        # fma: shift² is not rounded separately, and cannot overflow into inf − inf.
        variance = tl.maximum(tl.fma(shift * -1.0, shift, squares / count), 0.0)
    else:
        p = tl.arange(0, BLOCK_P)
        there = p < parts_c * parts_s
        part_ptr += slab * parts_c * parts_s * 3
        about = tl.load(part_ptr)
        means = tl.load(part_ptr + p * 3, mask=there, other=0.0)
        within = tl.load(part_ptr + p * 3 + 1, mask=there, other=0.0)
        counts = tl.load(part_ptr + p * 3 + 2, mask=there, other=0.0)
        mean = about + tl.sum((means - about) * counts, 0) / count
        # Chan et al. 1979: within the parts, and between their means.
        variance = tl.sum(within + counts * (means - mean) * (means - mean), 0) / count
    rstd = tl.rsqrt(variance + eps)
    if part == 0:
        tl.store(stats_ptr + 2 * slab, mean)
        tl.store(stats_ptr + 2 * slab + 1, rstd)
    for i in tl.range(0, tiles, num_stages=STAGES):
        c, s = _tile(tiles - 1 - i, first_c, first_s, blocks_s, BLOCK_C, BLOCK_S)
        mask = (c < D)[:, None] & (s < S)[None, :]
        x = tl.load(x_ptr + c.to(tl.int64)[:, None] * stride_xc + s[None, :], mask=mask, other=0.0).to(tl.float32)
        y = (x - mean) * rstd
        if w_ptr is not None:
            y = y * tl.load(w_ptr + group + c, mask=c < D, other=0.0).to(tl.float32)[:, None]
        if b_ptr is not None:
            y = y + tl.load(b_ptr + group + c, mask=c < D, other=0.0).to(tl.float32)[:, None]
        at = c.to(tl.int64)[:, None] * S + s[None, :]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


# A program: a slab or part of a slab. With SUM, sum dy and dy · xhat: per channel for dbias and dW, and weighted per
# slab for dx. Then write dx unless None. For slabs in parts, sums and dx are two launches connected by `sums`.
#   sums        (slabs, parts, 2): Σ w·dy·xhat and Σ w·dy of each part; None for whole slabs
#   partial     (samples × parts_s, NEED_DW + NEED_DB, C) partial sums of dW and dbias, added by sum_rows in a fixed
#               order without atomics; a program writes the columns of its channels
# dx = (w·dy − mean(w·dy) − xhat · mean(w·dy·xhat)) · rstd. xhat is recomputed from x, mean and rstd.
@jit
@do_not_specialize("parts_c", "parts_s", "per_c", "per_s")
def _group_norm_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, sums_ptr, dx_ptr, partial_ptr,
    G, D, S, stride_dyb, stride_dyc, stride_xb, stride_xc, parts_c, parts_s, per_c, per_s,
    SUM: tl.constexpr, NEED_DW: tl.constexpr, NEED_DB: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum dy and dy · xhat (SUM), then write dx unless None."""
    slab, part, first_c, first_s, blocks_s, tiles = _part(D, S, parts_c, parts_s, per_c, per_s, BLOCK_C, BLOCK_S)
    sample = slab // G
    group = slab % G * D
    dy_ptr += sample.to(tl.int64) * stride_dyb + group.to(tl.int64) * stride_dyc
    x_ptr += sample.to(tl.int64) * stride_xb + group.to(tl.int64) * stride_xc
    mean = tl.load(stats_ptr + 2 * slab)
    rstd = tl.load(stats_ptr + 2 * slab + 1)
    if SUM:
        if NEED_DW or NEED_DB:
            row = (sample * parts_s + part % parts_s).to(tl.int64)
            partial_ptr += row * (NEED_DW + NEED_DB) * G * D + group
        along = tl.zeros((BLOCK_C,), tl.float32)
        shift = tl.zeros((BLOCK_C,), tl.float32)
        dw = tl.zeros((BLOCK_C,), tl.float32)
        db = tl.zeros((BLOCK_C,), tl.float32)
        for tile in tl.range(0, tiles, num_stages=STAGES):
            c, s = _tile(tile, first_c, first_s, blocks_s, BLOCK_C, BLOCK_S)
            mask = (c < D)[:, None] & (s < S)[None, :]
            dy = tl.load(dy_ptr + c.to(tl.int64)[:, None] * stride_dyc + s[None, :], mask=mask, other=0.0)
            x = tl.load(x_ptr + c.to(tl.int64)[:, None] * stride_xc + s[None, :], mask=mask, other=0.0)
            dy = dy.to(tl.float32)
            products = tl.sum(dy * ((x.to(tl.float32) - mean) * rstd), 1)
            total = tl.sum(dy, 1)
            if NEED_DW or NEED_DB:
                # Tiles finish a channel block before the next: the sums start at the first spatial block and are stored
                # at the last. A select and not a product with 0: an infinite dy of one block would reach the next as
                # NaN.
                begins = tile % blocks_s == 0
                ends = (c < D) & (tile % blocks_s == blocks_s - 1)
                dw = tl.where(begins, 0.0, dw) + products
                db = tl.where(begins, 0.0, db) + total
                if NEED_DW:
                    tl.store(partial_ptr + c, dw, mask=ends)
                if NEED_DB:
                    tl.store(partial_ptr + NEED_DW * G * D + c, db, mask=ends)
            if w_ptr is not None:
                # dW needs dy without the weight, so the weight multiplies the channels' sums: once per tile, not per
                # element.
                w = tl.load(w_ptr + group + c, mask=c < D, other=0.0).to(tl.float32)
                products = products * w
                total = total * w
            along += products
            shift += total
        along = tl.sum(along, 0)
        shift = tl.sum(shift, 0)
        if sums_ptr is not None:
            tl.store(sums_ptr + tl.program_id(0) * 2, along)
            tl.store(sums_ptr + tl.program_id(0) * 2 + 1, shift)
    else:
        # Every program adds the parts of its slab in the same order and gets the same bits. BLOCK_P: the part count,
        # rounded up to a power of two, at most about two per SM.
        p = tl.arange(0, BLOCK_P)
        there = p < parts_c * parts_s
        sums_ptr += slab * parts_c * parts_s * 2
        along = tl.sum(tl.load(sums_ptr + p * 2, mask=there, other=0.0), 0)
        shift = tl.sum(tl.load(sums_ptr + p * 2 + 1, mask=there, other=0.0), 0)
    if dx_ptr is not None:
        dx_ptr += slab.to(tl.int64) * D * S
        count = D * 1.0 * S
        along = along / count
        shift = shift / count
        for i in tl.range(0, tiles, num_stages=STAGES):
            c, s = _tile(tiles - 1 - i, first_c, first_s, blocks_s, BLOCK_C, BLOCK_S)
            mask = (c < D)[:, None] & (s < S)[None, :]
            dy = tl.load(dy_ptr + c.to(tl.int64)[:, None] * stride_dyc + s[None, :], mask=mask, other=0.0)
            x = tl.load(x_ptr + c.to(tl.int64)[:, None] * stride_xc + s[None, :], mask=mask, other=0.0)
            dy = dy.to(tl.float32)
            if w_ptr is not None:
                dy = dy * tl.load(w_ptr + group + c, mask=c < D, other=0.0).to(tl.float32)[:, None]
            dx = (dy - shift - ((x.to(tl.float32) - mean) * rstd) * along) * rstd
            at = c.to(tl.int64)[:, None] * S + s[None, :]
            tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


# --------------------------------------------------------------------------------------------------------- launches


class _Cut(NamedTuple):
    """How slabs are cut: program count, parts per slab and tiles per part (channels, space), tile, warps, stages."""

    programs: int
    parts: tuple[int, int]
    per: tuple[int, int]
    tile: tuple[int, int]
    warps: int
    stages: int


def _fit_block(size: int, most: int, least: int) -> int:
    """Largest power of two from `least` to `most` whose blocks leave at most an eighth empty; else `most`."""
    block = most
    while block >= least:
        if 8 * cdiv(size, block) * block <= 9 * size:
            return block
        block //= 2
    return most


@functools.lru_cache(maxsize=4096)
def _cut(slabs: int, D: int, S: int, itemsize: int, inputs: int, processors: int, shared: int) -> _Cut:
    """One program per slab, or several if there are fewer slabs than SMs. Slabs are cut by channels, which needs no
    further sums, and also by space if there are too few channels. A tile has at most 4096 numbers, or a whole slab
    twice as large; two more tiles are in flight."""
    whole = next_power_of_2(D) * next_power_of_2(S) * itemsize <= 16384
    numbers = 16384 // itemsize if whole else 4096
    block_s = min(next_power_of_2(S), numbers)
    block_c = min(next_power_of_2(D), numbers // block_s)
    if not whole:
        # A power of two may leave half a tile empty. Smaller tiles leave less empty, but need enough work per step.
        fitted_s = _fit_block(S, block_s, 64)
        fitted_c = _fit_block(D, min(next_power_of_2(D), numbers // fitted_s), 1)
        if fitted_s * fitted_c >= 2048:
            block_s, block_c = fitted_s, fitted_c
    blocks_c, blocks_s = cdiv(D, block_c), cdiv(S, block_s)
    wanted = 1 if slabs > processors else cdiv(2 * processors, slabs)
    per_c = cdiv(blocks_c, min(wanted, blocks_c))
    # Rounding up twice may leave parts empty; counting again drops them.
    parts_c = cdiv(blocks_c, per_c)
    per_s = cdiv(blocks_s, min(cdiv(wanted, parts_c), blocks_s))
    parts_s = cdiv(blocks_s, per_s)
    warps = 4 if block_c * block_s <= 2048 else 16 if inputs == 1 and block_c * block_s > 4096 else 8
    stages = 3 if per_c * per_s > 1 and 3 * inputs * 16384 + 4096 <= shared else 1
    return _Cut(slabs * parts_c * parts_s, (parts_c, parts_s), (per_c, per_s), (block_c, block_s), warps, stages)


def _channels(x: Tensor) -> tuple[Tensor, int, int]:
    """x with unit stride within channels, and its strides between samples and between channels."""
    if not x.is_contiguous():
        dense = 1
        for size, stride in zip(reversed(x.shape[2:]), reversed(x.stride()[2:]), strict=True):
            if size != 1 and stride != dense:
                x = x.contiguous()
                break
            dense *= size
    return x, x.stride(0), x.stride(1)


def _group_norm_fwd_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape), x.new_empty((x.shape[0] * num_groups, 2), dtype=torch.float32)


@launcher(_group_norm_fwd_fake)
def _group_norm_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    y, stats = _group_norm_fwd_fake(x, weight, bias, num_groups, eps)
    if x.numel() == 0:
        return y, stats
    slabs, D = stats.shape[0], x.shape[1] // num_groups
    S = x.numel() // (slabs * D)
    x, *strides = _channels(x)
    weight = weight if weight is None else weight.contiguous()
    bias = bias if bias is None else bias.contiguous()
    dtypes = (x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    key = (slabs, num_groups, D, S, *strides, dtypes, eps)
    cut = _cut(slabs, D, S, x.element_size(), 1, multiprocessors(x.device), shared_memory(x.device))
    parts = cut.programs // slabs
    partial = x.new_empty((cut.programs, 3), dtype=torch.float32) if parts > 1 else None
    arguments = (num_groups, D, S, *strides, *cut.parts, *cut.per)
    options = {"num_warps": cut.warps}
    if partial is not None:
        plan = cut.programs, (*arguments, *cut.tile, cut.stages), options
        launch(_group_norm_stats_kernel, key, (x, partial), lambda: plan)
    last = cut.programs, (*arguments, eps, next_power_of_2(parts), *cut.tile, cut.stages), options
    launch(_group_norm_fwd_kernel, key, (x, weight, bias, partial, y, stats), lambda: last)
    return y, stats


def _group_norm_bwd_fake(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, num_groups: int, need_dx: bool,
    need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx = x.new_empty(x.shape) if need_dx else x.new_empty(0)
    dw = torch.empty_like(weight) if need_dw and weight is not None else x.new_empty(0)
    return dx, dw, torch.empty_like(bias) if need_db and bias is not None else x.new_empty(0)


@launcher(_group_norm_bwd_fake)
def _group_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, num_groups: int,
    need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx, dw, db = _group_norm_bwd_fake(dy, x, weight, bias, stats, num_groups, need_dx, need_dw, need_db)
    if x.numel() == 0:
        return dx, dw.zero_(), db.zero_()
    slabs, D = stats.shape[0], x.shape[1] // num_groups
    S = x.numel() // (slabs * D)
    (dy, *dy_strides), (x, *x_strides) = _channels(dy), _channels(x)
    weight = weight if weight is None else weight.contiguous()
    dtypes = (dy.dtype, x.dtype, None if weight is None else weight.dtype)
    key = (slabs, num_groups, D, S, *dy_strides, *x_strides, dtypes, need_dx, need_dw, need_db)
    cut = _cut(slabs, D, S, x.element_size(), 2, multiprocessors(x.device), shared_memory(x.device))
    parts, halves = cut.programs // slabs, need_dw + need_db
    partial: Tensor | None = None
    if halves:
        # Parts of channels write different columns, so rows of partial sums are per sample and spatial part.
        rows = slabs // num_groups * cut.parts[1]
        partial = x.new_empty((rows, halves, num_groups * D), dtype=torch.float32)
    sums = x.new_empty((cut.programs, 2), dtype=torch.float32) if parts > 1 and need_dx else None
    arguments = (num_groups, D, S, *dy_strides, *x_strides, *cut.parts, *cut.per)
    tile, options = (next_power_of_2(parts), *cut.tile, cut.stages), {"num_warps": cut.warps}
    first = cut.programs, (*arguments, True, need_dw, need_db, *tile), options
    out, w = dx if need_dx and sums is None else None, weight if need_dx else None
    launch(_group_norm_bwd_kernel, (*key, True), (dy, x, w, stats, sums, out, partial), lambda: first)
    if sums is not None:
        second = cut.programs, (*arguments, False, False, False, *tile), options
        launch(_group_norm_bwd_kernel, (*key, False), (dy, x, weight, stats, sums, dx, None), lambda: second)
    if halves:
        sum_rows(partial, dw if need_dw else db, db if need_dw and need_db else None)  # type: ignore[arg-type]
    return dx, dw, db


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, ctx.num_groups, _ = inputs
    ctx.save_for_backward(x, weight, bias, output[1])


def _backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    dx, dw, db = _group_norm_bwd(dy, *ctx.saved_tensors, ctx.num_groups, need_dx, need_dw, need_db)
    return dx if need_dx else None, dw if need_dw else None, db if need_db else None


_group_norm = differentiable(_group_norm_fwd, _setup_context, _backward)


EXAMPLES = {
    "group_norm": Example("Norms", ((4, 64, 100), (64,), (64,)), lambda x, w, b: group_norm(x, 8, w, b)),
}
