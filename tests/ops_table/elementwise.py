"""Rows for dynamic tanh and the polynomial activation."""

from __future__ import annotations

import torch

import tigon
from ops_table.row import ROW, Bad, Case, Op, Replaced, randn, sample
from tigon.ops.dyt import dyt_reference
from tigon.ops.poly_norm import poly_norm_reference


def _make_dyt(shape, dtype, generator, weight=True, bias=True, alpha_shape=(1,), parameter_dtype=None):
    def parameter(around):
        return (around + 0.5 * torch.randn(shape[-1], generator=generator)).to(parameter_dtype or dtype)

    x = 2 * randn(shape, dtype, generator)  # reaches into the flat ends of tanh
    alpha = (0.7 + 0.1 * torch.randn(alpha_shape, generator=generator)).to(parameter_dtype or dtype)
    return x, alpha, parameter(1.0) if weight else None, parameter(0.0) if bias else None


def eager_dyt(x, alpha, weight=None, bias=None):
    y = torch.tanh(alpha * x)
    y = y if weight is None else weight * y
    return (y if bias is None else y + bias).to(x.dtype)


DYT = Op(
    name="dyt",
    public=tigon.dyt,
    reference=dyt_reference,
    eager=eager_dyt,
    make=_make_dyt,
    cases=(
        Case("masked", (3, 5, 100), draws=4),
        Case("least", (1, 1), draws=64),
        Case("rows share tiles", (70, 16), draws=4),
        Case("several blocks, more tiles than programs", (20, 1100), draws=4),
        Case("no weight", (7, 200), {}, {"weight": False, "alpha_shape": ()}, draws=4),
        Case("no bias", (7, 200), {}, {"bias": False}, draws=4),
        Case("alpha alone", (7, 200), {}, {"weight": False, "bias": False}, draws=4),
        Case("fp32 parameters", (7, 200), {}, {"parameter_dtype": torch.float32}, draws=4),
    ),
    empty=((0, 8), (2, 0)),
    bad=(
        Bad(lambda: (torch.ones(2, 4), torch.ones(2)), r"dyt: alpha must have one element, got shape \(2,\)"),
        Bad(
            lambda: (torch.ones(2, 4), torch.ones(1), torch.ones(5)), r"dyt: weight must have shape \(4,\).*got \(5,\)"
        ),
        Bad(
            lambda: (torch.ones(2, 4), torch.ones(1), None, torch.ones(1)),
            r"dyt: bias must have shape \(4,\).*got \(1,\)",
        ),
        Bad(lambda: (torch.ones(2, 4).long(), torch.ones(1)), r"dyt: x must be \(..., N\) floats, got .*torch.int64"),
        Bad(lambda: (torch.tensor(1.0), torch.ones(1)), r"dyt: x must be \(..., N\) floats, got \(\) torch.float32"),
    ),
    launches=("dyt_fwd", "dyt_bwd"),
    models=(
        Case("Llama-3-8B", (32768, 4096)),
        Case("Llama-3-70B", (16384, 8192)),
        Case("ViT-L", (50432, 1024)),
        Case("narrow", (262144, 96)),
        Case("few rows", (128, 8192)),
        Case("alpha alone", (32768, 4096), {}, {"weight": False, "bias": False}),
        Case("fp32 parameters", (32768, 4096), {}, {"parameter_dtype": torch.float32}),
    ),
    large=(
        Case("several blocks", (1000, 4096), {}, {"parameter_dtype": torch.float32}),
        Case("rows share tiles", (10000, 100)),
    ),
    replaces=(Replaced("dyt(x, alpha, weight, bias)", "y", {**ROW, "alpha": sample(1)}),),
)


def _make_poly_norm(shape, dtype, generator, bias_shape=(1,), parameter_dtype=None):
    x = randn(shape, dtype, generator)
    weight, bias = (torch.randn(s, generator=generator).to(parameter_dtype or dtype) for s in ((3,), bias_shape))
    return x, weight, bias


def eager_poly_norm(x, weight, bias, *, eps=1e-6):
    def norm(u):
        return u / torch.sqrt(u.pow(2).mean(-1, keepdim=True) + eps)

    return (weight[0] * norm(x**3) + weight[1] * norm(x**2) + weight[2] * norm(x) + bias).to(x.dtype)


POLY_NORM = Op(
    name="poly_norm",
    public=tigon.poly_norm,
    reference=poly_norm_reference,
    eager=eager_poly_norm,
    make=_make_poly_norm,
    cases=(
        Case("masked", (3, 5, 100), draws=4),
        # A single element always normalises to ±1, and the gradient cancels: a large eps keeps the gradient finite.
        Case("least", (1, 1), {"eps": 0.5}, draws=64),
        Case("rows share tiles", (70, 16), draws=4),
        Case("more tiles than programs", (70, 200), draws=4),
        Case("beyond one tile", (2, 16390), draws=4),
        Case("fp32 parameters", (7, 200), {"eps": 1e-3}, {"parameter_dtype": torch.float32, "bias_shape": ()}, draws=4),
    ),
    empty=((0, 8), (2, 0)),
    bad=(
        Bad(
            lambda: (torch.ones(2, 4), torch.ones(4), torch.ones(1)),
            r"poly_norm: weight must have shape \(3,\), got \(4,\)",
        ),
        Bad(
            lambda: (torch.ones(2, 4), torch.ones(3), torch.ones(4)),
            r"poly_norm: bias must have one element, got shape \(4,\)",
        ),
        Bad(
            lambda: (torch.ones(2, 4).long(), torch.ones(3), torch.ones(1)),
            r"poly_norm: x must be \(..., N\) floats, got .*torch.int64",
        ),
    ),
    launches=("poly_norm_fwd", "poly_norm_bwd"),
    # Parameter gradients are four numbers, each a sum over all elements: eager's error is luck.
    roundings=8,
    models=(
        Case("Llama-3-8B", (32768, 4096)),
        Case("16384x8192", (16384, 8192)),
        Case("Llama-3-8B MLP", (16384, 14336)),
        Case("narrow", (262144, 96)),
        Case("beyond one tile", (4096, 32768)),
        Case("fp32 parameters", (32768, 4096), {}, {"parameter_dtype": torch.float32}),
    ),
    large=(
        Case("a row a tile", (1000, 4096), {}, {"parameter_dtype": torch.float32}),
        Case("rows share tiles", (10000, 100)),
        Case("beyond one tile", (100, 20000)),
    ),
    replaces=(
        Replaced(
            "poly_norm(x, weight, bias)",
            "y",
            {"x": sample(3, 8), "weight": sample(3), "bias": sample(1), "eps": 1e-6},
        ),
    ),
)
