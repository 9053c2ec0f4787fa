"""A gated unit whose gate and up carry low-rank adapters: y = act(gate + tg Bgᵀ) · (up + tu Buᵀ), in one pass.

gate and up are the frozen layers' results alone. Added by torch, an adapter's part is written, read by the frozen
product in its epilogue, and written again, for tensors 3.5 times the hidden width in Llama. The gated unit reads both
tensors anyway: here it adds the adapters' parts to the tiles that it has loaded, in fp32, by products of tiles with r
inner numbers on the tensor cores.

    forward     reads gate, up; writes y
    backward    reads dy, gate, up; writes dgate, dup, and y again over dy, which the adapter behind y needs
    dy          of the frozen layer behind alone: the part of its adapter, u A, is added to the tile as well

Source: Hu et al. 2021, LoRA, https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.acts import ACTS
from tigon.ops.gated import gated_reference
from tigon.runtime import cdiv, jit, launch, launcher, next_power_of_2, tl

# Ranks up to here. Beyond, the adapters' tiles cost more to read again than their parts to write once: at rank 64 and
# 8192 x 14336 on an H100 the backward pass took 0.90 ms, one of its own and torch's sums 0.61.
WIDEST = 32


class Added(NamedTuple):
    """An adapter's part of a tensor of (M, N): scale · t bᵀ.

    t: (M, r), with unit stride along r, in the tensor's dtype.
    b: (N, r), or (r, N) where it is an adapter's A; any float dtype, narrowed to t's after it was scaled.
    """

    t: Tensor
    b: Tensor
    scale: float = 1.0


def gated_lora_reference(gate: Tensor, up: Tensor, added: tuple[Added, Added], act: str) -> Tensor:
    """act(gate + tg Bgᵀ) · (up + tu Buᵀ) of (M, N) tensors; the sums are not rounded on the way."""
    acc = torch.promote_types(gate.dtype, torch.float32)
    g, u = (w.to(acc) + (a.t.to(acc) @ a.b.to(acc).t()) * a.scale for w, a in zip((gate, up), added, strict=True))
    return gated_reference(g, u, act).to(gate.dtype)


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _gated_lora_fwd_kernel(
    g_ptr, u_ptr, y_ptr, tg_ptr, tu_ptr, bg_ptr, bu_ptr, M, N, stride_gm, stride_um, stride_ym, stride_tgm, stride_tum,
    scale_g, scale_u, RG: tl.constexpr, RU: tl.constexpr, ACT: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Neighbours in the grid share their rows: t is read once from memory, and B stays in the cache.
    blocks = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, R)
    here, within = (rows < M)[:, None], (cols < N)[:, None]
    mask = here & (cols < N)[None, :]
    kind = g_ptr.dtype.element_ty
    tg = tl.load(tg_ptr + rows[:, None] * stride_tgm + r[None, :], mask=here & (r < RG)[None, :], other=0.0)
    tu = tl.load(tu_ptr + rows[:, None] * stride_tum + r[None, :], mask=here & (r < RU)[None, :], other=0.0)
    bg = tl.load(bg_ptr + cols[:, None] * RG + r[None, :], mask=within & (r < RG)[None, :], other=0.0)
    bu = tl.load(bu_ptr + cols[:, None] * RU + r[None, :], mask=within & (r < RU)[None, :], other=0.0)
    g = tl.load(g_ptr + rows[:, None] * stride_gm + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + rows[:, None] * stride_um + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    # The tensor cores add in fp32 to what was loaded. fp32 factors are multiplied as they are, without TF32.
    g = tl.dot(tg, (bg.to(tl.float32) * scale_g).to(kind).T, g, input_precision="ieee")
    u = tl.dot(tu, (bu.to(tl.float32) * scale_u).to(kind).T, u, input_precision="ieee")
    a, _ = ACT(g)
    tl.store(y_ptr + rows[:, None] * stride_ym + cols[None, :], (a * u).to(kind), mask=mask)


@jit
def _gated_lora_bwd_kernel(
    dy_ptr, g_ptr, u_ptr, dg_ptr, du_ptr, y_ptr, tg_ptr, tu_ptr, td_ptr, bg_ptr, bu_ptr, ad_ptr, M, N, stride_dym,
    stride_gm, stride_um, stride_dgm, stride_dum, stride_ym, stride_tgm, stride_tum, stride_tdm, scale_g, scale_u,
    scale_d, RG: tl.constexpr, RU: tl.constexpr, RD: tl.constexpr, ACT: tl.constexpr, R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, R)
    here, within = (rows < M)[:, None], (cols < N)[:, None]
    mask = here & (cols < N)[None, :]
    kind = g_ptr.dtype.element_ty
    tg = tl.load(tg_ptr + rows[:, None] * stride_tgm + r[None, :], mask=here & (r < RG)[None, :], other=0.0)
    tu = tl.load(tu_ptr + rows[:, None] * stride_tum + r[None, :], mask=here & (r < RU)[None, :], other=0.0)
    if td_ptr is not None:
        td = tl.load(td_ptr + rows[:, None] * stride_tdm + r[None, :], mask=here & (r < RD)[None, :], other=0.0)
    bg = tl.load(bg_ptr + cols[:, None] * RG + r[None, :], mask=within & (r < RG)[None, :], other=0.0)
    bu = tl.load(bu_ptr + cols[:, None] * RU + r[None, :], mask=within & (r < RU)[None, :], other=0.0)
    if td_ptr is not None:
        # A of the layer behind lies with its rank first: (r, N).
        ad = tl.load(
            ad_ptr + r[:, None] * tl.cast(N, tl.int64) + cols[None, :], mask=(r < RD)[:, None] & (cols < N)[None, :],
            other=0.0,
        )  # fmt: skip
    g = tl.load(g_ptr + rows[:, None] * stride_gm + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + rows[:, None] * stride_um + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + rows[:, None] * stride_dym + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    g = tl.dot(tg, (bg.to(tl.float32) * scale_g).to(kind).T, g, input_precision="ieee")
    u = tl.dot(tu, (bu.to(tl.float32) * scale_u).to(kind).T, u, input_precision="ieee")
    if td_ptr is not None:
        dy = tl.dot(td, (ad.to(tl.float32) * scale_d).to(kind), dy, input_precision="ieee")
    a, da = ACT(g)
    # y may lie over dy, dgate over gate and dup over up: all of a tile was read before any of it is written.
    if y_ptr is not None:
        tl.store(y_ptr + rows[:, None] * stride_ym + cols[None, :], (a * u).to(kind), mask=mask)
    tl.store(dg_ptr + rows[:, None] * stride_dgm + cols[None, :], (dy * u * da).to(kind), mask=mask)
    tl.store(du_ptr + rows[:, None] * stride_dum + cols[None, :], (dy * a).to(kind), mask=mask)


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
    dy: Tensor, gate: Tensor, up: Tensor, added: tuple[Added, Added, Added | None], act: str,
    into: tuple[Tensor, Tensor], y: Tensor | None,
) -> None:  # fmt: skip
    """Write dgate and dup into the tensors given, which may be gate and up, and the unit's result into y, if any.

    dy: (M, N), the gradient of the unit's result but for its adapter's part, the third of `added`, whose b is (r, N);
        the whole gradient where that is None. y may be dy.
    """
    M, N = gate.shape
    if not gate.numel():
        return
    (tg, bg, scale_g), (tu, bu, scale_u), behind = added
    td, ad, scale_d = (None, None, 1.0) if behind is None else (behind.t, behind.b.contiguous(), behind.scale)
    bg, bu = bg.contiguous(), bu.contiguous()
    ranks = bg.shape[1], bu.shape[1], 1 if ad is None else ad.shape[0]
    tensors = dy, gate, up, *into, y, tg, tu, td, bg, bu, ad
    strides = tuple(None if t is None else t.stride(0) for t in tensors[:9])
    scales = scale_g, scale_u, scale_d

    def plan() -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        R = max(16, next_power_of_2(max(ranks)))
        rows, cols, warps = _tile(R)
        arguments = (M, N, *strides, *scales, *ranks, ACTS[act].tile, R, rows, cols)
        return cdiv(M, rows) * cdiv(N, cols), arguments, {"num_warps": warps}

    key = (M, N, strides, scales, ranks, act, gate.dtype, bg.dtype, bu.dtype, None if ad is None else ad.dtype)
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
    strides = tuple(t.stride(0) for t in tensors[:5])
    ranks = bg.shape[1], bu.shape[1]

    def plan() -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        R = max(16, next_power_of_2(max(ranks)))
        rows, cols, warps = _tile(R)
        arguments = (M, N, *strides, scale_g, scale_u, *ranks, ACTS[act].tile, R, rows, cols)
        return cdiv(M, rows) * cdiv(N, cols), arguments, {"num_warps": warps}

    launch(
        _gated_lora_fwd_kernel,
        (M, N, strides, scale_g, scale_u, ranks, act, gate.dtype, bg.dtype, bu.dtype),
        tensors,
        plan,
    )
    return y
