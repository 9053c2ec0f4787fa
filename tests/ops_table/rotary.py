"""Rows of the rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tigon
from ops_table.row import Bad, Case, Inputs, Op, randn
from tigon.ops.rope import rope_reference


def _make_rope(shape, dtype, generator, rotary=None, unsqueeze_dim=1, angles="one", angle_dtype=None):
    """shape is (T, B, heads of q, heads of k, D). Memory is token-major, as the projections leave it."""
    T, B, heads_q, heads_k, D = shape
    R = rotary or D
    q, k = (randn((B, T, h, D), dtype, generator) for h in (heads_q, heads_k))
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    leading = {"one": (1, T), "each": (B, T), "flat": (T,)}[angles]
    angle = 6 * torch.rand((*leading, R // 2), generator=generator)
    cos, sin = (torch.cat((a, a), -1).to(angle_dtype or dtype) for a in (angle.cos(), angle.sin()))
    return q, k, cos, sin


def eager_rope(q, k, cos, sin, *, unsqueeze_dim=1):
    """apply_rotary_pos_emb of transformers, with GPT-NeoX's handling of a partial rotation."""
    cos, sin = ((a if a.dim() == 3 else a[None]).unsqueeze(unsqueeze_dim) for a in (cos, sin))
    R = cos.shape[-1]

    def rotate(x):
        turned, rest = x[..., :R], x[..., R:]
        half = torch.cat((-turned[..., R // 2 :], turned[..., : R // 2]), dim=-1)
        return torch.cat((turned * cos + half * sin, rest), dim=-1)

    return rotate(q), rotate(k)


def _bad_rope(**replaced: Any) -> Callable[[], Inputs]:
    def inputs() -> Inputs:
        good = {"q": torch.ones(2, 4, 3, 8), "k": torch.ones(2, 2, 3, 8), "cos": torch.ones(1, 3, 8)}
        made = good | {"sin": torch.ones(1, 3, 8)} | replaced
        return made["q"], made["k"], made["cos"], made["sin"]

    return inputs


ROPE = Op(
    name="rope",
    public=tigon.rope,
    reference=rope_reference,
    eager=eager_rope,
    make=_make_rope,
    cases=(
        Case("masked", (5, 2, 3, 2, 12)),
        Case("least", (1, 1, 1, 1, 2), draws=64),
        Case("aligned", (4, 2, 8, 2, 64)),
        Case("angles of each sequence", (5, 2, 3, 1, 16), {}, {"angles": "each"}),
        Case("flat angles", (5, 2, 3, 1, 16), {}, {"angles": "flat"}),
        Case("partial", (5, 2, 3, 1, 20), {}, {"rotary": 8}),
        Case("heads beyond one tile", (2, 1, 20, 33, 256)),
        Case("heads after time", (5, 2, 3, 2, 12), {"unsqueeze_dim": 2}, {"unsqueeze_dim": 2}),
        Case("fp32 angles", (5, 2, 3, 2, 12), {}, {"angle_dtype": torch.float32}),
    ),
    empty=((0, 2, 3, 2, 8), (3, 0, 3, 2, 8), (3, 2, 0, 2, 8)),
    bad=(
        Bad(_bad_rope(), r"rope: unsqueeze_dim must be 1.* got 3", {"unsqueeze_dim": 3}),
        Bad(_bad_rope(q=torch.ones(2, 3, 8)), r"rope: q must have four dimensions, got shape \(2, 3, 8\)"),
        Bad(_bad_rope(k=torch.ones(2, 2, 4, 8)), r"rope: k must match q .*got \(2, 2, 4, 8\)"),
        Bad(_bad_rope(sin=torch.ones(1, 3, 6)), r"rope: cos and sin must both be .*\(1, 3, 8\) and \(1, 3, 6\)"),
        Bad(_bad_rope(cos=torch.ones(1, 3, 8, requires_grad=True)), r"rope: cos and sin must not require a gradient"),
    ),
    launches=("rope_launch",),
    models=(
        Case("Llama-3-8B", (4096, 4, 32, 8, 128)),
        Case("Gemma-2-2B", (4096, 4, 8, 4, 256)),
        Case("Llama-3.2-1B", (4096, 4, 32, 8, 64)),
        Case("partial, Phi-3", (4096, 4, 32, 32, 96), {}, {"rotary": 48}),
        Case("fp32 angles", (4096, 4, 32, 8, 128), {}, {"angle_dtype": torch.float32}),
        Case("heads after time", (4096, 4, 32, 8, 128), {"unsqueeze_dim": 2}, {"unsqueeze_dim": 2}),
    ),
    fixed=(2, 3),
)
