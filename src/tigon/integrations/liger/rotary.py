"""Liger's rotary functions over tigon.rope. Results have the dtypes of q and k, and the inputs stay as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.integrations.liger.options import without_effect
from tigon.ops.rope import NEIGHBOURS, Rope, rope

Pair = tuple[Tensor, Tensor]


def liger_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> Pair:  # fmt: skip
    """`tigon.rope`.

    Args:
        q, k: (B, H, T, D), or (B, T, H, D) with unsqueeze_dim=2, which Liger ignores.
        cos, sin: (B, T, R), (1, T, R) or (T, R); or with a dimension of one for the heads, at unsqueeze_dim or first.
        rotary_dim: how many entries of a head are rotated, where cos and sin hold half as many, as in GPT-OSS.
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


def liger_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> Pair:  # fmt: skip
    """As `liger_rotary_pos_emb`."""
    return liger_rotary_pos_emb(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim)


def liger_rotary_pos_emb_gpt_oss(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """As `liger_rotary_pos_emb`, of cos and sin that are half as wide as a head."""
    return liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=q.shape[-1])


def liger_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """q, k: (T, H, D). cos, sin: (T, D)."""
    rotated = rope(q.unsqueeze(0), k.unsqueeze(0), cos, sin, unsqueeze_dim=2)
    return _as(q, k, (rotated[0].squeeze(0), rotated[1].squeeze(0)))


def liger_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> Pair:
    """`tigon.rope` with mrope_section: cos, sin: (3, B, T, D), of time, height and width."""
    return _as(q, k, rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, config=Rope(mrope_section=mrope_section)))


def liger_qwen2vl_mrope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> Pair:
    """As `liger_multimodal_rotary_pos_emb`."""
    return liger_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim)


def liger_llama4_text_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Pair:
    """Neighbours as complex numbers, times freqs_cis.

    Args:
        xq, xk: (B, T, H, D).
        freqs_cis: (B, T, D / 2) or (T, D / 2), complex; a real one has an imaginary part of zero.
    """
    if freqs_cis.dim() != 2 and freqs_cis.numel() == xq.shape[1] * freqs_cis.shape[-1]:
        freqs_cis = freqs_cis.reshape(xq.shape[1], -1)  # the vision tower's has dimensions of one
    imaginary = freqs_cis.imag if freqs_cis.is_complex() else torch.zeros_like(freqs_cis)
    real = freqs_cis.real if freqs_cis.is_complex() else freqs_cis
    cos, sin = (part.repeat_interleave(2, dim=-1) for part in (real, imaginary))
    return _as(xq, xk, rope(xq, xk, cos, sin, unsqueeze_dim=2, config=NEIGHBOURS))


def liger_llama4_vision_rotary_pos_emb(query: Tensor, key: Tensor, freqs_ci: Tensor) -> Pair:
    """As `liger_llama4_text_rotary_pos_emb`, of freqs_ci (T, D / 2) with any dimensions of one."""
    return liger_llama4_text_rotary_pos_emb(query, key, freqs_ci)


def _as(q: Tensor, k: Tensor, rotated: tuple[Tensor, Tensor] | Tensor) -> Pair:
    # rope gives the promoted dtype of q with cos, which is fp32 where the model keeps its angles so.
    return rotated[0].to(q.dtype), rotated[1].to(k.dtype)
