"""What an expert computes of z, the product of its tokens and its first weight."""

from __future__ import annotations

from typing import NamedTuple


class Options(NamedTuple):
    """The keyword arguments of `moe_mlp`, which says what they mean; in the order in which launches take them."""

    act: str = "silu"
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
