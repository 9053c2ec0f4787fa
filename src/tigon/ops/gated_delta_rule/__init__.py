"""Linear attention with a memory that is corrected, token by token: the gated delta rule.

    S ← exp(g) S,   S ← S + k βᵗ (v − Sᵀ k)ᵀ,   o = scale · Sᵀ q

A token's key reads what the decayed state S (K, V) holds for it, and the state moves towards the token's value by beta.

Source: Yang et al. 2024, https://arxiv.org/abs/2412.06464; by chunks: Yang et al. 2024, https://arxiv.org/abs/2406.06484.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tigon.kernels import check_plain, use_triton
from tigon.ops.example import Example
from tigon.ops.gated_delta_rule.launches import gated_delta_rule_launch
from tigon.ops.gated_delta_rule.reference import gated_delta_rule_reference, recurrent_gated_delta_rule
from tigon.ops.offsets import check_documents

__all__ = ["gated_delta_rule", "gated_delta_rule_reference", "recurrent_gated_delta_rule"]

# Largest head dimensions that fit the kernels' tiles.
WIDEST = 256


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    normalize: bool = False,
    initial_state: Tensor | None = None,
    offsets: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The gated delta rule of Qwen3-Next and its successors, over sequences or packed documents.

    Args:
        q, k: (B, T, G, K), any float dtype. K is at most 256.
        v: (B, T, H, V) in q's dtype, H a multiple of G: consecutive heads share a query and a key. V is at most 256.
        g: (B, T, H) floats, the logarithm of the state's decay, at most 0.
        beta: (B, T, H) floats, how far the state moves towards a token's value, from 0 to 1 as a rule.
        scale: multiplies q; 1/√K by default.
        normalize: divide q and k by their l2 norms first, t · rsqrt(Σ t² + 1e-6).
        initial_state: (B, H, K, V) floats, the state before the first token; zeros by default.
        offsets: (D + 1,) int32 or int64 on q's device, for B = 1: the start of each of D documents and T, ascending
            from 0, as in varlen_attention. Each document begins with its own state; states are (D, H, K, V).
        return_state: also return the states after the last tokens.
    Returns: o (B, T, H, V) in v's dtype, or (o, state): state is fp32, or fp64 for fp64. A document's rows have the
        same bits whatever the other documents are. Autocast changes nothing.
    Raises: ValueError for invalid shapes, dtypes, devices or options.

    Replaces::

        q, k = (t.repeat_interleave(v.shape[2] // t.shape[2], 2) for t in (q, k))
        state = torch.zeros(*v[:, 0].shape[:2], k.shape[-1], v.shape[-1])
        o = torch.empty_like(v)
        for t in range(v.shape[1]):
            state = state * g[:, t, :, None, None].exp()
            change = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
            state = state + k[:, t].unsqueeze(-1) * change.unsqueeze(-2)
            o[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], state) * k.shape[-1] ** -0.5
    """
    _check(q, k, v, g, beta, scale, initial_state, offsets)
    if not use_triton(q, k, v, g, beta, initial_state):
        return gated_delta_rule_reference(
            q, k, v, g, beta, scale=scale, normalize=normalize, initial_state=initial_state, offsets=offsets,
            return_state=return_state,
        )  # fmt: skip
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, state = gated_delta_rule_launch(
        q, k, v, g, beta, initial_state, offsets, scale, bool(normalize), bool(return_state)
    )  # fmt: skip
    return (o, state) if return_state else o


def _check(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None, initial_state: Tensor | None,
    offsets: Tensor | None,
) -> None:  # fmt: skip
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
    check_plain("gated_delta_rule", **given)
    for name, t in given.items():
        if t is not None and (t.device != q.device or not t.dtype.is_floating_point):
            raise ValueError(f"gated_delta_rule: {name} must be floats on {q.device}, got {t.dtype} on {t.device}.")
    if q.dim() != 4 or not 1 <= q.shape[3] <= WIDEST or not q.shape[2]:
        raise ValueError(f"gated_delta_rule: q must be (B, T, G, K) with K from 1 to {WIDEST}, got {tuple(q.shape)}.")
    if k.shape != q.shape:
        raise ValueError(f"gated_delta_rule: k must have q's shape {tuple(q.shape)}, got {tuple(k.shape)}.")
    B, T, G, K = q.shape
    if v.dim() != 4 or v.shape[:2] != (B, T) or not v.shape[2] or v.shape[2] % G or not 1 <= v.shape[3] <= WIDEST:
        raise ValueError(
            f"gated_delta_rule: v must be (B, T, H, V) beside q {tuple(q.shape)}, H a multiple of G and V from 1 to "
            f"{WIDEST}, got {tuple(v.shape)}."
        )
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise ValueError(f"gated_delta_rule: {name} must have q's dtype {q.dtype}, got {t.dtype}.")
    H, V = v.shape[2:]
    for name, t in (("g", g), ("beta", beta)):
        if t.shape != (B, T, H):
            raise ValueError(f"gated_delta_rule: {name} must be {(B, T, H)}, a number per head, got {tuple(t.shape)}.")
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"gated_delta_rule: scale must be positive, got {scale}.")
    check_documents("gated_delta_rule", "q", q, offsets, initial_state, (H, K, V))


EXAMPLES = {
    "gated_delta_rule": Example(
        "Linear attention",
        ((2, 96, 2, 32), (2, 96, 2, 32), (2, 96, 4, 32), (2, 96, 4)),
        lambda q, k, v, beta: gated_delta_rule(
            q, k, v, -torch.nn.functional.softplus(beta), beta.sigmoid(), normalize=True
        ),
    ),
}
