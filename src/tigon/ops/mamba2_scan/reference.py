"""Mamba-2's scan in plain PyTorch: the definition, token by token, and the CPU path, by the delta rule's chunks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import autocast_device
from tigon.ops.gated_delta_rule.reference import run_documents


def mamba2_scan_reference(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor | None = None, dt_bias: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf), initial_state: Tensor | None = None,
    offsets: Tensor | None = None, return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    with torch.autocast(autocast_device(x.device.type), enabled=False):
        wide = torch.promote_types(x.dtype, torch.float32)
        steps = compute_steps(dt, dt_bias, dt_softplus, dt_limit, wide).transpose(1, 2)
        q, k, v = (t.to(wide).transpose(1, 2) for t in (C, B, x))
        q, k = (t.repeat_interleave(v.shape[1] // t.shape[1], 1) for t in (q, k))
        if initial_state is None:
            documents = x.shape[0] if offsets is None else offsets.shape[0] - 1
            initial_state = v.new_zeros((documents, *x.shape[2:], B.shape[-1]))
        # In fp64: gradients of decays are small differences of large sums.
        g = steps.double() * A.double()[:, None]
        y, S = run_documents(q, k, v, g, steps, initial_state.to(wide).transpose(-1, -2), offsets, corrects=False)
        if D is not None:
            y = y + v * D.to(wide)[:, None, None]
        y = y.transpose(1, 2).to(x.dtype).contiguous()
        return (y, S.transpose(-1, -2).contiguous()) if return_state else y


def compute_steps(
    dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float], wide: torch.dtype
) -> Tensor:  # fmt: skip
    """Return Δ (batch, T, H) in the wide dtype."""
    steps = dt.to(wide).contiguous()  # bits must not depend on strides
    if dt_bias is not None:
        steps = steps + dt_bias.to(wide)
    if dt_softplus:
        steps = F.softplus(steps)
    if tuple(dt_limit) != (0.0, math.inf) or not dt_softplus:  # softplus is in these limits
        steps = steps.clamp(*dt_limit)
    return steps
