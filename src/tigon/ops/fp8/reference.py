"""The FP8 recipe in plain PyTorch: what the kernels compute, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.ops.acts import ACTS
from tigon.ops.fp8.recipe import BLOCK, E4M3, LARGEST, LEAST_SCALE, Norm, Rows, Weight, round_up


def compute_scale(amax: Tensor) -> Tensor:
    """The power of two at or above amax / 448, at least 2⁻¹²⁶. Infinite for an infinite amax, NaN for NaN."""
    s = (amax.float() * (1.0 / LARGEST)).clamp(min=LEAST_SCALE)
    mantissa, exponent = torch.frexp(s)
    power = torch.ldexp(torch.ones_like(s), exponent - (mantissa == 0.5).int())
    return torch.where(s.isfinite(), power, s)


def round_to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale in e4m3. An infinite scale gives NaN where x is not finite, and 0 elsewhere."""
    scaled = x.float() * (1.0 / scale)
    return torch.where(scaled.isnan(), scaled, scaled.clamp(-LARGEST, LARGEST)).to(E4M3)


def quantize_rows_reference(x: Tensor, *beside: Tensor) -> Rows:
    rows = torch.cat([x, *beside], 1).float() if beside else x.float()
    scale = compute_scale(rows.abs().amax(1, keepdim=True)) if rows.shape[1] else rows.new_ones(len(rows), 1)
    return Rows(round_to_e4m3(rows, scale), scale)


def quantize_blocks_reference(x: Tensor) -> Rows:
    M, N = x.shape
    rows = quantize_rows_reference(x.reshape(-1, BLOCK))
    # As the kernel stores them: memory for a multiple of 16 rows, scales column by column.
    data, scale = x.new_zeros((round_up(M), N), dtype=E4M3), rows.scale.new_zeros((N // BLOCK, round_up(M))).t()
    return Rows(data[:M].copy_(rows.data.view(M, N)), scale[:M].copy_(rows.scale.view(M, N // BLOCK)))


def norm_rows_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, cast: str
) -> tuple[Tensor, Tensor, Rows]:
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    rstd = torch.rsqrt(total.float().square().mean(1) + eps)
    return total, rstd, quantize_rows_reference(norm_again(total, Norm(rstd, weight, offset, cast)))


def norm_again(x: Tensor, norm: Norm) -> Tensor:
    """The norm of x in x's dtype, from the saved 1/rms."""
    y = x.float() * norm.rstd[:, None]
    if norm.cast == "llama":
        y = y.to(x.dtype).float()
    if norm.weight is not None:
        y = y * (norm.weight.float() + norm.offset)
    return y.to(x.dtype)


def gated_rows_reference(gate_up: Tensor, act: str, keep: bool) -> tuple[Rows, Rows | None]:
    gate, up = gate_up.float().chunk(2, 1)
    product = quantize_rows_reference(ACTS[act].value(gate) * up)
    if not keep:
        return product, None
    kept = [quantize_rows_reference(half) for half in (gate, up)]
    data = torch.cat([half.data.view(torch.uint8) for half in kept], 1)  # autocast joins no e4m3
    return product, Rows(data.view(E4M3), torch.cat([half.scale for half in kept], 1))


def gated_gradient_reference(
    dy: Tensor, gate_up: Tensor, scale: Tensor | None, act: str, product_scale: Tensor | None,
    weight: Tensor | None = None,
) -> tuple[Rows, Tensor | None, Tensor | None]:  # fmt: skip
    gate, up = gate_up.float().chunk(2, 1)
    if scale is not None:
        gate, up = gate * scale[:, :1], up * scale[:, 1:]
    value, slope = ACTS[act].value(gate), compute_slope(act, gate)
    product = None if product_scale is None else round_to_e4m3(value * up, product_scale)
    dy, dots = dy.float(), None
    dg, du = dy * up * slope, dy * value
    if weight is not None:
        dots, dg, du = (dy * (value * up)).sum(1, keepdim=True), dg * weight, du * weight
    return quantize_rows_reference(dg, du), product, dots


def compute_slope(act: str, gate: Tensor) -> Tensor:
    with torch.enable_grad():
        g = gate.detach().requires_grad_()
        (slope,) = torch.autograd.grad(ACTS[act].value(g).sum(), g)
    return slope


def fold_scales_reference(into: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    c = (into * other).amax().clamp(min=2.0**-120) if into.numel() else into.new_ones(())
    return into / c, c


def to_columns_reference(x: Tensor, factor: Tensor, norm: Norm | None, rows: Tensor | None = None) -> Tensor:
    y = x if norm is None else norm_again(x, norm)
    y = y if rows is None else read_rows(y, rows)
    scaled = y.float() * factor.view(-1, 1)
    return transpose_rows_reference(torch.where(scaled.isnan(), scaled, scaled.clamp(-LARGEST, LARGEST)).to(E4M3))


def transpose_rows_reference(data: Tensor, rows: Tensor | None = None) -> Tensor:
    plain = data.view(torch.uint8) if rows is None else read_rows(data.view(torch.uint8), rows)
    M, N = plain.shape
    columns = data.new_zeros((N, round_up(M)), dtype=torch.uint8)
    columns[:, :M] = plain.t()
    return columns.view(data.dtype)


def read_rows(data: Tensor, rows: Tensor) -> Tensor:
    """The rows with these numbers; zeros for −1."""
    if not len(data):
        return data.new_zeros((len(rows), *data.shape[1:]))
    return torch.where((rows >= 0)[:, None], data[rows.clamp(min=0)], data.new_zeros(()))


def quantize_weight_reference(parts: Sequence[Tensor], amax: Tensor) -> Weight:
    weight = torch.cat([part.float() for part in parts])
    scale = compute_scale(amax)
    return Weight(round_to_e4m3(weight, scale), scale.expand(len(weight)).contiguous())


def quantize_stack_reference(stack: Tensor, amax: Tensor) -> Weight:
    scale = compute_scale(amax)
    return Weight(round_to_e4m3(stack, scale[:, None, None]), scale[:, None].expand(stack.shape[:2]).contiguous())


def multiply_rows_reference(rows: Rows, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = (rows.data.float() @ weight.data.float().t()) * (rows.scale * weight.scale)
    return (y if bias is None else y + bias.float()).to(dtype)


def multiply_blocks_reference(rows: Rows, data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    M, K = rows.data.shape
    x: Tensor = (rows.data.float().view(M, K // BLOCK, BLOCK) * rows.scale[:, :, None]).view(M, K)
    return (x @ expand_blocks(data, scale, (BLOCK, BLOCK)).t()).to(dtype)


def expand_blocks(data: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """data (N, K) · the scale of each number's block, in fp32; blocks at the ends may be smaller."""
    N, K = data.shape
    wide = scale.float().repeat_interleave(block[1], 1)[:, :K]
    expanded: Tensor = data.float() * wide.repeat_interleave(block[0], 0)[:N]
    return expanded


def multiply_columns_reference(a: Tensor, b: Tensor, c: Tensor, dtype: torch.dtype) -> Tensor:
    return (a.float() @ b.float().t() * c).to(dtype)
