"""The one table of activations. A row here is an activation everywhere.

Read by the gated units, `gated_linear`, `gated_mlp`, `moe_mlp`, what `tigon.fuse` recognises and runs, the layers for
Hugging Face `kernels`, Liger's names, the benchmark and the tests. To add an activation, write its tile function beside
the others in `tigon/kernels/tiles/act.py`, add a row here and its name to `Act`.
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
    """An activation of an MLP.

    name: what `act=` takes. value: the activation in torch, which is its specification. tile: a Triton function of a
    tile g in fp32 → (act(g), act'(g)). formula: for people. aliases: what configurations of transformers call it.
    slow: so long an arithmetic that a thread takes twice the elements, to have independent work while it waits.
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
    """The name of an activation; a ValueError for one that is not in the table."""
    if act not in ACTS:
        named = next((row.name for row in ACTS.values() if act in row.aliases), None)
        meant = "" if named is None else f", which is called {named!r} here"
        raise ValueError(f"{op}: act must be one of {', '.join(map(repr, ACTS))}, got {act!r}{meant}.")
    return act
