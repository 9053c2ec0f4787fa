"""Rows for norms that subtract a mean."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import tigon
from ops_table.row import ROW, Bad, Case, Op, Replaced, randn, sample
from tigon.ops.group_norm import group_norm_reference
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
        # One number equals its mean, two always normalise to ±1: a large eps keeps their gradient finite.
        Case("least", (1, 2), {"eps": 0.5}, draws=64),
        Case("rows share tiles", (3, 50, 16)),
        Case("more tiles than programs", (36, 1024)),
        Case("rows from the cache", (3, 8200)),
        Case("rows from the cache, in one part", (3, 13000)),
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
    spills=16,  # four registers, on sm_100, for the widest single-tile row, in the backward
    models=(
        Case("GPT-NeoX-20B", (32768, 6144)),
        Case("MPT-30B", (16384, 7168)),
        Case("OPT-6.7B", (32768, 4096)),
        Case("Command R+", (16384, 8192)),
        Case("as wide as they come", (8192, 16384)),
        Case("as wide, no bias", (8192, 16384), {}, {"bias": False}),
        Case("GPT-3", (8192, 12288)),
        Case("Falcon", (16384, 4544)),
        Case("Llama-2-13B", (16384, 5120)),
        Case("ViT heads", (8, 1024, 16, 128)),
        Case("fp32 weight", (32768, 4096), {}, {"weight_dtype": torch.float32}),
        Case("no bias", (32768, 4096), {}, {"bias": False}),
        Case("neither", (32768, 4096), {}, {"weight": False, "bias": False}),
        Case("beyond one tile", (4096, 32768)),
    ),
    large=(
        Case("a row a tile", (1000, 4096), {}, {"weight_dtype": torch.float32}),
        Case("rows share tiles", (10000, 100)),
        Case("rows from the cache", (200, 12000)),
        Case("beyond one tile", (100, 20000)),
    ),
    replaces=(Replaced("layer_norm(x, weight, bias, eps=eps)", "y", ROW),),
)


def _make_group_norm(shape, dtype, generator, groups=2, weight=True, bias=True, weight_dtype=None):
    return randn(shape, dtype, generator), groups, *_affine(shape[1], weight_dtype or dtype, generator, weight, bias)


def eager_group_norm(x, num_groups, weight=None, bias=None, *, eps=1e-5):
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)  # torch 2.13's backward fails on a bias without a weight
    if all(t is None or t.dtype == x.dtype for t in (weight, bias)):
        return F.group_norm(x, num_groups, weight, bias, eps)
    wide = (None if t is None else t.float() for t in (weight, bias))
    return F.group_norm(x.float(), num_groups, *wide, eps).to(x.dtype)


GROUP_NORM = Op(
    name="group_norm",
    public=tigon.group_norm,
    reference=group_norm_reference,
    eager=eager_group_norm,
    make=_make_group_norm,
    cases=(
        Case("masked", (3, 6, 5, 7)),
        Case("least", (1, 1, 2), {"eps": 0.5}, {"groups": 1}, draws=64),
        Case("no space", (5, 32), {"eps": 1e-3}, {"groups": 4}),
        Case("several tiles of channels", (2, 12, 3000), {}, {"groups": 1}),
        Case("several tiles of space", (2, 2, 17000), {}, {"groups": 1}),
        Case("few slabs cut by channels", (1, 24, 1500), {}, {"groups": 1}),
        Case("few slabs cut by space", (1, 2, 33000), {}, {"groups": 1}),
        Case("no bias", (2, 6, 40), {}, {"bias": False, "groups": 3}),
        Case("no weight", (2, 6, 40), {}, {"weight": False, "groups": 3}),
        Case("neither", (1, 4, 9000), {}, {"weight": False, "bias": False, "groups": 1}),
        Case("fp32 weight", (2, 6, 40), {}, {"weight_dtype": torch.float32}),
    ),
    empty=((0, 4, 8),),  # not an empty space, for which eager's dW is NaN
    bad=(
        Bad(lambda: (torch.ones(4), 2), r"group_norm: x must have at least two dimensions.*got shape \(4,\)"),
        Bad(lambda: (torch.ones(2, 6), 4), r"group_norm: num_groups must divide the 6 channels of x, got 4"),
        Bad(lambda: (torch.ones(2, 6), 0), r"group_norm: num_groups must divide the 6 channels of x, got 0"),
        Bad(
            lambda: (torch.ones(2, 6, 3), 2, torch.ones(3)),
            r"group_norm: weight must have shape \(6,\).*got \(3,\)",
        ),
        Bad(
            lambda: (torch.ones(2, 6, 3), 2, None, torch.ones(6, 1)),
            r"group_norm: bias must have shape \(6,\).*got \(6, 1\)",
        ),
        Bad(lambda: (torch.ones(2, 4, dtype=torch.int64), 2), r"group_norm: x must have a float dtype.*torch.int64"),
    ),
    launches=("group_norm_fwd", "group_norm_bwd"),
    wide_loads=False,  # x and dy are wide; weight and bias, a number per channel, occur three times in a pipelined loop
    models=(
        Case("Stable Diffusion", (8, 320, 64, 64), {}, {"groups": 32}),
        Case("sequence", (32, 512, 4096), {}, {"groups": 32}),
        Case("its middle block", (8, 1280, 8, 8), {}, {"groups": 32}),
        Case("few slabs, its decoder", (1, 128, 1024, 1024), {}, {"groups": 32}),
        Case("one group", (4, 320, 64, 64), {}, {"groups": 1}),
        Case("neither", (8, 320, 64, 64), {}, {"groups": 32, "weight": False, "bias": False}),
    ),
    roundings=8,  # a few numbers, each a sum over a channel: eager's error is luck
    large=(
        Case("a slab a program", (35, 64, 1000), {}, {"groups": 4, "weight_dtype": torch.float32}),
        Case("no space", (1000, 4096), {}, {"groups": 4}),
    ),
    replaces=(
        Replaced(
            "group_norm(x, num_groups, weight, bias, eps=eps)", "y", {**ROW, "x": sample(2, 8, 3), "num_groups": 4}
        ),
    ),
)
