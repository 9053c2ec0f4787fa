"""TVD's slope as two bits per class: the forward pass writes them, and a kernel computes the gradient from them.

A row has as many bytes as a quarter has columns, a multiple of 16: byte j holds column j's signs in all quarters.
"""

from __future__ import annotations

from tigon.kernels import jit, tl
from tigon.kernels.tiles.constants import LN2


@jit
def store_signs(signs_ptr, start, plane, u, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store the signs of u (4, BLOCK), ½, 0 or −½, a byte per column: sign + 1 in two bits each."""
    lane = start + tl.arange(0, BLOCK)
    # Base-4 digits, summed in fp32: one instruction per class, where comparisons and shifts take eight. All four 1s
    # and 2²³, whose unit is 1, are added at the end: such a number's low byte is an integer's.
    digits = tl.sum(u * (2 << (2 * tl.arange(0, DEPTH)))[:, None].to(tl.float32), 0) + (8388608.0 + 85.0)
    tl.store(signs_ptr + lane, digits.to(tl.int32, bitcast=True).to(tl.uint8), mask=lane < plane)


# A program: LANES columns from each quarter of a row. Arguments as in `_divergence_bwd_kernel`; signs (M, plane) bytes,
# unwritten for ignored rows.
@jit
def _signed_bwd_kernel(
    drows_ptr, input_ptr, mask_ptr, stats_ptr, signs_ptr, dinput_ptr, V, stride_g, stride_im, k, plane,
    FORM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write TVD's gradient from the signs and, for logits, from the student's side."""
    blocks = tl.cdiv(plane, LANES)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    lane = tl.program_id(0) % blocks * LANES + tl.arange(0, LANES)
    quarter = tl.arange(0, 4)[:, None]
    cols = quarter * plane + lane[None, :]
    here = (lane < plane)[None, :] & (cols < V)
    valid = True
    if FORM == "logits":
        high_a = tl.load(stats_ptr + 5 * row)
        low_a = tl.load(stats_ptr + 5 * row + 1)
        valid = tl.where(high_a == float("inf"), 0, 1) == 1  # integers: the interpreter has no mask of float scalars
    elif mask_ptr is not None:
        valid = tl.load(mask_ptr + row) != 0
    codes = tl.load(signs_ptr + row * plane + lane, mask=(lane < plane) & valid, other=0).to(tl.int32)[None, :]
    g = tl.load(drows_ptr + row * stride_g)
    if FORM == "logits":
        a = tl.load(input_ptr + row * stride_im + cols, mask=here & valid, other=0.0).to(tl.float32)
        # The low bits of 2²³ + digit are the digit: fewer registers than comparisons, which wait for the logits.
        digit = ((codes >> (2 * quarter)) & 3) + 0x4B000000
        u = (digit.to(tl.float32, bitcast=True) - (8388608.0 + 1.0)) * 0.5
        q = tl.exp2(((a - high_a) - low_a) * k)
        dx = q * (u - tl.load(stats_ptr + 5 * row + 4)) * (k * LN2)
        dx = tl.where(valid, dx * g, 0.0).to(dinput_ptr.dtype.element_ty)
    else:
        dtype: tl.constexpr = dinput_ptr.dtype.element_ty
        most = tl.where(valid, 0.5 * g, 0.0).to(dtype)
        none = tl.where(valid, 0.0 * g, 0.0).to(dtype)
        least = tl.where(valid, -0.5 * g, 0.0).to(dtype)
        above, same = (codes & (2 << (2 * quarter))) != 0, (codes & (1 << (2 * quarter))) != 0
        dx = tl.where(above, most, tl.where(same, none, least))
    tl.store(dinput_ptr + row * V + cols, dx, mask=here)
