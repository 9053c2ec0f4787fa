"""The FP8 recipe: a scale for each token, a scale for each weight, every tensor rounded to e4m3 once.

    y  = x Wᵀ       x  (M, K), scale sx[m]       W  (N, K), scale sw        y = sx[m] · sw · Σ qx qw
    dx = dy W       dy (M, N), scale sd[m]       Wᵀ (K, N), the same bytes  dx = sd[m] · sw · Σ qd qw
    dW = dyᵀ x      dyᵀ (N, M), the same bytes   x' (K, M)                  dW = c · Σ qd x'

Hopper's FP8 products need both factors stored along the summed dimension, so dW needs both factors transposed. A scale
for each token cannot be applied behind a sum over tokens, so the scales of one factor move into the other factor
before that factor is rounded:

    dyᵀ x = Σₘ sd[m] qd[m, n] x[m, k] = c · Σₘ qd[m, n] x'[m, k],   x' = x · sd[m] / c,   c = maxₘ sd[m] · sx[m]

|x| ≤ 448 · sx, hence |x'| ≤ 448, and no maximum of x' is computed. A token whose gradient is small beside the largest
token's has small numbers in x': the token's largest number loses bits where its share of dW is below 2⁻¹⁴ of the
largest token's. Tokens without a gradient are exact zeros.

All scales are powers of two: scaling is exact, and W and Wᵀ are the same bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
LEAST_SCALE = 2.0**-126  # the scale of a row of zeros, so that no scale divides by zero
ALIGNMENT = 16  # bytes: products need rows and sums of a multiple of 16 numbers
BLOCK = 128  # numbers with one scale, in rows and along both sides of weights that come in blocks


class Rows(NamedTuple):
    """Rows in e4m3 with a scale each: row m is data[m] · scale[m]. Or with a scale for each 128 numbers of a row.

    data: (M, N) e4m3, contiguous. scale: (M, 1) fp32 powers of two; or (M, N / 128), as `quantize_blocks` stores them.
    """

    data: Tensor
    scale: Tensor


class Weight(NamedTuple):
    """A weight, or several stacked weights, in e4m3 with one scale; or their transposition.

    data: (N, K) e4m3, contiguous. scale: (N,) fp32: the same power of two N times, as cuBLAS reads one for each column
    of the result.
    """

    data: Tensor
    scale: Tensor


class Norm(NamedTuple):
    """How to compute an RMS norm of rows again: as `tigon.rms_norm` with the saved 1/rms.

    rstd: (M,) fp32. weight: (N,). offset, cast: as for `tigon.rms_norm`.
    """

    rstd: Tensor
    weight: Tensor | None
    offset: float
    cast: str


def round_up(tokens: int) -> int:
    """The number of columns for so many tokens in a transposed factor: the next multiple of 16."""
    return -(-tokens // ALIGNMENT) * ALIGNMENT
