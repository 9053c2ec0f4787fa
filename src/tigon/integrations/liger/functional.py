"""The functions of liger_kernel.transformers.functional. Norms give x's dtype, and nothing is overwritten."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.integrations.liger import absent
from tigon.integrations.liger.cross_entropy import (
    CrossEntropyOutput,
    liger_cross_entropy,
    liger_fused_linear_cross_entropy,
)
from tigon.integrations.liger.divergences import (
    liger_fused_linear_jsd,
    liger_fused_linear_kl_div,
    liger_jsd,
    liger_kl_div,
    liger_tvd,
)
from tigon.integrations.liger.rotary import liger_qwen2vl_mrope, liger_rope
from tigon.integrations.liger.scaled_cross_entropy import liger_fused_linear_scaled_cross_entropy_tp
from tigon.ops.add_rms_norm import add_rms_norm
from tigon.ops.dyt import dyt
from tigon.ops.gated import geglu, swiglu
from tigon.ops.group_norm import group_norm
from tigon.ops.layer_norm import layer_norm
from tigon.ops.poly_norm import poly_norm
from tigon.ops.relu2 import relu2
from tigon.ops.rms_norm import rms_norm
from tigon.ops.softmax import softmax
from tigon.ops.sparsemax import sparsemax

__all__ = [
    "CrossEntropyOutput",
    "liger_cross_entropy",
    "liger_dyt",
    "liger_fused_add_rms_norm",
    "liger_fused_linear_cross_entropy",
    "liger_fused_linear_jsd",
    "liger_fused_linear_kl_div",
    "liger_fused_linear_scaled_cross_entropy_tp",
    "liger_geglu",
    "liger_group_norm",
    "liger_jsd",
    "liger_kl_div",
    "liger_layer_norm",
    "liger_modulated_rms_norm",
    "liger_multi_token_attention",
    "liger_poly_norm",
    "liger_qwen2vl_mrope",
    "liger_relu_squared",
    "liger_rms_norm",
    "liger_rope",
    "liger_softmax",
    "liger_sparsemax",
    "liger_swiglu",
    "liger_tvd",
]


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


def liger_modulated_rms_norm(
    X: Tensor, W: Tensor | None, scale: Tensor, shift: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0,
    casting_mode: str = "llama", in_place: bool = True,
) -> Tensor:  # fmt: skip
    """(1 + scale) · `tigon.rms_norm` + shift; the modulation is plain PyTorch, in fp32, rounded once.

    Args:
        X: (..., H). scale, shift: (H,), (B, H) of X (B, T, H), or one row for each of X's.
        in_place: has no effect; nothing is overwritten.
    """
    H = X.shape[-1]
    groups = scale.numel() // max(1, H)
    if scale.shape[-1:] != (H,) or (groups and X.numel() % (groups * H)):
        raise ValueError(
            f"liger_modulated_rms_norm: scale must hold rows of {H} whose number divides X's, {tuple(X.shape)}, got "
            f"{tuple(scale.shape)}."
        )
    if shift is not None and shift.shape != scale.shape:
        raise ValueError(
            f"liger_modulated_rms_norm: shift must have scale's shape {tuple(scale.shape)}, got {tuple(shift.shape)}."
        )
    acc = torch.promote_types(X.dtype, torch.float32)
    y = rms_norm(X, W, eps=eps, offset=offset, cast=casting_mode).to(acc).reshape(groups, -1, H)  # type: ignore[arg-type]
    y = y * (1 + scale.to(acc).reshape(groups, 1, H))
    if shift is not None:
        y = y + shift.to(acc).reshape(groups, 1, H)
    return y.to(X.dtype).reshape(X.shape)


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


def liger_multi_token_attention(
    scores: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0, dilation: int = 1,
    groups: int = 1, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """A convolution over the probabilities of causal attention; future positions are 0 before and after it.

    Args:
        scores: (B, C, L, L). weight: (C', C / groups, K, K). bias: (C',) or None. The result must be (L, L).
        sparse: `tigon.sparsemax` in place of `tigon.softmax`.

    Source: Golovneva et al. 2025, https://arxiv.org/abs/2504.00927
    """
    if sparse:
        L = scores.shape[-1]
        future = torch.ones(L, L, dtype=torch.bool, device=scores.device).triu(1)
        p = sparsemax(scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(future, -1e9))
        p = p.to(scores.dtype)
    else:
        p = softmax(scores, -1, causal=True)
    return F.conv2d(p, weight, bias, stride, padding, dilation, groups).tril()
