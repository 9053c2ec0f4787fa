"""A gated unit whose gate and up carry low-rank adapters: y = act(gate + tg Bgᵀ) · (up + tu Buᵀ), in one pass.

gate and up are the frozen layers' results alone. Added by torch, an adapter's part is written, read by the frozen
product in its epilogue, and written again, for tensors 3.5 times the hidden width in Llama. The gated unit reads both
tensors anyway: here it adds the adapters' parts to the tiles that it has loaded, in fp32, by products of tiles with r
inner numbers on the tensor cores.

    forward     reads gate, up; writes y
    backward    reads dy, gate, up; writes dgate and dup
    dy          of the frozen layer behind alone: the part of its adapter, u A, is added to the tile as well

The adapters' own gradients are products of dgate, dup and y with r other columns. Up to rank 16 the backward pass makes
these products from the tiles that it holds, and `gated_lora_gradients` returns them; y is written only where masks of
dropout lie between y and the adapter behind. Beyond rank 16 `gated_lora_backward` writes y, over dy, and leaves all
products to its caller.

Source: Hu et al. 2021, LoRA, https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import (
    cdiv,
    jit,
    launch,
    launcher,
    multiprocessors,
    next_power_of_2,
    register_limit,
    tl,
)
from tigon.ops.acts import ACTS
from tigon.ops.gated import gated_reference

# Ranks up to here. Beyond, the adapters' tiles cost more to read again than their parts to write once: at rank 64 and
# 8192 x 14336 on an H100 the backward pass took 0.90 ms, one of its own and torch's sums 0.61.
WIDEST = 32
# Ranks up to which the backward pass makes the products too. On an H100, 8192 x 14336: 0.68 ms for 1.02 at rank 16, and
# 1.16 for 1.10 at rank 32, where the sums take the registers that a second program would need.
SUMMED = 16
# A thread of that pass: 228 would fit no third program into a multiprocessor, and take 0.87 ms for 0.68.
REGISTERS = 168


class Added(NamedTuple):
    """An adapter's part of a tensor of (M, N): scale · t bᵀ.

    t: (M, r), with unit stride along r, in the tensor's dtype.
    b: (N, r), or (r, N) where it is an adapter's A; any float dtype, narrowed to t's after it was scaled.
    """

    t: Tensor
    b: Tensor
    scale: float = 1.0


Adapters = tuple[Added, Added, "Added | None"]  # of gate, of up, and of the gradient that comes from the layer behind


def gated_lora_reference(gate: Tensor, up: Tensor, added: tuple[Added, Added], act: str) -> Tensor:
    """act(gate + tg Bgᵀ) · (up + tu Buᵀ) of (M, N) tensors; the sums are not rounded on the way."""
    acc = torch.promote_types(gate.dtype, torch.float32)
    # The adapter's part is added in fp32 before the activation. Eager code rounds the sum to bf16 first.
    g, u = (w.to(acc) + (a.t.to(acc) @ a.b.to(acc).t()) * a.scale for w, a in zip((gate, up), added, strict=True))
    return gated_reference(g, u, act).to(gate.dtype)


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _gated_lora_fwd_kernel(
    g_ptr, u_ptr, y_ptr, tg_ptr, tu_ptr, bg_ptr, bu_ptr, M, N, ROWS, stride_gm, stride_um, stride_tgm, stride_tum,
    scale_g, scale_u, RG: tl.constexpr, RU: tl.constexpr, ACT: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # A program owns BLOCK_N columns and walks down ROWS rows: it reads B once, which is larger than a tile of gate.
    # Neighbours in the grid share their rows, so t comes from the cache.
    blocks = tl.cdiv(N, BLOCK_N)
    block, part = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    cols, r = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, R)
    # Two masks of the same columns: B is loaded with its columns as rows, (BLOCK_N, R), as it lies in memory.
    inside, within = (cols < N)[None, :], (cols < N)[:, None]
    kind = g_ptr.dtype.element_ty
    # R is padded to 16 or more. Numbers of B beyond RG are the next row's, and are read as 0, as those of t are.
    bg = tl.load(bg_ptr + cols[:, None] * RG + r[None, :], mask=within & (r < RG)[None, :], other=0.0)
    bu = tl.load(bu_ptr + cols[:, None] * RU + r[None, :], mask=within & (r < RU)[None, :], other=0.0)
    # The scale is multiplied into B once, in fp32, and the product is rounded to the tiles' dtype for the tensor cores.
    bg, bu = (bg.to(tl.float32) * scale_g).to(kind).T, (bu.to(tl.float32) * scale_u).to(kind).T
    # B is loaded once for the whole walk, and the prefetch brings the next tiles of gate and up.
    for first in tl.range(part * ROWS, min(part * ROWS + ROWS, M), BLOCK_M, num_stages=STAGES):
        # int64: rows · N exceeds 2**31 at 150k tokens of width 14336.
        rows = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_M)
        here = (rows < M)[:, None]
        mask = here & inside
        tg = tl.load(tg_ptr + rows[:, None] * stride_tgm + r[None, :], mask=here & (r < RG)[None, :], other=0.0)
        tu = tl.load(tu_ptr + rows[:, None] * stride_tum + r[None, :], mask=here & (r < RU)[None, :], other=0.0)
        # gate and up may be column slices of one fused projection, each with a row stride of its own; y is dense.
        g = tl.load(g_ptr + rows[:, None] * stride_gm + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        u = tl.load(u_ptr + rows[:, None] * stride_um + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        # The tensor cores add in fp32 to what was loaded.
        # 16 or 32 inner numbers are one or two steps of the tensor cores, for a tile whose loads take longer.
        a, _ = ACT(tl.dot(tg, bg, g))
        tl.store(y_ptr + rows[:, None] * N + cols[None, :], (a * tl.dot(tu, bu, u)).to(kind), mask=mask)


@jit
def _gated_lora_bwd_kernel(
    dy_ptr, g_ptr, u_ptr, dg_ptr, du_ptr, y_ptr, thin_ptr, wide_ptr, tg_ptr, tu_ptr, td_ptr, bg_ptr, bu_ptr, ad_ptr,
    M, N, ROWS, stride_tgm, stride_tum, stride_tdm, scale_g, scale_u, scale_d, RG: tl.constexpr, RU: tl.constexpr,
    RD: tl.constexpr, ACT: tl.constexpr, R: tl.constexpr, WITH_B: tl.constexpr, WITH_A: tl.constexpr,
    WITH_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # A program owns BLOCK_N columns and walks down ROWS rows: sums over rows stay in registers, sums over columns are
    # written once for each block of columns. Neighbours in the grid share their rows, so t comes from the cache.
    blocks = tl.cdiv(N, BLOCK_N)
    block, part = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    cols, r = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, R)
    inside, within = (cols < N)[None, :], (cols < N)[:, None]
    kind = g_ptr.dtype.element_ty
    bg = tl.load(bg_ptr + cols[:, None] * RG + r[None, :], mask=within & (r < RG)[None, :], other=0.0)
    bu = tl.load(bu_ptr + cols[:, None] * RU + r[None, :], mask=within & (r < RU)[None, :], other=0.0)
    # The scaled B serves twice, for gate's own sum and for dgate · B: the scale of u is in it.
    bg, bu = (bg.to(tl.float32) * scale_g).to(kind), (bu.to(tl.float32) * scale_u).to(kind)
    if td_ptr is not None:
        # A of the layer behind lies with its rank first: (r, N).
        first_ad = ad_ptr + r[:, None] * tl.cast(N, tl.int64) + cols[None, :]
        ad = (tl.load(first_ad, mask=(r < RD)[:, None] & inside, other=0.0).to(tl.float32) * scale_d).to(kind)
    # (R, BLOCK_N) sums in fp32: 16 × 128 on 128 threads are 16 registers for each of the three. Sums that are not
    # wanted are constants, and compiled away.
    dbg = tl.zeros((R, BLOCK_N), tl.float32)
    dbu = tl.zeros((R, BLOCK_N), tl.float32)
    dad = tl.zeros((R, BLOCK_N), tl.float32)
    # Side by side for each row: dgate Bg, dup Bu, and y Aᵀ where t is wanted again.
    THIN: tl.constexpr = 3 * R if WITH_T else 2 * R
    for first in tl.range(part * ROWS, min(part * ROWS + ROWS, M), BLOCK_M, num_stages=STAGES):
        rows = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_M)
        here = (rows < M)[:, None]
        # One set of addresses serves all six tensors of (M, N), which are contiguous.
        mask, at = here & inside, rows[:, None] * N + cols[None, :]
        tg = tl.load(tg_ptr + rows[:, None] * stride_tgm + r[None, :], mask=here & (r < RG)[None, :], other=0.0)
        tu = tl.load(tu_ptr + rows[:, None] * stride_tum + r[None, :], mask=here & (r < RU)[None, :], other=0.0)
        if td_ptr is not None:
            td = tl.load(td_ptr + rows[:, None] * stride_tdm + r[None, :], mask=here & (r < RD)[None, :], other=0.0)
        # All three tiles are read before the first store, as results may lie over them.
        g = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(u_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        # gate and up again, as the forward pass had them: neither sum was written to memory.
        g = tl.dot(tg, bg.T, g)
        u = tl.dot(tu, bu.T, u)
        if td_ptr is not None:
            # dy came from the frozen layer behind alone. Its adapter's part is added here, in fp32, and the sum is
            # never stored.
            dy = tl.dot(td, ad, dy)
        a, da = ACT(g)
        # One result after the other, so that few are held at a time. y may lie over dy, dgate over gate, dup over up:
        # a tile is read whole before any of it is written.
        # Rounded as the forward pass rounded it: the products with y then see the numbers that the layer behind has
        # seen.
        y = (a * u).to(kind)
        if y_ptr is not None:
            tl.store(y_ptr + at, y, mask=mask)
        if WITH_T:
            # A partial sum over BLOCK_N columns for each row: (blocks, M, THIN), in fp32. The next kernel adds the
            # blocks. Atomics would add them in the order of arrival.
            own = thin_ptr + (block * tl.cast(M, tl.int64) + rows)[:, None] * THIN + 2 * R + r[None, :]
            tl.store(own, tl.dot(y, ad.T), mask=here)
        # r rows, not r columns: products of 64 rows and more would go to larger instructions of the tensor cores, whose
        # operands take shared memory.
        if WITH_A:
            dad = tl.dot(td.T, y, dad)
        # dup = dy · act(gate), rounded before the products: they take what the frozen layers' products take.
        du = (dy * a).to(kind)
        tl.store(du_ptr + at, du, mask=mask)
        # u = dup · (scale · Bu), the gradient of t, for the columns of this block.
        if thin_ptr is not None:
            own = thin_ptr + (block * tl.cast(M, tl.int64) + rows)[:, None] * THIN + R + r[None, :]
            tl.store(own, tl.dot(du, bu), mask=here)
        # dBuᵀ = scale · tᵀ dup: (R, BLOCK_N). The scale is applied once, at the end.
        if WITH_B:
            dbu = tl.dot(tu.T, du, dbu)
        # dup is stored and summed before dgate is made: fewer tiles are alive at a time.
        dg = (dy * u * da).to(kind)
        tl.store(dg_ptr + at, dg, mask=mask)
        if thin_ptr is not None:
            own = thin_ptr + (block * tl.cast(M, tl.int64) + rows)[:, None] * THIN + r[None, :]
            tl.store(own, tl.dot(dg, bg), mask=here)
        if WITH_B:
            dbg = tl.dot(tg.T, dg, dbg)
    # Sums over this program's rows: (parts, 3, R, N), each place written by one program.
    if wide_ptr is not None:
        total = wide_ptr + (part * 3 * R + r)[:, None] * tl.cast(N, tl.int64) + cols[None, :]
        if WITH_B:
            tl.store(total, dbg * scale_g, mask=inside)
            tl.store(total + R * tl.cast(N, tl.int64), dbu * scale_u, mask=inside)
        if WITH_A:
            tl.store(total + 2 * R * tl.cast(N, tl.int64), dad * scale_d, mask=inside)


@jit
def _thin_sums_kernel(
    thin_ptr, u_ptr, t_ptr, M, BLOCKS, RG: tl.constexpr, RU: tl.constexpr, RD: tl.constexpr, R: tl.constexpr,
    KINDS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    # u (M, RG + RU) and t (M, RD) from the sums of each block of columns, in the order of the blocks.
    # KINDS is the fast index: the two or three sums of a row lie side by side, and neighbours share their lines of
    # memory.
    rows = (tl.program_id(0) // KINDS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    r, which = tl.arange(0, R), tl.program_id(0) % KINDS
    here = (rows < M)[:, None]
    THIN: tl.constexpr = R * KINDS
    # Sixteen blocks at a time: loads one after the other would wait for memory, not for its bandwidth.
    total = tl.zeros((BLOCK_M, R), tl.float32)
    for first in range(0, BLOCKS, 16):
        block = first + tl.arange(0, 16)
        row = block[:, None] * tl.cast(M, tl.int64) + rows[None, :]
        at = thin_ptr + row[:, :, None] * THIN + which * R + r[None, None, :]
        mask = (block < BLOCKS)[:, None, None] & (rows < M)[None, :, None]
        # In the order of blocks, sixteen at a time: the same bits on every run.
        total += tl.sum(tl.load(at, mask=mask, other=0.0), 0)
    # `which` is the same for a whole program: the branch costs no divergence.
    if which == 2:
        if t_ptr is not None:
            at = t_ptr + rows[:, None] * RD + r[None, :]
            tl.store(at, total.to(t_ptr.dtype.element_ty), mask=here & (r < RD)[None, :])
    else:
        # Padded ranks are dropped here: u is dense, gate's columns before up's.
        own = tl.where(which == 0, RG, RU)
        at = u_ptr + rows[:, None] * (RG + RU) + which * RG + r[None, :]
        tl.store(at, total.to(u_ptr.dtype.element_ty), mask=here & (r < own)[None, :])


@jit
def _wide_sums_kernel(
    wide_ptr, dbg_ptr, dbu_ptr, dad_ptr, N, PARTS, RG: tl.constexpr, RU: tl.constexpr, RD: tl.constexpr,
    R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # dBg (N, RG), dBu (N, RU) and dAd (RD, N) from the sums of each part of the rows, in the order of the parts.
    # One program a block of columns and kind; an unwanted kind's program loads sums that it does not store.
    cols = (tl.program_id(0) // 3).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    r, which = tl.arange(0, R), tl.program_id(0) % 3
    inside = (cols < N)[None, :]
    total = tl.zeros((R, BLOCK_N), tl.float32)
    # Few parts, each (R, BLOCK_N) contiguous along N: loads are wide, and need no second axis.
    for part in range(PARTS):
        at = wide_ptr + ((part * 3 + which) * R + r)[:, None] * tl.cast(N, tl.int64) + cols[None, :]
        total += tl.load(at, mask=inside, other=0.0)
    if which == 0:
        # Stored transposed: dB is (N, r), as B is.
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
    """Rows, columns and warps of a program: the fastest of fifteen on an H100, at two shapes.

    Few rows, so that registers leave room for many programs: what a tile waits for is memory. With 64 rows the products
    would go to the larger tensor-core instructions, whose operands take shared memory, and 64 x 32 at rank 64 read out
    of bounds as Triton 3.6 compiled it.
    """
    return (16, 128, 4) if R <= 16 else (32, 64, 4)


def gated_lora_forward(gate: Tensor, up: Tensor, added: tuple[Added, Added], act: str) -> Tensor:
    """act(gate + tg Bgᵀ) · (up + tu Buᵀ) of gate and up (M, N), with unit stride along N."""
    (tg, bg, scale_g), (tu, bu, scale_u) = added
    return _gated_lora_fwd(gate, up, tg, tu, bg.contiguous(), bu.contiguous(), scale_g, scale_u, act)


def gated_lora_backward(
    dy: Tensor, gate: Tensor, up: Tensor, added: Adapters, act: str,
    into: tuple[Tensor, Tensor], y: Tensor | None,
) -> None:  # fmt: skip
    """Write dgate and dup into the tensors given, which may be gate and up, and the unit's result into y, if any.

    dy: (M, N), the gradient of the unit's result but for its adapter's part, the third of `added`, whose b is (r, N);
        the whole gradient where that is None. y may be dy. All tensors of (M, N) are contiguous.
    """
    # rows = block_m: each program takes one tile, as there are no sums to keep for a walk.
    block_m, block_n, warps = _tile(_padded(added))
    _backward(dy, gate, up, added, act, into, y, None, (block_m, block_n, block_m, 1), {"num_warps": warps})


class Gradients(NamedTuple):
    """Products of the adapters with dgate, dup and the unit's result y.

    u: (M, rg + ru), the gradients of tg and tu beside each other, in the tensors' dtype.
    db_gate, db_up: (N, rg), (N, ru). da: (rd, N), of the layer behind. All in fp32; None where not asked for.
    t: (M, rd), y (scale · A)ᵀ of the layer behind, in the tensors' dtype; None where not asked for.
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
    """As `gated_lora_backward`, and all products that the adapters' gradients need; for ranks up to SUMMED.

    y: as there. It is needed where the layer behind drops elements of y: `added` has None in its place then.
    b, a, t: which of the gradients are wanted. a and t are of the layer behind, the third of `added`.
    The same call gives the same bits: sums over columns and over rows are added up in a second launch, in one order.
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
        # Sums over no rows or no columns are zeros, and no kernel would write them.
        for empty in found:
            if empty is not None:
                empty.zero_()
        return found
    R, block_m, block_n = _padded(added), 16, 128
    blocks, steps = cdiv(N, block_n), cdiv(M, block_m)
    # Six programs for each multiprocessor: three run at a time, and the second half evens out how long they take.
    rows = cdiv(steps, max(1, min(steps, 6 * multiprocessors(gate.device) // blocks))) * block_m
    parts, kinds = cdiv(M, rows), 3 if t else 2
    # Workspaces in fp32, freed with this call. thin grows with M · N / 128, wide with the number of programs alone.
    thin = gate.new_empty(blocks, M, kinds, R, dtype=torch.float32)
    wide = gate.new_empty(parts, 3, R, N, dtype=torch.float32)
    # The limit of registers lets three programs share a multiprocessor: what a tile waits for is memory.
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
    """Whether `gated_lora_gradients` is the faster way. AMD's compiler keeps a part of its sums in memory."""
    return max(ranks) <= SUMMED and bool(register_limit(gate.device, REGISTERS))


def _ranks(added: Adapters) -> tuple[int, int, int]:
    gate, up, behind = added
    # 1 where there is no layer behind: a rank of 0 would be no tile.
    return gate.b.shape[1], up.b.shape[1], 1 if behind is None else behind.b.shape[0]


def _padded(added: Adapters) -> int:
    """The rank that tiles have: tensor cores multiply 16 inner numbers."""
    return max(16, next_power_of_2(max(_ranks(added))))


def _backward(
    dy: Tensor, gate: Tensor, up: Tensor, added: Adapters, act: str, into: tuple[Tensor, Tensor],
    y: Tensor | None, sums: tuple[Tensor, Tensor, bool, bool, bool] | None, tile: tuple[int, int, int, int],
    options: dict[str, int],
) -> None:  # fmt: skip
    """The kernel that both backward functions launch. tile: rows and columns, rows of a program, stages."""
    M, N = gate.shape
    if not gate.numel():
        return
    (tg, bg, scale_g), (tu, bu, scale_u), behind = added
    td, ad, scale_d = (None, None, 1.0) if behind is None else (behind.t, behind.b.contiguous(), behind.scale)
    # The kernel reads B with the rank as its row stride. An adapter's B is small beside gate.
    bg, bu = bg.contiguous(), bu.contiguous()
    thin, wide, b, a, t = sums if sums is not None else (None, None, False, False, False)
    block_m, block_n, rows, stages = tile
    tensors = dy, gate, up, *into, y, thin, wide, tg, tu, td, bg, bu, ad
    # t of gate and of up are column slices of one tensor, with the sum of the ranks as their stride.
    strides = tg.stride(0), tu.stride(0), None if td is None else td.stride(0)
    scales, ranks = (scale_g, scale_u, scale_d), _ranks(added)

    def plan() -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        arguments = (
            M, N, rows, *strides, *scales, *ranks, ACTS[act].tile, _padded(added), b, a, t, block_m, block_n, stages
        )  # fmt: skip
        # The columns are the fast index, as in the kernel.
        return cdiv(N, block_n) * cdiv(M, rows), arguments, options

    kinds = gate.dtype, bg.dtype, bu.dtype, None if ad is None else ad.dtype
    key = (M, N, rows, strides, scales, ranks, act, b, a, t, y is None, thin is None, kinds)
    launch(_gated_lora_bwd_kernel, key, tensors, plan)


def _gated_lora_fwd_fake(gate: Tensor, *_: Any) -> Tensor:
    return gate.new_empty(gate.shape)


@launcher(
    "(Tensor gate, Tensor up, Tensor tg, Tensor tu, Tensor bg, Tensor bu, float scale_g, float scale_u, str act)"
    " -> Tensor",
    _gated_lora_fwd_fake,
)
def _gated_lora_fwd(
    gate: Tensor, up: Tensor, tg: Tensor, tu: Tensor, bg: Tensor, bu: Tensor, scale_g: float, scale_u: float, act: str
) -> Tensor:
    M, N = gate.shape
    y = gate.new_empty(gate.shape)
    if not y.numel():
        return y
    tensors = gate, up, y, tg, tu, bg, bu
    strides = gate.stride(0), up.stride(0), tg.stride(0), tu.stride(0)
    ranks = bg.shape[1], bu.shape[1]
    R = max(16, next_power_of_2(max(ranks)))
    block_m, block_n = 32, 128
    blocks, steps = cdiv(N, block_n), cdiv(M, block_m)
    # Many programs for each multiprocessor, yet each of several tiles: of 36 choices on an H100 the fastest or within
    # 2 % of it at five shapes, 1.04 times what the bytes take.
    # In whole tiles. The more blocks of columns there are, the more rows a program walks down.
    rows = cdiv(steps, max(1, min(steps, 32 * multiprocessors(gate.device) // blocks))) * block_m

    def plan() -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        arguments = (M, N, rows, *strides, scale_g, scale_u, *ranks, ACTS[act].tile, R, block_m, block_n, 3)
        return blocks * cdiv(M, rows), arguments, {"num_warps": 4}

    kinds = gate.dtype, bg.dtype, bu.dtype
    launch(_gated_lora_fwd_kernel, (M, N, rows, strides, scale_g, scale_u, ranks, act, kinds), tensors, plan)
    return y
