"""The outer_softmax row."""

from __future__ import annotations

import torch

from ops_table.row import Bad, Case, Op, Replaced, randn, sample
from tigon.rank.kernels.outer_softmax import outer_softmax, outer_softmax_reference


def _make(shape, dtype, generator, around=0.0, spread=1.0):
    """shape is (..., r). around: a mean for k and v, which changes neither A nor dq and dk."""
    x = spread * randn((*shape[:-1], 3 * shape[-1]), torch.float32, generator)
    x[..., shape[-1] :] += around
    return (x.to(dtype),)


def eager_outer_softmax(qkv, temperature=1.0, *, residual=False):
    q, k, v = qkv.chunk(3, -1)
    scores = q.unsqueeze(-1) * k.unsqueeze(-2) / temperature
    y = (scores.softmax(-1) @ v.unsqueeze(-1)).squeeze(-1)
    return y + v if residual else y


OUTER_SOFTMAX = Op(
    name="outer_softmax",
    public=outer_softmax,
    reference=outer_softmax_reference,
    eager=eager_outer_softmax,
    make=_make,
    cases=(
        Case("masked", (5, 13), {"temperature": 0.5}),
        Case("least", (3, 2), draws=64),
        Case("samples share a program", (2, 9, 16), {"residual": True}),
        Case("several steps", (3, 64)),
        Case("a sample over warps", (2, 200), {"temperature": 2.0, "residual": True}),
        Case("far from zero", (3, 33), {}, {"around": 4.0}),
        Case("one large score a row", (4, 24), {"temperature": 0.1}, {"spread": 2.0}),
    ),
    empty=((0, 8), (3, 0), (2, 0, 8)),
    bad=(
        Bad(
            lambda: (torch.ones(2, 6).int(),),
            r"outer_softmax: qkv must be \(\.\.\., 3r\) floats, got \(2, 6\) torch.int32",
        ),
        Bad(lambda: (torch.ones(2, 8),), r"outer_softmax: qkv must be \(\.\.\., 3r\), .*got \(2, 8\)"),
        Bad(lambda: (torch.ones(1, 3 * 4097),), r"outer_softmax: qkv must .* r up to 4096, got \(1, 12291\)"),
        Bad(
            lambda: (torch.ones(2, 6),),
            r"outer_softmax: temperature must be positive, got 0.0",
            {"temperature": 0.0},
        ),
    ),
    launches=("outer_softmax_fwd", "outer_softmax_bwd"),
    models=(
        Case("LiRank", (65536, 64)),
        Case("with the residual", (65536, 64), {"residual": True}),
        Case("few", (65536, 16)),
        Case("masked", (65536, 100), {"residual": True}),
        Case("over warps", (16384, 256)),
        Case("widest", (1024, 4096), {"residual": True}),
    ),
    large=(Case("samples share a program", (1000, 64)), Case("a sample over warps", (100, 200))),
    # A program reads a few hundred numbers and uses each r times.
    wide_loads=False,
    # The backward is limited to 128 registers, which spills some sums to the stack.
    spills=160,
    replaces=(Replaced("outer_softmax(qkv, temperature)", "y", {"qkv": sample(3, 12), "temperature": 0.5}),),
)
