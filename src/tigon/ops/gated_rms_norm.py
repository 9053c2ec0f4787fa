"""Gated RMS norm: y = x / rms(x) · weight · act(gate), or the norm of x · act(gate), over rows or groups of a row.

Source: Dao & Gu 2024, https://arxiv.org/abs/2405.21060 (Mamba-2: the gate before the norm, in groups); Yang et al.
2024, https://arxiv.org/abs/2412.06464 (gated delta nets: the gate after the norm).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.kernels import check_tensors
from tigon.ops.acts import ACTS, Act, checked_act
from tigon.ops.example import ROWS, WEIGHT, Example
from tigon.ops.rms_norm import CASTS, Cast, _out_dtype, default_eps


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float | None = None,
    cast: Cast = "llama",
    act: Act = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
) -> Tensor:
    """Scale each row of x to unit root mean square and by weight, and gate it, in one pass.

    Args:
        x: (..., N), any float dtype and strides. Statistics are fp32 (fp64 for fp64).
        gate: (..., N), x's shape, any float dtype.
        weight: (N,), or None for no scale.
        eps: added to the mean square; as for `rms_norm`.
        cast: where the result is rounded, as the model families write it:
            "llama"  the normed row is rounded to x's dtype, then scaled; as in Mamba-2, Bamba and Nemotron-H, and as in
                     Qwen3-Next, which rounds the scaled row to the dtype of x · weight before the gate multiplies it.
            "gemma"  everything in fp32, rounded once; as in Kimi Linear and Falcon-H1.
            "none"   as "gemma", to the promoted dtype of x and weight.
        act: the gate's activation, a name in `tigon.ops.acts`: "silu", "sigmoid", …
        norm_before_gate: norm(x) · act(gate); if False, norm(x · act(gate)). Mamba's argument of that name.
        group_size: the norm is taken over each group_size numbers of a row; over the whole row by default.
    Returns: (..., N), contiguous, in x's dtype; without norm_before_gate in `rms_norm`'s dtype for this cast.
    Raises: ValueError for shapes that differ, a group_size that does not divide N, an unknown cast or act.

    Replaces (cast="llama")::

        variance = x.float().pow(2).mean(-1, keepdim=True)
        y = weight * (x.float() * torch.rsqrt(variance + eps)).to(x.dtype)
        y = (y * F.silu(gate.float())).to(x.dtype)

    and, with norm_before_gate=False and group_size=n::

        h = (x.float() * F.silu(gate.float())).unflatten(-1, (-1, n))
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
        y = weight * h.flatten(-2).to(x.dtype)
    """
    _check(x, gate, weight, cast, act, group_size)
    if eps is None:
        eps = default_eps(x.dtype)
    return gated_rms_norm_reference(
        x, gate, weight, eps=eps, cast=cast, act=act, norm_before_gate=norm_before_gate, group_size=group_size
    )


def _check(x: Tensor, gate: Tensor, weight: Tensor | None, cast: str, act: str, group_size: int | None) -> None:
    check_tensors("gated_rms_norm", x=x, gate=gate, weight=weight)
    if x.dim() == 0 or not x.dtype.is_floating_point:
        raise ValueError(f"gated_rms_norm: x must be (..., N) floats, got {tuple(x.shape)} {x.dtype}.")
    if gate.shape != x.shape or not gate.dtype.is_floating_point or gate.device != x.device:
        raise ValueError(
            f"gated_rms_norm: gate must be floats of x's shape {tuple(x.shape)} on {x.device}, got "
            f"{tuple(gate.shape)} {gate.dtype} on {gate.device}."
        )
    N = x.shape[-1]
    if weight is not None and (weight.shape != (N,) or not weight.dtype.is_floating_point):
        raise ValueError(
            f"gated_rms_norm: weight must be ({N},) floats, the last dimension of x {tuple(x.shape)}, got "
            f"{tuple(weight.shape)} {weight.dtype}."
        )
    if cast not in CASTS:
        raise ValueError(f"gated_rms_norm: cast must be one of {CASTS}, got {cast!r}.")
    checked_act("gated_rms_norm", act)
    if group_size is not None and (group_size < 1 or N % group_size):
        raise ValueError(f"gated_rms_norm: group_size must divide {N}, the last dimension of x, got {group_size}.")


def gated_rms_norm_reference(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, *, eps: float | None = None, cast: str = "llama",
    act: str = "silu", norm_before_gate: bool = True, group_size: int | None = None,
) -> Tensor:  # fmt: skip
    eps = default_eps(x.dtype) if eps is None else eps
    wide = torch.promote_types(x.dtype, torch.float32)
    a = ACTS[act].value(gate.to(wide))
    y = x.to(wide) if norm_before_gate else x.to(wide) * a
    groups = y.unflatten(-1, (-1, group_size)) if group_size is not None and y.numel() else y
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).reshape(y.shape)
    if cast == "llama":
        y = y.to(x.dtype)
    if weight is not None:  # with "llama" PyTorch multiplies bf16 in fp32 and rounds once
        y = y * (weight if cast == "llama" else weight.to(torch.promote_types(weight.dtype, torch.float32)))
    if norm_before_gate:
        return (y * a).to(x.dtype).contiguous()
    return y.to(_out_dtype(x.dtype, weight, cast)).contiguous()


EXAMPLES = {
    "gated_rms_norm": Example("Norms", (ROWS, ROWS, WEIGHT), gated_rms_norm),
}
