"""Table of activations, shared by all of Tigon.

Used by the gated units, `gated_linear`, `gated_mlp`, `moe_mlp`, `tigon.fuse`, the layers for Hugging Face `kernels`,
the Liger-compatible names, the benchmark and the tests. To add an activation, write a tile function in
`tigon/kernels/tiles/act.py`, and add a row here and the name to `Act`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.tiles import act as tiles

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


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTS: dict[str, Activation] = {
    row.name: row
    for row in (
        Activation("silu", F.silu, tiles.silu, "g · sigmoid(g)", ("silu", "swish")),
        Activation(
            "gelu_tanh", _gelu_tanh, tiles.gelu_tanh, "gelu(g) by its tanh formula",
            ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"),
        ),
        Activation("gelu", F.gelu, tiles.gelu, "g · Φ(g), by the error function", ("gelu", "gelu_python"), slow=True),
        Activation("relu", F.relu, tiles.relu, "max(g, 0)", ("relu",)),
        Activation("relu2", _relu2, tiles.relu2, "max(g, 0)²", ("relu2",)),
        Activation("sigmoid", torch.sigmoid, tiles.sigmoid, "sigmoid(g)", ("sigmoid",)),
    )
}  # fmt: skip


def checked_act(op: str, act: str) -> str:
    """Return act; raises a ValueError for a name outside the table."""
    if act not in ACTS:
        named = next((row.name for row in ACTS.values() if act in row.aliases), None)
        meant = "" if named is None else f", which is called {named!r} here"
        raise ValueError(f"{op}: act must be one of {', '.join(map(repr, ACTS))}, got {act!r}{meant}.")
    return act
