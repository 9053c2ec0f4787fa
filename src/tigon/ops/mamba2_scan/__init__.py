"""Mamba-2's scan: linear attention whose state decays by a number for each token and head.

    Δ = clamp(softplus(dt + dt_bias)),   S ← exp(Δ A) S + Δ x Bᵀ,   y = S C + D x

The state S (P, N) is that of `gated_delta_rule`, transposed, without its correction: q is C, k is B, v is x, β is Δ.

Source: Dao & Gu 2024, https://arxiv.org/abs/2405.21060.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tigon.kernels import check_plain, use_triton
from tigon.ops.example import Example
from tigon.ops.gated_delta_rule import WIDEST
from tigon.ops.mamba2_scan.launches import mamba2_scan_launch
from tigon.ops.mamba2_scan.reference import compute_steps, mamba2_scan_reference
from tigon.ops.offsets import check_documents

__all__ = ["mamba2_scan", "mamba2_scan_reference"]


def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_state: Tensor | None = None,
    offsets: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The scan of Mamba-2 (state space duality), over sequences or packed documents.

    Args:
        x: (batch, T, H, P), any float dtype. P is at most 256.
        dt: (batch, T, H) floats, a token's step. Bias, softplus and limits are applied in fp32.
        A: (H,) floats, the logarithm of the state's decay for a step of 1, at most 0.
        B, C: (batch, T, G, N) in x's dtype, H a multiple of G: consecutive heads share them. N is at most 256.
        D: (H,) floats, how much of x the output also has; nothing by default.
        dt_bias: (H,) floats, added to dt.
        dt_softplus: whether steps are softplus(dt + dt_bias).
        dt_limit: the smallest step and the largest.
        initial_state: (batch, H, P, N) floats, the state before the first token; zeros by default.
        offsets: (documents + 1,) int32 or int64 on x's device, for batch = 1: the start of each document and T,
            ascending from 0, as in varlen_attention. Each document begins with its own state; states are
            (documents, H, P, N).
        return_state: also return the states after the last tokens.
    Returns: y (batch, T, H, P) in x's dtype, or (y, state): state is fp32, or fp64 for fp64. A document's rows have the
        same bits whatever the other documents are. Autocast changes nothing.
    Raises: ValueError for invalid shapes, dtypes, devices or options.

    Replaces::

        B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))
        dt = F.softplus(dt + dt_bias)
        state = torch.zeros(x.shape[0], *x.shape[2:], B.shape[-1])
        y = torch.empty_like(x)
        for t in range(x.shape[1]):
            state = state * (dt[:, t] * A).exp()[..., None, None]
            state = state + torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], B[:, t])
            y[:, t] = torch.einsum("bhpn,bhn->bhp", state, C[:, t]) + D[:, None] * x[:, t]
    """
    _check(x, dt, A, B, C, D, dt_bias, dt_limit, initial_state, offsets)
    if not use_triton(x, dt, A, B, C, D, dt_bias, initial_state):
        return mamba2_scan_reference(
            x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit,
            initial_state=initial_state, offsets=offsets, return_state=return_state,
        )  # fmt: skip
    steps = compute_steps(dt, dt_bias, dt_softplus, dt_limit, torch.float32)
    initial = None if initial_state is None else initial_state.transpose(-1, -2)
    y, state = mamba2_scan_launch(x, steps * A.float(), steps, B, C, D, initial, offsets, bool(return_state))
    return (y, state.transpose(-1, -2).contiguous()) if return_state else y


def _check(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    dt_limit: tuple[float, float], initial_state: Tensor | None, offsets: Tensor | None,
) -> None:  # fmt: skip
    given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": dt_bias, "initial_state": initial_state}
    check_plain("mamba2_scan", **given)
    for name, t in given.items():
        if t is not None and (t.device != x.device or not t.dtype.is_floating_point):
            raise ValueError(f"mamba2_scan: {name} must be floats on {x.device}, got {t.dtype} on {t.device}.")
    if x.dim() != 4 or not x.shape[2] or not 1 <= x.shape[3] <= WIDEST:
        raise ValueError(f"mamba2_scan: x must be (batch, T, H, P) with P from 1 to {WIDEST}, got {tuple(x.shape)}.")
    batch, T, H, P = x.shape
    if B.dim() != 4 or B.shape[:2] != (batch, T) or not B.shape[2] or H % B.shape[2] or not 1 <= B.shape[3] <= WIDEST:
        raise ValueError(
            f"mamba2_scan: B must be (batch, T, G, N) beside x {tuple(x.shape)}, H a multiple of G and N from 1 to "
            f"{WIDEST}, got {tuple(B.shape)}."
        )
    if C.shape != B.shape:
        raise ValueError(f"mamba2_scan: C must have B's shape {tuple(B.shape)}, got {tuple(C.shape)}.")
    for name, t in (("B", B), ("C", C)):
        if t.dtype != x.dtype:
            raise ValueError(f"mamba2_scan: {name} must have x's dtype {x.dtype}, got {t.dtype}.")
    if dt.shape != (batch, T, H):
        raise ValueError(f"mamba2_scan: dt must be {(batch, T, H)}, a step per head, got {tuple(dt.shape)}.")
    for name, weight in (("A", A), ("D", D), ("dt_bias", dt_bias)):
        if weight is not None and weight.shape != (H,):
            raise ValueError(f"mamba2_scan: {name} must be {(H,)}, a number per head, got {tuple(weight.shape)}.")
    if not isinstance(dt_limit, tuple | list) or len(dt_limit) != 2 or not dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"mamba2_scan: dt_limit must be the smallest step and the largest, got {dt_limit}.")
    check_documents("mamba2_scan", "x", x, offsets, initial_state, (H, P, B.shape[3]))


EXAMPLES = {
    "mamba2_scan": Example(
        "Linear attention",
        ((2, 96, 4, 32), (2, 96, 4), (4,), (2, 96, 2, 32), (2, 96, 2, 32)),
        lambda x, dt, A, B, C: mamba2_scan(x, dt, -A.exp(), B, C, dt_softplus=True),
    ),
}
