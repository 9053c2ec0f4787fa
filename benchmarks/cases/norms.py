"""Norms, and what stands in for one: row statistics, and sums over all rows for the gradients of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cases.inputs import Draw, Inputs, Shape, expect_rows
from cases.row import (
    OVERWRITES_DY,
    Implementation,
    Op,
    liger,
    plain,
    quack,
    tigon,
    torch_own,
)

# Widths of models besides the powers of two, then row counts: one token, a ragged handful, a step, a million.
_EXTRA = ((16384, 2304), (16384, 3584), (16384, 5120), (8192, 12288), (1, 4096), (17, 4096), (4096, 4096), (10**6, 256))
# Of upstream gradients, where some of the results sum over all elements: fp16 ends at 65504.
_SMALL = 2.0**-12


# ----------------------------------------------------------------------------------------------------------- rms_norm


def eager_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As Llama writes it."""
    x32 = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * normed.to(x.dtype)


def _torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def draw_near_one(draw: Draw, n: int) -> Tensor:
    # A peer that writes dx over dy multiplies by the weight at every repeat, and must not overflow.
    return (1 + draw.normal(n, scale=0.02)).requires_grad_()


def _make_norm(*names: str, bias: bool = False, outputs: tuple[str, ...] = ("y",)) -> Callable[..., Inputs]:
    """Draws tensors of one shape by name, a weight near 1, a small bias, and upstream gradients of the outputs."""

    def make(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
        draw = Draw(device, dtype)
        arguments = {name: draw.normal(*shape).requires_grad_() for name in names}
        arguments["weight"] = draw_near_one(draw, shape[-1])
        if bias:
            arguments["bias"] = draw.normal(shape[-1], scale=0.02).requires_grad_()
        return Inputs(arguments, tuple(arguments), outputs, tuple(draw.normal(*shape) for _ in outputs))

    return make


def _make_heads(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    """Queries as a packed projection leaves them: the first two thirds of each token's q, k and v."""
    b, t, h, d = shape
    draw = Draw(device, dtype)
    packed = draw.normal(b, t, h + (h + 1) // 2, d)
    arguments = {"x": packed[:, :, :h].requires_grad_(), "weight": draw_near_one(draw, d)}
    return Inputs(arguments, ("x", "weight"), ("y",), (draw.normal(*shape),))


def _count_row_bytes(parameters: int) -> Callable[[Shape, int], tuple[int, int]]:
    """forward: x, parameters → y.  backward: dy, x, parameters → dx, their gradients. A bias is not read backward."""

    def nbytes(shape: Shape, itemsize: int) -> tuple[int, int]:
        x, n = 1, shape[-1]
        for size in shape:
            x *= size
        return (2 * x + parameters * n) * itemsize, (3 * x + (1 + parameters) * n) * itemsize

    return nbytes


def _liger_rms_norm(x: Tensor, weight: Tensor) -> tuple[Any, ...]:
    return x, weight, 1e-6, 0.0, "llama", True, None


def _load_quack_rms_norm() -> Callable[..., Any]:
    from quack import rmsnorm

    return lambda x, weight: rmsnorm(x, weight, eps=1e-6)


_RMS_NORM = {
    "tigon": Implementation(tigon("rms_norm", eps=1e-6)),
    **plain(eager_rms_norm),
    **torch_own(_torch_rms_norm, "F.rms_norm"),
    "liger": Implementation(
        liger("LigerRMSNormFunction", _liger_rms_norm),
        note=OVERWRITES_DY,
        overwrites=True,
        gpu_only=True,
    ),
    **quack(_load_quack_rms_norm),
}

# ------------------------------------------------------------------------------------------------------- add_rms_norm


def _eager_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return eager_rms_norm(total, weight), total


def _torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _torch_rms_norm(total, weight), total


def _liger_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Any, ...]:
    return x, residual, weight, 1e-6, 0.0, "llama", False


def _load_quack_add_rms_norm() -> Callable[..., Any]:
    from quack import rmsnorm

    return lambda x, residual, weight: rmsnorm(x, weight, residual=residual, eps=1e-6, prenorm=True)


# --------------------------------------------------------------------------------------------------------- layer_norm


def _eager_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, 1e-5)


def _load_quack_layer_norm() -> Callable[..., Any]:
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            w32 = weight.float()
            y: Tensor
            y, rstd, mean = layernorm_fwd(x, w32, bias.float(), 1e-5, return_rstd=True, return_mean=True)
            ctx.save_for_backward(x, w32, rstd, mean)
            ctx.dtype = weight.dtype
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            x, w32, rstd, mean = ctx.saved_tensors
            dx, dw, db = layernorm_bwd(x, w32, dy, rstd, mean)
            return dx, dw.to(ctx.dtype), db.to(ctx.dtype)

    return lambda x, weight, bias: LayerNorm.apply(x, weight, bias)


# --------------------------------------------------------------------------------------------------------- group_norm


def _eager_group_norm(x: Tensor, num_groups: int, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, num_groups, weight, bias, 1e-5)


def _make_group_norm(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    batch, channels, groups, positions = shape
    draw = Draw(device, dtype)
    arguments = {
        "x": draw.normal(batch, channels, positions).requires_grad_(),
        "num_groups": groups,
        "weight": draw_near_one(draw, channels),
        "bias": draw.normal(channels, scale=0.02).requires_grad_(),
    }
    return Inputs(arguments, ("x", "weight", "bias"), ("y",), (draw.normal(batch, channels, positions),))


# ---------------------------------------------------------------------------------------------------------------- dyt


def _eager_dyt(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return weight * torch.tanh(alpha * x) + bias


def _make_dyt(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    draw = Draw(device, dtype)
    x = draw.normal(*shape).requires_grad_()
    arguments = {
        "x": x,
        "alpha": torch.full((1,), 0.5, device=device, dtype=dtype).requires_grad_(),
        "weight": draw_near_one(draw, shape[-1]),
        "bias": draw.normal(shape[-1], scale=0.02).requires_grad_(),
    }
    # Along x in part: dalpha sums over everything, and would else be a small difference of large sums.
    dy = draw.normal(*shape).add_(x.detach()).mul_(_SMALL)
    return Inputs(arguments, ("x", "alpha", "weight", "bias"), ("y",), (dy,))


# ---------------------------------------------------------------------------------------------------------- poly_norm


def _eager_poly_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x32 = x.to(torch.promote_types(x.dtype, torch.float32))

    def norm(u: Tensor) -> Tensor:
        return u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + 1e-6)

    return (weight[0] * norm(x32**3) + weight[1] * norm(x32**2) + weight[2] * norm(x32) + bias).to(x.dtype)


def _make_poly_norm(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    draw = Draw(device, dtype)
    x = draw.normal(*shape).requires_grad_()
    weight = (draw.normal(3, scale=0.05) + 1 / 3).requires_grad_()
    arguments = {"x": x, "weight": weight, "bias": torch.ones((), device=device, dtype=dtype).requires_grad_()}
    # As for dyt: dweight and dbias are sums over everything.
    dy = draw.normal(*shape).add_(x.detach()).add_(1).mul_(_SMALL)
    return Inputs(arguments, ("x", "weight", "bias"), ("y",), (dy,))


# ----------------------------------------------------------------------------------------------------- gated_rms_norm


def _eager_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """As Qwen3-Next writes it."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (eager_rms_norm(x, weight) * F.silu(gate.to(wide))).to(x.dtype)


def _eager_mamba_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """As Mamba-2 and Nemotron-H write it."""
    wide = torch.promote_types(x.dtype, torch.float32)
    h = (x.to(wide) * F.silu(gate.to(wide))).unflatten(-1, (-1, 512))
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * h.flatten(-2).to(x.dtype)


def _load_fla() -> Callable[..., Any]:
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return lambda x, gate, weight: rms_norm_gated(x, gate, weight, None, activation="silu", eps=1e-6)


def _count_gated_bytes(s: Shape, b: int) -> tuple[int, int]:
    x = s[0] * s[1]
    return (3 * x + s[1]) * b, (5 * x + 2 * s[1]) * b


OPS = (
    Op(
        name="rms_norm",
        shapes=((32768, 4096), (16384, 8192), (8192, 16384), (262144, 128), (8192, 4096)),
        extra=_EXTRA,
        small=((256, 1024), (2048, 128)),
        make=_make_norm("x"),
        expect=expect_rows(eager_rms_norm, rowwise=("x",), summed=("weight",)),
        nbytes=_count_row_bytes(1),
        counted=("x, weight → y", "dy, x, weight → dx, dweight"),
        implementations=_RMS_NORM,
    ),
    Op(
        name="rms_norm-heads",
        shape_names=("batch", "tokens", "heads", "head width"),
        shapes=((4, 4096, 32, 128),),
        extra=((4, 4096, 32, 64), (4, 4096, 32, 96), (4, 4096, 16, 256)),
        small=((2, 64, 4, 64),),
        tiny=(2, 4, 2, 16),
        make=_make_heads,
        expect=expect_rows(eager_rms_norm, rowwise=("x",), summed=("weight",)),
        nbytes=_count_row_bytes(1),
        counted=("x, weight → y", "dy, x, weight → dx, dweight"),
        implementations=_RMS_NORM,
    ),
    Op(
        name="add_rms_norm",
        shapes=((32768, 4096), (16384, 8192)),
        extra=_EXTRA,
        make=_make_norm("x", "residual", outputs=("y", "sum")),
        expect=expect_rows(_eager_add_rms_norm, rowwise=("x", "residual"), summed=("weight",)),
        # dx is dresidual: one tensor is written for both.
        nbytes=lambda s, b: ((4 * s[0] * s[1] + s[1]) * b, (4 * s[0] * s[1] + 2 * s[1]) * b),
        counted=("x, residual, weight → y, sum", "dy, dsum, sum, weight → dx = dresidual, dweight"),
        implementations={
            "tigon": Implementation(tigon("add_rms_norm", eps=1e-6)),
            **plain(_eager_add_rms_norm),
            **torch_own(_torch_add_rms_norm, "+ and F.rms_norm"),
            "liger": Implementation(
                liger("LigerFusedAddRMSNormFunction", _liger_add_rms_norm),
                gpu_only=True,
            ),
            **quack(_load_quack_add_rms_norm),
        },
    ),
    Op(
        name="layer_norm",
        shapes=((32768, 4096), (8192, 16384)),
        extra=_EXTRA,
        make=_make_norm("x", bias=True),
        expect=expect_rows(_eager_layer_norm, rowwise=("x",), summed=("weight", "bias")),
        nbytes=_count_row_bytes(2),
        counted=("x, weight, bias → y", "dy, x, weight → dx, dweight, dbias"),
        implementations={
            "tigon": Implementation(tigon("layer_norm", eps=1e-5)),
            **plain(_eager_layer_norm),
            "liger": Implementation(
                liger("LigerLayerNormFunction", lambda x, weight, bias: (x, weight, bias, 1e-5)), gpu_only=True
            ),
            **quack(_load_quack_layer_norm, "its forward and backward kernels, given to autograd here; weight in fp32"),
        },
    ),
    Op(
        name="group_norm",
        shape_names=("batch", "channels", "groups", "positions"),
        shapes=((16, 320, 32, 4096), (16, 1280, 32, 1024)),
        extra=((1, 320, 32, 4096), (17, 96, 32, 100), (8, 512, 512, 4000)),
        small=((2, 64, 8, 256),),
        tiny=(2, 8, 4, 16),
        make=_make_group_norm,
        expect=expect_rows(_eager_group_norm, rowwise=("x",), summed=("weight", "bias")),
        nbytes=lambda s, b: (
            (2 * s[0] * s[1] * s[3] + 2 * s[1]) * b,
            (3 * s[0] * s[1] * s[3] + 3 * s[1]) * b,
        ),
        counted=("x, weight, bias → y", "dy, x, weight → dx, dweight, dbias"),
        implementations={
            "tigon": Implementation(tigon("group_norm", eps=1e-5)),
            **plain(_eager_group_norm),
            "liger": Implementation(
                liger(
                    "LigerGroupNormFunction",
                    lambda x, num_groups, weight, bias: (x, weight, bias, x.shape[1], num_groups, 1e-5),
                ),
                gpu_only=True,
            ),
        },
    ),
    Op(
        name="dyt",
        shapes=((32768, 4096),),
        extra=((8192, 16384), (17, 4096), (10**6, 256)),
        make=_make_dyt,
        expect=expect_rows(_eager_dyt, rowwise=("x",), summed=("alpha", "weight", "bias")),
        nbytes=_count_row_bytes(2),
        counted=("x, alpha, weight, bias → y", "dy, x, alpha, weight → dx, dalpha, dweight, dbias"),
        implementations={
            "tigon": Implementation(tigon("dyt")),
            **plain(_eager_dyt),
            "liger": Implementation(
                liger("LigerDyTFunction", lambda x, alpha, weight, bias: (x, alpha, weight, bias)), gpu_only=True
            ),
        },
    ),
    Op(
        name="poly_norm",
        shapes=((32768, 4096),),
        extra=((16384, 14336), (17, 4096), (10**6, 256)),
        make=_make_poly_norm,
        expect=expect_rows(_eager_poly_norm, rowwise=("x",), summed=("weight", "bias")),
        nbytes=lambda s, b: ((2 * s[0] * s[1] + 4) * b, (3 * s[0] * s[1] + 7) * b),
        counted=("x, weight, bias → y", "dy, x, weight → dx, dweight, dbias"),
        implementations={
            "tigon": Implementation(tigon("poly_norm", eps=1e-6)),
            **plain(_eager_poly_norm),
            "liger": Implementation(
                liger("LigerPolyNormFunction", lambda x, weight, bias: (x, weight, bias, 1e-6, True)),
                note=OVERWRITES_DY,
                overwrites=True,
                gpu_only=True,
            ),
        },
    ),
    Op(
        name="gated_rms_norm",
        shapes=((262144, 128),),
        extra=((8192, 4096), (17, 128), (262144, 64)),
        small=((2048, 128),),
        make=_make_norm("x", "gate"),
        expect=expect_rows(_eager_gated_rms_norm, rowwise=("x", "gate"), summed=("weight",)),
        nbytes=_count_gated_bytes,
        counted=("x, gate, weight → y", "dy, x, gate, weight → dx, dgate, dweight"),
        implementations={
            "tigon": Implementation(tigon("gated_rms_norm", eps=1e-6)),
            **plain(_eager_gated_rms_norm),
            "fla": Implementation(_load_fla, gpu_only=True, where_installed=True),
        },
    ),
    Op(
        name="gated_rms_norm-groups",
        shapes=((8192, 4096), (8192, 8192)),
        small=((256, 1024),),
        tiny=(8, 512),
        make=_make_norm("x", "gate"),
        expect=expect_rows(_eager_mamba_norm, rowwise=("x", "gate"), summed=("weight",)),
        nbytes=_count_gated_bytes,
        counted=("x, gate, weight → y", "dy, x, gate, weight → dx, dgate, dweight"),
        implementations={
            "tigon": Implementation(tigon("gated_rms_norm", eps=1e-6, norm_before_gate=False, group_size=512)),
            **plain(_eager_mamba_norm),
        },
    ),
)
