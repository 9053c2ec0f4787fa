"""The functions of liger_kernel.transformers.functional. Norms give x's dtype, and nothing is overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.integrations.liger import absent
from tigon.integrations.liger.chunked_loss import liger_cross_entropy as liger_cross_entropy
from tigon.integrations.liger.chunked_loss import liger_fused_linear_cross_entropy as liger_fused_linear_cross_entropy
from tigon.integrations.liger.cross_entropy import CrossEntropyOutput as CrossEntropyOutput
from tigon.integrations.liger.divergences import liger_fused_linear_jsd as liger_fused_linear_jsd
from tigon.integrations.liger.divergences import liger_jsd as liger_jsd
from tigon.integrations.liger.divergences import liger_kl_div as liger_kl_div
from tigon.integrations.liger.divergences import liger_tvd as liger_tvd
from tigon.integrations.liger.options import without_effect
from tigon.ops.add_rms_norm import add_rms_norm
from tigon.ops.dyt import dyt
from tigon.ops.gated import geglu, swiglu
from tigon.ops.group_norm import group_norm
from tigon.ops.layer_norm import layer_norm
from tigon.ops.poly_norm import poly_norm
from tigon.ops.relu2 import relu2
from tigon.ops.rms_norm import rms_norm
from tigon.ops.rope import Rope, rope
from tigon.ops.softmax import softmax
from tigon.ops.sparsemax import sparsemax

Pair = tuple[Tensor, Tensor]


def __getattr__(name: str) -> Any:
    raise AttributeError(absent(name, __name__))


def liger_rms_norm(
    X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> Tensor:
    """`tigon.rms_norm` of X (..., H) with W (H,). in_place has no effect: nothing is overwritten."""
    return rms_norm(X, W, eps=eps, offset=offset, cast=casting_mode).to(X.dtype)  # type: ignore[arg-type]


def liger_fused_add_rms_norm(
    X: Tensor, R: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama",
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`tigon.add_rms_norm` of X and R (..., H): the norm of X + R, and X + R. in_place has no effect."""
    y, total = add_rms_norm(X, R, W, eps=eps, offset=offset, cast=casting_mode)  # type: ignore[arg-type]
    return y.to(X.dtype), total


def liger_layer_norm(X: Tensor, W: Tensor | None, B: Tensor | None, eps: float) -> Tensor:
    """`tigon.layer_norm` of X (..., H) with W and B (H,)."""
    return layer_norm(X, W, B, eps=eps)


def liger_group_norm(
    X: Tensor, affine_scaling_weight: Tensor | None, affine_shifting_bias: Tensor | None, num_channels: int,
    num_groups: int, eps: float,
) -> Tensor:  # fmt: skip
    """`tigon.group_norm` of X (B, num_channels, ...); weight and bias are (num_channels,)."""
    if X.dim() < 2 or X.shape[1] != num_channels:
        raise ValueError(f"liger_group_norm: X must be (B, {num_channels}, ...), got {tuple(X.shape)}.")
    return group_norm(X, num_groups, affine_scaling_weight, affine_shifting_bias, eps=eps)


def liger_poly_norm(X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6, in_place: bool = True) -> Tensor:
    """`tigon.poly_norm` of X (..., H) with W (3,) and B (). in_place has no effect: nothing is overwritten."""
    return poly_norm(X, W, B, eps=eps)


def liger_dyt(x: Tensor, alpha: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
    """`tigon.dyt` of x (..., H) with alpha (1,), gamma and beta (H,)."""
    return dyt(x, alpha, gamma, beta)


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """`tigon.swiglu` of gate a and up b, of one shape."""
    return swiglu(a, b)


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """`tigon.geglu` of gate a and up b, of one shape, by the tanh formula."""
    return geglu(a, b)


def liger_relu_squared(x: Tensor) -> Tensor:
    """`tigon.relu2` of x, of any shape."""
    return relu2(x)


def liger_softmax(x: Tensor) -> Tensor:
    """`tigon.softmax` over the last dimension."""
    return softmax(x, -1)


def liger_sparsemax(input: Tensor, dim: int = -1) -> Tensor:
    """`tigon.sparsemax` over dimension dim."""
    return sparsemax(input, dim)


def liger_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> Pair:  # fmt: skip
    """`tigon.rope`.

    Args:
        q, k: (B, H, T, D), or (B, T, H, D) with unsqueeze_dim=2, which Liger ignores.
        cos, sin: (B, T, R), (1, T, R) or (T, R); or with a size-1 dimension for the heads, at unsqueeze_dim or first.
        rotary_dim: how many entries per head are rotated, where cos and sin hold half as many, as in GPT-OSS.
    """
    without_effect("liger_rotary_pos_emb", position_ids=(None if position_ids is None else "…", None))
    if cos.dim() == 4:
        heads = unsqueeze_dim if cos.shape[unsqueeze_dim] == 1 else 1
        cos, sin = cos.squeeze(heads), sin.squeeze(heads)
    if rotary_dim is not None and cos.shape[-1] != rotary_dim:
        if 2 * cos.shape[-1] != rotary_dim:
            raise ValueError(
                f"liger_rotary_pos_emb: rotary_dim must be the width of cos, {cos.shape[-1]}, or twice that, got "
                f"{rotary_dim}."
            )
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    return _as(q, k, rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim))


def liger_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> Pair:
    """`tigon.rope` with mrope_section: cos, sin: (3, B, T, D), of time, height and width."""
    return _as(q, k, rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, config=Rope(mrope_section=mrope_section)))


def _as(q: Tensor, k: Tensor, rotated: tuple[Tensor, Tensor] | Tensor) -> Pair:
    # rope returns the promoted dtype of q with cos, which is fp32 for fp32 angles.
    return rotated[0].to(q.dtype), rotated[1].to(k.dtype)


liger_rope = liger_rotary_pos_emb
liger_qwen2vl_mrope = liger_multimodal_rotary_pos_emb
