"""Causal attention for several continuations of a shared prefix: o_i = Σ_j p_ij v_j, p_i = softmax over visible tokens.

Token j in suffix c of request r sees prefix r and suffix c up to position j; a prefix token sees the prefix up to the
token's own position. Keys and values for a prefix are stored once, however many suffixes read them.

Source: Cascade inference, Ye et al. 2024, https://flashinfer.ai/2024/02/02/cascade-inference.html; Hydragen, Juravsky
et al. 2024, https://arxiv.org/abs/2402.05099; candidates ranked jointly: LiGR, https://arxiv.org/abs/2502.03417.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tigon.kernels import use_triton
from tigon.ops.example import Example
from tigon.ops.prefix_attention.checks import WIDEST, attend_in_autocast, check_attention
from tigon.ops.prefix_attention.launches import _prefix_attention, choose_tables
from tigon.ops.prefix_attention.layout import PrefixLayout
from tigon.ops.prefix_attention.reference import prefix_attention_reference

__all__ = ["WIDEST", "PrefixLayout", "prefix_attention", "prefix_attention_reference"]


def prefix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PrefixLayout,
    *,
    across: Literal["none", "suffixes"] = "none",
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention over prefixes and their suffixes, without copying the prefix.

    Args:
        q: (N, H, D), a row per token: the rows of all prefixes, then the rows of all suffixes, in `layout`'s order.
            D is at most 256.
        k, v: (N, G, D) in q's dtype, H a multiple of G. q, k and v may be views of a packed projection.
        layout: a `tigon.PrefixLayout` on q's device.
        across: "none": a suffix sees the prefix and itself, as if the suffix were alone. "suffixes": a suffix also sees
            all tokens in the request's other suffixes, for candidates ranked jointly.
        scale: multiplies the scores; 1/√D by default.
        softcap: scores become softcap · tanh(scores / softcap), as in Gemma 2.
        window: a token at position i sees keys with positions above i - window. A suffix continues the prefix's
            positions.
    Returns: (N, H, D) in q's dtype, or in autocast's, as torch's scaled_dot_product_attention.
    Raises: ValueError for invalid shapes, dtypes or options, and for a layout with another row count or device.

    Replaces::

        seen = torch.zeros(len(q), len(q), dtype=torch.bool)
        p, s = 0, sum(prefix_lengths)
        for prefix, suffixes in zip(prefix_lengths, suffix_lengths):
            seen[p : p + prefix, p : p + prefix] = True
            for suffix in suffixes:
                seen[s : s + suffix, p : p + prefix] = True
                seen[s : s + suffix, s : s + suffix] = True
                s += suffix
            p += prefix
        heads = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        o = F.scaled_dot_product_attention(*heads, attn_mask=seen.tril(), enable_gqa=True)[0].transpose(0, 1)
    """
    _check(q, k, v, layout, across, scale, softcap, window)
    return attend_in_autocast(_attention, q, k, v, layout, across, scale, softcap, window)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, layout: PrefixLayout, across: str, scale: float | None, softcap: float | None,
    window: int | None,
) -> Tensor:  # fmt: skip
    if not use_triton(q, k, v):
        return prefix_attention_reference(q, k, v, layout, across=across, scale=scale, softcap=softcap, window=window)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keep = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    short = layout.short(q.shape[1] // k.shape[1])
    tables = choose_tables(layout, q, k, across == "suffixes", softcap is not None, keep)
    options = layout.prefix_rows, layout.singles, across == "suffixes", short, scale, softcap, window
    return _prefix_attention(q, k, v, layout._first, layout._stop, *tables, *options)


def _check(
    q: Tensor, k: Tensor, v: Tensor, layout: PrefixLayout, across: str, scale: float | None, softcap: float | None,
    window: int | None,
) -> None:  # fmt: skip
    check_attention("prefix_attention", q, k, v, scale, softcap, window)
    if not isinstance(layout, PrefixLayout):
        raise ValueError(f"prefix_attention: layout must be a tigon.PrefixLayout, got {type(layout).__name__}.")
    if layout.rows != q.shape[0]:
        raise ValueError(
            f"prefix_attention: layout must count the rows of q, {q.shape[0]}, got one of {layout.rows} rows."
        )
    if layout.device != q.device:
        raise ValueError(
            f"prefix_attention: layout must lie on q's device {q.device}, got {layout.device}: make it with device=…, "
            "or call layout.to(…)."
        )
    if across not in ("none", "suffixes"):
        raise ValueError(f"prefix_attention: across must be 'none' or 'suffixes', got {across!r}.")


EXAMPLES = {
    "prefix_attention": Example(
        "Attention",
        ((160, 4, 32), (160, 2, 32), (160, 2, 32)),
        lambda q, k, v: prefix_attention(q, k, v, PrefixLayout([64, 32], [[16] * 3, [8] * 2], device=q.device)),
    ),
}
