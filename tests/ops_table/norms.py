"""Norm rows."""

from __future__ import annotations

import torch

import tigon
from ops_table.row import ROW, Bad, Case, Op, Replaced, randn, sample
from tigon.ops.add_rms_norm import add_rms_norm_reference
from tigon.ops.gated_rms_norm import gated_rms_norm_reference
from tigon.ops.l2_norm import l2_norm_reference
from tigon.ops.rms_norm import rms_norm_reference


def _make_rms_norm(shape, dtype, generator, weight=True, weight_dtype=None, around=1.0, view=None):
    """view: "heads" for (B, T, H, D), the first third of a packed projection's heads; "transposed" for the same view as
    (B, H, T, D), the layout for attention."""
    if view is None:
        x = randn(shape, dtype, generator)
    else:
        B, T, H, D = shape
        x = randn((B, T, 3 * H, D), dtype, generator)[:, :, :H]
        x = x.transpose(1, 2) if view == "transposed" else x
    w = around + 0.5 * torch.randn(shape[-1], generator=generator)
    return x, w.to(weight_dtype or dtype) if weight else None


def eager_rms_norm(x, weight=None, *, eps=None, offset=0.0, cast="llama"):
    """LlamaRMSNorm, GemmaRMSNorm and the form that rounds once, as in transformers."""
    y = x.float() if x.dtype != torch.float64 else x
    eps = torch.finfo(y.dtype).eps if eps is None else eps
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if cast == "llama":
        y = y.to(x.dtype)
        return y if weight is None else (weight + offset if offset else weight) * y
    dtype = x.dtype if cast == "gemma" or weight is None else torch.promote_types(x.dtype, weight.dtype)
    return (y if weight is None else y * (offset + weight.to(y.dtype))).to(dtype)


_GEMMA = {"cast": "gemma", "offset": 1.0}
RMS_NORM = Op(
    name="rms_norm",
    public=tigon.rms_norm,
    reference=rms_norm_reference,
    eager=eager_rms_norm,
    make=_make_rms_norm,
    cases=(
        Case("masked", (3, 5, 100)),
        # A single element always normalises to ±1, and the gradient cancels: a large eps keeps the gradient finite.
        Case("least", (1, 1), {"eps": 0.5}, draws=64),
        Case("aligned", (4, 128), draws=4),
        Case("rows share tiles", (3, 50, 16)),
        Case("more tiles than programs", (36, 1024)),
        Case("too wide to stay in registers", (2, 8200)),
        Case("beyond one tile", (2, 16390)),
        Case("gemma", (7, 200), _GEMMA, {"around": 0.0}),
        Case("gemma beyond one tile", (2, 16400), _GEMMA, {"around": 0.0}),
        Case("round once", (7, 200), {"cast": "none", "eps": 1e-3}),
        Case("no weight", (7, 200), {}, {"weight": False}),
        Case("fp32 weight", (7, 200), {}, {"weight_dtype": torch.float32}),
        Case("fp32 weight rounded once", (7, 200), {"cast": "none"}, {"weight_dtype": torch.float32}),
        Case("heads of a packed projection", (2, 5, 3, 24), {}, {"view": "heads"}),
        Case("heads before tokens", (2, 5, 3, 24), {}, {"view": "transposed"}),
    ),
    empty=((0, 8), (2, 0), (3, 0, 8)),
    bad=(
        Bad(lambda: (torch.ones(2, 4), torch.ones(5)), r"rms_norm: weight must have shape \(4,\).*got \(5,\)"),
        Bad(lambda: (torch.ones(2, 4, dtype=torch.int64),), r"rms_norm: x must have a float dtype, got torch.int64"),
        Bad(lambda: (torch.tensor(1.0),), r"rms_norm: x must have at least one dimension"),
        Bad(lambda: (torch.ones(2, 4),), r"rms_norm: cast must be one of .*got 'lama'", {"cast": "lama"}),
    ),
    launches=("rms_norm_fwd", "rms_norm_bwd"),
    models=(
        Case("Llama-3-8B", (32768, 4096)),
        Case("Llama-3-70B", (16384, 8192)),
        Case("Llama-3-405B", (8192, 16384)),
        Case("Gemma-2-2B", (16384, 2304), _GEMMA),
        Case("Qwen3 heads", (8, 1024, 32, 128)),
        Case("heads of a packed projection", (8, 1024, 32, 128), {}, {"view": "transposed"}),
        Case("fp32 weight", (32768, 4096), {}, {"weight_dtype": torch.float32}),
        Case("no weight", (32768, 4096), {}, {"weight": False}),
        Case("beyond one tile", (4096, 32768)),
    ),
    large=(
        Case("a row a tile", (1000, 4096), _GEMMA, {"weight_dtype": torch.float32}),
        Case("rows share tiles", (10000, 100)),
        Case("beyond one tile", (100, 20000)),
    ),
    replaces=(Replaced("rms_norm(x, weight, eps=eps)", "y", ROW),),
)


def _make_add_rms_norm(shape, dtype, generator, residual_dtype=None, **inputs):
    x, w = _make_rms_norm(shape, dtype, generator, **inputs)
    return x, randn(tuple(x.shape), residual_dtype or dtype, generator), w


def eager_add_rms_norm(x, residual, weight=None, **options):
    """A sublayer's end and the next sublayer's start, as in transformers' decoder layers."""
    residual = residual + x
    return eager_rms_norm(residual, weight, **options), residual


ADD_RMS_NORM = Op(
    name="add_rms_norm",
    public=tigon.add_rms_norm,
    reference=add_rms_norm_reference,
    eager=eager_add_rms_norm,
    make=_make_add_rms_norm,
    cases=(
        Case("masked", (3, 5, 100)),
        Case("least", (1, 1), {"eps": 0.5}, draws=64),
        Case("rows share tiles", (3, 50, 16)),
        Case("too wide to stay in registers", (2, 8200)),
        Case("beyond one tile", (2, 16390)),
        Case("gemma", (7, 200), _GEMMA, {"around": 0.0}),
        Case("no weight", (7, 200), {}, {"weight": False}),
        Case("fp32 residual", (7, 200), {"cast": "none"}, {"residual_dtype": torch.float32}),
        Case("heads before tokens", (2, 5, 3, 24), {}, {"view": "transposed"}),
    ),
    empty=((0, 8), (2, 0)),
    bad=(
        Bad(
            lambda: (torch.ones(2, 4), torch.ones(2, 4), torch.ones(5)),
            r"add_rms_norm: weight must have shape \(4,\).*got \(5,\)",
        ),
        Bad(
            lambda: (torch.ones(2, 4), torch.ones(4), torch.ones(4)),
            r"add_rms_norm: residual must have x's shape \(2, 4\).*got \(4,\)",
        ),
        Bad(lambda: (torch.ones(2, 4),) * 2, r"add_rms_norm: cast must be one of .*got 'lama'", {"cast": "lama"}),
    ),
    launches=("add_rms_norm_fwd", "rms_norm_bwd"),
    spills=16,  # four registers, on sm_90, for the widest single-tile row, in the backward
    models=(
        Case("Llama-3-8B", (32768, 4096)),
        Case("Llama-3-70B", (16384, 8192)),
        Case("Llama-3-405B", (8192, 16384)),
        Case("Gemma-2-2B", (16384, 2304), _GEMMA),
        Case("fp32 residual", (32768, 4096), {"cast": "none"}, {"residual_dtype": torch.float32}),
        Case("beyond one tile", (4096, 32768)),
    ),
    large=(
        Case("a row a tile", (1000, 4096), _GEMMA, {"weight_dtype": torch.float32}),
        Case("rows share tiles", (10000, 100)),
        Case("beyond one tile", (100, 20000)),
    ),
    replaces=(Replaced("add_rms_norm(x, residual, weight)", "y, residual", ROW),),
)


def _make_gated_rms_norm(shape, dtype, generator, gate=True, gate_dtype=None, **inputs):
    x, w = _make_rms_norm(shape, dtype, generator, **inputs)
    return x, randn(tuple(x.shape), gate_dtype or dtype, generator) if gate else None, w


def eager_gated_rms_norm(
    x, gate, weight=None, *, eps=None, offset=0.0, cast="llama", act="silu", norm_before_gate=True, group_size=None
):
    """Qwen3NextRMSNormGated, KimiLinearRMSNormGated, MambaRMSNormGated and, without a gate, Qwen4ExpTextRMSNorm, as in
    transformers."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm_before_gate = norm_before_gate or gate is None
    a = 1.0 if gate is None else getattr(torch.nn.functional, act)(gate.to(wide))
    h = x.to(wide) if norm_before_gate else x.to(wide) * a
    h = h if group_size is None else h.unflatten(-1, (-1, group_size))
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + (torch.finfo(wide).eps if eps is None else eps))
    h = h.reshape(x.shape)
    if cast == "llama":
        h = h.to(x.dtype)
        h = h if weight is None else weight * h
    elif weight is not None:
        h = (weight.to(wide) + offset) * h
    if norm_before_gate and gate is not None:
        return (h * a).to(x.dtype)
    if cast == "llama":
        return h
    return h.to(x.dtype if weight is None or cast == "gemma" else torch.promote_types(x.dtype, weight.dtype))


def _bad_gate(*arguments, **options):
    return {"inputs": lambda: arguments, "options": options}


_X = torch.ones(2, 8)
_GATED = {**ROW, "gate": sample(8, 3).t(), "F": torch.nn.functional, "n": 4}
_MAMBA = {"norm_before_gate": False, "group_size": 24}
GATED_RMS_NORM = Op(
    name="gated_rms_norm",
    public=tigon.gated_rms_norm,
    reference=gated_rms_norm_reference,
    eager=eager_gated_rms_norm,
    make=_make_gated_rms_norm,
    cases=(
        Case("masked", (3, 5, 100), draws=2),
        Case("least", (1, 1), {"eps": 0.5}, draws=16),
        Case("sigmoid rounded once", (2, 5, 3, 24), {"act": "sigmoid", "cast": "gemma"}, {"view": "heads"}),
        Case("gate first in groups", (5, 72), _MAMBA, {"weight_dtype": torch.float32}, draws=2),
        Case("norm first in groups", (9, 48), {"group_size": 24, "cast": "none"}, {"gate_dtype": torch.float32}),
        Case("groups without a gate", (5, 72), {**_GEMMA, "group_size": 24}, {"gate": False, "around": 0.0}),
        Case("more tiles than programs", (150, 256)),
        Case("beyond one tile", (2, 8200), {"norm_before_gate": False}),
        Case("no weight", (7, 40), {}, {"weight": False}),
    ),
    empty=((0, 8), (2, 0), (3, 0, 8)),
    bad=(
        Bad(
            message=r"gated_rms_norm: x must be \(\.\.\., N\) floats, got \(2,\) torch.int32",
            **_bad_gate(_X[0, :2].int(), _X),
        ),
        Bad(message=r"gate must be floats of x's shape \(2, 8\) on \S+, got \(2, 4\)", **_bad_gate(_X, _X[:, :4])),
        Bad(message=r"weight must be \(8,\) floats, .*, got \(2, 8\)", **_bad_gate(_X, _X, _X)),
        Bad(message=r"cast must be one of .*got 'lama'", **_bad_gate(_X, _X, cast="lama")),
        Bad(message=r"act must be one of .*got 'swish', which is called 'silu' here", **_bad_gate(_X, _X, act="swish")),
        Bad(message=r"group_size must divide 8, .*, got 3", **_bad_gate(_X, _X, group_size=3)),
    ),
    launches=("gated_rms_norm_fwd", "gated_rms_norm_bwd", "rms_norm_fwd", "rms_norm_bwd"),  # without a gate
    spills=96,  # for the widest group, in the backward
    models=(
        Case("Qwen3-Next heads", (8192 * 32, 128)),
        Case("Nemotron-H groups", (8192, 8192), {"norm_before_gate": False, "group_size": 1024}),
        Case("Bamba", (8192, 8192), {"norm_before_gate": False}),
        Case("Kimi Linear heads", (8192 * 32, 128), {"act": "sigmoid", "cast": "gemma"}),
        Case("fp32 weight", (8192, 4096), {}, {"weight_dtype": torch.float32}),
    ),
    large=(
        Case("a row a tile", (1000, 4096), {"norm_before_gate": False}, {"weight_dtype": torch.float32}),
        Case("rows share tiles", (10000, 100)),
    ),
    replaces=(
        Replaced("gated_rms_norm(x, gate, weight, eps=eps)", "y", _GATED),
        Replaced("gated_rms_norm(x, gate, weight, eps=eps, norm_before_gate=False, group_size=n)", "y", _GATED, (1,)),
    ),
)


def _eager_l2_norm(x, *, eps=1e-6):
    """l2norm, as in transformers' gated delta nets."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


L2_NORM = Op(
    name="l2_norm",
    public=tigon.l2_norm,
    reference=l2_norm_reference,
    eager=_eager_l2_norm,
    make=lambda *arguments, **inputs: _make_rms_norm(*arguments, weight=False, **inputs)[:1],
    cases=(
        Case("masked", (3, 5, 100)),
        Case("least", (1, 1), {"eps": 0.5}, draws=16),
        Case("beyond one tile", (2, 16390)),
    ),
    empty=((0, 8), (2, 0)),
    bad=(Bad(lambda: (torch.ones(2).int(),), r"l2_norm: x must be \(\.\.\., N\) floats, got \(2,\) torch.int32"),),
    launches=("rms_norm_fwd", "rms_norm_bwd"),
    models=(Case("Qwen3-Next heads", (8, 1024, 16, 128)),),
    large=(Case("rows share tiles", (10000, 100)),),
    replaces=(Replaced("l2_norm(x, eps=eps)", "y", ROW),),
)
