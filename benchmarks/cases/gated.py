"""Activations of MLPs: elementwise products, and one with the projection that follows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cases.inputs import Draw, Inputs, Shape, expect_rows, make_elementwise
from cases.row import OVERWRITES_INPUTS, Implementation, Op, liger, plain, tigon
from tigon.ops.acts import ACTS, Act
from tigon.ops.gated_linear import gated_linear

_ROWS = ((1, 14336), (17, 14336), (10**6, 256))


def _make_eager(act: Act) -> Callable[[Tensor, Tensor], Tensor]:
    """act(gate) · up as the models write it."""
    value = ACTS[act].value
    return lambda gate, up: value(gate) * up


def _eager_relu2(x: Tensor) -> Tensor:
    return ACTS["relu2"].value(x)


def _eager_gated_residual(x: Tensor, gate: Tensor, f: Tensor) -> Tensor:
    return x + torch.sigmoid(gate) * f


def _liger_gated(function: str) -> dict[str, Implementation]:
    load = liger(function, lambda gate, up: (gate, up))
    return {"liger": Implementation(load, note=OVERWRITES_INPUTS, overwrites=True, gpu_only=True)}


# ------------------------------------------------------------------------------------------------------- gated_linear


def _eager_gated_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    return F.linear(ACTS["silu"].value(gate) * up, weight)


def _make_gated_linear(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    rows, width, out = shape
    draw = Draw(device, dtype)
    gate, up = draw.normal(rows, width).requires_grad_(), draw.normal(rows, width).requires_grad_()
    weight = draw.normal(out, width, scale=width**-0.5).requires_grad_()
    arguments = {"gate": gate, "up": up, "weight": weight}
    return Inputs(arguments, ("gate", "up", "weight"), ("y",), (draw.normal(rows, out),))


def _load_liger_gated_linear() -> Callable[..., Any]:
    product = liger("LigerSiLUMulFunction", lambda gate, up: (gate, up))()
    return lambda gate, up, weight: F.linear(product(gate=gate, up=up), weight)


def _make_products(inputs: Inputs) -> list[tuple[Callable[[], Any], ...]]:
    """Products of y, of the inner gradient and of dW by cuBLAS. gate stands in for act(gate) · up: as large."""
    (dy,) = inputs.grads or ()
    product, w = inputs.arguments["gate"].detach(), inputs.arguments["weight"].detach()
    y, scratch, dw = torch.empty_like(dy), torch.empty_like(product), torch.empty_like(w)
    return [
        (lambda: torch.mm(product, w.T, out=y),),
        (lambda: torch.mm(dy, w, out=scratch),),
        (lambda: torch.mm(dy.T, product, out=dw),),
    ]


OPS = (
    *(
        Op(
            name=name,
            shapes=((16384, 14336),),
            extra=_ROWS,
            make=make_elementwise("gate", "up"),
            expect=expect_rows(eager, rowwise=("gate", "up")),
            nbytes=lambda s, b: (3 * s[0] * s[1] * b, 5 * s[0] * s[1] * b),
            counted=("gate, up → y", "dy, gate, up → dgate, dup"),
            implementations={
                "tigon": Implementation(tigon(name)),
                **plain(eager),
                **(_liger_gated(peer) if peer else {}),
            },
        )
        for name, eager, peer in (
            ("swiglu", _make_eager("silu"), "LigerSiLUMulFunction"),
            ("geglu", _make_eager("gelu_tanh"), "LigerGELUMulFunction"),
            ("reglu", _make_eager("relu"), None),
        )
    ),
    Op(
        name="relu2",
        shapes=((16384, 14336),),
        extra=_ROWS,
        make=make_elementwise("x"),
        expect=expect_rows(_eager_relu2, rowwise=("x",)),
        nbytes=lambda s, b: (2 * s[0] * s[1] * b, 3 * s[0] * s[1] * b),
        counted=("x → y", "dy, x → dx"),
        implementations={
            "tigon": Implementation(tigon("relu2")),
            **plain(_eager_relu2),
            "liger": Implementation(liger("LigerReLUSquaredFunction", lambda x: (x,)), gpu_only=True),
        },
    ),
    Op(
        name="gated_residual",
        shapes=((16384, 4096),),
        extra=((16384, 512), *_ROWS),
        make=make_elementwise("x", "gate", "f"),
        expect=expect_rows(_eager_gated_residual, rowwise=("x", "gate", "f")),
        nbytes=lambda s, b: (4 * s[0] * s[1] * b, 5 * s[0] * s[1] * b),
        counted=("x, gate, f → y", "dy, gate, f → dgate, df; dy is dx"),
        implementations={"tigon": Implementation(tigon("gated_residual")), **plain(_eager_gated_residual)},
    ),
    Op(
        name="gated_linear",
        shape_names=("rows", "width", "out"),
        shapes=((16384, 14336, 4096),),
        extra=((17, 14336, 4096),),
        small=((256, 512, 128),),
        tiny=(8, 64, 16),
        make=_make_gated_linear,
        expect=expect_rows(_eager_gated_linear, rowwise=("gate", "up"), summed=("weight",)),
        nbytes=lambda s, b: (
            (2 * s[0] * s[1] + s[1] * s[2] + s[0] * s[2]) * b,
            (4 * s[0] * s[1] + 2 * s[1] * s[2] + s[0] * s[2]) * b,
        ),
        counted=("2·M·N·D FLOP", "4·M·N·D FLOP"),
        flops=lambda s: (2 * math.prod(s), 4 * math.prod(s)),
        floor=_make_products,
        implementations={
            "tigon": Implementation(lambda: gated_linear, note="the product is not kept"),
            **plain(_eager_gated_linear),
            "liger": Implementation(_load_liger_gated_linear, note=OVERWRITES_INPUTS, overwrites=True, gpu_only=True),
        },
    ),
)
