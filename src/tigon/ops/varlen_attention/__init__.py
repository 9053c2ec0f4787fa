"""Causal attention inside documents that lie behind one another in a row: o_i = Σ_j p_ij v_j, without a dense mask.

Token i sees the tokens of the own document up to i. With sinks s, p_i = softmax over the visible scores and s, whose
value is zero.

Source: Dao 2023, https://arxiv.org/abs/2307.08691; documents in a row: Krell et al. 2021,
https://arxiv.org/abs/2107.02027; sinks: gpt-oss, https://arxiv.org/abs/2508.10925.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.kernels import use_triton
from tigon.ops.example import Example
from tigon.ops.offsets import check_offsets
from tigon.ops.prefix_attention.checks import attend_in_autocast, check_attention
from tigon.ops.varlen_attention.launches import varlen_attention_launch
from tigon.ops.varlen_attention.reference import varlen_attention_reference

__all__ = ["varlen_attention", "varlen_attention_reference"]


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention inside each document of a packed row; no token sees another document.

    Args:
        q: (N, H, D), a row per token, one document after another. D is at most 256.
        k, v: (N, G, D) in q's dtype, H a multiple of G. q, k and v may be views of a packed projection.
        offsets: (B + 1,) int32 or int64 on q's device, B ≥ 1: the start of each document and N, ascending from 0.
            Documents may be empty: padded with N, offsets keep their length from batch to batch. On a GPU the host
            never reads offsets, and a CUDA graph replays with other documents; offsets that do not ascend from 0 to N
            give NaN there, and a ValueError on the CPU or with TIGON_CHECKS=1. Layers that pass the same tensor share
            its tables of tiles. An operation in place and other memory (`offsets.data = …`) make new tables; a write
            into the memory through `.data`, or by a graph, does not.
        scale: multiplies the scores; 1/√D by default.
        window: a token at position i sees keys with positions above i - window.
        softcap: scores become softcap · tanh(scores / softcap), as in Gemma 2.
        sinks: (H,) floats, a logit per head that takes part in the softmax without a value, as in gpt-oss.
    Returns: (N, H, D) in q's dtype, or in autocast's, as torch's scaled_dot_product_attention. A document's rows have
        the same bits whatever the other documents are.
    Raises: ValueError for invalid shapes, dtypes, devices or options.

    Replaces::

        seen = torch.zeros(len(q), len(q), dtype=torch.bool)
        for start, stop in zip(offsets[:-1], offsets[1:]):
            seen[start:stop, start:stop] = True
        heads = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        o = F.scaled_dot_product_attention(*heads, attn_mask=seen.tril(), enable_gqa=True)[0].transpose(0, 1)
    """
    _check(q, k, v, offsets, scale, window, softcap, sinks)
    return attend_in_autocast(_attention, q, k, v, offsets, scale, window, softcap, sinks)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, scale: float | None, window: int | None, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    if not use_triton(q, k, v, sinks):
        return varlen_attention_reference(q, k, v, offsets, scale=scale, window=window, softcap=softcap, sinks=sinks)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return varlen_attention_launch(q, k, v, offsets, sinks, scale, softcap, window)


def _check(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, scale: float | None, window: int | None, softcap: float | None,
    sinks: Tensor | None,
) -> None:  # fmt: skip
    check_attention("varlen_attention", q, k, v, scale, softcap, window)
    N, H, _ = q.shape
    check_offsets("varlen_attention", offsets, q, N, "the rows of q")
    if sinks is not None:
        if not isinstance(sinks, Tensor) or sinks.shape != (H,) or not sinks.dtype.is_floating_point:
            given = f"{tuple(sinks.shape)} {sinks.dtype}" if isinstance(sinks, Tensor) else type(sinks).__name__
            raise ValueError(f"varlen_attention: sinks must be ({H},) floats, a logit per head of q, got {given}.")
        if sinks.device != q.device or hasattr(sinks, "device_mesh"):
            given = "a DTensor" if hasattr(sinks, "device_mesh") else f"one on {sinks.device}"
            raise ValueError(f"varlen_attention: sinks must be a plain tensor on q's device {q.device}, got {given}.")


EXAMPLES = {
    "varlen_attention": Example(
        "Attention",
        ((160, 4, 32), (160, 2, 32), (160, 2, 32)),
        lambda q, k, v: varlen_attention(q, k, v, torch.tensor([0, 64, 70, 160, 160], device=q.device)),
    ),
}
