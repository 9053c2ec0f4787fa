"""Rotary embeddings, alone and behind the norms of queries and keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cases.inputs import Draw, Inputs, Shape, expect_rows
from cases.norms import draw_near_one, eager_rms_norm
from cases.row import (
    OVERWRITES_DY,
    OVERWRITES_INPUTS,
    Implementation,
    Op,
    liger,
    liger_ops,
    plain,
    quack,
    tigon,
)

_NAMES = ("batch", "tokens", "query heads", "key heads", "head width")
_LLAMA = (4, 4096, 32, 8, 128)
_WIDTHS = ((4, 4096, 32, 8, 64), (4, 4096, 32, 32, 96), (4, 4096, 8, 4, 256), (1, 17, 32, 8, 128))


def _compute_angles(t: int, d: int, device: torch.device) -> Tensor:
    inv_freq = 10000.0 ** (-torch.arange(0, d, 2, device=device, dtype=torch.float32) / d)
    return torch.outer(torch.arange(t, device=device, dtype=torch.float32), inv_freq)


def _make(layout: Callable[[Tensor, int], Tensor], weights: bool = False) -> Callable[..., Inputs]:
    """q, k, cos and sin; `layout` lays the angles of the D/2 pairs, (T, D/2), out over the D dimensions."""

    def make(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
        b, t, hq, hk, d = shape
        draw = Draw(device, dtype)

        def heads(h: int) -> Tensor:  # as the projection leaves them: (B, T, H, D) in memory, seen as (B, H, T, D)
            return draw.normal(b, t, h, d).transpose(1, 2)

        angles = layout(_compute_angles(t, d, device), b)
        arguments = {"q": heads(hq).requires_grad_(), "k": heads(hk).requires_grad_()}
        if weights:
            arguments |= {"q_weight": draw_near_one(draw, d), "k_weight": draw_near_one(draw, d)}
        wrt = tuple(arguments)
        arguments |= {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
        return Inputs(arguments, wrt, ("q_out", "k_out"), (heads(hq), heads(hk)))

    return make


def _repeat_halves(angles: Tensor, batch: int) -> Tensor:
    return angles.repeat(1, 2)[None]


def _repeat_neighbours(angles: Tensor, batch: int) -> Tensor:
    return angles.repeat_interleave(2, dim=-1)[None]


def _repeat_planes(angles: Tensor, batch: int) -> Tensor:
    """(3, B, T, D): time, height and width advance at different paces, as in a picture."""
    return torch.stack(
        [(angles * pace).repeat(batch, 1, 2).view(batch, -1, 2 * angles.shape[-1]) for pace in (1.0, 0.5, 0.25)]
    )


def _split_sections(head_width: int) -> list[int]:
    """Qwen2-VL's 16, 24, 24 of 64 pairs."""
    pairs = head_width // 2
    return [pairs // 4, pairs * 3 // 8, pairs - pairs // 4 - pairs * 3 // 8]


# -------------------------------------------------------------------------------------------------------------- eager


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _eager_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def _eager_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate_every_two(x: Tensor) -> Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    return q * cos + rotate_every_two(q) * sin, k * cos + rotate_every_two(k) * sin


def _eager_mrope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    sections = _split_sections(q.shape[-1]) * 2
    cos, sin = (torch.cat([m[i % 3] for i, m in enumerate(a.split(sections, dim=-1))], dim=-1) for a in (cos, sin))
    return _eager_rope(q, k, cos, sin)


def _eager_qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    return _eager_rope(eager_rms_norm(q, q_weight), eager_rms_norm(k, k_weight), cos, sin)


def _torch_qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    q, k = (F.rms_norm(x, w.shape, w, 1e-6) for x, w in ((q, q_weight), (k, k_weight)))
    return _eager_rope(q, k, cos, sin)


# -------------------------------------------------------------------------------------------------------------- peers


def _load_tigon_interleaved() -> Callable[..., Any]:
    from tigon import Rope, rope

    return functools.partial(rope, config=Rope(interleaved=True))


def _load_tigon_mrope() -> Callable[..., Any]:
    from tigon import Rope, rope

    planes = functools.cache(lambda width: Rope(mrope_section=_split_sections(width)))
    return lambda q, k, cos, sin: rope(q, k, cos, sin, config=planes(q.shape[-1]))


def _load_liger_qk_norm_rope() -> Callable[..., Any]:
    ops = liger_ops()

    def run(
        q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k = (
            ops.LigerRMSNormFunction.apply(x.transpose(1, 2), w, 1e-6, 0.0, "llama", True, None).transpose(1, 2)
            for x, w in ((q, q_weight), (k, k_weight))
        )
        rotated: tuple[Tensor, Tensor] = ops.LigerRopeFunction.apply(q, k, cos, sin)
        return rotated

    return run


def _load_quack_rope(interleaved: bool) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        from quack.rotary import apply_rotary_emb

        def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
            pairs = slice(None, None, 2) if interleaved else slice(cos.shape[-1] // 2)
            cos, sin = cos[0, :, pairs], sin[0, :, pairs]
            return tuple(apply_rotary_emb(x.transpose(1, 2), cos, sin, interleaved).transpose(1, 2) for x in (q, k))

        return run

    return load


def _count_bytes(s: Shape, itemsize: int) -> int:
    return s[0] * s[1] * (s[2] + s[3]) * s[4] * itemsize


_ROWWISE = ("q", "k")

OPS = (
    Op(
        name="rope",
        shape_names=_NAMES,
        shapes=(_LLAMA,),
        extra=_WIDTHS,
        small=((2, 128, 4, 2, 64),),
        tiny=(2, 4, 2, 1, 16),
        make=_make(_repeat_halves),
        expect=expect_rows(_eager_rope, rowwise=_ROWWISE),
        nbytes=lambda s, b: (2 * _count_bytes(s, b) + 2 * s[1] * s[4] * b,) * 2,
        counted=("q, k, cos, sin → q, k", "dq, dk, cos, sin → dq, dk"),
        implementations={
            "tigon": Implementation(tigon("rope")),
            **plain(_eager_rope),
            "liger": Implementation(
                liger("LigerRopeFunction", lambda q, k, cos, sin: (q, k, cos, sin)),
                note=OVERWRITES_INPUTS,
                overwrites=True,
                gpu_only=True,
            ),
            **quack(_load_quack_rope(False), "q and k one after the other"),
        },
    ),
    Op(
        name="rope-interleaved",
        shape_names=_NAMES,
        shapes=(_LLAMA,),
        small=((2, 128, 4, 2, 64),),
        tiny=(2, 4, 2, 1, 16),
        make=_make(_repeat_neighbours),
        expect=expect_rows(_eager_interleaved, rowwise=_ROWWISE),
        nbytes=lambda s, b: (2 * _count_bytes(s, b) + 2 * s[1] * s[4] * b,) * 2,
        counted=("q, k, cos, sin → q, k", "dq, dk, cos, sin → dq, dk"),
        implementations={
            "tigon": Implementation(_load_tigon_interleaved),
            **plain(_eager_interleaved),
            **quack(_load_quack_rope(True), "q and k one after the other"),
        },
    ),
    Op(
        name="rope-mrope",
        shape_names=_NAMES,
        shapes=((4, 4096, 28, 4, 128),),
        small=((2, 128, 4, 2, 64),),
        tiny=(2, 4, 2, 1, 16),
        make=_make(_repeat_planes),
        expect=expect_rows(_eager_mrope, rowwise=_ROWWISE, second=("cos", "sin")),
        # Of the three planes only the section that turns a pair is read.
        nbytes=lambda s, b: (2 * _count_bytes(s, b) + 2 * s[0] * s[1] * s[4] * b,) * 2,
        counted=("q, k, a third of cos and sin → q, k", "dq, dk, a third of cos and sin → dq, dk"),
        implementations={
            "tigon": Implementation(_load_tigon_mrope),
            **plain(_eager_mrope),
            "liger": Implementation(
                liger(
                    "LigerQwen2VLMRopeFunction",
                    lambda q, k, cos, sin: (q, k, cos, sin, _split_sections(q.shape[-1])),
                ),
                note=OVERWRITES_INPUTS,
                overwrites=True,
                gpu_only=True,
            ),
        },
    ),
    Op(
        name="qk_norm_rope",
        shape_names=_NAMES,
        shapes=(_LLAMA,),
        extra=_WIDTHS,
        small=((2, 128, 4, 2, 64),),
        tiny=(2, 4, 2, 1, 16),
        make=_make(_repeat_halves, weights=True),
        expect=expect_rows(_eager_qk_norm_rope, rowwise=_ROWWISE, summed=("q_weight", "k_weight")),
        nbytes=lambda s, b: (
            2 * _count_bytes(s, b) + 2 * (s[1] + 1) * s[4] * b,
            3 * _count_bytes(s, b) + 2 * (s[1] + 2) * s[4] * b,
        ),
        counted=("q, k, weights, cos, sin → q, k", "dq, dk, q, k, weights, cos, sin → dq, dk, dweights"),
        implementations={
            "tigon": Implementation(tigon("qk_norm_rope", eps=1e-6)),
            **plain(_eager_qk_norm_rope),
            "torch": Implementation(lambda: _torch_qk_norm_rope, note="F.rms_norm and eager rotation"),
            "liger": Implementation(
                _load_liger_qk_norm_rope,
                note=f"RMSNorm twice, then RoPE; {OVERWRITES_DY}",
                overwrites=True,
                gpu_only=True,
            ),
        },
    ),
)
