"""The batch_norm_relu row, without running statistics, which are written in place: see ops/test_batch_norm_relu.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ops_table.row import Bad, Case, Op
from tigon.rank.kernels.batch_norm_relu import batch_norm_relu, batch_norm_relu_reference


def _make(shape, dtype, generator, behind=0, mean=0.0):
    """shape is (C, N). behind: number of zero columns after the N columns."""
    C, N = shape
    h = F.pad((mean + torch.randn((C, N), generator=generator)).to(dtype), (0, behind))
    weight, bias = 1 + 0.5 * torch.randn(N, generator=generator), torch.randn(N, generator=generator)
    return h, weight, bias


def eager_batch_norm_relu(h, weight, bias, *, eps=1e-5):
    N = weight.shape[0]
    y = F.relu(F.batch_norm(h[:, :N].contiguous(), None, None, weight.contiguous(), bias, True, 0.1, eps))
    return F.pad(y, (0, h.shape[1] - N))


def _bad(**replaced):
    made = {"h": torch.ones(3, 8), "weight": torch.ones(4), "bias": torch.ones(4)}
    return lambda: tuple((made | replaced).values())


BATCH_NORM_RELU = Op(
    name="batch_norm_relu",
    public=batch_norm_relu,
    reference=batch_norm_relu_reference,
    eager=eager_batch_norm_relu,
    make=_make,
    cases=(
        Case("masked", (70, 13)),
        # Two rows always normalise to ±1: a large eps keeps their gradient finite.
        Case("least", (2, 1), {"eps": 0.5}, draws=64),
        Case("three rows", (3, 20), {"eps": 0.1}, {"behind": 4}, draws=8),
        Case("zeros behind", (50, 12), {}, {"behind": 4}),
        Case("several blocks, several chunks", (1000, 140), {}, {"behind": 4}),
        Case("mean beyond the deviation", (300, 24), {}, {"mean": 10.0}),
    ),
    empty=((0, 8),),
    bad=(
        Bad(_bad(h=torch.ones(3, 2, 8)), r"batch_norm_relu: h must be \(C, W\) floats, got \(3, 2, 8\)"),
        Bad(_bad(h=torch.ones(3, 8).int()), r"batch_norm_relu: h must be \(C, W\) floats, .* torch.int32"),
        Bad(_bad(weight=torch.ones(9)), r"batch_norm_relu: weight must be \(N,\) fp32 or fp64, .* 8, .*got \(9,\)"),
        Bad(_bad(weight=torch.ones(4).half()), r"batch_norm_relu: weight must be .*got \(4,\) torch.float16"),
        Bad(_bad(bias=torch.ones(8)), r"batch_norm_relu: bias must be \(4,\) torch.float32, .*got \(8,\)"),
        Bad(_bad(h=torch.ones(1, 8)), r"batch_norm_relu: h must have two rows or more in training, .*got 1"),
        Bad(_bad(), r"batch_norm_relu: running must be \(mean, variance\) .*got None", {"training": False}),
        Bad(
            _bad(),
            r"batch_norm_relu: running must be \(4,\) torch.float32, .*got \(3,\)",
            {"running": (torch.ones(4), torch.ones(3))},
        ),
    ),
    # dh needs the sums that are dweight and dbias.
    needed=(1, 2),
    launches=("batch_norm_relu_fwd", "batch_norm_relu_bwd"),
    models=(
        Case("LiRank", (65536, 3500), {}, {"behind": 4}),
        Case("8 more than a multiple of 16", (65536, 995), {}, {"behind": 5}),
        Case("odd", (256, 3501)),
        Case("narrow", (65536, 16)),
    ),
)
