"""Rotary-embedding rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tigon
from ops_table.norms import _GEMMA, eager_rms_norm
from ops_table.row import Bad, Case, Inputs, Op, Replaced, randn, sample
from tigon.ops.qk_norm_rope import qk_norm_rope_reference
from tigon.ops.rope import rope_reference


def _make_angles(R, T, B, dtype, generator, angles="one", interleaved=False):
    leading = {"one": (1, T), "each": (B, T), "flat": (T,), "planes": (3, B, T), "shared planes": (3, 1, T)}[angles]
    angle = 6 * torch.rand((*leading, R // 2), generator=generator)
    angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _make_qk(shape, dtype, generator, unsqueeze_dim=1):
    """shape is (T, B, q heads, k heads, D). Memory is token-major, as after the projections."""
    T, B, heads_q, heads_k, D = shape
    q, k = (randn((B, T, h, D), dtype, generator) for h in (heads_q, heads_k))
    return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 1 else (q, k)


def _make_rope(
    shape,
    dtype,
    generator,
    rotary=None,
    unsqueeze_dim=1,
    angles="one",
    angle_dtype=None,
    interleaved=False,
    alone=False,
):
    q, k = _make_qk(shape, dtype, generator, unsqueeze_dim)
    R = rotary or shape[-1]
    return q, None if alone else k, *_make_angles(R, *shape[:2], angle_dtype or dtype, generator, angles, interleaved)


_HALVES = tigon.Rope()


def rotate_half(x, interleaved=False):
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def eager_rope(q, k, cos, sin, *, unsqueeze_dim=1, config=_HALVES):
    """apply_rotary_pos_emb in transformers, partial as in GPT-NeoX, planes as in Qwen2-VL."""
    interleaved, section = config.interleaved, config.mrope_section
    if section is not None:
        sizes = [2 * n for n in section] if interleaved else section * 2
        cos, sin = (torch.cat([m[i % 3] for i, m in enumerate(a.split(sizes, dim=-1))], dim=-1) for a in (cos, sin))
    cos, sin = ((a if a.dim() == 3 else a[None]).unsqueeze(unsqueeze_dim) for a in (cos, sin))
    R = cos.shape[-1]

    def rotate(x):
        turned, rest = x[..., :R], x[..., R:]
        return torch.cat((turned * cos + rotate_half(turned, interleaved) * sin, rest), dim=-1)

    return rotate(q) if k is None else (rotate(q), rotate(k))


def _bad_rope(**replaced: Any) -> Callable[[], Inputs]:
    def inputs() -> Inputs:
        good = {"q": torch.ones(2, 4, 3, 8), "k": torch.ones(2, 2, 3, 8), "cos": torch.ones(1, 3, 8)}
        made = good | {"sin": torch.ones(1, 3, 8)} | replaced
        return made["q"], made["k"], made["cos"], made["sin"]

    return inputs


_NEIGHBOURS = {"config": tigon.Rope(interleaved=True)}
_NATIVE = {"config": tigon.Rope(arithmetic="native")}
_HEADS = {"q": sample(2, 4, 5, 8), "k": sample(2, 2, 5, 8), "cos": sample(2, 5, 8), "sin": sample(1, 2, 5, 8)[0]}
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
        Case("neighbours, partial", (5, 2, 3, 2, 20), _NEIGHBOURS, {"rotary": 12, "interleaved": True}),
        Case(
            "planes of angles", (5, 2, 3, 1, 12), {"config": tigon.Rope(mrope_section=[1, 2, 3])}, {"angles": "planes"}
        ),
        Case(
            "planes of neighbours",
            (3, 2, 3, 1, 20),
            {"config": tigon.Rope(mrope_section=[4, 0, 2], interleaved=True)},
            {"rotary": 12, "angles": "shared planes", "interleaved": True},
        ),
        Case("one tensor", (5, 2, 3, 1, 12), {}, {"alone": True}),
        Case("native arithmetic", (5, 2, 3, 2, 12), _NATIVE),
    ),
    empty=((0, 2, 3, 2, 8), (3, 0, 3, 2, 8), (3, 2, 0, 2, 8)),
    bad=(
        Bad(_bad_rope(), r"rope: unsqueeze_dim must be 1.* got 3", {"unsqueeze_dim": 3}),
        Bad(_bad_rope(q=torch.ones(2, 3, 8)), r"rope: q must have four dimensions, got shape \(2, 3, 8\)"),
        Bad(_bad_rope(k=torch.ones(2, 2, 4, 8)), r"rope: k must match q .*got \(2, 2, 4, 8\)"),
        Bad(_bad_rope(sin=torch.ones(1, 3, 6)), r"rope: cos and sin must both be .*\(1, 3, 8\) and \(1, 3, 6\)"),
        Bad(_bad_rope(cos=torch.ones(1, 3, 8, requires_grad=True)), r"rope: cos and sin must not require a gradient"),
        Bad(
            _bad_rope(),
            r"rope: cos and sin must both be \(3, 2, 3, R\) or \(3, 1, 3, R\) .* got \(1, 3, 8\)",
            {"config": tigon.Rope(mrope_section=[1, 1, 2])},
        ),
        Bad(
            _bad_rope(),
            r"rope: config.mrope_section must sum to 4, .* got \(1, 1, 1\)",
            {"config": tigon.Rope(mrope_section=[1, 1, 1])},
        ),
    ),
    launches=("rope_launch",),
    models=(
        Case("Llama-3-8B", (4096, 4, 32, 8, 128)),
        Case("Gemma-2-2B", (4096, 4, 8, 4, 256)),
        Case("Llama-3.2-1B", (4096, 4, 32, 8, 64)),
        Case("partial, Phi-3", (4096, 4, 32, 32, 96), {}, {"rotary": 48}),
        Case("fp32 angles", (4096, 4, 32, 8, 128), {}, {"angle_dtype": torch.float32}),
        Case("heads after time", (4096, 4, 32, 8, 128), {"unsqueeze_dim": 2}, {"unsqueeze_dim": 2}),
        Case("neighbours, Command R", (4096, 4, 64, 8, 128), _NEIGHBOURS, {"interleaved": True}),
        Case("neighbours, partial, GLM-4-9B", (4096, 4, 32, 2, 128), _NEIGHBOURS, {"rotary": 64, "interleaved": True}),
        Case(
            "Qwen2-VL-7B",
            (4096, 4, 28, 4, 128),
            {"config": tigon.Rope(mrope_section=[16, 24, 24])},
            {"angles": "planes"},
        ),
        Case("native arithmetic", (4096, 4, 32, 8, 128), _NATIVE),
        Case("one tensor", (4096, 4, 32, 8, 128), {}, {"alone": True}),
    ),
    fixed=(2, 3),
    large=(
        Case("heads after time", (100, 1, 32, 8, 128), {"unsqueeze_dim": 2}, {"unsqueeze_dim": 2}),
        Case("time after heads", (100, 1, 32, 8, 128)),
    ),
    replaces=(
        Replaced("rope(q, k, cos, sin)", "q, k", {**_HEADS, "unsqueeze_dim": 1}),
        Replaced(
            "rope(q, k, cos, sin, unsqueeze_dim=2)",
            "q, k",
            {
                **_HEADS,
                "k": sample(2, 4, 3, 8),
                "cos": sample(2, 4, 8),
                "sin": sample(1, 2, 4, 8)[0],
                "unsqueeze_dim": 2,
            },
        ),
        Replaced(
            "rope(q, k, cos, sin, config=tigon.Rope(mrope_section=mrope_section))",
            "q, k",
            {
                **_HEADS,
                "unsqueeze_dim": 1,
                "mrope_section": [1, 1, 2],
                "cos": sample(3, 2, 5, 8),
                "sin": sample(1, 3, 2, 5, 8)[0],
            },
            (1, 0),
        ),
    ),
)


def _make_qk_norm_rope(
    shape, dtype, generator, rotary=None, unsqueeze_dim=1, angles="one", interleaved=False, around=1.0, packed=False,
    weight_dtype=None,
):  # fmt: skip
    """shape is (T, B, q heads, k heads, D). packed: q and k are views into the same projection."""
    q, k = _make_qk(shape, dtype, generator, unsqueeze_dim)
    if packed:
        both = torch.cat((q, k, k), dim=unsqueeze_dim)
        q, k, _ = both.split([x.shape[unsqueeze_dim] for x in (q, k, k)], dim=unsqueeze_dim)
    weights = ((around + 0.5 * torch.randn(shape[-1], generator=generator)).to(weight_dtype or dtype) for _ in range(2))
    return q, k, *weights, *_make_angles(rotary or shape[-1], *shape[:2], dtype, generator, angles, interleaved)


def eager_qk_norm_rope(
    q, k, q_weight, k_weight, cos, sin, *, eps=1e-6, offset=0.0, cast="llama", unsqueeze_dim=1, config=_HALVES
):
    """The code between projections and attention in transformers' Qwen3Attention and Gemma3Attention."""
    q, k = (eager_rms_norm(x, w, eps=eps, offset=offset, cast=cast) for x, w in ((q, q_weight), (k, k_weight)))
    return eager_rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, config=config)


def _bad_qk_norm_rope(**replaced: Any) -> Callable[[], Inputs]:
    weights = {"q_weight": torch.ones(8), "k_weight": torch.ones(8)}

    def inputs() -> Inputs:
        q, k, cos, sin = _bad_rope(**{n: t for n, t in replaced.items() if n not in weights})()
        return q, k, *(replaced.get(n, w) for n, w in weights.items()), cos, sin

    return inputs


QK_NORM_ROPE = Op(
    name="qk_norm_rope",
    public=tigon.qk_norm_rope,
    reference=qk_norm_rope_reference,
    eager=eager_qk_norm_rope,
    make=_make_qk_norm_rope,
    cases=(
        Case("masked", (5, 2, 3, 2, 12)),
        # Normalising two numbers keeps little information: a large eps leaves a gradient to compare.
        Case("least", (1, 1, 1, 1, 2), {"eps": 0.5}, draws=64),
        Case("aligned", (4, 2, 8, 2, 64)),
        Case("gemma", (5, 2, 4, 2, 16), _GEMMA, {"around": 0.0, "angles": "each"}),
        Case("more tiles than programs", (5, 1, 12, 12, 256)),
        Case("partial", (5, 2, 3, 1, 20), {}, {"rotary": 8}),
        Case("neighbours, partial", (5, 2, 3, 2, 20), _NEIGHBOURS, {"rotary": 12, "interleaved": True}),
        Case("views of one projection", (5, 2, 4, 2, 16), {}, {"packed": True}),
        Case("heads after time", (5, 2, 3, 2, 12), {"unsqueeze_dim": 2}, {"unsqueeze_dim": 2, "packed": True}),
        Case("fp32 weights rounded once", (5, 2, 3, 2, 12), {"cast": "none"}, {"weight_dtype": torch.float32}),
    ),
    empty=((0, 2, 3, 2, 8), (3, 0, 3, 2, 8), (3, 2, 0, 2, 8)),
    bad=(
        Bad(_bad_qk_norm_rope(q=torch.ones(2, 3, 8)), r"qk_norm_rope: q must have four dimensions"),
        Bad(_bad_qk_norm_rope(), r"qk_norm_rope: config.arithmetic must be left out, got 'native'", _NATIVE),
        Bad(_bad_qk_norm_rope(), r"qk_norm_rope: cast must be one of .*got 'qwen'", {"cast": "qwen"}),
        Bad(_bad_qk_norm_rope(k_weight=torch.ones(6)), r"qk_norm_rope: q_weight and k_weight must .*\(8,\).* got .*6"),
        Bad(_bad_qk_norm_rope(k=torch.ones(2, 2, 3, 8).half()), r"qk_norm_rope: q and k must have one float dtype"),
    ),
    launches=("qk_norm_rope_fwd", "qk_norm_rope_bwd"),
    models=(
        Case("Qwen3-8B", (4096, 4, 32, 8, 128)),
        Case("Gemma-3-4B", (4096, 4, 8, 4, 256), _GEMMA, {"around": 0.0}),
        Case("heads of 64", (4096, 4, 16, 8, 64)),
        Case("heads of 96", (4096, 4, 32, 32, 96)),
        Case("partial, GLM-4.5", (4096, 4, 96, 8, 128), {}, {"rotary": 64}),
        Case("neighbours", (4096, 4, 32, 8, 128), _NEIGHBOURS, {"interleaved": True}),
        Case(
            "views of one projection", (4096, 4, 32, 8, 128), {"unsqueeze_dim": 2}, {"unsqueeze_dim": 2, "packed": True}
        ),
    ),
    fixed=(4, 5),
    large=(
        Case(
            "heads after time",
            (100, 1, 32, 8, 128),
            {**_GEMMA, "unsqueeze_dim": 2},
            {"unsqueeze_dim": 2, "weight_dtype": torch.float32},
        ),
        Case("time after heads", (100, 1, 32, 8, 128)),
    ),
    replaces=(
        Replaced(
            "qk_norm_rope(q, k, q_weight, k_weight, cos, sin)",
            "q, k",
            {
                **_HEADS,
                "q_weight": sample(8),
                "k_weight": sample(1, 8)[0],
                "q_norm": lambda q: tigon.rms_norm(q, sample(8)),
                "k_norm": lambda k: tigon.rms_norm(k, sample(1, 8)[0]),
            },
        ),
    ),
)
