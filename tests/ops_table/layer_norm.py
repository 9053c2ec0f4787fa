"""Rows of the norms that subtract a mean."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import tigon
from ops_table.row import Bad, Case, Op
from tigon.ops.layer_norm import layer_norm_reference


def _affine(n, dtype, generator, weight, bias):
    w = 1 + 0.5 * torch.randn(n, generator=generator) if weight else None
    b = torch.randn(n, generator=generator) if bias else None
    return tuple(t if t is None else t.to(dtype) for t in (w, b))


def _make_layer_norm(shape, dtype, generator, weight=True, bias=True, weight_dtype=None, mean=0.0):
    x = (mean + torch.randn(shape, generator=generator)).to(dtype)
    return x, *_affine(shape[-1], weight_dtype or dtype, generator, weight, bias)


def eager_layer_norm(x, weight=None, bias=None, *, eps=1e-5):
    if all(t is None or t.dtype == x.dtype for t in (weight, bias)):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    wide = (None if t is None else t.float() for t in (weight, bias))
    return F.layer_norm(x.float(), x.shape[-1:], *wide, eps).to(x.dtype)


LAYER_NORM = Op(
    name="layer_norm",
    public=tigon.layer_norm,
    reference=layer_norm_reference,
    eager=eager_layer_norm,
    make=_make_layer_norm,
    cases=(
        Case("masked", (3, 5, 100)),
        # One number is its own mean, two are ±1 whatever they hold: a large eps keeps their gradient a number.
        Case("least", (1, 2), {"eps": 0.5}, draws=64),
        Case("rows share tiles", (3, 50, 16)),
        Case("more tiles than programs", (36, 1024)),
        Case("rows from the cache", (3, 8200)),
        Case("beyond one tile", (2, 16390)),
        Case("no bias", (7, 200), {"eps": 1e-3}, {"bias": False}),
        Case("no weight", (7, 200), {}, {"weight": False}),
        Case("neither", (7, 200), {}, {"weight": False, "bias": False}),
        Case("fp32 weight", (7, 200), {}, {"weight_dtype": torch.float32}),
        Case("mean beyond the deviation", (4, 300), {}, {"mean": 10.0}),
    ),
    empty=((0, 8), (3, 0, 8)),
    bad=(
        Bad(lambda: (torch.ones(2, 4), torch.ones(5)), r"layer_norm: weight must have shape \(4,\).*got \(5,\)"),
        Bad(
            lambda: (torch.ones(2, 4), torch.ones(4), torch.ones(1, 4)),
            r"layer_norm: bias must have shape \(4,\).*got \(1, 4\)",
        ),
        Bad(lambda: (torch.ones(2, 4, dtype=torch.int64),), r"layer_norm: x must have a float dtype, got torch.int64"),
        Bad(lambda: (torch.tensor(1.0),), r"layer_norm: x must have at least one dimension"),
    ),
    launches=("layer_norm_fwd", "layer_norm_bwd"),
    models=(
        Case("GPT-NeoX-20B", (32768, 6144)),
        Case("OPT-6.7B", (32768, 4096)),
        Case("Command R+", (16384, 8192)),
        Case("as wide as they come", (8192, 16384)),
        Case("as wide, no bias", (8192, 16384), {}, {"bias": False}),
        Case("GPT-3", (8192, 12288)),
        Case("ViT heads", (8, 1024, 16, 128)),
        Case("fp32 weight", (32768, 4096), {}, {"weight_dtype": torch.float32}),
        Case("no bias", (32768, 4096), {}, {"bias": False}),
        Case("neither", (32768, 4096), {}, {"weight": False, "bias": False}),
        Case("beyond one tile", (4096, 32768)),
    ),
)
