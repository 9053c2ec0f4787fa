"""Table of activations, shared by all of Tigon.

Used by the gated units, `gated_linear`, `gated_mlp`, `moe_mlp`, `tigon.fuse`, the layers for Hugging Face `kernels`,
the Liger-compatible names, the benchmark and the tests. An activation is a function of a tile, a row and a name in
`Act`, in this file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import jit, tl

Act = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "sigmoid"]


@dataclass(frozen=True)
class Activation:
    """An MLP activation.

    name: the value for `act=`. value: the activation in torch, the specification. tile: Triton function from an fp32
    tile g to (act(g), act'(g)). formula: for display. aliases: names in transformers' configurations.
    slow: the arithmetic takes so long that a thread gets twice the elements, for independent work while waiting.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    tile: Any
    formula: str
    aliases: tuple[str, ...] = ()
    slow: bool = False


# On an fp32 tile: each returns (act(g), act'(g)). If a kernel needs only the value, the compiler removes the
# derivative's arithmetic.


@jit
def silu(g):
    """g · sigmoid(g)."""
    # From exp(-|g|): 1 - s loses all digits where s is near 1, and the factor g magnifies the error.
    e = tl.exp(-tl.abs(g))
    r = 1.0 / (1.0 + e)
    s = tl.where(g >= 0, r, e * r)
    ds = e * r * r
    return g * s, s + g * ds


@jit
def gelu_tanh(g):
    """0.5 g (1 + tanh(√(2/π) (g + 0.044715 g³)))."""
    # 0.5 · (1 + tanh(z / 2)) is sigmoid(z): one exponential, no cancellation for negative g.
    # z is twice tanh's argument: 1.5957… = 2 · √(2/π), 0.0713… = 1.5957… · 0.044715, and 0.2140… = 3 · 0.0713… (dz/dg).
    square = g * g
    z = g * (1.5957691216057308 + 0.07135481282970877 * square)
    dz = 1.5957691216057308 + 0.2140644384891263 * square
    e = tl.exp(-tl.abs(z))
    r = 1.0 / (1.0 + e)
    s = tl.where(z >= 0, r, e * r)
    ds = e * r * r * dz
    return g * s, s + g * ds


@jit
def gelu(g):
    """g Φ(g), with the standard normal Φ."""
    s = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
    ds = 0.3989422804014327 * tl.exp(-0.5 * g * g)
    return g * s, s + g * ds


@jit
def relu(g):
    """max(g, 0); the derivative at 0 is 0, as in torch."""
    # A comparison: tl.maximum would turn NaN into 0.
    return tl.where(g <= 0, 0.0, g), tl.where(g <= 0, 0.0, 1.0)


@jit
def relu2(g):
    """max(g, 0)²."""
    r = tl.where(g <= 0, 0.0, g)
    return r * r, 2.0 * r


@jit
def sigmoid(g):
    """1 / (1 + exp(-g)), and its slope from exp(-|g|): 1 - s would lose all digits for s near 1."""
    e = tl.exp(-tl.abs(g))
    r = 1.0 / (1.0 + e)
    return tl.where(g >= 0, r, e * r), e * r * r


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTS: dict[str, Activation] = {
    row.name: row
    for row in (
        Activation("silu", F.silu, silu, "g · sigmoid(g)", ("silu", "swish")),
        Activation(
            "gelu_tanh", _gelu_tanh, gelu_tanh, "gelu(g) by its tanh formula",
            ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"),
        ),
        Activation("gelu", F.gelu, gelu, "g · Φ(g), by the error function", ("gelu", "gelu_python"), slow=True),
        Activation("relu", F.relu, relu, "max(g, 0)", ("relu",)),
        Activation("relu2", _relu2, relu2, "max(g, 0)²", ("relu2",)),
        Activation("sigmoid", torch.sigmoid, sigmoid, "sigmoid(g)", ("sigmoid",)),
    )
}  # fmt: skip


def checked_act(op: str, act: str) -> str:
    """Return act; raises a ValueError for a name outside the table."""
    if act not in ACTS:
        named = next((row.name for row in ACTS.values() if act in row.aliases), None)
        meant = "" if named is None else f", which is called {named!r} here"
        raise ValueError(f"{op}: act must be one of {', '.join(map(repr, ACTS))}, got {act!r}{meant}.")
    return act
