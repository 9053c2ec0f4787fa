"""The short convolution before a state-space or delta-rule layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cases.inputs import Draw, Inputs, Shape, expect_rows
from cases.row import Implementation, Op, plain, tigon

TAPS = 4


def _make(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    draw, channels = Draw(device, dtype), shape[-1]
    arguments = {
        "x": draw.normal(*shape).requires_grad_(),
        "weight": draw.normal(channels, TAPS, scale=0.5).requires_grad_(),
    }
    return Inputs(arguments, tuple(arguments), ("y",), (draw.normal(*shape),))


def _eager(x: Tensor, weight: Tensor) -> Tensor:
    """As transformers' torch code for Qwen3-Next and Mamba-2."""
    padded = F.pad(x.transpose(1, 2), (TAPS - 1, 0))
    return F.silu(F.conv1d(padded, weight.unsqueeze(1), groups=x.shape[2])).transpose(1, 2)


def _load_package() -> Callable[..., Any]:
    from causal_conv1d import causal_conv1d_fn

    return lambda x, weight: causal_conv1d_fn(x.transpose(1, 2), weight, activation="silu").transpose(1, 2)


def _count_bytes(s: Shape, b: int) -> tuple[int, int]:
    x, weight = s[0] * s[1] * s[2], s[2] * TAPS
    return (2 * x + weight) * b, (3 * x + 2 * weight) * b


OPS = (
    Op(
        name="causal_conv1d",
        shape_names=("batch", "tokens", "channels"),
        shapes=((1, 8192, 8192), (4, 2048, 8192)),
        extra=((4, 4096, 5376), (1, 65536, 4096), (1, 17, 8192)),
        small=((2, 128, 256),),
        tiny=(2, 8, 32),
        make=_make,
        expect=expect_rows(_eager, rowwise=("x",), summed=("weight",)),
        nbytes=_count_bytes,
        counted=("x, weight → y", "dy, x, weight → dx, dweight"),
        implementations={
            "tigon": Implementation(tigon("causal_conv1d", activation="silu")),
            **plain(_eager),
            "causal-conv1d": Implementation(_load_package, gpu_only=True, where_installed=True),
        },
    ),
)
