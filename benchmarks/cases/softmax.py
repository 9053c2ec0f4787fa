"""Distributions over the last dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cases.inputs import Draw, Inputs, Shape, expect_rows, make_elementwise
from cases.row import Implementation, Op, liger, plain, quack, tigon


def _eager_softmax(x: Tensor) -> Tensor:
    return F.softmax(x, dim=-1)


def _eager_sparsemax(x: Tensor) -> Tensor:
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    z = z - z.amax(-1, keepdim=True)
    ordered = z.sort(dim=-1, descending=True).values
    excess = ordered.cumsum(-1) - 1
    k = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    support = (k * ordered > excess).sum(-1, keepdim=True)
    tau = excess.gather(-1, support - 1) / support
    return (z - tau).clamp_min(0).to(x.dtype)


def _make_sparsemax(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    """Multiples of 3/32: exact in every dtype, and no sum of them is 1, so that none lies on the edge of the support.

    There the gradient jumps, and of independent draws in bf16 a few rows in a hundred would have one. Halved, so that
    no row is left with a single element, whose gradient is zero.
    """
    inputs = make_elementwise("x")(shape, dtype, device, ignored)
    with torch.no_grad():
        inputs.arguments["x"].mul_(16 / 3).round_().mul_(3 / 32)
    return inputs


def _load_quack_softmax() -> Callable[..., Any]:
    from quack import softmax

    return lambda x: softmax(x)


def _eager_outer_softmax(qkv: Tensor) -> Tensor:
    """With a sum in place of a batched product: torch.compile fuses it into the softmax."""
    q, k, v = qkv.chunk(3, -1)
    p = F.softmax(q.unsqueeze(-1) * k.unsqueeze(-2), dim=-1)
    return (p * v.unsqueeze(-2)).sum(-1)


def _make_outer_softmax(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    rows, rank = shape
    draw = Draw(device, dtype)
    qkv = draw.normal(rows, 3 * rank).requires_grad_()
    return Inputs({"qkv": qkv}, ("qkv",), ("y",), (draw.normal(rows, rank),))


OPS = tuple(
    Op(
        name=name,
        shapes=shapes,
        extra=extra,
        make=make,
        expect=expect_rows(eager, rowwise=("x",)),
        nbytes=lambda s, b: (2 * s[0] * s[1] * b, 3 * s[0] * s[1] * b),
        counted=("x → y", "dy, y → dx"),
        implementations={"tigon": Implementation(tigon(name, dim=-1)), **plain(eager), **peers},
    )
    for name, eager, make, shapes, extra, peers in (
        (
            "softmax",
            _eager_softmax,
            make_elementwise("x"),
            ((32768, 32000),),
            ((16384, 4096), (1, 32000), (17, 128256), (10**6, 256)),
            {
                "liger": Implementation(liger("LigerSoftmaxFunction", lambda x: (x,)), gpu_only=True),
                **quack(_load_quack_softmax),
            },
        ),
        (
            "sparsemax",
            _eager_sparsemax,
            _make_sparsemax,
            ((16384, 4096),),
            ((8192, 32000), (17, 4096), (10**6, 256)),
            {"liger": Implementation(liger("LigerSparsemaxFunction", lambda x: (x, -1)), gpu_only=True)},
        ),
    )
)
OPS += (
    Op(
        name="outer_softmax",
        shape_names=("rows", "rank"),
        shapes=((65536, 64),),
        extra=((65536, 32), (16384, 128), (4096, 64)),
        small=((256, 32),),
        tiny=(8, 16),
        make=_make_outer_softmax,
        expect=expect_rows(_eager_outer_softmax, rowwise=("qkv",)),
        nbytes=lambda s, b: (4 * s[0] * s[1] * b, 7 * s[0] * s[1] * b),
        counted=("q, k, v → y", "dy, q, k, v → dq, dk, dv"),
        implementations={"tigon": Implementation(tigon("outer_softmax")), **plain(_eager_outer_softmax)},
    ),
)
